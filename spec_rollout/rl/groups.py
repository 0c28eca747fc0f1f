"""Groups of rollouts: all completions of one prompt, which are rewarded and trained together."""

from dataclasses import dataclass

from aedit.spec_rollout.rl.problems import Problem
from aedit.spec_rollout.sampling.samples import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The finished rollouts of one prompt, with their rewards."""

    position: int
    """Place of the prompt in the run's stream of prompts: no two groups of a run have the same. It is the
    `Prompt.rollout` of all samples of the group."""
    problem: Problem
    rollouts: tuple[Rollout, ...]
    """In the order of `Prompt.sample`."""
    rewards: tuple[float | None, ...] = ()
    """One per rollout; None: no reward could be computed, the rollout is left out."""
