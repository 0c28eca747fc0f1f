"""Landing of one unit, and forward passes in which units cannot or must not land."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from aedit.edit.flight import Flight
from aedit.edit.optimizers import InnerOptimizers
from aedit.edit.shards import Shards, local
from aedit.edit.units import SyncUnit

Act = TypeVar("Act", bound=Callable[..., Any])


def values_only(act: Act) -> Act:
    """Let `act` run outside autograd and inference mode: an evaluation may begin with a landing."""
    return torch.inference_mode(False)(torch.no_grad()(act))


def take(unit: SyncUnit, anchor: Tensor, optimizers: InnerOptimizers, shards: Shards, *, adopt: bool) -> None:
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


def reshard(modules: Iterable[nn.Module]) -> None:
    """Make FSDP2 gather the parameters anew.

    A forward pass without a backward pass leaves the root module gathered, with the old values;
    `reshard_after_forward=False` leaves all modules gathered.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


class StandIns:
    """Notice evaluations of other values in place of the parameters, such as their moving average.

    What lands in such a pass would be lost when the parameters are put back. A few elements per unit are
    compared, because values that are written through `p.data` leave no other trace.
    """

    def __init__(self, units: Sequence[SyncUnit], shards: Shards) -> None:
        self._units, self._shards = units, shards
        self._own: list[Tensor] = []

    def note_parameters(self) -> None:
        """Take what the parameters are now as their own values."""
        self._own = [self._sample(unit) for unit in self._units]

    def run(self, units: Iterable[int]) -> bool:
        """Return whether this forward pass is an evaluation of other values in any of `units`.

        All ranks of the node ask together.
        """
        return not torch.is_grad_enabled() and self.there(units)

    def there(self, units: Iterable[int]) -> bool:
        """Return whether the parameters of any of `units` are other values than those noted last.

        All ranks of the node ask together.
        """
        if not self._own:
            return False
        same = [torch.equal(self._sample(self._units[i]), self._own[i]) for i in units]
        return not all(self._shards.all([all(same)]))

    @torch.no_grad()
    def _sample(self, unit: SyncUnit) -> Tensor:
        return torch.cat([local(p).reshape(-1)[:4].float() for p in (unit.params[0], unit.params[-1])])


def warn_of_idle_modules(
    flights: Iterable[Flight], units: Sequence[SyncUnit], landing: str, local_steps: int
) -> None:
    """Warn of units that could have landed before this step if their module had run."""
    for flight in flights:
        late = flight.late
        if landing == "arrival":
            late = {i for i, since in flight.ready.items() if since < local_steps}
        late = {i for i in late if units[i].modules}  # others land with `LayerSync.land` only
        if late and local_steps > flight.opened_at:
            names = ", ".join(units[i].name for i in sorted(late))
            warnings.warn(
                f"unit {names} of round {flight.round.id} lands only now, at the next round: its module has "
                "not run in between. If its parameters are used without it, name the module that runs in "
                'EditConfig(units=...), or use units="model"',
                stacklevel=5,
            )
