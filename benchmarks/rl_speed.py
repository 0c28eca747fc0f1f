"""Measure the time of a step of reinforcement learning, plain and with a drafter trained in waits.

    python -m benchmarks.rl_speed [--only steps|waits] [--seeds 0,1,2] [--size 10m] [--minutes M] [--quick]
        [--drafter FILE]

Two parts, each a file of rl_speed_parts/: steps (the same samples made plainly and speculating, on two
nodes) and waits (a node of fixed pace: use of its waits, and what the trainer costs its steps). The policy is
trained first if it does not exist (`benchmarks.policies`).
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.idle_parts.foreground import Ratio
from benchmarks.kit.statistics import Interval, median, percent, quantile
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.policies import ROOT, Policy
from benchmarks.policies import Size as PolicySize
from benchmarks.rl_speed_parts.dealing import Size
from benchmarks.rl_speed_parts.steps import WAYS, Step, Way, World
from benchmarks.rl_speed_parts.waits import Amount, Waited, measure_waits

ABOUT = "Time of a step of reinforcement learning: plain, and speculating with a drafter trained in waits."
STEPS_METHOD = (
    "GRPO steps of two nodes that average after each step; each makes the same samples in both ways, in"
    " random order, on one thread, and trains once; times are processor time.",
    "Medians over the measured steps [95 % by bootstrap]. Before them node 0's drafter trains from random"
    " weights on rollouts of the first policy; in them it trains in node 0's waits alone, 85 % of which are"
    " used. Node 1 trains none. The first step of a seed is not measured: the choice learns in it.",
)
WAITS_METHOD = (
    "A node whose waits have a given length, on two threads, with the drafter's trainer in its waits; steps"
    " are decoded plainly with a learning rate of 0.",
    "Ratios are of steps on the same samples after waits of one length, in random order; 95 % by bootstrap.",
)
FASTER, TAIL, USED, SHARED = 1.5, 6.0, 0.85, 0.95
COST, HARM, AA_WIDTH, PAIRS = 1.01, 1.02, 0.06, 40
RUN_IN_SEED = 1000
Part = Literal["steps", "waits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement."""

    size: Size
    amount: Amount
    seeds: tuple[int, ...] = (0, 1, 2)
    root: Path = ROOT
    only: Part | None = None
    quick: bool = False
    drafter: Path | None = None
    """File of the drafter with which the steps begin. Where there is none yet, it is written."""


FULL = Plan(
    size=Size(policy=Policy(minutes=26.0)),
    amount=Amount(windows=8, windows_s=(1.0, 2.0), turns=60, waits_s=(0.02, 0.1)),
)
QUICK = Plan(
    size=Size(
        policy=Policy(size="quick", minutes=0.2),
        groups=2,
        samples=3,
        max_tokens=256,
        practice=2,
        learned_s=0.1,
        steps=2,
    ),
    amount=Amount(windows=1, windows_s=(1.0, 1.1), turns=3, waits_s=(0.01, 0.02), new_tokens=8, niceness=0),
    seeds=(0,),
    quick=True,
)


@dataclass(frozen=True, slots=True)
class Seed:
    """One run."""

    steps: tuple[Step, ...]
    """Those that are measured."""
    used_s: float
    """Processor seconds of the trainer in the waits of these steps."""
    shared: float
    """Acceptance on the node that never trained a drafter over that on the other."""


def drafter_of(plan: Plan, say: Callable[[str], None]) -> dict[str, Tensor]:
    """Return the drafter of the plan's file, or one that is trained now."""
    if plan.drafter is None:
        return learned(plan, say)
    if not plan.drafter.exists():
        save_file(learned(plan, say), plan.drafter)
    return load_file(plan.drafter)


def learned(plan: Plan, say: Callable[[str], None]) -> dict[str, Tensor]:
    """Return a drafter that has been trained from random weights on, in windows alone."""
    with World(plan.size, RUN_IN_SEED, plan.root) as world:
        for number in range(plan.size.practice):
            world.practise(number, plan.size.learned_s * (number + 1) / plan.size.practice)
            say(f"before the steps: batch {number} of rollouts, trainer {world.used_s:.1f} s")
        if world.used_s < plan.size.learned_s:
            raise TimeoutError(f"the trainer had {world.used_s:.1f} s only: the machine is too busy")
        world.learner.adopt()
        status = world.learner.status()
        say(f"drafter: {status['steps']} microbatches, {status['published']} published; {status['training']}")
        return world.learner.state()


