"""The run's stream of prompts, as batches of rewarded groups, and greedy answers to held-out problems.

Groups are trained in the order in which their prompts were drawn, over all ranks of the node: a rank trains
groups of another one where dynamic sampling has replaced some of its own. So what is drawn and not trained is
always the end of what was drawn: it goes back to the stream with the state of the order, without a list, and
a group is trained once. While the last sample of a batch is generated, later groups run beside it, as far as
`rl.max_staleness` admits (`admission.capacity`).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from aedit import traces
from aedit.edit import Shards
from aedit.launch.config import RLConfig, RunConfig
from aedit.launch.data import Order, evaluation_indices
from aedit.launch.records import PositionLog
from aedit.spec_rollout.rl import (
    Group,
    Problem,
    RewardFailed,
    RewardPool,
    RewardReport,
    RolloutSource,
    capacity,
    has_signal,
)
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling
from aedit.types import RunFailed

SLICE_S = 1.0
"""Time between two looks at stop requests and at the other ranks while groups are generated."""
MOST_REPLACED = 8
"""Groups without signal that dynamic sampling replaces per group of a batch; further ones are trained, with
gradients of 0, so that a policy that solves everything does not generate for ever."""
WAIT_S = 0.05
"""Longest wait for a reward between two looks at the source."""
Window = Callable[[str], AbstractContextManager[None]]
"""Called with the cause of a wait; its context lasts as long as the wait."""
COUNTS = ("groups", "rollouts", "no_signal", "excluded")
FIRST_KEY = 1 << 62
"""Problem i has the key FIRST_KEY + i, beyond all positions of the run's stream of prompts."""


@dataclass(slots=True, kw_only=True)
class GroupPipeline:
    """Rollouts from `source`, rewards from `rewards`; `decode` returns the text of token ids."""

    source: RolloutSource
    rewards: RewardPool
    decode: Callable[[Sequence[int]], str]
    window: Window
    report: Callable[[Group, RewardReport], None]
    """Receives each rewarded group with what went wrong, for the records."""
    done: dict[int, Group] = field(default_factory=dict)
    """Rewarded groups by position, until `take`."""
    rollout_s: float = 0.0
    """Time in steps of the source."""
    reward_s: float = 0.0
    """Time that nothing but rewards was waited for."""
    _open: dict[int, tuple[Problem, list[Rollout | None], traces.TraceSpan]] = field(default_factory=dict)
    """Groups whose samples run: problem, finished samples by their numbers, and span."""
    _rewarding: dict[int, tuple[traces.TraceSpan, ...]] = field(default_factory=dict)
    """Groups whose rewards are computed, with their spans, innermost first."""

    @property
    def busy(self) -> bool:
        """Return whether groups are under way."""
        return bool(self._open or self._rewarding)

    def start(self, position: int, problem: Problem, sampling: Sampling, size: int) -> None:
        """Request `size` samples of a problem. position: key of their noise, with the sample's number."""
        span = traces.opened("group", root=True, position=position, problem=problem.index, samples=size)
        self._open[position] = problem, [None] * size, span
        common = Prompt(tokens=problem.tokens, rollout=position, sample=0, group=position, sampling=sampling)
        with traces.below(span):
            self.source.add([replace(common, sample=i) for i in range(size)])

    def advance(self) -> None:
        """Take one step of the source, or wait a moment for rewards; collect what is complete.

        Raises RunFailed if rewards failed, and the run cannot go on or is asked to end then
        (`reward.max_failed_groups`, `reward.on_error`).
        """
        began = time.perf_counter()
        try:
            if self._open:
                for rollout in self.source.step():
                    self._finish(rollout)
                self.rollout_s += time.perf_counter() - began
                rewarded = self.rewards.ready()
            else:
                with self.window("rewards"):
                    rewarded = self.rewards.wait(WAIT_S)
                self.reward_s += time.perf_counter() - began
        except RewardFailed as error:
            raise RunFailed(str(error)) from None
        for group, found in rewarded:
            for span in self._rewarding.pop(group.position, ()):
                span.end()
            self.done[group.position] = group
            self.report(group, found)

    def take(self, position: int) -> Group:
        """Return a rewarded group and forget it."""
        return self.done.pop(position)

    def drop(self) -> None:
        """End the samples of all groups that are under way, and forget the groups."""
        self.source.cancel()
        self.rewards.drop()
        self._open.clear()
        self._rewarding.clear()
        self.done.clear()

    def close(self) -> None:
        """End source and reward processes."""
        try:
            self.source.close()
        finally:
            self.rewards.close()

    def _finish(self, rollout: Rollout) -> None:
        """Keep a finished sample; submit its group if it is the last one."""
        position = rollout.prompt.rollout
        problem, samples, span = self._open[position]
        samples[rollout.prompt.sample] = rollout
        rollouts = tuple(sample for sample in samples if sample is not None)
        if len(rollouts) < len(samples):
            return
        del self._open[position]
        group = Group(position=position, problem=problem, rollouts=rollouts, trace=span.context)
        self._rewarding[position] = traces.opened("reward", span.context), span
        self.rewards.submit(group, [self.decode(rollout.tokens) for rollout in rollouts])


