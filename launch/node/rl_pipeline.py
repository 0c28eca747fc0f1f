"""Groups under way on one rank: prompts go in, groups with rewards come out."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from aedit.spec_rollout.rl import Group, Problem, RewardFailed, RewardReport, RolloutSource
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling
from aedit.types import RunFailed

WAIT_S = 0.05
"""Longest wait for a reward between two looks at the source."""

Window = Callable[[str], AbstractContextManager[None]]
"""Called with the cause of a wait; its context lasts as long as the wait."""


class RewardSource(Protocol):
    """Computes the rewards of groups beside this process; see `RewardPool`."""

    def submit(self, group: Group, text: Sequence[str]) -> object:
        """Begin to compute the rewards of a finished group."""

    def ready(self) -> list[tuple[Group, RewardReport]]:
        """Return the groups whose rewards are complete."""

    def wait(self, timeout_s: float) -> list[tuple[Group, RewardReport]]:
        """Return what `ready` returns, after a wait until it is not empty, at most for so long."""

    def drop(self) -> None:
        """Forget the groups whose rewards were not returned."""

    def close(self) -> None:
        """End the processes."""


@dataclass(slots=True)
class _Open:
    """A group whose samples run."""

    problem: Problem
    size: int
    rollouts: dict[int, Rollout] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class GroupPipeline:
    """Rollouts from `source`, rewards from `rewards`; `decode` returns the text of token ids."""

    source: RolloutSource
    rewards: RewardSource
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
    _open: dict[int, _Open] = field(default_factory=dict)
    _rewarding: set[int] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        """Return whether groups are under way."""
        return bool(self._open or self._rewarding)

    def start(self, position: int, problem: Problem, sampling: Sampling, size: int) -> None:
        """Request `size` samples of a problem. position: key of their noise, with the sample's number."""
        self._open[position] = _Open(problem, size)
        common = Prompt(tokens=problem.tokens, rollout=position, sample=0, group=position, sampling=sampling)
        self.source.add([replace(common, sample=i) for i in range(size)])

    def advance(self) -> None:
        """Take one step of the source, or wait a moment for rewards; collect what is complete.

        Raises RunFailed if rewards failed, and the run cannot go on or is asked to end then
        (`reward.max_failed_groups`, `reward.on_error`).
        """
        began = time.perf_counter()
        try:
            rewarded = self._step(began)
        except RewardFailed as error:
            raise RunFailed(str(error)) from None
        for group, found in rewarded:
            self._rewarding.discard(group.position)
            self.done[group.position] = group
            self.report(group, found)

    def _step(self, began: float) -> list[tuple[Group, RewardReport]]:
        if self._open:
            for rollout in self.source.step():
                self._finish(rollout)
            self.rollout_s += time.perf_counter() - began
            return self.rewards.ready()
        with self.window("rewards"):
            rewarded = self.rewards.wait(WAIT_S)
        self.reward_s += time.perf_counter() - began
        return rewarded

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
        here = self._open[position]
        here.rollouts[rollout.prompt.sample] = rollout
        if len(here.rollouts) < here.size:
            return
        del self._open[position]
        rollouts = tuple(here.rollouts[i] for i in range(here.size))
        group = Group(position=position, problem=here.problem, rollouts=rollouts)
        self._rewarding.add(position)
        self.rewards.submit(group, [self.decode(rollout.tokens) for rollout in rollouts])