def run(plan: Plan, seed: int, drafter: Mapping[str, Tensor], say: Callable[[str], None]) -> Seed:
    """Take the steps of one seed; drafter: where it begins."""
    steps = []
    with World(plan.size, seed, plan.root, drafter) as world:
        for _ in range(plan.size.warm):
            world.step(("speculating",))
        for number in range(plan.size.steps):
            steps.append(world.step())
            say(f"seed {seed}, step {number}: {steps[-1].speedup:.2f} x; {_speculating(steps[-1])}")
        return Seed(tuple(steps), world.used_s, world.shared())


def _speculating(step: Step) -> str:
    done = step.ways["speculating"]
    solved = f"{percent(step.solved, 0)} solved, longest {max(step.lengths)}"
    return f"{done.seconds:.2f} s, {done.tokens_per_pass:.2f} tokens per pass, {solved}"


def measure(plan: Plan, say: Callable[[str], None]) -> list[Report]:
    reports = []
    if plan.only != "waits":
        torch.set_num_threads(1)
        drafter = drafter_of(plan, say)
        reports.append(steps_report([run(plan, seed, drafter, say) for seed in plan.seeds], plan))
    if plan.only != "steps":
        reports.append(waits_report(measure_waits(plan.size, plan.amount, plan.root), plan))
    return reports


# --- steps


def steps_report(seeds: Sequence[Seed], plan: Plan) -> Report:
    steps = [step for seed in seeds for step in seed.steps]
    lengths = [length for step in steps for length in step.lengths]
    p50, p99 = quantile(lengths, 0.5), quantile(lengths, 0.99)
    name = f"{len(seeds)} seeds x {plan.size.steps} steps of 2 nodes x {plan.size.groups} prompts x"
    name += f" {plan.size.samples} samples; lengths p50 {p50:.0f}, p99 {p99:.0f}"
    return Report(
        name=name,
        method=STEPS_METHOD,
        columns=(
            "way",
            "step s",
            "of plain",
            "rollouts",
            "rewards",
            "training",
            "waiting",
            "per pass",
            "arms",
        ),
        rows=tuple(_row(way, steps) for way in WAYS),
        bars=tuple(_judged(list(_steps_bars(seeds, plan, p99 / p50)), plan.quick)),
        figures={"seeds": [asdict(seed) for seed in seeds]},
    )


def _row(way: Way, steps: Sequence[Step]) -> tuple[str, ...]:
    done = [step.ways[way] for step in steps]
    nodes = [node for one in done for node in one.nodes]
    parts = ("rollouts_s", "rewards_s", "training_s")
    whole_s = sum(len(one.nodes) * one.seconds for one in done)
    shares = [sum(getattr(node, part) for node in nodes) / whole_s for part in parts]
    shares.append(sum(sum(one.waits_s) for one in done) / whole_s)
    arms: dict[str, int] = {}
    for one in done:
        for arm, count in one.arms.items():
            arms[arm] = arms.get(arm, 0) + count
    often = sorted(arms.items(), key=lambda pair: -pair[1])[:3]
    ratio = Interval.of(
        [one.seconds / step.ways["plain"].seconds for one, step in zip(done, steps, strict=True)]
    )
    return (
        way,
        f"{median([one.seconds for one in done]):.2f}",
        str(ratio),
        *(percent(share) for share in shares),
        f"{median([one.tokens_per_pass for one in done]):.2f}",
        ", ".join(f"{arm} {percent(count / sum(arms.values()), 0)}" for arm, count in often),
    )


def _steps_bars(seeds: Sequence[Seed], plan: Plan, tail: float) -> Iterator[Bar]:
    steps = [step for seed in seeds for step in seed.steps]
    faster, rollouts = (
        Interval.of([getattr(step, name) for step in steps]) for name in ("speedup", "rollout_speedup")
    )
    each = ", ".join(f"{median([step.speedup for step in seed.steps]):.2f}" for seed in seeds)
    text = f"step: {faster} x faster (seeds {each}; rollouts alone {rollouts}), bar {FASTER}"
    yield Bar(text, faster.middle >= FASTER)
    yield Bar(f"lengths: p99 / p50 is {tail:.1f}, bar {TAIL:g}", tail >= TAIL)
    same = [step.same for step in steps]
    tokens, ties, other = (sum(getattr(one, n) for one in same) for n in ("tokens", "ties", "differences"))
    yield Bar(
        f"{tokens} tokens equal, {ties} near ties of fp32 apart; other differences: {other}, bar 0", not other
    )
    shared = median([seed.shared for seed in seeds])
    lowest = min(seed.shared for seed in seeds)
    text = f"acceptance without own training / with: {shared:.3f}, lowest {lowest:.3f}, bar {SHARED}"
    yield Bar(text, shared >= SHARED)
    used = [seed.used_s for seed in seeds]
    text = f"trainer: {plan.size.learned_s:g} s before and {median(used):.0f} s in the steps, all in waits"
    yield Bar(
        f"{text}; steps with a gradient in {percent(median([s.trained for s in steps]), 0)} of tokens", None
    )