@dataclass(slots=True, kw_only=True)
class GroupStream:
    """Batches of groups of one rank; all ranks of the node call `next_batch` together."""

    config: RLConfig
    order: Order
    choose: Callable[[int, int], Problem]
    """Returns the problem of a position, for which the order has drawn this index."""
    pipeline: GroupPipeline
    shards: Shards
    sampling: Sampling
    check_stop: Callable[[], None]
    """Raises `Stopped` on all ranks if the run was asked to stop."""
    log: PositionLog = field(default_factory=PositionLog)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    """Running totals of this rank: rewarded groups, their rollouts, groups whose rewards are all equal before
    the penalty of `rl.overlong` (equally right or wrong), and rollouts without a reward."""
    batches: int = 0
    """Batches that `next_batch` has returned: AReaL's policy version v."""
    _drawn: dict[int, int] = field(default_factory=dict)
    """Positions that were drawn and are in no batch yet, by place, in the order of the draws. A place
    is the number of draws of the node before it."""
    _rewarded: dict[int, Group] = field(default_factory=dict)
    """Finished groups of these places."""
    _batch: deque[tuple[int, Group]] = field(default_factory=deque)
    """Places and groups of the last batch that are not trained yet."""
    _replaced: int = 0
    """Groups without signal since the last batch."""

    @property
    def per_rank(self) -> int:
        """Return the groups of a batch of one rank."""
        return self.config.groups // self.shards.size

    @property
    def _most_drawn(self) -> int:
        """Return the most groups that a rank has drawn and that are in no batch yet; see `capacity`."""
        return (self.config.max_staleness + 1) * self.per_rank

    def next_batch(self) -> list[Group]:
        """Return this rank's next groups, in the order of the draws, once all ranks of the node have theirs.

        Raises `Stopped` if the run was asked to stop meanwhile; the groups then go back to the stream.
        """
        while True:
            self._admit()
            self._advance(self._front())
            with self.pipeline.window("rank"):
                front = self._front()
                complete = self.shards.all([self._is_complete(front)])[0]
            self.check_stop()  # after the wait for the other ranks, or it would be the wait
            if complete:
                break
        self._batch = self._exchange(front)
        self.batches, self._replaced = self.batches + 1, 0
        return [group for _, group in self._batch]

    def trained(self, count: int) -> list[Group]:
        """Return the next `count` groups of the last batch, which count as trained from now on."""
        return [self._batch.popleft()[1] for _ in range(count)]

    def first_pending(self) -> int:
        """Return how many draws of the node come before the first group that was not trained. Collective."""
        left = [*(place for place, _ in self._batch), *self._drawn]
        mine = left[0] if left else self.order.state()["drawn"]
        return -self.shards.most([-mine])[0]

    def put_back(self) -> None:
        """Forget the groups that were not trained; their prompts are drawn again later. Collective."""
        place = self.first_pending()
        self.log.put_back(place)
        self.order = self.order.resume(self.order.state() | {"drawn": place})
        self._batch.clear()
        self._drawn.clear()
        self._rewarded.clear()
        self.pipeline.drop()

    # -- admission

    def _admit(self) -> None:
        """Draw as many prompts as the ranks may start now, and start this rank's."""
        wanted = torch.zeros(self.shards.size, dtype=torch.int64)
        wanted[self.shards.rank] = capacity(
            max_running=self._most_drawn,
            running=len(self._drawn) - len(self._rewarded),
            accepted=len(self._rewarded) + self.batches * self.per_rank,
            version=self.batches,
            staleness=self.config.max_staleness,
            batch=self.per_rank,
        )
        shares = self.shards.sum(wanted).tolist()
        if not any(shares):
            return
        first = self.order.state()["drawn"]
        positions = self.order.draw(sum(shares))
        self.log.drawn(first, positions)
        mine = _share(shares, self.shards.rank)
        indices = self.order.samples(positions[mine])
        for place, index in zip(mine, indices, strict=True):
            position = int(positions[place])
            self._drawn[first + int(place)] = position
            problem = self.choose(position, int(index))
            self.pipeline.start(position, problem, self.sampling, self.config.group_size)

    # -- progress

    def _front(self) -> list[int]:
        """Return the places of the next batch's groups, of all ranks, in order. Collective."""
        places = torch.zeros(self.shards.size, self._most_drawn, dtype=torch.int64)
        for i, place in enumerate(self._drawn):
            places[self.shards.rank, i] = place + 1
        drawn = sorted(self.shards.sum(places).flatten().tolist())
        return [place - 1 for place in drawn if place][: self.config.groups]

    def _exchange(self, front: Sequence[int]) -> deque[tuple[int, Group]]:
        """Return this rank's groups of the batch at these places: each rank trains them in turns. Collective.

        So the groups of each inner step, of all ranks together, follow those of the step before.
        """
        mine = {place: self._rewarded.pop(place) for place in front if place in self._drawn}
        for place in mine:
            del self._drawn[place]
        wanted = front[self.shards.rank :: self.shards.size]
        if not self.shards.all([mine.keys() == set(wanted)])[0]:
            mine = {place: group for part in self.shards.gather(mine) for place, group in part.items()}
        return deque((place, mine[place]) for place in wanted)

    def _advance(self, front: Sequence[int]) -> None:
        """Generate until this rank's part of the batch is complete, more may start, or the slice is over."""
        until = time.monotonic() + SLICE_S
        while not self._is_complete(front) and self.pipeline.busy and time.monotonic() < until:
            self.pipeline.advance()
            if self._collect():
                return

    def _collect(self) -> bool:
        """Move rewarded groups from the pipeline; return whether some are to be replaced."""
        replaced = False
        for place, position in list(self._drawn.items()):
            if place in self._rewarded or position not in self.pipeline.done:
                continue
            group = self.pipeline.take(position)
            without_signal = not has_signal(group.rewards)
            excluded = sum(reward is None for reward in group.rewards)
            for name, count in zip(COUNTS, (1, len(group.rollouts), without_signal, excluded), strict=True):
                self.counts[name] += count
            replaces = self.config.dynamic_sampling and self._replaced < MOST_REPLACED * self.per_rank
            _log(self.log, group, replaced=replaces and without_signal)
            if replaces and without_signal:
                self._replaced, replaced = self._replaced + 1, True
                del self._drawn[place]
            else:
                self._rewarded[place] = group
        return replaced

    def _is_complete(self, front: Sequence[int]) -> bool:
        """Return whether the batch is known, and this rank's groups of it are finished."""
        mine = [place for place in front if place in self._drawn]
        return len(front) == self.config.groups and all(place in self._rewarded for place in mine)


