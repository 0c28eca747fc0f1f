"""Connection of a hub to its parent hub, of which it is a node (HALoS, arXiv:2506.04531).

It has an agent in threads, as a trainer has one: an update that a region's hub sends up is a push like any
other, and the parent's anchors are mixed into its own. No node of the region waits for the exchange.
"""

import logging
import math
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import aedit
from aedit.async_sgd.hub import parent_hub
from aedit.async_sgd.rules import Vector
from aedit.async_sgd.service import HubWorker
from aedit.launch.config import parse_config
from aedit.proto.agent import AgentLink, AgentLost, AgentPlan, Answer, Progress, start_agent
from aedit.proto.rpc import (
    PROTOCOL,
    ClientKeys,
    HelloReply,
    HelloRequest,
    HubClient,
    HubRefused,
    HubUnreachable,
)
from aedit.system import in_a_name
from aedit.types import Layout, UserError, Verdict

log = logging.getLogger(__name__)

POLL_S = 0.1
ASK_S = 2.0
"""Interval of questions for anchors of units that this region has not trained."""
RETRY_S = 5.0
"""Pause before the next attempt after the parent was unreachable or refused."""
JOIN_S = 60.0


@dataclass(slots=True)
class _UnitLink:
    """Exchange of one unit with the parent.

    The number of its last push and the version on which it is based.
    """

    base: int
    seq: int = 0
    steps_sent: int = 0
    """Steps of the region that the pushes so far contain."""
    waits: bool = False
    asked_s: float = -math.inf
    """When the parent was last asked for the anchor of a unit without a push."""


def name_at_parent(run: str, address: str) -> str:
    """Return the name of the hub of `run` at this address among its parent's nodes, within LONGEST_NAME."""
    return f"hub-of-{run[:32]}-at-{in_a_name(address)[-80:]}"


