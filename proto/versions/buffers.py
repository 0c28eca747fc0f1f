"""Memory of units: counted, and used again."""

import threading
from dataclasses import dataclass, field

import numpy as np

from aedit.proto.versions.manifest import VersionLayout
from aedit.proto.versions.values import PATTERNS, Patterns


@dataclass(eq=False, slots=True)
class Block:
    """The values of one unit, shared by all versions in which they are equal."""

    unit: str
    values: Patterns
    owned: bool = True
    """Made here, so that it can be used again."""
    uses: int = 1
    sha256: bytes = b""


@dataclass(eq=False)
class Buffers:
    """Blocks for the units of one model. One spare block for each unit is kept."""

    layout: VersionLayout
    num_bytes: int = 0
    """Bytes of all blocks, also of spare ones, and of transfers that have partly arrived."""
    _spare: dict[str, Block] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, unit: str) -> Block:
        """Return a block with room for this unit, whose values are undefined."""
        with self._lock:
            block = self._spare.pop(unit, None)
            if block is None:
                values = np.empty(self.layout.numel(unit), PATTERNS[self.layout.dtype])
                block = Block(unit, values)
                self.num_bytes += values.nbytes
        block.uses, block.sha256 = 1, b""
        return block

    def adopt(self, unit: str, values: Patterns) -> Block:
        """Return a block of values that somebody else has made."""
        with self._lock:
            self.num_bytes += values.nbytes
        return Block(unit, values, owned=False)

    def count(self, num_bytes: int) -> None:
        """Count so many bytes that are kept elsewhere; fewer if negative."""
        with self._lock:
            self.num_bytes += num_bytes

    def use(self, block: Block) -> Block:
        """Note one more user of a block, and return it."""
        with self._lock:
            block.uses += 1
        return block

    def drop(self, block: Block) -> None:
        """Note that a user needs the block no more; after the last one it is a spare."""
        with self._lock:
            block.uses -= 1
            if block.uses:
                return
            if block.owned and block.unit not in self._spare:
                self._spare[block.unit] = block
            else:
                self.num_bytes -= block.values.nbytes
