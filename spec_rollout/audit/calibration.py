"""Numerical differences between a server's machine and the verifier's, and the limits that follow.

Let eps be the standard deviation of the difference of one logit over temperature between two honest machines.
A claimed token then differs from the verifier's by a margin of the order of sqrt(2) eps where two tokens are
that close, and its log-probability by eps times the root of its `spread`. A token counts as a mismatch if its
margin, or the difference of its log-probability, is above tau = 6 sqrt(2) eps. Below tau the number of other
tokens beyond what the gaps between the two best ones let expect (`exchanges`), the mean of the differences,
and their size over whole samples are limited too (`judge.py`).

All of it is measured on rollouts of servers that are trusted, per server, as the difference depends on both
machines (`calibrate`). For other servers in 16 bits the verifier's own rounding is measured while it audits
(`OwnNoise`), since that of a server is of the same size. Until then the defaults by dtype apply, which are
wide.
"""

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from aedit.spec_rollout.audit.sequential import ShareTest
from aedit.spec_rollout.audit.token_margins import Margins
from aedit.system import write_atomically
from aedit.types import check

ANY = "*"
"""Name of the entry for servers without one of their own."""
SIGMAS = 6 * math.sqrt(2)
HARD_MARGIN = 1.0
"""A margin above it is no rounding difference."""
MIN_RATE = 5e-5
"""Lower limit of the assumed rate of honest mismatches, however many tokens were measured."""

# Norms of `transformers` models compute in float32, also in a model of float64.
_DEFAULT_EPS = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_P1 = {torch.float64: 0.01, torch.float32: 0.01, torch.bfloat16: 0.06, torch.float16: 0.03}
_LOGPROB_MEDIAN = {torch.float64: 1e-3, torch.float32: 0.02, torch.bfloat16: 0.10, torch.float16: 0.05}
_LEAST_SPREAD = 0.1
"""Log-probabilities near 0 hardly depend on the logits, but are rounded as others are."""
_LEAST_EPS = 1e-7
"""Lower limit of a measured eps: two machines of one kind may differ by nothing, others of that kind not."""
CLUSTERING = 4.0
"""Variance of the sum of a sample's differences over that of independent ones, where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Numerical difference between a server and this verifier."""

    dtype: str
    """Dtype of both engines, as torch names it."""
    eps: float
    """Standard deviation of the difference of a logit over temperature."""
    rate: float
    """Upper limit of the share of honest tokens that are mismatches."""
    ties: float = 1.0
    """Upper limit of the honest tokens that are not the verifier's, over those that `exchanges` expects."""
    bias: float | None = None
    """Upper limit of the mean difference of honest log-probabilities, either way; None: eps / 10."""
    clustering: float = CLUSTERING
    """Upper limit of the variance of a sample's summed differences, over that of independent ones."""
    num_tokens: int = 0
    """Tokens on which it was measured; 0: a default."""

    def __post_init__(self) -> None:
        names = {str(dtype).removeprefix("torch.") for dtype in _DEFAULT_EPS}
        check(self.dtype in names, "dtype", f"must be one of {', '.join(sorted(names))}", self.dtype)
        check(0 < self.eps < 1, "eps", "must be in (0, 1)", self.eps)
        check(0 < self.rate < 0.5, "rate", "must be in (0, 0.5)", self.rate)
        check(0 < self.ties < math.inf, "ties", "must be a finite number above 0", self.ties)
        check(0 < self.largest_bias < 1, "bias", "must be in (0, 1)", self.largest_bias)
        rule = "must be a finite number of at least 1"
        check(1 <= self.clustering < math.inf, "clustering", rule, self.clustering)

    @classmethod
    def default(cls, dtype: torch.dtype) -> Self:
        """Return the wide limits that hold before a measurement."""
        rate = MIN_RATE if dtype in (torch.float32, torch.float64) else 1e-3
        return cls(dtype=str(dtype).removeprefix("torch."), eps=_DEFAULT_EPS[dtype], rate=rate)

    @property
    def tau(self) -> float:
        """Return the limit of margins and differences of log-probabilities from which a token counts."""
        return min(SIGMAS * self.eps, HARD_MARGIN)

    @property
    def logprob_median(self) -> float:
        """Return the largest median difference of log-probabilities of an honest sample."""
        return min(_LOGPROB_MEDIAN[self._torch_dtype], 6 * self.eps)

    @property
    def largest_bias(self) -> float:
        """Return the largest mean difference of honest log-probabilities, either way."""
        return self.eps / 10 if self.bias is None else self.bias

    def widened(self, factor: float) -> "Calibration":
        """Return these limits for differences that are `factor` times as large."""
        return replace(
            self,
            eps=min(factor * self.eps, 0.99),
            bias=min(factor * self.largest_bias, 0.99),
        )

    def mismatch_test(self) -> ShareTest:
        """Return the test of the share of mismatches, with twice the measured rate as p0."""
        p0, p1 = 2 * self.rate, _P1[self._torch_dtype]
        return ShareTest(p0=p0, p1=max(p1, 5 * p0) if p0 < 0.15 else max(0.75, (1 + p0) / 2))

    def chances(self, gaps_T: Tensor) -> Tensor:
        """Return the highest probability of another token with an honest server, by the gap, (T,)."""
        return (self.ties * exchanges(gaps_T, self.eps)).clamp(max=0.5).clamp(min=self.rate)

    @property
    def _torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def exchanges(gaps_T: Tensor, eps: float) -> Tensor:
    """Return the probability with which rounding exchanges the two best tokens, by their gap, (T,).

    The difference of two errors has the standard deviation sqrt(2) eps. In 16 bits large logits are rounded
    more than small ones, so its tails are heavier than normal: the larger one of the normal probability and
    that of Student's t with 3 degrees of freedom and this standard deviation.
    """
    x_T = (gaps_T / (math.sqrt(2) * eps)).clamp(max=1e6)
    student_T = 0.5 - (x_T.atan() + x_T / (1 + x_T.square())) / math.pi
    return torch.maximum(0.5 * torch.special.erfc(x_T / math.sqrt(2)), student_T)


