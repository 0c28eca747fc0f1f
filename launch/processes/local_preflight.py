"""First checks of run, join, dry run and doctor: without torch, before anything is started."""

from aedit.launch.config import Placement, RunConfig, check_memory, least_parameters, trains_on_cpu
from aedit.launch.data import check_data, check_rewards, check_source


def preflight(config: RunConfig, placement: Placement) -> None:
    """Raise UserError if data are missing or too short, or the model cannot fit into this machine's memory.

    Of a run with rewards, files of problems must exist, and each reward function must work in a first call.
    Errors that these checks cannot detect are reported when the nodes start.
    """
    if config.prompts.source:
        check_source(config.prompts.source)
        check_rewards(config)
    else:
        check_data(config.data)
    num_params = least_parameters(config)
    if num_params is not None and trains_on_cpu(config):
        check_memory(config, num_params, nodes=nodes_here(placement))


def nodes_here(placement: Placement) -> int:
    """Return the number of nodes that run on this machine."""
    return placement.nodes if placement.local else 1
