"""Speed of a server, measured by the tokens that arrive from it."""

import math

from aedit.spec_rollout.migration import EngineSpeed

WINDOW_S = 0.5
"""Shortest time over which tokens are counted."""
SHORT_S = 0.05
"""Shortest time that counts if all samples end before."""
HOPE_S = 10.0
"""Time without samples after which a server is taken as twice as fast, so that it is not left for ever."""
WEIGHT = 0.3
"""Weight of the newest window in the mean."""


class MeasuredSpeed:
    """Seconds per token of a sample, as seen here.

    What a server says about itself is used for one thing only: how its time divides into a part per step and
    a part per sample. A server that promises more than it does gets no samples for it.
    """

    def __init__(self) -> None:
        self._token_s: float | None = None
        self._live = 1.0
        self._shape = (1.0, 0.0)
        self._tokens, self._began_s, self._live_s = 0, math.nan, 0.0
        self._seen_s = math.nan
        self._used_s = math.inf

    def claim(self, fixed_s: float, row_s: float) -> None:
        """Note the times of a step that the server names."""
        if all(math.isfinite(value) and value >= 0 for value in (fixed_s, row_s)) and fixed_s + row_s > 0:
            self._shape = (fixed_s, row_s)

    def advance(self, now_s: float, live: int, tokens: int = 0) -> None:
        """Note the time, with `live` samples decoded until now, and tokens that have arrived."""
        if not live and not tokens:
            self._end(now_s)
            if now_s - self._used_s > HOPE_S and self._token_s is not None:
                self._token_s, self._used_s = self._token_s / 2, now_s
            return
        self._used_s = now_s
        if math.isnan(self._began_s):
            self._begin(now_s)
            return  # tokens of the time before, of which nothing is known
        self._live_s += live * (now_s - self._seen_s)
        self._seen_s = now_s
        self._tokens += tokens
        passed_s = now_s - self._began_s
        if passed_s < WINDOW_S or not self._live_s:
            return
        if self._tokens:
            self._take(self._live_s / self._tokens, self._live_s / passed_s)
            self._begin(now_s)
        elif self._token_s is None or self._live_s > self._token_s:
            # Nothing has come for longer than a token should take: it is at least as slow as this.
            self._token_s, self._live = self._live_s, self._live_s / passed_s

    def speed(self) -> EngineSpeed | None:
        """Return the speed; None before the first measurement."""
        if self._token_s is None:
            return None
        fixed, row = self._shape
        scale = self._token_s / (fixed + row * self._live)
        return EngineSpeed(fixed * scale, row * scale, row * scale)

    def _begin(self, now_s: float) -> None:
        """Begin a window."""
        self._tokens, self._began_s, self._live_s, self._seen_s = 0, now_s, 0.0, now_s

    def _end(self, now_s: float) -> None:
        """End a window early, as no samples are left; a very short one tells nothing."""
        if self._tokens and now_s - self._began_s > SHORT_S and self._live_s:
            self._take(self._live_s / self._tokens, self._live_s / (now_s - self._began_s))
        self._tokens, self._began_s = 0, math.nan

    def _take(self, token_s: float, live: float) -> None:
        weight = WEIGHT if self._token_s is not None else 1.0
        self._token_s = (1 - weight) * (self._token_s or 0.0) + weight * token_s
        self._live = (1 - weight) * self._live + weight * live