class Uplink:
    """Threads that push the updates of a region to the parent hub and mix in its anchors."""

    def __init__(
        self, engine: HubWorker, name: str, keys: ClientKeys, keys_directory: Path | None, rejoin: str
    ) -> None:
        """Prepare the connection; `start` opens it.

        Args:
            engine: Of the region's hub.
            name: Of this hub among the parent's nodes, kept over restarts.
            keys: For calls to the parent.
            keys_directory: Source of `keys`, for the agent; None without TLS.
            rejoin: Secret of this hub among the parent's nodes, kept over restarts.
        """
        self._engine, self._ledger, self._hub = engine, engine.ledger, engine.ledger.hub
        self._config = self._hub.config
        self._name, self._keys, self._directory, self._secret = name, keys, keys_directory, rejoin
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uplink", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; the parent notices the missing heartbeats."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_S):
            with self._ledger.lock:
                units, layout = self._hub.state.units.values(), self._hub.state.layout
                is_whole = bool(units) and all(unit.anchor is not None for unit in units)
            if layout is None or not is_whole:
                continue
            try:
                self._take_part(layout)
            except (HubUnreachable, HubRefused, AgentLost, TimeoutError, UserError) as error:
                log.warning("parent hub: %s; trying again in %g s", error, RETRY_S)
                self._stopping.wait(RETRY_S)
            except BaseException as error:
                self._engine.fail(error)
                return

    def _take_part(self, layout: Layout) -> None:
        """Take part in the parent's run until an error occurs or this hub ends."""
        with closing(
            HubClient(self._config.parent, self._keys, call_timeout_s=self._config.call_timeout_s)
        ) as client:
            parent = client.hello(HelloRequest(protocol=PROTOCOL, version=aedit.__version__))
        link = start_agent(self._plan(layout, parent), ranks=1, mode="thread")
        try:
            known = self._parent_anchors()
            for anchor, mine in zip(link.anchors, known, strict=True):
                anchor[:] = mine
            links = [_UnitLink(version) for version in link.join(JOIN_S)]
            self._mix_initial(link, known)
            while not self._stopping.wait(POLL_S):
                for unit, unit_link in enumerate(links):
                    self._exchange(link, unit, unit_link)
                link.tell(Progress(steps=self._hub.state.total_steps))
        finally:
            link.stop()

    def _plan(self, layout: Layout, parent: HelloReply) -> AgentPlan:
        theirs = parse_config(parent.config, f"the configuration of {self._config.parent}").hub
        state = self._hub.state
        return AgentPlan(
            addresses=tuple(self._config.parent.split(",")),
            standbys=tuple(filter(None, parent.standby.split(","))),
            name=self._name,
            run=parent.run,
            version=aedit.__version__,
            units=layout.units,
            facts=tuple(state.facts.items()),
            num_samples=state.num_samples,
            codec=theirs.codec,
            codec_down=theirs.codec_down,
            rejoin=self._secret,
            keys=str(self._directory or ""),
            heartbeat_s=theirs.heartbeat_s,
            expire_s=theirs.expire_s,
            call_timeout_s=theirs.call_timeout_s,
        )

    def _parent_anchors(self) -> list[Vector]:
        """Return the anchors that the parent has of the region, or will have if this hub founds its run."""
        with self._ledger.lock:
            units = self._hub.state.units
            found = [units[unit].up for unit in sorted(units)]
        return [up for up in found if up is not None]

    def _mix_initial(self, link: AgentLink, known: list[Vector]) -> None:
        """Mix in the parent's anchors at the start.

        A region without merges takes them unchanged, one that reconnects mixes them in. An update that was
        under way when this hub ended counts as not sent.
        """
        for unit, (anchor, mine) in enumerate(zip(link.anchors, known, strict=True)):
            with self._ledger.lock:
                state = self._hub.state.units[unit]
                if state.sent is not None:
                    self._ledger.commit([parent_hub.withdraw(unit)])
                share = 1.0 if state.version == 1 else None
            if not np.array_equal(anchor, mine):
                self._mix(unit, anchor, share)

    def _exchange(self, link: AgentLink, unit: int, unit_link: _UnitLink) -> None:
        if unit_link.waits:
            answer = link.answer(unit, unit_link.seq)
            if answer is not None:
                self._land(link, unit, unit_link, answer)
            return
        with self._ledger.lock:
            if unit not in parent_hub.due(self._hub):
                if self._hub.state.units[unit].apart:
                    self._ask(link, unit, unit_link)
                return
            self._ledger.commit([parent_hub.send(self._hub, unit)])
            owed, steps = parent_hub.owed(self._hub, unit), self._hub.state.units[unit].steps
        link.outbox[unit][:] = owed
        unit_link.seq, unit_link.waits = unit_link.seq + 1, True
        since, unit_link.steps_sent = max(1, steps - unit_link.steps_sent), steps
        link.written(unit, unit_link.seq)
        link.send(unit, unit_link.seq, base=unit_link.base, steps=since, tokens=0)

    def _ask(self, link: AgentLink, unit: int, unit_link: _UnitLink) -> None:
        """Ask for the parent's newest anchor of a unit of which there is nothing to push."""
        if time.monotonic() - unit_link.asked_s < ASK_S:
            return
        unit_link.asked_s = time.monotonic()
        unit_link.seq, unit_link.waits = unit_link.seq + 1, True
        link.written(unit, unit_link.seq)
        link.send(unit, unit_link.seq, base=unit_link.base, steps=0, tokens=0)

    def _land(self, link: AgentLink, unit: int, unit_link: _UnitLink, answer: Answer) -> None:
        if answer.verdict == Verdict.NONE:
            if answer.version > unit_link.base:
                is_untrained = self._hub.state.units[unit].steps == 0
                self._mix(unit, link.anchors[unit], 1.0 if is_untrained else None)
        elif answer.verdict == Verdict.MERGED:
            self._mix(unit, link.anchors[unit], None)
        else:
            with self._ledger.lock:
                self._ledger.commit([parent_hub.withdraw(unit)])
            if answer.verdict == Verdict.DISTRUSTED:
                self._mix(unit, link.anchors[unit], 1.0)
        unit_link.base, unit_link.waits = answer.version, False

    def _mix(self, unit: int, anchor: Vector, share: float | None) -> None:
        while not self._stopping.is_set() and not self._engine.mix(unit, anchor, share):
            self._stopping.wait(POLL_S / 10)
