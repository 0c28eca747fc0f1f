"""Report of a finished run, which `aedit run` prints at the end: nodes, RL and rollout servers."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from math import isfinite, nan
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from aedit.launch.records import NodeRecords, RLMetric, Run, Totals, read_run, totals
from aedit.launch.views import formatting as fmt
from aedit.launch.views.figures import (
    LAST_LINES,
    RLTotals,
    after_warm_up,
    first_and_last,
    first_loss,
    held_out,
    idle_by_cause,
    last_evaluation_step,
    last_loss,
    ledger,
    mean_known,
    newest,
    pace,
    ratio,
    rl_held_out,
    rl_lines_of,
    rl_totals,
    rounds,
    share_of_solo,
    total_known,
)
from aedit.launch.views.plot import draw
from aedit.launch.views.tables import accusation_text
from aedit.types import UserError

WIDTH = 120
_MOST_NAMED = 8
MOSTLY = 0.9
"""Share of steps without drafts from which a report says why."""
COLUMNS = (
    *("node", "steps", "tokens", "tokens/s", "solo tokens/s", "waited", "waited %", "idle used"),
    "train loss",
)
RL_COLUMNS = (
    *("node", "steps", "groups", "rollout tokens/s", "speed-up", "accepted length", "staleness", "idle"),
    *("idle used", "reward", "solved"),
)

Facts = Iterator[tuple[str, str]]
"""Name and text of each fact."""


def report(run_dir: Path, more: Iterable[tuple[str, str]] = ()) -> str:
    """Return the figures of a run as aligned ASCII text; draw the plots and list them.

    Raises UserError if `run_dir` is not a run directory.

    more: names and texts of further facts.
    """
    run = read_run(run_dir)
    wall_s = max((node.metrics[-1].t for node in run.nodes if node.metrics), default=nan)
    head = [fmt.some(len(run.nodes), "node"), fmt.clock(wall_s)]
    if (hub := totals(run.hubs)) is not None:
        head.append(fmt.some(hub.merges, "merge"))
    elif not run.has_hub:
        head.append(fmt.some(len(rounds(run)), "round"))
    facts = Table.grid(padding=(0, 2, 0, 0))
    own = rl_facts(run) if run.is_rl else _text_facts(run)
    for found in (own, _sync_facts(run, hub), more, server_facts(run)):
        for name, text in found:
            facts.add_row("", name, text)
    columns, cells = (RL_COLUMNS, _rl_cells) if run.is_rl else (COLUMNS, _cells)
    per_node = fmt.table(["", *columns], (["", *cells(node)] for node in run.nodes), gap=2)
    out = StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, force_terminal=False)
    headline = f"run {run.name}: {', '.join(head)}\n"
    console.print(headline, facts, "", per_node, sep="\n", highlight=False, markup=False)
    lines = [row.rstrip() for row in out.getvalue().splitlines()]
    try:
        plots: list[object] = [*draw(run)]
    except UserError as error:  # on a full disk print the figures without plots
        plots = [error]
    # Paths are appended as text, as a console would wrap long ones.
    return "\n".join([*lines, *(["", "  plots", *(f"    {path}" for path in plots)] if plots else [])])


def _text_facts(run: Run) -> Facts:
    losses = [evaluation.loss for evaluation in held_out(run)] or [nan]
    change = _change(losses[0], losses[-1])
    if not isfinite(losses[0]) and not isfinite(losses[-1]):
        change = f"{fmt.UNKNOWN} (no evaluation ran)"
    elif (ended := last_evaluation_step(run)) is not None:
        step, last = map(fmt.count, ended)
        change += f" at step {step} of {last}; no evaluation ran at the end"
    yield "held-out loss", change
    yield "train loss", _change(mean_known(map(first_loss, run.nodes)), mean_known(map(last_loss, run.nodes)))
    speed = fmt.count(total_known(pace(node)[0] for node in run.nodes))
    yield (
        "speed",
        f"{speed} tokens/s, {fmt.percent(share_of_solo(run.nodes))} of the sum of the nodes' solo speeds",
    )
    for node in run.nodes:
        if drafter := node.metrics[-1].drafter if node.metrics else {}:
            steps, published, length = (
                drafter.get(n, nan) for n in ("steps", "published", "accepted_length")
            )
            trained = f"{fmt.count(steps)} steps of training in waits, {fmt.count(published)} published"
            per_pass = f"{fmt.decimals(length)} tokens per pass on held-out text"
            yield "drafter", f"node {node.index}: {trained}, {per_pass}"


def _change(first: float, last: float) -> str:
    return f"{fmt.nats(first)} -> {fmt.nats(last)} nats/token"


def _sync_facts(run: Run, hub: Totals | None) -> Facts:
    """Yield what the nodes have exchanged; with the folder of a hub, as the hub knows it, for all nodes."""
    by_id = rounds(run)
    landed = [row for rows in by_id.values() for _, row in rows]
    sent_bytes = total_known(row.bytes for row in landed)
    distrusted = fmt.some(sum(len(row.distrusted) for row in landed), "pseudo-gradient")
    if run.averages:
        yield "sent", f"{fmt.size(sent_bytes)} to other peers, by calculation"
        failed = sum(len(row.refused) > 0 for row in landed)
        differing = sum(each.event == "averages_differ" for node in run.nodes for each in node.notices)
        of_all = f"of all nodes' {failed:,} failed, {differing:,} with different averages"
        yield "rounds", f"{len(by_id):,} per node; {of_all}"
        return
    if not run.has_hub:
        yield "sent", f"{fmt.size(sent_bytes)} in {fmt.some(len(by_id), 'round')}"
        undone = sum(len({u for _, row in rows for u in row.rolled_back}) for rows in by_id.values())
        yield "penalty", f"{distrusted} distrusted, {fmt.some(undone, 'unit')} rolled back"
        return
    if hub is None:
        yield "sent", f"{fmt.size(sent_bytes)} to the hub"
        num_refused = sum(len(row.refused) for row in landed)
        yield "refused", fmt.some(num_refused, "push", "pushes") + ", sent once more" * bool(num_refused)
    else:
        # Either may lack bytes: of other machines' nodes, or sent after the hub's last line.
        up = fmt.size(max(sent_bytes, hub.bytes_up))
        first = f" ({fmt.size(hub.anchor_bytes)} of it the initial anchors, from {hub.founder})"
        yield "sent", f"{up} up{first if hub.founder else ''}, {fmt.size(hub.bytes_down)} down"
        why = f" ({fmt.reasons(hub.refused)})" if hub.refused else ""
        yield "pushes", f"{hub.accepted:,} accepted, {sum(hub.refused.values()):,} did not count{why}"
        units = f"{fmt.some(len(hub.versions), 'unit')} at version {fmt.spread(hub.versions)}"
        yield "anchors", f"{fmt.some(hub.merges, 'merge')}, {units}"
        for name, reason in hub.excluded:
            yield "excluded", f"{name}: {reason}"
    yield "penalty", f"{distrusted} distrusted by their own nodes"


def _cells(node: NodeRecords) -> list[str]:
    """Return the cells of `COLUMNS`. Waiting in seconds is of the whole run, its share between two lines."""
    tokens_per_s, solo_tokens_per_s, waited = pace(node)
    last = node.metrics[-1] if node.metrics else None
    return [
        str(node.index),
        fmt.count(last.step if last else 0),
        fmt.count(last.tokens if last else nan),
        fmt.count(tokens_per_s),
        fmt.count(solo_tokens_per_s),
        fmt.seconds(last.wait_s if last else nan),
        fmt.percent(waited),
        fmt.seconds(last.idle_used_s if last else nan),
        fmt.nats(last_loss(node)),
    ]


def server_facts(run: Run) -> Facts:
    """Yield the rollout servers as the hub knows them, and what they have done for each node."""
    hub = run.hubs[0] if run.hubs else None
    last = hub.last.servers if hub and hub.lines else ()
    if hub is not None and last:
        most = max(sum(server.live for server in line.servers) for line in hub.lines)
        speeds: dict[str, list[float]] = defaultdict(lambda: [])
        for server in (server for line in hub.lines for server in line.servers if server.live):
            speeds[server.name].append(server.tokens_per_s)
        named = [f"{each.name} {fmt.count(fmean(speeds[each.name] or [nan]))} tokens/s" for each in last]
        yield "rollout servers", f"{most} at a time at most: {', '.join(_first(named))}"
        idle_s = sum(server.idle_s for server in last)
        used = fmt.percent(ratio(sum(server.idle_used_s for server in last), idle_s))
        yield "their idle time", f"{fmt.seconds(idle_s)} without a request, {used} of it trained the drafter"
        for server in last:
            if accused := accusation_text(server):
                yield "accused", f"{server.name}: {accused}"
            if server.banned:
                yield "banned", f"{server.name}: {server.banned}"
    for node in run.nodes:
        rl = newest(node)
        if rl is not None and rl.servers:
            yield "from servers", f"node {node.index}: {_work(rl.servers)}"


def _first(named: list[str]) -> list[str]:
    rest = len(named) - _MOST_NAMED
    return named if rest <= 0 else [*named[:_MOST_NAMED], fmt.more(rest, "server")]


def _work(servers: Mapping[str, Mapping[str, float]]) -> str:
    done = {name: Counter({k: n for k, n in work.items() if isfinite(n)}) for name, work in servers.items()}
    busiest = sorted(done.items(), key=lambda item: -item[1]["tokens"])
    named = _first(
        [
            f"{name} {fmt.count(work['tokens'])} tokens in {fmt.some(int(work['samples']), 'sample')}"
            for name, work in busiest
        ]
    )
    taken_back, losses, violations = (
        int(sum(work[name] for work in done.values())) for name in ("taken_back", "losses", "violations")
    )
    if taken_back:
        named.append(f"{fmt.some(taken_back, 'sample')} finished elsewhere")
    if losses:
        because = f", {violations} of them because of what the server sent" if violations else ""
        named.append(f"{fmt.some(losses, 'connection')} lost{because}")
    return ", ".join(named)


def rl_facts(run: Run) -> Facts:
    """Yield the figures of reinforcement learning."""
    totals = rl_totals(newest(node) for node in run.nodes)
    evaluations = rl_held_out(run)
    if evaluations:
        first, last = (after_warm_up(run) or evaluations)[0], evaluations[-1]
        change = f"{fmt.percent(first.solved)} -> {fmt.percent(last.solved)}"
        times = f"at {fmt.clock(first.t)} and {fmt.clock(last.t)}"
        before = f"; {fmt.percent(evaluations[0].solved)} before the warm-up"
        shown = before if evaluations[0] != first else ""
        yield "held-out solved", f"{change} of {fmt.count(last.problems)} problems, {times}{shown}"
    else:
        yield "held-out solved", f"{fmt.UNKNOWN} (no evaluation ran)"
    reward = " -> ".join(map(fmt.decimals, first_and_last(run, lambda rl: rl.reward)))
    solved = " -> ".join(map(fmt.percent, first_and_last(run, lambda rl: rl.solved)))
    yield "reward", f"{reward}, {solved} solved"
    speed_up = "no plain step was timed"
    if isfinite(totals.speed_up):
        speed_up = f"decoding {fmt.times(totals.speed_up)}"
        if isfinite(totals.speed_up_error):
            half = 1.96 * totals.speed_up_error
            speed_up += f" ({fmt.times(totals.speed_up - half)} to {fmt.times(totals.speed_up + half)})"
        speed_up += " as fast as without drafts"
    accepted = f"accepted length {fmt.decimals(totals.accepted)}"
    facts = [speed_up, accepted] if isfinite(totals.speed_up) else [accepted, speed_up]
    yield "rollouts", "; ".join([f"{fmt.count(totals.tokens_per_s)} tokens/s while generating", *facts])
    yield "arms", fmt.shares(totals.arms) + _why(totals)
    yield (
        "groups",
        f"{fmt.count(totals.groups)} ({fmt.count(totals.rollouts)} rollouts),"
        f" {fmt.percent(totals.no_signal)} without signal, {fmt.count(totals.retried)} retried,"
        f" {fmt.count(totals.excluded)} rollouts without reward",
    )
    states = [state for node in run.nodes for _, state in rl_lines_of(node)]
    highest = max((rl.staleness_max for rl in states if rl.staleness_max >= 0), default=nan)
    yield (
        "policy",
        f"staleness {fmt.decimals(mean_known(rl.staleness for rl in states), 1)} versions"
        f" (max {fmt.count(highest)}), mismatch KL {fmt.tiny(mean_known(rl.mismatch_kl for rl in states))},"
        f" {fmt.percent(mean_known(rl.clip_share for rl in states))} of the tokens clipped",
    )
    used = f"{fmt.seconds(totals.idle_used_s)} of {fmt.seconds(totals.waited_s)} used"
    if totals.pool.get("asked"):
        pool = totals.pool
        yield (
            "pool",
            f"{fmt.some(int(pool['received']), 'rollout')} from other nodes"
            f" ({fmt.count(pool.get('moved', 0))} had begun), in"
            f" {fmt.seconds(pool['helped_s'])} of their time; {fmt.count(pool['taken_back'])} late;"
            f" {fmt.size(pool['bytes'])} sent",
        )
    yield "idle", "none" if totals.waited_s < 0.05 else f"{used}; {idle_by_cause(totals)}"
    if shown := ledger(totals):
        yield "ledger", shown
    for node in run.nodes if len(run.nodes) > 1 else ():
        if shown := ledger(rl_totals([newest(node)])):
            yield f"  node {node.index}", shown
    if any(rl.drafter for rl in map(newest, run.nodes) if rl is not None):
        counts = (totals.drafter_steps, totals.published, totals.refused, totals.adopted)
        text = "{} steps of training, {} published, {} refused by the gate, {} taken"
        resting = [str(node.index) for node in run.nodes if _rests(newest(node))]
        why = f"; training rests on node {', '.join(resting)}, as it found nothing better" if resting else ""
        yield "drafter", text.format(*map(fmt.count, counts)) + why
    if failed := sum(notice.event == "reward_error" for node in run.nodes for notice in node.notices):
        yield "rewards", f"{fmt.some(failed, 'error')} in reward functions; see events.jsonl of the nodes"


def _rests(rl: RLMetric | None) -> bool:
    return rl is not None and rl.drafter.get("rests", 0) > 0


def _why(totals: RLTotals) -> str:
    """Return what drafts could gain, and why they were not used if they never were."""
    if not isfinite(totals.bound):
        return ""
    text = f"; {fmt.times(totals.bound)} as fast as without drafts if all were accepted"
    is_off = totals.arms.get("off", 0.0) > MOSTLY
    return f"{text}, but too few are" if is_off else text


def _rl_cells(node: NodeRecords) -> list[str]:
    """Return the cells of `RL_COLUMNS`."""
    rl = newest(node)
    if rl is None:
        return [str(node.index), *[fmt.UNKNOWN] * (len(RL_COLUMNS) - 1)]
    totals, states = rl_totals([rl]), [state for _, state in rl_lines_of(node)]
    return [
        str(node.index),
        fmt.count(node.metrics[-1].step),
        fmt.count(totals.groups),
        fmt.count(totals.tokens_per_s),
        fmt.times(totals.speed_up),
        fmt.decimals(totals.accepted),
        fmt.decimals(mean_known(state.staleness for state in states), 1),
        fmt.seconds(totals.waited_s),
        fmt.percent(ratio(totals.idle_used_s, totals.waited_s)),
        fmt.decimals(mean_known(state.reward for state in states[-LAST_LINES:])),
        fmt.percent(mean_known(state.solved for state in states[-LAST_LINES:])),
    ]
