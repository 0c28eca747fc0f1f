"""The table of colluding liars: what they cost under each merge rule, as a share of the gain without them."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

from aedit.async_sgd.rules import HubConfig, OuterConfig, Push, PushFilterConfig
from aedit.types import Layout
from benchmarks.kit.hubs import layout_of
from benchmarks.kit.processes import in_parallel
from benchmarks.kit.small_llama import llama
from benchmarks.kit.tables import Bar, Report
from benchmarks.kit.two_domains import held_out_loss
from benchmarks.kit.virtual_hub import Method, Outcome, Setting, start_model, train_apart, warm_up
from benchmarks.poison_parts.collusion import LIES, Collusion

NESTEROV = OuterConfig(kind="nesterov", lr=0.7, momentum=0.5)
UNFILTERED = PushFilterConfig(threshold=1e9, cosine=False, clip=None, violations=10**9)


def _method(merge: str, cut: float = 1 / 3, weights: str = "uniform", **more: object) -> Method:
    hub = HubConfig(quorum="all", merge=merge, merge_cut=cut, weights=weights, **more)  # type: ignore[arg-type]
    return Method(hub=hub, pace="steps", outer=NESTEROV)


METHODS = {
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


Results = dict[Job, Outcome]


def measure(setting: Setting, quick: bool) -> Report:
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
        tuple(_row(method, results, begun) for method in METHODS if Job(method) in results),
        tuple(_bars(results, begun, quick)),
        {f"{job.method}/{job.lie}/{job.liars}": asdict(out) for job, out in results.items()},
    )


def cost(results: Results, job: Job, begun: float) -> float:
    """Return how much worse the run ends than that without liars under the mean, as a share of its gain."""
    clean = results[Job("mean")].loss
    return (results[job].loss - clean) / (begun - clean)


def _jobs(quick: bool) -> list[Job]:
    methods, lies = (["mean", RECOMMENDED], ["sign flip"]) if quick else (list(METHODS), list(LIES))
    runs = [Job(*run) for run in product(methods, lies, (1,) if quick else BARS)]
    return [*(Job(method) for method in methods), *runs]


def _row(method: str, results: Results, begun: float) -> tuple[str, ...]:
    cells = []
    for lie in LIES:
        jobs = [Job(method, lie, liars) for liars in BARS]
        costs = [f"{100 * cost(results, job, begun):+.1f}" for job in jobs if job in results]
        cells.append(f"{' / '.join(costs)} %")
    return (method, f"{100 * cost(results, Job(method), begun):+.1f} %", *cells)


def _bars(results: Results, begun: float, quick: bool) -> Iterator[Bar]:
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
    method, nodes = METHODS[job.method], len(setting.step_s)
    if not job.liars:
        return train_apart(setting, start, method)
    layout = layout_of(llama(setting.hidden_size, setting.num_layers, setting.seq_len))
    collusion = Collusion(job.lie, frozenset(range(nodes - job.liars, nodes)), nodes)
    tamper = partial(_tampered, collusion, layout)
    return train_apart(setting, start, replace(method, tamper=dict.fromkeys(range(nodes), tamper)))


def _tampered(collusion: Collusion, layout: Layout, push: Push) -> Push:
    return collusion.tamper(push, layout.units[push.unit])
