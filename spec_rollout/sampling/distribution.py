"""Distribution of the next token: mask, temperature, top-k, top-p and min-p in this order.

Plain and speculative decoding both start from `warp_logits`, so drafts are verified against exactly the
distribution that plain decoding draws from. The values of a row depend on the row alone, not on other rows
and not on how many tokens are verified with it.

Shapes: B running rows, q verified tokens per row, V vocabulary; 1 where a value is the same for all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.spec_rollout.model import to_device
from aedit.spec_rollout.sampling.samples import Sampling

COLD = 1e-2
"""Temperature below which logits are shifted before they are divided."""
CACHED_NUMBERS = 1 << 18
"""Logits whose log-probabilities are computed at once on a CPU: larger temporaries leave the cache of a core,
and the system gives their pages anew in each step."""
ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class RowSampling:
    """`Sampling` of the running rows as tensors; None where no row needs them.

    Build it when the rows change, not in every step.
    """

    temperature_B: Tensor
    """float32; 0 is greedy."""
    all_greedy: bool
    """True if no row needs noise."""
    divisor_B11: Tensor | None
    """float32: the temperature, or 1 where the temperature is 0."""
    is_cold_B11: Tensor | None
    """Bool: rows whose logits must be shifted before they are divided; see `_divide`."""
    forbidden_B1V: Tensor | None
    top_k_B11: Tensor | None
    """int64; V where all tokens may be drawn."""
    max_top_k: int
    """Largest top_k of the rows that set one."""
    top_p_B11: Tensor | None
    """float32; 2 where all tokens may be drawn, as sums that should be 1 can be slightly larger."""
    log_min_p_B11: Tensor | None
    """float32: logarithm of min_p; -inf where all tokens may be drawn."""
    max_top_logprobs: int
    """Largest number of top log-probabilities that a row asks for."""
    stops_B1V: Tensor | None
    """Stop tokens of the rows with min_new_tokens."""
    min_new_B1: Tensor | None

    @property
    def has_masks(self) -> bool:
        """Return true if a row excludes tokens by their ids."""
        return self.forbidden_B1V is not None or self.stops_B1V is not None

    @classmethod
    def of(
        cls, rows: Sequence[Sampling], vocabulary: int, device: torch.device | str = "cpu"
    ) -> "RowSampling":
        """Return the tensors for rows 0 .. B - 1.

        Args:
            rows: Settings of each row. Stop tokens and masks must fit the vocabulary and leave a token to be
                drawn.
            vocabulary: V.
            device: Device of the tensors.
        """
        where = torch.device(device)

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return to_device(values, where, dtype)[:, None, None]

        top_k = [min(s.top_k or vocabulary, vocabulary) for s in rows]
        top_p = [s.top_p if s.top_p < 1 else 2.0 for s in rows]
        divisors = [s.temperature or 1.0 for s in rows]
        min_new = [s.min_new_tokens for s in rows]
        log_min_p = [math.log(s.min_p) if s.min_p else -math.inf for s in rows]
        is_cold = [0 < s.temperature < COLD for s in rows]
        return cls(
            temperature_B=to_device([s.temperature for s in rows], where, torch.float32),
            all_greedy=all(s.temperature == 0 for s in rows),
            divisor_B11=None if set(divisors) == {1.0} else column(divisors, torch.float32),
            is_cold_B11=column(is_cold, torch.bool) if any(is_cold) else None,
            forbidden_B1V=_forbidden(rows, vocabulary, device),
            top_k_B11=None if min(top_k) == vocabulary else column(top_k, torch.int64),
            max_top_k=max((k for k in top_k if k < vocabulary), default=0),
            top_p_B11=None if min(top_p) > 1 else column(top_p, torch.float32),
            log_min_p_B11=column(log_min_p, torch.float32) if any(s.min_p for s in rows) else None,
            max_top_logprobs=min(max(s.top_logprobs for s in rows), vocabulary),
            stops_B1V=_early_stops(rows, vocabulary, device) if any(min_new) else None,
            min_new_B1=to_device(min_new, where)[:, None] if any(min_new) else None,
        )


def _forbidden(rows: Sequence[Sampling], vocabulary: int, device: torch.device | str) -> Tensor | None:
    if all(s.allowed is None for s in rows):
        return None
    anything = torch.ones(vocabulary, dtype=torch.bool)
    allowed = torch.stack([anything if s.allowed is None else s.allowed.cpu() for s in rows])
    return allowed.logical_not()[:, None].to(device, non_blocking=True)


def _early_stops(rows: Sequence[Sampling], vocabulary: int, device: torch.device | str) -> Tensor:
    stops = torch.zeros(len(rows), 1, vocabulary, dtype=torch.bool)
    for row, sampling in enumerate(rows):
        if sampling.min_new_tokens:
            stops[row, 0, list(sampling.stop_tokens)] = True
    return stops.to(device, non_blocking=True)


def warp_logits(logits_BqV: Tensor, rows: RowSampling, drawn_Bq: Tensor | None = None) -> Tensor:
    """Return logits whose softmax is the distribution of the next token, (B, q, V); -inf for excluded tokens.

    The result is not normalized. At temperature 0 the next token is its argmax.

    Args:
        logits_BqV: Logits of the policy.
        rows: Sampling of the rows.
        drawn_Bq: Number of new tokens before each token; needed if a row has min_new_tokens.

    Returns:
        float32, or float64 for float64 logits.
    """
    x = _upcast(logits_BqV)
    if rows.forbidden_B1V is not None:
        x = x.masked_fill(rows.forbidden_B1V, -torch.inf)
    if rows.stops_B1V is not None:
        assert drawn_Bq is not None
        assert rows.min_new_B1 is not None
        x = x.masked_fill(rows.stops_B1V & (drawn_Bq < rows.min_new_B1)[..., None], -torch.inf)
    x = _divide(x, rows)
    if rows.top_k_B11 is not None:
        x = _top_k(x, rows.top_k_B11, rows.max_top_k)
    if rows.top_p_B11 is not None:
        x = _top_p(x, rows.top_p_B11)
    if rows.log_min_p_B11 is not None:
        x = x.masked_fill(x < x.amax(-1, keepdim=True) + rows.log_min_p_B11, -torch.inf)
    return x


def _divide(x_BqV: Tensor, rows: RowSampling, some: slice = ALL_ROWS) -> Tensor:
    """Divide by the temperatures of `some` rows, those of `x_BqV`.

    At a low temperature the quotients are so large that float32 does not resolve the noise that is added to
    them. There the largest logit is subtracted first, which changes no distribution.
    """
    if rows.is_cold_B11 is not None:
        x_BqV = x_BqV - x_BqV.amax(-1, keepdim=True) * rows.is_cold_B11[some]
    return x_BqV if rows.divisor_B11 is None else x_BqV / rows.divisor_B11[some]


def _top_k(x_BqV: Tensor, k_B11: Tensor, largest: int) -> Tensor:
    """Mask all tokens below the k-th largest; ties with it are kept, as in transformers."""
    best = x_BqV.topk(largest, dim=-1).values
    index_Bq1 = (k_B11.clamp(max=largest) - 1).expand(*x_BqV.shape[:2], 1)
    below = (x_BqV < best.gather(-1, index_Bq1)) & (k_B11 < x_BqV.shape[-1])
    return x_BqV.masked_fill(below, -torch.inf)


def _top_p(x_BqV: Tensor, p_B11: Tensor) -> Tensor:
    """Keep the tokens with less than p before them, from the most likely one down; ties by token id."""
    p_sorted, order = x_BqV.softmax(-1).sort(dim=-1, descending=True, stable=True)
    enough = p_sorted.cumsum(-1) - p_sorted >= p_B11
    return x_BqV.masked_fill(enough.new_empty(x_BqV.shape).scatter_(-1, order, enough), -torch.inf)


def logprobs(logits_BqV: Tensor, tokens_Bq: Tensor, rows: RowSampling) -> Tensor:
    """Return the log-probabilities of the tokens before masks, top-k, top-p and min-p, (B, q).

    They are log softmax(logits / T), where T is 1 for rows at temperature 0.
    """
    num_rows = len(logits_BqV)
    at_once = num_rows if logits_BqV.is_cuda else max(1, CACHED_NUMBERS // logits_BqV[0].numel())
    parts = []
    for first in range(0, num_rows, at_once):
        some = slice(first, first + at_once)
        x = _divide(_upcast(logits_BqV[some]), rows, some)
        parts.append(x.log_softmax(-1).gather(-1, tokens_Bq[some, :, None])[..., 0])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def top_logprobs(logits_BqV: Tensor, rows: RowSampling) -> tuple[Tensor, Tensor]:
    """Return the `rows.max_top_logprobs` largest log-probabilities, as in `logprobs`, and their tokens.

    Returns:
        Values and int64 tokens, (B, q, max_top_logprobs), in descending order.
    """
    top = _divide(_upcast(logits_BqV), rows).log_softmax(-1).topk(rows.max_top_logprobs, dim=-1)
    return top.values, top.indices


def _upcast(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
