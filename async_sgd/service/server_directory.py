"""The directory of rollout servers at a leading hub: announcements, accusations, bans.

`Directory` decides, without clock, files or network; `ServerDirectory` checks callers and answers. Only bans
are journaled: a server announces itself again to a hub that comes back. A server is no member of the run: it
counts for no quorum and holds no leases.
"""

import json
import math
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from aedit.async_sgd.hub import Denied, HubState
from aedit.async_sgd.rules import Banned
from aedit.async_sgd.service import messages
from aedit.async_sgd.service.request_guard import RequestGuard, check_name
from aedit.proto.rpc import (
    LONGEST_REASON,
    MOST_EVIDENCE_BYTES,
    Caller,
    Rates,
    hub_pb2,
    is_signed_card,
)
from aedit.proto.rpc import directory_pb2 as pb
from aedit.types import address_fault, name_fault

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
_MOST_SHOWN = 64
"""Accused servers whose evidence `status` shows, the latest ones: it must fit into one message."""
_EVENTS_PER_S = 5.0
"""Limit of recorded events of servers that come and go, so that they cannot fill the disk."""

Event = Callable[..., None]


@dataclass(slots=True)
class Entry:
    """One server, from its first announcement on; it stays on the list for a while when it is gone."""

    card: pb.ServerCard
    seen_s: float
    until_s: float
    """End of its lease."""
    gone: str = ""
    """Why it is no longer listed."""

    def lives(self, now: float) -> bool:
        """Return whether its lease has not ended."""
        return not self.gone and now < self.until_s


