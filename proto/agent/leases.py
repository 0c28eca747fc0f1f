"""Leased samples of a node, its speed, and whether its trainer stalls.

The watchdog detects a trainer that stalls by its step counter alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from aedit.proto.agent.link import Progress

Block = tuple[int, int]

STOCK = 4
"""A stock lasts for this many times `hub.expire_s`. Leases of a silent node go to others after 20 times."""
_STEPS = 4
"""Steps for which samples are leased while nothing is known of the node's speed, and at least."""
_BLOCK = 3
"""A node asks again when this part of its stock is used up: an answer has that much, and the journal of the
hub a record for each."""
_LEASES = 64
"""A lease has at least this part of the samples that are leased and unused: rounds may be long, and a hub
keeps no more than 1024 leases of a node that are not used up."""
_GIVEN_S = 2.0
"""The trainer has samples for this long; blocks that other nodes return are inserted before the others."""
_REMEMBERED = 20
"""An absence is remembered for this many times its length: what it costs to forget it is 5 % of the time."""


@dataclass(frozen=True, slots=True)
class Leases:
    """Blocks [start, end) of positions, in the order in which the node draws them. Immutable."""

    blocks: tuple[Block, ...] = ()
    """Handed to the trainer, without those that the hub knows to be used up."""
    settled: int = 0
    """Samples in the blocks that are left out."""
    kept: tuple[Block, ...] = ()
    """Not yet handed to the trainer, lowest positions first: what another node has returned comes before
    what is new."""

    @property
    def num_samples(self) -> int:
        """Return the number of samples leased so far, in this attempt."""
        return self.num_given + _samples(self.kept)

    @property
    def num_given(self) -> int:
        """Return the number of samples handed to the trainer so far, in this attempt."""
        return self.settled + _samples(self.blocks)

    @property
    def least(self) -> int:
        """Return the least samples of the next lease, so that the unused ones are in few leases."""
        return (self.num_samples - self.settled) // _LEASES

    @property
    def held(self) -> tuple[Block, ...]:
        """Return all blocks that may have unused samples."""
        return (*self.blocks, *self.kept)

    def more(self, blocks: Sequence[Block]) -> "Leases":
        """Return leases with these blocks added."""
        return Leases(self.blocks, self.settled, tuple(sorted((*self.kept, *blocks))))

    def give(self, upto: int) -> "Leases":
        """Return leases of which at least `upto` samples, or all, are with the trainer."""
        given, count = 0, self.num_given
        while count < upto and given < len(self.kept):
            count += _samples(self.kept[given : given + 1])
            given += 1
        return Leases((*self.blocks, *self.kept[:given]), self.settled, self.kept[given:])

    def consumed(self, used: int) -> list[Block]:
        """Return (start, upto) of the blocks that the first `used` samples of all reach into."""
        found, left = [], used - self.settled
        for start, end in self.blocks:
            if left <= 0:
                break
            found.append((start, min(end, start + left)))
            left -= end - start
        return found

    def known(self, consumed: Sequence[Block]) -> int:
        """Return how many of the first samples a hub knows to be used that has received `consumed`."""
        upto = dict(consumed)
        return self.settled + sum(upto[start] - start for start, _ in self.blocks if start in upto)

    def settle(self, used: int) -> "Leases":
        """Return leases after the hub has received `consumed(used)`: whole blocks are not reported again."""
        whole = [block for block in self.consumed(used) if block in self.blocks]
        return Leases(self.blocks[len(whole) :], self.settled + _samples(whole), self.kept)


