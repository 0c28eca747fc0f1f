"""Memory shared by the ranks of a node and its agent: vectors, and control words read without locks.

Every value has one writer. Values that belong together are published by one of 8 bytes, written last; the
reader looks at that one first. In between, on both sides, there is a `memory_fence`.

On Linux the memory has no name in the file system (memfd): when the last process that holds it ends, nothing
is left. Elsewhere it is a file in the temporary folder, removed once all ranks have it.
"""

import contextlib
import mmap
import os
import select
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from enum import IntEnum
from itertools import accumulate
from math import isfinite, nan, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aedit.proto.agent.link import Answer, Progress
from aedit.system import anonymous_memory, memory_fence
from aedit.traces import NO_WORDS
from aedit.types import RL_REPORT, News, Verdict

MAGIC = 0x41454449_54000004
MAX_BLOCKS = 2**20
"""Leases of one attempt; pages that are never written take no memory."""
MAX_ERROR_BYTES = 4096
ALIGN = 4096 // 4
"""Elements: every unit begins on a page."""

Ints = NDArray[np.int64]
Vector = NDArray[np.float32]


class AgentState(IntEnum):
    """State of the agent, as the ranks see it."""

    IDLE = 0
    MEMBER = 1
    GONE = 2
    """It said goodbye after all that was under way."""
    REFUSED = 3
    """A person must mend something; `error` says what."""
    LOST = 4
    """It has ended or failed; `error` says why."""


class MailboxWord(IntEnum):
    """Places of the values in the header."""

    MAGIC = 0
    UNITS = 1
    RANKS = 2
    FEEDBACK = 3
    STATE = 4
    NODE = 5
    SENT = 6
    WANTS = 7
    BLOCKS = 8
    SESSION = 9
    DEMAND = 10
    NUMELS = 11


class Wants(IntEnum):
    """Requests of the trainer to its agent, in this order."""

    NOTHING = 0
    JOIN = 1
    LEAVE = 2


