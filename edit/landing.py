"""One unit's landing, and the units that cannot land because nobody runs their module."""

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from aedit.edit.flight import Flight
from aedit.edit.optimizers import InnerOptimizers
from aedit.edit.shards import Shards
from aedit.edit.units import SyncUnit


@torch.inference_mode(False)
@torch.no_grad()
def take(unit: SyncUnit, anchor: Tensor, optimizers: InnerOptimizers, shards: Shards, *, adopt: bool) -> None:
    """Land `anchor`: make it the parameters of `unit`, or move them by what it is ahead of the snapshot.

    adopt: the node distrusts itself in this unit, and goes on from the anchor with new optimizer state.
    """
    if unit.sent is None or adopt:
        unit.adopt(anchor)
    else:
        unit.follow(anchor)
    unit.sent = None
    reshard(unit.modules)
    optimizers.restart(unit.params)
    if adopt:  # what was learned on the way to an unbelievable place must not steer the next steps
        optimizers.renew(unit.params)
    if anchor.is_cuda and shards.group is not None:
        # FSDP2 gathers on a stream that waited for this one at the root's forward, not for this copy.
        torch.cuda.current_stream().synchronize()


def reshard(modules: Iterable[nn.Module]) -> None:
    """Let FSDP2 gather anew: a forward without a backward leaves the root gathered, with the old values, and
    `reshard_after_forward=False` leaves all."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()


def warn_of_idle_modules(
    flights: Iterable[Flight], units: Sequence[SyncUnit], landing: str, local_steps: int
) -> None:
    """Warn of units that could have landed before this step, had anything run their module."""
    for flight in flights:
        late = flight.sent.keys() | set(flight.unsent)
        if landing == "arrival":
            late = {i for i, since in flight.ready.items() if since < local_steps}
        if late and local_steps > flight.opened_at:
            names = ", ".join(units[i].name for i in sorted(late))
            warnings.warn(
                f"unit {names} of round {flight.round.id} lands only now, at the next round: its module has "
                "not run in between. If its parameters are used without it, name the module that runs in "
                'EditConfig(units=...), or use units="model"',
                stacklevel=4,
            )
