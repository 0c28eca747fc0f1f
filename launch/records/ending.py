"""Outcome of a finished run: the node that failed, the cause, and the end of its log."""

import json
import re
import signal
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aedit.types import RunFailed, UserError

LOG_LINES = 15
FAILED = "the run cannot go on: "
"""Begins the message of a `RunFailed`, where its line is written for the launcher."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Files and output of one start of a run."""

    run_dir: Path
    nodes: tuple[int, ...]
    """Indices of the nodes that this machine started."""

    ranks: int
    """Processes per node."""

    attempt: int
    """Number of this start in log names."""

    output: str
    """Output of torchrun, with refusals of its workers, and what they wrote before they had a log."""

    def failure(self) -> str:
        """Return the node that failed, its exit code, and the end of its log."""
        found = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", self.output)
        if not found:
            return f"torchrun failed; {self._last_lines([])}"
        code, rank = (int(number) for number in found[-1])
        if not self.nodes:
            return f"the node failed before it joined the run ({how(code)})"
        node = self.nodes[rank // self.ranks]
        logs = [log for log in self._logs() if log.parent.name == str(node)]
        return f"node {node} failed ({how(code)}); {self._last_lines(logs)}"

    def trained(self) -> bool:
        """Return whether any node took a step in this start; False if the budget was used up before."""
        for node in self.nodes:
            events = _events(self.run_dir / "nodes" / str(node) / "events.jsonl")
            began = next((event["step"] for event in reversed(events) if event.get("event") == "start"), 0)
            ended = next((event["step"] for event in reversed(events) if event.get("event") == "stop"), 0)
            if ended > began:
                return True
        return False

    def _last_lines(self, logs: list[Path]) -> str:
        source = logs[-1] if logs else self.run_dir / "launch.log"
        lines = _tail(source, LOG_LINES) if source.exists() else []
        return "\n".join([f"the end of {source}:", *lines])

    def _logs(self) -> list[Path]:
        """Return the attempt logs of this start, oldest first.

        The directory may also contain those of other nodes.
        """
        found = [log for node in self.nodes for log in self.run_dir.glob(f"nodes/{node}/attempt_*.log")]
        logs = [(attempt_of(log), log) for log in found]
        return [log for number, log in sorted(logs) if number >= self.attempt]


def refusal(output: str) -> str:
    """Return the message of the first UserError or RunFailed of a node in the output of torchrun, or ""."""
    found = re.search(r"^aedit: (.+)\n", output, re.MULTILINE)
    return found[1] if found else ""


def error_of(message: str) -> Exception:
    """Return the error whose line has this message; see `refusal`."""
    return RunFailed(message) if message.startswith(FAILED) else UserError(message)


def indices_of(run_dir: Path, name: str) -> tuple[int, ...]:
    """Return the indices that a hub assigned to the node of this name, from the node directories.

    () if unknown.
    """
    named = (path.parent.name for path in run_dir.glob("nodes/*/name") if path.read_text() == name)
    return tuple(int(index) for index in named if index.isdecimal())


def _events(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines as values; an incomplete one, left by a crash, is skipped."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):
            events.append(json.loads(line))
    return events


def attempt_of(log: Path) -> int:
    """Return K of `attempt_K.log`; 0 for any other file name."""
    number = log.stem.removeprefix("attempt_")
    return int(number) if number.isdecimal() else 0


def _tail(path: Path, num_lines: int) -> list[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        return list(deque((line.rstrip() for line in file if line.strip()), maxlen=num_lines))


def how(code: int) -> str:
    """Return an exit code as text."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
