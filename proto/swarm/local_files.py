"""Files that the processes of one machine share in a swarm.

- `node.json`: state of the node, for the card of its peer
- `statements.json`: the statements of owners that the node has received, for its peer
- `replicas.json`: the addresses of the replicas of each part, which the peer writes for the other processes:

{"parts": [{"replicas": ["10.0.0.1:7001", "10.0.0.2:7001"], "owner": "10.0.0.1:7001", "first": "",
            "least": 2, "keys": ["5f3a...", "90b1..."]}, ...], "shut_out": []}
"""

import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aedit.proto.swarm.card import MOST_STEPS_PER_S, is_model_digest
from aedit.system import file_mark, write_atomically

NODE = "node.json"
WRITTEN_EVERY_S = 5.0
_FORGOTTEN_S = 6 * WRITTEN_EVERY_S
"""Time without a write after which a node has ended, or is stopped."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """State of the node on the machine of a peer, as others are content."""

    model: str = ""
    """SHA-256 of everything that must be equal for nodes to train one model; "" without a node."""
    steps_per_s: float = 0.0
    """Inner steps per second while training, waits left out; 0 before they are known."""


def write_node(path: Path, state: NodeState) -> None:
    """Write the state of the node. Raises OSError."""
    write_atomically(path, json.dumps(asdict(state)), sync=False)  # heartbeats wait for it


def read_node(path: Path, clock: Callable[[], float] = time.time) -> NodeState:
    """Return the state of the node; an empty one without a file of the last half minute.

    clock: that of the file system, in seconds.
    """
    try:
        if clock() > path.stat().st_mtime + _FORGOTTEN_S:
            return NodeState()
        content = json.loads(path.read_text(encoding="utf-8"))
        model, speed = str(content["model"]), float(content["steps_per_s"])
        is_speed = math.isfinite(speed) and 0.0 <= speed <= MOST_STEPS_PER_S
        return NodeState(model if is_model_digest(model) else "", speed if is_speed else 0.0)
    except (OSError, ValueError, KeyError, TypeError):
        return NodeState()


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
            if (mark := file_mark(self._path)) == self._mark:
                return ()
            content = json.loads(self._path.read_text(encoding="utf-8"))["statements"]
            self._mark = mark
            return [bytes.fromhex(text) for text in content]
        except FileNotFoundError:
            return ()


REPLICAS = "replicas.json"
KEY = "key"
"""File beside it with the private key of the peer, with which the hubs that it hosts sign."""
_MOST_ADDRESSES = 1024


@dataclass(frozen=True, slots=True)
class PartPlaces:
    """Addresses (HOST:PORT) of the replicas of one part."""

    replicas: tuple[str, ...] = ()
    """All that are known, those first that should keep the part."""
    owner: str = ""
    """The one that leads; empty while none is known."""
    first: str = ""
    """The one that should lead: an owner that is another hands the part over to it. Empty: no wish."""
    least: int = 1
    """Replicas, the owner included, that must have a push on disk before it is acknowledged: most of the
    copies that are wanted, or all peers where there are fewer."""
    keys: tuple[str, ...] = ()
    """Public keys of the peers that say that they host `replicas`, in hexadecimal, in their order."""


class ReplicasFile:
    """The file as one process reads or writes it. Any thread may call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._mark: tuple[int, int, int] | None = None
        self._parts: tuple[PartPlaces, ...] = ()
        self._shut_out: tuple[str, ...] = ()
        self._keys: OrderedDict[str, set[str]] = OrderedDict()
        """Keys that the file has named for an address so far, also after their cards have lapsed."""

    def write(self, parts: Sequence[PartPlaces], shut_out: Sequence[str] = ()) -> None:
        """Write the places of each part, and keys that are shut out, if they have changed. Raises OSError."""
        with self._lock:
            if (tuple(parts), tuple(shut_out)) != (self._parts, self._shut_out):
                content = {"parts": [asdict(part) for part in parts], "shut_out": list(shut_out)}
                write_atomically(self.path, json.dumps(content))
                self._parts, self._shut_out, self._mark = tuple(parts), tuple(shut_out), None

    def parts(self) -> tuple[PartPlaces, ...]:
        """Return the places of each part as the file has them now; () while there is none."""
        return self._read()[0]

    def shut_out(self) -> tuple[str, ...]:
        """Return the keys, in hexadecimal, of peers of which there is proof that they have lied."""
        return self._read()[1]

    def keys_of(self, address: str) -> Collection[str]:
        """Return the keys of the peers that may sign for what listens at `address`.

        A key counts also after its card has lapsed: this machine's peer may be cut off from the other one.
        """
        shut_out = self.shut_out()
        with self._lock:
            return self._keys.get(address, set()) - set(shut_out)

    def is_named(self, address: str) -> bool:
        """Return whether a card has named the address for a replica so far."""
        self._read()
        with self._lock:
            return address in self._keys

    def is_shut_out(self, address: str) -> bool:
        """Return whether all peers that have said that they host what listens at `address` are shut out.

        So a peer that names the address of another one cannot take that one with it, and one that names its
        own no more stays shut out.
        """
        shut_out = self.shut_out()
        with self._lock:
            known = self._keys.get(address, set())
            return bool(known) and known <= set(shut_out)

    def _read(self) -> tuple[tuple[PartPlaces, ...], tuple[str, ...]]:
        with self._lock:
            try:
                if (mark := file_mark(self.path)) != self._mark:
                    content = json.loads(self.path.read_text(encoding="utf-8"))
                    self._parts, self._shut_out = _parts(content["parts"]), tuple(content["shut_out"])
                    self._mark = mark
                    for part in self._parts:
                        for address, key in zip(part.replicas, part.keys, strict=False):
                            self._keys.setdefault(address, set()).add(key)
                            self._keys.move_to_end(address)
                    while len(self._keys) > _MOST_ADDRESSES:
                        self._keys.popitem(last=False)
            except FileNotFoundError:
                self._parts, self._shut_out, self._mark = (), (), None
            return self._parts, self._shut_out

    def part(self, number: int) -> PartPlaces:
        """Return the places of one part; without any while they are not known."""
        parts = self.parts()
        return parts[number] if number < len(parts) else PartPlaces()


def _parts(content: Sequence[dict[str, Any]]) -> tuple[PartPlaces, ...]:
    return tuple(
        PartPlaces(tuple(part["replicas"]), part["owner"], part["first"], part["least"], tuple(part["keys"]))
        for part in content
    )
