"""Tells the peer of this machine what its node trains, and how fast."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from aedit.proto.agent.plan import AgentPlan
from aedit.proto.swarm import NODE, WRITTEN_EVERY_S, NodeState, write_node
from aedit.types import Layout, model_sha256

log = logging.getLogger(__name__)


class NodeReport:
    """Writes `node.json` beside `replicas.json`. Outside a swarm it writes nothing."""

    def __init__(self, plan: AgentPlan, clock: Callable[[], float] = time.monotonic) -> None:
        """Write for the node of this plan. clock: monotonic, in seconds."""
        self._path = Path(plan.replicas).parent / NODE if plan.replicas else None
        self._model = model_sha256(Layout(plan.units), plan.facts, plan.num_samples)
        self._clock, self._next_s = clock, float("-inf")

    def tell(self, steps_per_s: float) -> None:
        """Write the speed, unless the last one was written just before."""
        now_s = self._clock()
        if self._path is None or now_s < self._next_s:
            return
        self._next_s = now_s + WRITTEN_EVERY_S
        try:
            write_node(self._path, NodeState(self._model, steps_per_s))
        except OSError as error:
            log.warning("%s: %s; the peer does not know what this node trains", self._path, error)
