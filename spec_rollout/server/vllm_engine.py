"""vLLM as the engine of a rollout worker.

`make_vllm_engine` is the `make` of a worker whose interpreter has vLLM (`WorkerConfig.python`). vLLM runs in
this process and thread, so that weights change between two steps; `vllm_server.py` has it in a server. The
plug-in `aedit.spec_rollout.vllm` draws tokens with the noise of each sample's key: in float32 they are those
of the own engine, with any drafter of vLLM.
"""

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from aedit.spec_rollout.choose import ArmChooser, EngineView, Goodput, StepObservation
from aedit.spec_rollout.drafters import (
    OFF,
    Arm,
    Draft,
    DrafterKind,
    Eagle3Layer,
    Eagle3Shape,
    exported_tensors,
    shape_from,
    write_drafter,
)
from aedit.spec_rollout.engine import Meters, SampleKeys, Step, check_prompt
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling, StopStrings, TokenDecoder, gumbel

if TYPE_CHECKING:
    from aedit.spec_rollout.server.worker_engine import EngineSpec

CANARY_TOKENS = 16
CANARY_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.25}
"""Largest difference of a log-probability of the canary that rounding explains, by dtype."""
CANARY_TEMPERATURE = 0.7
LAYER_DEPTH = 4
"""Tokens that the run's own layer drafts, unless the configuration says how many."""
KV_BLOCK = 128
"""Tokens of a block of keys and values on a CPU."""
MIN_KV_BYTES = 64 << 20
MAX_LOGPROBS = -1
"""Of `SamplingParams`; no limit: servers have their own."""
_transformers: Any = (AutoConfig, AutoModelForCausalLM, AutoTokenizer)  # their methods carry no types


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """Limits of an engine, in place of its `TargetModel`."""

    rows: int
    max_tokens: int
    vocabulary: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class VllmOutput:
    """New tokens of a request."""

    name: str
    tokens: Sequence[int]
    logprobs: Sequence[Mapping[int, Any]]
    """By token, with `rank` and `logprob`, at each place."""
    finish_reason: str | None
    passes: int = 1


@dataclass(frozen=True, slots=True)
class VllmProbe:
    """A text that vLLM has scored, and the token that it has drawn after it."""

    logprobs: list[float]
    """Of all tokens but the first."""
    token: int
    logprob: float
    """Of the drawn token."""


