"""`aedit serve`: the process of a rollout server, of a run or of a plain model.

The command line calls `serve_run` and `start_servers`; begin with `run_server.py`.

- `run_server.py`: start and end of the process; `run_member.py`: the server as a member of a run.
- `served_run.py`: configuration, model and engines; `server_drafter.py`: its learned drafter.
- `run_line.py`: announcements, and the run's policy versions; `model_server.py`: HTTP.
- `places.py`: addresses; `server_folder.py`: folder, name and key.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.serve.model_server import (
        SIGNALS,
        Addresses,
        EndRequest,
        close_servers,
        read_keys,
        start_servers,
        wait_for_end,
    )
    from aedit.launch.serve.places import HttpPlace, ServerPlaces
    from aedit.launch.serve.run_server import ServeRequest, serve_run

__all__ = [
    "SIGNALS",
    "Addresses",
    "EndRequest",
    "HttpPlace",
    "ServeRequest",
    "ServerPlaces",
    "close_servers",
    "read_keys",
    "serve_run",
    "start_servers",
    "wait_for_end",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
