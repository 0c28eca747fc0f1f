"""Measure policy versions: their bytes, their way over a thin wire, and the pauses of an engine.

    python -m benchmarks.versions [--only bytes wire pauses] [--steps 33] [--size 10m] [--minutes M] [--quick]
        [--reward arithmetic|letters] [--max-tokens N]

Three parts, each a file of versions_parts/: the bytes of a transfer at three learning rates, to a receiver
that is 1 to 32 versions behind; the time until an engine behind 20 Mbit/s and 80 ms uses a new version; and
the pauses of an engine whose weights change while it generates. The versions are those of GRPO steps on
scratchpad arithmetic, as in `benchmarks.rl_speed`; the policy is trained first if it does not exist. One
that has trained for minutes only solves nothing: `--reward letters` counts a letter, which each text has.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from benchmarks.drift import reward as letters
from benchmarks.kit import tun_link
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.policies import ROOT, Policy, new_model
from benchmarks.policies import Size as PolicySize
from benchmarks.rl_speed import FULL, QUICK, Size, rewarded
from benchmarks.versions_parts import pauses, sizes, wire
from benchmarks.versions_parts.pauses import Amount, Pauses
from benchmarks.versions_parts.sizes import BEHIND, Sizes
from benchmarks.versions_parts.training import Reward, Trained, train
from benchmarks.versions_parts.wire import Arrival

ABOUT = "Bytes of a policy version, its way over a thin wire, and pauses of an engine that takes it over."
RATES = (1e-6, 1e-5, 1e-4)
REWARDS: dict[str, Reward] = {"arithmetic": rewarded, "letters": letters}
RATE_MBIT = 20.0
SENT_OVER_WIRE = 4
"""Versions of a run that travel over the wire, each as a patch and with all values."""
LONGEST_STEPS = 1.5
"""Wanted: the longest pause, in steps that start a sample: a step, a chunk, and half for the machine."""
Part = Literal["bytes", "wire", "pauses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement."""

    size: Size
    steps: int
    rates: tuple[float, ...]
    reward: Reward
    paused: Policy
    amount: Amount
    root: Path = ROOT
    only: tuple[Part, ...] = get_args(Part)


SHORT = Plan(
    size=QUICK.size,
    steps=4,
    rates=RATES[-1:],
    reward=letters,
    paused=QUICK.size.policy,
    amount=Amount(rows=2, prompt=8, answer=24, steps=6, versions=2, prefill_tokens=8),
)


def measure(plan: Plan, say: Callable[[str], object]) -> Iterator[Report]:
    """Yield the reports of the parts that are asked for."""
    parts, runs = plan.only, []
    for lr in plan.rates if set(parts) != {"pauses"} else ():
        runs.append(train(plan.size, lr, plan.steps, plan.root, plan.reward))
        say(f"lr {lr:g}: {len(runs[-1].versions)} versions")
    if "bytes" in parts:
        yield bytes_report([sizes.measure(run) for run in runs], plan)
    if "wire" in parts:
        yield over_wire(runs, plan)
    if "pauses" in parts:
        found = []
        for way in pauses.WAYS:
            found.append(pauses.measure(new_model(plan.paused), way, plan.amount))
            say(f"{way}: longest pause {found[-1].of(1.0):.3f} s")
        yield pauses_report(found, plan)


def bytes_report(found: Sequence[Sizes], plan: Plan) -> Report:
    """Return the table of bytes."""
    behind = [apart for apart in BEHIND if apart in found[0].sent]
    num_values = sum(p.numel() for p in new_model(plan.size.policy).parameters())
    return Report(
        name=f"Bytes of a version, as a share of {2 * num_values / 1e6:.1f} MB of bf16 values",
        method=(
            f"GRPO with AdamW, {plan.size.groups} prompts x {plan.size.samples} samples per step, policy"
            f" {plan.size.policy.size}, {plan.steps} steps per learning rate; fp32 weights, cast to bf16.",
            "Medians over up to 8 pairs of versions; in brackets the share of weights that differ. Every"
            " transfer is decoded and compared. Seconds are processor time for 1e8 weights, 1 behind.",
        ),
        columns=("learning rate", *(f"{n} behind" for n in behind), "no base", "encode s", "decode s"),
        rows=tuple(
            (
                f"{one.lr:g}",
                *(
                    f"{percent(_median(one.sent[n]), 2)} [{percent(_median(one.changed[n]), 1)}]"
                    for n in behind
                ),
                percent(one.whole),
                f"{one.encode_s:.1f}",
                f"{one.decode_s:.1f}",
            )
            for one in found
        ),
        bars=(),
        figures={f"{one.lr:g}": asdict(one) for one in found},
    )


