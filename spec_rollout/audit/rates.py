"""Share of a server's samples that are recomputed: high after a suspicion, low after long truth."""

from dataclasses import dataclass, replace

from aedit.types import check

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
