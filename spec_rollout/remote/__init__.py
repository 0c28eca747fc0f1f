"""A trainer's connections to rollout servers, which generate beside its own workers.

`WorkerSource` starts them from `Servers`; begin with `config.py`, then `links.py`.

- `config.py`: `Servers`, its settings; `settings.py`: those of the connection process.
- `link_process.py`: the rank's side of that process; `link.py`: the process; `links.py`: all its connections.
- `connection.py`: one connection and its stream; `session.py`: its samples and measured speed.
- `report_checks.py`: samples, and checks of what servers report; `audits.py`: held samples and audits.
- `discovery.py`: the hub's list and the addresses; `publisher.py`: policy versions for servers.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.remote.config import Servers

__all__ = [
    "Servers",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
