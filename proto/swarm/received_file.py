"""`statements.json`: the statements of owners that the node of a machine has received, for its peer."""

import json
from collections.abc import Sequence
from pathlib import Path

from aedit.system import write_atomically

STATEMENTS = "statements.json"


def write_statements(path: Path, statements: Sequence[bytes]) -> None:
    """Write statements, oldest first. Raises OSError."""
    text = json.dumps({"statements": [data.hex() for data in statements]})
    write_atomically(path, text, sync=False)  # heartbeats wait for it


class StatementsFile:
    """The file as a peer reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark: tuple[int, int, int] | None = None

    def changed(self) -> Sequence[bytes]:
        """Return the statements if the file has changed since the last call, else ()."""
        try:
            found = self._path.stat()
            mark = (found.st_mtime_ns, found.st_size, found.st_ino)
            if mark == self._mark:
                return ()
            told = json.loads(self._path.read_text(encoding="utf-8"))["statements"]
            self._mark = mark
            return [bytes.fromhex(text) for text in told]
        except FileNotFoundError:
            return ()