def _log(log: PositionLog, group: Group, *, replaced: bool) -> None:
    versions = [version for rollout in group.rollouts for version in rollout.versions]
    places = {name for rollout in group.rollouts for _, name in rollout.servers if name}
    log.group(
        group.position,
        index=group.problem.index,
        lengths=[len(rollout.tokens) for rollout in group.rollouts],
        rewards=[None if reward is None else round(reward, 6) for reward in group.rewards],
        versions=[min(versions), max(versions)] if versions else None,
        places=sorted(places),
        replaced=replaced,
    )


def _share(shares: Sequence[int], rank: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return which of sum(shares) draws are those of `rank`: in turns, as long as a rank wants more."""
    turns = [(turn, each) for each, count in enumerate(shares) for turn in range(count)]
    owners = [each for _, each in sorted(turns)]
    return np.flatnonzero(np.array(owners) == rank)


def solved_share(
    problems: Sequence[Problem],
    config: RunConfig,
    pipeline: GroupPipeline,
    sampling: Sampling,
    shards: Shards,
) -> dict[str, Any]:
    """Return solved share, mean reward and mean length of greedy answers to `rl.eval_problems` problems.

    They are evenly spaced over the held-out problems and always the same; each rank answers its share. A
    problem without a reward is not solved, and is left out of the mean reward.
    """
    chosen = [int(i) for i in evaluation_indices(len(problems), config.rl.eval_problems)]
    mine = chosen[shards.rank :: shards.size]
    for index in mine:
        pipeline.start(FIRST_KEY + index, problems[index], sampling, 1)
    answered: list[Group] = []
    while len(answered) < len(mine):
        pipeline.advance()
        ready = [position for position in pipeline.done if position >= FIRST_KEY]
        answered += map(pipeline.take, ready)
    rewards = [reward for group in answered for reward in group.rewards if reward is not None]
    solved = sum(reward >= config.reward.solved for reward in rewards)
    length = sum(len(rollout.tokens) for group in answered for rollout in group.rollouts)
    sums = torch.tensor([solved, sum(rewards), len(rewards), length], dtype=torch.float64)
    with pipeline.window("rank"):
        num_solved, reward, num_rewards, num_tokens = shards.sum(sums).tolist()
    return {
        "solved": num_solved / len(chosen),
        "reward": reward / num_rewards if num_rewards else None,
        "length": num_tokens / len(chosen),
        "problems": len(chosen),
    }
