"""Landing of one unit, and forward passes in which units cannot or must not land."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from aedit.edit.optimizers import InnerOptimizers
from aedit.edit.shards import Shards, part, reshard
from aedit.edit.units import SyncUnit

Act = TypeVar("Act", bound=Callable[..., Any])

_SAMPLED = 64
"""Elements of each parameter that are compared, evenly spaced."""

_EXACT_STEPS = 3
"""First steps in which elements are compared, so that a loop is known before its first round lands."""


def values_only(act: Act) -> Act:
    """Let `act` run outside autograd and inference mode: an evaluation may begin with a landing."""
    return torch.inference_mode(False)(torch.no_grad()(act))


def land_unit(
    unit: SyncUnit, anchor: Tensor, optimizers: InnerOptimizers, shards: Shards, *, adopt: bool
) -> None:
    """Land `anchor`: write it to the parameters of `unit`, or move them by its distance from the snapshot.

    Args:
        unit: The unit that lands.
        anchor: Its next anchor, this rank's part as an fp32 vector.
        optimizers: The inner optimizers; their state that holds weights moves with the parameters.
        shards: The ranks of the node.
        adopt: The node distrusts its own progress in this unit: it continues from the anchor with new
            optimizer state.
    """
    if unit.sent is None or adopt:
        unit.adopt(anchor)
    else:
        unit.follow(anchor)
    unit.sent = None
    reshard(unit.modules)
    optimizers.restart(unit.params)
    if adopt:  # state from distrusted steps must not influence the next ones
        optimizers.renew(unit.params)
    if anchor.is_cuda and shards.group is not None:
        # FSDP2 gathers on a stream that waited for this one at the root's forward, not for this copy.
        torch.cuda.current_stream().synchronize()


def recorded() -> bool:
    """Return whether this forward pass is transformed (`torch.func`), traced or captured.

    What lands in it would become a part of what is recorded, or cannot land at all.
    """
    if torch._C._are_functorch_transforms_active() or torch.jit.is_tracing():  # type: ignore[no-untyped-call]
        return True
    if any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack()):  # such as fake tensors
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


class OwnValues:
    """Notice that a program has put other values in place of the parameters, and that it put older ones back.

    It may evaluate an average of the weights, quantise or perturb them for a pass, or merge adapters into
    frozen ones; what lands meanwhile is lost when they are put back. PyTorch counts writes to a tensor. It
    does not count those through `p.data`, so elements of every parameter are compared as well: in the first
    steps, and while something may land.

    Args:
        model: The model, with its frozen parameters.
        units: The units of the node.
        shards: The ranks of the node.
    """

    def __init__(self, model: nn.Module, units: Sequence[SyncUnit], shards: Shards) -> None:
        self._units, self._shards = units, shards
        exchanged = [p for unit in units if unit.modules for p in unit.params]
        known = set(exchanged)
        self._params = [*exchanged, *(p for p in model.parameters() if p not in known)]
        self._counted = [t for p in self._params for t in {p, part(p)} if not t.is_inference()]
        self._places: dict[int, slice] = {}
        """Where the elements of each unit are in a sample."""
        start = 0
        for i, unit in enumerate(units):
            if unit.modules:
                stop = start + sum(_elements(p).numel() for p in unit.params)
                self._places[i], start = slice(start, stop), stop
        self._versions: list[int] = []
        self._sample: Tensor | None = None
        self._before: dict[int, Tensor] = {}
        self._confirmed = False
        """True if the elements have been compared in this pass."""
        self._exactly, self._exact_steps = False, _EXACT_STEPS
        self.learning = False
        """True in the first steps, in which each pass is looked at."""
        self.replaced = False
        """True if something else than inner steps and landings has written since `note`."""
        self.restored: set[int] = set()
        """Units that have landed since `note` and were given their older values again."""

    def note(self, *, exactly: bool, sampled: bool = False) -> None:
        """Take the parameters as the node's own.

        Args:
            exactly: Something may land in the next passes: compare elements at each look.
            sampled: Something may land before the next inner step: compare them until then.
        """
        self.learning = self._exact_steps > 0
        self._exactly = exactly or self.learning
        self._exact_steps -= self.learning
        self.replaced, self._confirmed = False, False
        self.restored, self._before = set(), {}
        self.take()
        if sampled and not self._exactly:
            self._sample = self._sampled()

    def take(self) -> None:
        """Take what an inner step has made of the parameters."""
        self._versions = [t._version for t in self._counted]
        self._sample = self._sampled() if self._exactly else None

    def look(self) -> None:
        """Notice what the program has written since the last look. Call it before and after inner steps."""
        versions, landed = self._versions, self._sample
        self.take()
        self.replaced |= versions != self._versions
        if landed is not None and self._exactly and not _equal(landed, self._sample):
            self.replaced = True
            self.restored |= {i for i in self._before if self._is_restored(i, landed)}

    def landing(self, i: int) -> None:
        """Remember the values of unit `i`, which is about to land."""
        if self._sample is None:  # it lands outside of a pass; older values may be put back until the step
            self._sample, self._exactly = self._sampled(), True
        if i in self._places:
            self._before.setdefault(i, self._sample[self._places[i]].clone())

    def landed(self, i: int) -> None:
        """Take the values of unit `i`, which has landed."""
        self._versions = [t._version for t in self._counted]
        if self._sample is not None and i in self._places:
            self._sample[self._places[i]] = self._sampled(self._units[i].params)

    def new_pass(self) -> None:
        """Compare the elements again before the next landing."""
        self._confirmed = False

    def there(self) -> bool:
        """Return whether this pass runs on the node's own parameters. All ranks of the node ask together."""
        written = self._versions != [t._version for t in self._counted]
        if not self._confirmed or written:
            self._confirmed = self._shards.all([not written and self.same()])[0]
            self.replaced |= not self._confirmed
        return self._confirmed

    def same(self) -> bool:
        """Return whether the elements are those that were taken last."""
        return self._sample is None or _equal(self._sample, self._sampled())

    def _is_restored(self, i: int, landed: Tensor) -> bool:
        """Return whether all elements of unit `i` that its landing has changed are what they were before."""
        assert self._sample is not None
        before, now, place = self._before[i], self._sample[self._places[i]], self._places[i]
        moved = before != landed[place]
        return bool(moved.any()) and torch.equal(now[moved], before[moved])

    @torch.no_grad()
    def _sampled(self, params: Sequence[Tensor] | None = None) -> Tensor:
        device = part(self._params[0]).device
        return torch.cat([_elements(p).to(device, torch.float32) for p in params or self._params])


def _elements(p: Tensor) -> Tensor:
    """Return evenly spaced elements of this rank's part of `p`, in the order of its memory."""
    values = part(p).detach()
    if values.is_meta or values.layout != torch.strided:
        return torch.zeros(0)
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.is_contiguous():
        values = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))
    flat = values.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // _SAMPLED))]


def _equal(one: Tensor, other: Tensor | None) -> bool:
    """Return whether the bits of two samples are equal: NaN is equal to itself."""
    return other is not None and torch.equal(one.view(torch.int32), other.view(torch.int32))
