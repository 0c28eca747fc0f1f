"""Curriculum: harder problems are drawn as more of the easier ones are solved."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isnan, nan
from typing import Any

from aedit.spec_rollout.rl import Group, Problem
from aedit.types import UserError

WINDOW = 32
"""Groups of the current level after which the level is chosen anew."""
RAISE, LOWER = 0.7, 0.2
"""Solved share of such a window from which the next level is drawn, and up to which the previous one is."""
REVIEW = 0.25
"""Share of the groups that is drawn from easier levels, so that these are not forgotten."""


def next_level(level: int, solved: float, num_levels: int) -> int:
    """Return the level, from 0, after a window in which this share of the rollouts was solved."""
    step = (solved >= RAISE) - (solved <= LOWER)
    return min(max(level + step, 0), num_levels - 1)


def solved_of(group: Group, solved: float) -> tuple[int, float]:
    """Return level of a group, and the share of its rewards that are at least `solved`: NaN without any."""
    known = [reward for reward in group.rewards if reward is not None]
    share = sum(reward >= solved for reward in known) / len(known) if known else nan
    return group.problem.columns["level"], share


@dataclass(slots=True)
class Curriculum:
    """Chooses the problem of each position of the stream by the solved share so far.

    Its choices depend on the state and the position only, and the state on the groups that were added, in
    their order. Each node of a run has its own: a node that solves more draws harder problems. A node that
    joins without a checkpoint begins at the easiest level.
    """

    levels: Sequence[Sequence[Problem]]
    """Problems of each level, the easiest first."""
    level: int = 0
    _solved: float = 0.0
    """Sum of the solved shares of this window."""
    _groups: int = field(default=0)

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> "Curriculum":
        """Return a curriculum over the column `level`. Raises UserError without two levels."""
        found: dict[int, list[Problem]] = {}
        for problem in problems:
            level = problem.columns.get("level")
            if not isinstance(level, int) or isinstance(level, bool):
                raise UserError(
                    f"prompts.curriculum = true: problem {problem.index} has {level!r} in the column 'level',"
                    " expected a whole number; add the column, or set it to false"
                )
            found.setdefault(level, []).append(problem)
        if len(found) < 2:
            raise UserError(
                f"prompts.curriculum = true: all have the level {next(iter(found))}, expected at least"
                " two levels; set prompts.options of the generator, or prompts.curriculum = false"
            )
        return cls([found[level] for level in sorted(found)])

    def problem(self, position: int, index: int) -> Problem:
        """Return the problem of a position of the stream, for which the order has drawn this index."""
        level = self.level
        digest = blake2b(f"review {position}".encode(), digest_size=8).digest()
        review, which = divmod(int.from_bytes(digest, "big"), 2**32)
        if level and review < REVIEW * 2**32:
            level = which % level
        return self.levels[level][index % len(self.levels[level])]

    def add(self, solved: Iterable[tuple[int, float]]) -> None:
        """Count trained groups: the column `level` of each, and the solved share of its rollouts."""
        for level, share in solved:
            if level != self.levels[self.level][0].columns["level"] or isnan(share):
                continue  # a review, drawn before the level has changed, or without rewards
            self._solved, self._groups = self._solved + share, self._groups + 1
            if self._groups == WINDOW:
                self.level = next_level(self.level, self._solved / WINDOW, len(self.levels))
                self._solved, self._groups = 0.0, 0

    def state(self) -> dict[str, Any]:
        """Return plain numbers for a checkpoint."""
        return {"level": self.level, "solved": self._solved, "groups": self._groups}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.level = min(state.get("level", 0), len(self.levels) - 1)
        self._solved, self._groups = state.get("solved", 0.0), state.get("groups", 0)
