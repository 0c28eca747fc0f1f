"""Processes that generate load (load.py, attackers.py): asked and answered by lines of JSON."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from aedit.system import end_with_parent
from benchmarks.kit.processes import ROOT
from benchmarks.serve_parts.load import Load, Seen


def _begin(parent: int, cores: Sequence[int]) -> None:
    end_with_parent(parent, signal.SIGTERM)
    os.sched_setaffinity(0, cores)


class Generator:
    """A process that does one job after the other."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def begin(self, job: dict[str, Any]) -> None:
        """Begin a job."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """Wait for the end of the job and return its answer. Raises RuntimeError if the process ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the load generator has ended: its error is above")
        told: dict[str, Any] = json.loads(line)
        return told

    def load(self, load: Load) -> Seen:
        """Put load on a server and return what its clients saw."""
        self.begin(asdict(load))
        return Seen(**self.end())


@contextmanager
def generator(cores: Sequence[int], module: str = "load") -> Iterator[Generator]:
    """Start the process `module` of this folder on these cores; it has ended afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.serve_parts.{module}"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=partial(_begin, os.getpid(), cores),
    )
    try:
        yield Generator(process)
    finally:
        process.kill()
        process.communicate()
