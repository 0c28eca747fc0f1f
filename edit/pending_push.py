"""One push of a unit to the hub, from the outbox to the answer, and the detector of anomalous pushes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aedit.async_sgd.rules import PenaltyConfig
from aedit.edit.anchor_store import history, named_history
from aedit.edit.detector import NormHistory, judge, learned_only
from aedit.edit.flat_layout import SharedVector
from aedit.edit.units import SyncUnit
from aedit.proto.agent import Answer
from aedit.proto.transports import PeersMissing, Pending
from aedit.types import Verdict

if TYPE_CHECKING:
    from aedit.edit.hub_exchange import HubExchange

POLL_S = 0.005


@dataclass(slots=True)
class UnitProgress:
    """The state of one unit's exchange on this node."""

    anchors: SharedVector
    outbox: SharedVector
    version: int = 0
    """Version of the anchor from which the next pseudo-gradient is measured."""
    seq: int = 0
    sent_steps: int = 0
    """Inner steps in the push under way."""
    opened_steps: int = 0
    """Inner steps of this attempt when the unit's last round was opened."""
    used_steps: int = 0
    opened_samples: int = 0
    """Samples drawn in this attempt when the unit's last round was opened."""
    used_samples: int = 0
    answer: Answer | None = None

    def use(self) -> None:
        """Count the steps of the unit's last round as used."""
        self.used_steps, self.used_samples = self.opened_steps, self.opened_samples


class PendingPush(Pending[Tensor]):
    """Push of one unit, `Pending` until the hub has decided; it is sent once the outbox is written.

    Without steps it is a question for the newest anchor.
    """

    def __init__(self, sender: "HubExchange", i: int, unit: SyncUnit, place: UnitProgress) -> None:
        self._sender, self._i, self._unit, self._place, self._seq = sender, i, unit, place, place.seq
        self._sent = False
        self.done()

    def done(self) -> bool:
        """Send the push if the outbox has been written, and return whether the answer is there.

        Never waits.
        """
        place, link = self._place, self._sender.link
        if not self._sent and place.outbox.written():
            link.written(self._i, self._seq)
            if self._sender.shards.leads:
                steps = place.sent_steps
                tokens = steps * self._sender.tokens_per_step
                link.send(self._i, self._seq, base=place.version, steps=steps, tokens=tokens)
            self._sent = True
        if self._sent and place.answer is None:
            place.answer = link.answer(self._i, self._seq)
        return place.answer is not None

    def verdict(self) -> Verdict:
        """Wait for the answer and return the hub's decision.

        Raises:
            PeersMissing: No answer came within `timeout_s`.
        """
        timeout_s = self._sender.timeout_s
        deadline = time.monotonic() + timeout_s
        while not self.done():
            if time.monotonic() > deadline:
                push = f"unit {self._unit.name}, push {self._seq}"
                raise PeersMissing(f"the hub's answer for {push} did not come within {timeout_s:g} s")
            time.sleep(POLL_S)
        assert self._place.answer is not None
        return self._place.answer.verdict

    def result(self) -> Tensor:
        """Wait for the answer and return the next anchor, this rank's part as an fp32 vector.

        If the push was refused, return the anchor less the pseudo-gradient, which the next push then
        contains.
        """
        refused = self.verdict() == Verdict.REFUSED
        anchor = self._place.anchors.read()
        if not refused:
            return anchor
        return self._unit.representable(anchor) - self._place.outbox.read()


class PushDetector:
    """Compare the norms of a node's pushes with its own earlier norms.

    The number of steps in a push varies with the pace, and after an outage. Correct norms grow with it, but
    no faster. So a unit is distrusted only if its norm is too large both as it is (fewer steps cannot explain
    it) and per step (more steps cannot).

    Args:
        num_units: Number of units of the model.
        config: Threshold and length of the history.
    """

    def __init__(self, num_units: int, config: PenaltyConfig) -> None:
        self.norms = self.norms_per_step = NormHistory.empty(num_units, config.window)
        self._num_units, self._config = num_units, config

    def distrusted(
        self, G_L: Tensor, steps_L: Tensor, units: Sequence[int], apart: Sequence[int] = ()
    ) -> frozenset[int]:
        """Return the units whose norm is not credible, and add the norms of the others to the history.

        Args:
            G_L: Norms of `units`, float64.
            steps_L: Inner steps in the next push of every unit of the model, float64.
            units: The units of the round.
            apart: Those of them that are distrusted only if their norm is not finite.
        """
        at = list(units)
        all_L = torch.zeros(self._num_units, dtype=torch.float64)
        all_L[at] = G_L
        believed_L, norms = judge(all_L, self.norms, self._config)
        per_step = judge(all_L / steps_L.clamp(min=1), self.norms_per_step, self._config)
        self.norms = learned_only(norms, self.norms, at)
        self.norms_per_step = learned_only(per_step[1], self.norms_per_step, at)
        suspect_L = believed_L.isinf() & per_step[0].isinf()
        suspect_L[list(apart)] &= ~all_L[list(apart)].isfinite()
        return frozenset(i for i in units if suspect_L[i])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the histories by name."""
        return named_history("history", self.norms) | named_history("history_per_step", self.norms_per_step)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self.norms = history("history", state)
        self.norms_per_step = history("history_per_step", state)
