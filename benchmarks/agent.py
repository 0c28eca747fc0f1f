"""Measure how much a node agent slows its trainer, as a process and as threads inside the trainer.

One trainer steps a small model on one thread. Before each block of steps it hands all units to an agent,
which encodes them, pushes them to a real hub in a process of its own, pulls the new anchors and answers. Only
steps that begin before the last answer count. Blocks with a process, with threads and without an agent take
turns, so that the load of the machine is the same for all. The time in which the trainer waits for a
processor is left out: what remains of a step is computing, and waiting for other threads.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import aedit
from aedit.edit import SyncUnit, find_units, flat_layout
from aedit.launch.data import batch
from aedit.proto.agent import AgentLink, AgentPlan, start_agent
from benchmarks.kit.processes import hub
from benchmarks.kit.small_llama import corpus, inner_step, llama
from benchmarks.kit.statistics import median, percent
from benchmarks.kit.tables import Bar, Report, main

SEQ_LEN, BATCH_SIZE, LR = 64, 2, 1e-6
STEPS_ALONE = 6
"""In a block without an agent."""
START_S = 60.0
ANSWER_S = 60.0
MODES = ("none", "process", "thread")
RUN = """
name = "agent"
[train]
steps = 1000000000
[edit]
every = 64
landing = "arrival"
[outer]
kind = "average"
lr = 1.0
[hub]
address = "127.0.0.1:0"
quorum = 1
codec = "{codec}"
fsync = false
[hub.push_filter]
threshold = 1e9
"""


@dataclass(frozen=True, slots=True)
class Block:
    """Seconds of each step, and until the last answer."""

    steps_s: tuple[float, ...]
    answered_s: float


class Trainer:
    """Steps one model and, between steps, hands its units to the link it is given."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inner = torch.optim.AdamW(model.parameters(), lr=LR)
        self._samples = corpus(SEQ_LEN).train
        self.units: Sequence[SyncUnit] = find_units(model, "auto")
        self._drawn = 0

    def step(self) -> float:
        """Take a step; return its seconds."""
        began_s = undisturbed_s()
        indices = np.arange(self._drawn, self._drawn + BATCH_SIZE, dtype=np.int64) % len(self._samples)
        self._drawn += BATCH_SIZE
        inner_step(self._model, self._inner, batch(self._samples, indices))
        return undisturbed_s() - began_s

    def block(self, member: "Member | None") -> Block:
        """Hand over all units, and step until all answers have arrived."""
        began_s = time.perf_counter()
        if member:
            member.send(self.units)
        steps_s: list[float] = []
        while not member.is_answered() if member else len(steps_s) < STEPS_ALONE:
            steps_s.append(self.step())
            if time.perf_counter() - began_s > ANSWER_S:
                raise TimeoutError(f"no answer from the hub within {ANSWER_S:g} s")
        return Block(tuple(steps_s), time.perf_counter() - began_s)


class Member:
    """Node of the hub's run that sends pseudo-gradients close to zero."""

    def __init__(self, link: AgentLink, versions: Sequence[int]) -> None:
        self.link, self._versions, self._seq = link, list(versions), 0

    def send(self, units: Sequence[SyncUnit]) -> None:
        self._seq += 1
        for i, unit in enumerate(units):
            value = unit.flat().numpy()
            self.link.outbox[i][:] = value * 1e-3
            self.link.written(i, self._seq)
            self.link.send(i, self._seq, base=self._versions[i], steps=1, tokens=1)

    def is_answered(self) -> bool:
        answers = [self.link.answer(i, self._seq) for i in range(len(self._versions))]
        self._versions = [a.version if a else v for a, v in zip(answers, self._versions, strict=True)]
        return all(answers)


def measure(quick: bool) -> Report | str:
    torch.set_num_threads(1)
    sizes = ((64, 2),) if quick else ((128, 4), (256, 4))
    rounds = 3 if quick else 10
    rows: list[tuple[str, ...]] = []
    found: dict[str, dict[str, float]] = {}
    for hidden_size, num_layers in sizes:
        for codec in ("bf16", "e3m0"):
            trainer = Trainer(llama(hidden_size, num_layers, SEQ_LEN))
            params = sum(unit.numel for unit in trainer.units)
            times = compare(trainer, codec, rounds)
            name = f"{params / 1e6:.1f} M, {codec}"
            found[name] = {mode: typical(blocks) for mode, blocks in times.items()}
            rows.append(row(name, times))
    return Report(
        "What a trainer notices of its agent",
        (
            "Steps of a trainer (1 thread) while all units are pushed, merged and pulled, without its waits",
            "for a processor: agent as a process, as threads of the trainer, none. Medians, taking turns.",
        ),
        ("model, codec", "step alone", "process", "", "threads", "", "answer: process", "threads"),
        tuple(rows),
        (_bar(found, quick),),
        {"medians": found, "cpus": os.cpu_count()},
    )


def compare(trainer: Trainer, codec: str, rounds: int) -> dict[str, list[Block]]:
    """Run blocks of each mode in turn; return them by mode."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as held:
        address = held.enter_context(hub(Path(directory), RUN.format(codec=codec))).address
        members: dict[str, Member | None] = {"none": None}
        for mode in ("process", "thread"):
            plan = agent_plan(address, codec, trainer.units, mode)
            link = start_agent(plan, ranks=1, mode="process" if mode == "process" else "thread")
            held.callback(link.stop)
            for unit, anchor in zip(trainer.units, link.anchors, strict=True):
                anchor[:] = unit.flat().numpy()
            members[mode] = Member(link, link.join(START_S))
        times: dict[str, list[Block]] = {mode: [] for mode in MODES}
        for mode in MODES:
            trainer.block(members[mode])
        for i in range(rounds):
            for mode in MODES[i % 3 :] + MODES[: i % 3]:
                times[mode].append(trainer.block(members[mode]))
    return times


def agent_plan(address: str, codec: str, units: Sequence[SyncUnit], name: str) -> AgentPlan:
    return AgentPlan(
        addresses=(address,),
        name=name,
        run="agent",
        version=aedit.__version__,
        units=flat_layout.layout(units).units,
        num_samples=1,
        codec=codec,
    )


def undisturbed_s() -> float:
    """Return this thread's time without its waits for a processor, where the kernel counts those.

    Elsewhere it is the wall clock.
    """
    try:
        waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except OSError:
        waited_ns = 0
    return time.perf_counter() - waited_ns * 1e-9


def typical(blocks: Sequence[Block]) -> float:
    """Return the median over all steps of all blocks, in seconds."""
    return median([step_s for block in blocks for step_s in block.steps_s])


def row(name: str, times: dict[str, list[Block]]) -> tuple[str, ...]:
    alone_s = typical(times["none"])
    cells = [name, f"{1e3 * alone_s:.1f} ms"]
    for mode in ("process", "thread"):
        step_s = typical(times[mode])
        cells += [
            f"{1e3 * step_s:.1f} ms",
            f"{'+' if step_s >= alone_s else ''}{percent(step_s / alone_s - 1)}",
        ]
    cells += [f"{median([b.answered_s for b in times[mode]]):.2f} s" for mode in ("process", "thread")]
    return tuple(cells)


def _bar(found: dict[str, dict[str, float]], quick: bool) -> Bar:
    better = [times["process"] <= times["thread"] for times in found.values()]
    count = f"{sum(better)} of {len(better)}"
    text = f"steps beside an agent process are no longer than beside its threads ({count})"
    return Bar(text, None if quick else sum(better) > len(better) / 2)


if __name__ == "__main__":
    main("agent", "What does a trainer notice of its node agent?", measure)