class VllmBackend(Protocol):
    """vLLM in this process or in a server."""

    def init(self, tensors: Mapping[str, Tensor], draft: Mapping[str, Tensor]) -> None:
        """Take note of the tensors that each version must have."""

    def add(self, name: str, tokens: Sequence[int], settings: Mapping[str, Any]) -> None:
        """Start a request with fields of `SamplingParams`."""

    def step(self) -> list[VllmOutput]:
        """Return what requests have got, after a step or a short wait."""

    def abort(self, name: str) -> None:
        """End a request."""

    def draft(self, depth: int) -> None:
        """Draft so many tokens at the end of the next steps, which the steps after them verify."""

    def pause(self) -> list[VllmOutput]:
        """Stop generating, and return what requests have got so far."""

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights. Raises ValueError if they are refused; the old ones are in use then."""

    def resume(self) -> None:
        """Go on generating after `pause`; texts of requests are computed again."""

    def probe(self, tokens: Sequence[int], settings: Mapping[str, Any]) -> VllmProbe:
        """Score a text and draw a token."""


class LocalVllm:
    """vLLM in this process and thread."""

    def __init__(self, llm: Any) -> None:
        """Take over a `vllm.v1.engine.llm_engine.LLMEngine` in this process, with the plug-in registered."""
        self.llm = llm
        self._held: list[VllmOutput] = []
        self._num_probes = 0

    def init(self, tensors: Mapping[str, Tensor], draft: Mapping[str, Tensor]) -> None:
        """Take note of the tensors that each version must have."""
        self._call("init_weight_transfer_engine", {"tensors": tensors, "draft_tensors": draft})

    def add(self, name: str, tokens: Sequence[int], settings: Mapping[str, Any]) -> None:
        """Start a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**settings, output_kind=RequestOutputKind.DELTA)
        self.llm.add_request(name, {"prompt_token_ids": [*tokens]}, params)

    def step(self) -> list[VllmOutput]:
        """Run one step, unless tokens came while a probe was computed."""
        held, self._held = self._held, []
        return held or [_output(each) for each in self.llm.step()]

    def abort(self, name: str) -> None:
        """End a request."""
        self.llm.abort_request([name])

    def draft(self, depth: int) -> None:
        """Set the depth that vLLM's scheduler looks up by the number of running samples."""
        scheduler = self.llm.engine_core.engine_core.scheduler
        if scheduler.dynamic_sd_lookup is None or scheduler.dynamic_sd_lookup[0] != depth:
            scheduler.dynamic_sd_lookup = [depth] * (scheduler.scheduler_config.max_num_seqs + 1)

    def pause(self) -> list[VllmOutput]:
        """Return tokens that came while a probe was computed."""
        held, self._held = self._held, []
        return held

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights between two steps."""
        self._call("start_weight_update")
        self._call("update_weights", {"tensors": weights})
        self._call("finish_weight_update")
        # Keys and values of other weights; running samples are computed again.
        if not self.llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM has not reset its prefix cache: texts of two versions would be mixed")

    def resume(self) -> None:
        """Do nothing: requests go on with the next step."""

    def probe(self, tokens: Sequence[int], settings: Mapping[str, Any]) -> VllmProbe:
        """Score a text and draw a token."""
        self._num_probes += 1
        name = f"probe {self._num_probes}"
        self.add(name, tokens, settings)
        scores: list[float] = []
        while True:
            for each in self.llm.step():
                if each.request_id != name:
                    self._held.append(_output(each))
                    continue
                pairs = zip(tokens[1:], (each.prompt_logprobs or ())[1:], strict=False)
                scores = scores or [found[token].logprob for token, found in pairs]
                if each.outputs[0].token_ids:
                    token = each.outputs[0].token_ids[0]
                    return VllmProbe(scores, token, each.outputs[0].logprobs[0][token].logprob)

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of vLLM's worker, which is in this process."""
        self.llm.collective_rpc(method, args=arguments)


def _output(found: Any) -> VllmOutput:
    one = found.outputs[0]
    return VllmOutput(found.request_id, one.token_ids, one.logprobs, one.finish_reason)


