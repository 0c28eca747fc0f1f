"""Metric lines of a hub in memory: bounded to one message, for a run of any length."""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

MOST_BYTES = 2**20
"""Most bytes of all lines as JSON: a status with them stays below the largest message."""


def json_line(values: Mapping[str, Any]) -> str:
    """Return values as JSON, which has no NaN and no infinity: null instead."""
    text = json.dumps(values)
    if "NaN" not in text and "Infinity" not in text:
        return text
    return json.dumps(json.loads(text, parse_constant=lambda name: None))


def newest(texts: Sequence[str], most_bytes: int) -> list[str]:
    """Return the last of `texts` that take at most `most_bytes` together, each with a separator of two."""
    ends = accumulate(len(text) + 2 for text in reversed(texts))
    fit = sum(end <= most_bytes for end in ends)
    return list(texts[len(texts) - fit :])


class Lines:
    """Metric lines. Of a long run it keeps every 2nd, 4th, 8th... line, and the newest. Not thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lines: list[tuple[int, str]] = []
        self._num_bytes = 0
        self._every = 1
        self.count = 0
        """Lines that have ever been added."""

    def add(self, values: Mapping[str, Any]) -> None:
        """Add the newest line."""
        if self._lines and self._lines[-1][0] % self._every:
            self._num_bytes -= len(self._lines.pop()[1])
        text = json_line(values)
        self._lines.append((self.count, text))
        self._num_bytes += len(text)
        self.count += 1
        while self._num_bytes > self._most_bytes and len(self._lines) > 1:
            self._thin_out()

    def after(self, count: int) -> list[str]:
        """Return the kept lines that were added after the first `count`, as JSON."""
        return [text for number, text in self._lines if number >= count]

    def _thin_out(self) -> None:
        self._every *= 2
        *before, newest = self._lines
        self._lines = [*(line for line in before if line[0] % self._every == 0), newest]
        self._num_bytes = sum(len(text) for _, text in self._lines)
        if len(self._lines) == 2 and self._num_bytes > self._most_bytes:
            self._lines, self._num_bytes = [newest], len(newest[1])