def over_wire(runs: Sequence[Trained], plan: Plan) -> Report:
    """Return the table of times over the wire, or a report that says why there is none."""
    name = f"Seconds from publication to use over {RATE_MBIT:g} Mbit/s and {2e3 * wire.DELAY_S:.0f} ms"
    if why := tun_link.why_not():
        return Report(name, (why,), (), (), (), {})
    rows, figures = [], {}
    for run in runs:
        some = replace(run, versions=run.versions[: SENT_OVER_WIRE + 1])
        for way in ("dense", "patch"):
            found = wire.measure(some, plan.size.policy, RATE_MBIT, way == "dense")
            figures[f"{run.lr:g} {way}"] = [asdict(each) for each in found]
            rows.append((f"{run.lr:g}", way, *_arrival_cells(found)))
    return Report(
        name=name,
        method=(
            "Two processes; one publishes a version, the other waits for it (`Newest`), fetches, checks and"
            " gives it to its engine.",
            f"Medians over {SENT_OVER_WIRE} versions; `dense` has no base. The hash of the new version and"
            " the making of the transfer are part of the time.",
        ),
        columns=("learning rate", "sent as", "fetched s", "in use s", "MB on the wire"),
        rows=tuple(rows),
        bars=(),
        figures=figures,
    )


def _arrival_cells(arrivals: Sequence[Arrival]) -> tuple[str, str, str]:
    fetched, used = _median([a.fetched_s for a in arrivals]), _median([a.used_s for a in arrivals])
    return f"{fetched:.2f}", f"{used:.2f}", f"{_median([a.num_bytes for a in arrivals]) / 1e6:.2f}"


def pauses_report(found: Sequence[Pauses], plan: Plan) -> Report:
    """Return the table of pauses."""
    amount, usual = plan.amount, found[0]
    step_s = usual.of(0.5)
    by_way = {one.way: one for one in found}
    longest_s = by_way["recompute"].of(1.0)
    limit_s = LONGEST_STEPS * usual.start_s
    return Report(
        name="Milliseconds between two steps of an engine whose weights change",
        method=(
            f"Policy {plan.paused.size} in fp32 on one thread, {amount.rows} samples of {amount.prompt} and"
            f" {amount.answer} tokens, {amount.versions} versions, one every {amount.steps} steps;"
            f" at most {amount.prefill_tokens} tokens are computed between two steps.",
            "`at once` is `Engine.update_weights` between two steps, as before; `recompute` and `finish` are"
            f" those of `EngineHost.swap`. A step that starts a sample, and computes its prompt, takes"
            f" {1e3 * usual.start_s:.1f} ms without new weights (median of {len(usual.starts_s)}).",
        ),
        columns=("new weights", "steps", "median", "p99", "longest", "to the median without", "no token"),
        rows=tuple(
            (
                one.way,
                str(len(one.gaps_s)),
                *(f"{1e3 * one.of(q):.1f}" for q in (0.5, 0.99, 1.0)),
                f"{one.of(1.0) / step_s:.1f}",
                f"{1e3 * one.silent_s:.1f}",
            )
            for one in found
        ),
        bars=(
            Bar(
                f"recompute: longest pause {1e3 * longest_s:.0f} ms, wanted <= {LONGEST_STEPS:g} x a step"
                f" that starts a sample, {1e3 * limit_s:.0f} ms",
                longest_s <= limit_s,
            ),
        ),
        figures={one.way: asdict(one) for one in found},
    )


def _median(numbers: Sequence[float]) -> float:
    ordered = sorted(numbers)
    return ordered[len(ordered) // 2]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=get_args(Part), default=get_args(Part), help="parts")
    parser.add_argument("--steps", type=int, default=33, help="versions after the first")
    parser.add_argument("--size", choices=get_args(PolicySize), default=FULL.size.policy.size)
    parser.add_argument(
        "--minutes", type=float, default=FULL.size.policy.minutes, help="of the policy's training"
    )
    parser.add_argument("--reward", choices=tuple(REWARDS), default="arithmetic")
    parser.add_argument("--max-tokens", type=int, default=FULL.size.max_tokens, help="of prompt and answer")
    parser.add_argument("--root", type=Path, default=ROOT, help="where policies are kept")


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the settings of a command line."""
    if args.quick:
        return replace(SHORT, root=args.root, only=tuple(args.only))
    policy = Policy(size=args.size, minutes=args.minutes)
    return Plan(
        size=replace(FULL.size, policy=policy, max_tokens=args.max_tokens),
        steps=args.steps,
        rates=RATES,
        reward=REWARDS[args.reward],
        paused=Policy(size="100m"),
        amount=Amount(),
        root=args.root,
        only=tuple(args.only),
    )


def _asked(args: argparse.Namespace) -> list[Report]:
    torch.set_num_threads(1)
    return list(measure(plan_of(args), lambda text: print(text, file=sys.stderr)))


if __name__ == "__main__":
    main("versions", ABOUT, _asked, options=_options)
