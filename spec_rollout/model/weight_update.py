"""Weights of an engine's policy: their version, in-place updates of all or none, unnoticed changes."""

import copy
from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aedit.weights import WeightWatch, agree, gather, sharded

_Kind = tuple[torch.Size, torch.dtype, torch.device]


class PolicyWeights:
    """Parameters and persistent buffers of `model`, and the version that they are.

    A target holds one: it calls `check` before it generates and `update` for new weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.version = 0
        self._kinds = {name: _kind(tensor) for name, tensor in model.state_dict().items()}
        self._watch = WeightWatch(model)
        self._unfinished: int | None = None

    def check(self, *, thorough: bool = False) -> None:
        """Raise RuntimeError if the weights are not those of `version`.

        Args:
            thorough: Compare elements of all tensors; see `WeightWatch.changed`.
        """
        if self._unfinished is not None:
            raise RuntimeError(
                f"the update to version {self._unfinished} of the weights failed on the way: call "
                "update_weights again with all of them"
            )
        if name := self._watch.changed(thorough=thorough):
            raise RuntimeError(
                f"{name} has changed, and the weights are still called version {self.version}: call "
                "engine.update_weights(None, version) with a larger version, or sync.update_engine(engine)"
            )

    def update(self, weights: Mapping[str, Tensor] | None, version: int) -> bool:
        """Make `weights` the policy's weights, all or none, and set the version.

        Tensors that are the parameters themselves are not copied. Sharded tensors (DTensor) are gathered one
        at a time; all ranks of their mesh call this together, ranks without an engine `take_part`.

        Args:
            weights: Tensors by the names of `model.state_dict()`; for tied parameters one of the names is
                enough. None: the parameters themselves have been changed or replaced.
            version: Version of the policy that these weights are: above the last one, or equal if the weights
                are.

        Returns:
            Whether a tensor is at another place in memory than before.

        Raises:
            ValueError: A tensor does not fit, or the version has other weights; nothing has changed.
            RuntimeError: A rank was lost while tensors were gathered. `check` raises until one succeeds.
        """
        dtype = self._agree(weights, version)
        if version == self.version:
            return False
        moved = self._watch.replaced() is not None
        self._unfinished = version
        if weights is not None:
            self._write(weights, dtype)
        self._watch.look()
        self.version, self._unfinished = version, None
        return moved

    def _agree(self, weights: Mapping[str, Tensor] | None, version: int) -> torch.dtype | None:
        """Check weights and version on all ranks; return the dtype in which sharded tensors are gathered."""
        refusal = None
        try:
            self._check(weights, version)
        except ValueError as error:
            refusal = error
        dtype = None
        if weights and sharded(weights):
            dtypes = [dtype for _, dtype, _ in self._kinds.values() if dtype.is_floating_point]
            dtype = agree(weights, reduce(torch.promote_types, dtypes), refused=refusal is not None)
        if refusal is not None:
            raise refusal
        return dtype

    def _check(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        own = self._model.state_dict()
        self._check_own(own)
        if version < self.version:
            raise ValueError(
                f"version {version} is below version {self.version}, which the engine has: pass a larger one"
            )
        if weights is not None:
            check_given(own, weights)
        if version == self.version and not self._unchanged_by(own, weights):
            raise ValueError(
                f"version {version} is that of other weights, which the engine has had: pass a larger one"
            )

    def _check_own(self, own: Mapping[str, Tensor]) -> None:
        """Raise ValueError if the model's own tensors are no longer what the target was made for."""
        for name, kind in self._kinds.items():
            tensor = own.get(name)
            if isinstance(tensor, DTensor):
                raise ValueError(
                    f"{name} of the engine's model has been sharded (DTensor): make the engine of a model of "
                    "its own and pass it the sharded weights"
                )
            if tensor is None or _kind(tensor) != kind:
                found = "missing" if tensor is None else _described(_kind(tensor))
                raise ValueError(
                    f"{name} of the engine's model is {found} and was {_described(kind)}: make a new engine"
                )

    def _unchanged_by(self, own: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None) -> bool:
        if self._unfinished is not None or self._watch.changed(thorough=True):
            return False
        return weights is None or all(
            not isinstance(tensor, DTensor)
            and (_same_storage(own[name], tensor) or torch.equal(own[name], tensor.to(own[name])))
            for name, tensor in weights.items()
        )

    @torch.no_grad()
    def _write(self, weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        own = self._model.state_dict()
        for name, tensor in weights.items():
            if not isinstance(tensor, DTensor) and not _same_storage(own[name], tensor):
                own[name].copy_(tensor)

        def write(part: Tensor, whole: Tensor) -> None:
            for name, tensor in weights.items():
                if tensor is part:
                    own[name].copy_(whole)

        gather(weights, dtype, write)


def check_given(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError if `weights` are not all tensors of a model that fit the tensors `own`."""
    for name, tensor in weights.items():
        _check_tensor(name, own.get(name), tensor)
    given: dict[int, Tensor] = {}
    for name, tensor in weights.items():
        first = given.setdefault(own[name].data_ptr(), tensor)
        if first is not tensor and not _equal(first, tensor):
            raise ValueError(
                f"weights: {name} is tied to another tensor and differs from it: pass equal values"
            )
    for name, tensor in own.items():
        if tensor.data_ptr() not in given:
            raise ValueError(f"weights: {name} is missing: pass all tensors of the model's state_dict")


def _check_tensor(name: str, own: Tensor | None, tensor: Tensor) -> None:
    if own is None:
        raise ValueError(f"weights: {name} is not in this model's state_dict")
    if own.shape != tensor.shape:
        raise ValueError(f"weights: {name} must be of shape {tuple(own.shape)}, got {tuple(tensor.shape)}")
    if tensor.is_meta or tensor.layout != torch.strided:
        raise ValueError(f"weights: {name} has no dense values: it is on {tensor.device}, {tensor.layout}")
    if own.is_floating_point() and not tensor.is_floating_point():
        raise ValueError(f"weights: {name} must be in floating point, got {tensor.dtype}")
    if not own.is_floating_point() and tensor.dtype != own.dtype:
        raise ValueError(f"weights: {name} must be {own.dtype}, got {tensor.dtype}")


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal; of sharded ones, this rank's parts."""
    if isinstance(a, DTensor) != isinstance(b, DTensor):
        return False
    here, there = (x.to_local() if isinstance(x, DTensor) else x for x in (a.detach(), b.detach()))
    return _same_storage(here, there) or (here.shape == there.shape and torch.equal(here, there))


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype


def _kind(tensor: Tensor) -> _Kind:
    return tensor.shape, tensor.dtype, tensor.device


def _described(kind: _Kind) -> str:
    shape, dtype, device = kind
    return f"{tuple(shape)} in {dtype} on {device}"


class SpareWeights:
    """A model with the same layout as `model` and memory of its own for parameters and persistent buffers.

    An exchange moves addresses, no values, so that it takes no longer for a large model. Tied parameters stay
    tied. The memory of the weights is needed twice, from the first `fill` on.
    """

    def __init__(self, model: nn.Module) -> None:
        """Allocate the second set, without values."""
        self._first = model
        own = model.state_dict(keep_vars=True)
        twins: dict[int, Tensor] = {}
        places: dict[int, Tensor] = {}
        for tensor in own.values():
            if id(tensor) in twins:
                continue
            values = places.setdefault(tensor.data_ptr(), torch.empty_like(tensor.detach()))
            is_parameter = isinstance(tensor, nn.Parameter)
            twins[id(tensor)] = nn.Parameter(values, requires_grad=False) if is_parameter else values
        self.model = copy.deepcopy(model, dict(twins))
        """The model that has the second set; after an exchange, the weights that the first one had."""
        self._pairs = [(tensor, twins[id(tensor)]) for tensor in {id(t): t for t in own.values()}.values()]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the second set."""
        return sum({second.data_ptr(): second.nbytes for _, second in self._pairs}.values())

    @torch.no_grad()
    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` into the second set, from any thread.

        Raises ValueError if they are not all tensors of the model's state_dict or do not fit.
        """
        own = self.model.state_dict()
        check_given(own, weights)
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the two sets. The caller then calls `update_weights` of both models' targets."""
        for first, second in self._pairs:
            first.data, second.data = second.data, first.data
