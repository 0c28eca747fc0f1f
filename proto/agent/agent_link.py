"""The trainer's end of its node agent, which is a process of its own or threads of the trainer."""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aedit import traces
from aedit.child import start_module, to_json
from aedit.proto.agent import mailbox
from aedit.proto.agent.link import Answer, Progress
from aedit.proto.agent.mailbox import AgentState, Mailbox, WakeReceiver, WakeSender, Wants
from aedit.proto.agent.plan import AgentPlan
from aedit.types import News, UserError

POLL_S = 0.005
STOP_S = 5.0
"""Time in which an agent must end by itself before it is killed."""
log = logging.getLogger(__name__)


class AgentLost(RuntimeError):
    """The node's agent has ended; the node can neither send nor receive."""


class NodeRefused(UserError, ValueError):
    """The hub does not accept this node; the message says why."""


class AgentLink:
    """A `Link` over a mailbox. Of the first rank if `waker` is given, else of another one."""

    def __init__(
        self, box: Mailbox, rank: int, waker: WakeSender | None, end: Callable[[float], bool]
    ) -> None:
        """Create the end of `rank`. end: ends the agent within a number of seconds.

        Returns whether it ended.
        """
        self._box, self._rank, self._waker, self._end = box, rank, waker, end
        self._blocks: list[tuple[int, int]] = []
        self._num_leased = 0
        self.anchors: Sequence[NDArray[np.float32]] = box.anchors
        self.outbox: Sequence[NDArray[np.float32]] = box.outbox
        box.attach(rank)

    @property
    def path(self) -> str:
        """Return the path that other ranks of this machine `attach_agent` to."""
        return self._box.path

    @property
    def node(self) -> int:
        """Return the index that the hub gave this node."""
        return self._box.node

    @property
    def session(self) -> int:
        """Return the number with which this node speaks to the first hub, 0 before it has joined.

        It changes when the node joins again, as after a restart of the hub.
        """
        return self._box.session

    def next_number(self, unit: int) -> int:
        """Return the number that the hub gives the next push of a unit. Ask while none is under way.

        It counts the pushes of all processes of this node.
        """
        return self._box.pushed(unit) + 1

    @property
    def bytes_sent(self) -> int:
        """Return the payload bytes handed to the network so far."""
        return self._box.bytes_sent

    def join(self, timeout_s: float) -> tuple[int, ...]:
        """Wait until this node is a member; see `Link.join`.

        Ranks but the first may call it too, and only wait.

        Raises UserError with the hub's words if it does not accept this node, AgentLost, or TimeoutError.
        """
        if self._waker:
            self._ask(Wants.JOIN)
        self._wait(
            lambda: self._state() == AgentState.MEMBER, timeout_s, "to join: no hub, or no anchors yet"
        )
        return self._box.versions()

    def written(self, unit: int, seq: int) -> None:
        """See `Link.written`."""
        self._box.written(unit, self._rank, seq)

    def send(self, unit: int, seq: int, *, base: int, steps: int, tokens: int, used: int = 0) -> None:
        """See `Link.send`."""
        span = traces.current().context
        words = traces.NO_WORDS if span is None else span.words
        self._box.order(unit, seq, (base, steps, tokens, used), words)
        self._first().ring()

    def answer(self, unit: int, seq: int) -> Answer | None:
        """See `Link.answer`. Raises AgentLost or UserError if no answer will ever come."""
        found = self._box.answered(unit, seq)
        if found is None:
            self._state()
        return found

    def news(self) -> News:
        """See `Link.news`."""
        return self._box.news(time.monotonic()) or News()

    def tell(self, progress: Progress) -> None:
        """See `Link.tell`."""
        self._box.tell(progress)

    def leases(self, upto: int = 0) -> Sequence[tuple[int, int]]:
        """See `Link.leases`."""
        self._state()
        more = self._box.blocks(len(self._blocks))
        self._blocks += more
        self._num_leased += sum(end - start for start, end in more)
        if upto and self._waker and upto != self._box.demand():
            self._box.demand_samples(upto)
            if upto > self._num_leased:
                self._waker.ring()
        return self._blocks

    def residuals(self) -> Mapping[int, NDArray[np.float32]]:
        """See `Link.residuals`. Values written before `join` continue those of a checkpoint."""
        return self._box.residuals

    def leave(self, timeout_s: float) -> None:
        """See `Link.leave`."""
        self._ask(Wants.LEAVE)
        deadline_s = time.monotonic() + timeout_s
        try:
            self._wait(
                lambda: self._state() == AgentState.GONE, timeout_s, "to leave: pushes have no answer yet"
            )
        finally:
            self._end(
                max(STOP_S, deadline_s - time.monotonic()) if self._box.state() == AgentState.GONE else 0.0
            )
            mailbox.release(self._box)

    def stop(self) -> None:
        """End the agent at once, without a leave call: the hub notices the silence."""
        if self._waker:
            self._waker.close()
        self._end(STOP_S)
        mailbox.release(self._box)

    def _first(self) -> WakeSender:
        assert self._waker, "only the first rank of a node speaks to its agent"
        return self._waker

    def _ask(self, wants: Wants) -> None:
        self._box.want(wants)
        self._first().ring()

    def _state(self) -> AgentState:
        """Return the agent's state. Raises if waiting for the agent has no use."""
        state = self._box.state()
        if state == AgentState.REFUSED:
            raise NodeRefused(self._box.error())
        if state == AgentState.LOST:
            raise AgentLost(f"the node agent has ended: {self._box.error()}")
        return state

    def _wait(self, is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the node agent needed more than {timeout_s:g} s {what}")
            time.sleep(POLL_S)


def start_agent(plan: AgentPlan, *, ranks: int, mode: Literal["process", "thread"] = "process") -> AgentLink:
    """Start this node's agent and return the first rank's end of it. It ends with this process.

    Raises UserError.

    As a process (default) it reports a trainer that hangs, even one that holds Python's lock for ever, and
    the trainer's steps are a little shorter (`python -m benchmarks.agent`). As threads it needs no 60 MB of
    its own and starts at once, which suits tests and small machines.
    """
    box = mailbox.create_mailbox(plan.numels, ranks, plan.has_feedback)
    return (_start_process if mode == "process" else _start_thread)(plan, box)


def attach_agent(path: str, rank: int) -> AgentLink:
    """Return the end of another rank of the same node. path: `AgentLink.path` of the first one."""
    try:
        box = mailbox.attach_mailbox(path)
    except OSError as error:
        raise UserError(f"rank {rank} cannot reach the memory of its node's agent: {error}") from error
    return AgentLink(box, rank, None, lambda timeout_s: True)


def _start_process(plan: AgentPlan, box: Mailbox) -> AgentLink:
    # The kernel ends the agent with the thread that started it, so that must be one that lasts.
    bound = threading.current_thread() is threading.main_thread()
    reading, writing = os.pipe()
    arguments = [str(box.fd), str(int(bound))]
    process = start_module(
        "aedit.proto.agent.agent_main", arguments, fds=[box.fd], stdin=reading, session=False
    )
    os.close(reading)
    # An agent that died at once is reported by the reaper.
    with suppress(BrokenPipeError):
        line = f"{to_json(plan)}\n".encode()
        while line:
            line = line[os.write(writing, line) :]

    def reap() -> None:
        """Tell all ranks when the agent process has died."""
        code = process.wait()
        box.end(AgentState.LOST, f"process {process.pid} ended with {code}; its log is this node's")

    threading.Thread(target=reap, name="agent-reaper", daemon=True).start()

    def end(timeout_s: float) -> bool:
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
            return False
        return True

    return AgentLink(box, 0, WakeSender(writing), end)


def _start_thread(plan: AgentPlan, box: Mailbox) -> AgentLink:
    # Only here: a trainer whose agent is a process needs no gRPC.
    from aedit.proto.agent.agent import Agent
    from aedit.proto.agent.connections import Connections

    reading, writing = os.pipe()
    agent = Agent(plan, box, WakeReceiver(reading), Connections(plan))
    thread = threading.Thread(target=agent.run, name="agent", daemon=True)
    thread.start()

    def end(timeout_s: float) -> bool:
        thread.join(timeout_s)
        if thread.is_alive():
            waker.close()
            thread.join(STOP_S)
        return not thread.is_alive()

    waker = WakeSender(writing)
    return AgentLink(box, 0, waker, end)
