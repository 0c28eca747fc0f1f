"""Problems, groups of their rollouts, and advantages of the rewards; the interface of sources of rollouts.

A sample from prompt to loss, one value for each stage:

- `Problem`: a row of the data set, a prompt with the columns that rewards read (`launch.data`);
- `Prompt` (`sampling`): one requested sample of a problem, with the key of its noise;
- `Rollout` (`sampling`): the tokens that a source has generated for it, later with an advantage;
- `Group`: all rollouts of one problem, with rewards (`launch.node.rl_groups`);
- `LossInputs` (`losses`): tensors of a micro-batch of rollouts (`launch.node.rl_policy`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from aedit.spec_rollout.sampling import Prompt, Rollout
from aedit.traces import TraceContext
from aedit.types import NonNegativeInt, check, checked

if TYPE_CHECKING:
    from torch import Tensor

Messages = tuple[Mapping[str, Any], ...]
"""A dialogue: `role` and `content` each."""
Advantage = Literal["std", "mean", "leave-one-out"]
EQUAL = 1e-6
"""Rewards that differ by less, relative to the largest (at least 1), are equal: a weighted sum of rewards has
rounding errors, which division by the standard deviation would make as large as real differences."""


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt with the columns that rewards read."""

    index: NonNegativeInt
    """Number of the problem in its source, the same on all nodes."""
    prompt: str | Messages
    """Text, or messages of a dialogue."""
    tokens: tuple[int, ...]
    """The prompt as the policy reads it, chat template included."""
    columns: Mapping[str, Any]
    """All other columns of the source, such as `answer`."""


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The finished rollouts of one prompt, with their rewards."""

    position: NonNegativeInt
    """Place of the prompt in the run's stream of prompts: no two groups of a run have the same. It is the
    `Prompt.rollout` of all samples of the group."""
    problem: Problem
    rollouts: tuple[Rollout, ...]
    """In the order of `Prompt.sample`."""
    rewards: tuple[float | None, ...] = ()
    """One per rollout; None: no reward could be computed, the rollout is left out."""
    values: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """For each reward function its values before weighting, one per rollout."""
    trace: TraceContext | None = None
    """Span of its generation and rewards; None: it is not traced."""


def answered(problem: Problem, texts: Sequence[str]) -> Group:
    """Return a group of rollouts that read `texts`, as if their bytes were tokens, for a call of rewards."""
    prompts = [Prompt(tokens=problem.tokens, rollout=problem.index, sample=i) for i in range(len(texts))]
    rollouts = [
        Rollout(prompt, tokens=list(text.encode())) for prompt, text in zip(prompts, texts, strict=True)
    ]
    return Group(position=problem.index, problem=problem, rollouts=tuple(rollouts))


class RolloutSource(Protocol):
    """Source of the rollouts of one rank. Used by one thread.

    A prompt's (rollout, sample) is the key of its noise: a source may generate it again anywhere, after a
    failure, and the tokens are the same for the same policy versions.
    """

    @property
    def version(self) -> int:
        """Return the newest policy version that the source was given."""

    @property
    def running(self) -> int:
        """Return the number of samples that were added and have not been returned."""

    def update_weights(self, weights: Mapping[str, "Tensor"] | None, version: int) -> None:
        """Generate with these weights from now on; see `Engine.update_weights`."""

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Request one sample per prompt."""

    def step(self) -> list[Rollout]:
        """Advance by one step, or wait for a short time at most; return the samples that have finished."""

    def pending(self) -> list[Prompt]:
        """Return the requested samples that are not finished, as prompts that continue them."""

    def cancel(self) -> None:
        """End all samples that were added and have not been returned, and forget them."""

    def status(self) -> Mapping[str, Any]:
        """Return counts and times, for metrics."""

    def close(self) -> None:
        """End everything that was started."""


def capacity(
    *, max_running: int, running: int, accepted: int, version: int, staleness: int, batch: int
) -> int:
    """Return the number of samples that may start now, 0 or more.

    min(max_running - running, (eta + v + 1) B - (accepted + running)), AReaL, arXiv:2505.24298, section 5.1.
    If batches are made in the order in which samples start, each sample is trained at most eta versions after
    it started, and none is dropped for its age: at most (eta + v + 1) B samples start up to version v, so
    each of them is in one of the batches up to number eta + v. In the order of finishing there is no such
    bound: a long sample can be overtaken any number of times.

    Args:
        max_running: Samples that can run at a time.
        running: Samples that have started and have not finished.
        accepted: Samples that have finished since the start of the run, trained ones included.
        version: Policy versions so far (v): batches that have been trained.
        staleness: Versions by which a sample may be older than the weights that it trains (eta).
        batch: Samples of a batch (B).
    """
    return max(0, min(max_running - running, (staleness + version + 1) * batch - (accepted + running)))


def has_signal(rewards: Sequence[float | None]) -> bool:
    """Return whether rewards of a group differ. With equal ones all advantages are 0: nothing is learned."""
    known = [reward for reward in rewards if reward is not None]
    return bool(known) and max(known) - min(known) > EQUAL * max(1.0, max(map(abs, known)))


def advantages(rewards: Sequence[Sequence[float | None]], kind: Advantage = "mean") -> list[list[float]]:
    """Return the advantage of each rollout of each group.

    `mean`: R - mean of the group (Dr. GRPO, arXiv:2503.20783). `std`: that over the sample standard deviation
    of the group (GRPO, arXiv:2402.03300). `leave-one-out`: R - mean of the others (RLOO, arXiv:2402.14740),
    which is n / (n - 1) times `mean`. A rollout whose reward is None has advantage 0 and no part in mean and
    standard deviation. A group without signal has advantages 0.

    Raises ValueError for an unknown kind or a reward that is not finite.
    """
    if kind not in ("std", "mean", "leave-one-out"):
        raise ValueError(f"advantage must be std, mean or leave-one-out, got {kind}")
    return [_of_group(group, number, kind) for number, group in enumerate(rewards)]


def _of_group(rewards: Sequence[float | None], number: int, kind: Advantage) -> list[float]:
    known = [reward for reward in rewards if reward is not None]
    if not all(map(math.isfinite, known)):
        raise ValueError(f"rewards of group {number} must be finite or None, got {list(rewards)}")
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    n, mean = len(known), math.fsum(known) / len(known)
    scale = 1.0
    if kind == "std":
        scale = 1 / math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / (n - 1))
    elif kind == "leave-one-out":
        scale = n / (n - 1)
    return [0.0 if reward is None else scale * (reward - mean) for reward in rewards]


def overlong_penalty(num_tokens: int, max_tokens: int, window: int) -> float:
    """Return what is added to the reward of an answer of `num_tokens` tokens: 0 to -1.

    0 up to max_tokens - window, then falling linearly, -1 from max_tokens on (DAPO,
    arXiv:2503.14476). window 0: no penalty.
    """
    check(0 <= window <= max_tokens, "overlong", f"must be 0 to {max_tokens}, the longest answer", window)
    if window == 0:
        return 0.0
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - window)) / window))
