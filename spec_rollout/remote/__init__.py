"""Rollouts from worker processes of a rank and from rollout servers, as one `RolloutSource`.

A training loop makes a `WorkerSource`; begin with `source.py`, then `dispatcher.py`.

- `source.py`: the source; `dispatcher.py`: requested samples and which worker has each.
- `workers_pool.py`: processes that are started again; `handle.py`: the rank's side of one worker.
- `shared_weights.py`: the policy in shared memory.
- `reallocate.py`, `moving.py`: which samples migrate between engines; `rank_transfer.py`: between ranks.
- `config.py`: rollout servers of a rank; `link_process.py`: the process of its connections, whose program is
  `link.py` with `links.py`, `connection.py`, `session.py`, `report_checks.py`, `audits.py`, `discovery.py`
  and `publisher.py`.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.remote.config import Servers
    from aedit.spec_rollout.remote.moving import LocalEngine, Reallocator
    from aedit.spec_rollout.remote.source import WorkerSource
    from aedit.spec_rollout.remote.workers_pool import WorkerConfig

__all__ = ["LocalEngine", "Reallocator", "Servers", "WorkerConfig", "WorkerSource"]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