def calibrate(parts: "list[tuple[Margins, Tensor]]", dtype: torch.dtype) -> Calibration:
    """Return the calibration that follows from trusted rollouts.

    eps^2 is the sum of squared differences of log-probabilities over the sum of their spreads, which is
    unbiased for independent errors of logits. Margins far above it count in `rate`. The other values are
    upper limits: the count of mismatches plus 3, that of other tokens plus three standard errors, the mean
    plus four over samples. `ties` is above 1 only where 1 is more than three standard errors below.

    Args:
        parts: Margins of the trusted tokens of each sample, and the log-probabilities that the server has
            reported, (T,).
        dtype: Dtype of both engines.

    Raises:
        ValueError: There are no tokens, or some margin is above 1: these rollouts are not of this policy.
    """
    parts = [(found, claimed) for found, claimed in parts if len(found.margins_T)]
    if not parts:
        raise ValueError("calibration needs at least one token of a trusted server")
    every = Margins.joined([each for each, _ in parts])
    differences_T = torch.cat([claimed for _, claimed in parts]).double() - every.logprobs_T
    largest = float(every.margins_T.max())
    if not (largest <= HARD_MARGIN and float(differences_T.abs().max()) <= HARD_MARGIN):
        raise ValueError(
            f"the trusted rollouts have a margin of {largest:.3g} and differences of log-probabilities up to "
            f"{float(differences_T.abs().max()):.3g}: they were not generated by this policy and version"
        )
    spread = float(every.spread_T.clamp(min=0).sum())
    eps = math.sqrt(float(differences_T.square().sum()) / spread) if spread > 0 else 0.0
    eps = min(max(eps, _LEAST_EPS), 0.99)
    num_tokens = len(differences_T)
    sizes = [len(claimed) for _, claimed in parts]
    sums_S = torch.stack([each.sum() for each in torch.split(differences_T, sizes)])
    variances_S = torch.stack([variances(each, eps).sum() for each, _ in parts])
    mean = float(sums_S.sum()) / num_tokens
    error = float((sums_S - mean * torch.tensor(sizes)).norm()) / num_tokens
    clustering = float(sums_S.square().sum() / variances_S.sum()) * (1 + 4 * math.sqrt(2 / len(parts)))
    expected = max(float(exchanges(every.gaps_T, eps).sum()), 1e-9)
    others = int((every.margins_T > 0).sum())
    lowest, highest = others - 3 * math.sqrt(others), others + 3 * math.sqrt(others) + 3
    return Calibration(
        dtype=str(dtype).removeprefix("torch."),
        eps=eps,
        ties=highest / expected if lowest > expected else min(highest / max(expected, 1.0), 1.0),
        rate=_upper_share(int(mismatches(every, differences_T, SIGMAS * eps).sum()), num_tokens),
        bias=min(max(abs(mean) + 4 * error, eps / 100), 0.99),
        clustering=max(clustering, 1.0),
        num_tokens=num_tokens,
    )


