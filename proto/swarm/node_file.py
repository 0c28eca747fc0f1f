"""`node.json`: what the node of a machine says of itself, for the card of its peer."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from aedit.proto.swarm.card import MOST_STEPS_PER_S, is_model
from aedit.system import write_atomically

NODE = "node.json"
WRITTEN_EVERY_S = 5.0
_FORGOTTEN_S = 6 * WRITTEN_EVERY_S
"""A node that has written nothing for so long is gone, or stopped."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """State of the node on the machine of a peer, as others are told."""

    model: str = ""
    """SHA-256 of everything that must be equal for nodes to train one model; "" without a node."""
    steps_per_s: float = 0.0
    """Inner steps per second while training, waits left out; 0 before they are known."""


def write_node(path: Path, state: NodeState) -> None:
    """Write the state of the node. Raises OSError."""
    write_atomically(path, json.dumps(asdict(state)), sync=False)  # heartbeats wait for it


class NodeFile:
    """The file as a peer reads it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Read `path`. clock: that of the file system, in seconds."""
        self._path, self._clock = path, clock

    def current(self) -> NodeState:
        """Return the state of the node; an empty one without a file of the last half minute."""
        try:
            if self._clock() > self._path.stat().st_mtime + _FORGOTTEN_S:
                return NodeState()
            told = json.loads(self._path.read_text(encoding="utf-8"))
            model, speed = str(told["model"]), float(told["steps_per_s"])
            return NodeState(model if is_model(model) else "", speed if _is_speed(speed) else 0.0)
        except (OSError, ValueError, KeyError, TypeError):
            return NodeState()


def _is_speed(speed: float) -> bool:
    return math.isfinite(speed) and 0.0 <= speed <= MOST_STEPS_PER_S
