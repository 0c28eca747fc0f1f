"""Bars of the rollout benchmarks, and the values that were measured."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.kit.statistics import Interval, median, percent
from benchmarks.kit.tables import Bar
from benchmarks.rollout_parts.cells import Cell
from benchmarks.rollout_parts.drain import Drain, tail
from benchmarks.rollout_parts.same import Same
from benchmarks.rollout_parts.stream import ADAPTIVE, RANDOM

OVER_GENERATE, NOT_SLOWER, OVER_BEST, KEPT = 1.2, 0.98, 0.95, 0.85
STRUCTURED_1, STRUCTURED_4, HARD = 2.0, 1.5, 1.15
STEP_ERROR, CHANCE_ERROR, NOISE = 0.15, 0.05, 0.03
DRAINED, TAIL = 1.4, 6.0
ENOUGH_NODES = 1000
"""Judged nodes of one drafter: of fewer, a calibration error says more of chance than of calibration."""


@dataclass(frozen=True, slots=True)
class Least:
    """Lowest value among some cells."""

    cell: Cell
    value: float
    interval: Interval | None = None

    @property
    def where(self) -> str:
        return f"T {self.cell.temperature:g}, batch {self.cell.rows}"


def bars(cells: Sequence[Cell]) -> list[Bar]:
    """Return the bars for the cells of one task."""
    task = cells[0].task
    wanted = [
        _at_least("plain over generate", cells, Cell.over_theirs, OVER_GENERATE),
        *_speedups(cells),
        _not_slower("adaptive over plain", cells, lambda cell: cell.speedup(ADAPTIVE), NOT_SLOWER),
        _not_slower("with a random drafter", cells, lambda cell: cell.speedup(RANDOM), NOT_SLOWER),
        _not_slower("over the best fixed arm", cells, lambda cell: cell.over_best, OVER_BEST),
        _kept(cells),
        _step_errors(cells),
        _chance_errors(cells),
        _same(same for cell in cells for same in (cell.same, cell.their_same)),
        _noise(cells),
    ]
    return [Bar(f"{task}, {bar.text}", bar.passed) for bar in wanted]


def drain_bars(found: Sequence[Drain]) -> list[Bar]:
    """Return the bars for drains; in the first drain the chooser learns."""
    speedup, long = median([drain.speedup for drain in found[1:]]), tail(list(found))
    return [
        Bar(
            f"drain: {speedup:.2f} x sooner than plain (learning: {found[0].speedup:.2f}), bar {DRAINED}",
            speedup >= DRAINED,
        ),
        Bar(f"drain: lengths p99 / p50 {long:.1f}, bar {TAIL:g}", long >= TAIL),
        _same(drain.same for drain in found),
    ]


def chance_error(cell: Cell) -> float | None:
    """Return the calibration error of the worst drafter with enough samples."""
    foretold = cell.foretold
    enough = [by for by, nodes in foretold.chance_nodes.items() if nodes >= ENOUGH_NODES]
    return max((foretold.chance_errors[by] for by in enough), default=None)


def _speedups(cells: Sequence[Cell]) -> list[Bar]:
    def adaptive(cell: Cell) -> Interval:
        return cell.speedup(ADAPTIVE)

    if cells[0].task == "python":
        hard = [cell for cell in cells if cell.temperature == 1 and cell.rows <= 4]
        return [_at_least("adaptive, T 1, batch 1 to 4", hard, adaptive, HARD)] if hard else []
    found = []
    for name, most, bar in (("batch 1", (1, 1), STRUCTURED_1), ("batch 2 to 4", (2, 4), STRUCTURED_4)):
        some = [cell for cell in cells if most[0] <= cell.rows <= most[1]]
        found += [_at_least(f"adaptive, {name}", some, adaptive, bar)] if some else []
    return found


def _least(cells: Iterable[Cell], of: Callable[[Cell], Interval]) -> Least:
    found = [Least(cell, of(cell).middle, of(cell)) for cell in cells]
    return min(found, key=lambda least: least.value)


def _at_least(name: str, cells: Iterable[Cell], of: Callable[[Cell], Interval], bar: float) -> Bar:
    least = _least(cells, of)
    return Bar(f"{name}: {least.interval} at the least ({least.where}), bar {bar}", least.value >= bar)


def _not_slower(name: str, cells: Iterable[Cell], of: Callable[[Cell], Interval], bar: float) -> Bar:
    """Return a bar that is undecided where the machine's noise is as large as the difference."""
    least = _least(cells, of)
    noise = least.cell.noise
    text = f"{name}: {least.interval} at the least ({least.where}), bar {bar}"
    if noise > NOISE and abs(least.value - bar) < noise:
        return Bar(f"{text}; plain against itself is off by {percent(noise)}: too noisy to tell", None)
    return Bar(text, least.value >= bar)


def _kept(cells: Iterable[Cell]) -> Bar:
    worst = min((Least(cell, cell.kept) for cell in cells), key=lambda least: least.value)
    text = f"measured / foretold speed-up of steps {worst.value:.2f} at the least ({worst.where}), bar {KEPT}"
    return Bar(text, worst.value >= KEPT)


def _step_errors(cells: Iterable[Cell]) -> Bar:
    worst = max((Least(cell, cell.foretold.step_error) for cell in cells), key=lambda most: most.value)
    text = f"step times are foretold within {percent(worst.value)} at the most ({worst.where})"
    return Bar(f"{text}, bar {percent(STEP_ERROR, 0)}", worst.value <= STEP_ERROR)


def _chance_errors(cells: Iterable[Cell]) -> Bar:
    errors = [(cell, chance_error(cell)) for cell in cells]
    found = [Least(cell, error) for cell, error in errors if error is not None]
    if not found:
        return Bar(f"calibration error: no drafter was seen with {ENOUGH_NODES} nodes", None)
    worst = max(found, key=lambda most: most.value)
    text = f"calibration error {worst.value:.3f} at the most ({worst.where}), bar {CHANCE_ERROR}"
    return Bar(text, worst.value <= CHANCE_ERROR)


def _same(found: Iterable[Same]) -> Bar:
    total = sum(found, Same())
    text = f"{total.tokens} tokens compared: {total.differences} differ, and {total.ties} ties of fp32"
    return Bar(text, total.differences == 0)


def _noise(cells: Sequence[Cell]) -> Bar:
    worst = max((Least(cell, cell.noise) for cell in cells), key=lambda most: most.value)
    wide = sum(cell.noise > NOISE for cell in cells)
    text = (
        f"plain against itself: off by {percent(worst.value)} at the most ({worst.where}), bar"
        f" {percent(NOISE, 0)}; {wide} of {len(cells)} cells are too noisy"
    )
    return Bar(text, worst.value <= NOISE)