class VllmEngine:
    """vLLM with the methods of `Engine` that a host calls. Used by one thread at a time."""

    def __init__(
        self,
        backend: VllmBackend,
        size: EngineSize,
        reference: "ReferencePolicy",
        tokenizer: TokenDecoder | None,
        arm: Arm,
        drafter: Eagle3Shape | None = None,
        chooser: ArmChooser | None = None,
    ) -> None:
        """Make the engine.

        Args:
            backend: vLLM.
            size: Its limits.
            reference: Computes what vLLM must compute with each version.
            tokenizer: Needed for stop strings.
            arm: What vLLM drafts.
            drafter: Shape of the drafter whose weights come, to a `LocalVllm`; None: none come.
            chooser: Chooses what a `LocalVllm` drafts in a step; None: always `arm`.
        """
        self.target, self.tokenizer, self.arm = size, tokenizer, arm
        self.version = 0
        self.meters = Meters()
        self.drafters: Mapping[str, SwappedLayer] = {}
        self._backend, self._reference, self._chooser = backend, reference, chooser
        self._drafts = arm if chooser is None and drafter is None else OFF
        """What vLLM verifies in the next step."""
        self._learning_s = 0.0
        self._keys = SampleKeys()
        self._samples: dict[str, _RunningSample] = {}
        self._news: dict[str, tuple[int, int]] = {}
        """Tokens and passes by sample that `step` has not reported."""
        self._num_canaries = 0
        shapes = reference.shapes.items()
        like = {name: torch.empty(shape, dtype=size.dtype, device="meta") for name, shape in shapes}
        draft: Mapping[str, Tensor] = {}
        if drafter is not None:
            assert isinstance(backend, LocalVllm)
            self.drafters = {"layer": SwappedLayer(backend.llm, drafter)}
            draft = exported_tensors(Eagle3Layer(drafter))
        backend.init(like, draft)

    @property
    def running(self) -> list[Rollout]:
        """Return the rollouts in the engine, oldest first."""
        return [each.rollout for each in self._samples.values()]

    @property
    def waiting(self) -> list[Rollout]:
        """Return no rollout: vLLM starts all."""
        return []

    def check(self, prompt: Prompt) -> None:
        """Check that a sample can be served. Raises ValueError if not."""
        size = self.target
        check_prompt(prompt, size.vocabulary, size.max_tokens, self.tokenizer is not None)
        check_supported(prompt)

    def add(self, prompt: Prompt) -> Rollout:
        """Queue a sample and return its rollout, which grows with the steps.

        Raises:
            ValueError: It cannot be served, or another sample here has its ids. Nothing has changed.
        """
        self.check(prompt)
        (prompt,) = self._keys.assign([prompt])
        rollout = prompt.to_rollout()
        name, sampling = prompt.name, prompt.sampling
        stops = None
        if sampling.stop_strings and self.tokenizer is not None:
            text = [*prompt.tokens, *rollout.tokens]
            stops = StopStrings(sampling.stop_strings, self.tokenizer, text)
        self._samples[name] = _RunningSample(rollout, stops)
        settings = sampling_settings(prompt, len(rollout.tokens))
        try:
            self._backend.add(name, [*prompt.tokens, *rollout.tokens], settings)
        except ValueError:
            self._forget(name)
            raise
        return rollout

    def remove(self, rollout: Rollout, *, kv: bool = False) -> Prompt:
        """Remove a sample and return a prompt with which another engine continues it.

        Raises:
            ValueError: The rollout is not in this engine.
        """
        name = rollout.prompt.name
        if name not in self._samples or self._samples[name].rollout is not rollout:
            raise ValueError(f"rollout {name} is not in this engine")
        self._backend.abort(name)
        self._forget(name)
        return rollout.to_prompt()

    def abort(self, rollout: Rollout) -> None:
        """End a sample now, with the tokens that it has and finish_reason "abort".

        Raises:
            ValueError: The rollout is not in this engine.
        """
        self.remove(rollout)
        rollout.finish_reason = "abort"

    def update_weights(
        self, weights: Mapping[str, Tensor] | None, version: int, *, in_steps: bool = False
    ) -> None:
        """Replace the policy's weights from the next step on; texts of running samples are computed again.

        Args:
            weights: Tensors by the names of `model.state_dict()`, tied ones once or under all names.
            version: Their version, above `version`.
            in_steps: Has no effect: vLLM computes texts again in its steps.

        Raises:
            ValueError: A tensor is missing, does not fit or is not finite, or the version is not above the
                engine's. Nothing has changed.
            RuntimeError: vLLM does not compute what a forward pass of `transformers` does with these weights.
                The engine must not be used.
        """
        if weights is None:
            raise ValueError("vLLM has weights of its own: pass the policy's state_dict")
        if version <= self.version:
            raise ValueError(f"version {version} is not above version {self.version}, which the engine has")
        own = {name: weights[name] for name in weights if name in self._reference.shapes}
        extra = sorted({*weights} - {*own} - self._reference.tied)
        if extra:
            raise ValueError(f"weights: {extra[0]} is no tensor of the model; {len(extra)} such tensors")
        self._append(self._backend.pause())
        try:
            self._backend.update(own, version)
            self.version = version
        finally:
            self._backend.resume()
        for each in self._samples.values():
            each.num_outputs = 0  # its text is computed again
        self._check_canary(own)

    def step(self) -> Step:
        """Run one step of vLLM, in which each running sample gets one token or more, or its text is computed.

        Tokens that came while a new version was checked are reported first. A server's step is a short wait.
        """
        began_s, began_cost_s = time.perf_counter(), self._cost_clock()
        view, before = self._view(), self._drafts
        names_before = {*self._samples}
        if self._chooser is not None and view is not None:
            self._drafts = self._chooser.choose(view)
        elif self._chooser is None and "layer" in self.drafters:
            self._drafts = self.arm if self.drafters["layer"].version >= 0 else OFF
        if self._chooser is not None or self.drafters:
            self._backend.draft(self._drafts.depth)
        choosing_s = self._cost_clock() - began_cost_s
        is_alive, has_run = False, not self._news
        if has_run and self._samples:
            outputs = self._backend.step()
            is_alive = bool(outputs)
            self._append(outputs)
        is_plain_step = view is not None and has_run and self._news.keys() == names_before
        names = list(self._news)
        samples = [self._samples[name] for name in names]
        counts, passes = zip(*self._news.values(), strict=True) if self._news else ((), ())
        self._news = {}
        rollouts = tuple(each.rollout for each in samples)
        finished = tuple(rollout for rollout in rollouts if rollout.finish_reason)
        for name, each in zip(names, samples, strict=True):
            if each.rollout.finish_reason:
                self._forget(name)
        step = Step(
            rollouts=rollouts,
            counts=counts,
            passes=passes,
            finished=finished,
            arm=before,
            nodes=before.depth if is_plain_step else 0,
            accepted=tuple(max(count - 1, 0) for count in counts) if is_plain_step else (),
            total_s=time.perf_counter() - began_s,
            cost_s=self._cost_clock() - began_cost_s,
            overhead_s=choosing_s + self._learning_s,
        )
        if view is not None and is_plain_step and self._drafts == before:
            self._learn(view, step, choosing_s)
        if rollouts or is_alive:
            self.meters.add(step)
        return step

    def status(self) -> dict[str, object]:
        """Return counts and the figures of `Meters.status`."""
        counts = {"running": len(self._samples), "waiting": 0, "version": self.version}
        return {**counts, "engine": "vllm", **self.meters.status()}

    def close(self) -> None:
        """Remove all samples."""
        for rollout in self.running:
            self.remove(rollout)

    def _cost_clock(self) -> float:
        """Return processor time on a CPU; else wall time, which has that of the device."""
        return time.process_time() if self.target.device.type == "cpu" else time.perf_counter()

    def _view(self) -> EngineView | None:
        """Return the state before a step in which vLLM computes no texts; None before another one."""
        samples = self._samples.values()
        if not samples or not all(each.num_outputs for each in samples):
            return None
        layer = self.drafters.get("layer")
        kinds: dict[str, int] = {} if self.arm.is_off else {self.arm.drafter: 0}
        if layer is not None:
            kinds = {"layer": layer.version} if layer.version >= 0 else {}
        context = sum(len(each.rollout.prompt.tokens) + len(each.rollout.tokens) for each in samples)
        return EngineView(len(samples), context, kinds)

    def _learn(self, view: EngineView, step: Step, choosing_s: float) -> None:
        """Let the chooser learn from a step whose drafts and those that it made are of one arm.

        vLLM drafts at the end of a step what the next one verifies: a step between two arms has the cost of
        neither.
        """
        if self._chooser is None:
            return
        began_s, arm = self._cost_clock(), step.arm
        draft = None
        if not arm.is_off:
            # vLLM does not show how likely its drafts are.
            shape = len(step.counts), arm.depth
            draft = Draft(torch.zeros(shape, dtype=torch.int64), None, None, torch.zeros(shape))
        self._chooser.learn(
            StepObservation(
                view=view,
                arm=arm,
                emitted=sum(step.counts),
                total_s=step.cost_s,
                nodes=step.nodes,
                draft=draft,
                accepted_B=step.accepted,
                learning_s=self._learning_s + choosing_s,
            )
        )
        self._learning_s = self._cost_clock() - began_s
        self.meters.choosing_s += self._learning_s + choosing_s

    def _append(self, outputs: Sequence[VllmOutput]) -> None:
        """Append what vLLM has drawn with the present version."""
        for output in outputs:
            sample = self._samples.get(output.name)
            if sample is None or sample.rollout.finish_reason:
                continue
            count, is_cut = sample.append(output, self.version)
            if is_cut:
                self._backend.abort(output.name)
            if count or sample.rollout.finish_reason:
                before = self._news.get(output.name, (0, 0))
                self._news[output.name] = before[0] + count, before[1] + output.passes

    def _forget(self, name: str) -> None:
        self._keys.release([self._samples.pop(name).rollout.prompt])
        self._news.pop(name, None)

    def _check_canary(self, weights: Mapping[str, Tensor]) -> None:
        """Compare log-probabilities of a text, and a token drawn after it, with those of `transformers`."""
        vocabulary, limit = self.target.vocabulary, CANARY_LIMITS[self.target.dtype]
        tokens = [(7 * place + self._num_canaries) % vocabulary for place in range(CANARY_TOKENS)]
        tokens = tokens[: self.target.max_tokens - 1]
        logp_TV = self._reference.logprobs(weights, tokens)
        self._num_canaries += 1
        sampling = Sampling(temperature=CANARY_TEMPERATURE, max_new_tokens=1)
        prompt = Prompt(tokens=tuple(tokens), rollout=self._num_canaries, sample=0, sampling=sampling)
        found = self._backend.probe(tokens, sampling_settings(prompt, 0) | {"prompt_logprobs": 0})
        scaled_V = (logp_TV[-1] / CANARY_TEMPERATURE).log_softmax(-1)
        position_11 = torch.tensor([[len(tokens)]])
        perturbed_V = scaled_V + gumbel(prompt.rollout, prompt.sample, position_11, vocabulary)[0, 0]
        gap = float(perturbed_V.max() - perturbed_V[found.token])
        if not max(gap, abs(float(scaled_V[found.token]) - found.logprob)) <= 2 * limit / CANARY_TEMPERATURE:
            raise RuntimeError(
                f"version {self.version}: vLLM has drawn token {found.token} with log-probability"
                f" {found.logprob:.3g}, expected {int(perturbed_V.argmax())} with"
                f" {float(scaled_V[found.token]):.3g}: it needs the plug-in aedit and raw_logprobs"
            )
        expected = logp_TV[range(len(tokens) - 1), tokens[1:]].tolist()
        worst = max(abs(a - b) for a, b in zip(expected, found.logprobs, strict=True))
        if not worst <= limit:
            raise RuntimeError(
                f"version {self.version}: log-probabilities of a text differ by {worst:.3g} between vLLM and"
                f" transformers, expected at most {limit:g}: vLLM has not loaded this model as it is"
            )