class Directory:
    """Servers of a run by name. One call at a time; times are those of any monotonic clock, in seconds."""

    def __init__(self, state: HubState, *, most: int, lease_s: float) -> None:
        """Create an empty directory.

        state: of the hub; its members and bans are read. most: servers that may live at a time.
        """
        self.lease_s = lease_s
        self._state, self._most = state, most
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._accusations: OrderedDict[tuple[str, bytes], dict[int, int]] = OrderedDict()
        """Number of accusations by node, by name and key of the server."""
        self._evidence: dict[tuple[str, bytes], tuple[str, dict[str, Any]]] = {}
        """Reason and evidence of the last accusation."""

    def announce(
        self, card: pb.ServerCard, now: float, *, certified: bool = False
    ) -> tuple[bool, Banned | None]:
        """Register a server or renew its lease; return whether it is new, and its ban if there is one.

        certified: whether a certificate shows that the name is its own. That it has the key of its card was
        checked before. Raises Denied for a card that cannot be true, for a name or key that another server
        holds until its lease ends, and if there are too many servers.
        """
        _check_card(card, self._state.policy_version)
        before = self._entries.get(card.name)
        lives = before is not None and before.lives(now)
        if (ban := self._state.ban_of(card.name, card.public_key)) is not None:
            return False, ban
        if lives and before is not None and before.card.public_key != card.public_key and not certified:
            left_s = before.until_s - now
            raise Denied("taken", f"another server is named {card.name!r}; its lease ends in {left_s:.0f} s")
        for name, entry in self._entries.items():
            if name != card.name and entry.card.public_key == card.public_key and entry.lives(now):
                text = f"the server {name!r} has this public key: each server needs its own"
                raise Denied("taken", text)
        if not lives and len(self.live(now)) >= self._most:
            raise Denied("full", f"this hub lists {self._most} servers (hub.limits.servers)")
        is_new = not lives or before is None or before.card.process != card.process
        self._entries[card.name] = Entry(card, now, now + self.lease_s)
        self._entries.move_to_end(card.name)
        self._accusations.setdefault((card.name, card.public_key), {})
        self._forget(now)
        return is_new, None

    def withdraw(self, name: str, process: int) -> bool:
        """Take out a server that ends; return whether it was there. Raises Denied for another process."""
        entry = self._entries.get(name)
        if entry is None or entry.gone:
            return False
        if entry.card.process != process:
            raise Denied("foreign", f"another process is the server {name!r}")
        entry.gone = "left"
        return True

    def live(self, now: float) -> list[pb.ServerCard]:
        """Return the servers whose leases have not ended and that are not banned, by name."""
        cards = [entry.card for _, entry in sorted(self._entries.items()) if entry.lives(now)]
        return [card for card in cards if self._state.ban_of(card.name, card.public_key) is None]

    def accuse(
        self,
        *,
        server: str,
        public_key: bytes,
        node: int,
        reason: str,
        evidence: dict[str, Any],
        elapsed_s: float,
    ) -> list[Banned]:
        """Count an accusation; return Banned once more than half of the live training nodes made one.

        Raises Denied for a server that was never announced, or had another key.
        """
        counts = self._accusations.get((server, public_key))
        if counts is None:
            raise Denied("unknown", f"no server {server[:64]!r} with this key is in the directory")
        counts[node] = counts.get(node, 0) + 1
        self._evidence[server, public_key] = reason, evidence
        self._accusations.move_to_end((server, public_key))
        voters = self._state.live.keys() & counts.keys()
        if 2 * len(voters) <= len(self._state.live):
            return []
        key = public_key.hex()
        if any(ban.server == server and ban.public_key == key for ban in self._state.banned):
            return []
        nodes = ", ".join(self._state.members[node].name for node in sorted(voters)[:4])
        text = f"accused by {len(voters)} of {len(self._state.live)} nodes ({nodes}): {reason}"
        return [Banned(server, key, text, elapsed_s)]

    def expire(self, now: float) -> list[str]:
        """Note which servers have fallen silent; return the names of those that just did."""
        silent = [name for name, e in self._entries.items() if not e.gone and now >= e.until_s]
        for name in silent:
            self._entries[name].gone = f"silent for {self.lease_s:g} s"
        return silent

    def status(self, now: float) -> list[dict[str, Any]]:
        """Return everything that the views show of each server, as values that JSON can hold."""
        known = sorted(self._entries.items())
        shown = [key for key in self._accusations if key in self._evidence][-_MOST_SHOWN:]
        return [self._server(entry, now, shown) for _, entry in known]

    def _server(self, entry: Entry, now: float, shown: list[tuple[str, bytes]]) -> dict[str, Any]:
        card, key = entry.card, (entry.card.name, entry.card.public_key)
        ban, counts = self._state.ban_of(*key), self._accusations.get(key, {})
        reason, evidence = self._evidence.get(key, ("", None))
        return {
            "name": card.name,
            "role": "rollout",
            "address": card.address,
            "public_key": card.public_key.hex(),
            "state": _state(entry, ban, now),
            "live": entry.lives(now) and ban is None,
            "has_lease": entry.lives(now),
            "silent_s": now - entry.seen_s,
            "serial": card.serial,
            "lag": max(0, self._state.policy_version - card.serial),
            "rows": card.rows,
            "tokens_per_s": card.tokens_per_s,
            "running": card.running,
            "waiting": card.waiting,
            "idle_s": card.idle_s,
            "idle_used_s": card.idle_used_s,
            "figures": dict(card.figures),
            "accused": {self._state.members[node].name: count for node, count in sorted(counts.items())},
            "reason": reason,
            "evidence": evidence if key in shown else None,
            "banned": ban.reason if ban else "",
        }

    def _forget(self, now: float) -> None:
        """Drop the oldest departed servers and accusations beyond `limits.servers`."""
        gone = [name for name, entry in self._entries.items() if not entry.lives(now)]
        for name in gone[: max(0, len(gone) - self._most)]:
            del self._entries[name]
        held = {(e.card.name, e.card.public_key) for e in self._entries.values()}
        spare = [key for key in self._accusations if key not in held]
        blank = [key for key in spare if not self._accusations[key]]
        accused = [key for key in spare if self._accusations[key]]
        for keys in (blank, accused):  # empty ones must not push out accusations
            for key in keys[: max(0, len(keys) - self._most)]:
                del self._accusations[key]
                self._evidence.pop(key, None)


