"""How much longer a sample will be, by the lengths of those before it (Kaplan and Meier 1958).

Samples that are still growing count too, as what they are: longer than so much. Without them the short ones,
which end first, would make all look short.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

PRIOR = 4.0
"""So many samples as long as all are on average a group is given to begin with."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A survival curve of lengths in tokens: flat between the lengths at which samples have ended."""

    at: tuple[int, ...] = (0,)
    """Ascending: 0, the lengths at which samples have ended, and the longest that was seen."""
    longer: tuple[float, ...] = (1.0,)
    """Share of samples that are longer than `at`."""
    area: tuple[float, ...] = (0.0,)
    """Tokens below the curve up to `at`."""

    @classmethod
    def of(cls, completed: Iterable[int], censored: Iterable[int] = ()) -> "LengthDistribution":
        """ended: lengths of samples that have ended by themselves, 1 or more. longer_than: of those that are
        growing, or were cut at their limit."""
        ends, cut = Counter(completed), Counter(censored)
        if not ends:
            return cls()
        at_risk = ends.total() + cut.total()
        at, longer, area = [0], [1.0], [0.0]
        for length in sorted({*ends, *cut}):
            if ends[length] or length == max((*ends, *cut)):
                area.append(area[-1] + longer[-1] * (length - at[-1]))
                longer.append(longer[-1] * (1 - ends[length] / at_risk))
                at.append(length)
            at_risk -= ends[length] + cut[length]
        return cls(tuple(at), tuple(longer), tuple(area))

    def expected_remaining(self, emitted: int, max_length: int, scale: float = 1.0) -> float:
        """Expected tokens after the first `emitted` of a sample that has not ended, of at most `max_length`.

        scale: how long those of its kind become, as a multiple of what all do (`group_scales`). Beyond the
        longest that was seen, it is as many again as there are already; as long as none has ended, half of
        what is allowed.
        """
        return scale * self._expected_remaining(emitted / scale, max_length / scale)

    def _expected_remaining(self, emitted: float, max_length: float) -> float:
        room = max_length - emitted
        if len(self.at) == 1:
            return room / 2
        here = self._longer(emitted)
        if emitted >= self.at[-1] or not here:
            return min(emitted, room)
        beyond = self.longer[-1] * min(self.at[-1], max(0.0, max_length - self.at[-1]))
        return (self._area(min(max_length, self.at[-1])) - self._area(emitted) + beyond) / here

    def _longer(self, length: float) -> float:
        return self.longer[bisect_right(self.at, length) - 1]

    def _area(self, length: float) -> float:
        i = bisect_right(self.at, length) - 1
        return self.area[i] + self.longer[i] * (length - self.at[i])


def group_scales(
    completed: Iterable[tuple[int, int]], growing: Iterable[tuple[int, int]]
) -> dict[int, float]:
    """For each group, how long its samples become as a multiple of what all do.

    Both are pairs of group and tokens. Its tokens over its samples that have ended is the length of a group,
    as if the rate at which samples end did not change with their length.
    """
    ends: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for group, length in completed:
        ends[group] += 1
        tokens[group] += length
    if not ends:
        return {}
    for group, length in growing:
        tokens[group] += length
    mean = tokens.total() / ends.total()
    return {group: (count / mean + PRIOR) / (ends[group] + PRIOR) for group, count in tokens.items()}
