"""Step times of an engine on this machine, measured once: the pace of nodes in virtual time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import OFF, Arm, Drafter, DrafterKind, parse_arm
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Segment, Target
from aedit.spec_rollout.sampling import Prompt, Sampling

ARMS = ("layer:1", "layer:2", "layer:4", "layer:8", "suffix:4", "suffix:8")
ROWS = (1, 2, 4, 8, 16)
CONTEXT = 256
"""Tokens of a sample when steps are measured, all of them alike: in virtual time a step does not take longer
because a text is long."""
WARM, STEPS, ROUNDS = 2, 8, 2
"""Steps of an arm that do not count, steps that do, and repeats over all arms."""
PREFILLS = (32, 512)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of an engine's operations, interpolated linearly between the measured points."""

    rows: tuple[int, ...]
    nodes: tuple[int, ...]
    pass_s: tuple[tuple[float, ...], ...]
    """Seconds of a step without the drafting, by rows and by drafted nodes of each."""
    draft_s: Mapping[str, tuple[float, ...]]
    """Seconds of a draft, by arm and rows."""
    prefill_s: tuple[float, float]
    """Seconds to prefill PREFILLS tokens."""
    copy_s: float
    """Seconds to copy the keys and values of a token from one engine to another."""

    def step(self, rows: int, nodes: int) -> float:
        """Return the seconds of a step of `rows` rows, without the drafting."""
        by_rows = [float(np.interp(nodes, self.nodes, times)) for times in self.pass_s]
        return float(np.interp(rows, self.rows, by_rows))

    def draft(self, arm: Arm, rows: int) -> float:
        """Return the seconds of a draft; at the end of a text chains are shorter than those measured."""
        known = {parse_arm(name): times for name, times in self.draft_s.items()}
        same = sorted((one.depth, times) for one, times in known.items() if one.drafter == arm.drafter)
        by_depth = [float(np.interp(rows, self.rows, times)) for _, times in same]
        return float(np.interp(arm.depth, [depth for depth, _ in same], by_depth))

    def prefill(self, tokens: int) -> float:
        short, long = PREFILLS
        slope = (self.prefill_s[1] - self.prefill_s[0]) / (long - short)
        return max(0.0, self.prefill_s[0] + (tokens - short) * slope)


def measured(target: Target, drafters: Mapping[DrafterKind, Drafter]) -> Times:
    """Return the shortest of several measurements each, in this thread's processor time.

    Load of the machine only makes them longer, and torch must compute on one thread. The drafters must follow
    no other engine; nothing of it stays in the target.
    """
    engine = Engine(target, drafters=drafters)
    engine.clock = engine.cost_clock = time.thread_time
    arms = [OFF, *(arm for arm in map(parse_arm, ARMS) if arm.drafter in drafters)]
    rows = tuple(count for count in ROWS if count <= target.rows)
    found = {count: dict(_steps(engine, arms, count)) for count in rows}
    nodes = sorted({arm.nodes for arm in arms})
    of_nodes = {arm.nodes: arm for arm in reversed(arms)}
    return Times(
        rows=rows,
        nodes=tuple(nodes),
        pass_s=tuple(tuple(found[count][of_nodes[n]][0] for n in nodes) for count in rows),
        draft_s={str(arm): tuple(found[count][arm][1] for count in rows) for arm in arms[1:]},
        prefill_s=(_prefill(target, PREFILLS[0]), _prefill(target, PREFILLS[1])),
        copy_s=_least(lambda: target.write_kv(0, target.read_kv(0, CONTEXT))) / CONTEXT,
    )


def _steps(engine: Engine, arms: Sequence[Arm], rows: int) -> Iterator[tuple[Arm, tuple[float, float]]]:
    """Yield by arm the least seconds of a step without its drafting, and of the drafting."""
    rng = torch.Generator().manual_seed(rows)
    for i in range(rows):
        tokens = torch.randint(32, 96, (CONTEXT - 64,), generator=rng).tolist()
        sampling = Sampling(max_new_tokens=engine.target.max_tokens - len(tokens))
        engine.add(Prompt(tokens=tuple(tokens), sample=i, group=0, sampling=sampling))
    seen: dict[Arm, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for _ in range(ROUNDS):
        for arm in arms:
            engine.chooser = Fixed(arm)
            steps = [engine.step() for _ in range(WARM + STEPS)][WARM:]
            seen[arm] += [(step.total_s - step.draft_s, step.draft_s) for step in steps]
    engine.close()
    for arm, times in seen.items():
        yield arm, (min(rest for rest, _ in times), min(draft for _, draft in times))


def _prefill(target: Target, tokens: int) -> float:
    return _least(lambda: target.prefill([Segment(0, 0, [64] * tokens)]))


def _least(act: Callable[[], object], times: int = 5) -> float:
    found = []
    for _ in range(times):
        began_s = time.thread_time()
        act()
        found.append(time.thread_time() - began_s)
    return min(found)
