"""Rollout servers that a rank uses beside its own workers: their addresses, or the hub that lists them."""

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aedit.spec_rollout.remote.handle import RemotePolicy
from aedit.spec_rollout.remote.link_process import LinkProcess
from aedit.spec_rollout.remote.publisher import version_layout
from aedit.spec_rollout.remote.settings import LinkSettings
from aedit.types import (
    Layout,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TensorLayout,
    UnitLayout,
    check,
    checked,
)

OnNewVersion = Literal["recompute", "finish"]
BLOCK = re.compile(r"(.*?\.\d+)\.")
"""Name of a transformer block at the start of a tensor's name."""


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Rollout servers of one rank; see `WorkerSource`."""

    addresses: tuple[str, ...] = ()
    """HOST:PORT of servers that are always tried."""
    hubs: tuple[str, ...] = ()
    """HOST:PORT of hubs; the first one lists the servers of the run."""
    standby: str = ""
    """Address of the first hub's standby."""
    run: str = ""
    """Name of the run, equal on the servers."""
    trainer: str = ""
    """Name of this node, for people."""
    rank: NonNegativeInt = 0
    keys: Path | None = None
    """Folder of the node's keys; None: plaintext."""
    layout: Layout | None = None
    """Sync units of the model, equal on the servers; None: one unit per transformer block, and `rest`."""
    dtype: str = ""
    """Dtype of the versions that servers are given, equal on them: bf16, fp32 or fp64; empty: that of the
    workers."""
    on_new_version: OnNewVersion = "recompute"
    """Samples that are running at a server when a new version comes continue with it, or end with theirs."""
    silent_s: PositiveFloat = 5.0
    """Seconds without a sign of life after which a server is given up and its samples continue elsewhere."""
    stalled_s: PositiveFloat = 60.0
    """Seconds without a token of a sample after which this sample continues elsewhere, and time in which a
    server must answer the request to return one."""
    connect_s: PositiveFloat = 10.0
    """Limit of the time until a server answers."""
    poll_s: PositiveFloat = 3.0
    """Interval of the questions for the list of servers."""
    ring: PositiveInt = 8
    """Policy versions that are kept, to send others only what has changed since."""
    auditor: str = ""
    """Function as `package.module:name` that is called with `LinkSettings` and returns an `Auditor`; empty:
    what has the right form is delivered at once."""
    audit_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the audit, which JSON can hold."""
    member: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns index and session of this node at the hub, which takes accusations of servers from members."""
    logs: Path | None = None
    """Directory of the process's output; None discards it."""

    def __post_init__(self) -> None:
        known = ("", "bf16", "fp32", "fp64")
        check(self.dtype in known, "Servers: dtype", f"must be one of {', '.join(known[1:])}", self.dtype)
        check(bool(self.addresses or self.hubs), "addresses", "must name a server, or hubs one", "none")
        check(len(set(self.addresses)) == len(self.addresses), "addresses", "must differ", self.addresses)
        for address in (*self.addresses, *self.hubs):
            host, _, port = address.rpartition(":")
            fits = bool(host) and port.isdigit() and 0 < int(port) < 1 << 16
            check(fits, "addresses", "must be HOST:PORT", repr(address))

    @classmethod
    def at(cls, *addresses: str, **settings: Any) -> "Servers":
        """Return servers at these addresses, HOST:PORT each; no hub is needed."""
        return cls(addresses=addresses, **settings)

    def start(self, policy: RemotePolicy, report: Callable[[str, Mapping[str, Any]], None]) -> LinkProcess:
        """Start the process that connects to the servers, and return at once.

        Raises:
            ValueError: The policy has not the units or the dtype that servers expect.
        """
        specs = tuple((name, tuple(shape), dtype) for name, shape, dtype in policy.weights["specs"])
        layout = self.layout or layout_of([(name, shape) for name, shape, _ in specs])
        version_layout(specs, layout, self.dtype)
        settings = LinkSettings(
            addresses=self.addresses,
            hubs=self.hubs,
            standby=self.standby,
            run=self.run,
            trainer=self.trainer or secrets.token_hex(4),
            rank=self.rank,
            keys=str(self.keys or ""),
            layout=layout,
            specs=specs,
            dtype=self.dtype,
            fd=policy.fd,
            vocabulary=policy.vocabulary,
            tokenizer=policy.tokenizer,
            on_new_version=self.on_new_version,
            silent_s=self.silent_s,
            stalled_s=self.stalled_s,
            connect_s=self.connect_s,
            poll_s=self.poll_s,
            ring=self.ring,
            auditor=self.auditor,
            audit_options=dict(self.audit_options),
        )
        return LinkProcess(settings, report, member=self.member, logs=self.logs)


def layout_of(tensors: list[tuple[str, tuple[int, ...]]]) -> Layout:
    """Return one unit per transformer block, after the unit `rest`, as `LayerSync` divides such models.

    tensors: name and shape of each tensor.
    """
    units: dict[str, list[TensorLayout]] = {"rest": []}
    for name, shape in tensors:
        found = BLOCK.match(name)
        units.setdefault(found[1] if found else "rest", []).append(TensorLayout(name, shape))
    return Layout(tuple(UnitLayout(name, tuple(parts)) for name, parts in units.items() if parts))
