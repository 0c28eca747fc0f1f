"""Averagers in memory, whose rounds a test ends, and programs that play the process of a real one."""

import numpy as np

from aedit.proto.dht import AveragedRound


class Meeting:
    """Averagers of peers that meet when the test says so."""

    def __init__(self, numel, peers):
        self.averagers = [MemoryAverager(numel) for _ in range(peers)]

    def meet(self, members=None):
        """End the round under way of these peers with their mean, and that of all others as failed."""
        members = range(len(self.averagers)) if members is None else members
        chosen = [self.averagers[i] for i in members]
        weights = np.array([float(one.steps) for one in chosen])
        mean = sum(w * one.sent.astype(np.float64) for w, one in zip(weights, chosen, strict=True))
        for one in self.averagers:
            if one.ended:
                continue
            if one not in chosen or len(chosen) < 2:
                one.end(AveragedRound(number=one.number, why="no other peer"))
                continue
            one.average[:] = mean / weights.sum()
            late = one.rounds == 0 and any(other.rounds for other in chosen)
            began_s = min(other.began_s for other in chosen)
            one.end(
                AveragedRound(number=one.number, members=len(chosen), seconds=1.0, began_s=began_s, late=late)
            )
        for one in chosen if len(chosen) > 1 else ():
            one.rounds += 1


class MemoryAverager:
    """`Averager` whose rounds end when its meeting says so."""

    def __init__(self, numel):
        self.sent, self.average = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
        self.number, self.steps, self.rounds, self.began_s = 0, 0, 0, 0.0
        self.ended, self.closed = True, False
        self.said = []
        self._outcome = None

    def start(self, number, steps, began_s):
        assert self.ended, "a round is under way"
        self.number, self.steps, self.began_s, self.ended = number, steps, began_s, False

    def end(self, outcome):
        self._outcome, self.ended = outcome, True

    def outcome(self, number):
        return self._outcome if self._outcome and self._outcome.number == number else None

    def comparisons(self):
        said, self.said = self.said, []
        return said

    def close(self, wait_s=0.0):
        self.closed = True
