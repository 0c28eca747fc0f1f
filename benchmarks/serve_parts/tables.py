"""Tables and bars of the serving benchmark."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.kit.statistics import Interval, percent, quantile
from benchmarks.kit.tables import Bar, Report
from benchmarks.serve_parts.load import Seen
from benchmarks.serve_parts.phases import Attacked, Memory, Overload
from benchmarks.serve_parts.race import Turns
from benchmarks.serve_parts.servers import OURS, TRANSFORMERS

GOODPUT = 0.9
"""Of the goodput before an overload that must remain during it and after it."""
GROWTH_BYTES = 1024.0
"""Most that the memory may grow per request: 10 MiB in ten thousand."""
HARM = 1.5
"""Most by which attackers, at the rates of `Attacks`, may lengthen the median times of other clients."""


def judged(bars: Iterator[Bar], quick: bool) -> tuple[Bar, ...]:
    """Return the bars; a quick run decides nothing about times and memory."""
    sure = ("equal", "failed", "Retry-After")
    return tuple(
        replace(bar, passed=None) if quick and not any(word in bar.text for word in sure) else bar
        for bar in bars
    )


def milliseconds(values: Sequence[float]) -> tuple[str, str]:
    """Return the median and the 99th percentile."""
    if not values:
        return "-", "-"
    return f"{1000 * quantile(values, 0.5):.0f}", f"{1000 * quantile(values, 0.99):.0f}"


def _figures(seen: Seen) -> dict[str, Any]:
    told = asdict(seen)
    del told["texts"]
    return told


# --- race


def race_report(
    found: Mapping[tuple[str, int], Turns],
    same: Mapping[str, tuple[int, int]],
    method: tuple[str, ...],
    quick: bool,
) -> Report:
    """Return the table of the race."""
    rows = []
    for (name, clients), turns in found.items():
        ours = found[OURS, clients].speeds
        ratio = str(Interval.of([a / b for a, b in zip(ours, turns.speeds, strict=True)]))
        rows.append(
            (
                name,
                str(clients),
                str(Interval.of(turns.speeds)),
                "" if name == OURS else ratio,
                *milliseconds(turns.all_of("first_s")),
                *milliseconds(turns.all_of("gaps_s")),
                percent(sum(each.cpu_s for each in turns.seen) / sum(each.seconds for each in turns.seen), 0),
            )
        )
    columns = (
        "server",
        "clients",
        "tokens/s",
        "ours / it",
        "first ms p50",
        "p99",
        "between ms p50",
        "p99",
        "load's core",
    )
    figures = {
        f"{name}, {clients}": [_figures(one) for one in turns.seen]
        for (name, clients), turns in found.items()
    }
    return Report(
        name="Concurrent streaming clients",
        method=method,
        columns=columns,
        rows=tuple(rows),
        bars=judged(_race_bars(found, same), quick),
        figures=figures,
    )


def _race_bars(found: Mapping[tuple[str, int], Turns], same: Mapping[str, tuple[int, int]]) -> Iterator[Bar]:
    for name, (equal, num) in same.items():
        text = f"{name}: {equal} of {num} greedy answers equal those of generate"
        yield Bar(text, equal == num if name == OURS else None)
    failures = [
        text
        for (name, _), turns in found.items()
        if name == OURS
        for one in turns.seen
        for text in one.failures
    ]
    yield Bar(f"our requests that failed: {len(failures)}, bar 0 {failures[:1]}", not failures)
    for (name, clients), turns in found.items():
        if name == TRANSFORMERS:
            ours = found[OURS, clients].speeds
            ratio = Interval.of([a / b for a, b in zip(ours, turns.speeds, strict=True)])
            yield Bar(f"{clients} clients: {ratio} x the tokens/s of {name}, bar 1", ratio.middle >= 1)


# --- overload


def overload_report(seen: Overload, method: tuple[str, ...], quick: bool) -> Report:
    """Return the table of the overload."""
    rows = []
    for name in ("before", "during", "after"):
        one: Seen = getattr(seen, name)
        rows.append(
            (
                name,
                f"{one.tokens / one.seconds:.1f}",
                str(one.finished),
                str(one.refused),
                str(len(one.failures)),
                *milliseconds(one.first_s),
                *milliseconds(one.gaps_s),
            )
        )
    columns = (
        "phase",
        "tokens/s",
        "answered",
        "429",
        "failed",
        "first ms p50",
        "p99",
        "between ms p50",
        "p99",
    )
    return Report(
        name="Overload",
        method=method,
        columns=columns,
        rows=tuple(rows),
        bars=judged(_overload_bars(seen), quick),
        figures={name: _figures(getattr(seen, name)) for name in ("before", "during", "after")},
    )


def _overload_bars(seen: Overload) -> Iterator[Bar]:
    during = seen.during
    with_wait = len(during.waits_s)
    text = f"{with_wait} of {during.refused} answers 429 have Retry-After"
    yield Bar(text, 0 < during.refused == with_wait and min(during.waits_s) > 0)
    failed = sum(len(one.failures) for one in (seen.before, during, seen.after))
    yield Bar(f"requests that failed otherwise: {failed}, bar 0", not failed)
    before = seen.before.tokens / seen.before.seconds
    for name in ("during", "after"):
        one: Seen = getattr(seen, name)
        share = one.tokens / one.seconds / before
        yield Bar(f"goodput {name}: {share:.2f} of before, bar {GOODPUT}", share >= GOODPUT)


# --- memory


def memory_report(seen: Memory, method: tuple[str, ...], quick: bool) -> Report:
    """Return the table of the memory."""
    rows = tuple((str(n), f"{rss / 2**20:.1f}") for n, rss in zip(seen.at, seen.rss_bytes, strict=True))
    slope = seen.slope_bytes()
    bars = (
        Bar(f"requests that failed: {len(seen.failures)}, bar 0 {seen.failures[:1]}", not seen.failures),
        Bar(f"second half: {slope:.0f} bytes per request, bar {GROWTH_BYTES:.0f}", slope <= GROWTH_BYTES),
    )
    return Report(
        name="Resident memory",
        method=method,
        columns=("requests", "MiB"),
        rows=rows,
        bars=judged(iter(bars), quick),
        figures=asdict(seen),
    )


# --- attackers


def attacks_report(found: Mapping[str, Attacked], method: tuple[str, ...], quick: bool) -> Report:
    """Return the table of the attacks."""
    rows = []
    for kind, result in found.items():
        calm, attacked = (
            [value for one in seen for value in one.first_s] for seen in (result.calm, result.attacked)
        )
        statuses = ", ".join(f"{status} {count}" for status, count in sorted(result.statuses.items()))
        rows.append(
            (
                kind,
                f"{result.begun}: {statuses}",
                *(str(Interval.of(_speeds(seen))) for seen in (result.calm, result.attacked)),
                " / ".join(milliseconds(calm)),
                " / ".join(milliseconds(attacked)),
                f"{result.compared() - result.wrong()} of {result.compared()}",
            )
        )
    columns = (
        "attackers",
        "their requests",
        "tokens/s calm",
        "attacked",
        "first ms calm",
        "attacked",
        "equal answers",
    )
    return Report(
        name="Well-behaved clients beside others",
        method=method,
        columns=columns,
        rows=tuple(rows),
        bars=judged(_attack_bars(found), quick),
        figures={
            kind: {
                "begun": result.begun,
                "statuses": result.statuses,
                "calm": [_figures(one) for one in result.calm],
                "attacked": [_figures(one) for one in result.attacked],
            }
            for kind, result in found.items()
        },
    )


def _speeds(seen: Sequence[Seen]) -> list[float]:
    return [one.tokens / one.seconds for one in seen]


def _attack_bars(found: Mapping[str, Attacked]) -> Iterator[Bar]:
    for kind, result in found.items():
        failed = [text for one in (*result.calm, *result.attacked) for text in one.failures]
        wrong, compared = result.wrong(), result.compared()
        text = f"{kind}: {compared - wrong} of {compared} answers equal, {len(failed)} failed {failed[:1]}"
        yield Bar(text, bool(compared) and not wrong and not failed)
        errors = sum(count for status, count in result.statuses.items() if status.startswith("5"))
        yield Bar(f"{kind}: requests of attackers that failed with a 5xx: {errors}, bar 0", not errors)
        calm, attacked = (
            quantile([value for one in seen for value in one.first_s] or [0.0], 0.5)
            for seen in (result.calm, result.attacked)
        )
        ratio = attacked / max(calm, 1e-9)
        yield Bar(f"{kind}: median time to the first token {ratio:.2f} x, bar {HARM}", ratio <= HARM)
