"""Re-creation ("founding") of parts whose replicas are lost: votes of one peer, kept on its disk.

`Forcing` re-creates a part without a vote, for `aedit peer --force-found`.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aedit.launch.config import SwarmConfig
from aedit.proto.swarm import (
    MOST_FORCED,
    Founding,
    PeerCard,
    Register,
    candidates,
    founds_now,
    mark,
    ranking,
    with_agreed,
    with_force,
    with_owner,
    with_vote,
)
from aedit.system import write_atomically
from aedit.types import UserError, printable

log = logging.getLogger(__name__)
FILE = "foundings.json"
OPTION = "--force-found"


@dataclass(slots=True)
class _Part:
    register: Register
    seen_s: float
    """When it last had an owner, or this peer last voted on it, on a monotonic clock."""
    owner: str = ""
    """Name of its owner; "" if none is known."""
    is_missed: bool = False
    is_lost: bool = False


class Foundings:
    """Looks whether parts have owners, and votes on founding those again that have none."""

    def __init__(
        self,
        directory: Path,
        run: str,
        me: bytes,
        *,
        parts: int,
        lost_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read what this peer has promised before.

        Args:
            directory: Folder of the peer.
            run: Name of the run.
            me: Key of the peer.
            parts: Parts of the model.
            lost_s: Time without a known owner after which a part counts as lost; 0: it never does.
            clock: Monotonic, in seconds.
        """
        self._path, self._run, self._me = directory / FILE, run, me
        self._lost_s, self._clock, self._lock = lost_s, clock, threading.Lock()
        kept = _read(self._path)
        self._live_s = {key: clock() for one in kept.values() for key in one.members}
        """When each peer was last live."""
        self._names: dict[bytes, str] = {}
        """Names of peers that are live or were, by mark."""
        self._parts = [_Part(kept.get(part, Register()), clock()) for part in range(parts)]

    def register(self, part: int) -> Register:
        """Return what this peer knows about the part."""
        with self._lock:
            return self._parts[part].register

    def owner(self, part: int) -> str:
        """Return the name of the peer that owns the part, "" if none is known."""
        with self._lock:
            return self._parts[part].owner

    def says(self) -> dict[int, Founding]:
        """Return what the card of this peer says: about parts that it misses, or that were founded again."""
        with self._lock:
            parts = enumerate(self._parts)
            return {n: one.register.say for n, one in parts if one.is_missed or one.register.generation}

    def states(self) -> list[str]:
        """Return as text what is wrong with each part, or what became of it; "" if all is as it was."""
        now = self._clock()
        with self._lock:
            return [self._state(part, one, now) for part, one in enumerate(self._parts)]

    def look(self, live: Mapping[bytes, PeerCard]) -> None:
        """Take the cards of the live peers, this one's included; vote if a part is lost. Raises OSError."""
        now, hosts = self._clock(), candidates(live)
        lately = {key: at_s for key, at_s in self._live_s.items() if now < at_s + self._lost_s}
        self._names |= {mark(key): printable(card.name) for key, card in live.items()}
        self._live_s = lately | dict.fromkeys(hosts, now)
        with self._lock:
            after = [self._looked(part, live, hosts, now) for part in range(len(self._parts))]
            self._save(after)
            for part, register in zip(self._parts, after, strict=True):
                part.register = register

    def force(self, part: int, live: Mapping[bytes, PeerCard]) -> Register:
        """Let this peer found the part without a vote; return what it knows then. Raises OSError.

        It is what it knew if the generations are used up.
        """
        hosts = candidates(live)
        with self._lock:
            registers = [one.register for one in self._parts]
            registers[part] = with_force(registers[part], self._me, _said(part, live, hosts), hosts)
            self._save(registers)
            one = self._parts[part]
            one.register, one.seen_s, one.is_lost = registers[part], self._clock(), False
            return one.register

    def begins(self, part: int) -> bool:
        """Return whether this peer is to found the part now. Returns True once. Raises OSError."""
        with self._lock:
            registers = [one.register for one in self._parts]
            if not founds_now(registers[part], self._me):
                return False
            registers[part] = replace(registers[part], begun=registers[part].accepted)
            self._save(registers)
            self._parts[part].register = registers[part]
            return True

    def _looked(
        self, number: int, live: Mapping[bytes, PeerCard], hosts: frozenset[bytes], now: float
    ) -> Register:
        part = self._parts[number]
        says = _said(number, live, hosts) | {self._me: part.register.say}
        register = with_agreed(part.register, {key: one for key, one in says.items() if key in hosts}, hosts)
        if (register.accepted, register.founder) != (part.register.accepted, part.register.founder):
            part.seen_s, part.is_lost = now, False
            founder = self._name(register.founder)
            log.warning("part %d: founded again by %s, generation %d", number, founder, register.accepted)
        replicas = [(card.parts[number], card.name) for card in live.values() if number in card.parts]
        leading = (name for one, name in replicas if one.leads and register.counts(one.term))
        part.owner = printable(next(leading, ""))
        part.is_missed = not part.owner
        if not part.is_missed:
            part.seen_s, part.is_lost = now, False
            return with_owner(register, hosts, self._live_s)
        if not self._lost_s or now < part.seen_s + self._lost_s:
            return register
        if not part.is_lost:
            log.warning(
                "part %d: no owner for %g s: it is lost; peers vote on founding it again",
                number,
                self._lost_s,
            )
            part.is_lost = True
        after = with_vote(register, self._me, ranking(self._run, number, hosts), says)
        if after != register:
            part.seen_s = now
        return after

    def _state(self, number: int, part: _Part, now: float) -> str:
        if not part.is_missed and part.register.accepted:
            by = self._name(part.register.founder)
            return f"was lost; founded again by {by}, generation {part.register.accepted}"
        if not part.is_missed:
            return ""
        members = len(part.register.members)
        if not part.is_lost:
            return f"no owner for {now - part.seen_s:.0f} s"
        agree = f"{members // 2 + 1} of the {members} peers that knew it agree"
        return f"lost: founded again once {agree}, or by aedit peer --force-found {number}"

    def _name(self, founder: bytes) -> str:
        return self._names.get(founder, founder.hex())

    def _save(self, registers: list[Register]) -> None:
        if registers != [one.register for one in self._parts]:
            text = json.dumps({str(part): _plain(one) for part, one in enumerate(registers)})
            write_atomically(self._path, text)


