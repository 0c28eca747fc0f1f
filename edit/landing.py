"""Landing of one unit, and a warning about units that cannot land because their module does not run."""

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


def warn_of_idle_modules(
    flights: Iterable[Flight], units: Sequence[SyncUnit], landing: str, local_steps: int
) -> None:
    """Warn of units that could have landed before this step if their module had run."""
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
                stacklevel=5,
            )