def variances(found: Margins, eps: float) -> Tensor:
    """Return the variance of the difference of each log-probability between honest machines, (T,)."""
    return eps**2 * found.spread_T.clamp(min=_LEAST_SPREAD)


def _upper_share(count: int, num_tokens: int) -> float:
    """Return the upper limit of a share: that of 95 % where none was seen."""
    return min(max(MIN_RATE, (count + 3) / num_tokens), 0.2)


NOISE_FACTOR = 1.5
"""A server's limits over the verifier's own noise. Two machines of equal noise differ by sqrt(2) times it;
the rest is for the error of the measurement on `MEASURED_TOKENS`."""


@dataclass(slots=True)
class OwnNoise:
    """Rounding of the verifier's own engine, measured on samples that it checks anyway.

    Nothing of it depends on what a server claims, apart from which samples there are. It is measured in 16
    bits only: in 32 bits the difference between machines is not rounding, but the choice of kernels (TF32).
    """

    dtype: torch.dtype
    """Of the engines."""
    window: deque[tuple[Margins, Tensor]] = field(default_factory=deque)
    limits: Calibration | None = None
    """None: not measured yet."""
    _num_offered: int = 0

    def wants(self) -> bool:
        """Count a sample, and return whether to measure on it: at first all, later one in 16."""
        self._num_offered += 1
        is_due = self.limits is None or self._num_offered % MEASURED_ONE_IN == 0
        return is_due and self.dtype in (torch.bfloat16, torch.float16)

    def add(self, exact: Margins, logprobs_T: Tensor) -> None:
        """Take the engine's own tokens of a sample.

        Args:
            exact: Their margins by logits of higher precision.
            logprobs_T: Their log-probabilities by the engine.
        """
        self.window.append((exact, logprobs_T))
        sizes = [len(each) for _, each in self.window]
        while sum(sizes) - sizes[0] >= MEASURED_TOKENS:
            self.window.popleft()
            del sizes[0]
        if sum(sizes) >= MEASURED_TOKENS:
            try:
                self.limits = calibrate([*self.window], self.dtype).widened(NOISE_FACTOR)
            except ValueError:
                self.limits = None  # so noisy that no limit below the defaults holds


MEASURED_TOKENS = 4_000
"""Newest tokens on which the noise is measured."""
MEASURED_ONE_IN = 16


def mismatches(found: Margins, differences_T: Tensor, tau: float) -> Tensor:
    """Return which tokens are mismatches, bool (T,). NaN is one."""
    return ~((found.margins_T <= tau) & (differences_T.abs() <= tau))


def read_calibrations(path: Path) -> dict[str, Calibration]:
    """Return the calibrations of a file by server; `*` is that of all others.

    Raises:
        ValueError: The file is not one that `write_calibrations` has written.
        OSError: It cannot be read.
    """
    try:
        table: Mapping[str, Any] = json.loads(path.read_text())["servers"]
        known = {each.name for each in fields(Calibration)}
        for name, entry in table.items():
            if set(entry) - known:
                raise ValueError(f"server {name}: unknown keys {sorted(set(entry) - known)}")
        return {str(name): Calibration(**entry) for name, entry in table.items()}
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is no file of calibrations ({type(error).__name__}: {error}): make it with "
            "`aedit audit FILE --trust SERVER --calibrate OUT`"
        ) from None


def write_calibrations(path: Path, table: Mapping[str, Calibration]) -> None:
    """Write calibrations by server."""
    text = json.dumps({"servers": {name: asdict(each) for name, each in table.items()}}, indent=2)
    write_atomically(path, text + "\n")


def calibration_of(
    server: str, table: Mapping[str, Calibration], dtype: torch.dtype, noise: OwnNoise | None = None
) -> Calibration:
    """Return a server's limits: its own entry, that of `*`, the verifier's noise, or the default."""
    found = table.get(server) or table.get(ANY)
    if found is not None and found.dtype == str(dtype).removeprefix("torch."):
        return found
    default = Calibration.default(dtype)
    if noise is None or noise.limits is None or noise.limits.eps > default.eps:
        return default
    return noise.limits
