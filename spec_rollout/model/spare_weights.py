"""A second set of a policy's weights, filled beside the first one and exchanged with it at no cost."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from aedit.spec_rollout.model.weight_update import check_given


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
        """Exchange the two sets. The caller tells the targets of both models with `update_weights`."""
        for first, second in self._pairs:
            first.data, second.data = second.data, first.data
