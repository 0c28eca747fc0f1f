"""One problem of a task."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aedit.types import NonNegativeInt, checked

Messages = tuple[Mapping[str, Any], ...]
"""A dialogue: `role` and `content` each."""


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt with the columns that rewards read."""

    index: NonNegativeInt
    """Number of the problem in its source, the same on all nodes."""
    prompt: str | Messages
    """Text, or messages of a dialogue."""
    tokens: tuple[int, ...]
    """The prompt as the policy reads it, chat template included."""
    columns: Mapping[str, Any]
    """All other columns of the source, such as `answer`."""
