"""Speculative generation that changes no token: prompts go in, rollouts come out as they finish.

    engine = Engine.of(model, rows=16, max_tokens=1024)
    for rollout in engine.generate([Prompt(tokens=(1, 2, 3), sampling=Sampling(max_new_tokens=64))]):
        print(rollout.tokens, rollout.logprobs)

Each step chooses an arm, lets its drafter draft, verifies all drafted tokens in one pass of the policy
(verification.py), and appends the accepted tokens. The engine never waits for input: its caller opens
`IdleWork.window` while there is nothing to do.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
from torch import Tensor, nn

from aedit.spec_rollout.choose import (
    ArmChooser,
    EngineView,
    Fixed,
    SkippedSteps,
    StepObservation,
    real_nodes,
)
from aedit.spec_rollout.drafters import OFF, Arm, Draft, Drafter, DrafterKind, FeatureSink
from aedit.spec_rollout.engine.meters import Meters, Step, Stopwatch
from aedit.spec_rollout.engine.request_checks import EngineLimits, check_prompt
from aedit.spec_rollout.engine.rows import RowScheduler
from aedit.spec_rollout.engine.verification import (
    Verification,
    VerifyMode,
    truncate_draft,
    verify_within_memory,
)
from aedit.spec_rollout.model import TargetModel, generating, make_target
from aedit.spec_rollout.sampling import Prompt, Rollout, RowNoise, TokenDecoder
from aedit.types import checked
from aedit.weights import refuse_meta_default, take_part

if TYPE_CHECKING:
    from aedit.spec_rollout.engine.weight_swap import WeightSwap


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of `Engine`, for `Engine.of`."""

    drafters: Mapping[DrafterKind, Drafter] | None
    chooser: ArmChooser | None
    tokenizer: TokenDecoder | None
    mode: VerifyMode
    limits: EngineLimits | None


