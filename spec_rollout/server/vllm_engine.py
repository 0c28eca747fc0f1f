"""vLLM as the engine of a rollout worker whose interpreter has it (`WorkerConfig.python`).

`make_vllm_engine` is the worker's `make`. vLLM runs in this process and thread, so that weights change
between two steps. The plug-in `aedit.spec_rollout.vllm` draws tokens with the noise of each sample's key: in
float32 they are those of the own engine, with any drafter of vLLM.
"""

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from aedit.spec_rollout.drafters import (
    OFF,
    Arm,
    DrafterKind,
    Eagle3Layer,
    Eagle3Shape,
    exported_tensors,
    shape_from,
    write_drafter,
)
from aedit.spec_rollout.engine import Meters, SampleKeys, Step, check_prompt
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling, StopStrings, TokenDecoder

if TYPE_CHECKING:
    from aedit.spec_rollout.server.worker_engine import EngineSpec

CANARY_TOKENS = 16
CANARY_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.25}
"""Largest difference of a log-probability of the canary that rounding explains, by dtype."""
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


class VllmEngine:
    """vLLM with the methods of `Engine` that a host calls. Used by one thread at a time."""

    def __init__(
        self,
        llm: Any,
        size: EngineSize,
        reference: "ReferencePolicy",
        tokenizer: TokenDecoder | None,
        arm: Arm,
        drafter: Eagle3Shape | None = None,
    ) -> None:
        """Make the engine.

        Args:
            llm: `vllm.v1.engine.llm_engine.LLMEngine` in this process, with the plug-in registered.
            size: Its limits.
            reference: Computes what vLLM must compute with each version.
            tokenizer: Needed for stop strings.
            arm: What vLLM drafts.
            drafter: Shape of the drafter whose weights come; None: none come.
        """
        self.target, self.tokenizer, self.arm = size, tokenizer, arm
        self.version = 0
        self.meters = Meters()
        self.drafters: Mapping[str, SwappedLayer] = {}
        self._llm, self._reference = llm, reference
        self._keys = SampleKeys()
        self._samples: dict[str, _RunningSample] = {}
        self._counts: dict[str, int] = {}
        """Tokens by sample that `step` has not reported."""
        self._num_canaries = 0
        shapes = reference.shapes.items()
        like = {name: torch.empty(shape, dtype=size.dtype, device="meta") for name, shape in shapes}
        wanted = {"tensors": like}
        if drafter is not None:
            self.drafters = {"layer": SwappedLayer(llm, drafter, size.rows)}
            wanted["draft_tensors"] = exported_tensors(Eagle3Layer(drafter))
        self._call("init_weight_transfer_engine", wanted)

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
        tokens = {"prompt_token_ids": [*prompt.tokens, *rollout.tokens]}
        try:
            self._llm.add_request(name, tokens, sampling_params(prompt, len(rollout.tokens)))
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
        self._llm.abort_request([name])
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
        self._call("start_weight_update")
        self._call("update_weights", {"tensors": own})
        self._call("finish_weight_update")
        # Keys and values of other weights; running samples are computed again.
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM has not reset its prefix cache: texts of two versions would be mixed")
        self.version = version
        self._check_canary(own)

    def step(self) -> Step:
        """Run one step of vLLM, in which each running sample gets one token or more, or its text is computed.

        Tokens that came while a new version was checked are reported first.
        """
        began_s, began_cost_s = time.perf_counter(), time.process_time()
        if not self._counts and self._samples:
            self._advance()
        names = list(self._counts)
        samples = [self._samples[name] for name in names]
        counts, self._counts = tuple(self._counts.values()), {}
        rollouts = tuple(each.rollout for each in samples)
        finished = tuple(rollout for rollout in rollouts if rollout.finish_reason)
        for name, each in zip(names, samples, strict=True):
            if each.rollout.finish_reason:
                self._forget(name)
        step = Step(
            rollouts=rollouts,
            counts=counts,
            finished=finished,
            arm=self.arm,
            total_s=time.perf_counter() - began_s,
            cost_s=time.process_time() - began_cost_s,
        )
        if rollouts:
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

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of vLLM's worker, which is in this process."""
        self._llm.collective_rpc(method, args=arguments)

    def _advance(self) -> list[Any]:
        """Run one step of vLLM and append what it has drawn; return its outputs of other requests."""
        others = []
        for output in self._llm.step():
            sample = self._samples.get(output.request_id)
            if sample is None:
                others.append(output)
                continue
            count, is_cut = sample.append(output.outputs[0], self.version)
            if is_cut:
                self._llm.abort_request([output.request_id])
            self._counts[output.request_id] = self._counts.get(output.request_id, 0) + count
        return others

    def _forget(self, name: str) -> None:
        self._keys.release([self._samples.pop(name).rollout.prompt])
        self._counts.pop(name, None)

    def _check_canary(self, weights: Mapping[str, Tensor]) -> None:
        """Compare log-probabilities of a fixed text with those of a forward pass of `transformers`."""
        vocabulary, limit = self.target.vocabulary, CANARY_LIMITS[self.target.dtype]
        tokens = [(7 * place + self._num_canaries) % vocabulary for place in range(CANARY_TOKENS)]
        tokens = tokens[: self.target.max_tokens - 1]
        expected = self._reference.logprobs(weights, tokens)
        self._num_canaries += 1
        name = f"canary {self._num_canaries}"
        self._llm.add_request(name, {"prompt_token_ids": tokens}, canary_params())
        outputs: list[Any] = []
        while not outputs:
            outputs = [each for each in self._advance() if each.request_id == name]
        found = [
            logprobs[token].logprob
            for token, logprobs in zip(tokens[1:], outputs[0].prompt_logprobs[1:], strict=True)
        ]
        worst = max(abs(a - b) for a, b in zip(expected, found, strict=True))
        if not worst <= limit:
            raise RuntimeError(
                f"version {self.version}: log-probabilities of a text differ by {worst:.3g} between vLLM and"
                f" transformers, expected at most {limit:g}: vLLM has not loaded this model as it is"
            )


