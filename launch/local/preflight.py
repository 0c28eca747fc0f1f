"""What a run, a join, a dry run and the doctor look at first, in a fraction of a second and without torch."""

from aedit.launch.config.config import RunConfig
from aedit.launch.config.memory import check_memory, least_parameters, trains_on_cpu
from aedit.launch.config.placement import Placement
from aedit.launch.data.preflight import check_data


def preflight(config: RunConfig, placement: Placement) -> None:
    """Raise UserError for data that is missing or certainly too little, and for a model that certainly does
    not fit into this machine's memory. What this cannot tell, the nodes find out when they start."""
    check_data(config.data)
    num_params = least_parameters(config)
    if num_params is not None and trains_on_cpu(config):
        check_memory(config, num_params, nodes=nodes_here(placement))


def nodes_here(placement: Placement) -> int:
    """Return how many nodes of the run are processes of this machine."""
    return placement.nodes if placement.local else 1
