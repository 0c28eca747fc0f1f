"""A server of rollouts: engines in a thread, gRPC for trainers, HTTP for everybody else."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.server.host import EngineHost
    from aedit.spec_rollout.server.rollouts import RolloutService
    from aedit.spec_rollout.server.served_tensors import version_tensors
    from aedit.spec_rollout.server.served_versions import ServedVersions
    from aedit.spec_rollout.server.stream_limits import StreamLimits
    from aedit.spec_rollout.server.tickets import (
        DeadlinePassed,
        HostEnding,
        HostLimits,
        LineClosed,
        Overloaded,
        PauseReplaced,
        Ticket,
    )
    from aedit.spec_rollout.server.trainer_lines import TrainerLines
    from aedit.spec_rollout.server.trainer_stream import ServerIdentity

__all__ = [
    "DeadlinePassed",
    "EngineHost",
    "HostEnding",
    "HostLimits",
    "LineClosed",
    "Overloaded",
    "PauseReplaced",
    "RolloutService",
    "ServedVersions",
    "ServerIdentity",
    "StreamLimits",
    "Ticket",
    "TrainerLines",
    "version_tensors",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
