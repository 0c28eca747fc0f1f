"""Folder, name and key of a server of a run: kept over restarts, and used by one process at a time."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from aedit.launch.records import KEY_FILE, claimed, file_name
from aedit.proto.rpc import SigningKey, name_of
from aedit.types import UserError

MOST_HERE = 64
"""Servers without a name in one run directory."""


@dataclass(frozen=True, slots=True)
class ServerFolder:
    """Folder of one server in a run directory."""

    path: Path
    name: str
    """Name of the server in the run."""
    key: SigningKey


@contextmanager
def server_folder(run_dir: Path, name: str, keys: Path | None) -> Iterator[ServerFolder]:
    """Lock a folder in `run_dir`/servers until the block ends, and yield it.

    Args:
        run_dir: Of the run.
        name: Of the server. Empty: that of its certificate, or one made of the host name and its key. A
            second process in the same directory then is another server.
        keys: Folder of keys for TLS.

    Raises:
        UserError: A server of this name is running in this directory, or it cannot be written.
    """
    name = name or name_of(keys)
    with ExitStack() as held:
        path = _claimed(run_dir / "servers", name, held)
        try:
            path.mkdir(parents=True, exist_ok=True)
            key = SigningKey.kept(path / KEY_FILE)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}; choose another --dir") from None
        except ValueError as error:
            raise UserError(str(error)) from None
        yield ServerFolder(path, name or f"{socket.gethostname()}-{key.public.hex()[:6]}", key)


def _claimed(servers: Path, name: str, held: ExitStack) -> Path:
    if name:
        held.enter_context(claimed(servers, name))
        return servers / file_name(name)
    for number in range(1, MOST_HERE):
        try:
            held.enter_context(claimed(servers, f"server-{number}"))
        except UserError:
            continue
        return servers / f"server-{number}"
    held.enter_context(claimed(servers, f"server-{MOST_HERE}"))  # its error says why
    return servers / f"server-{MOST_HERE}"
