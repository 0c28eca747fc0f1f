"""The node agent: all network work of a node, as a process or as threads of the trainer.

It merges the news of all hub processes, and writes for the peer of a swarm what its node trains.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from aedit import traces
from aedit.proto.agent.connections import Connections, Donor
from aedit.proto.agent.joining import InitialSync
from aedit.proto.agent.leases import STOCK, Speed, Stock, Watchdog
from aedit.proto.agent.mailbox import AgentState, Mailbox, WakeReceiver, Wants, remove
from aedit.proto.agent.membership import Membership
from aedit.proto.agent.plan import AgentPlan
from aedit.proto.agent.unit_transfers import Traffic, Transfer, UnitTransfers
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.rpc import lineage
from aedit.proto.swarm import NODE, WRITTEN_EVERY_S, NodeState, write_node
from aedit.types import Layout, News, UserError, model_sha256

log = logging.getLogger(__name__)


class NodeStateFile:
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


@dataclass(slots=True)
class RunNews:
    """The run as reported to the trainer. It never goes back, also if part 0 of a swarm begins anew."""

    news: pb.News = field(default_factory=pb.News)
    """News of hub process 0."""
    _of_parts: dict[int, pb.News] = field(default_factory=dict)
    _past: News = field(default_factory=News)
    """The state of the run when part 0 was founded again last."""

    def take_news(self, part: int, news: pb.News) -> None:
        """Take the news of a hub process."""
        if part == 0 and self.news.term and lineage(news.term) != lineage(self.news.term):
            self._past = self.current()
        self._of_parts[part] = news
        self.news = news if part == 0 else self.news

    def current(self) -> News:
        """Return the news for the trainer.

        A part that was founded again counts from zero: then the past here and the other parts tell more.
        """
        newest = _news(self.news)
        if not lineage(self.news.term):
            return newest
        past, others = self._past, list(self._of_parts.values())
        progress = max(min(1.0, past.progress + newest.progress), *(one.progress for one in others))
        return replace(
            newest,
            round=past.round + newest.round,
            total_steps=max(past.total_steps + newest.total_steps, *(one.total_steps for one in others)),
            total_tokens=max(past.total_tokens + newest.total_tokens, *(one.total_tokens for one in others)),
            elapsed_s=max(past.elapsed_s + newest.elapsed_s, *(one.elapsed_s for one in others)),
            progress=progress,
            finished=progress >= 1.0 or newest.finished,
        )


def _news(news: pb.News) -> News:
    return News(
        age_s=0.0,
        round=news.round,
        pace_steps=news.pace_steps,
        nodes=news.nodes,
        total_steps=news.total_steps,
        total_tokens=news.total_tokens,
        elapsed_s=news.elapsed_s,
        progress=news.progress,
        finished=news.finished,
        evaluates=news.evaluates,
    )


LOOK_S = 0.5
"""How often the agent looks around without having been woken."""
LEAVING_S = 0.05
"""The same while a trainer that leaves waits for its last exchanges."""
SOON_S = 0.002
"""The same while an exchange waits for a rank that is still writing."""


class Agent:
    """A node agent. `run` is the body of a process or a thread.

    It returns when the trainer has left or has ended.
    """

    def __init__(
        self, plan: AgentPlan, box: Mailbox, wakeups: WakeReceiver, connections: Connections
    ) -> None:
        self._plan, self._box, self._wakeups, self._connections = plan, box, wakeups, connections
        self._traffic = Traffic()
        self._stock = Stock(
            samples_per_step=plan.samples_per_step, lasts_s=STOCK * plan.expire_s, most_steps=plan.steps_ahead
        )
        self._lease_lock = threading.Condition()
        """Notified when the first hub has received what is used."""
        self._leased_upto = self._demand = 0
        self._announced = self._known_used = 0
        """Samples of this attempt that count as used, accepted or not; and those that the first hub knows."""
        self._news, self._node_report = RunNews(), NodeStateFile(plan)
        self._watchdog, self._speed, self._report_lock = Watchdog(), Speed(), threading.Lock()
        self._started = [0] * len(plan.units)
        self._steps = 0
        self._is_alive: Callable[[], bool] = lambda: True
        self._memberships = [Membership(k, plan, connections.hub) for k in range(len(plan.addresses))]
        self._transfers = UnitTransfers(plan, box, self._memberships, self._traffic)
        self._transfers.on_failure(self._fail)
        self._transfers.consumed, self._transfers.announce_use = self._consumed, self.announce_use
        for membership in self._memberships:
            membership.process = self._memberships[0].process
            membership.known = self._transfers.known
            membership.awaits = partial(self._transfers.awaits, membership.part)
            membership.is_computing = self._is_computing
        self._initial_sync = InitialSync(plan, box, self._transfers, self._traffic)
        self._threads: list[threading.Thread] = []

    def run(self, is_alive: Callable[[], bool] = lambda: True) -> bool:
        """Serve until the trainer has left (True), has ended, or nothing more can be done (False).

        is_alive: whether the trainer lives, as far as is known without the wakeups.
        """
        self._is_alive = is_alive
        try:
            if not self._until(lambda: self._box.wanted() != Wants.NOTHING):
                return False
            self._begin()
            if not self._until(lambda: self._box.wanted() == Wants.LEAVE and not self._transfers.under_way):
                return False
            for membership in self._memberships:
                membership.leave(self._consumed(self._used()) if membership.part == 0 else [])
            self._box.end(AgentState.GONE)
            return True
        except Exception as error:
            self._fail(error)
            return False
        finally:
            self._box.end(AgentState.LOST, "the trainer has let it go")
            self._close()

    def _until(self, is_over: Callable[[], bool]) -> bool:
        """Start ordered exchanges until `is_over` and return True.

        False if the trainer or the agent has ended.
        """
        while self._box.state() in (AgentState.IDLE, AgentState.MEMBER):
            pending = self._start_ordered()
            self._give()
            self._note_steps()
            if not pending and is_over():
                return True
            look_s = LEAVING_S if self._box.wanted() == Wants.LEAVE else LOOK_S
            if not self._wakeups.wait(SOON_S if pending else look_s) or not self._is_alive():
                return False
            if self._box.all_attached():
                remove(self._box)
        return False

    def _note_steps(self) -> None:
        """Let the memberships report soon that a long step of the trainer has ended."""
        if (steps := self._box.progress().steps) != self._steps:
            self._steps = steps
            for membership in self._memberships:
                membership.has_stepped()

    def _is_computing(self) -> bool:
        """Return whether the trainer is in a step and needs nothing of its hubs meanwhile."""
        is_waiting = self._transfers.under_way or self._stock.is_short
        return self._steps > 0 and not is_waiting and self._box.wanted() == Wants.JOIN

    def _start_ordered(self) -> bool:
        """Start the exchanges whose slices are complete; return whether others have been ordered."""
        waiting = False
        for unit, (seq, base, steps, tokens, used, *words) in enumerate(self._box.orders().tolist()):
            if seq <= self._started[unit]:
                continue
            if not self._box.all_written(unit, seq):
                waiting = True
                continue
            self._started[unit] = seq
            round_ = self._news.news.round
            self._transfers.start(
                Transfer(unit, seq, base, steps, tokens, used, round_, traces.of_words(words))
            )
        return waiting

    # --- begin and end

    def _begin(self) -> None:
        """Serve anchors to other nodes if the plan says so, and connect to the hubs."""
        self._node_report.tell(0.0)
        donor = Donor(self._plan.run, self._box.anchors, self._transfers.versions, self._transfers.guards)
        address = self._connections.open(donor, self._plan.donor) if self._plan.donor else ""
        for membership in self._memberships:
            membership.ranks, membership.donor = self._box.ranks, address
            self._thread(partial(membership.run, self), f"heartbeats-{membership.part}")

        def enter() -> None:
            versions = self._initial_sync.enter(self._memberships, self._connections.donors.get)
            if versions is not None:
                self._box.admit(self._memberships[0].node, versions)
                for membership in self._memberships:
                    membership.ask_soon()  # the hub waits for no push of a node that still joins

        self._thread(enter, "initial_sync")

    def _thread(self, body: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                body()
            except Exception as error:
                self._fail(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _close(self) -> None:
        for membership in self._memberships:
            membership.stop()
        self._initial_sync.close()
        self._transfers.close()
        for thread in self._threads:
            thread.join(timeout=1.0)
        for membership in self._memberships:
            membership.client.close()
        self._connections.close()
        self._wakeups.close()
        remove(self._box)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, UserError):  # a person must act: no restart of the node can help
            return self._box.end(AgentState.REFUSED, str(error))
        log.error("the agent gives up", exc_info=error)
        self._box.end(AgentState.LOST, f"{type(error).__name__}: {error}")

    # --- called by the memberships, each in its own thread

    def joined(self, part: int, reply: pb.JoinReply) -> None:
        """Take the reply of hub process `part` to a join."""
        self._transfers.accepted(part, reply.seqs)
        self._initial_sync.joined(part, reply)
        if part == 0:
            self._box.speak_as(reply.session)
        self.take_news(part, reply.news)

    def refounded(self, part: int, generation: int) -> None:
        """Begin anew with a part that was lost after this generation and founded again."""
        self._transfers.refounded(part, generation)

    def inherits(self) -> Sequence[int]:
        """Return the stamps of the anchors from which parts that were founded again can go on."""
        return self._transfers.inherits

    def reported(self) -> Sequence[int]:
        """Return the stamps of the newest anchors of such parts that hubs have reported."""
        return self._transfers.reported

    def leased_upto(self) -> int:
        """Return the end of the last positions of samples that this node was given."""
        return self._leased_upto

    def take_news(self, part: int, news: pb.News) -> None:
        """Take the news of hub process `part`."""
        self._transfers.take_news(news.units)
        self._news.take_news(part, news)
        if news.brings and (units := self._transfers.asked_for(news.brings)):
            self._thread(partial(self._transfers.bring, units), f"bring-{part}")
        if part == 0:
            self._box.publish_news(self._news.current(), time.monotonic())

    def report(self, part: int) -> pb.HeartbeatRequest:
        """Return the heartbeat for hub process `part`."""
        progress, now_s = self._box.progress(), time.monotonic()
        if part == 0:
            with self._report_lock:
                self._watchdog = self._watchdog.see(progress.steps, now_s)
                self._speed = self._speed.see(progress.steps, progress.busy_s)
        heartbeat = pb.HeartbeatRequest(steps=progress.steps, tokens=progress.tokens, loss=progress.loss)
        heartbeat.steps_per_s = self._speed.per_s
        heartbeat.busy_s, heartbeat.wait_s = progress.busy_s, progress.wait_s
        heartbeat.wire_s = self._traffic.wire_s
        heartbeat.bytes_up, heartbeat.bytes_down = self._traffic.bytes_up, self._traffic.bytes_down
        heartbeat.rl.update(progress.rl)
        heartbeat.state = self._state(now_s)
        heartbeat.consumed.extend(self._consumed(self._used()) if part == 0 else [])
        return heartbeat

    @property
    def steps_per_s(self) -> float:
        """Return the speed of the last report; 0 before it is known."""
        return self._speed.per_s

    def beaten(self, part: int, heartbeat: pb.HeartbeatRequest) -> None:
        """Note that hub process `part` has the heartbeat."""
        self._transfers.statements.save()
        if part == 0:
            self._node_report.tell(heartbeat.steps_per_s)
            with self._lease_lock:
                known = self._stock.leases.known([(c.start, c.upto) for c in heartbeat.consumed])
                self._stock.settle(known)
                self._known_used = max(self._known_used, known)
                self._lease_lock.notify_all()
                self._stock.lasts_s = STOCK * self._memberships[0].expire_s
                self._stock.hub_answered(time.monotonic())
            self._lease()

    def refused(self, text: str) -> None:
        """End with an error that only a person can correct."""
        self._box.end(AgentState.REFUSED, text)

    def _state(self, now_s: float) -> str:
        if self._box.wanted() == Wants.LEAVE:
            return "leaving"
        if self._box.state() != AgentState.MEMBER:
            return "joining"
        return "stalled" if self._watchdog.is_stalled(now_s) else "training"

    # --- data

    def announce_use(self, used: int) -> None:
        """Return when the first hub, which leases, knows the first `used` samples of this attempt as used.

        Other hubs accept pushes without it: what it does not know as used then goes to another node if this
        one is killed. It is waited for, but not if it has been silent for twice `hub.expire_s`.
        """
        first = self._memberships[0]
        limit_s = 2 * first.expire_s
        until_s = time.monotonic() + limit_s
        with self._lease_lock:
            used = min(used, self._stock.leases.num_given)
            self._announced = max(self._announced, used)
            if self._known_used >= used:
                return
        first.ask_soon()
        with self._lease_lock:
            while self._known_used < used and time.monotonic() < until_s and not first.is_silent(limit_s):
                self._lease_lock.wait(LOOK_S)

    def _used(self) -> int:
        """Return how many of the first samples of this attempt count as used."""
        return max(self._box.progress().used, self._announced)

    def _consumed(self, used: int) -> list[pb.Consumed]:
        with self._lease_lock:
            blocks = self._stock.leases.consumed(used)
        return [pb.Consumed(start=start, upto=upto) for start, upto in blocks]

    def _lease(self) -> None:
        """Lease the samples that are missing."""
        plan = self._plan
        if not plan.samples_per_step or self._box.wanted() == Wants.LEAVE:
            return
        with self._lease_lock:
            missing, held, is_short = self._stock.missing(), self._stock.leases.held, self._stock.is_short
        # A trainer may have begun to wait for samples before it knew that the run is over.
        if not missing or (self._news.current().finished and not is_short):
            return
        membership = self._memberships[0]
        request = pb.LeaseRequest(
            who=membership.who(), samples=min(missing, plan.lease_samples), lists_held=True
        )
        request.held.extend(pb.Block(start=start, end=end) for start, end in held)
        reply = membership.client.lease(request, membership.patience_s)  # no heartbeat is sent meanwhile
        blocks = [(block.start, block.end) for block in reply.blocks]
        with self._lease_lock:
            self._stock.more(blocks)
            self._leased_upto = max((self._leased_upto, *(end for _, end in blocks)))
        self._give()
        if blocks and self._stock.missing():  # a lease has at most `hub.lease_samples`
            membership.ask_soon()

    def _give(self) -> None:
        """Give the trainer samples, and lease soon what it asks for and is not there."""
        if not self._plan.samples_per_step:
            return
        demand = self._box.demand()
        with self._lease_lock:
            self._stock.see(self._box.progress(), demand)
            self._box.add_blocks(self._stock.give())
        if self._stock.is_short and demand != self._demand:
            self._demand = demand
            self._memberships[0].ask_soon()
