"""Measure what infrequent synchronization costs in held-out loss at equal tokens, and what bad data costs.

Bars: EDiT and A-EDiT within 1 % of `ddp` when the data is clean, and better than DiLoCo when one node's data
is random for the middle fifth of the run. Also draws docs/img/quality.png.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean

from benchmarks.kit.processes import ROOT, in_parallel
from benchmarks.kit.statistics import percent, plus_minus
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.quality_parts.virtual import METHODS, Outcome, Setting, train

PLOT = ROOT / "docs" / "img" / "quality.png"
FULL, SEEDS = Setting(), 3
QUICK = Setting(steps=8, warmup_steps=2, every=2, hidden_size=32, num_layers=1, held_out=16)
CLOSE = 0.01

Results = dict[tuple[str, bool], list[Outcome]]


def measure(quick: bool) -> Report:
    setting, seeds = (QUICK, range(2)) if quick else (FULL, range(SEEDS))
    results = run_all(setting, seeds)
    if not quick:
        draw(results, PLOT)
    return Report(
        "held-out loss at equal tokens, 4 nodes",
        _method_lines(setting, len(seeds)),
        ("method", "clean", "to ddp", "one node bad", "to diloco", "to clean", "waiting"),
        tuple(_row(method, results) for method in METHODS),
        _bars(results, quick),
        {
            f"{method}{'/bad' if bad else ''}": [asdict(o) for o in outcomes]
            for (method, bad), outcomes in results.items()
        },
    )


def run_all(setting: Setting, seeds: Sequence[int], methods: Sequence[str] = tuple(METHODS)) -> Results:
    """Run every method, clean and with bad data, for every seed."""
    cases = list(product(methods, (False, True)))
    jobs = [(method, replace(setting, bad=bad, seed=seed)) for (method, bad), seed in product(cases, seeds)]
    outcomes, n = in_parallel(train, jobs), len(seeds)
    return {case: outcomes[i * n : (i + 1) * n] for i, case in enumerate(cases)}


def excess(results: Results, method: str, other: str, bad: bool) -> list[float]:
    """Return by how much `method` ends above `other`, as a share, seed by seed."""
    return _excess(results[method, bad], results[other, bad])


def harm(results: Results, method: str) -> list[float]:
    """Return by how much `method` ends above its clean run when one node's data is bad for a while."""
    return _excess(results[method, True], results[method, False])


def _excess(mine: Sequence[Outcome], others: Sequence[Outcome]) -> list[float]:
    return [m.loss / o.loss - 1 for m, o in zip(mine, others, strict=True)]


def draw(results: Results, path: Path) -> None:
    """Draw loss against tokens, mean over seeds, one panel per kind of data."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, bad in zip(panels, (False, True), strict=True):
        for method in METHODS:
            curves = [outcome.curve for outcome in results[method, bad]]
            tokens = [fmean(point[0] for point in points) / 1e6 for points in zip(*curves, strict=False)]
            losses = [fmean(point[1] for point in points) for points in zip(*curves, strict=False)]
            panel.plot(tokens, losses, label=method)
        panel.set(title="one node's data random in the shaded part" if bad else "clean data")
        panel.set(xlabel="tokens of all nodes, millions", ylim=(losses[-1] * 0.95, losses[-1] * 1.5))
        if bad:
            panel.axvspan(0.4 * tokens[-1], 0.6 * tokens[-1], alpha=0.1, color="black")
    panels[0].set(ylabel="held-out loss, nats per byte")
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _method_lines(setting: Setting, seeds: int) -> tuple[str, str]:
    tokens = 4 * setting.steps * setting.batch_size * setting.seq_len
    return (
        f"Llama of {setting.hidden_size} x {setting.num_layers}, bytes of the stdlib, {tokens / 1e6:.2f} M"
        f" tokens, inner lr {setting.lr:g}, {setting.warmup_steps} warm-up steps, {seeds} seeds.",
        f"Rounds: edit {setting.every}, diloco {4 * setting.every} steps; a-edit {setting.every} on average"
        " at speeds 1, 1, 1, 0.5 (virtual clock). 95 % intervals.",
    )


def _row(method: str, results: Results) -> tuple[str, ...]:
    clean, bad = results[method, False], results[method, True]
    waiting = fmean(outcome.waiting for outcome in clean)
    return (
        method,
        plus_minus([outcome.loss for outcome in clean]),
        plus_minus(excess(results, method, "ddp", False), 100, 2, "+") + " %",
        plus_minus([outcome.loss for outcome in bad]),
        plus_minus(excess(results, method, "diloco", True), 100, 2, "+") + " %",
        plus_minus(harm(results, method), 100, 2, "+") + " %",
        percent(waiting),
    )


def _bars(results: Results, quick: bool) -> tuple[Bar, ...]:
    bars = []
    for method in ("edit", "a-edit"):
        off, better = (
            fmean(excess(results, method, "ddp", False)),
            fmean(excess(results, method, "diloco", True)),
        )
        text = f"{method}: clean {100 * off:+.2f} % to ddp, bar {100 * CLOSE:+.0f} %"
        bars.append(Bar(text, None if quick else off <= CLOSE))
        text = f"{method}: with bad data {100 * better:+.2f} % to diloco, bar below 0 %"
        bars.append(Bar(text, None if quick else better < 0))
    return tuple(bars)


if __name__ == "__main__":
    main("quality", "Held-out loss at equal tokens, clean and with one node's data bad for a while.", measure)
