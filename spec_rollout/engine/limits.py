"""Limits of an engine."""

from dataclasses import dataclass

from aedit.types import check


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of an engine's prefill and of its prefix cache."""

    prefill_tokens: int = 512
    """Upper limit of tokens of waiting samples that are computed between two passes over running samples.
    While no sample is running there is no limit."""
    prefix_cache_bytes: int = 256 << 20
    """Upper limit of the prefix cache, which grows with its contents; 0 turns it off."""

    def __post_init__(self) -> None:
        check(self.prefill_tokens > 0, "prefill_tokens", "must be above 0", self.prefill_tokens)
        check(
            self.prefix_cache_bytes >= 0, "prefix_cache_bytes", "must be 0 or more", self.prefix_cache_bytes
        )
