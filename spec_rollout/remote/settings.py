"""Settings of a connection process, in words that JSON can hold. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from aedit.types import Layout, TensorLayout, UnitLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """All that the process must know."""

    addresses: tuple[str, ...]
    """Servers that are always tried, HOST:PORT."""
    hubs: tuple[str, ...]
    """Hubs whose directory is asked for servers."""
    standby: str
    run: str
    trainer: str
    rank: int
    keys: str
    """Folder of the node's keys; empty: plaintext."""
    layout: Layout
    """Sync units of the model."""
    specs: tuple[tuple[str, tuple[int, ...], str], ...]
    """Name, shape and dtype of each tensor in the shared memory."""
    dtype: str
    """Dtype of the policy versions; empty: that of the shared memory."""
    fd: int
    """Number of the file descriptor of the shared memory."""
    vocabulary: int
    tokenizer: str
    on_new_version: str
    silent_s: float
    stalled_s: float
    connect_s: float
    poll_s: float
    ring: int
    auditor: str
    """Function that returns an `Auditor`, as `package.module:name`; empty: no audit."""
    audit_options: Mapping[str, Any] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """Return them for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "LinkSettings":
        """Return the settings that `described` has written."""
        units = (
            UnitLayout(
                unit["name"],
                tuple(TensorLayout(each["name"], tuple(each["shape"])) for each in unit["tensors"]),
            )
            for unit in found["layout"]["units"]
        )
        return cls(
            **{
                **found,
                "addresses": tuple(found["addresses"]),
                "hubs": tuple(found["hubs"]),
                "layout": Layout(tuple(units)),
                "specs": tuple((name, tuple(shape), dtype) for name, shape, dtype in found["specs"]),
            }
        )