class Mailbox:
    """Arrays over one mapping; the methods keep the order in which words may be accessed."""

    def __init__(self, fd: int, path: str, numels: Sequence[int], counts: tuple[int, int, bool]) -> None:
        ranks, feedback = counts[1], counts[2]
        self.fd, self.path, self.numels, self.ranks = fd, path, tuple(numels), ranks
        places = _places(numels, ranks, feedback)
        self._map = mmap.mmap(fd, _size(places))
        arrays = dict(_carve(self._map, places))
        self._head: Ints = arrays["head"]
        self._attached: Ints = arrays["attached"]
        self._written: Ints = arrays["written"]
        self._orders: Ints = arrays["orders"]
        self._answers: Ints = arrays["answers"]
        self._versions: Ints = arrays["versions"]
        self._pushed: Ints = arrays["pushed"]
        self._news = _Published(arrays["news_count"], arrays["news"])
        self._progress = _Published(arrays["progress_count"], arrays["progress"])
        self._blocks: Ints = arrays["blocks"]
        self._error: NDArray[np.uint8] = arrays["error"]
        self.anchors: list[Vector] = _units(arrays["anchors"], numels)
        self.outbox: list[Vector] = _units(arrays["outbox"], numels)
        self.residuals = dict(enumerate(_units(arrays["residuals"], numels if feedback else ())))

    # --- the trainer's words

    def want(self, wants: Wants) -> None:
        """Request `wants` of the agent."""
        memory_fence()
        self._head[MailboxWord.WANTS] = wants

    def wanted(self) -> Wants:
        """Return what the trainer has requested."""
        wants = Wants(int(self._head[MailboxWord.WANTS]))
        memory_fence()
        return wants

    def written(self, unit: int, rank: int, seq: int) -> None:
        """Note that rank `rank` has written its slices for exchange `seq`."""
        memory_fence()
        self._written[unit, rank] = seq

    def all_written(self, unit: int, seq: int) -> bool:
        """Return whether all ranks have written their slices for exchange `seq`."""
        there = bool((self._written[unit] >= seq).all())
        memory_fence()
        return there

    def order(
        self,
        unit: int,
        seq: int,
        numbers: tuple[int, int, int, int],
        span: tuple[int, int, int] = NO_WORDS,
    ) -> None:
        """Order exchange `seq` of a unit.

        numbers: base, steps, tokens, used samples. span: words of its trace context.
        """
        self._orders[unit, 1:] = (*numbers, *span)
        memory_fence()
        self._orders[unit, 0] = seq

    def orders(self) -> Ints:
        """Return the last exchange ordered per unit: seq, numbers and span of `order`.

        A row whose seq is new is complete.
        """
        seqs = self._orders[:, 0].copy()
        memory_fence()
        rows = self._orders.copy()
        rows[:, 0] = seqs
        return rows

    def tell(self, progress: Progress) -> None:
        """Publish the trainer's progress."""
        rl = (progress.rl.get(name, nan) for name in RL_REPORT)
        self._progress.write((*astuple(replace(progress, rl={}))[:-1], *rl))

    def has_told(self) -> bool:
        """Return whether the trainer has begun."""
        return self._progress.any()

    def progress(self) -> Progress:
        """Return the trainer's last progress; zeros before it has begun."""
        if not self.has_told():
            return Progress()
        steps, tokens, busy_s, wait_s, loss, used, drawn, *values = self._progress.read()
        rl = {name: value for name, value in zip(RL_REPORT, values, strict=True) if isfinite(value)}
        return Progress(int(steps), int(tokens), busy_s, wait_s, loss, int(used), int(drawn), rl)

    def demand_samples(self, upto: int) -> None:
        """Ask for so many samples, from the first of this attempt on."""
        self._head[MailboxWord.DEMAND] = upto

    def demand(self) -> int:
        """Return the number of samples that the trainer has asked for."""
        return int(self._head[MailboxWord.DEMAND])

    def attach(self, rank: int) -> None:
        """Note that rank `rank` has the memory."""
        self._attached[rank] = 1

    def all_attached(self) -> bool:
        """Return whether all ranks have the memory."""
        return bool(self._attached.all())

    # --- the agent's words

    def answer(self, unit: int, answer: Answer) -> None:
        """Publish an answer; anchors[unit] has been written before."""
        self._answers[unit, 1:] = (answer.version, answer.verdict)
        memory_fence()
        self._answers[unit, 0] = answer.seq

    def answered(self, unit: int, seq: int) -> Answer | None:
        """Return the answer to exchange `seq`, or None."""
        if int(self._answers[unit, 0]) != seq:
            return None
        memory_fence()
        return Answer(seq, int(self._answers[unit, 1]), Verdict(int(self._answers[unit, 2])))

    def publish_news(self, news: News, at_s: float) -> None:
        """Publish the hub's news. at_s: on the machine's monotonic clock, in place of `news.age_s`."""
        self._news.write((at_s, *astuple(news)[1:]))

    def news(self, now_s: float) -> News | None:
        """Return the hub's last news; None if there is none yet."""
        if not self._news.any():
            return None
        at_s, round_, pace, nodes, steps, tokens, elapsed_s, share, finished, evaluates = self._news.read()
        numbers = (int(round_), int(pace), int(nodes), int(steps), int(tokens))
        return News(now_s - at_s, *numbers, elapsed_s, share, bool(finished), bool(evaluates))

    def add_blocks(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Add leased blocks. Raises RuntimeError when the table is full."""
        count = int(self._head[MailboxWord.BLOCKS])
        if count + len(blocks) > MAX_BLOCKS:
            raise RuntimeError(
                f"more than {MAX_BLOCKS} leases of data in one attempt: raise hub.lease_samples"
            )
        for i, block in enumerate(blocks):
            self._blocks[count + i] = block
        memory_fence()
        self._head[MailboxWord.BLOCKS] = count + len(blocks)

    def blocks(self, start: int) -> list[tuple[int, int]]:
        """Return the blocks from number `start` on."""
        count = int(self._head[MailboxWord.BLOCKS])
        memory_fence()
        return [(int(first), int(end)) for first, end in self._blocks[start:count]]

    def sent(self, num_bytes: int) -> None:
        """Publish the number of bytes sent."""
        self._head[MailboxWord.SENT] = num_bytes

    @property
    def bytes_sent(self) -> int:
        """Return the number of bytes sent."""
        return int(self._head[MailboxWord.SENT])

    def admit(self, node: int, versions: Sequence[int]) -> None:
        """Publish that this node is a member and all anchors are there."""
        self._versions[:] = versions
        self._head[MailboxWord.NODE] = node
        memory_fence()
        self._head[MailboxWord.STATE] = AgentState.MEMBER

    @property
    def node(self) -> int:
        """Return the index that the hub gave this node."""
        return int(self._head[MailboxWord.NODE])

    def speak_as(self, session: int) -> None:
        """Publish the session of this node with the first hub; a new one after every join."""
        self._head[MailboxWord.SESSION] = session

    @property
    def session(self) -> int:
        """Return the session of this node with the first hub; 0 before it has joined."""
        return int(self._head[MailboxWord.SESSION])

    def set_pushed(self, unit: int, number: int) -> None:
        """Publish the number of the newest push of a unit that the hub has decided on or accepted."""
        self._pushed[unit] = number

    def pushed(self, unit: int) -> int:
        """Return the number of the newest push of a unit that the hub has; 0 without one."""
        return int(self._pushed[unit])

    def versions(self) -> tuple[int, ...]:
        """Return the versions of the anchors at the join."""
        return tuple(int(version) for version in self._versions)

    def end(self, state: AgentState, error: str = "") -> None:
        """Publish the agent's last state. The first one stays, as it is nearest to the cause."""
        if self.state() in (AgentState.GONE, AgentState.REFUSED, AgentState.LOST):
            return
        text = error.encode()[:MAX_ERROR_BYTES]
        self._error[:] = 0
        self._error[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        memory_fence()
        self._head[MailboxWord.STATE] = state

    def state(self) -> AgentState:
        """Return the agent's state."""
        state = AgentState(int(self._head[MailboxWord.STATE]))
        memory_fence()
        return state

    def error(self) -> str:
        """Return why the agent has ended."""
        return self._error.tobytes().rstrip(b"\0").decode(errors="replace")


class _Published:
    """A row of numbers that changes as a whole.

    The reader copies one of two slots while the writer fills the other, and copies again if it was overtaken.
    A writer that dies in the middle blocks no reader.
    """

    def __init__(self, count: Ints, slots: NDArray[np.float64]) -> None:
        self._count, self._slots = count, slots

    def any(self) -> bool:
        return int(self._count[0]) > 0

    def write(self, numbers: tuple[float, ...]) -> None:
        count = int(self._count[0]) + 1
        self._slots[count % 2] = numbers
        memory_fence()
        self._count[0] = count
        memory_fence()

    def read(self) -> tuple[float, ...]:
        while True:
            count = int(self._count[0])
            memory_fence()
            numbers = self._slots[count % 2].copy()
            memory_fence()
            if int(self._count[0]) == count:
                return tuple(numbers.tolist())


def create_mailbox(numels: Sequence[int], ranks: int, feedback: bool) -> Mailbox:
    """Return a new mailbox, all zeros. feedback: whether there are residuals."""
    num_bytes = _size(_places(numels, ranks, feedback))
    if sys.platform == "linux":
        fd = anonymous_memory("aedit-mailbox", num_bytes)
        # Other processes of the same user open it through its owner, which keeps it while the run lasts.
        path = f"/proc/{os.getpid()}/fd/{fd}"
    else:
        fd, path = tempfile.mkstemp(prefix="aedit-mailbox-")
        os.ftruncate(fd, num_bytes)
    box = Mailbox(fd, path, numels, (len(numels), ranks, feedback))
    box._head[[MailboxWord.UNITS, MailboxWord.RANKS, MailboxWord.FEEDBACK]] = (len(numels), ranks, feedback)
    box._head[MailboxWord.NUMELS :][: len(numels)] = numels
    memory_fence()
    box._head[MailboxWord.MAGIC] = MAGIC
    return box


def attach_mailbox(path: str | int) -> Mailbox:
    """Return the mailbox of another process of this machine, by its path or by an inherited descriptor."""
    fd = path if isinstance(path, int) else os.open(path, os.O_RDWR | os.O_CLOEXEC)
    head = np.frombuffer(os.pread(fd, 8 * MailboxWord.NUMELS, 0), dtype=np.int64)
    if len(head) < MailboxWord.NUMELS or head[MailboxWord.MAGIC] != MAGIC:
        raise ValueError(f"{path} is not the mailbox of a node")
    units, ranks, feedback = (
        int(head[MailboxWord.UNITS]),
        int(head[MailboxWord.RANKS]),
        bool(head[MailboxWord.FEEDBACK]),
    )
    numels = np.frombuffer(os.pread(fd, 8 * units, 8 * MailboxWord.NUMELS), dtype=np.int64).tolist()
    return Mailbox(fd, str(path), numels, (units, ranks, feedback))


def remove(box: Mailbox) -> None:
    """Remove the path, where there is one; processes that have the memory keep it."""
    if not box.path.startswith("/proc/"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(box.path)


def release(box: Mailbox) -> None:
    """Close the descriptor: no other process can attach any more. The memory stays as long as it is used."""
    remove(box)
    if box.fd >= 0:
        os.close(box.fd)
        box.fd = -1


Places = dict[str, tuple[Any, tuple[int, ...]]]


def _places(numels: Sequence[int], ranks: int, feedback: bool) -> Places:
    units, total = len(numels), sum(map(_padded, numels))
    return {
        "head": (np.int64, (MailboxWord.NUMELS + units,)),
        "attached": (np.int64, (ranks,)),
        "written": (np.int64, (units, ranks)),
        "orders": (np.int64, (units, 8)),
        "answers": (np.int64, (units, 3)),
        "versions": (np.int64, (units,)),
        "pushed": (np.int64, (units,)),
        "news_count": (np.int64, (1,)),
        "news": (np.float64, (2, 10)),
        "progress_count": (np.int64, (1,)),
        "progress": (np.float64, (2, 7 + len(RL_REPORT))),
        "error": (np.uint8, (MAX_ERROR_BYTES,)),
        "blocks": (np.int64, (MAX_BLOCKS, 2)),
        "anchors": (np.float32, (total,)),
        "outbox": (np.float32, (total,)),
        "residuals": (np.float32, (total if feedback else 0,)),
    }


def _num_bytes(dtype: Any, shape: tuple[int, ...]) -> int:
    """Return the size rounded up to pages, so that no two sections share one."""
    return -(-prod(shape) * int(np.dtype(dtype).itemsize) // 4096) * 4096


def _size(places: Places) -> int:
    return sum(_num_bytes(dtype, shape) for dtype, shape in places.values())


def _carve(memory: mmap.mmap, places: Places) -> Iterator[tuple[str, NDArray[Any]]]:
    offset = 0
    for name, (dtype, shape) in places.items():
        yield name, np.ndarray(shape, dtype, memory, offset if 0 not in shape else 0)
        offset += _num_bytes(dtype, shape)


def _padded(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN


def _units(whole: Vector, numels: Sequence[int]) -> list[Vector]:
    starts = accumulate((_padded(numel) for numel in numels), initial=0)
    return [whole[start : start + numel] for start, numel in zip(starts, numels, strict=False)]


RING = b"!"


class WakeSender:
    """The trainer's end. Never blocks: a full pipe has woken the agent already."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Wake the agent."""
        with self._lock, suppress(BlockingIOError, BrokenPipeError):
            if self._fd >= 0:
                os.write(self._fd, RING)

    def close(self) -> None:
        """Close the pipe: the agent ends. May be called repeatedly."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


class WakeReceiver:
    """The agent's end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def wait(self, timeout_s: float) -> bool:
        """Wait for a wakeup or the timeout; return False if the trainer has ended."""
        ready, _, _ = select.select([self._fd], [], [], timeout_s)
        return not ready or len(os.read(self._fd, 65536)) > 0

    def close(self) -> None:
        """Close this end."""
        os.close(self._fd)
