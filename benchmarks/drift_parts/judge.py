"""Evaluate drafters on the current policy: tokens per step, with equal prompts and noise for all."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter, SuffixDrafter
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Rollout
from aedit.spec_rollout.training import FeatureSample
from benchmarks.drift_parts.drafters import Gate, IdleTrained, collected, copy_of, ends_of, matched, oracle
from benchmarks.drift_parts.policy import moved

DEPTH = 4
ARM, SUFFIX_ARM = f"layer:{DEPTH}", f"suffix:{DEPTH}"


@dataclass(frozen=True, slots=True)
class Standing:
    """Result of one drafter on one policy."""

    tokens_per_step: float
    """Tokens per step of a sample."""
    accepted_D: tuple[float, ...]
    """Share of the drafts that were right before this depth that are right here too. Empty: its drafts are of
    unequal depths."""
    overlap_D: tuple[float, ...]
    """The same without the chance of drawing: sum over tokens of min(p, q). Empty: it has no q."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Results of all drafters on one policy."""

    step: int
    kl_nats: float
    """Per token, from the policy at first."""
    entropy_nats: float
    drafters: Mapping[str, Standing]
    gate: Gate
    trainer_s: float
    """Processor seconds that it has learned for, in waits."""
    idle_s: float
    """That it was to have."""
    oracle_steps: int
    unlike: int
    """Rollouts that were not the same with every drafter: ties in fp32."""


class Judge:
    """Evaluates with the same prompts and the same noise every time."""

    def __init__(
        self,
        policies: tuple[PreTrainedModel, PreTrainedModel],
        target: Target,
        layer: DraftLayer,
        asked: tuple[Sequence[Prompt], Sequence[Prompt]],
        oracle_rounds: int,
    ) -> None:
        """Set up the evaluation.

        policies: the moving one, which `target` is of, and the one at the start. layer: the static drafter,
        where oracles begin too. asked: the prompts to evaluate on, and those that oracles learn from.
        """
        self._policies, self._target, self._static = policies, target, layer
        self._oracle_rounds, (self._asked, self._oracle_asked) = oracle_rounds, asked

    def look(self, step: int, drafters: Mapping[str, DraftLayer], idle: IdleTrained) -> Checkpoint:
        """Evaluate all drafters; the target must have no live rows."""
        best, oracle_steps = self._oracle(drafters["idle-trained"])
        first = self._engine(self._static)
        said, samples = collected(first, self._asked)
        kl_nats, entropy_nats = moved(*self._policies, said)
        standings = {"static": _standing(first, self._overlap(self._static, samples))}
        unlike: set[int] = set()
        for name, layer in {**drafters, "oracle": best}.items():
            engine = self._engine(layer)
            unlike |= _distinct_candidates(said, list(engine.generate(self._asked)))
            standings[name] = _standing(engine, self._overlap(layer, samples))
        engine = Engine(self._target, drafters={"suffix": SuffixDrafter()}, chooser=Fixed.of(SUFFIX_ARM))
        unlike |= _distinct_candidates(said, list(engine.generate(self._asked)))
        standings["suffix"] = Standing(_standing(engine, ()).tokens_per_step, (), ())
        return Checkpoint(
            step=step,
            kl_nats=kl_nats,
            entropy_nats=entropy_nats,
            drafters=standings,
            gate=idle.gate,
            trainer_s=idle.used_s,
            idle_s=idle.idle_s,
            oracle_steps=oracle_steps,
            unlike=len(unlike),
        )

    def _oracle(self, quick: DraftLayer) -> tuple[DraftLayer, int]:
        """Return a trained oracle; quick: drafts during the collection, which changes no token."""
        _, samples = collected(self._engine(quick), self._oracle_asked)
        return oracle(self._static, samples, ends_of(self._target), self._oracle_rounds)

    def _overlap(self, layer: DraftLayer, samples: Sequence[FeatureSample]) -> tuple[float, ...]:
        return matched(layer, samples, ends_of(self._target), DEPTH).overlap_D

    def _engine(self, layer: DraftLayer) -> Engine:
        drafter = LayerDrafter.of(copy_of(layer), self._target)
        return Engine(self._target, drafters={"layer": drafter}, chooser=Fixed.of(ARM))


def _standing(engine: Engine, overlap_D: tuple[float, ...]) -> Standing:
    status: dict[str, Any] = engine.meters.status()
    reached = [1.0, *status["accepted_by_position"]]
    accepted = tuple(b / a if a else 0.0 for a, b in itertools.pairwise(reached))
    return Standing(status["accepted_length"], accepted, overlap_D)


def _distinct_candidates(said: Sequence[Rollout], other: Sequence[Rollout]) -> set[int]:
    """Return the samples in which the two differ."""
    tokens = {rollout.prompt.sample: rollout.tokens for rollout in other}
    return {one.prompt.sample for one in said if one.tokens != tokens[one.prompt.sample]}