class SwappedLayer:
    """The EAGLE-3 drafter in vLLM, whose weights are replaced between two steps."""

    def __init__(self, llm: Any, shape: Eagle3Shape, rows: int) -> None:
        self.shape, self.version = shape, -1
        self._llm = llm
        # Until a trained one comes, vLLM drafts nothing: its scheduler looks up a depth by running samples.
        self._scheduler = llm.engine_core.engine_core.scheduler
        self._depths, self._scheduler.dynamic_sd_lookup = self._scheduler.dynamic_sd_lookup, [0] * (rows + 1)

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
        self._scheduler.dynamic_sd_lookup, self.version = self._depths, version


class _RunningSample:
    """A rollout in vLLM, with the search for its stop strings."""

    def __init__(self, rollout: Rollout, stops: StopStrings | None) -> None:
        self.rollout, self._stops = rollout, stops

    def append(self, output: Any, version: int) -> tuple[int, bool]:
        """Append what vLLM has drawn, up to a stop string.

        Returns:
            The number of tokens, and whether the rollout has ended before vLLM's.
        """
        rollout, sampling = self.rollout, self.rollout.prompt.sampling
        rollout.passes += 1
        for num, (token, logprobs) in enumerate(zip(output.token_ids, output.logprobs, strict=True), start=1):
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
        return len(output.token_ids), False


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
    def logprobs(self, weights: Mapping[str, Tensor], tokens: list[int]) -> list[float]:
        """Return the log-probabilities of all tokens but the first, with these weights."""
        own = self._model.state_dict(keep_vars=True)
        try:
            for name, tensor in weights.items():
                own[name].data = tensor
            logits = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
            found: list[float] = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].tolist()
        finally:
            self._drop()
        return found

    def _drop(self) -> None:
        own = self._model.state_dict(keep_vars=True)
        for name in self.shapes:
            own[name].data = torch.empty(0, dtype=own[name].dtype)


