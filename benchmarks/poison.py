"""Measure what one bad node of eight, and one to three colluding ones, do to the others.

    python -m benchmarks.poison [--only single|colluding] [--quick]

From its first push on it sends something other than its pseudo-gradients. Bars: malformed and crude pushes
are refused or bounded, the final loss stays within 1 % of the clean run's, and at most 1 % of the correct
nodes' pushes are refused. One liar who knows all honest pushes costs at most 2 % of the gain under the
recommended merge rule, two at most 5 %.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from statistics import NormalDist

import numpy as np

from aedit.async_sgd.inprocess import make_push
from aedit.async_sgd.rules import (
    ArrayValues,
    HubConfig,
    OuterConfig,
    PenaltyConfig,
    Push,
    PushFilterConfig,
    StalenessConfig,
    Vector,
)
from aedit.types import Layout, UnitLayout
from benchmarks.kit.paced import layout_of
from benchmarks.kit.processes import in_parallel
from benchmarks.kit.small_llama import llama
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.kit.two_domains import held_out_loss
from benchmarks.kit.virtual_hub import Method, Outcome, Setting, start_model, train_apart, warm_up

# -- pushes that a broken or malicious node may send instead of its pseudo-gradients


Attack = Callable[[Push, UnitLayout], Push]


def values_of(push: Push, layout: UnitLayout) -> Vector:
    """Return all values of the push."""
    return push.values.read(0, layout.numel)


def _with(push: Push, layout: UnitLayout, values: Vector) -> Push:
    honest = {name: getattr(push, name) for name in ("node", "unit", "seq", "base", "steps", "tokens")}
    return make_push(values, layout, **honest)


def _set(number: float) -> Attack:
    def attack(push: Push, layout: UnitLayout) -> Push:
        values = values_of(push, layout)
        values[len(values) // 2] = number
        return _with(push, layout, values)

    return attack


def _times(factor: float) -> Attack:
    return lambda push, layout: _with(push, layout, values_of(push, layout) * np.float32(factor))


def _flipped_bits(push: Push, layout: UnitLayout) -> Push:
    """Flip a random bit of every thousandth number."""
    rng = np.random.default_rng(push.seq)
    values = values_of(push, layout)
    at = rng.integers(0, len(values), max(1, len(values) // 1000))
    values.view(np.uint32)[at] ^= np.uint32(1) << rng.integers(0, 32, len(at)).astype(np.uint32)
    return _with(push, layout, values)


class _Replay:
    """Sends the first push of each unit repeatedly under new numbers."""

    def __init__(self) -> None:
        self._first: dict[int, Vector] = {}

    def __call__(self, push: Push, layout: UnitLayout) -> Push:
        return _with(push, layout, self._first.setdefault(push.unit, values_of(push, layout)))


def _longer(push: Push, layout: UnitLayout) -> Push:
    values = np.concatenate([values_of(push, layout)] * 2)
    return replace(push, values=ArrayValues(values), norms=(*push.norms, 1.0))


def _other_model(push: Push, layout: UnitLayout) -> Push:
    return replace(push, norms=push.norms[:-1], values=ArrayValues(values_of(push, layout)[:-1]))


def _noise(push: Push, layout: UnitLayout) -> Push:
    noise = np.random.default_rng(push.seq).normal(size=layout.numel)
    return _with(push, layout, (noise * 1e6).astype(np.float32))


def attacks() -> dict[str, Attack]:
    """Return the attacks by name; each may be used by one node of one run."""
    return {
        "nan": _set(np.nan),
        "inf": _set(np.inf),
        "1000 times": _times(1000.0),
        "10 times": _times(10.0),
        "sign flipped": _times(-1.0),
        "sign flipped, 10 times": _times(-10.0),
        "noise": _noise,
        "flipped bits": _flipped_bits,
        "replay": _Replay(),
        "oversized": _longer,
        "other model": _other_model,
    }


# -- liars that know every honest push of a round and act together


Lie = Callable[[list[Vector], Vector, int, int], Vector]
"""(honest pushes, the liar's own honest push, number of liars, number of nodes) -> what each liar sends."""


def little_is_enough(honest: list[Vector], own: Vector, liars: int, nodes: int) -> Vector:
    """Return mean - z deviation of each element (ALIE, Baruch et al. 2019, arXiv:1902.06156).

    z: of the paper, at least 1: with few nodes the paper's is near 0, and what hides within one deviation is
    hard to tell in any case.
    """
    needed = nodes // 2 + 1 - liars
    share = (nodes - liars - needed) / (nodes - liars)
    z = max(1.0, NormalDist().inv_cdf(share) if 0 < share < 1 else 0.0)
    lie: Vector = (np.mean(honest, axis=0) - z * np.std(honest, axis=0)).astype(np.float32)
    return lie


def inner_product(epsilon: float) -> Lie:
    """Return the lie -epsilon times the mean (IPM, Xie et al. 2020, arXiv:1903.03936)."""

    def lie(honest: list[Vector], own: Vector, liars: int, nodes: int) -> Vector:
        mean: Vector = np.mean(honest, axis=0)
        return (-epsilon * mean).astype(np.float32)

    return lie


def flipped_at_honest_length(honest: list[Vector], own: Vector, liars: int, nodes: int) -> Vector:
    """Return the mean with its sign flipped, as long as an honest push."""
    mean: Vector = np.mean(honest, axis=0)
    usual = float(np.median([np.linalg.norm(x) for x in honest]))
    return (-mean * usual / max(float(np.linalg.norm(mean)), 1e-30)).astype(np.float32)


def random_at(times: float) -> Lie:
    """Return the lie of a random direction, the same for all liars, `times` as long as an honest push."""

    def lie(honest: list[Vector], own: Vector, liars: int, nodes: int) -> Vector:
        noise = np.random.default_rng(len(own)).normal(size=len(own))
        usual = float(np.median([np.linalg.norm(x) for x in honest]))
        return (noise * times * usual / math.sqrt(len(own))).astype(np.float32)

    return lie


def just_below_the_limits(honest: list[Vector], own: Vector, liars: int, nodes: int) -> Vector:
    """Return what the hub's filter lets pass: twice as long as honest, with a cosine of -0.09 to their mean.

    The rest is the same random direction in every round, so that it adds up.
    """
    usual = float(np.median([np.linalg.norm(x) for x in honest]))
    mean = np.mean(honest, axis=0, dtype=np.float64)
    mean /= max(float(np.linalg.norm(mean)), 1e-30)
    noise = np.random.default_rng(len(own)).normal(size=len(own))
    noise -= mean * (noise @ mean)
    noise /= np.linalg.norm(noise)
    return (2 * usual * (math.sqrt(1 - 0.09**2) * noise - 0.09 * mean)).astype(np.float32)


LIES: dict[str, Lie] = {
    "ALIE": little_is_enough,
    "IPM 0.5": inner_product(0.5),
    "sign flip": flipped_at_honest_length,
    "random, 60 times": random_at(60.0),
    "below the limits": just_below_the_limits,
}
CLAIMED_STEPS = 4096
"""By those who send a long vector, so that it looks short for its steps."""


class Collusion:
    """The liars of one run. They push after the honest nodes of a round and see what those have sent."""

    def __init__(self, name: str, liars: frozenset[int], nodes: int) -> None:
        self._lie, self._liars, self._nodes = LIES[name], liars, nodes
        self._claims = name.startswith("random")
        self._seen: dict[tuple[int, int], Vector] = {}

    def tamper(self, push: Push, layout: UnitLayout) -> Push:
        """Return what a node sends instead of its push: an honest one the same."""
        values = values_of(push, layout)
        if push.node not in self._liars:
            self._seen[push.unit, push.node] = values
            return push
        honest = [x for (unit, _), x in sorted(self._seen.items(), key=lambda e: e[0]) if unit == push.unit]
        if not honest:
            return push
        facts = {name: getattr(push, name) for name in ("node", "unit", "seq", "base", "steps", "tokens")}
        lied = make_push(self._lie(honest, values, len(self._liars), self._nodes), layout, **facts)
        return replace(lied, steps=CLAIMED_STEPS) if self._claims else lied


# -- the table of colluding liars: their cost under each merge rule, as a share of the gain without them


NESTEROV = OuterConfig(kind="nesterov", lr=0.7, momentum=0.5)
UNFILTERED = PushFilterConfig(threshold=1e9, cosine=False, clip=None, violations=10**9)


def _method(merge: str, cut: float = 1 / 3, weights: str = "uniform", **more: object) -> Method:
    hub = HubConfig(quorum="all", merge=merge, merge_cut=cut, weights=weights, **more)  # type: ignore[arg-type]
    return Method(hub=hub, pace="steps", outer=NESTEROV)


RULES = {
    "mean, unfiltered": _method("mean", push_filter=UNFILTERED),
    "mean": _method("mean"),
    "penalty": _method("mean", weights="penalty"),
    "rda": _method("rda"),
    "trimmed": _method("trimmed"),
    "median": _method("median"),
    "geometric-median": _method("geometric-median"),
    "multi-krum": _method("multi-krum", cut=0.25),
    "centered-clip": _method("centered-clip"),
}
RECOMMENDED = "multi-krum"
BARS = {1: 0.02, 2: 0.05, 3: None}


@dataclass(frozen=True, slots=True)
class Job:
    """One run. lie: "" for a run without liars."""

    method: str
    lie: str = ""
    liars: int = 0


JobResults = dict[Job, Outcome]


def measure_colluding(setting: Setting, quick: bool) -> Report:
    """Run every lie of one to three liars under every rule."""
    start = warm_up(setting)
    jobs = _jobs(quick)
    outcomes = in_parallel(trained, [(setting, start, job) for job in jobs])
    results = dict(zip(jobs, outcomes, strict=True))
    model, _ = start_model(setting, start)
    begun = held_out_loss(model, setting.seq_len, setting.held_out)
    clean = results[Job("mean")].loss
    return Report(
        "colluding liars of eight",
        (
            f"The same runs, {setting.steps} local steps, quorum = all. The liars know every honest push of a"
            " round. Cost of 1 / 2 / 3 of",
            "them: held-out loss above that without liars under the mean, as a share of its gain"
            f" ({begun:.4f} to {clean:.4f}).",
        ),
        ("rule", "no liars", *LIES),
        tuple(_rule_row(method, results, begun) for method in RULES if Job(method) in results),
        tuple(_rule_bars(results, begun, quick)),
        {f"{job.method}/{job.lie}/{job.liars}": asdict(out) for job, out in results.items()},
    )


def cost(results: JobResults, job: Job, begun: float) -> float:
    """Return how much worse the run ends than that without liars under the mean, as a share of its gain."""
    clean = results[Job("mean")].loss
    return (results[job].loss - clean) / (begun - clean)


def _jobs(quick: bool) -> list[Job]:
    methods, lies = (["mean", RECOMMENDED], ["sign flip"]) if quick else (list(RULES), list(LIES))
    runs = [Job(*run) for run in product(methods, lies, (1,) if quick else BARS)]
    return [*(Job(method) for method in methods), *runs]


def _rule_row(method: str, results: JobResults, begun: float) -> tuple[str, ...]:
    cells = []
    for lie in LIES:
        jobs = [Job(method, lie, liars) for liars in BARS]
        costs = [f"{100 * cost(results, job, begun):+.1f}" for job in jobs if job in results]
        cells.append(f"{' / '.join(costs)} %")
    return (method, f"{100 * cost(results, Job(method), begun):+.1f} %", *cells)


def _rule_bars(results: JobResults, begun: float, quick: bool) -> Iterator[Bar]:
    for liars, most in BARS.items():
        jobs = [job for job in results if job.method == RECOMMENDED and job.liars == liars]
        if not jobs:
            continue
        worst = max(jobs, key=lambda job: cost(results, job, begun))
        # Against the rule's own run without liars: what the rule costs is in the table.
        found = cost(results, worst, begun) - cost(results, Job(RECOMMENDED), begun)
        bar = "" if most is None else f", bar {100 * most:g} %"
        text = f"{RECOMMENDED}, {liars} of 8: worst is {worst.lie!r}, {100 * found:+.1f} %{bar}"
        yield Bar(text, None if quick or most is None else found <= most)


def trained(setting: Setting, start: bytes, job: Job) -> Outcome:
    """Run one job. The liars are the nodes that push last, and so know what the others have pushed."""
    method, nodes = RULES[job.method], len(setting.step_s)
    if not job.liars:
        return train_apart(setting, start, method)
    layout = layout_of(llama(setting.hidden_size, setting.num_layers, setting.seq_len))
    collusion = Collusion(job.lie, frozenset(range(nodes - job.liars, nodes)), nodes)
    tamper = partial(_colluded, collusion, layout)
    return train_apart(setting, start, replace(method, tamper=dict.fromkeys(range(nodes), tamper)))


def _colluded(collusion: Collusion, layout: Layout, push: Push) -> Push:
    return collusion.tamper(push, layout.units[push.unit])


# -- the benchmark


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
        found.append(measure_colluding(QUICK if args.quick else COLLUDING, args.quick))
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
