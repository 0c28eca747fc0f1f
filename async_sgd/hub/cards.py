"""The description that a rollout server gives of itself, and the checks before the directory takes it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from aedit.async_sgd.hub.denied import Denied
from aedit.async_sgd.hub.joins import LONGEST_NAME
from aedit.types import address_fault

KEY_BYTES = 32
"""Length of an Ed25519 public key."""
_LONGEST_STATE = 64
_MOST_FIGURES = 16
_LONGEST_FIGURE = 32
_MOST_ROWS = 2**20
_MOST_TOKENS_PER_S = 1e9
_MOST_SECONDS = 1e10
_MOST_FIGURE = 1e18
_FIGURE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./ -]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """State of one rollout server, as it announces itself."""

    name: str
    address: str
    """HOST:PORT of its services."""
    process: int
    """Drawn by its process at the start, and told to nobody but the hub."""
    public_key: bytes
    """Ed25519; what it signs its rollouts with."""
    rows: int = 0
    tokens_per_s: float = 0.0
    serial: int = 0
    """Version of the run's policy that it has."""
    running: int = 0
    waiting: int = 0
    state: str = "starting"
    """For people: starting, serving, training a drafter, leaving."""
    idle_s: float = 0.0
    idle_used_s: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)


def check_card(card: Card, newest: int) -> None:
    """Raise Denied for the first value that cannot be true. newest: version of the run's policy."""
    if not card.name or len(card.name) > LONGEST_NAME or not card.name.isprintable():
        raise _wrong(f"a server's name has 1 to {LONGEST_NAME} printable characters")
    if fault := address_fault(card.address):
        raise _wrong(fault)
    if len(card.public_key) != KEY_BYTES:
        raise _wrong(f"public_key has {len(card.public_key)} bytes; an Ed25519 key has {KEY_BYTES}")
    if card.process == 0:
        raise _wrong("process is 0: a server's process draws a random number at its start")
    if len(card.state) > _LONGEST_STATE or not card.state.isprintable():
        raise _wrong(f"state has at most {_LONGEST_STATE} printable characters")
    if card.rows > _MOST_ROWS:
        raise _wrong(f"rows is {card.rows}; at most {_MOST_ROWS} are possible")
    _check_number("tokens_per_s", card.tokens_per_s, _MOST_TOKENS_PER_S)
    _check_number("idle_s", card.idle_s, _MOST_SECONDS)
    _check_number("idle_used_s", card.idle_used_s, _MOST_SECONDS)
    if card.serial > newest:
        raise _wrong(f"serial is {card.serial}; the newest version of this run is {newest}")
    _check_figures(card.figures)


def _check_number(name: str, value: float, most: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise _wrong(f"{name} is {value:g}; it must be in [0, {most:g}]")


def _check_figures(figures: Mapping[str, float]) -> None:
    if len(figures) > _MOST_FIGURES:
        raise _wrong(f"there are {len(figures)} figures; at most {_MOST_FIGURES} are taken")
    for name, value in figures.items():
        if len(name) > _LONGEST_FIGURE or not _FIGURE.fullmatch(name):
            raise _wrong(f"figure {name[:64]!r}: a name has 1 to {_LONGEST_FIGURE} letters, digits or _./-")
        if not abs(value) <= _MOST_FIGURE:  # also false for NaN
            raise _wrong(f"figure {name} is {value:g}; it must be within {_MOST_FIGURE:g} of 0")


def _wrong(reason: str) -> Denied:
    return Denied("different", reason)
