"""Settings that belong to one machine, in a configuration that came from a hub."""

from dataclasses import replace

from aedit.launch.config.config import LocalConfig, RunConfig
from aedit.types import UserError


def of_this_machine(config: RunConfig) -> RunConfig:
    """Return the hub's configuration with the settings that belong to this machine at their defaults."""
    own = RunConfig()
    if config.name in (".", ".."):
        raise UserError(f"the hub's run is named {config.name!r}, which is not a valid directory name")
    mine = own.swarm
    swarm = replace(config.swarm, peers=mine.peers, listen=mine.listen, announce=mine.announce)
    return replace(config, dir=own.dir, device=own.device, log=own.log, local=LocalConfig(), swarm=swarm)