class ServerDirectory:
    """`DirectoryCore` of a leading hub."""

    def __init__(self, guard: RequestGuard, event: Event) -> None:
        """Create an empty directory; bans are those of the hub's journal."""
        config = guard.ledger.hub.config
        self._guard, self._ledger, self._event = guard, guard.ledger, event
        state = self._ledger.hub.state
        self._directory = Directory(state, most=config.limits.servers, lease_s=config.expire_s)
        self._salt = secrets.token_bytes(16)
        self._events = Rates(_EVENTS_PER_S)

    # --- calls

    def announce(self, card: pb.ServerCard, caller: Caller) -> pb.AnnounceReply:
        """Register a server, or renew its lease. Raises Refusal with the reason."""
        check_name(card.name, caller.name, "server")
        if not is_signed_card(card):
            raise messages.invalid("signature: the card is not signed with the key that it names")
        with self._guard.deciding() as now:
            self._check_run(card.run)
            self._expire(now)
            is_new, ban = self._directory.announce(card, now, certified=caller.name is not None)
            if is_new:
                self._happened("server", name=card.name, address=card.address)
            return pb.AnnounceReply(
                lease_s=self._directory.lease_s,
                banned=ban is not None,
                reason=ban.reason if ban else "",
                finished=self._ledger.hub.progress(now) >= 1.0,
            )

    def withdraw(self, request: pb.WithdrawRequest, caller: Caller) -> pb.WithdrawReply:
        """Take out a server that ends."""
        check_name(request.name, caller.name, "server")
        with self._guard.deciding():
            self._check_run(request.run)
            if self._directory.withdraw(request.name, request.process):
                self._happened("server_gone", name=request.name, reason="left")
        return pb.WithdrawReply()

    def servers(self, request: pb.ServersRequest, caller: Caller) -> pb.ServersReply:
        """Return the live servers of the run."""
        with self._guard.deciding() as now:
            self._check_run(request.run)
            cards = self._directory.live(now)
        return pb.ServersReply(servers=[self._listed(card) for card in cards])

    def accuse(self, accusation: pb.Accusation, caller: Caller) -> pb.AccuseReply:
        """Count what a live member says of a server; ban it once more than half of them say so."""
        who = hub_pb2.Who(run=accusation.run, node=accusation.node, session=accusation.session)
        with self._guard.deciding() as now:
            self._check_run(accusation.run)
            member = self._guard.speaker(who)
            server, reason = accusation.server, accusation.reason
            if not reason or len(reason) > LONGEST_REASON or not reason.isprintable():
                most = f"1 to {LONGEST_REASON} printable characters"
                raise messages.invalid(f"an accusation's reason has {most}")
            evidence = _evidence(accusation.evidence)
            decided = self._directory.accuse(
                server=server,
                public_key=accusation.public_key,
                node=member.node,
                reason=reason,
                evidence=evidence,
                elapsed_s=self._ledger.hub.elapsed_s(now),
            )
            self._happened("accused", server=server, node=member.name, reason=reason, evidence=evidence)
            position = self._ledger.commit(decided)
            ban = self._ledger.hub.state.ban_of(server, accusation.public_key)
        if decided:
            self._guard.durable(position)
        return pb.AccuseReply(banned=ban is not None)

    # --- for the hub itself

    def status(self, now: float) -> list[dict[str, Any]]:
        """Return the servers for the views; the ledger's lock is held."""
        self._expire(now)
        return self._directory.status(now)

    def num_live(self, now: float) -> int:
        """Return the number of live servers; the ledger's lock is held."""
        return len(self._directory.live(now))

    # --- inside

    def _check_run(self, run: str) -> None:
        if run != self._guard.run:
            raise messages.invalid(f"this hub leads the run {self._guard.run!r}, not {run[:64]!r}")

    def _listed(self, card: pb.ServerCard) -> pb.ServerCard:
        """Return a card as others see it. The number of a process is secret: it could withdraw its server."""
        listed = pb.ServerCard()
        listed.CopyFrom(card)
        listed.DiscardUnknownFields()
        listed.ClearField("signature")
        listed.process = int.from_bytes(sha256(self._salt + b"%d" % card.process).digest()[:8], "little")
        return listed

    def _expire(self, now: float) -> None:
        for name in self._directory.expire(now):
            self._happened("server_gone", name=name, reason="silent")

    def _happened(self, event: str, **values: Any) -> None:
        if self._events.allow(event):
            self._event(event, **values)


