"""Coupled sampling in vLLM's V1 runner: the next token is argmax(logits / T + Gumbel noise of its position).

A request carries SamplingParams(temperature=0, extra_args={"aedit": [rollout, sample, T]}); vLLM decodes it
greedily, from logits whose drawn token is set to infinity. Log-probabilities (`--logprobs-mode raw_logprobs`)
are those of log softmax(logits / T), as the division comes before the sampler.

The processor derives from `MinTokensLogitsProcessor`: the rejection sampler applies only that class, and
classes derived from it, to drafted positions.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor, process_dict_updates
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer
from vllm.v1.worker import gpu_model_runner

from .noise import NoiseKey, keyed_draw

COLD = 1e-2
"""Temperature below which the largest logit is subtracted before the division, as in the own engine: float32
would not resolve the noise beside the quotients."""


class KeyedRequest(NamedTuple):
    """Key, temperature and text of a request."""

    rollout: int
    sample: int
    temperature: float
    num_prompt: int
    output: list[int]
    """The emitted tokens, which grow."""

    def key_after(self, num_more: int) -> NoiseKey:
        """Return the key of the noise of the token that follows `num_more` drafted ones."""
        return self.rollout, self.sample, self.num_prompt + len(self.output) + num_more


def _request_of(params: Any, prompt: list[int] | None, output: list[int]) -> KeyedRequest | None:
    key = (params.extra_args or {}).get("aedit")
    if not key:
        return None
    rollout, sample, temperature = key
    return KeyedRequest(rollout, sample, temperature, len(prompt or ()), output)


class CoupledSampling(MinTokensLogitsProcessor):
    """Draws the tokens of keyed requests of the batch; other requests pass unchanged."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.requests: dict[int, KeyedRequest] = {}
        """By row of the batch."""
        self.num_drafted: Sequence[int] = ()
        """Drafted tokens of each row, while the rejection sampler runs."""

    def update_state(self, batch_update: Any) -> None:
        """Follow the batch: requests that were added, moved or removed."""
        process_dict_updates(self.requests, batch_update, _request_of)

    def apply(self, logits: Tensor) -> Tensor:
        """Draw the next token of each row; under speculation the one behind all drafted tokens."""
        drafted = self.num_drafted or [0] * logits.shape[0]
        return self._draw(logits, ((row, row, drafted[row]) for row in range(logits.shape[0])))

    def apply_with_spec_decode(self, logits: Tensor, num_draft_tokens: list[int]) -> Tensor:
        """Draw the token at each drafted position. The rows of `logits` are those positions."""
        places = [(row, i) for row, count in enumerate(num_draft_tokens) for i in range(count)]
        return self._draw(logits, ((n, row, i) for n, (row, i) in enumerate(places)))

    def scale(self, logits: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the logits divided by the temperatures. counts: rows of logits of each request."""
        temperatures = [
            self.requests[row].temperature if row in self.requests else 1.0
            for row, count in enumerate(counts)
            for _ in range(count)
        ]
        if all(each == 1.0 for each in temperatures):
            return logits
        divisor = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
        return divide(logits.to(torch.float32), divisor)

    def _draw(self, logits: Tensor, places: Iterator[tuple[int, int, int]]) -> Tensor:
        """Set the drawn tokens to infinity. places: (row of the logits, row of the batch, drafted before)."""
        keyed = [(n, self.requests[row].key_after(i)) for n, row, i in places if row in self.requests]
        if keyed:
            rows = torch.tensor([n for n, _ in keyed], device=logits.device)
            x = logits if len(keyed) == logits.shape[0] else logits[rows]
            logits[rows, keyed_draw(x, [key for _, key in keyed])] = torch.inf
        return logits


def divide(logits: Tensor, divisor: Tensor) -> Tensor:
    """Return logits / divisor, (N, V) by (N, 1), shifted where the divisor is below `COLD`."""
    if bool((divisor < COLD).any()):
        logits = logits - logits.amax(-1, keepdim=True) * (divisor < COLD)
    return logits / divisor


def _coupled(metadata: Any) -> CoupledSampling | None:
    """Return the processor of a batch that has keyed requests."""
    for each in metadata.logitsprocs.non_argmax_invariant:
        if isinstance(each, CoupledSampling) and each.requests:
            return each
    return None


def install() -> None:
    """Install the hooks in vLLM's classes, once per process."""
    if getattr(gpu_model_runner, "_aedit_installed", False):
        return
    gpu_model_runner._aedit_installed = True
    gpu_model_runner.build_logitsprocs = _with_coupled(gpu_model_runner.build_logitsprocs)
    MinTokensLogitsProcessor.apply = _counting_drafts(MinTokensLogitsProcessor.apply)
    RejectionSampler.forward = _scaled_rejection(RejectionSampler.forward)
    Sampler.forward = _scaled_sampling(Sampler.forward)
    # Drafters draw with the noise of the positions that they draft. Else they propose their likeliest tokens,
    # of which few are drawn.
    SpecDecodeBaseProposer._sample_draft_tokens = _coupled_drafts(SpecDecodeBaseProposer._sample_draft_tokens)
    SuffixDecodingProposer.propose = _optional(SuffixDecodingProposer.propose)
    for proposer in (SpecDecodeBaseProposer, DraftModelProposer):
        if "set_inputs_first_pass" in proposer.__dict__:
            proposer.set_inputs_first_pass = _noting_positions(proposer.set_inputs_first_pass)


def _counting_drafts(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return the mask of stop tokens with accepted drafts counted.

    The token behind all drafted ones is used if all are accepted; vLLM counts those before them only, and
    forbids stop tokens there for some tokens too long.
    """

    def counting(self: Any, logits: Tensor) -> Any:
        drafted = getattr(self, "_aedit_drafted", ())
        if not drafted or any(structured for *_, structured in self.min_toks.values()):
            return apply(self, logits)
        for row, (least, output, stops, _) in self.min_toks.items():
            if len(output) + drafted[row] < least:
                logits[row, list(stops)] = -torch.inf
        return logits

    return counting


def _optional(propose: Callable[..., Any]) -> Callable[..., Any]:
    """Return the suffix proposer for steps of depth 0 too: it follows the texts and drafts nothing."""

    def optional(self: Any, depth: int, *inputs: Any, **options: Any) -> Any:
        drafts = propose(self, self.num_speculative_tokens, *inputs, **options)
        return drafts if depth else [[] for _ in drafts]

    return optional


def _with_coupled(build: Callable[..., Any]) -> Callable[..., Any]:
    def build_logitsprocs(
        vllm_config: Any, device: torch.device, is_pin_memory: bool, is_pooling: bool, custom: Any = ()
    ) -> Any:
        made = build(vllm_config, device, is_pin_memory, is_pooling, custom)
        if not is_pooling:
            made.non_argmax_invariant.append(CoupledSampling(vllm_config, device, is_pin_memory))
        return made

    return build_logitsprocs


def _scaled_rejection(forward: Callable[..., Any]) -> Callable[..., Any]:
    def scaled(self: Any, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        coupled, counts = _coupled(sampling_metadata), metadata.num_draft_tokens
        processors = sampling_metadata.logitsprocs.non_argmax_invariant
        least = [each for each in processors if type(each) is MinTokensLogitsProcessor]
        try:
            for each in least:
                each._aedit_drafted = counts
            if coupled is not None:
                coupled.num_drafted = counts
                logits = coupled.scale(logits, [count + 1 for count in counts])
            return forward(self, metadata, draft_probs, logits, sampling_metadata)
        finally:
            for each in least:
                each._aedit_drafted = ()
            if coupled is not None:
                coupled.num_drafted = ()

    return scaled


def _scaled_sampling(forward: Callable[..., Any]) -> Callable[..., Any]:
    def scaled(self: Any, logits: Tensor, sampling_metadata: Any, *more: Any, **options: Any) -> Any:
        coupled = _coupled(sampling_metadata)
        if coupled is not None and not coupled.num_drafted:  # the rejection sampler has divided already
            logits = coupled.scale(logits, [1] * logits.shape[0])
        return forward(self, logits, sampling_metadata, *more, **options)

    return scaled


def _noting_positions(set_inputs: Callable[..., Any]) -> Callable[..., Any]:
    def noting(self: Any, *inputs: Any, **options: Any) -> Any:
        made = set_inputs(self, *inputs, **options)
        # A draft model reads the emitted token itself; the positions of EAGLE's inputs are shifted by one.
        shift = 1 if isinstance(self, DraftModelProposer) else 2
        self._aedit_positions = (self.positions[made[1]] + shift).tolist()
        return made

    return noting


def _coupled_drafts(sample: Callable[..., Any]) -> Callable[..., Any]:
    def drafts(self: Any, hidden_states: Tensor, sampling_metadata: Any) -> Any:
        coupled, positions = _coupled(sampling_metadata), getattr(self, "_aedit_positions", ())
        num = hidden_states.shape[0]
        if coupled is None or self.use_heterogeneous_vocab or num != len(positions):
            return sample(self, hidden_states, sampling_metadata)
        logits = self.model.compute_logits(hidden_states).float()
        rows = [row for row in range(num) if row in coupled.requests]
        requests = [coupled.requests[row] for row in rows]
        tokens = logits.argmax(-1)
        if rows:
            at = torch.tensor(rows, device=logits.device)
            temperatures = [each.temperature for each in requests]
            divisor = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
            pairs = zip(rows, requests, strict=True)
            keys = [(each.rollout, each.sample, positions[row]) for row, each in pairs]
            tokens[at] = keyed_draw(divide(logits[at], divisor), keys).to(tokens)
        self._aedit_positions = [position + 1 for position in positions]
        return tokens, None

    return drafts
