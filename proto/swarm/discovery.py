"""The interface of discovery, by which peers of a run find each other's addresses; and the list in a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from aedit.system import file_mark
from aedit.types import address_fault, checked


class Discovery(Protocol):
    """Introduces peers to each other. What it finds are hints: gossip dials them, and believes answers only.

    One thread calls `announce` and `found`, about once a second each; any thread may read `state`. No method
    may block for longer than a few seconds, or raise for what the network or other peers do.
    """

    def announce(self, card: bytes) -> None:
        """Make this peer known; `card` is its encoded card, which changes now and then."""

    def found(self) -> Sequence[str | bytes]:
        """Return addresses (HOST:PORT) or encoded cards of peers, as far as they are known now."""

    @property
    def introduction(self) -> str:
        """Return what a further peer passes to `aedit join`; "" if that is this peer's HOST:PORT."""

    @property
    def state(self) -> str:
        """Return as text what is wrong, and since when; "" if nothing is."""

    def close(self) -> None:
        """End everything that was started. May be called more than once."""


_MOST_FILE_BYTES = 2**20


@checked()
class PeerFile:
    """Finds the peers that a file lists: one HOST:PORT per line, comments begin with `#`.

    The file is read again when it changes. It may be missing for a while. A wrong line is named in `state`,
    and the others count. `announce` does nothing: the author of the file adds this peer to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark: tuple[int, int, int] | None = None
        self._found: tuple[str, ...] = ()
        self._state = ""

    def announce(self, card: bytes) -> None:
        """Do nothing."""

    def found(self) -> Sequence[str]:
        """Return the addresses in the file, each once. If it cannot be read, those that were read last."""
        try:
            if (mark := file_mark(self._path)) != self._mark:
                self._found, self._state = _read(self._path)
                self._mark = mark
        except (OSError, ValueError) as error:
            self._mark, self._state = None, f"cannot read {self._path}: {error}"
        return self._found

    @property
    def introduction(self) -> str:
        """Return ""."""
        return ""

    @property
    def state(self) -> str:
        """Return which lines are wrong, or why the file cannot be read; "" if nothing is wrong."""
        return self._state

    def close(self) -> None:
        """Do nothing."""


def _read(path: Path) -> tuple[tuple[str, ...], str]:
    """Return the addresses in the file, and what is wrong with it. Raises OSError or ValueError."""
    with path.open("rb") as file:
        content = file.read(_MOST_FILE_BYTES + 1)
    if len(content) > _MOST_FILE_BYTES:
        raise ValueError(f"it has more than {_MOST_FILE_BYTES} bytes")
    found: dict[str, None] = {}
    wrong = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        address = line.partition("#")[0].strip()
        if address and (fault := address_fault(address)):
            wrong.append(f"{path}, line {number}: {fault}")
        elif address:
            found[address] = None
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return tuple(found), wrong[0] + more if wrong else ""
