"""Limits of an engine."""

from dataclasses import dataclass

from aedit.types import NonNegativeInt, PositiveInt, checked


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of an engine's prefill and of its prefix cache."""

    prefill_tokens: PositiveInt = 512
    """Upper limit of tokens of waiting samples that are computed between two passes over running samples.
    While no sample is running there is no limit."""
    prefix_cache_bytes: NonNegativeInt = 256 << 20
    """Upper limit of the prefix cache, which grows with its contents; 0 turns it off."""