class SwappedLayer:
    """The EAGLE-3 drafter in vLLM, whose weights are replaced between two steps.

    Of a negative version it is untrained, and vLLM drafts nothing.
    """

    def __init__(self, llm: Any, shape: Eagle3Shape) -> None:
        self.shape, self.version = shape, -1
        self._llm = llm

    def replace(self, layer: Eagle3Layer, version: int) -> None:
        """Draft with another layer from the next step on, if its version is not negative, as if untrained.

        One whose values are not finite is refused with a line in the log, and the one before is used.
        """
        if version < 0:
            return
        self._llm.collective_rpc("start_draft_weight_update")
        try:
            self._llm.collective_rpc("update_weights", args=({"tensors": exported_tensors(layer)},))
        except ValueError as error:
            print(f"aedit: drafter {version} is refused: {error}", file=sys.stderr, flush=True)
            return
        self._llm.collective_rpc("finish_weight_update")
        self.version = version


class _RunningSample:
    """A rollout in vLLM, with the search for its stop strings."""

    def __init__(self, rollout: Rollout, stops: StopStrings | None) -> None:
        self.rollout, self._stops = rollout, stops
        self.num_outputs = 0
        """Steps that have drawn tokens since its text was computed."""

    def append(self, output: VllmOutput, version: int) -> tuple[int, bool]:
        """Append what vLLM has drawn, up to a stop string.

        Returns:
            The number of tokens, and whether the rollout has ended before vLLM's.
        """
        rollout, sampling = self.rollout, self.rollout.prompt.sampling
        rollout.passes += output.passes
        self.num_outputs += bool(output.tokens)
        for num, (token, logprobs) in enumerate(zip(output.tokens, output.logprobs, strict=True), start=1):
            rollout.tokens.append(token)
            rollout.logprobs.append(logprobs[token].logprob)
            rollout.versions.append(version)
            if sampling.top_logprobs:
                ranked = sorted((each.rank, other, each.logprob) for other, each in logprobs.items())
                top = ranked[: sampling.top_logprobs]
                rollout.top_logprobs.append(tuple((other, value) for _, other, value in top))
            is_stop = self._stops is not None and self._stops.completes(token)
            if is_stop and len(rollout.tokens) >= max(1, sampling.min_new_tokens):
                rollout.finish_reason = "stop"
                return num, not output.finish_reason
        if output.finish_reason:
            rollout.finish_reason = "stop" if output.finish_reason == "stop" else "length"
        return len(output.tokens), False


