"""Types that every package shares. Standard library only, so that configuration and `--help` stay fast."""

import hashlib
import importlib
import json
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any, Protocol

_LONGEST_HOST = 253
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_SCHEMES = frozenset(
    ("unix", "unix-abstract", "dns", "ipv4", "ipv6", "vsock", "xds", "passthrough", "google-c2p")
)
"""Names that gRPC takes as the kind of an address: `unix:80` would be a file."""
_ANYWHERE = frozenset(("0.0.0.0", "[::]"))


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange of pseudo-gradients."""

    id: int
    """Number of the round, from 1; equal on all nodes that take part."""

    steps: int
    """Inner steps of this node since its previous round."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Name and whole (unsharded) shape of one parameter of a sync unit."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Canonical form of a sync unit: its parameters in registration order, whole, row-major, as fp32."""

    name: str
    tensors: tuple[TensorLayout, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Layout:
    """The sync units of a model, in order. Equal on all nodes of a run."""

    units: tuple[UnitLayout, ...]

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits of a SHA-256 over names and shapes."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def model_sha256(layout: Layout, facts: tuple[tuple[str, str], ...], num_samples: int) -> str:
    """Return the digest of everything that must be equal for nodes to train one model."""
    units = [[unit.name, [[t.name, list(t.shape)] for t in unit.tensors]] for unit in layout.units]
    text = json.dumps([units, [list(fact) for fact in sorted(facts)], num_samples], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Verdict(IntEnum):
    """Decision of a hub about a push. The values are those of hub.proto."""

    NONE = 0
    """Not decided yet."""
    MERGED = 1
    REFUSED = 2
    """Not merged; the node keeps its progress and sends it again with the next push."""
    DISTRUSTED = 3
    """Not believed; the node takes the anchor as it is."""


@dataclass(frozen=True, slots=True)
class News:
    """State of the run as the hub last reported it."""

    age_s: float = float("inf")
    """Seconds since the report."""
    round: int = 0
    pace_steps: int = 0
    """Inner steps that the hub asks of this node before its next push; 0: the node decides."""
    nodes: int = 1
    """Live nodes."""
    total_steps: int = 0
    """Inner steps of all nodes."""
    total_tokens: int = 0
    elapsed_s: float = 0.0
    """Time that the run has lasted, in seconds."""
    progress: float = 0.0
    """Share of the run's budget that is used up, 0 to 1; `finished` comes with 1."""
    finished: bool = False
    evaluates: bool = False
    """Whether this node measures the held-out loss."""


RL_REPORT = (
    "reward",
    "solved",
    "staleness",
    "staleness_max",
    "mismatch_kl",
    "length",
    "groups",
    "rollouts",
    "no_signal",
    "rollout_tokens",
    "rollout_s",
    "compared_s",
    "as_plain_s",
    "passes",
    "arms/off",
    "arms/suffix",
    "arms/layer",
    "arms/other",
    "idle_s/round",
    "idle_s/hub",
    "idle_s/rollouts",
    "idle_s/longest sample",
    "idle_s/rank",
    "idle_s/rewards",
    "idle_used_s",
)
"""Names of the numbers that a node reports to its hub about reinforcement learning.

As in `rl` of its metrics, but steps of the engine are counted by drafter.
"""


class IdleWork(Protocol):
    """Interruptible work that a node does while it waits."""

    @property
    def used_s(self) -> float:
        """Return the processor time that the work has used so far, in seconds.

        Never decreases and never blocks. It may lag behind by the piece of work in progress.
        """

    def window(self, cause: str) -> AbstractContextManager[None]:
        """Return a context manager that the node enters when a wait begins; its exit never blocks.

        cause: why the node waits, such as "round".
        """


class UserError(Exception):
    """Error that only the user can correct. The command line shows it as one line and exits with code 2."""


def printable(text: str, most: int | None = None) -> str:
    """Return text of somebody else for a terminal: `?` for control characters, at most `most` characters."""
    return "".join(one if one.isprintable() else "?" for one in text[:most])


def address_fault(address: str) -> str:
    """Return why `address` is not a HOST:PORT at which others reach a server; "" if it is one."""
    host, _, port = address.rpartition(":")
    fine = len(host) <= _LONGEST_HOST and _HOST.fullmatch(host) and host.lower() not in _SCHEMES
    if not fine or not (port.isascii() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16):
        return f"address {address[:64]!r} is not HOST:PORT, as in 10.0.0.1:7001"
    if host in _ANYWHERE:
        return f"address {address} is where a server listens; name the host that others reach"
    return ""


def check(ok: bool, name: str, rule: str, value: object) -> None:
    """Raise ValueError for a configuration value: `check(n > 0, "train.steps", "must be above 0", n)`."""
    if not ok:
        raise ValueError(f"{name} {rule}, got {value}")


class ImportPath(str):
    """The name of an object to import, as `package.module:Name`."""

    __slots__ = ()


def is_import_path(text: str) -> bool:
    """Return whether `text` names an object by import path, as `package.module:Name` does."""
    module, _, name = text.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), name))


def check_known(value: str, name: str, known: tuple[str, ...]) -> None:
    """Refuse a configuration value that is neither one of `known` nor an import path."""
    options = ", ".join(known)
    check(value in known or is_import_path(value), name, f"must be one of {options}, or module:Name", value)


def imported(path: str, key: str, methods: tuple[str, ...] = ()) -> Any:
    """Return the object that the configuration value `key` names as `package.module:Name`.

    Raises ValueError if it cannot be imported, cannot be called, or is a class without one of `methods`.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key}: {path} cannot be imported: {error}") from None
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if missing or not callable(found):
        what = f"has no method {missing[0]}" if missing else "cannot be called"
        raise ValueError(f"{key}: {path} {what}")
    return found
