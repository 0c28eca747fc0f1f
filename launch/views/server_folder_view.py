"""View of one rollout server, from the records in its own folder."""

from collections import Counter
from collections.abc import Iterator
from math import isfinite
from statistics import median

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from aedit.launch.records import ServingRecords, ServingSample, number
from aedit.launch.views import formatting
from aedit.launch.views.figures import ratio

SILENT_AFTER_S = 15.0
"""A server writes a line every second while it runs."""
_ORDINARY = ("announced", "http", "end")
_LONGEST = 200
"""Characters of a message that are shown."""


def server_panel(records: ServingRecords) -> RenderableType:
    """Return what a rollout server is doing, and what it has done since it was first started."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in serving_facts(records):
        table.add_row(Text(name), Text(text))  # no markup in what others choose
    return Panel(table, title=Text(f"rollout server {records.name}"), title_align="left")


def serving_facts(records: ServingRecords) -> Iterator[tuple[str, str]]:
    """Yield name and text of each fact."""
    last = records.last_samples[-1] if records.last_samples else None
    yield "state", _state(records, last)
    if records.address:
        yield "address", records.address
    served_s = _sum(records, "t")
    yield (
        "served",
        f"{formatting.clock(served_s)} in {formatting.some(records.num_starts, 'process', 'processes')}",
    )
    if last is not None:
        done = f"{formatting.some(int(_sum(records, 'samples')), 'sample')} over"
        yield "samples", f"{done}, {formatting.count(_sum(records, 'tokens'))} tokens"
        if not records.ended:
            yield "now", _now(last)
        idle_s = _sum(records, "idle_s")
        used = formatting.percent(ratio(_sum(records, "idle_used_s"), idle_s))
        yield "idle", f"{formatting.clock(idle_s)} without a request, {used} of it trained the drafter"
    yield from _versions(records)
    if last is not None and last.drafter:
        yield "drafter", _drafter(last)
    if last is not None and last.hub:
        yield "hub", last.hub[:_LONGEST]
    yield from _troubles(records)


def _state(records: ServingRecords, last: ServingSample | None) -> str:
    if records.ended:
        return records.ended[:_LONGEST]
    if records.quiet_s > SILENT_AFTER_S:
        return (
            f"silent for {formatting.clock(records.quiet_s)}: its process has ended without a word, or hangs"
        )
    return "starting" if last is None else last.state


def _now(last: ServingSample) -> str:
    return (
        f"{formatting.count(last.tokens_per_s)} tokens/s, {formatting.count(last.running)} running and"
        f" {formatting.count(last.waiting)} waiting; {formatting.count(last.rows)} rows in each line"
    )


def _versions(records: ServingRecords) -> Iterator[tuple[str, str]]:
    taken = records.versions
    if taken:
        size = formatting.size(median(each.num_bytes for each in taken))
        took = formatting.seconds(median(each.seconds for each in taken))
        yield (
            "versions",
            f"{len(taken):,} of the line run, newest {taken[-1].serial}; median {size} in {took}",
        )


def _drafter(last: ServingSample) -> str:
    text = [str(last.drafter.get("state") or "")]
    for name in ("steps", "published", "adopted", "refused", "deaths"):
        value = number(last.drafter.get(name))
        if isfinite(value) and (value or name == "steps"):
            text.append(f"{value:,.0f} {name}")
    return ", ".join(filter(None, text))[:_LONGEST]


def _troubles(records: ServingRecords) -> Iterator[tuple[str, str]]:
    """Yield each kind of event that is not ordinary, with its number and its last text."""
    unusual = [notice for notice in records.notices if notice.event not in _ORDINARY]
    counts = Counter(notice.event for notice in unusual)
    last = {notice.event: notice.text for notice in unusual}
    for event, count in counts.items():
        yield (
            event.replace("_", " "),
            f"{formatting.some(count, 'time')}, last: {last[event] or '?'}"[:_LONGEST],
        )


def _sum(records: ServingRecords, name: str) -> float:
    """Return a count over all processes; values that are no numbers count as 0."""
    values: list[float] = [getattr(sample, name) for sample in records.last_samples]
    return sum(value for value in values if isfinite(value))
