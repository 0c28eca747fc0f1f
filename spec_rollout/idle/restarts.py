"""When a process that has died may begin again."""

from dataclasses import dataclass, replace

from aedit.types import check


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often it has died, and what follows. Each death doubles the pause until the next start; one that
    did its work for a while before counts as the first again."""

    limit: int = 5
    """Deaths in a row after which it is given up."""
    pause_s: float = 1.0
    """After the first death."""
    longest_pause_s: float = 60.0
    in_row: int = 0
    total: int = 0
    died_at_s: float = 0.0

    def __post_init__(self) -> None:
        check(self.limit >= 0, "limit", "must be 0 or more", self.limit)
        check(self.pause_s >= 0, "pause_s", "must be 0 or more", self.pause_s)

    def died(self, now_s: float, *, worked: bool) -> "Restarts":
        """worked: it had been of use since it began."""
        in_row = 1 if worked else self.in_row + 1
        return replace(self, in_row=in_row, total=self.total + 1, died_at_s=now_s)

    @property
    def given_up(self) -> bool:
        return self.in_row > self.limit

    def may_start(self, now_s: float) -> bool:
        if self.in_row == 0:
            return True
        pause_s = min(self.pause_s * 2 ** (self.in_row - 1), self.longest_pause_s)
        return not self.given_up and now_s >= self.died_at_s + pause_s
