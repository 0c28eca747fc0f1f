"""Rollouts from worker processes of a rank and from rollout servers, as one `RolloutSource`.

A training loop makes a `WorkerSource`; begin with `source.py`, then `dispatcher.py`.

- `source.py`: the source; `dispatcher.py`: requested samples and which worker has each.
- `workers.py`: processes that are started again, and the rank's side of each worker.
- `links.py`: `Servers`, the settings, and all connections; their process is `link.py`, with `connection.py`,
  `session.py`, `report_checks.py`, `discovery.py` and `publisher.py`; `servers.py`: the rank's side of it.
- `shared_weights.py`: the policy in shared memory; `engine_process.py`: a worker as the engine of a server.
- `reallocate.py`, `moving.py`: which samples migrate between engines; `rank_transfer.py`: between ranks.
- `rank_pool.py`: nodes of one world that generate for each other; `rank_links.py`: their messages.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.remote.engine_process import EngineProcess
    from aedit.spec_rollout.remote.links import Servers
    from aedit.spec_rollout.remote.moving import LocalEngine, Reallocator
    from aedit.spec_rollout.remote.rank_pool import PooledSource, PoolPlace
    from aedit.spec_rollout.remote.source import WorkerSource
    from aedit.spec_rollout.remote.workers import WorkerConfig

__all__ = [
    "EngineProcess",
    "LocalEngine",
    "PoolPlace",
    "PooledSource",
    "Reallocator",
    "Servers",
    "WorkerConfig",
    "WorkerSource",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
