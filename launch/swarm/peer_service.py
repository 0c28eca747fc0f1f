"""Hello and Status of a peer, with rows of the live peers; `Overview` waits until enough are known."""

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import aedit
from aedit.async_sgd.service import HelloResponder
from aedit.launch.config import RunConfig, difference, given_to_nodes, method, to_toml
from aedit.proto.rpc import (
    PROTOCOL,
    ClientKeys,
    HubClient,
    HubRefused,
    HubUnreachable,
    Limits,
    Rates,
    Service,
    run_services,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import Contradiction, PeerCard, ReplicasFile
from aedit.types import printable

log = logging.getLogger(__name__)
_ASK_S = 2.0
_LEAST_S, _STEADY_S, _MOST_S = 3.0, 2.0, 60.0
"""Least time that it waits, time in which no other peer has come, and longest time that it waits."""
_ANSWERS = 3
"""Least number of answers of other peers in which none has come."""
_LATE_S = 3.0
"""Time between two looks after which this process was stopped, or has too little of its machine."""
_MANY = 3
"""One of so many that vanish within a lease: it may be this peer that receives nothing."""
_LINES_PER_S = 0.2


class PeerService:
    """Hello and Status of a peer. Any thread may call."""

    def __init__(
        self,
        config: RunConfig,
        replicas: ReplicasFile,
        keys: ClientKeys,
        peers: Callable[[], Sequence[dict[str, object]]],
        troubles: Callable[[], Sequence[str]],
    ) -> None:
        """Answer for the run.

        Args:
            config: Of the run.
            replicas: Where the replicas of each part are.
            keys: For calls to their owners.
            peers: Returns the live peers.
            troubles: Returns what is wrong with each part, or became of it; "" if all is as it was.
        """
        self._config, self._replicas, self._keys = config, replicas, keys
        self._peers, self._troubles = peers, troubles
        self._responder = HelloResponder(
            protocol=PROTOCOL,
            method=(own := method(config)),
            difference=partial(difference, own),
            version=aedit.__version__,
            run=config.name,
            config=to_toml(given_to_nodes(config), defaults=False),
            addresses=lambda: tuple(part.owner for part in replicas.parts()),
            standby=lambda: "",
        )

    def services(self) -> tuple[Service, ...]:
        """Return the services, to be served beside the exchange of cards."""
        return run_services(self.hello, self.status, Limits())

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Return the run's configuration."""
        return self._responder.reply(request, 0)

    def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        """Return as JSON the live peers, and the status of each part as its owner gives it."""
        parts = [self._of_part(part.owner, request) for part in self._replicas.parts()]
        said: dict[str, Any] = {"run": self._config.name, "peers": list(self._peers()), "parts": parts}
        said["troubles"] = list(self._troubles())
        return pb.StatusReply(json=json.dumps(said))

    def _of_part(self, owner: str, request: pb.StatusRequest) -> dict[str, Any] | None:
        """Return the status of a part, None while it has no owner that gives one."""
        if not owner:
            return None
        try:
            with closing(HubClient(owner, self._keys, call_timeout_s=_ASK_S)) as client:
                found = json.loads(client.status(request, _ASK_S).json)
        except (HubUnreachable, HubRefused, ValueError, RecursionError):
            return None
        leads = isinstance(found, dict) and "follows" not in found
        return found | {"owner": owner} if leads else None


class Overview:
    """Waits after the start, after a stop, and when many have vanished.

    A peer that has just started knows the peer that it was given, then the peers of that one, once they
    have answered. Until then it seems to be one of few: it would begin to keep, and fetch, every part of the
    model. So would one that receives cards again after a stop or a cut. On a busy machine answers come
    late, so answers count and not only time.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Wait from now on. lease_s: of the peers' cards. clock: in seconds."""
        self._lease_s, self._clock = lease_s, clock
        self._looked_s = self._came_s = clock()
        self._waits_since_s: float | None = self._looked_s
        self._answers, self._live = 0, frozenset[bytes]()
        self._vanished_s: dict[bytes, float] = {}

    def is_enough(self, live: Collection[bytes], answers: int) -> bool:
        """Return whether the peer may begin to keep parts.

        Args:
            live: Keys of the live peers.
            answers: Number of answers of other peers that it has taken since it started.
        """
        now, before = self._clock(), self._live
        late = now - self._looked_s > _LATE_S
        self._live, self._looked_s = frozenset(live), now
        if late or not self._live <= before:
            self._came_s, self._answers = now, answers
        if late or (before - self._live and self._many_have_vanished(before, now)):
            self._waits_since_s = now if self._waits_since_s is None else self._waits_since_s
        if self._waits_since_s is None:
            return True
        waited_s = now - self._waits_since_s
        is_steady = now - self._came_s >= _STEADY_S and answers - self._answers >= _ANSWERS
        if waited_s >= _MOST_S or (waited_s >= _LEAST_S and is_steady):
            self._waits_since_s = None
        return self._waits_since_s is None

    def _many_have_vanished(self, before: frozenset[bytes], now: float) -> bool:
        self._vanished_s |= dict.fromkeys(before - self._live, now)
        self._vanished_s = {
            key: at_s
            for key, at_s in self._vanished_s.items()
            if key not in self._live and now - at_s < self._lease_s
        }
        return len(self._vanished_s) * _MANY >= len(self._live) + len(self._vanished_s)


def peer_rows(
    live: Mapping[bytes, PeerCard], me: bytes, shut_out: Mapping[bytes, Contradiction], own: str = ""
) -> list[dict[str, object]]:
    """Return a row for each live peer, by name, and one for each that is shut out, as JSON values.

    Args:
        live: Cards of the live peers by key, that of the peer `me` included.
        me: Key of the reporting peer.
        shut_out: Keys that are shut out, with the proof.
        own: What is wrong with the reporting peer; "" if nothing is.
    """
    differ = of_another_model(live, me)
    cards = sorted(live.items(), key=lambda item: (item[1].name, item[0]))
    found = [_row(card, differs=key in differ, trouble=own if key == me else "") for key, card in cards]
    return found + [
        {"name": key.hex()[:16], "address": "-", "key": key.hex(), "state": f"shut out: {fault.reason}"}
        for key, fault in shut_out.items()
    ]


def of_another_model(live: Mapping[bytes, PeerCard], me: bytes) -> dict[bytes, PeerCard]:
    """Return the peers whose node trains another model than the node of the peer `me`.

    For the views. The hubs refuse such a node by themselves, and a replica needs no node: a card that lies
    about the model changes nothing else.
    """
    own = live[me].model if me in live else ""
    return {key: card for key, card in live.items() if own and card.model and card.model != own}


class OtherModels:
    """Logs which peers train another model, once each and at a bounded rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty. clock: in seconds."""
        self._lines = Rates(_LINES_PER_S, clock=clock)
        self._named: dict[bytes, str] = {}
        """Models that were named, by the key of a peer that is still there."""

    def name(self, live: Mapping[bytes, PeerCard], me: bytes) -> None:
        """Log which live peers train another model than the peer `me`, and were not named for it."""
        differ = of_another_model(live, me)
        self._named = {key: model for key, model in self._named.items() if key in differ}
        for key, card in differ.items():
            if self._named.get(key) != card.model and self._lines.allow(None):
                log.warning(
                    "%s trains another model (%s) than this machine (%s): the owners of the parts refuse the"
                    " node that differs from theirs",
                    printable(card.name),
                    card.model[:16],
                    live[me].model[:16],
                )
                self._named[key] = card.model


def _row(card: PeerCard, *, differs: bool, trouble: str) -> dict[str, object]:
    states = ["leaving"] * card.leaving + ["trains another model"] * differs + [trouble] * bool(trouble)
    return {
        "name": card.name,
        "address": card.address,
        "key": card.public_key.hex(),
        "certificate": card.fingerprint,
        "role": ", ".join(["trains"] * bool(card.model) + ["keeps parts"] * bool(card.address)),
        "owns": sorted(part for part, replica in card.parts.items() if replica.leads),
        "keeps": sorted(part for part, replica in card.parts.items() if not replica.leads),
        "steps_per_s": card.steps_per_s,
        "model": card.model,
        "state": ", ".join(states),
    }
