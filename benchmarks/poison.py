"""Measure what one bad node of eight, and one to three colluding ones, do to the others.

    python -m benchmarks.poison [--only single|colluding] [--quick]

From its first push on it sends something other than its pseudo-gradients. Bars: malformed and crude pushes
are refused or bounded, the final loss stays within 1 % of the clean run's, and at most 1 % of the correct
nodes' pushes are refused. One liar who knows all honest pushes costs at most 2 % of the gain under the
recommended merge rule, two at most 5 %.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product

from aedit.async_sgd.rules import HubConfig, OuterConfig, PenaltyConfig, Push, StalenessConfig
from aedit.types import Layout
from benchmarks.kit.hubs import layout_of
from benchmarks.kit.processes import in_parallel
from benchmarks.kit.small_llama import llama
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.kit.virtual_hub import Method, Outcome, Setting, train_apart, warm_up
from benchmarks.poison_parts import colluding
from benchmarks.poison_parts.attacks import Attack, attacks

BAD_NODE = 3
CLEAN = "none"
NODES = 8
FULL = Setting(step_s=tuple(1 + 0.01 * n for n in range(NODES)), steps=128, warmup_steps=64)
QUICK = replace(FULL, steps=4, warmup_steps=1, every=2, held_out=16)
COLLUDING = replace(FULL, steps=64)
CLOSE, HONEST_REFUSED = 0.01, 0.01

METHODS = {
    "quorum": Method(
        hub=HubConfig(quorum="all", weights="penalty"),
        pace="steps",
        outer=OuterConfig(kind="nesterov", lr=0.7, momentum=0.5),
    ),
    "async": Method(
        hub=HubConfig(grace=0.0, weights="uniform", staleness=StalenessConfig(rule="constant")),
        penalty=PenaltyConfig(clip=None),
        outer=OuterConfig(kind="delayed-nesterov", lr=1.3, momentum=0.0, delay=NODES),
    ),
}

Results = dict[tuple[str, str], Outcome]


def measure(args: Namespace) -> list[Report]:
    """Return the tables that were asked for."""
    found = []
    if args.only != "colluding":
        found.append(measure_single(args.quick))
    if args.only != "single":
        found.append(colluding.measure(QUICK if args.quick else COLLUDING, args.quick))
    return found


def measure_single(quick: bool) -> Report:
    """Return the table of one bad node."""
    results = run_all(QUICK if quick else FULL, quick)
    return Report(
        "one bad node of eight",
        (
            f"Llama of {FULL.hidden_size} x {FULL.num_layers}, bytes of the stdlib, {FULL.steps} local steps"
            f" per node, a push every {FULL.every}; node {BAD_NODE} attacks from its first push on.",
            "quorum: all are merged together; async: every arrival alone. Shares of the bad node's pushes,"
            " and of the others'.",
        ),
        ("attack", "hub", "loss to clean", "refused", "no weight", "honest pushes lost"),
        tuple(_row(method, name, results) for method, name in results),
        tuple(bar for method in METHODS for bar in _bars(method, results, quick)),
        {f"{method}/{name}": asdict(outcome) for (method, name), outcome in results.items()},
    )


def run_all(setting: Setting, quick: bool) -> Results:
    """Run every attack on every method."""
    names = (CLEAN, "nan", "1000 times") if quick else (CLEAN, *attacks())
    jobs, start = list(product(METHODS, names)), warm_up(setting)
    outcomes = in_parallel(attacked, [(setting, start, *job) for job in jobs])
    return dict(zip(jobs, outcomes, strict=True))


def attacked(setting: Setting, start: bytes, method: str, name: str) -> Outcome:
    """Run one attack."""
    how = METHODS[method]
    if name == CLEAN:
        return train_apart(setting, start, how)
    layout = layout_of(llama(setting.hidden_size, setting.num_layers, setting.seq_len))
    tamper = partial(_tampered, attacks()[name], layout)
    return train_apart(setting, start, replace(how, tamper={BAD_NODE: tamper}))


def _tampered(attack: Attack, layout: Layout, push: Push) -> Push:
    return attack(push, layout.units[push.unit])


def harm(results: Results, method: str, name: str) -> float:
    """Return by how much the run ends above the clean one, as a share."""
    return results[method, name].loss / results[method, CLEAN].loss - 1


def shares(outcome: Outcome, bad: bool) -> tuple[float, float]:
    """Return the shares of refused pushes and of those without weight, of the bad node or of the others."""

    def count(nodes: Sequence[int]) -> int:
        return sum((node == BAD_NODE) == bad for node in nodes)

    tally = outcome.tally
    refused = count([node for node, _ in tally.refused])
    pushes = max(1, count(tally.accepted) + refused)
    return refused / pushes, count(tally.ignored) / pushes


def _row(method: str, name: str, results: Results) -> tuple[str, ...]:
    outcome = results[method, name]
    refused, away = shares(outcome, bad=True)
    return (
        name,
        method,
        f"{100 * harm(results, method, name):+.2f} %",
        percent(refused, 0),
        percent(away, 0),
        percent(sum(shares(outcome, bad=False))),
    )


def _bars(method: str, results: Results, quick: bool) -> tuple[Bar, ...]:
    names = [name for m, name in results if m == method and name != CLEAN]
    worst = max(names, key=lambda name: harm(results, method, name))
    off = harm(results, method, worst)
    honest = max(sum(shares(results[method, name], bad=False)) for name in (CLEAN, *names))
    return (
        Bar(
            f"{method}: worst is {worst!r}, {100 * off:+.2f} % to clean, bar {100 * CLOSE:+.0f} %",
            None if quick else off <= CLOSE,
        ),
        Bar(
            f"{method}: honest pushes that did not count {percent(honest)}, bar {percent(HONEST_REFUSED, 0)}",
            None if quick else honest <= HONEST_REFUSED,
        ),
    )


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", choices=("single", "colluding"), help="one of the two tables")


if __name__ == "__main__":
    main("poison", "What bad nodes of eight do to the final loss.", measure, options=_options)