def _check_card(card: pb.ServerCard, newest: int) -> None:
    """Raise Denied for the first value that cannot be true. newest: version of the run's policy."""
    if fault := name_fault(card.name):
        raise _untrue(f"server's name {fault}: choose another one with --as")
    if fault := address_fault(card.address):
        raise _untrue(fault)
    if len(card.public_key) != KEY_BYTES:
        raise _untrue(f"public_key has {len(card.public_key)} bytes; an Ed25519 key has {KEY_BYTES}")
    if card.process == 0:
        raise _untrue("process is 0: a server's process draws a random number at its start")
    if len(card.state) > _LONGEST_STATE or not card.state.isprintable():
        raise _untrue(f"state has at most {_LONGEST_STATE} printable characters")
    if card.rows > _MOST_ROWS:
        raise _untrue(f"rows is {card.rows}; at most {_MOST_ROWS} are possible")
    numbers = {"tokens_per_s": card.tokens_per_s, "idle_s": card.idle_s, "idle_used_s": card.idle_used_s}
    for name, value in numbers.items():
        most = _MOST_TOKENS_PER_S if name == "tokens_per_s" else _MOST_SECONDS
        if not (math.isfinite(value) and 0 <= value <= most):
            raise _untrue(f"{name} is {value:g}; it must be in [0, {most:g}]")
    if card.serial > newest:
        raise _untrue(f"serial is {card.serial}; the newest version of this run is {newest}")
    if len(card.figures) > _MOST_FIGURES:
        raise _untrue(f"there are {len(card.figures)} figures; at most {_MOST_FIGURES} are taken")
    for name, value in card.figures.items():
        if len(name) > _LONGEST_FIGURE or not _FIGURE.fullmatch(name):
            raise _untrue(f"figure {name[:64]!r}: a name has 1 to {_LONGEST_FIGURE} letters, digits or _./-")
        if not abs(value) <= _MOST_FIGURE:  # also false for NaN
            raise _untrue(f"figure {name} is {value:g}; it must be within {_MOST_FIGURE:g} of 0")


def _state(entry: Entry, ban: Banned | None, now: float) -> str:
    if ban is not None:
        return "banned"
    if entry.gone:
        return f"gone: {entry.gone}"
    return entry.card.state if entry.lives(now) else "gone: silent"


def _evidence(data: bytes) -> dict[str, Any]:
    """Return the evidence. Raises Refusal if it is too long, or neither a JSON object nor empty."""
    if len(data) > MOST_EVIDENCE_BYTES:
        raise messages.invalid(f"evidence has {len(data)} bytes; at most {MOST_EVIDENCE_BYTES} are kept")
    try:
        found = json.loads(data.decode()) if data else {}
    except (ValueError, RecursionError) as error:
        raise messages.invalid(f"evidence is not JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise messages.invalid("evidence is not a JSON object")
    plain: dict[str, Any] = json.loads(messages.json_line(found))  # without NaN
    return plain


def _untrue(reason: str) -> Denied:
    return Denied("different", reason)
