"""Ranks of a node that are threads of the test process."""

import threading
from concurrent.futures import ThreadPoolExecutor

LIMIT_S = 60.0


class ThreadShards:
    """`Shards` of one thread; all of a node share `meeting` and `values`."""

    def __init__(self, rank, size, meeting, values):
        self.rank, self.size, self._meeting, self._values = rank, size, meeting, values

    @property
    def leads(self):
        return self.rank == 0

    def gather(self, value):
        self._values[self.rank] = value
        self._meeting.wait(LIMIT_S)
        found = list(self._values)
        self._meeting.wait(LIMIT_S)
        return found

    def sum(self, values):
        return sum(self.gather(values))

    def decide(self, numbers):
        return self.gather(list(numbers))[0]

    def all(self, flags):
        return [all(column) for column in zip(*self.gather(list(flags)), strict=True)]

    def most(self, numbers):
        return [max(column) for column in zip(*self.gather(list(numbers)), strict=True)]


def run_ranks(size, job):
    """Run `job(shards)` in a thread per rank, and return the results in the order of the ranks."""
    meeting, values = threading.Barrier(size), [None] * size

    def one(rank):
        try:
            return job(ThreadShards(rank, size, meeting, values))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))
