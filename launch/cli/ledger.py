"""`aedit ledger`: what became of each position of a run's stream, as tables, CSV and Parquet."""

import csv
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from aedit.launch.hub import read_accounts
from aedit.launch.records import Accounts, NodeTotals, SampleVerdict
from aedit.types import UserError, printable

MOST_REASONS = 12
"""Reasons that are listed; the files have all."""
COLUMNS: Mapping[str, type] = {
    "start": int,
    "end": int,
    "verdict": str,
    "reason": str,
    "leased": int,
    "leased_to": str,
    "drawn_by": str,
    "prompt": int,
    "generated_at": str,
    "oldest_version": int,
    "newest_version": int,
    "rollouts": int,
    "rewarded": int,
    "length": float,
    "reward": float,
    "replaced": bool,
    "put_back": int,
    "trained": int,
    "trained_by": str,
    "attempt": int,
    "first_step": int,
    "last_step": int,
    "round": int,
    "accepted": bool,
    "used": bool,
}
"""Columns of the files. Each row is for the positions start..end of the stream, the end not included."""


def print_ledger(options: Namespace) -> int:
    """Print the accounts of a run and write the files; return 1 if a sample was trained twice or is missing.

    Raises UserError if the directory has no accounts, or a file cannot be written.
    """
    for path in (options.csv, options.parquet):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: {path.parent} is no directory; create it first")
    if options.parquet is not None:
        _pyarrow()
    accounts = read_accounts(Path(options.run))
    try:
        if options.csv is not None:
            _write_csv(accounts, options.csv)
        if options.parquet is not None:
            _write_parquet(accounts, options.parquet)
    except OSError as error:
        raise UserError(f"{error.filename or 'file'}: cannot be written: {error.strerror}") from None
    # After the files: the reader of the output may end early, as `head` does.
    written = map(str, filter(None, (options.csv, options.parquet)))
    print("\n".join([*_shown(options.run, accounts), *written]), flush=True)
    return int(bool(accounts.disagreements) or accounts.count(SampleVerdict.TWICE) > 0)


def _shown(run: str, accounts: Accounts) -> Iterator[str]:
    """Yield the lines of the tables."""
    yield f"ledger of {run}: {accounts.summary()}"
    yield ""
    columns = ["node", "name", "leased", "drawn", "rewarded", "replaced", "put back", "trained", "accepted"]
    rows = [
        [str(node), printable(t.name)[:24] or "-", *map(_count, _numbers(t))]
        for node, t in sorted(accounts.nodes.items())
    ]
    yield from _columns([[*columns, "not accepted"], *rows])
    yield ""
    reasons = Counter[tuple[str, str]]()
    for first, last in _runs(accounts):
        verdict = SampleVerdict(int(accounts.verdict[first]))
        reasons[verdict.text, accounts.reason(first)] += last - first
    kept = reasons.most_common(MOST_REASONS)
    left = len(reasons) - len(kept)
    rows = [[verdict, _count(num), reason] for (verdict, reason), num in kept]
    yield from _columns([["verdict", "positions", "reason"], *rows])
    if left:
        yield f"and {left} more reasons; --csv FILE has all"
    yield ""
    if accounts.used is not None:
        yield f"journal: {_count(int(accounts.used.sum()))} positions used of {len(accounts.verdict):,}"
        if accounts.unreported:
            text = "in accepted pushes, whose node ended before it reported them: the hub leases them again"
            yield f"  {_count(accounts.unreported)} {text}"
    for each in accounts.bias:
        p = f"p = {each.p:.3g}" if each.p == each.p else "all were trained"
        yield (
            f"{each.what}: trained {each.trained:.3f}, drawn {each.drawn:.3f} (means of"
            f" {each.num_trained:,} and {each.num_drawn:,} groups; {p})"
        )
    for text in accounts.disagreements:
        yield f"DISAGREES: {printable(text)}"


def _numbers(t: NodeTotals) -> tuple[int, ...]:
    done = t.replaced, t.put_back, t.trained, t.accepted, t.dropped
    return t.leased, t.drawn, t.generated, *done


def _count(number: int) -> str:
    return f"{number:,}"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _runs(accounts: Accounts) -> Iterator[tuple[int, int]]:
    """Yield the longest ranges of positions that share everything; the end is not included."""
    size = len(accounts.verdict)
    if not size:
        return
    used = np.zeros(size, np.bool_) if accounts.used is None else accounts.used
    edges = np.zeros(size - 1, np.bool_)
    names = ("verdict", "piece", "times", "drawn_by", "group", "put_back", "leased_to", "leased")
    for values in (*(getattr(accounts, name) for name in names), used):
        edges |= np.diff(values) != 0
    cuts = [0, *(np.flatnonzero(edges) + 1).tolist(), size]
    yield from pairwise(cuts)


def _rows(accounts: Accounts) -> Iterator[dict[str, Any]]:
    """Yield one row of `COLUMNS` for each range of equal positions."""
    named = {node: printable(total.name) or str(node) for node, total in accounts.nodes.items()}

    def name(node: int) -> str | None:
        return named.get(node, str(node)) if node >= 0 else None

    for first, last in _runs(accounts):
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        verdict = SampleVerdict(int(accounts.verdict[first]))
        row |= {"start": first, "end": last, "verdict": verdict.text, "reason": accounts.reason(first)}
        row |= {
            "leased": int(accounts.leased[first]),
            "leased_to": name(int(accounts.leased_to[first])),
            "drawn_by": name(int(accounts.drawn_by[first])),
            "put_back": int(accounts.put_back[first]),
            "trained": int(accounts.times[first]),
            "used": None if accounts.used is None else bool(accounts.used[first]),
        }
        if (at := int(accounts.group[first])) >= 0:
            group = accounts.groups[at]
            known = [reward for reward in group.rewards if reward is not None]
            row |= {
                "prompt": group.index,
                "generated_at": " ".join(map(printable, group.places)) or row["drawn_by"],
                "oldest_version": group.versions[0],
                "newest_version": group.versions[1],
                "rollouts": len(group.lengths),
                "rewarded": len(known),
                "length": float(np.mean(group.lengths)) if group.lengths else None,
                "reward": float(np.mean(known)) if known else None,
                "replaced": group.replaced,
            }
        if (at := int(accounts.piece[first])) >= 0:
            piece = accounts.pieces[at]
            row |= {
                "trained_by": name(piece.attempt.node),
                "attempt": piece.attempt.number,
                "first_step": piece.trained.first,
                "last_step": piece.trained.last,
                "round": piece.round,
                "accepted": bool(piece.segment.mask),
            }
        yield row


def _write_csv(accounts: Accounts, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(COLUMNS))
        writer.writeheader()
        writer.writerows(_rows(accounts))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("--parquet: needs pyarrow: pip install 'aedit[datasets]', or use --csv") from None
    return pyarrow, pyarrow.parquet


def _write_parquet(accounts: Accounts, path: Path) -> None:
    pyarrow, parquet = _pyarrow()
    types = {int: pyarrow.int64(), str: pyarrow.string(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    with parquet.ParquetWriter(path, schema) as writer:
        rows: list[dict[str, Any]] = []
        for row in _rows(accounts):
            rows.append(row)
            if len(rows) == 1 << 16:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                rows.clear()
        writer.write_table(pyarrow.Table.from_pylist(rows, schema))