# --- waits


def waits_report(seen: Waited, plan: Plan) -> Report:
    shares = [one.cpu_s / one.idle_s for one in seen.harvests]
    rows: list[tuple[str, ...]] = [
        (
            "trainer busy / waits of 1 s and more",
            str(len(shares)),
            percent(seen.used),
            "",
            percent(min(shares)),
        ),
        ("trainer's time outside of waits", "", percent(seen.outside, 2), "", ""),
    ]
    names = {
        "same": "step: no drafter beside no drafter (A/A)",
        "drafter": "step: drafter that trains in waits",
        "control": "step: control, trainer goes on during the step",
    }
    rows += [_ratio_row(names[name], ratio) for name, ratio in seen.ratios.items()]
    return Report(
        name="A drafter's training in the waits of a node of fixed pace",
        method=WAITS_METHOD,
        columns=("what", "n", "middle", "95 %", "worst"),
        rows=tuple(rows),
        bars=tuple(_judged(list(_waits_bars(seen)), plan.quick)),
        figures=asdict(seen),
    )


def _ratio_row(name: str, ratio: Ratio) -> tuple[str, ...]:
    spread = f"{ratio.low:.3f} to {ratio.high:.3f}"
    return name, str(ratio.num_pairs), f"{ratio.middle:.3f}", spread, f"{ratio.worst:.2f}"


def _waits_bars(seen: Waited) -> Iterator[Bar]:
    yield Bar(f"waits of 1 s and more used: {percent(seen.used)}, bar {percent(USED, 0)}", seen.used >= USED)
    same, cost, harm = (seen.ratios[name] for name in ("same", "drafter", "control"))
    yield Bar(
        f"the control shows the harm: {harm.middle:.2f}, at least {harm.low:.2f}, bar {HARM}", harm.low > HARM
    )
    # Without harm in the control, or with two like series that differ, nothing could be seen here.
    can_tell = harm.low > HARM and same.high - same.low <= AA_WIDTH and cost.num_pairs >= PAIRS
    text = f"step with a drafter: {cost.middle:.3f}, {cost.low:.3f} to {cost.high:.3f}, bar {COST}"
    text += f" (A/A {same.middle:.3f}, {same.low:.3f} to {same.high:.3f})"
    yield Bar(text, cost.middle <= COST if can_tell else None)


def _judged(bars: Sequence[Bar], quick: bool) -> list[Bar]:
    """Return the bars; a quick run decides nothing but that the tokens are equal."""
    return [replace(bar, passed=None) if quick and "tokens equal" not in bar.text else bar for bar in bars]


# --- command line


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=get_args(Part))
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--size", choices=get_args(PolicySize), default=FULL.size.policy.size)
    parser.add_argument(
        "--minutes", type=float, default=FULL.size.policy.minutes, help="of the policy's training"
    )
    parser.add_argument(
        "--learned", type=float, default=FULL.size.learned_s, help="seconds of training before the steps"
    )
    parser.add_argument("--steps", type=int, default=FULL.size.steps, help="steps that are")
    parser.add_argument("--drafter", type=Path, help="file to begin with; without one it is written")
    parser.add_argument("--root", type=Path, default=ROOT, help="where policies are kept")


def _asked(args: argparse.Namespace) -> list[Report]:
    say: Callable[[str], Any] = Console(stderr=True).print
    if args.quick:
        return measure(replace(QUICK, only=args.only, root=args.root, drafter=args.drafter), say)
    policy = Policy(size=args.size, minutes=args.minutes)
    size = replace(FULL.size, policy=policy, learned_s=args.learned, steps=args.steps)
    seeds = tuple(int(seed) for seed in args.seeds.split(","))
    plan = replace(FULL, size=size, seeds=seeds, only=args.only, root=args.root, drafter=args.drafter)
    return measure(plan, say)


if __name__ == "__main__":
    main("rl_speed", ABOUT, _asked, options=_options)
