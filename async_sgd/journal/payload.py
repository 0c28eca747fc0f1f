"""Payloads of pushes that wait for their merge: they stay encoded in the journal's file."""

from dataclasses import dataclass

from zlib_ng.zlib_ng import crc32

from aedit.async_sgd.journal.frames import Damaged, Stretch
from aedit.async_sgd.rules import Vector
from aedit.proto.codecs import codec


@dataclass(frozen=True, slots=True)
class Payload:
    """`Values` that are read from a file when they are needed, and take no memory until then."""

    codec: str
    numel: int
    crc: int
    stretch: Stretch

    def read(self, start: int, stop: int) -> Vector:
        """Return elements start..stop as fp32."""
        return codec(self.codec).decode(self.stretch.view(), self.numel, start, stop)

    def check(self) -> None:
        """Raise Damaged unless the file still has what was acknowledged."""
        if crc32(self.stretch.view()) != self.crc:
            where = f"{self.stretch.file.path}, byte {self.stretch.offset}"
            raise Damaged(f"{where}: an accepted push is damaged")
