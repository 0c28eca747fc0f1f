"""Spot checks of servers: a sample that is chosen after it has ended is recomputed in one forward pass.

`make_auditor` makes the auditor of a connection process; `AuditRate` is the share that is recomputed: high
after a suspicion, low after many clean tokens.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from aedit.spec_rollout.audit.calibration import Calibration, OwnNoise, calibration_of, read_calibrations
from aedit.spec_rollout.audit.judge import Judgement, Scored, ServerRecord, form_error
from aedit.spec_rollout.audit.recording import Recording
from aedit.spec_rollout.audit.statement import AuditVerdict, HeldRollout, WeightReader, spans_of
from aedit.spec_rollout.audit.token_margins import Margins, Part, PolicyVersions, margins_of, not_auditable
from aedit.spec_rollout.sampling import Sampling, TokenDecoder, decode_sampling
from aedit.types import check

_PATTERNS = {torch.uint16: torch.bfloat16, torch.uint32: torch.float32, torch.uint64: torch.float64}
_transformers: Any = (AutoConfig, AutoModelForCausalLM, AutoTokenizer)  # their methods carry no types
_SECRET = secrets.SystemRandom().random


RAISED = 4.0
"""Factor of the rate after a sample with a mismatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRule:
    """Settings of the rate."""

    rate: float = 0.2
    """For a server of which nothing is known."""
    floor: float = 0.02
    """Lowest rate."""
    halved_by: int = 20_000
    """Clean audited tokens after which the rate is half as high."""

    def __post_init__(self) -> None:
        check(0 < self.rate <= 1, "audit.rate", "must be above 0 and at most 1", self.rate)
        rule = f"must be above 0 and at most audit.rate = {self.rate}"
        check(0 < self.floor <= self.rate, "audit.floor", rule, self.floor)
        check(self.halved_by >= 1, "audit.halved_by", "must be at least 1", self.halved_by)


@dataclass(frozen=True, slots=True)
class AuditRate:
    """Rate of one server, q."""

    q: float

    def after(self, rule: RateRule, num_tokens: int, num_mismatches: int) -> "AuditRate":
        """Return the rate after an audited sample that has not failed."""
        if num_mismatches:
            return replace(self, q=min(1.0, self.q * RAISED**num_mismatches))
        return replace(self, q=max(rule.floor, self.q * 2 ** (-num_tokens / rule.halved_by)))

    def after_failure(self) -> "AuditRate":
        """Return the rate after a failure: every sample is audited."""
        return replace(self, q=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """Settings of `SpotAuditor`."""

    rule: RateRule = field(default_factory=RateRule)
    versions_kept: int = 4
    """Policy versions that are kept. Samples of older ones cannot be judged and are generated again."""
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    """Limits of each server; `*` for all others."""


class SpotAuditor:
    """`Auditor` that recomputes samples with a model of its own. Used by one thread."""

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        settings: AuditSettings,
        *,
        tokenizer: TokenDecoder | None = None,
        draw: Callable[[], float] = _SECRET,
        recording: Recording | None = None,
    ) -> None:
        """Make the model.

        Args:
            make_model: Returns a model of the policy's shape, dtype and device; its weights do not matter.
            settings: Settings.
            tokenizer: Checks ends by stop strings.
            draw: Returns numbers in [0, 1) that no server can predict.
            recording: Gets each sample once, and all weights.
        """
        self._policy = PolicyVersions(make_model(), kept=settings.versions_kept)
        self._noise = OwnNoise(self._policy.dtype)
        self._settings, self._tokenizer, self._draw = settings, tokenizer, draw
        self._recording = recording
        self._noted: dict[str, tuple[HeldRollout, ...]] = {}
        self._servers: dict[str, ServerRecord] = {}
        self._rates: dict[str, AuditRate] = {}

    @property
    def servers(self) -> Mapping[str, ServerRecord]:
        """Return the results by server."""
        return self._servers

    def rate(self, server: str) -> float:
        """Return the share of a server's samples that is checked now."""
        return self._rate(server).q

    def publish(self, version: int, read: WeightReader) -> None:
        """Keep a new policy version."""
        weights = read()
        if weights is None:
            return
        tensors = {name: _tensor(value) for name, value in weights.items()}
        self._policy.add(version, tensors)
        if self._recording is not None:
            self._recording.weights(version, tensors)

    def can_judge(self, held: HeldRollout) -> bool:
        """Return whether the versions of a sample are here, and its settings can be judged."""
        return {*held.versions[held.start :]} <= {*self._policy.versions} and not not_auditable(
            decode_sampling(held.sampling)
        )

    def select(self, server: str, held: Sequence[HeldRollout], *, draining: bool) -> int | None:
        """Return the place of the sample to check now; see `Auditor.select`."""
        self._note(server, held)
        if not held or not (draining or self._draw() < self._rate(server).q):
            return None
        return int(self._draw() * len(held))

    def check(self, held: HeldRollout) -> AuditVerdict:
        """Recompute a sample under the versions of its tokens and judge it; see `Auditor.check`."""
        server, name = held.server, f"{held.key[0]}/{held.key[1]}"
        sampling = decode_sampling(held.sampling)
        wrong = form_error(held, sampling, self._policy.vocabulary, self._tokenizer)
        if wrong:
            evidence = {"key": list(held.key), "versions": sorted({*held.versions})}
            self.accuse(server)
            return AuditVerdict(passed=False, reason=f"sample {name}: {wrong}", evidence=evidence)
        reason = not_auditable(sampling)
        missing = sorted({*held.versions[held.start :]} - {*self._policy.versions})
        if reason or missing:
            text = reason or f"the weights of version {missing[0]} are not here any more"
            return AuditVerdict(passed=False, reason=f"sample {name}: {text}", is_final=False)
        scored = score(self._policy, held, sampling, self._noise)
        table = self._settings.calibrations
        calibration = calibration_of(server, table, self._policy.dtype, self._noise)
        record, judgement = self._servers.get(server, ServerRecord()).judge(scored, calibration)
        self._servers[server] = record
        return self._verdict(held, judgement)

    def accuse(self, server: str) -> None:
        """Note a failure that was found elsewhere: all samples of this server are checked from now on."""
        self._rates[server] = self._rate(server).after_failure()

    def close(self) -> None:
        """Free the weights."""
        del self._policy

    def _verdict(self, held: HeldRollout, judgement: Judgement) -> AuditVerdict:
        if judgement.reason:
            evidence = {"key": list(held.key), "versions": spans_of(held.versions), **judgement.evidence}
            reason = f"sample {held.key[0]}/{held.key[1]}: {judgement.reason}"
            self.accuse(held.server)
            return AuditVerdict(passed=False, reason=reason, evidence=evidence)
        rate, rule = self._rate(held.server), self._settings.rule
        self._rates[held.server] = rate.after(rule, judgement.num_tokens, judgement.num_mismatches)
        return AuditVerdict(passed=True)

    def _rate(self, server: str) -> AuditRate:
        return self._rates.get(server, AuditRate(self._settings.rule.rate))

    def _note(self, server: str, held: Sequence[HeldRollout]) -> None:
        """Record the samples that were not among those of the last call."""
        if self._recording is None:
            return
        known = {id(each) for each in self._noted.get(server, ())}
        for each in held:
            if id(each) not in known:
                self._recording.rollout(each)
        self._noted[server] = tuple(held)  # kept, so that no other object gets one of these ids