class ReferencePolicy:
    """The policy in `transformers`, which borrows weights for one forward pass."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Take over a model, whose weights are dropped."""
        self._model = model.to(dtype).eval().requires_grad_(False)
        first: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            first.setdefault(id(tensor), name)
        self.shapes = {name: tuple(model.state_dict()[name].shape) for name in first.values()}
        """Shape of each tensor of a version, tied ones once, under their first names."""
        self.tied = {*model.state_dict()} - {*self.shapes}
        """Other names of tied tensors."""
        self._drop()

    @torch.inference_mode()
    def logprobs(self, weights: Mapping[str, Tensor], tokens: list[int]) -> Tensor:
        """Return the log-probabilities of each next token, (T, V) float32, with these weights."""
        own = self._model.state_dict(keep_vars=True)
        try:
            for name, tensor in weights.items():
                own[name].data = tensor
            logits: Tensor = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
            return logits.float().log_softmax(-1)
        finally:
            self._drop()

    def _drop(self) -> None:
        own = self._model.state_dict(keep_vars=True)
        for name in self.shapes:
            own[name].data = torch.empty(0, dtype=own[name].dtype)


def sampling_settings(prompt: Prompt, num_given: int) -> dict[str, Any]:
    """Return fields of vLLM's `SamplingParams` of a sample, of whose answer `num_given` tokens are there."""
    sampling = prompt.sampling
    key = [prompt.rollout, prompt.sample, sampling.temperature]
    return {
        "temperature": 0.0,
        "max_tokens": sampling.max_new_tokens - num_given,
        "min_tokens": max(0, sampling.min_new_tokens - num_given),
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": True,
        "logprobs": sampling.top_logprobs,
        "detokenize": False,
        "extra_args": {"aedit": key} if sampling.temperature else None,
    }