class Stock:
    """The leases of a node, as many as it needs: what it has drawn, and a stock for a hub that is away.

    The stock lasts for `lasts_s` of training, in which a hub restarts or a standby takes over, or for twice
    as long as the hub was away of late, but never for more than `most_steps` steps. The smaller it is, the
    closer the nodes of a run are in the stream, and the sooner a node trains what another one has returned.
    """

    def __init__(self, *, samples_per_step: int, lasts_s: float, most_steps: int) -> None:
        """Begin without leases, for a node of unknown speed."""
        self.leases = Leases()
        self._samples_per_step, self.lasts_s = samples_per_step, lasts_s
        self._most_steps = max(1, most_steps)
        self._draws = Speed()  # samples in place of steps
        self._wanted, self._per_step = 0, float(samples_per_step)
        self._heard_s: float | None = None
        self._away_s, self._until_s = 0.0, 0.0

    def hub_answered(self, now_s: float) -> None:
        """Note that the hub answers, on any monotonic clock."""
        away_s = 0.0 if self._heard_s is None else now_s - self._heard_s
        if away_s >= self._away_s or now_s > self._until_s:
            self._away_s, self._until_s = away_s, now_s + _REMEMBERED * away_s
        self._heard_s = now_s

    def see(self, progress: Progress, demand: int) -> None:
        """Note what the trainer has drawn, and how many samples it asks for, from the first one on."""
        is_first = not self._draws.busy_s  # the time includes that of earlier attempts
        at_first = Speed(progress.drawn, progress.busy_s)
        self._draws = at_first if is_first else self._draws.see(progress.drawn, progress.busy_s)
        self._wanted = max(progress.drawn, progress.used, demand)
        if progress.steps:  # a loop of its own does not say how much it draws
            self._per_step = max(self._samples_per_step, progress.drawn / progress.steps)

    @property
    def is_short(self) -> bool:
        """Return whether there are fewer samples than the trainer asks for."""
        return self.leases.num_samples < self._wanted

    def more(self, blocks: Sequence[Block]) -> None:
        """Add blocks that the hub has leased."""
        self.leases = self.leases.more(blocks)

    def settle(self, used: int) -> None:
        """Note that the hub knows the first `used` samples to be used."""
        self.leases = self.leases.settle(used)

    def missing(self) -> int:
        """Return the number of samples to lease now; 0 while there are enough."""
        lasts_s = max(self.lasts_s, 2 * self._away_s)
        ahead = max(self._draws.per_s * lasts_s, _STEPS * self._per_step)
        ahead = ceil(min(ahead, self._most_steps * self._per_step))
        missing = self._wanted + ahead - self.leases.num_samples
        return 0 if missing <= 0 else missing + max(ahead // _BLOCK, self.leases.least)

    def give(self) -> tuple[Block, ...]:
        """Return the blocks that the trainer is given now: what it asks for and draws in the next seconds."""
        before = len(self.leases.blocks)
        near = max(_GIVEN_S * self._draws.per_s, self._samples_per_step)
        self.leases = self.leases.give(self._wanted + int(near))
        return self.leases.blocks[before:]


def _samples(blocks: Sequence[Block]) -> int:
    return sum(end - start for start, end in blocks)


LEAST_S = 30.0
USUAL = 20.0
KEEP = 0.9
"""Share of the old average that stays when a new measurement comes in."""


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Immutable state; `see` returns the next one. Times are on any monotonic clock."""

    steps: int = -1
    moved_s: float = 0.0
    usual_s: float = 0.0
    """Time of a step of late."""

    def see(self, steps: int, now_s: float) -> "Watchdog":
        """Return the state after the trainer has done `steps` steps at `now_s`."""
        if steps == self.steps:
            return self
        if self.steps < 0 or steps < self.steps:
            return Watchdog(steps, now_s, self.usual_s)
        step_s = (now_s - self.moved_s) / (steps - self.steps)
        usual_s = step_s if self.usual_s == 0 else KEEP * self.usual_s + (1 - KEEP) * step_s
        return Watchdog(steps, now_s, usual_s)

    def is_stalled(self, now_s: float) -> bool:
        """Return whether there was no step for 30 s and for 20 times the usual. Not before the first step."""
        return self.steps > 0 and now_s - self.moved_s > max(LEAST_S, USUAL * self.usual_s)


@dataclass(frozen=True, slots=True)
class Speed:
    """Steps per second of computing: waits are not counted."""

    steps: int = 0
    busy_s: float = 0.0
    per_s: float = 0.0

    def see(self, steps: int, busy_s: float) -> "Speed":
        """Return the next state. Both are counted by the trainer from its start."""
        took_s = busy_s - self.busy_s
        if steps < self.steps or took_s < 0:
            return Speed(steps, busy_s, self.per_s)
        if steps == self.steps or took_s == 0:
            return self
        now = (steps - self.steps) / took_s
        return Speed(steps, busy_s, now if self.per_s == 0 else KEEP * self.per_s + (1 - KEEP) * now)