def _plain(register: Register) -> dict[str, object]:
    return {
        "members": sorted(key.hex() for key in register.members),
        "generation": register.generation,
        "candidate": register.candidate.hex(),
        "accepted": register.accepted,
        "founder": register.founder.hex(),
        "begun": register.begun,
        "is_forced": register.is_forced,
        "has_forced": register.has_forced,
    }


def _said(part: int, live: Mapping[bytes, PeerCard], hosts: frozenset[bytes]) -> dict[bytes, Founding]:
    """Return what the live peers say about a part that can host it."""
    return {key: live[key].foundings[part] for key in hosts if part in live[key].foundings}


def _read(path: Path) -> dict[int, Register]:
    """Return the registers in the file, by part; {} if there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    return {
        int(part): Register(
            members=frozenset(map(bytes.fromhex, one["members"])),
            generation=one["generation"],
            candidate=bytes.fromhex(one["candidate"]),
            accepted=one["accepted"],
            founder=bytes.fromhex(one["founder"]),
            begun=one["begun"],
            is_forced=one.get("is_forced", False),  # an older build has not written these two
            has_forced=one.get("has_forced", False),
        )
        for part, one in json.loads(text).items()
    }


def check_forcing(swarm: SwarmConfig, parts: Sequence[int], *, founds: bool) -> None:
    """Raise UserError if a peer of this swarm cannot found these parts by force.

    Args:
        swarm: Of the run.
        parts: Numbers of the parts.
        founds: The peer is to begin the run.
    """
    if not parts:
        return
    if founds:
        raise UserError(
            f"{OPTION}: --found begins a run, in which no part is lost yet; remove one of the two"
        )
    if not swarm.listen:
        raise UserError(
            f"{OPTION}: swarm.listen is empty: a client keeps no part; name an address, or use another peer"
        )
    if parts[-1] >= swarm.parts:
        raise UserError(f"{OPTION}: there is no part {parts[-1]}: they are numbered 0 to {swarm.parts - 1}")


class Forcing:
    """Founds parts by force, once no owner of them was known for long enough."""

    def __init__(
        self,
        parts: Sequence[int],
        foundings: Foundings,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Leave out the parts that this peer has founded by force before.

        A supervisor repeats the option with every start: the part must not be founded anew by that.

        Args:
            parts: Numbers of the parts, ascending.
            foundings: What this peer knows about them.
            wait_s: Time in which a live owner would have become known.
            clock: Monotonic, in seconds.
        """
        self._foundings, self._clock, self._at_s = foundings, clock, clock() + wait_s
        self._parts = [part for part in parts if not foundings.register(part).has_forced]
        for part in sorted(set(parts) - set(self._parts)):
            _print(
                f"{OPTION}: part {part} was founded here by force before; not again."
                " If it is lost once more, give the option to another peer, which may be a new one"
            )
        if self._parts:
            numbers = ", ".join(map(str, self._parts))
            _print(f"{OPTION}: looking for an owner of part {numbers} for {wait_s:g} s")

    def look(self, live: Mapping[bytes, PeerCard]) -> None:
        """Found the parts if it is time. `Foundings.look` has taken these cards before.

        Raises UserError if one has an owner, and OSError.
        """
        for part in self._parts:
            if owner := self._foundings.owner(part):
                raise UserError(
                    f"{OPTION}: part {part} is owned by {owner}, which is live: nothing was founded;"
                    " start this peer without the option"
                )
        if self._clock() < self._at_s:
            return
        for part in self._parts:
            self._found(part, live)
        self._parts = []

    def _found(self, part: int, live: Mapping[bytes, PeerCard]) -> None:
        before = self._foundings.register(part)
        after = self._foundings.force(part, live)
        if after == before:
            raise UserError(f"{OPTION}: part {part}: {MOST_FORCED} generations are used up")
        known = [say.members for card in live.values() if (say := card.foundings.get(part))]
        names = ", ".join(sorted(printable(live[key].name) for key in candidates(live)))
        _print(
            f"{OPTION}: part {part} is founded here in generation {after.accepted}, without a vote\n"
            f"  live peers that can keep it: {names}; {max(known, default=0)} knew it when it had an owner\n"
            "  it goes on from the newest anchors of live nodes: pushes that were merged after these are"
            " lost, and the momentum of the outer optimizer\n"
            "  a peer that comes back keeps its old replica aside: what it has acknowledged since is lost\n"
            "  do this at one peer only: of two that do, one sets aside what it has founded"
        )


def _print(text: str) -> None:
    print(f"aedit peer: {text}", file=sys.stderr, flush=True)
