"""Prompts and rewards of the steps: scratchpad arithmetic, whose answers are of very unequal length."""

from dataclasses import dataclass

from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling
from benchmarks.kit.tasks import reward
from benchmarks.policies import Policy, tasks

NODES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Amount of work."""

    policy: Policy
    groups: int = 4
    """Prompts of a node and step."""
    samples: int = 4
    """Samples of a prompt."""
    max_tokens: int = 1024
    """Prompt and answer."""
    lr: float = 1e-5
    practice: int = 80
    """Batches of rollouts, as those of a step, of the policy with which the steps begin."""
    learned_s: float = 900.0
    """Processor seconds of training that the drafter has had on these, before the steps."""
    warm: int = 1
    """First steps of a seed, which are not measured: the choice of the arms learns what passes take."""
    steps: int = 4
    """Steps that are measured."""


def deal(size: Size, seed: int, step: int, node: int) -> list[Prompt]:
    """Return a node's samples of a step, with a group for each prompt."""
    stop, dealt = (ByteTokenizer().eos_id,), []
    first = ((seed << 24) + step) * NODES + node
    for i, task in enumerate(tasks(size.groups, seed=first)):
        tokens = tuple(map(int, ByteTokenizer().encode(task.prompt)))
        sampling = Sampling(max_new_tokens=size.max_tokens - len(tokens), stop_tokens=stop)
        group = first * size.groups + i
        dealt += [
            Prompt(tokens=tokens, rollout=group, sample=sample, group=group, sampling=sampling)
            for sample in range(size.samples)
        ]
    return dealt


def node_of(size: Size, rollout: Rollout) -> int:
    """Return the node to which `deal` gave the sample."""
    return rollout.prompt.group // size.groups % NODES


def rewarded(rollout: Rollout) -> float:
    """Return 1 if the last line is the right result, else 0."""
    decode = ByteTokenizer().decode
    return reward(decode(rollout.prompt.tokens), decode(rollout.tokens))
