"""Rule for restarts of a process that died."""

from dataclasses import dataclass, replace

from aedit.types import NonNegativeFloat, NonNegativeInt, checked


@checked()
@dataclass(frozen=True, slots=True)
class Restarts:
    """Number of deaths so far, and when the next start is allowed.

    Each death doubles the pause before the next start. A process that has worked for a while resets the
    count.
    """

    limit: NonNegativeInt = 5
    """Number of deaths in a row after which there are no more starts."""
    pause_s: NonNegativeFloat = 1.0
    """Pause after the first death."""
    longest_pause_s: float = 60.0
    in_row: int = 0
    total: int = 0
    died_at_s: float = 0.0

    def died(self, now_s: float, *, worked: bool) -> "Restarts":
        """Return the rule after a death; `worked` resets the count of deaths in a row."""
        in_row = 1 if worked else self.in_row + 1
        return replace(self, in_row=in_row, total=self.total + 1, died_at_s=now_s)

    @property
    def given_up(self) -> bool:
        """Return true if there are no more starts."""
        return self.in_row > self.limit

    def may_start(self, now_s: float) -> bool:
        """Return true if a start is allowed now."""
        if self.in_row == 0:
            return True
        pause_s = min(self.pause_s * 2 ** (self.in_row - 1), self.longest_pause_s)
        return not self.given_up and now_s >= self.died_at_s + pause_s
