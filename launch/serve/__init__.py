"""`aedit serve`: the process of a rollout server, of a run or of a plain model.

The command line calls `serve_run` and `start_servers`; begin with `run_server.py`.

- `run_server.py`: the process, its addresses and its folder; `run_member.py`: the server as member of a run.
- `served_run.py`: configuration, model, engines and learned drafter of a run.
- `run_line.py`: announcements, and the run's policy versions; `model_server.py`: HTTP.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.serve.model_server import close_servers, start_servers
    from aedit.launch.serve.run_server import (
        Addresses,
        ServeRequest,
        ServerPlaces,
        check_served_engine,
        read_keys,
        serve_run,
    )

__all__ = [
    "Addresses",
    "ServeRequest",
    "ServerPlaces",
    "check_served_engine",
    "close_servers",
    "read_keys",
    "serve_run",
    "start_servers",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
