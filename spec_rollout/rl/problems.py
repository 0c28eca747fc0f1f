"""Problems of a task, and groups: all completions of one problem, rewarded and trained together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aedit.spec_rollout.sampling import Prompt, Rollout
from aedit.types import NonNegativeInt, checked

Messages = tuple[Mapping[str, Any], ...]
"""A dialogue: `role` and `content` each."""


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


def answered(problem: Problem, texts: Sequence[str]) -> Group:
    """Return a group of rollouts that read `texts`, as if their bytes were tokens, for a call of rewards."""
    prompts = [Prompt(tokens=problem.tokens, rollout=problem.index, sample=i) for i in range(len(texts))]
    rollouts = [
        Rollout(prompt, tokens=list(text.encode())) for prompt, text in zip(prompts, texts, strict=True)
    ]
    return Group(position=problem.index, problem=problem, rollouts=tuple(rollouts))
