"""A server of rollouts: engines in a thread, gRPC streams for trainers.

`aedit serve` builds it and HTTP submits to it; begin with `EngineHost` in `host.py`, then `rollouts.py`.

- `host.py`: the host and its thread; `host_line.py`: one engine and its weights; `host_figures.py`: figures
  and times of retries; `tickets.py`: submitted samples, priorities, limits and queues.
- `rollouts.py`: the gRPC service; `trainer_stream.py`: one stream of a trainer.
- `worker.py`: process of a rollout worker; `worker_engine.py`: its engine; `channel.py`: its socket.
- `vllm_engine.py`: vLLM as the engine of a worker; `vllm_server.py`: in an HTTP server.
- `trainer_lines.py`: a trainer's engines and their policy versions.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.server.channel import WORKER_LANE, Channel, Message
    from aedit.spec_rollout.server.host import EngineHost
    from aedit.spec_rollout.server.host_figures import IdleTime
    from aedit.spec_rollout.server.rollouts import RolloutService
    from aedit.spec_rollout.server.tickets import (
        DeadlinePassed,
        HostEnding,
        HostLimits,
        HostTicket,
        LineClosed,
        Overloaded,
        PauseReplaced,
    )
    from aedit.spec_rollout.server.trainer_lines import (
        StreamLimits,
        TrainerLines,
        version_tensors,
    )
    from aedit.spec_rollout.server.trainer_stream import ServerIdentity
    from aedit.spec_rollout.server.vllm_engine import arm_of, arms_of, check_supported
    from aedit.spec_rollout.server.vllm_server import check_vllm_server
    from aedit.spec_rollout.server.worker_engine import EngineSpec, make_engine

__all__ = [
    "WORKER_LANE",
    "Channel",
    "DeadlinePassed",
    "EngineHost",
    "EngineSpec",
    "HostEnding",
    "HostLimits",
    "HostTicket",
    "IdleTime",
    "LineClosed",
    "Message",
    "Overloaded",
    "PauseReplaced",
    "RolloutService",
    "ServerIdentity",
    "StreamLimits",
    "TrainerLines",
    "arm_of",
    "arms_of",
    "check_supported",
    "check_vllm_server",
    "make_engine",
    "version_tensors",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
