"""Phases of one server of ours: overload, ten thousand requests, attackers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import linear_regression
from typing import Any

from benchmarks.serve_parts.attackers import KINDS, Attack, Kind
from benchmarks.serve_parts.generator import Generator
from benchmarks.serve_parts.load import Load, Seen
from benchmarks.serve_parts.servers import Server

Say = Callable[[str], None]


# --- overload


@dataclass(frozen=True, slots=True)
class Overload:
    """Load that the server can bear, more than it can, and the first one again."""

    before: Seen
    during: Seen
    after: Seen


def overload(server: Server, clients: Generator, bearable: Load, too_much: int, say: Say) -> Overload:
    """Return what clients see of a server before, during and after an overload.

    Args:
        server: The server.
        clients: Generates the load.
        bearable: Load with as many clients as the server has rows.
        too_much: Number of clients of the overload, who try again after Retry-After.
        say: Told the progress.
    """
    phases = []
    for name, count in (("before", bearable.clients), ("during", too_much), ("after", bearable.clients)):
        seen = clients.load(replace(bearable, url=server.url, model=server.model, clients=count))
        say(f"{name}: {count} clients, {seen.tokens / seen.seconds:.1f} tokens/s, {seen.refused} answers 429")
        phases.append(seen)
    return Overload(*phases)


# --- memory


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory while requests are answered."""

    finished: int
    refused: int
    failures: tuple[str, ...]
    at: tuple[int, ...]
    """Requests that were answered at each reading."""
    rss_bytes: tuple[int, ...]

    def slope_bytes(self) -> float:
        """Return the growth per request: a line through the readings of the second half."""
        half = [(n, rss) for n, rss in zip(self.at, self.rss_bytes, strict=True) if n >= self.at[-1] / 2]
        return linear_regression(*zip(*half, strict=True)).slope


def memory(server: Server, clients: Generator, load: Load, parts: int, say: Say) -> Memory:
    """Return the server's memory after each of `parts` loads, which together are all requests."""
    at, rss, finished, refused = [0], [server.rss_bytes()], 0, 0
    failures: list[str] = []
    for part in range(parts):
        seen = clients.load(replace(load, url=server.url, model=server.model, seed=part))
        finished, refused = finished + seen.finished, refused + seen.refused
        failures += seen.failures
        at.append(finished)
        rss.append(server.rss_bytes())
        say(f"{finished} requests: {rss[-1] / 2**20:.1f} MiB")
    return Memory(finished, refused, tuple(failures), tuple(at), tuple(rss))


# --- attackers


@dataclass(slots=True)
class Attacked:
    """What well-behaved clients saw with and without attackers of one kind, by turns."""

    calm: list[Seen] = field(default_factory=list)
    attacked: list[Seen] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    begun: int = 0

    def wrong(self) -> int:
        """Return the number of answers that differ from the calm ones to equal requests."""
        right = {key: text for seen in self.calm for key, text in seen.texts.items()}
        return sum(
            text != right[key] for seen in self.attacked for key, text in seen.texts.items() if key in right
        )

    def compared(self) -> int:
        """Return the number of answers that have a calm one."""
        right = {key for seen in self.calm for key in seen.texts}
        return sum(key in right for seen in self.attacked for key in seen.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attacks:
    """Plan of the attacks."""

    kinds: Sequence[Kind] = KINDS
    rates_hz: dict[Kind, float] = field(
        default_factory=lambda: {
            "abandoned": 2.0,
            "malformed": 20.0,
            "oversized": 1.0,
            "unauthenticated": 20.0,
            "slow": 20.0,
        }
    )
    repeats: int = 3


def attacked(
    server: Server, control_url: str, load: Load, pair: tuple[Generator, Generator], plan: Attacks
) -> Iterator[tuple[Kind, Attacked]]:
    """Yield for each kind what well-behaved clients saw, with and without the attackers by turns.

    pair: the clients and the attackers.
    """
    clients, attackers = pair
    load = replace(load, url=server.url, model=server.model, sends_seed=True)
    for kind in plan.kinds:
        result = Attacked()
        for repeat in range(plan.repeats):
            result.calm.append(clients.load(load))
            attack = Attack(
                url=server.url,
                control_url=control_url,
                model=server.model,
                kind=kind,
                seconds=load.seconds,
                rate_hz=plan.rates_hz[kind],
                seed=repeat,
            )
            with _attack(attackers, asdict(attack), result):
                result.attacked.append(clients.load(load))
        yield kind, result


@contextmanager
def _attack(attackers: Generator, attack: dict[str, Any], result: Attacked) -> Iterator[None]:
    attackers.begin(attack)
    try:
        yield
    finally:
        told = attackers.end()
        result.begun += told["begun"]
        for status, count in told["statuses"].items():
            result.statuses[status] = result.statuses.get(status, 0) + count
