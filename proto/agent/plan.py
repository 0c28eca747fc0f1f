"""The configuration of a node agent, as a value that travels to another process as JSON."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from aedit.proto.codecs import codec
from aedit.types import UnitLayout, UserError

STREAMS = 4
"""Transfers of a node's agent at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan:
    """Identity of this node, addresses of its hubs, and the model's layout."""

    addresses: tuple[str, ...]
    """HOST:PORT of the hub processes; number k owns the units i with i % len(addresses) == k."""
    standbys: tuple[str, ...] = ()
    """HOST:PORT of the standbys: all those of a single hub process, or one for each of several, in their
    order, empty where there is none."""
    replicas: str = ""
    """File in which a peer keeps where the replicas of the parts are, in a swarm; empty: `standbys`."""
    name: str
    """Kept over restarts: the same name gets the same index."""
    prefers: int | None = None
    """The index that it would like, if that is free."""
    run: str
    version: str = ""
    """Version of the aedit package, for messages."""
    method: tuple[tuple[str, str], ...] | None = None
    """Settings that decide the result, by dotted name; the hub refuses others than its own. None: whatever
    the hub has."""
    units: tuple[UnitLayout, ...]
    facts: tuple[tuple[str, str], ...] = ()
    """Names and values of the settings that must be equal on all nodes."""
    num_samples: int
    """Number of samples of the corpus."""
    samples_per_step: int = 0
    """Samples that the whole node takes per inner step; 0 if it leases no data."""
    steps_ahead: int = 1024
    """Leases last for so many steps without a hub."""
    lease_samples: int = 4096
    codec: str = "bf16"
    codec_down: str = "fp32"
    rejoin: str = ""
    """Secret of this node in hexadecimal digits, kept over restarts: it shows that the node is the same."""
    keys: str = ""
    """Folder that `aedit keys` wrote; empty: no TLS."""
    traces: str = ""
    """URL to which its agent sends traces; empty: none."""
    votes: str = ""
    """Folder of the files that keep what this node has promised in failovers; empty: a new process of it is
    another voter."""
    donor: str = ""
    """HOST:PORT where this node gives anchors to others, port 0 for a free one; empty: it does not."""
    streams: int = STREAMS
    """Transfers at a time."""
    heartbeat_s: float = 0.5
    expire_s: float = 15.0
    round_s: float = 0.0
    """Interval at which the hub opens rounds by the clock; 0: it does not."""
    call_timeout_s: float = 30.0

    @property
    def numels(self) -> tuple[int, ...]:
        """Return the number of elements of each unit."""
        return tuple(unit.numel for unit in self.units)

    @property
    def has_feedback(self) -> bool:
        """Return whether the codec is so coarse that its error is sent later."""
        return codec(self.codec).feedback

    def standbys_of(self, part: int) -> tuple[str, ...]:
        """Return the standbys of hub process `part`."""
        mine = self.standbys if len(self.addresses) == 1 else self.standbys[part : part + 1]
        return tuple(filter(None, mine))

    def voter_file(self, part: int) -> Path | None:
        """Return the file that keeps this node's votes for hub process `part`; None if there is none."""
        return Path(self.votes) / f"voter-{part}.json" if self.votes else None


_BYTES = 16


def rejoin_secret(path: Path | None) -> str:
    """Return the secret that `path` keeps, made at the first call; a new one for each call with None.

    In hexadecimal digits. Only the owner can read the file. Raises UserError if it cannot be written or read.
    """
    new = secrets.token_hex(_BYTES)
    if path is None:
        return new
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            beside = path.with_name(f"{path.name}.new")
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(new)
            os.replace(beside, path)
        kept = path.read_text(encoding="utf-8").strip()
        if len(bytes.fromhex(kept)) != _BYTES:
            raise ValueError(f"{len(kept)} characters")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose another --dir") from None
    except ValueError as error:
        raise UserError(f"{path} holds no secret of a node ({error}): remove it") from None
    return kept
