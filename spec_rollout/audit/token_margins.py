"""Margins by which claimed tokens miss the tokens that coupled sampling draws.

The key of a sample fixes its noise, so that every place has one right token: argmax(z / T + G). A verifier
that computes the logits z itself gets the margin of the claimed token y,

    m = max_v(z_v / T + G_v) - (z_y / T + G_y),

which is 0 for the right token. Between machines z differs by rounding, so that now and then another token
wins by about that difference. A token that was not drawn from this policy with this noise has a margin of the
order of 1. Logits, noise and settings go through the functions of the engine, in its dtypes: on equal logits
the result is exactly what the engine draws.

With `recompute` a server computes the whole text again when it takes over new weights, so that each token is
drawn from its own version over the whole text before it: each version of a sample costs `PolicyVersions` one
forward pass.

Shapes: T claimed tokens, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from aedit.spec_rollout.sampling import (
    LARGE_VOCABULARY,
    Ints,
    NoiseKeys,
    RowSampling,
    Sampling,
    gumbel,
    logprobs,
    noisy_best_two,
    warp_logits,
)
from aedit.types import check

if TYPE_CHECKING:
    from aedit.spec_rollout.audit.calibration import OwnNoise

MOST_PARAMETERS = 1 << 30
"""Larger policies are not computed in a higher precision: the copy of the weights would not fit."""
NUMBERS_AT_ONCE = 1 << 22
"""Upper limit of logits of one call, in numbers, unless one place has more."""


@dataclass(frozen=True, slots=True, eq=False)
class ClaimedTokens:
    """Consecutive tokens of an answer."""

    key: tuple[int, int]
    """Rollout and sample: the key of the noise."""
    sampling: Sampling
    position: int
    """Absolute position of the first of these tokens: the number of tokens before it, prompt included."""
    number: int
    """Number of answer tokens before the first of these."""
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Margins:
    """Margins of T claimed tokens under the verifier's logits. float64 and int64, on the CPU."""

    margins_T: Tensor
    """At least 0; infinite for a token that these settings exclude, NaN where logits are not finite."""
    right_T: Tensor
    """Token that the verifier draws."""
    gaps_T: Tensor
    """Sum of logit and noise of `right_T`, minus the second largest sum: how near another token is."""
    logprobs_T: Tensor
    """Log-probability of the claimed token, as an engine reports it."""
    spread_T: Tensor
    """Variance of the error of `logprobs_T` if each logit has an independent error of variance 1 / T^2:
    1 - 2 p_y + sum p^2."""

    @staticmethod
    def empty() -> "Margins":
        """Return the margins of no tokens."""
        dtypes = (torch.float64, torch.int64, torch.float64, torch.float64, torch.float64)
        return Margins(*(torch.empty(0, dtype=dtype) for dtype in dtypes))

    @staticmethod
    def joined(parts: Sequence["Margins"]) -> "Margins":
        """Return the margins of consecutive parts."""
        columns = zip(
            *((x.margins_T, x.right_T, x.gaps_T, x.logprobs_T, x.spread_T) for x in parts), strict=True
        )
        return Margins(*(torch.cat(column) for column in columns))


def not_auditable(sampling: Sampling) -> str:
    """Return why rollouts with these settings cannot be audited; empty if they can.

    top-k, top-p and min-p cut the distribution at a boundary, where a rounding difference excludes a token or
    not: a margin would be infinite without a fault. Bias, penalties and constraints depend on the text so
    far; training does not use them.
    """
    reasons = {
        "top_k": sampling.top_k > 0,
        "top_p": sampling.top_p < 1,
        "min_p": sampling.min_p > 0,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "presence_penalty": sampling.presence_penalty != 0,
        "logit_bias": bool(sampling.logit_bias),
        "constraint": sampling.constraint is not None,
    }
    found = [name for name, is_set in reasons.items() if is_set]
    return f"{', '.join(found)} cannot be audited" if found else ""


