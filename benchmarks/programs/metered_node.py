"""Run `aedit run` with nodes that write how their CPU time is divided.

    python -m benchmarks.programs.metered_node LINES EVERY run CONFIG --local 1

After every EVERY steps a node appends a `Line` as JSON to the file LINES. torchrun starts it as a node.
"""

import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TRAINING, RECORDS, ROUNDS, REST = "training", "records", "rounds", "rest"
MODULE = "benchmarks.programs.metered_node"
_LINES, _EVERY = "METERED_LINES", "METERED_EVERY"
"""Variables of the environment, for the nodes."""


@dataclass(frozen=True, slots=True)
class Line:
    """CPU seconds of a node up to a step. at_s: of the machine's monotonic clock."""

    step: int
    at_s: float
    process_s: float
    """Of all threads."""
    parts_s: dict[str, float]
    """Of the thread that trains, by part; they add up to its CPU time."""


class Meter:
    """Divides the CPU time of one thread among named parts of its program.

    While a part calls another one, the time is that of the inner one.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        """Count from now on; the time outside all parts is that of `REST`."""
        self._clock = clock
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._part, self._since_s = REST, clock()

    def part(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, whose time is that of a part."""

        @functools.wraps(call)
        def counted(*args: Any, **options: Any) -> Any:
            before = self._enter(name)
            try:
                return call(*args, **options)
            finally:
                self._enter(before)

        return counted

    def parts_s(self) -> dict[str, float]:
        """Return the seconds of each part so far."""
        self._enter(self._part)
        return dict(self._spent_s)

    def _enter(self, part: str) -> str:
        now_s, before = self._clock(), self._part
        self._spent_s[before] += now_s - self._since_s
        self._part, self._since_s = part, now_s
        return before


def meter_node(meter: Meter) -> None:
    """Count what a plain loop would do as training, and apart from it rounds and records."""
    import torch

    from aedit.edit import LayerSync, hooks
    from aedit.launch.node import objective
    from aedit.launch.node.train import TrainingNode
    from aedit.launch.records import PositionLog

    def count(part: str, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, meter.part(part, getattr(owner, name)))

    count(TRAINING, objective, "batch", "loss")
    count(TRAINING, torch.Tensor, "backward")
    count(TRAINING, torch.nn.utils, "clip_grad_norm_")
    count(TRAINING, torch.optim.AdamW, "step", "zero_grad")
    count(ROUNDS, LayerSync, "step")
    count(ROUNDS, hooks.Hook, "__call__")  # landings in a forward pass
    count(RECORDS, TrainingNode, "record_step", "record_round", "record_open")
    count(RECORDS, PositionLog, "trained")


def node() -> int:
    """Train as `python -m aedit.launch.node` does, and write a line after every so many steps."""
    from aedit.launch.node.__main__ import main
    from aedit.launch.node.train import TrainingNode

    meter, path, every = Meter(), Path(os.environ[_LINES]), int(os.environ[_EVERY])
    meter_node(meter)
    evaluate_if_due = TrainingNode.evaluate_if_due

    def after_step(self: TrainingNode) -> None:
        if self.sync.steps % every == 0:
            line = Line(self.sync.steps, time.monotonic(), time.process_time(), meter.parts_s())
            with path.open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")
        evaluate_if_due(self)

    TrainingNode.evaluate_if_due = after_step  # type: ignore[method-assign]
    return main()


def launch(lines: str, every: str, words: list[str]) -> int:
    """Run a command of `aedit` whose nodes are this program."""
    import aedit.launch.processes.run_local as wrapper

    os.environ |= {_LINES: lines, _EVERY: every}
    wrapper.run = functools.partial(wrapper.run, program=("-m", MODULE))
    from aedit.launch.cli import main

    return main(words)


if __name__ == "__main__":
    is_node = "LOCAL_RANK" in os.environ
    sys.exit(node() if is_node else launch(sys.argv[1], sys.argv[2], sys.argv[3:]))