def check_supported(prompt: Prompt) -> None:
    """Check that a sample asks for nothing that the plug-in does not compute as the own engine does.

    Raises:
        ValueError: It does.
    """
    sampling, plain = prompt.sampling, Sampling()
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    for name in ("top_k", "top_p", "min_p", *penalties, "logit_bias", "allowed", "constraint"):
        value = getattr(sampling, name)
        if isinstance(value, Tensor) or value != getattr(plain, name):
            shown = "tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"prompt {prompt.name}: {name} {shown} is not served by vLLM: leave it out, or use the engine"
                ' "aedit"'
            )


def make_vllm_engine(spec: "EngineSpec") -> VllmEngine:
    """Return an engine with random weights of the right shapes.

    `spec.options`: `eager` (bool; default: on a CPU, where compiling takes longer than it saves), `kv_bytes`
    (int, 0: what the rows need), and `speculative`, vLLM's `speculative_config`. With `spec.drafter`, of
    EAGLE-3's form, its method is `eagle3` and its model that drafter. With `choose` (bool, false) vLLM drafts
    only in steps in which that is measured to pay.

    Raises:
        ValueError: vLLM cannot run this model or dtype.
        RuntimeError: This version of vLLM is unknown to the plug-in.
    """
    # One thread steps vLLM and changes its weights; `Worker` has set the number of threads.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from aedit.spec_rollout.vllm import register

    register()
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    model, dtype = model_of(spec)
    config = model.config
    config.architectures = [type(model).__name__]
    # A sample names its stop tokens. vLLM would also mask the model's own before `min_new_tokens`.
    config.eos_token_id = config.get_text_config().eos_token_id = None
    options = dict(spec.options)
    speculative = dict(options.pop("speculative", {}) or {})
    chooses = bool(options.pop("choose", False))
    text = config.get_text_config()
    shape = shape_from(spec.drafter) if spec.drafter is not None else None
    if shape is not None and not isinstance(shape, Eagle3Shape):
        raise ValueError('vLLM drafts with layers of EAGLE-3\'s form: set drafter.form = "eagle3"')
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        if shape is not None:
            (drafter := Path(folder) / "drafter").mkdir()
            write_drafter(Eagle3Layer(shape), text, drafter, verifier=folder)
            speculative = {"num_speculative_tokens": LAYER_DEPTH, **speculative}
            speculative |= {"method": "eagle3", "model": str(drafter)}
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="aedit",
            dtype=spec.dtype,
            max_model_len=spec.max_tokens,
            max_num_seqs=spec.rows,
            enforce_eager=bool(options.pop("eager", spec.device == "cpu")),
            kv_cache_memory_bytes=int(options.pop("kv_bytes", 0)) or _kv_bytes(text, spec, dtype),
            logprobs_mode="raw_logprobs",
            max_logprobs=MAX_LOGPROBS,
            weight_transfer_config={"backend": "aedit"},
            async_scheduling=False,
            generation_config="vllm",
            disable_log_stats=True,
            speculative_config=speculative or None,
        )
        if options:
            raise ValueError(f"options: {', '.join(options)}: expected choose, eager, kv_bytes, speculative")
        llm = LLMEngine.from_engine_args(arguments)
    arm = arm_of(speculative, has_layer=shape is not None)
    arms = arms_of(speculative, has_layer=shape is not None)
    chooser = Goodput(arms) if chooses and arms else None
    return engine_over(LocalVllm(llm), spec, model, dtype, arm, shape, chooser)


