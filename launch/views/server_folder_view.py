"""View of one rollout server, from the records in its own folder."""

from collections import Counter
from collections.abc import Iterator
from math import isfinite
from statistics import median

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from aedit.launch.records import ServingRecords, float_or_nan
from aedit.launch.views import formatting as fmt
from aedit.launch.views.figures import ratio, total_known

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

    def total(name: str) -> float:
        """Return a count over all processes; values that are no numbers count as 0."""
        return total_known(getattr(sample, name) for sample in records.last_samples)

    state = "starting" if last is None else last.state
    if records.quiet_s > SILENT_AFTER_S:
        state = f"silent for {fmt.clock(records.quiet_s)}: its process has ended without a word, or hangs"
    yield "state", records.ended[:_LONGEST] or state
    if records.address:
        yield "address", records.address
    processes = fmt.some(records.num_starts, "process", "processes")
    yield "served", f"{fmt.clock(total('t'))} in {processes}"
    if last is not None:
        over = f"{fmt.some(int(total('samples')), 'sample')} over"
        yield "samples", f"{over}, {fmt.count(total('tokens'))} tokens"
        if not records.ended:
            running = f"{fmt.count(last.running)} running and {fmt.count(last.waiting)} waiting"
            speed = f"{fmt.count(last.tokens_per_s)} tokens/s"
            yield "now", f"{speed}, {running}; {fmt.count(last.rows)} rows in each line"
        used = fmt.percent(ratio(total("idle_used_s"), total("idle_s")))
        yield "idle", f"{fmt.clock(total('idle_s'))} without a request, {used} of it trained the drafter"
    if taken := records.versions:
        size = fmt.size(median(float_or_nan(each.get("bytes")) for each in taken))
        took = fmt.seconds(median(float_or_nan(each.get("seconds")) for each in taken))
        newest = f"newest {taken[-1]['version']}; median {size} in {took}"
        yield "versions", f"{len(taken):,} of the line run, {newest}"
    if last is not None and last.drafter:
        facts = [str(last.drafter.get("state") or "")]
        for name in ("steps", "published", "adopted", "refused", "deaths"):
            value = float_or_nan(last.drafter.get(name))
            if isfinite(value) and (value or name == "steps"):
                facts.append(f"{value:,.0f} {name}")
        yield "drafter", ", ".join(filter(None, facts))[:_LONGEST]
    if last is not None and last.hub:
        yield "hub", last.hub[:_LONGEST]
    # Each kind of event that is not ordinary, with its number and its last text.
    unusual = {notice.event: notice.text for notice in records.notices if notice.event not in _ORDINARY}
    counts = Counter(notice.event for notice in records.notices)
    for event, text in unusual.items():
        shown = f"{fmt.some(counts[event], 'time')}, last: {text or '?'}"
        yield event.replace("_", " "), shown[:_LONGEST]
