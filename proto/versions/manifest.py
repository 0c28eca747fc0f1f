"""Manifests: which units make a policy version, checked before anything is fetched for it."""

from collections.abc import Mapping
from dataclasses import dataclass

from aedit.proto.rpc import versions_pb2 as pb
from aedit.proto.versions import patch
from aedit.proto.versions.patch import PATTERNS, Patterns, unit_hash
from aedit.types import Layout, name_fault

MAX_SERIAL = 2**63 - 1
_LONGEST_LINE = 64
_HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class UnitVersion:
    """One unit of a policy version."""

    name: str
    version: int
    """Version of the unit's anchor, or the serial of the policy version where units have none."""
    sha256: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A policy version: the hashes of its units, in the order of the layout.

    Raises ValueError for what no author writes.
    """

    line: str
    serial: int
    """Version of the policy."""
    parent: int
    """Serial of the version before it in the line; 0: it is the first."""
    dtype: str
    units: tuple[UnitVersion, ...]

    def __post_init__(self) -> None:
        check_line(self.line)
        if not 0 <= self.parent < self.serial <= MAX_SERIAL:
            raise ValueError(
                f"serial {self.serial} must be above its parent {self.parent}, which is 0 or more"
            )
        if self.dtype not in PATTERNS:
            raise ValueError(f"dtype {self.dtype[:20]!r}: expected one of {', '.join(PATTERNS)}")
        names = [unit.name for unit in self.units]
        if not names or len(set(names)) != len(names):
            raise ValueError("a manifest names each of its units once, and has at least one")
        for unit in self.units:
            if len(unit.sha256) != _HASH_BYTES:
                raise ValueError(f"unit {unit.name[:40]!r}: a hash of {len(unit.sha256)} bytes, not 32")

    @classmethod
    def of(
        cls,
        line: str,
        serial: int,
        parent: int,
        dtype: str,
        units: Mapping[str, Patterns],
        versions: Mapping[str, int] | None = None,
    ) -> "Manifest":
        """Return the manifest of these values; `versions`: of the units, `serial` if not given."""
        found = (
            UnitVersion(name, serial if versions is None else versions[name], unit_hash(x), x.nbytes)
            for name, x in units.items()
        )
        return cls(line, serial, parent, dtype, tuple(found))

    @classmethod
    def from_message(cls, message: pb.Manifest) -> "Manifest":
        """Return the manifest that a peer has sent."""
        units = (UnitVersion(u.name, u.version, u.sha256, u.num_bytes) for u in message.units)
        return cls(message.line, message.serial, message.parent, message.dtype, tuple(units))

    @property
    def message(self) -> pb.Manifest:
        """Return it as a message."""
        units = (
            pb.UnitVersion(name=u.name, version=u.version, sha256=u.sha256, num_bytes=u.num_bytes)
            for u in self.units
        )
        return pb.Manifest(
            line=self.line, serial=self.serial, parent=self.parent, dtype=self.dtype, units=units
        )

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all values."""
        return sum(unit.num_bytes for unit in self.units)

    def unit(self, name: str) -> UnitVersion:
        """Return the unit of this name. Raises ValueError if there is none."""
        for unit in self.units:
            if unit.name == name:
                return unit
        raise ValueError(f"version {self.serial} has no unit {name[:40]!r}")


@dataclass(frozen=True, slots=True)
class VersionLayout:
    """Units and dtype that every version has here: from the model, never from a peer."""

    layout: Layout
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in PATTERNS:
            raise ValueError(f"dtype {self.dtype!r}: expected one of {', '.join(PATTERNS)}")
        if not self.layout.units or not all(unit.numel for unit in self.layout.units):
            raise ValueError("a layout has units, and none of them is empty")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the units."""
        return tuple(unit.name for unit in self.layout.units)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all values of one version."""
        return sum(unit.numel for unit in self.layout.units) * PATTERNS[self.dtype].itemsize

    def numel(self, name: str) -> int:
        """Return the number of values of a unit."""
        return next(unit.numel for unit in self.layout.units if unit.name == name)

    def most_transfer_bytes(self, name: str) -> int:
        """Return the largest size of a transfer of this unit."""
        return patch.most_bytes(self.numel(name), PATTERNS[self.dtype].itemsize)

    def check(self, manifest: Manifest) -> None:
        """Raise ValueError unless the manifest has exactly these units, of these sizes and this dtype."""
        if manifest.dtype != self.dtype:
            raise ValueError(f"dtype is {manifest.dtype}, expected {self.dtype} here")
        itemsize = PATTERNS[self.dtype].itemsize
        wanted = [(unit.name, unit.numel * itemsize) for unit in self.layout.units]
        for (name, size), unit in zip(wanted, manifest.units, strict=False):
            if (unit.name, unit.num_bytes) != (name, size):
                raise ValueError(
                    f"unit {unit.name[:40]!r} of {unit.num_bytes} bytes, expected {name!r} of {size}"
                )
        if len(wanted) != len(manifest.units):
            raise ValueError(f"{len(manifest.units)} units, where the model has {len(wanted)}")


def check_line(line: str) -> None:
    """Raise ValueError unless `line` can name a line."""
    if fault := name_fault(line, _LONGEST_LINE):
        raise ValueError(f"line {fault}")