def score(
    policy: PolicyVersions, held: HeldRollout, sampling: Sampling, noise: OwnNoise | None = None
) -> Scored:
    """Return margins and claims of the tokens that a server has generated under versions that are here."""
    text, parts = (*held.prompt, *held.tokens), []
    judged: list[int] = []
    for version, start, end in spans_of(held.versions[held.start :]):
        if version in policy.versions:
            places = range(held.start + start, held.start + end)
            part = Part(version, text, sampling, held.key, len(held.prompt), places)
            parts.append(margins_of(policy, part, noise))
            judged += places
    return Scored(
        margins=Margins.joined(parts) if parts else Margins.empty(),
        tokens=tuple(held.tokens[place] for place in judged),
        logprobs=tuple(held.logprobs[place] for place in judged),
        places=tuple(judged),
        versions=tuple(held.versions[place] for place in judged),
    )


def _tensor(value: Any) -> Tensor:
    """Return a NumPy array as a tensor; unsigned numbers hold the bits of floating-point ones."""
    tensor = torch.from_numpy(np.ascontiguousarray(value))
    return tensor.view(_PATTERNS.get(tensor.dtype, tensor.dtype))


class ConnectionSettings(Protocol):
    """The settings of a connection process that its auditor needs."""

    @property
    def tokenizer(self) -> str:
        """Return the directory of a saved tokenizer; empty: none."""

    @property
    def audit_options(self) -> Mapping[str, Any]:
        """Return the arguments of `make_auditor`'s parts."""


def make_auditor(settings: ConnectionSettings) -> SpotAuditor:
    """Return the auditor for `audit_options`.

    `model` is the configuration of the policy, `dtype` and `device` those of its engine, `calibration` a file
    or empty, `record` a directory or empty; the others are keys of `[audit]`.

    Raises:
        ValueError: The file of calibrations is not one.
        OSError: It cannot be read.
    """
    options = settings.audit_options
    torch.set_num_threads(options["threads"])
    table = read_calibrations(Path(options["calibration"])) if options["calibration"] else {}
    rule = RateRule(rate=options["rate"], floor=options["floor"], halved_by=options["halved_by"])
    recording = None
    if options["record"]:
        recording = Recording(
            Path(options["record"]),
            max_bytes=options["record_bytes"],
            versions=options["record_versions"],
            model=options["model"],
        )
    _, _, tokenizers = _transformers
    return SpotAuditor(
        lambda: shaped_model(options["model"], options["dtype"], options["device"]),
        AuditSettings(rule=rule, versions_kept=options["versions"], calibrations=table),
        tokenizer=tokenizers.from_pretrained(settings.tokenizer, trust_remote_code=False)
        if settings.tokenizer
        else None,
        recording=recording,
    )


def shaped_model(model: Mapping[str, Any], dtype: str, device: str) -> nn.Module:
    """Return a model of this configuration with random weights.

    Args:
        model: As `PretrainedConfig.to_dict` gives it.
        dtype: Name of the dtype in torch.
        device: Device.
    """
    configs, models, _ = _transformers
    sizes = dict(model)
    config = configs.for_model(sizes.pop("model_type"), **sizes)
    made: nn.Module = models.from_config(config, dtype=torch.float32)
    return made.to(device, getattr(torch, dtype)).eval()