def arms_of(speculative: Mapping[str, Any], *, has_layer: bool = False) -> tuple[Arm, ...]:
    """Return the arms between which an engine chooses besides off: vLLM's depth, and half of it."""
    whole = arm_of(speculative, has_layer=has_layer)
    if whole.is_off:
        return ()
    # vLLM's suffix proposer has one depth.
    depths = {whole.depth, max(1, whole.depth // 2) if whole.drafter != "suffix" else whole.depth}
    return tuple(Arm(whole.drafter, depth, 1, depth) for depth in sorted(depths))


def model_of(spec: "EngineSpec") -> tuple[Any, torch.dtype]:
    """Return the model in `transformers`, with random weights, and its dtype in vLLM.

    Raises:
        ValueError: vLLM does not compute in that.
    """
    dtype = getattr(torch, spec.dtype)
    if dtype not in CANARY_LIMITS:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in CANARY_LIMITS))
        raise ValueError(f"vLLM does not compute in {spec.dtype}: set rl.engine_dtype to one of {names}")
    configs, models, _ = _transformers
    sizes = dict(spec.model)
    config = configs.for_model(sizes.pop("model_type"), **sizes)
    return models.from_config(config, dtype=torch.float32), dtype


def engine_over(
    backend: VllmBackend,
    spec: "EngineSpec",
    model: Any,
    dtype: torch.dtype,
    arm: Arm = OFF,
    shape: Eagle3Shape | None = None,
    chooser: ArmChooser | None = None,
) -> VllmEngine:
    """Return the engine of a worker over vLLM with a model of `model_of`."""
    size = EngineSize(
        rows=spec.rows,
        max_tokens=spec.max_tokens,
        vocabulary=model.config.get_text_config().vocab_size,
        dtype=dtype,
        device=torch.device(spec.device),
    )
    read: Any = _transformers[2].from_pretrained
    tokenizer = read(spec.tokenizer, trust_remote_code=False) if spec.tokenizer else None
    return VllmEngine(backend, size, ReferencePolicy(model, dtype), tokenizer, arm, shape, chooser)


def arm_of(speculative: Mapping[str, Any], *, has_layer: bool = False) -> Arm:
    """Return what vLLM drafts. has_layer: with the run's own layer."""
    depth = int(speculative.get("num_speculative_tokens", LAYER_DEPTH if has_layer else 0))
    kinds: Mapping[Any, DrafterKind] = {"suffix": "suffix", "eagle3": "layer" if has_layer else "custom"}
    return Arm(kinds.get(speculative.get("method"), "custom"), depth, 1, depth) if depth else OFF


def _kv_bytes(text: Any, spec: "EngineSpec", dtype: torch.dtype) -> int:
    """Return twice the bytes of keys and values of all rows: the other half keeps prefixes."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tokens = (spec.rows + 1) * KV_BLOCK * (1 + -(-spec.max_tokens // KV_BLOCK))
    num_bytes: int = 4 * text.num_hidden_layers * heads * head_size * tokens * dtype.itemsize
    return max(MIN_KV_BYTES, num_bytes)
