"""Rollouts that a rank keeps in its node's directory, for views: a bounded sample over the whole run.

`RolloutStore` writes them, one file for each group: `nodes/N/rollouts/RANK/NUMBER.json`; `read_rollouts`
reads those of a run. A number counts the groups that were offered. The store keeps every n-th of them, for
the smallest power of two n at which they fit, and the newest one.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import gcd, isfinite, nan
from pathlib import Path
from typing import Any

from aedit.launch.records.records import BAD_LINE, float_or_nan, text
from aedit.system import write_atomically

FOLDER = "rollouts"
MOST_TOKENS = 1024
"""Tokens of a rollout that are kept, the first ones."""
MOST_PROMPT = 16_384
"""Characters of a prompt that are kept, the last ones."""
NEWEST_EVERY_S = 10.0
"""The newest group is replaced after this time, as writing takes time of the training."""
MOST_FILE_BYTES = 2**23


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptToken:
    """One generated token."""

    id: int
    text: str
    logprob: float
    version: int
    """Policy version that drew it."""
    drafted: bool | None
    """Whether a drafter had proposed it; None if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRollout:
    """One rollout of a kept group. NaN where a value is missing."""

    node: int
    rank: int
    t: float
    """Seconds since the run began."""
    step: int
    """Inner steps of the node when it was trained."""
    position: int
    """Position of the prompt in the run's stream of prompts."""
    sample: int
    prompt: str
    completion: str
    tokens: tuple[KeptToken, ...]
    num_tokens: int
    """Tokens of the rollout, of which `tokens` are the first ones."""
    reward: float
    values: Mapping[str, float]
    """Values of the reward functions before weighting."""
    advantage: float
    finish_reason: str
    servers: tuple[tuple[int, str], ...]
    """First token and name of each part that a rollout server has generated."""


class RolloutStore:
    """Writer of the kept groups of one rank."""

    def __init__(self, directory: Path, most_groups: int, now: Callable[[], float] = time.monotonic) -> None:
        """Keep groups in `directory`, which need not exist.

        Args:
            directory: Of the rank's groups.
            most_groups: Most groups that are kept; 0: none.
            now: Clock in seconds.
        """
        self._directory, self._most, self._now = directory, most_groups, now
        self._kept: list[int] = []
        self._next, self._every, self._written_s = 0, 1, -NEWEST_EVERY_S
        self._step: int | None = None

    def wants(self, step: int) -> bool:
        """Return whether the next group, trained at this inner step, is to be written; else it is counted.

        The first call in a process removes the groups of steps from this one on, which a resume repeats.
        """
        if not self._most:
            return False
        if self._step is None:
            self._resume(step)
        self._step = step
        wanted = self._next % self._every == 0 or self._now() - self._written_s >= NEWEST_EVERY_S
        self._next += not wanted
        return wanted

    def add(self, group: Mapping[str, Any]) -> None:
        """Write the next group, and remove what is one too many. Raises OSError."""
        number, self._next, self._written_s = self._next, self._next + 1, self._now()
        if self._kept and self._kept[-1] % self._every:
            self._remove(self._kept[-1:])
        self._directory.mkdir(parents=True, exist_ok=True)
        write_atomically(self._directory / f"{number:08d}.json", json.dumps(group))
        self._kept.append(number)
        while len(self._kept) > self._most:
            self._every *= 2
            self._remove([each for each in self._kept[:-1] if each % self._every] or self._kept[:1])

    def _resume(self, step: int) -> None:
        found = sorted(self._directory.glob("*.json")) if self._directory.is_dir() else []
        for path in found:
            if not path.stem.isdecimal():
                continue
            with suppress(OSError, *BAD_LINE):
                if int(json.loads(path.read_text(encoding="utf-8"))["step"]) < step:
                    self._kept.append(int(path.stem))
                    continue
            path.unlink(missing_ok=True)
        self._next = self._kept[-1] + 1 if self._kept else 0
        common = gcd(*self._kept[:-1])
        self._every = common & -common or 1  # the largest power of two that divides all but the newest

    def _remove(self, numbers: Sequence[int]) -> None:
        for number in list(numbers):
            self._kept.remove(number)
            (self._directory / f"{number:08d}.json").unlink(missing_ok=True)


def read_rollouts(run_dir: Path, most: int) -> list[KeptRollout]:
    """Return up to `most` kept rollouts of all nodes, the newest groups first; skip files of another form."""
    paths = [path for path in run_dir.glob(f"nodes/*/{FOLDER}/*/*.json") if path.stem.isdecimal()]
    ranked = sorted(
        (path for path in paths if path.parent.name.isdecimal() and path.parents[2].name.isdecimal()),
        key=lambda path: (-int(path.stem), path.parents[2].name),
    )
    found: list[KeptRollout] = []
    for path in ranked:
        if len(found) >= most:
            break
        with suppress(OSError, RecursionError, *BAD_LINE):
            if path.stat().st_size <= MOST_FILE_BYTES:
                found += _group(path, json.loads(path.read_text(encoding="utf-8")))
    return found[:most]


def _group(path: Path, line: Mapping[str, Any]) -> list[KeptRollout]:
    return [
        KeptRollout(
            node=int(path.parents[2].name),
            rank=int(path.parent.name),
            t=float(line["t"]),
            step=int(line["step"]),
            position=int(line["position"]),
            sample=int(each["sample"]),
            prompt=str(line["prompt"]),
            completion=str(each["completion"]),
            tokens=tuple(_tokens(each)),
            num_tokens=int(each["num_tokens"]),
            reward=_number(each["reward"]),
            values={text(name): _number(value) for name, value in each["values"].items()},
            advantage=_number(each["advantage"]),
            finish_reason=text(each["finish_reason"]),
            servers=tuple((int(place), text(name)) for place, name in each["servers"]),
        )
        for each in line["rollouts"]
    ]


def _number(value: object) -> float:
    found = float_or_nan(value)
    return found if isfinite(found) else nan


def _tokens(line: Mapping[str, Any]) -> list[KeptToken]:
    drafted = None if line["drafted"] is None else set(line["drafted"])
    versions = [
        version for version, start, end in line["versions"] for _ in range(start, min(end, MOST_TOKENS))
    ]
    rows = zip(line["ids"], line["texts"], line["logprobs"], versions, strict=False)
    return [
        KeptToken(
            id=int(id),
            text=str(piece),
            logprob=_number(logprob),
            version=int(version),
            drafted=None if drafted is None else place in drafted,
        )
        for place, (id, piece, logprob, version) in enumerate(rows)
    ]
