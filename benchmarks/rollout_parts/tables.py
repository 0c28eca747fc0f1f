"""Tables of cells and drains."""

from collections.abc import Sequence

from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Report
from benchmarks.rollout_parts.bars import chance_error
from benchmarks.rollout_parts.cells import OFF, Cell
from benchmarks.rollout_parts.drain import Drain
from benchmarks.rollout_parts.stream import ADAPTIVE, AGAIN, FIXED, PLAIN, RANDOM
from benchmarks.rollout_parts.theirs import ASSISTED, LOOKUP, THEIRS

SHOWN_ARMS = 3


def speeds(cells: Sequence[Cell]) -> Report:
    """Return plain decoding, its rivals and the chooser, one row for each cell."""
    columns = (
        "task, T, batch",
        "plain, tokens/s",
        "plain / plain",
        "plain / generate",
        "/ lookup",
        "/ assisted",
        "adaptive / plain",
        "learning",
        "random drafter",
        "best fixed",
        "adaptive / best",
    )
    return _table("tokens per second", columns, [_speed_row(cell) for cell in cells])


def forecasts(cells: Sequence[Cell]) -> Report:
    """Return what the chooser did, and the errors of its predictions."""
    columns = (
        "task, T, batch",
        "tokens per pass",
        "step error, mean and median",
        "calibration error",
        "foretold",
        "measured / foretold, steps alone",
        "arms, % of steps",
    )
    return _table("the choice of the arm", columns, [_forecast_row(cell) for cell in cells])


def arms(cells: Sequence[Cell]) -> Report:
    """Return every fixed arm over plain decoding."""
    rows = [(_name(cell), *(str(cell.speedup(name)) for name in FIXED)) for cell in cells]
    return _table("fixed arms over plain decoding", ("task, T, batch", *FIXED), rows)


def acceptance(cells: Sequence[Cell]) -> Report:
    """Return acceptance by place in the draft, of each task and temperature at its largest batch.

    The largest batch has the most drafts.
    """
    largest: dict[tuple[str, float], Cell] = {}
    for cell in cells:
        largest[cell.task, cell.temperature] = cell
    rows = [_acceptance_row(cell, name) for cell in largest.values() for name in (*FIXED, ADAPTIVE)]
    columns = ("task, T, batch", "arm", "tokens per pass", "accepted up to position 1, 2, ...")
    return _table("acceptance", columns, rows)


def drained(found: Sequence[Drain]) -> Report:
    """Return one row for each drain."""
    rows = [
        (
            "learning" if i == 0 else str(i),
            f"{len(drain.lengths)}",
            f"{sum(drain.lengths)}",
            f"{max(drain.lengths)}",
            f"{drain.plain_s:.2f}",
            f"{drain.adaptive_s:.2f}",
            f"{drain.speedup:.2f}",
            _shares(drain.arms),
        )
        for i, drain in enumerate(found)
    ]
    columns = ("drain", "rollouts", "tokens", "longest", "plain, s", "adaptive, s", "speed-up", "arms, %")
    return _table("from a full batch to the last rollout", columns, rows)


def line(cell: Cell) -> str:
    """Return a cell in one line, for progress output."""
    plain = f"plain {_rate(cell):.0f} tokens/s, {cell.over_theirs().middle:.2f} x generate"
    choice = f"adaptive {cell.speedup(ADAPTIVE)}, random drafter {cell.speedup(RANDOM)}"
    return f"{_name(cell)}: {plain}; {choice}, best fixed {_best(cell)}"


def _speed_row(cell: Cell) -> tuple[str, ...]:
    theirs = [str(cell.over_theirs(name)) if name in cell.theirs else "" for name in (LOOKUP, ASSISTED)]
    return (
        _name(cell),
        f"{_rate(cell):.0f}",
        str(cell.speedup(AGAIN)),
        str(cell.over_theirs(THEIRS)),
        *theirs,
        str(cell.speedup(ADAPTIVE)),
        f"{cell.first(ADAPTIVE):.2f}",
        str(cell.speedup(RANDOM)),
        _best(cell),
        str(cell.over_best),
    )


def _forecast_row(cell: Cell) -> tuple[str, ...]:
    spoken, foretold, error = cell.spoken[ADAPTIVE], cell.foretold, chance_error(cell)
    return (
        _name(cell),
        f"{spoken.accepted_length:.2f}",
        f"{percent(foretold.step_error)}, {percent(foretold.middle_step_error)}",
        "" if error is None else f"{error:.3f}",
        f"{foretold.speedup:.2f}",
        f"{cell.kept:.2f}",
        _shares(spoken.arms),
    )


def _acceptance_row(cell: Cell, name: str) -> tuple[str, ...]:
    spoken = cell.spoken[name]
    positions = " ".join(f"{share:.2f}" for share in spoken.by_position)
    return _name(cell), name, f"{spoken.accepted_length:.2f}", positions


def _best(cell: Cell) -> str:
    name = cell.best_fixed
    return name if name == OFF else f"{name} {cell.speedup(name).middle:.2f}"


def _rate(cell: Cell) -> float:
    rates = sorted(cell.rates[PLAIN][1:])
    return rates[len(rates) // 2]


def _shares(steps: dict[str, int]) -> str:
    most = sorted(steps, key=steps.__getitem__, reverse=True)[:SHOWN_ARMS]
    return ", ".join(f"{arm} {100 * steps[arm] / sum(steps.values()):.0f}" for arm in most)


def _name(cell: Cell) -> str:
    return f"{cell.task}, {cell.temperature:g}, {cell.rows}"


def _table(name: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Report:
    return Report(name, (), columns, tuple(rows), (), {})
