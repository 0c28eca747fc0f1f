"""The latest versions of several lines in memory, and the transfers that lead to them."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np

from aedit.proto.rpc import versions_pb2 as pb
from aedit.proto.versions import patch
from aedit.proto.versions.manifest import Manifest, VersionLayout, check_line
from aedit.proto.versions.patch import PATTERNS, Patterns
from aedit.types import check


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
class UnitBuffers:
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
        """Return a block of values that were made elsewhere."""
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


class LineUnknown(KeyError):
    """No such line, or no such version of it, is here (any more)."""

    def __str__(self) -> str:
        """Return the text alone, without the quotes of KeyError."""
        return str(self.args[0])


class LinesFull(ValueError):
    """As many lines as allowed are open."""


@dataclass(eq=False, slots=True)
class _Version:
    manifest: Manifest
    blocks: dict[str, Block]
    holds: int = 1


@dataclass(eq=False, slots=True)
class _Made:
    """A transfer by content: it serves every line that has both values."""

    data: bytes
    needs_base: bool
    sha256: bytes


class VersionStore:
    """Keeps the last `ring` versions of each line. Any thread may call.

    A version is visible as a whole or not at all. Units that are equal in several versions are kept once.
    """

    def __init__(
        self, layout: VersionLayout, *, ring: int = 8, max_lines: int = 16, cache_bytes: int = 256 << 20
    ) -> None:
        """Create an empty store.

        Args:
            layout: Units and dtype of all versions.
            ring: Versions that are kept of each line.
            max_lines: Lines that may be open at a time.
            cache_bytes: Upper limit of the transfers that are kept to be sent again.
        """
        for name, number in (("ring", ring), ("max_lines", max_lines)):
            check(number > 0, name, "must be above 0", number)
        self.layout, self.buffers = layout, UnitBuffers(layout)
        self._ring, self._max_lines, self._cache_bytes = ring, max_lines, cache_bytes
        self._lines: dict[str, list[_Version]] = {}
        self._changed = threading.Condition()
        self._cache: OrderedDict[tuple[bytes, bytes], _Made] = OrderedDict()
        self._cached_bytes = 0
        self._making: WeakValueDictionary[tuple[bytes, bytes], threading.Lock] = WeakValueDictionary()
        """Locks of the transfers that are being made, for as long as a caller holds them."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all versions, also incomplete ones, spare buffers and kept transfers."""
        return self.buffers.num_bytes + self._cached_bytes

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the names of the open lines."""
        with self._changed:
            return tuple(self._lines)

    def open(self, line: str) -> None:
        """Open a line, which has no version yet; do nothing if it is open.

        Raises ValueError for a wrong name, LinesFull if there are `max_lines`.
        """
        check_line(line)
        with self._changed:
            if line not in self._lines and len(self._lines) >= self._max_lines:
                raise LinesFull(f"{self._max_lines} lines are open, which is the limit: close one first")
            self._lines.setdefault(line, [])

    def close(self, line: str) -> None:
        """Forget a line and its versions; do nothing if it is not open."""
        with self._changed:
            for version in self._lines.pop(line, []):
                self._release(version)
            self._changed.notify_all()

    def publish(
        self, line: str, serial: int, units: Mapping[str, Patterns], versions: Mapping[str, int] | None = None
    ) -> Manifest:
        """Add a version of the line whose author is here, and return its manifest.

        Args:
            line: Opened if it is not open.
            serial: Above that of the newest version.
            units: Patterns by unit, see `patterns`. The store keeps them: they must not change afterwards.
            versions: Of the units; `serial` if not given.

        Raises:
            ValueError: The serial is not above the newest, or units are not those of the model.
        """
        self.open(line)
        newest = self.newest(line)
        parent = 0 if newest is None else newest.serial
        ordered = {name: units[name] for name in self.layout.names if name in units}
        for name, values in ordered.items():
            if values.dtype != PATTERNS[self.layout.dtype]:
                raise ValueError(f"unit {name}: values are {values.dtype}, expected bit patterns: `patterns`")
        manifest = Manifest.of(line, serial, parent, self.layout.dtype, ordered, versions)
        blocks = {unit.name: self._shared(line, unit.name, unit.sha256) for unit in manifest.units}
        self.put(
            manifest,
            {name: found or self.buffers.adopt(name, units[name]) for name, found in blocks.items()},
        )
        return manifest

    def put(self, manifest: Manifest, blocks: dict[str, Block]) -> None:
        """Make a complete version visible. `blocks` become the store's, also if it is refused.

        Raises ValueError if it is not above the newest version or not of this model, LineUnknown if the line
        has been closed.
        """
        version = _Version(manifest, blocks)
        for unit in manifest.units:
            if unit.name in blocks:
                blocks[unit.name].sha256 = unit.sha256
        with self._changed:
            try:
                self.layout.check(manifest)
                line, newest = self._line(manifest.line), self._newest(manifest.line)
                if manifest.serial <= newest:
                    raise ValueError(
                        f"version {manifest.serial} of line {manifest.line} is not above {newest}, which is"
                        " here"
                    )
            except (ValueError, LineUnknown):
                self._release(version)
                raise
            line.append(version)
            while len(line) > self._ring:
                self._release(line.pop(0))
            self._changed.notify_all()

    def newest(self, line: str, *, after: int = 0, wait_s: float = 0.0) -> Manifest | None:
        """Return the newest manifest of a line, None if there is none. Waits for one newer than `after`.

        Raises LineUnknown if the line is not open.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._newest(line) > after or line not in self._lines, wait_s)
            found = self._line(line)
            return found[-1].manifest if found else None

    def manifest(self, line: str, serial: int) -> Manifest:
        """Return the manifest of a version. Raises LineUnknown if it is not here."""
        with self._changed:
            return self._version(line, serial).manifest

    @contextmanager
    def hold(self, line: str, serial: int) -> Iterator[Mapping[str, Patterns]]:
        """Return a context with the patterns of a version, by unit, which do not change while it lasts.

        Raises LineUnknown if the version is not here.
        """
        with self._changed:
            version = self._version(line, serial)
            version.holds += 1
        try:
            yield {name: block.values for name, block in version.blocks.items()}
        finally:
            with self._changed:
                self._release(version)

    def transfer(self, line: str, unit: str, base: int, serial: int) -> tuple[pb.TransferHead, bytes]:
        """Return head and bytes of a transfer of `unit` of version `serial`, made from version `base`.

        All values if `base` is not here, or 0, or if that is shorter. Raises LineUnknown if the version is
        not here, ValueError if it has no such unit.
        """
        manifest = self.manifest(line, serial)
        wanted = manifest.unit(unit)
        try:
            base_hash = self.manifest(line, base).unit(unit).sha256 if base else b""
            made = self._transfer((base_hash, wanted.sha256), line, unit, base, serial)
        except LineUnknown:
            made = self._transfer((b"", wanted.sha256), line, unit, 0, serial)
        head = pb.TransferHead(
            line=line,
            serial=serial,
            unit=unit,
            base=base if made.needs_base else 0,
            encoding=patch.ENCODING,
            num_bytes=len(made.data),
            sha256=made.sha256,
        )
        return head, made.data

    def shared(self, manifest: Manifest) -> dict[str, Block]:
        """Return the units of a new version that its line has already, each with one more user."""
        found = {unit.name: self._shared(manifest.line, unit.name, unit.sha256) for unit in manifest.units}
        return {name: block for name, block in found.items() if block is not None}

    def _transfer(self, key: tuple[bytes, bytes], line: str, unit: str, base: int, serial: int) -> _Made:
        """Return a kept transfer, or make it; other callers for the same one meanwhile wait for it."""
        with self._changed:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._changed:
                found = self._cache.get(key)
                if found is not None:
                    self._cache.move_to_end(key)
                    return found
            with ExitStack() as held:
                values = held.enter_context(self.hold(line, serial))[unit]
                old = held.enter_context(self.hold(line, base))[unit] if base else None
                data, needs_base = patch.encode_transfer(values, old)
            made = _Made(data, needs_base, hashlib.sha256(data).digest())
            with self._changed:
                if len(data) <= self._cache_bytes:
                    self._cache[key] = made
                    self._cached_bytes += len(data)
                while self._cached_bytes > self._cache_bytes:
                    _, oldest = self._cache.popitem(last=False)
                    self._cached_bytes -= len(oldest.data)
            return made

    def _shared(self, line: str, unit: str, sha256: bytes) -> Block | None:
        with self._changed:
            for version in reversed(self._lines.get(line, [])):
                block = version.blocks[unit]
                if block.sha256 == sha256:
                    return self.buffers.use(block)
        return None

    def _newest(self, line: str) -> int:
        found = self._lines.get(line)
        return found[-1].manifest.serial if found else 0

    def _line(self, line: str) -> list[_Version]:
        found = self._lines.get(line)
        if found is None:
            raise LineUnknown(f"there is no line {line[:70]!r} here")
        return found

    def _version(self, line: str, serial: int) -> _Version:
        for version in self._line(line):
            if version.manifest.serial == serial:
                return version
        raise LineUnknown(f"version {serial} of line {line} is not here (any more)")

    def _release(self, version: _Version) -> None:
        """Drop one hold; after the last one the blocks are free."""
        version.holds -= 1
        if not version.holds:
            for block in version.blocks.values():
                self.buffers.drop(block)
