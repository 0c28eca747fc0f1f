"""Serials of a peer's cards, which grow over restarts, whatever the machine's clock does."""

import time
from collections.abc import Callable
from pathlib import Path

from aedit.system import write_atomically

_RESERVED = 4096


class Serials:
    """Numbers that grow. A file keeps a bound that no number given so far has reached.

    Without the file, for example on a new disk, they continue at the wall clock's milliseconds.
    """

    def __init__(self, path: Path, wall_s: Callable[[], float] = time.time) -> None:
        """Continue after the numbers of an earlier process.

        Raises:
            ValueError: The file does not contain a number.
            OSError: It cannot be read.
        """
        self._path = path
        try:
            kept = path.read_text(encoding="ascii").strip() if path.exists() else "0"
            self._reserved = int(kept)
        except ValueError:
            raise ValueError(f"{path} does not contain a number: delete it") from None
        self._last = max(self._reserved, int(wall_s() * 1000))

    def next(self, above: int = 0) -> int:
        """Return a number above all former ones and `above`. Raises OSError if the file cannot be written."""
        number = max(self._last, above) + 1
        if number >= self._reserved:
            write_atomically(self._path, f"{number + _RESERVED}\n")
            self._reserved = number + _RESERVED
        self._last = number
        return number