def sampling_params(prompt: Prompt, num_given: int) -> Any:
    """Return vLLM's settings of a sample, of whose answer `num_given` tokens are there."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = prompt.sampling
    key = [prompt.rollout, prompt.sample, sampling.temperature]
    return SamplingParams(
        temperature=0.0,
        max_tokens=sampling.max_new_tokens - num_given,
        min_tokens=max(0, sampling.min_new_tokens - num_given),
        stop_token_ids=list(sampling.stop_tokens),
        ignore_eos=True,
        logprobs=sampling.top_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"aedit": key} if sampling.temperature else None,
    )


def canary_params() -> Any:
    """Return vLLM's settings of a text whose log-probabilities are wanted."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY
    settings: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
    return SamplingParams(temperature=0.0, output_kind=kind, **settings)


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
    EAGLE-3's form, its method is `eagle3` and its model that drafter.

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

    configs, models, tokenizers = _transformers
    dtype = getattr(torch, spec.dtype)
    if dtype not in CANARY_LIMITS:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in CANARY_LIMITS))
        raise ValueError(f"vLLM does not compute in {spec.dtype}: set rl.engine_dtype to one of {names}")
    sizes = dict(spec.model)
    config = configs.for_model(sizes.pop("model_type"), **sizes)
    model = models.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    # A sample names its stop tokens. vLLM would also mask the model's own before `min_new_tokens`.
    config.eos_token_id = config.get_text_config().eos_token_id = None
    options = dict(spec.options)
    speculative = dict(options.pop("speculative", {}) or {})
    text = config.get_text_config()
    shape = shape_from(spec.drafter) if spec.drafter is not None else None
    if shape is not None and not isinstance(shape, Eagle3Shape):
        raise ValueError('vLLM drafts with layers of EAGLE-3\'s form: set drafter.form = "eagle3"')
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        if shape is not None:
            (drafter := Path(folder) / "drafter").mkdir()
            write_drafter(Eagle3Layer(shape), text, drafter, verifier=folder)
            speculative = {"num_speculative_tokens": 4, **speculative}
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
            raise ValueError(f"options: {', '.join(options)}: expected eager, kv_bytes, speculative")
        llm = LLMEngine.from_engine_args(arguments)
    size = EngineSize(
        rows=spec.rows,
        max_tokens=spec.max_tokens,
        vocabulary=text.vocab_size,
        dtype=dtype,
        device=torch.device(spec.device),
    )
    tokenizer = (
        tokenizers.from_pretrained(spec.tokenizer, trust_remote_code=False) if spec.tokenizer else None
    )
    arm = arm_of(speculative, has_layer=shape is not None)
    return VllmEngine(llm, size, ReferencePolicy(model, dtype), tokenizer, arm, shape)


def arm_of(speculative: Mapping[str, Any], *, has_layer: bool = False) -> Arm:
    """Return what vLLM drafts. has_layer: with the run's own layer."""
    depth = int(speculative.get("num_speculative_tokens", 0))
    kinds: Mapping[Any, DrafterKind] = {"suffix": "suffix", "eagle3": "layer" if has_layer else "custom"}
    return Arm(kinds.get(speculative.get("method"), "custom"), depth, 1, depth) if depth else OFF


def _kv_bytes(text: Any, spec: "EngineSpec", dtype: torch.dtype) -> int:
    """Return twice the bytes of keys and values of all rows: the other half keeps prefixes."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tokens = (spec.rows + 1) * KV_BLOCK * (1 + -(-spec.max_tokens // KV_BLOCK))
    num_bytes: int = 4 * text.num_hidden_layers * heads * head_size * tokens * dtype.itemsize
    return max(MIN_KV_BYTES, num_bytes)