@checked()
class Engine:
    """Continuous batching over the rows of a `TargetModel`, whose parameters are used in place.

    An engine is used by one thread.
    """

    keeps_old_versions = True
    """Samples that have begun can end with the weights before new ones; see `WeightSwap.finish`."""

    def __init__(
        self,
        target: TargetModel,
        *,
        drafters: Mapping[DrafterKind, Drafter] | None = None,
        chooser: ArmChooser | None = None,
        tokenizer: TokenDecoder | None = None,
        mode: VerifyMode = "coupled",
        limits: EngineLimits | None = None,
    ) -> None:
        """Make an engine.

        Args:
            target: The policy.
            drafters: Drafters by kind.
            chooser: Chooses the arm of each step; None never speculates.
            tokenizer: Needed for stop strings.
            mode: How drafts are verified.
            limits: Of prefill and prefix cache.
        """
        self.target, self.mode, self.tokenizer = target, mode, tokenizer
        self.chooser: ArmChooser = chooser or Fixed(OFF)
        self.clock: Callable[[], float] = time.perf_counter
        self.cost_clock: Callable[[], float] = time.process_time
        """Clock of what a step costs on a CPU; on CUDA it is the device's time. The arm is chosen by it, and
        other processes of a busy machine must not decide."""
        self.meters = Meters()
        self._choosing_s = self._learning_s = self._after_s = 0.0
        self._num_resting = 0
        """Number of steps without a choice after the last one with a choice."""
        self._skipped = SkippedSteps()
        dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        noise = RowNoise(target.rows, target.vocabulary, device=target.device, dtype=dtype)
        self._keys = SampleKeys()
        limits = limits or EngineLimits()
        self._rows = RowScheduler(target, noise, drafters or {}, tokenizer, limits)
        self._packing = WeightPacking(target, limits.packed_bytes)
        self._rows.prefill.on_pass = self._packing.begins
        if target.device.type != "cpu":  # collecting is hidden behind the device's work
            self._rows.collecting_budget_s = math.inf

    @classmethod
    def of(
        cls, model: nn.Module, *, rows: int, max_tokens: int, **options: Unpack[EngineOptions]
    ) -> "Engine":
        """Return an engine for a `transformers` model.

        For a drafter that needs the target, make the target first with `make_target` and pass it to `Engine`.

        Args:
            model: The policy; see `make_target`.
            rows: Number of samples that are decoded at the same time.
            max_tokens: Upper limit of prompt and answer of one sample, in tokens.
            **options: Keyword arguments of `Engine`.

        Raises:
            ValueError: The model is not supported.
        """
        return cls(make_target(model, rows=rows, max_tokens=max_tokens), **options)

    @property
    def version(self) -> int:
        """Return the policy version of the weights; see `update_weights`."""
        return self.target.version

    @property
    def running(self) -> list[Rollout]:
        """Return the running rollouts by row."""
        return [each.rollout for each in self._rows.running]

    @property
    def waiting(self) -> list[Rollout]:
        """Return the waiting rollouts in the order in which they will start; the first may be in prefill."""
        return list(self._rows.waiting)

    @property
    def drafters(self) -> Mapping[DrafterKind, Drafter]:
        """Return the drafters by kind. Their weights may be replaced between two steps."""
        return self._rows.drafters

    @property
    def sink(self) -> FeatureSink | None:
        """Return the receiver of the policy's features. It can be set only while no sample is running."""
        return self._rows.sink

    @sink.setter
    def sink(self, sink: FeatureSink | None) -> None:
        if self._rows.running:
            raise ValueError("the feature sink can be set only while no sample is running")
        self._rows.sink = sink

    def check(self, prompt: Prompt) -> None:
        """Check that a sample can be served. Raises ValueError if not; any thread may call."""
        target = self.target
        check_prompt(prompt, target.vocabulary, target.max_tokens, self.tokenizer is not None)

    def add(self, prompt: Prompt) -> Rollout:
        """Queue a sample and return its rollout, which grows with the steps.

        Raises ValueError if it cannot be served or another sample here has its ids; nothing has changed then.
        """
        return self._queue([prompt])[0]

    def generate(self, prompts: Iterable[Prompt]) -> Iterator[Rollout]:
        """Queue all prompts and return an iterator over rollouts as they finish.

        It also yields the rollouts that were queued before, and ends when none is left.

        Raises ValueError if a prompt cannot be served or two have the same ids. None is queued then.
        """
        self._queue(list(prompts))
        return self._finished()

    def remove(self, rollout: Rollout, *, kv: bool = False) -> Prompt:
        """Remove a running or waiting sample and return a prompt with which another engine continues it.

        Args:
            rollout: A rollout of this engine.
            kv: Include a copy of its keys and values. An engine with the same policy version uses them
                instead of computing the text again; others ignore them.

        Raises:
            ValueError: The rollout is not in this engine.
        """
        for row, each in enumerate(self._rows.running):
            if each.rollout is rollout:
                moving = rollout.to_prompt(self._rows.copy_kv(row) if kv else None)
                self._rows.end([row], finished=False)
                self._keys.release([rollout.prompt])
                return moving
        for i, other in enumerate(self._rows.waiting):
            if other is rollout:
                del self._rows.waiting[i]
                brought, rollout.kv = rollout.kv, None
                self._keys.release([rollout.prompt])
                return rollout.to_prompt(brought if kv else None)
        raise ValueError(f"rollout {rollout.prompt.name} is not in this engine")

    def abort(self, rollout: Rollout) -> None:
        """End a running or waiting sample now, with the tokens that it has and finish_reason "abort".

        Its row is free for the next waiting sample. `Step.finished` and `generate` do not report it.

        Raises:
            ValueError: The rollout is not in this engine.
        """
        self.remove(rollout)
        rollout.finish_reason = "abort"

    def update_weights(
        self, weights: Mapping[str, Tensor] | None, version: int, *, in_steps: bool = False
    ) -> None:
        """Replace the policy's weights from the next step on.

        Keys, values and features of the running samples are computed again, so that every later token is
        exactly the new policy's. Weights that are the engine's own parameters are not copied. Sharded weights
        (DTensor) are cast to the engine's dtype and gathered one tensor at a time; all ranks of the node call
        this together, and ranks without an engine call `take_part`.

        Args:
            weights: Tensors by the names of `model.state_dict()`. None: the engine's own parameters have been
                changed or replaced.
            version: Version of the policy that these weights are. It must be above `version`, or equal to it
                if the weights are equal.
            in_steps: Compute the running samples' texts again before the next steps and not in this call, at
                most `EngineLimits.prefill_tokens` each. Meanwhile they are `waiting`, before all others.

        Raises:
            ValueError: A tensor does not fit, or the version is that of other weights. Nothing has changed.
            RuntimeError: A rank was lost while tensors were gathered. The engine does not generate until an
                update succeeds.
        """
        before = self.target.version
        self.target.update_weights(weights, version)
        self._packing.weights_changed()
        if version != before:
            with generating(self.target.device):
                self._rows.recompute(in_steps=in_steps)

    def weight_swap(self) -> "WeightSwap":
        """Return a second set of weights, prepared beside those in use and taken over between two steps."""
        from aedit.spec_rollout.engine.weight_swap import WeightSwap

        return WeightSwap(self)

    @staticmethod
    def take_part(weights: Mapping[str, Tensor]) -> None:
        """Take part in `update_weights` of other ranks, with their weights, on a rank that has no engine.

        Raises ValueError if another rank refuses the weights, RuntimeError if one was lost.
        """
        take_part(weights)

    def clear_prefix_cache(self) -> None:
        """Drop the keys and values that are kept for later samples."""
        self._rows.prefix_cache.clear()

    def step(self) -> Step:
        """Run one pass of the policy over all running samples, each of which gets one token or more.

        Waiting samples start first, as far as rows are free and `EngineLimits.prefill_tokens` allows. Without
        samples nothing is done. If memory for keys and values is short, the last running samples wait until
        others have ended; no token changes.

        Raises:
            RuntimeError: The weights have changed without `update_weights`. Nothing has been generated; the
                step can be repeated after it.
            KVMemoryError: The memory for keys and values does not suffice for one sample.
            ValueError: The default device of torch is meta.
        """
        refuse_meta_default()
        if self._rows.running or self._rows.waiting:
            self.target.check_weights(thorough=not self._rows.running)
        with generating(self.target.device):
            self._rows.start_waiting()
            if self._rows.running:
                return self._step()
            self._rows.renew_budget()
            return Step()

    def status(self) -> dict[str, object]:
        """Return counts, memory use and the figures of `Meters.status`.

        `kv_bytes` are allocated for keys and values now, at most `kv_bytes_reserved`; `feature_bytes` are
        features of running samples; `features` is the status of the sink; `transferred_kv_bytes` are keys and
        values that came with waiting samples; `prefilled_tokens` were computed before samples ran,
        `restored_tokens` were not as their keys and values came along; for `prefix_cache` see
        `PrefixCache.status`.
        """
        return {
            "running": len(self._rows.running),
            "waiting": len(self._rows.waiting),
            "version": self.target.version,
            "kv_bytes": self.target.kv_bytes,
            "kv_bytes_reserved": self.target.kv_bytes_reserved,
            "noise_bytes": self._rows.noise.num_bytes,
            "feature_bytes": self._rows.feature_bytes,
            "features": {} if self.sink is None else self.sink.status(),
            "transferred_kv_bytes": sum(
                each.kv.num_bytes for each in self._rows.waiting if each.kv is not None
            ),
            "prefilled_tokens": self._rows.prefill.num_computed,
            "restored_tokens": self._rows.prefill.num_restored,
            "prefix_cache": self._rows.prefix_cache.status(),
            **self.meters.status(),
        }

    def close(self) -> None:
        """Remove all samples. The memory is freed with the engine."""
        self._keys.release(each.prompt for each in [*self.running, *self.waiting])
        self._rows.waiting.clear()
        self._rows.end(range(len(self._rows.running)), finished=False)

    def _queue(self, prompts: Sequence[Prompt]) -> list[Rollout]:
        for prompt in prompts:
            self.check(prompt)
        rollouts = [prompt.to_rollout() for prompt in self._keys.assign(prompts)]
        self._rows.waiting.extend(rollouts)
        return rollouts

    def _finished(self) -> Iterator[Rollout]:
        while self._rows.running or self._rows.waiting:
            yield from self.step().finished

    def _step(self) -> Step:
        began_s = self.clock()
        whole = Stopwatch(self.target.device, self.cost_clock)
        rows, view, arm = self._rows, None, self._skipped.arm
        if not self._is_resting():
            view = rows.view()
            arm = self._choose(view)
            rows.wake_drafters()
        drafting = Stopwatch(self.target.device, self.cost_clock)
        self._choosing_s = drafting.began_s - whole.began_s
        proposal = draft = None
        if not arm.is_off:
            proposal = self._propose(arm)
            drafting.stop()
            kept = real_nodes(proposal) if view is None else self.chooser.trim(view, arm, proposal)
            self._choosing_s += self.cost_clock() - drafting.ended_s
            draft = truncate_draft(proposal, kept, self.target.nodes)
        verification, is_whole = verify_within_memory(rows, draft, arm.depth, self.mode)
        if not is_whole:
            arm, proposal, draft, view = OFF, None, None, rows.view()
        rollouts = tuple(each.rollout for each in rows.running)
        verification.check_finite(rollouts, self.target.version)
        emitted, ended = self._append_tokens(verification)
        counts = tuple(map(len, emitted))
        following_s, collecting_s = math.inf, math.inf  # when they began
        if rows.is_followed:
            following_s = self.cost_clock()
            collecting_s = rows.follow(emitted, counts, verification.features, self.cost_clock, following_s)
        whole.stop()
        pass_s, after_s, overhead_s = whole.seconds(), 0.0, 0.0
        if self.target.device.type == "cpu":  # on CUDA the host's work is hidden behind the device's
            after_s = self._after_s
            overhead_s = after_s + self._choosing_s + max(whole.ended_s - following_s, 0.0)
            rows.limit_collection(pass_s, max(whole.ended_s - collecting_s, 0.0))
        step = Step(
            rollouts=rollouts,
            counts=counts,
            finished=tuple(rollouts[row] for row in ended),
            arm=arm,
            nodes=-(-sum(verification.verified) // len(counts)),
            verified=verification.verified,
            accepted=verification.accepted,
            total_s=self.clock() - began_s,
            cost_s=pass_s + after_s,
            overhead_s=overhead_s,
            draft_s=0.0 if proposal is None else drafting.seconds(),
        )
        self._observe(view, step, pass_s, proposal, verification.path)
        self._packing.passed(len(counts) * (1 + step.nodes))
        rows.renew_budget()
        rows.end(ended, finished=True)
        self._keys.release(rollout.prompt for rollout in step.finished)
        return step

    def _choose(self, view: EngineView) -> Arm:
        """Return the chooser's arm, or off if no sample can take more than one token."""
        arm = self.chooser.choose(view)
        if arm.is_off or self._rows.max_remaining == 1:
            return OFF
        if self.mode == "rejection" and not arm.is_chain:
            raise ValueError(f"arm {arm}: rejection mode verifies chains only")
        if not arm.is_chain and not self.target.supports_trees:
            raise ValueError(f"arm {arm}: this policy cannot verify trees: use chains, such as layer:4")
        return arm

    def _propose(self, arm: Arm) -> Draft:
        rows = self._rows
        rows.catch_up()
        most = rows.max_remaining - 1  # more tokens could not be emitted
        capped = Arm(arm.drafter, most, 1, most) if arm.is_chain and arm.depth > most else arm
        drafter = rows.drafters[arm.drafter]
        return drafter.propose(capped, len(rows.running), rows.noise, rows.sampling.temperature_B)

    def _append_tokens(self, verification: Verification) -> tuple[list[list[int]], list[int]]:
        """Append verified tokens to the rollouts, up to their ends.

        Returns:
            The appended tokens of each row, and the rows that have ended.
        """
        kept, ended = [], []
        for row, each in enumerate(self._rows.running):
            tokens = verification.tokens[row]
            num_kept, finish = each.find_end(tokens)
            kept.append(tokens[:num_kept])
            logprobs, num_drafted = verification.logprobs[row][:num_kept], min(num_kept, len(tokens) - 1)
            self._rows.append(row, kept[row], logprobs, num_drafted)
            if verification.top_logprobs:
                each.rollout.top_logprobs += verification.top_logprobs[row][:num_kept]
            if finish:
                each.rollout.finish_reason = finish
                ended.append(row)
        return kept, ended

    def _is_resting(self) -> bool:
        """Return true if the chooser has said which arm this step takes, at as many rows."""
        skipped, rows = self._skipped, self._rows
        if skipped.num_steps >= self._num_resting or skipped.rows != len(rows.running):
            return False
        return skipped.arm.is_off or (rows.follows(skipped.arm.drafter) and rows.max_remaining > 1)

    def _observe(
        self,
        view: EngineView | None,
        step: Step,
        cost_s: float,
        proposal: Draft | None,
        path: list[list[int]] | None,
    ) -> None:
        self.meters.add(step)
        if view is None:
            self._skipped.add(sum(step.counts), cost_s)
            self._after_s = 0.0
            return
        learning_s, began_s = self._learning_s, self.cost_clock()
        self.chooser.learn(
            StepObservation(
                view=view,
                arm=step.arm,
                emitted=sum(step.counts),
                total_s=cost_s,
                draft_s=step.draft_s,
                learning_s=learning_s,
                nodes=step.nodes,
                verified_B=step.verified,
                draft=proposal,
                accepted_B=step.accepted,
                path_Bm=path,
                skipped=self._skipped,
            )
        )
        rest: Callable[[EngineView], tuple[Arm, int]] | None = getattr(self.chooser, "rest", None)
        arm, self._num_resting = (OFF, 0) if rest is None else rest(view)
        self._skipped = SkippedSteps(view.rows, arm)
        self._after_s = self.cost_clock() - began_s
        self._learning_s = self._after_s + self._choosing_s
        self.meters.choosing_s += self._learning_s


PACK_AFTER, PACK_TOKENS = 16, 32
"""Passes with the same weights after which they are packed, and tokens beyond which one counts as several:
each pass then saves a tenth to a half, and the copy takes as long as five to ten, or 500 tokens of a prompt.
"""
HUGE_AFTER = 256
"""Passes after which packed weights move to huge pages, a part with each pass: a pass then takes a twentieth
less time, and moving takes as long as ten, or more where memory is in pieces."""


class WeightPacking:
    """Packs the policy's weights, then moves them to huge pages, where they are used for long enough.

    See `TargetModel.pack` and `moves_to_huge_pages`.
    """

    def __init__(self, target: TargetModel, most_bytes: int) -> None:
        self._target, self._most_bytes = target, most_bytes
        self._after, self._num_passes = PACK_AFTER, 0
        self._moves: Iterator[None] = iter(())

    def passed(self, num_tokens: int) -> None:
        """Count a pass over so many tokens; in fp32 one over a single token gains nothing."""
        if num_tokens > 1 or self._target.dtype == torch.bfloat16:
            self._count(1 + num_tokens // PACK_TOKENS)

    def begins(self, num_tokens: int) -> None:
        """Count a pass over so many tokens of prompts, before it: a long one is then faster itself."""
        self._count(num_tokens // PACK_TOKENS)

    def _count(self, num_passes: int) -> None:
        before = self._num_passes
        self._num_passes += num_passes
        if before < self._after <= self._num_passes:
            self._target.pack(self._most_bytes)
        if before < HUGE_AFTER <= self._num_passes:
            self._moves = self._target.moves_to_huge_pages()
        next(self._moves, None)

    def weights_changed(self) -> None:
        """Begin anew: at once if the last weights were used for long."""
        self._after = 1 if self._num_passes >= 4 * PACK_AFTER else PACK_AFTER
        self._num_passes, self._moves = 0, iter(())


class SampleKeys:
    """Assigns keys to prompts without ids, and refuses a key that is in use.

    Two samples with the same key have the same noise. Of one prompt they would be the same text, and count
    twice without a notice.
    """

    def __init__(self) -> None:
        self._used: set[tuple[int, int]] = set()
        self._last = 0

    def assign(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts with keys, all different from each other and from those in use.

        All are in use until `release`.

        Raises:
            ValueError: Two samples have the same key. Nothing has changed.
        """
        given: set[tuple[int, int]] = set()
        for prompt in prompts:
            if prompt.has_key and (prompt.key in self._used or prompt.key in given):
                raise ValueError(
                    f"prompt {prompt.name}: another sample that runs or waits has these ids, "
                    "and both would get the same noise: give each sample ids of its own, or none"
                )
            given.add(prompt.key)
        named = [prompt if prompt.has_key else self._named(prompt, given) for prompt in prompts]
        self._used.update(prompt.key for prompt in named)
        return named

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Let the keys of samples that have left the engine be used again."""
        self._used.difference_update(prompt.key for prompt in prompts)

    def _named(self, prompt: Prompt, given: set[tuple[int, int]]) -> Prompt:
        self._last -= 1
        while (self._last, 0) in self._used or (self._last, 0) in given:
            self._last -= 1
        return replace(prompt, rollout=self._last, sample=0)
