"""Interface of a reward, its place in a run, and what is reported about it. Imports no torch."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aedit.types import NonNegativeFloat, check, checked, is_import_path

Scalar = int | float | bool | str
BUILT_IN = ("exact", "numeric", "regex", "format", "gym", "math")
"""Names of the functions of `built_in.py`."""


class Reward(Protocol):
    """Function that scores completions, sync or async, with the signature of TRL's reward functions."""

    def __call__(
        self, prompts: list[Any], completions: list[Any], **columns: list[Any]
    ) -> Sequence[float | None] | Awaitable[Sequence[float | None]]:
        """Return one number per completion; None: this function says nothing about the completion.

        A function that does not accept `**columns` is given only the arguments that it names. Besides the
        columns of the source there is `completion_ids`, a list of token ids per completion.

        Args:
            prompts: The prompt of each completion: text, or a list of messages where the source has those.
            completions: Texts, or lists of one message of the assistant where prompts are messages.
            columns: For each column of the source, its value once per completion.
        """


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """One reward function of a run."""

    function: str
    """A built-in function, or `package.module:name`."""
    weight: float = 1.0
    """Factor of its values in the sum over the functions."""
    options: Mapping[str, Scalar] = field(default_factory=dict)
    """Keyword arguments of a built-in function."""

    def __post_init__(self) -> None:
        known = self.function in BUILT_IN or is_import_path(self.function)
        names = ", ".join(BUILT_IN)
        check(known, "reward.functions", f"must be of {names}, or package.module:name", repr(self.function))
        taken = not self.options or self.function in BUILT_IN
        check(taken, "reward.options", f"are for built-in functions, not for {self.function}", self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFault:
    """A call of a reward function that gave no rewards."""

    function: str
    sample: str
    """`position/sample` of the completion that caused it; `position` if no single one did."""
    line: str
    """`file:number` of the function's own source; empty where there is none."""
    message: str

    def __str__(self) -> str:
        return f"reward {self.function}, sample {self.sample}: {self.what}"

    @property
    def what(self) -> str:
        """Return the message with the place in the function's source."""
        return self.message + (f" ({self.line})" if self.line else "")


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReport:
    """Values and faults of the reward functions for one group."""

    values: Mapping[str, tuple[float | None, ...]]
    """For each function its values before weighting, one per rollout."""
    seconds: NonNegativeFloat
    """Time that workers spent on the group, in seconds."""
    events: tuple[RewardFault, ...] = ()


class RewardFailed(RuntimeError):
    """Reward functions give no rewards, and the run ends: it was asked to, or cannot go on."""
