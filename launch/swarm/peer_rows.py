"""The peers of a run as the views show them."""

import logging
import time
from collections.abc import Callable, Mapping

from aedit.proto.rpc import Rates
from aedit.proto.swarm import Contradiction, PeerCard
from aedit.types import printable

log = logging.getLogger(__name__)

_LINES_PER_S = 0.2


def rows(
    live: Mapping[bytes, PeerCard], me: bytes, shut_out: Mapping[bytes, Contradiction]
) -> list[dict[str, object]]:
    """Return a row for each live peer, by name, and one for each that is shut out, as JSON values.

    Args:
        live: Cards of the live peers by key, that of the peer `me` included.
        me: Key of the peer that tells.
        shut_out: Keys that are shut out, with the proof.
    """
    differ = of_another_model(live, me)
    cards = sorted(live.items(), key=lambda item: (item[1].name, item[0]))
    found = [_row(card, differs=key in differ) for key, card in cards]
    return found + [
        {"name": key.hex()[:16], "address": "-", "key": key.hex(), "state": f"shut out: {fault.reason}"}
        for key, fault in shut_out.items()
    ]


def of_another_model(live: Mapping[bytes, PeerCard], me: bytes) -> dict[bytes, PeerCard]:
    """Return the peers whose node trains another model than the node of the peer `me`.

    Only for people. The hubs refuse such a node by themselves, and a replica needs no node: a card that lies
    about the model changes nothing else.
    """
    own = live[me].model if me in live else ""
    return {key: card for key, card in live.items() if own and card.model and card.model != own}


class OtherModels:
    """Names in the log who trains another model, once each and at a bounded rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Name nobody yet. clock: in seconds."""
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


def _row(card: PeerCard, *, differs: bool) -> dict[str, object]:
    states = ["leaving"] * card.leaving + ["trains another model"] * differs
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
