"""A version that arrives: built beside the current one, checked, and visible only when it is complete.

Nothing that a sender says is believed: sizes are those of the model, every chunk has a CRC, the transfer a
SHA-256, and the unit that it makes must have the hash in the manifest. Any sender may continue a transfer
that broke off if it is the same one; otherwise it begins again.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from aedit.proto.rpc import frames
from aedit.proto.rpc import versions_pb2 as pb
from aedit.proto.versions import patch
from aedit.proto.versions.manifest import Manifest
from aedit.proto.versions.patch import Patterns, unit_hash
from aedit.proto.versions.store import Block, VersionStore

_ABORTED = grpc.StatusCode.ABORTED


class TransferRefused(ValueError):
    """A transfer that arrived as it was sent is not taken.

    code: INVALID_ARGUMENT: it held all values and does not make the unit, so that its author or its sender is
    wrong; DATA_LOSS: as a patch it does not make the unit; ABORTED: another sender has begun to send the same
    unit since, or the version has been given up.
    """

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(eq=False, slots=True)
class _Partial:
    """A transfer of which a part is here."""

    head: pb.TransferHead
    data: memoryview
    hash: Any
    received: int = 0


@dataclass(eq=False, slots=True)
class _Unit:
    base: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    turn: int = 0
    """Grows with every sender: a connection that hangs does not hold up the next one."""
    partial: _Partial | None = None
    block: Block | None = None
    """The checked values."""


class Receiving:
    """Takes the units of one version, from one sender after another; several may send different units."""

    def __init__(self, store: VersionStore, manifest: Manifest) -> None:
        """Begin to receive a version of an open line.

        Raises ValueError if the version is not of the store's model or not above the newest one, LineUnknown
        if the line is not open.
        """
        store.layout.check(manifest)
        newest = store.newest(manifest.line)
        base = 0 if newest is None else newest.serial
        if manifest.serial <= base:
            raise ValueError(f"version {manifest.serial} of line {manifest.line} is not above version {base}")
        self.manifest = manifest
        self._store = store
        self._held = ExitStack()
        self._base: Any = self._held.enter_context(store.hold(manifest.line, base)) if base else {}
        here = store.shared(manifest)
        self._units = {u.name: _Unit(base, block=here.get(u.name)) for u in manifest.units}
        self._lock = threading.Lock()
        self._is_abandoned = self._is_finished = False

    @property
    def missing(self) -> tuple[pb.Missing, ...]:
        """Return the units that are not here yet; empty: `finish` may be called.

        `base` is the serial of the version from which a transfer may be made; 0: it must hold all values.
        `transfer` is the SHA-256 of a transfer that broke off, and `offset` how many bytes of it are here.
        """
        return tuple(
            pb.Missing(
                unit=name,
                base=unit.base,
                transfer=partial.head.sha256 if partial else b"",
                offset=partial.received if partial else 0,
            )
            for name, unit in self._units.items()
            for partial in (unit.partial,)
            if unit.block is None
        )

    def take(
        self,
        messages: Iterator[bytes],
        moved: Callable[[int], None] = lambda _: None,
        *,
        unit: str | None = None,
    ) -> str:
        """Take one transfer, up to its end, and return the name of its unit.

        Args:
            messages: Chunks; the first one has a `TransferHead`.
            moved: Called with the size of each message.
            unit: The unit that was asked for; None: any that is missing.

        Raises:
            frames.ChunkDamaged, frames.ArrayIncomplete: It broke off; what was right is kept.
            TransferRefused: Another sender has taken over; or it does not make the unit, and the next one
                must hold all values.
            ValueError: It is no transfer that was asked for.
        """
        first = frames.unpack_chunk(next(messages, b""))
        if not first.head:
            raise frames.ArrayIncomplete("the transfer ended before its first chunk")
        first.check()
        try:
            head = pb.TransferHead.FromString(bytes(first.head))
        except DecodeError as error:
            raise ValueError(f"not a TransferHead: {error}") from error
        wanted = self._wanted(head, unit)
        self._collect(wanted, head, first, messages, moved)
        return head.unit

    def finish(self) -> None:
        """Make the version visible in the store. Raises ValueError if units are missing or it is too old."""
        with self._lock:
            if self._is_abandoned or self.missing:
                lacks = "has been given up" if self._is_abandoned else f"lacks {len(self.missing)} units"
                raise ValueError(f"version {self.manifest.serial} {lacks}")
            if self._is_finished:
                return
            self._is_finished = True
            self._held.close()
            blocks = {name: unit.block for name, unit in self._units.items() if unit.block is not None}
        self._store.put(self.manifest, blocks)

    def abandon(self) -> None:
        """Give the version up and free its memory; do nothing after `finish`."""
        with self._lock:
            if self._is_finished or self._is_abandoned:
                return
            self._is_abandoned = True
        for unit in self._units.values():
            with unit.lock:
                unit.turn += 1
                self._forget(unit)
                if unit.block is not None:
                    self._store.buffers.drop(unit.block)
                    unit.block = None
        self._held.close()

    def _forget(self, unit: _Unit) -> None:
        if unit.partial is not None:
            self._store.buffers.count(-unit.partial.head.num_bytes)
            unit.partial = None

    def _wanted(self, head: pb.TransferHead, asked: str | None) -> _Unit:
        """Return the unit of a transfer. Raises ValueError before anything is allocated."""
        manifest = self.manifest
        if (head.line, head.serial) != (manifest.line, manifest.serial):
            raise ValueError(f"a transfer of another version than {manifest.serial} of line {manifest.line}")
        unit = self._units.get(head.unit)
        if unit is None or asked not in (None, head.unit):
            raise ValueError(f"a transfer of unit {head.unit[:40]!r}, which was not asked for")
        if head.base not in (0, unit.base):
            raise ValueError(f"a transfer from version {head.base}, where version {unit.base} is here")
        if head.encoding != patch.ENCODING:
            raise ValueError(f"encoding {head.encoding[:20]!r}: expected {patch.ENCODING!r}")
        most = self._store.layout.most_transfer_bytes(head.unit)
        if head.num_bytes > most:
            raise ValueError(f"a transfer of {head.num_bytes} bytes, at most {most} make this unit")
        return unit

    def _collect(
        self,
        unit: _Unit,
        head: pb.TransferHead,
        first: frames.Chunk,
        messages: Iterator[bytes],
        moved: Callable[[int], None],
    ) -> None:
        with unit.lock:
            if unit.block is not None:
                return
            if self._is_abandoned:
                raise TransferRefused(_ABORTED, f"version {self.manifest.serial} has been given up")
            unit.turn += 1
            turn, partial = unit.turn, self._partial(unit, head, first.offset)
        assembly = frames.Assembly(
            head.num_bytes, limit_bytes=head.num_bytes, into=partial.data, offset=partial.received
        )
        chunk: frames.Chunk | None = first
        while chunk is not None:
            with unit.lock:
                _check_turn(unit, turn)
                assembly.add(chunk)
                partial.hash.update(chunk.data)
                partial.received = assembly.received
            moved(len(chunk.data))
            message = next(messages, None)
            chunk = None if message is None else frames.unpack_chunk(message)
        data = assembly.data
        with unit.lock:
            _check_turn(unit, turn)
            self._forget(unit)
            if partial.hash.digest() != head.sha256:
                raise frames.ChunkDamaged(f"the transfer of unit {head.unit} is not what its SHA-256 says")
            self._build(unit, head, data)

    def _partial(self, unit: _Unit, head: pb.TransferHead, offset: int) -> _Partial:
        """Return what is here of this transfer; nothing if it is another one."""
        partial = unit.partial
        if partial is not None and partial.head == head and 0 < offset <= partial.received:
            if offset < partial.received:  # an earlier call has brought more since the sender asked
                partial.hash, partial.received = hashlib.sha256(partial.data[:offset]), offset
            return partial
        self._forget(unit)
        if offset:
            raise frames.ArrayIncomplete(f"it begins at byte {offset} of a transfer that is not here")
        # Not zeroed: memory is taken only as data arrives.
        data = np.empty(head.num_bytes, np.uint8).data
        self._store.buffers.count(head.num_bytes)
        unit.partial = _Partial(head, data, hashlib.sha256())
        return unit.partial

    def _build(self, unit: _Unit, head: pb.TransferHead, data: memoryview) -> None:
        """Make the unit's values and check them."""
        block = self._store.buffers.take(head.unit)
        base: Patterns | None = self._base[head.unit] if head.base else None
        try:
            patch.decode_transfer(data, base, block.values)
            if unit_hash(block.values) != self.manifest.unit(head.unit).sha256:
                raise ValueError("its values have another hash than the manifest names")
        except ValueError as error:
            self._store.buffers.drop(block)
            unit.base = 0
            code = grpc.StatusCode.DATA_LOSS if head.base else grpc.StatusCode.INVALID_ARGUMENT
            raise TransferRefused(code, f"the transfer of unit {head.unit}: {error}") from error
        unit.block = block


def _check_turn(unit: _Unit, turn: int) -> None:
    if unit.turn != turn:
        raise TransferRefused(_ABORTED, "another sender has begun to send this unit since")