@torch.no_grad()
def margins(logits_TV: Tensor, claimed: ClaimedTokens) -> Margins:
    """Return the margins of claimed tokens.

    Args:
        logits_TV: The verifier's logits at the place before each claimed token, in the dtype of its engine.
        claimed: The tokens, inside the vocabulary.

    Raises:
        ValueError: The settings cannot be audited.
    """
    reason = not_auditable(claimed.sampling)
    if reason:
        raise ValueError(reason)
    num_tokens, vocabulary = logits_TV.shape
    count = max(1, NUMBERS_AT_ONCE // vocabulary)
    ends = [*range(0, num_tokens, count), num_tokens]
    rows = RowSampling.of([claimed.sampling], vocabulary, logits_TV.device)
    parts = [_part(logits_TV[a:b], claimed, a, rows) for a, b in pairwise(ends)]
    return Margins.joined(parts) if parts else Margins.empty()


def _part(logits_TV: Tensor, claimed: ClaimedTokens, first: int, rows: RowSampling) -> Margins:
    """Return the margins of the tokens from `first` on, of which `logits_TV` are the logits."""
    places_T = torch.arange(first, first + len(logits_TV), device=logits_TV.device)
    tokens_T = torch.tensor(claimed.tokens[first : first + len(logits_TV)], device=logits_TV.device)
    warped_TV = warp_logits(logits_TV[None], rows, (claimed.number + places_T)[None])[0]
    right_T, best_T, second_T, mine_T = _draw(warped_TV, claimed, claimed.position + places_T, tokens_T)
    logp_T = logprobs(logits_TV[None], tokens_T[None], rows)[0]
    p_TV = (warped_TV if not rows.has_masks else _unmasked(logits_TV, rows)).double().softmax(-1)
    p_y_T = p_TV.gather(1, tokens_T[:, None])[:, 0]
    spread_T = 1 - 2 * p_y_T + p_TV.square().sum(-1)
    margins_T = (best_T - mine_T).double().clamp(min=0)
    is_wrong_T = (logits_TV.isnan() | logits_TV.isposinf()).any(-1)
    margins_T, gaps_T = (
        x.masked_fill(is_wrong_T, torch.nan) for x in (margins_T, (best_T - second_T).double())
    )
    return Margins(margins_T.cpu(), right_T.cpu(), gaps_T.cpu(), logp_T.double().cpu(), spread_T.cpu())


def _unmasked(logits_TV: Tensor, rows: RowSampling) -> Tensor:
    """Return logits over temperature, without masks."""
    return logits_TV.double() / (1.0 if rows.divisor_B11 is None else rows.divisor_B11[0].double())


def _draw(
    warped_TV: Tensor, claimed: ClaimedTokens, positions_T: Tensor, tokens_T: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the drawn token of each place, and sums of logit and noise: its own, the next, the claimed."""
    places_T = torch.arange(len(warped_TV), device=warped_TV.device)
    if claimed.sampling.temperature == 0:
        sums_TV = warped_TV
    elif warped_TV.shape[1] < LARGE_VOCABULARY or warped_TV.device.type != "cpu":
        noise_TV = gumbel(*claimed.key, positions_T[None], warped_TV.shape[1], warped_TV.dtype)[0]
        sums_TV = warped_TV + noise_TV
    else:
        keys = _keys(claimed.key, positions_T)
        right_T, best_T, second_T = noisy_best_two(warped_TV, keys)
        noise_T = keys.gumbel_of(tokens_T.numpy(), warped_TV.shape[1], warped_TV.dtype)
        mine_T = warped_TV[places_T, tokens_T] + noise_T
        return right_T, best_T, second_T, mine_T
    right_T = sums_TV.argmax(-1)
    best_T = sums_TV[places_T, right_T]
    second_T = sums_TV.topk(2).values[:, 1]
    return right_T, best_T, second_T, sums_TV[places_T, tokens_T]


def _keys(key: tuple[int, int], positions_T: Tensor) -> NoiseKeys:
    rollouts, samples = (np.full(len(positions_T), number, dtype=np.int64) for number in key)
    positions: Ints = positions_T.numpy()
    return NoiseKeys(rollouts, samples, positions)


class PolicyVersions:
    """Weights of up to `kept` policy versions for a `transformers` model, whose own weights are released.

    Used by one thread.
    """

    def __init__(self, model: nn.Module, *, kept: int) -> None:
        """Use `model` for its forward pass only; its parameters are empty afterwards."""
        check(kept >= 1, "kept", "must be at least 1", kept)
        self._model = model.eval().requires_grad_(False)
        self._names = {name for name, _ in model.named_parameters()}
        self._buffers = {*model.state_dict()} & {name for name, _ in model.named_buffers()}
        self._names |= self._buffers
        self._shapes = {name: tuple(model.state_dict()[name].shape) for name in self._names}
        parameter = next(model.parameters())
        untyped: Any = model
        self.dtype, self.device = parameter.dtype, parameter.device
        self.vocabulary = int(untyped.config.get_text_config().vocab_size)
        self._kept = kept
        self._weights: dict[int, dict[str, Tensor]] = {}
        for each in model.parameters():
            each.data = each.data.new_empty(0)

    @property
    def num_parameters(self) -> int:
        """Return the number of numbers of one version."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    @property
    def versions(self) -> tuple[int, ...]:
        """Return the versions that are here, oldest first."""
        return tuple(self._weights)

    def add(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Keep a version, and drop the oldest one if there are too many.

        Args:
            version: Above all others.
            weights: Tensors by the names of `model.state_dict()`, tied ones once; buffers that are missing
                are those of the model. They are not copied if they
                have the verifier's dtype and device, and must not change afterwards.

        Raises:
            ValueError: The version is not above the others, or a tensor is missing or has another shape.
        """
        newest = max(self._weights, default=-1)
        check(version > newest, "version", f"must be above {newest}", version)
        found = {name: weights[name] for name in self._names if name in weights}
        for name, shape in self._shapes.items():
            if name not in found and name in self._buffers:
                continue
            if name not in found or tuple(found[name].shape) != shape:
                other = tuple(found[name].shape) if name in found else "missing"
                raise ValueError(f"weights of version {version}: {name} is {other}, expected {shape}")
        while len(self._weights) >= self._kept:
            del self._weights[min(self._weights)]
        self._weights[version] = {name: self._cast(value) for name, value in found.items()}

    @torch.no_grad()
    def logits(self, version: int, tokens: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return the logits after each token of a text under a version that is here, (T, V).

        Args:
            version: Version of the weights.
            tokens: The text.
            dtype: Dtype to compute in; None: that of the weights. Another one needs a copy of the weights.
        """
        tokens_1T = torch.tensor([tokens], device=self.device)
        inputs = {"input_ids": tokens_1T, "use_cache": False}
        weights = self._weights[version]
        if dtype is not None:
            weights = {name: x.to(dtype) if x.is_floating_point() else x for name, x in weights.items()}
        output: Any = functional_call(self._model, weights, (), inputs)
        logits_TV: Tensor = output.logits[0]
        return logits_TV

    def _cast(self, value: Tensor) -> Tensor:
        dtype = self.dtype if value.is_floating_point() else value.dtype
        return value.detach().to(self.device, dtype)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of an answer, all of one version."""

    version: int
    text: Sequence[int]
    """Prompt and answer."""
    sampling: Sampling
    key: tuple[int, int]
    num_prompt: int
    places: range
    """Of the tokens in the answer."""

    def claimed(self, tokens: Sequence[int] | None = None) -> ClaimedTokens:
        """Return these tokens, or others at their places."""
        first, last = self.num_prompt + self.places.start, self.num_prompt + self.places.stop
        return ClaimedTokens(
            self.key, self.sampling, first, self.places.start, tokens or self.text[first:last]
        )


def margins_of(policy: PolicyVersions, part: Part, noise: "OwnNoise | None" = None) -> Margins:
    """Return the margins of answer tokens under their version; measure `noise` on them."""
    claimed = part.claimed()
    first, text = claimed.position - 1, part.text[: part.num_prompt + part.places.stop - 1]
    logits_TV = policy.logits(part.version, text)[first:]
    found = margins(logits_TV, claimed)
    if noise is not None and policy.num_parameters <= MOST_PARAMETERS and noise.wants():
        own = part.claimed(found.right_T.tolist())
        exact_TV = policy.logits(part.version, text, torch.float32)[first:]
        noise.add(margins(exact_TV, own), margins(logits_TV, own).logprobs_T)
    return found
