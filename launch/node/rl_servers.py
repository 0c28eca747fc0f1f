"""Rollout servers of a rank: which ones it uses, and how it checks them."""

from pathlib import Path

from aedit.edit import canonical, find_units
from aedit.launch.config import RunConfig
from aedit.launch.node.objective import NodeParts
from aedit.launch.node.rl_audit import MAKE, TrainingAudit, audit_options
from aedit.proto.rpc import is_loopback
from aedit.spec_rollout.remote import Servers
from aedit.spec_rollout.rl import RolloutSource
from aedit.spec_rollout.workers import WorkerSource
from aedit.types import UserError


def make_servers(parts: NodeParts, logs: Path) -> Servers | None:
    """Return the servers of this rank; None if the configuration wants none.

    logs: directory of the output. Raises UserError if they cannot be reached safely.
    """
    config, rank = parts.config, parts.world.rank
    if not config.rl.has_servers:
        return None
    options = parts.hub.options if parts.hub is not None else None
    keys = options.keys if options is not None else None
    _check_exposure(config, keys, insecure=options is not None and options.insecure)
    listed = config.rl.servers == "hub" and options is not None
    audit, directory = config.audit, parts.recorder.directory / "audit" / str(rank)
    model = parts.sync.model
    return Servers(
        addresses=config.rl.server_addresses,
        hubs=tuple(options.hub.split(",")) if options is not None and listed else (),
        standby=options.standbys_of_first if options is not None and listed else "",
        run=config.name,
        trainer=options.name if options is not None else f"node {parts.world.node}",
        rank=rank,
        keys=keys,
        layout=canonical.layout(find_units(model, config.edit.units)),
        dtype=config.rl.version_dtype,
        on_new_version=config.rl.on_new_version,
        silent_s=config.rl.server_silent_s,
        stalled_s=config.rl.server_stalled_s,
        auditor=MAKE if audit.on else "",
        audit_options=audit_options(config, model, parts.world.device, str(directory)) if audit.on else {},
        member=parts.hub.identity if parts.hub is not None else lambda: (0, 0),
        logs=logs,
    )


def make_training_audit(config: RunConfig, source: RolloutSource) -> TrainingAudit | None:
    """Return the audit in the forward pass of training; None without servers, or if it is off."""
    if not config.rl.has_servers or not isinstance(source, WorkerSource):
        return None
    return TrainingAudit.of(config, source.accuse)


def _check_exposure(config: RunConfig, keys: Path | None, *, insecure: bool) -> None:
    far = [place for place in config.rl.server_addresses if not is_loopback(place)]
    if far and keys is None and not insecure:
        raise UserError(
            f"rl.servers: {far[0]} is on another machine, and this node has no keys for it: join a run whose"
            " hub has keys (`aedit keys`), or say --insecure if the network is closed"
        )
