"""Speculative generation that changes no token: prompts go in, rollouts come out as they finish.

    engine = Engine.of(model, rows=16, max_tokens=1024)
    for rollout in engine.generate([Prompt(tokens=(1, 2, 3), sampling=Sampling(max_new_tokens=64))]):
        print(rollout.tokens, rollout.logprobs)

Each step: choose an arm by what is known, let its drafter guess, let the policy verify all guesses in one
pass, keep what it would have said anyway (verify.py). The engine never waits for anybody: whoever feeds it
opens `IdleWork.window` while there is nothing to do.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from aedit.spec_rollout.arms.arms import ArmChooser, EngineView, Fixed, StepObservation
from aedit.spec_rollout.drafters.drafts import OFF, Arm, Draft, Drafter, DrafterKind, FeatureSink, StepUpdate
from aedit.spec_rollout.engine.meters import Meters, Step, Stopwatch
from aedit.spec_rollout.engine.request_checks import check_prompt
from aedit.spec_rollout.engine.rows import RowScheduler
from aedit.spec_rollout.engine.verification import Verification, VerifyMode, truncate_draft, verify_drafts
from aedit.spec_rollout.model.target import Target
from aedit.spec_rollout.sampling.noise import RowNoise
from aedit.spec_rollout.sampling.samples import Prompt, Rollout
from aedit.spec_rollout.sampling.stops import Tokenizer


class Engine:
    """Continuous batching over the rows of a `Target`, whose parameters are used in place. For one thread."""

    def __init__(
        self,
        target: Target,
        *,
        drafters: Mapping[DrafterKind, Drafter] | None = None,
        chooser: ArmChooser | None = None,
        tokenizer: Tokenizer | None = None,
        mode: VerifyMode = "coupled",
    ) -> None:
        """chooser: None never speculates. tokenizer: for stop strings. mode: see `VerifyMode`."""
        self.target, self.mode, self.tokenizer = target, mode, tokenizer
        self.chooser: ArmChooser = chooser or Fixed(OFF)
        self.clock: Callable[[], float] = time.perf_counter
        self.meters = Meters()
        dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        noise = RowNoise(target.rows, target.vocabulary, device=target.device, dtype=dtype)
        self._rows = RowScheduler(target, noise, drafters or {}, tokenizer)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        rows: int,
        max_tokens: int,
        tokenizer: Tokenizer | None = None,
        drafters: Mapping[DrafterKind, Drafter] | None = None,
        chooser: ArmChooser | None = None,
    ) -> "Engine":
        """An engine for a `transformers` model. rows: samples at a time; max_tokens: of one, with its prompt.
        ValueError as `Target.of`. (A drafter that needs the target: make that first, and `Engine` of it.)"""
        target = Target.of(model, rows=rows, max_tokens=max_tokens)
        return cls(target, drafters=drafters, chooser=chooser, tokenizer=tokenizer)

    @property
    def running(self) -> list[Rollout]:
        """By row."""
        return [each.rollout for each in self._rows.running]

    @property
    def waiting(self) -> list[Rollout]:
        """In the order in which they will begin."""
        return list(self._rows.waiting)

    @property
    def drafters(self) -> Mapping[DrafterKind, Drafter]:
        """By the arms that ask them. Their weights may be replaced between any two steps."""
        return self._rows.drafters

    @property
    def sink(self) -> FeatureSink | None:
        """Where features go. ValueError if it is set while samples are live."""
        return self._rows.sink

    @sink.setter
    def sink(self, sink: FeatureSink | None) -> None:
        if self._rows.running:
            raise ValueError("an engine's feature sink is set before samples are live")
        self._rows.sink = sink

    def add(self, prompt: Prompt) -> Rollout:
        """The sample waits for a row; what is returned grows with the steps. ValueError, and nothing has
        changed, if the prompt cannot be served."""
        self._check_prompt(prompt)
        begun = prompt.partial or Rollout(prompt)
        lists = [*begun.tokens], [*begun.logprobs], [*begun.versions]
        rollout = Rollout(replace(prompt, partial=None), *lists, passes=begun.passes, kv=begun.kv)
        self._rows.waiting.append(rollout)
        return rollout

    def generate(self, prompts: Iterable[Prompt]) -> Iterator[Rollout]:
        """Each rollout as it finishes, also of those that were here, until none is left. ValueError at once,
        and nothing begins, if one of the prompts cannot be served."""
        prompts_to_add = list(prompts)
        for prompt in prompts_to_add:
            self._check_prompt(prompt)
        for prompt in prompts_to_add:
            self.add(prompt)
        return self._finished()

    def remove(self, rollout: Rollout, *, kv: bool = False) -> Prompt:
        """A sample, live or waiting, leaves, and another engine that is given this prompt goes on where it
        stopped. kv: with a copy of its keys and values, which an engine of the same policy and version takes
        over instead of computing the text again; others do without. ValueError if it is not here."""
        for row, each in enumerate(self._rows.running):
            if each.rollout is rollout:
                moving = rollout.to_prompt(self._rows.copy_kv(row) if kv else None)
                self._rows.end([row], finished=False)
                return moving
        for i, other in enumerate(self._rows.waiting):
            if other is rollout:
                del self._rows.waiting[i]
                brought, rollout.kv = rollout.kv, None
                return rollout.to_prompt(brought if kv else None)
        raise ValueError(f"rollout {rollout.prompt.rollout}/{rollout.prompt.sample} is not in this engine")

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """The policy has new weights from the next step on. What the old ones computed for live samples is
        computed anew, so that every later token is exactly the new policy's. ValueError as
        `Target.update_weights`,
        and nothing has changed then."""
        self.target.update_weights(weights, version)
        with torch.inference_mode():
            self._rows.recompute()

    def step(self) -> Step:
        """One pass of the policy for every live sample, each of which gets a token or more. Who waits begins
        first, as far as there is room; without a sample nothing is done."""
        with torch.inference_mode():
            self._rows.admit_waiting()
            return self._step() if self._rows.running else Step()

    def status(self) -> dict[str, object]:
        """Who is here, what memory is held (the cache is allocated once; features of a prompt stay while a
        sample with it is live; `features` is of the sink; what samples brought along goes when they have a
        row), how many tokens of texts were computed and how many were not because their keys and values came
        along, and what all steps have done: `Meters.status`."""
        return {
            "running": len(self._rows.running),
            "waiting": len(self._rows.waiting),
            "version": self.target.version,
            "kv_bytes": self.target.cache.num_bytes,
            "noise_bytes": self._rows.noise.num_bytes,
            "feature_bytes": self._rows.feature_bytes,
            "features": {} if self.sink is None else self.sink.status(),
            "transferred_kv_bytes": sum(
                each.kv.num_bytes for each in self._rows.waiting if each.kv is not None
            ),
            "prefilled_tokens": self._rows.num_prefilled,
            "restored_tokens": self._rows.num_restored,
            **self.meters.status(),
        }

    def close(self) -> None:
        """All samples leave. The memory goes with the engine."""
        self._rows.waiting.clear()
        self._rows.end(range(len(self._rows.running)), finished=False)

    def _check_prompt(self, prompt: Prompt) -> None:
        check_prompt(prompt, self.target.vocabulary, self.target.max_tokens, self.tokenizer is not None)

    def _finished(self) -> Iterator[Rollout]:
        while self._rows.running or self._rows.waiting:
            yield from self.step().finished

    def _step(self) -> Step:
        began_s = self.clock()
        rows, view = self._rows, self._view()
        arm = self._choose(view)
        drafting = Stopwatch(self.target.device, self.clock)
        proposal = None if arm.is_off else self._propose(arm)
        drafting.stop()
        draft = None if proposal is None else self._trim(view, arm, proposal)
        verification = verify_drafts(rows, draft, arm.depth, self.mode)
        rollouts = tuple(each.rollout for each in rows.running)
        counts, ended = self._append_tokens(verification)
        step = Step(
            rollouts=rollouts,
            counts=counts,
            finished=tuple(rollouts[row] for row in ended),
            arm=arm,
            nodes=0 if draft is None else draft.tokens_BN.shape[1],
            accepted=verification.accepted,
            total_s=self.clock() - began_s,
            draft_s=0.0 if proposal is None else drafting.seconds(),
        )
        self._observe(view, step, proposal, verification.path)
        rows.end(ended, finished=True)
        return step

    def _view(self) -> EngineView:
        live = self._rows.running
        # A drafter without weights has no version of them.
        versions: dict[str, int] = {
            by: getattr(drafter, "version", 0) for by, drafter in self._rows.drafters.items()
        }
        return EngineView(len(live), sum(each.length for each in live), versions)

    def _choose(self, view: EngineView) -> Arm:
        """The chooser's arm, unless no sample can take more than one token."""
        arm = self.chooser.choose(view)
        if arm.is_off or self._rows.max_remaining == 1:
            return OFF
        if self.mode == "rejection" and not arm.is_chain:
            raise ValueError(f"arm {arm}: rejection verifies chains only")
        return arm

    def _propose(self, arm: Arm) -> Draft:
        rows = self._rows
        most = rows.max_remaining - 1  # what is longer cannot be emitted
        prompts_to_add = Arm(arm.drafter, most, 1, most) if arm.is_chain and arm.depth > most else arm
        drafter = rows.drafters[arm.drafter]
        return drafter.propose(prompts_to_add, len(rows.running), rows.noise, rows.sampling.temperature_B)

    def _trim(self, view: EngineView, arm: Arm, proposal: Draft) -> Draft | None:
        """The part of a proposal that is verified."""
        num_nodes = self.chooser.trim(view, arm, proposal)
        return truncate_draft(proposal, min(num_nodes, self.target.nodes))

    def _append_tokens(self, verification: Verification) -> tuple[tuple[int, ...], list[int]]:
        """The rollouts grow by what the policy has said, up to where they end. Returns how many tokens each
        has taken, and the rows that have ended."""
        version, kept, ended = self.target.version, [], []
        for row, each in enumerate(self._rows.running):
            tokens = verification.tokens[row]
            num_kept, finish = each.find_end(tokens)
            kept.append(tokens[:num_kept])
            each.append(kept[row], verification.logprobs[row][:num_kept], version)
            if finish:
                each.rollout.finish_reason = finish
                ended.append(row)
        counts = tuple(map(len, kept))
        self._update_drafters(kept, counts, verification)
        return counts, ended

    def _update_drafters(
        self, kept: list[list[int]], counts: tuple[int, ...], verification: Verification
    ) -> None:
        """Who follows the rows hears what they have taken."""
        rows = self._rows
        if not rows.needs_features:
            return
        update = StepUpdate(kept, verification.features(counts))
        for drafter in rows.drafters.values():
            drafter.update(update)
        if rows.sink is not None:
            rows.sink.update(update, self.target.version)

    def _observe(
        self, view: EngineView, step: Step, proposal: Draft | None, path: list[list[int]] | None
    ) -> None:
        self.meters.add(step)
        self.chooser.learn(
            StepObservation(
                view=view,
                arm=step.arm,
                emitted=sum(step.counts),
                total_s=step.total_s,
                draft_s=step.draft_s,
                nodes=step.nodes,
                draft=proposal,
                accepted_B=step.accepted,
                path_Bm=path,
            )
        )
