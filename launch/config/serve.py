"""Configuration of the rollout servers of a run. Imports no torch."""

from dataclasses import dataclass

from aedit.types import NonNegativeInt, check, checked


@checked("serve")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Rollout servers (`aedit serve ADDRESS`). A flag of the server overrides the run's value there."""

    rows: int = 16
    """Samples that the engine of each line of policy versions decodes at a time."""

    lines: int = 4
    """Ranks of trainers that a server generates for at a time. Each one has an engine of its own, with its
    own weights."""

    waiting: int = 1024
    """Samples of one rank that may wait beyond `rows`."""

    max_tokens: NonNegativeInt = 0
    """Limit of prompt and answer of a sample; 0: `data.seq_len`."""

    versions: int = 4
    """Newest policy versions of each line that are kept, from which a newer one needs only the difference."""

    def __post_init__(self) -> None:
        for name in ("rows", "lines", "waiting", "versions"):
            check(getattr(self, name) >= 1, f"serve.{name}", "must be at least 1", getattr(self, name))
