"""Measure the cost of a hub.

Bars: from a push to the next anchor >= 0.3 GB/s of fp32 per core; a push >= 60 % as fast as over a bare
socket, and at 20 or 80 Mbit/s and 80 ms >= 85 % of the wire (needs root); 64 nodes on 2 cores: 99 % of
control calls within 50 ms; memory <= 3x the fp32 parameters + 150 MB; a heartbeat <= 0.3 ms of CPU time with
10,000 members.

The merge is timed in this process by CPU time; the rest is real processes over the loopback interface: a hub
as `aedit hub` starts it, with its journal on the disk, and nodes that do all that a hub sees of a node. Calls
of many members are timed in this process, too.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from aedit.async_sgd.rules import Codec
from benchmarks.hub_parts import thin_wire
from benchmarks.hub_parts.crowd import ASYNC, MIB, QUORUM, Crowd, Memory, Size, crowd, memory
from benchmarks.hub_parts.many import Costs, costs
from benchmarks.hub_parts.merge import Kind, Speeds, speeds
from benchmarks.hub_parts.parallel import Load, Merging, merging
from benchmarks.hub_parts.push import PushTimes, Way, push_times
from benchmarks.hub_parts.shards import Rates, Shard, hubs_for, largest
from benchmarks.kit import tun_link
from benchmarks.kit.statistics import median, percent
from benchmarks.kit.tables import Bar, Report, main

WANTED_GB_S, WANTED_SHARE, WANTED_FILLED, WANTED_BEAT_S, WANTED_CALL_S = 0.3, 0.6, 0.85, 0.05, 3e-4
MEMBERS = (100, 1_000, 10_000)
THREADS = (1, 2)
HUBS, NODES_OF_70B, ROUND_MIN = (1, 2, 4, 8, 16, 27, 81), 8, (60, 30, 10)
CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8", "e3m0", "topk")
KINDS = (
    *(Kind(text=name, codec=name) for name in CODECS),
    Kind(text="bf16, quorum of 4", codec="bf16", quorum=4),
    Kind(text="e3m0 both ways", codec="e3m0", codec_down="e3m0"),
)
MEMORY_NODES = 4
SETTINGS = {"async": ASYNC, f"quorum of {MEMORY_NODES}": QUORUM.format(nodes=MEMORY_NODES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the measurements."""

    numel: int = 4_000_000
    rounds: int = 9
    push_bytes: int = 128 * MIB
    repeats: int = 15
    thin_mbit: tuple[float, ...] = (20.0, 80.0)
    thin_bytes: int = 16 * MIB
    crowd: Size = field(
        default_factory=lambda: Size(
            nodes=64, processes=4, units=4, numel=100_000, interval_s=3.2, seconds=30.0
        )
    )
    memory: Size = field(
        default_factory=lambda: Size(
            nodes=MEMORY_NODES, processes=1, units=12, numel=6_000_000, interval_s=0.5, seconds=20.0
        )
    )


QUICK = Sizes(
    numel=2**18,
    rounds=2,
    push_bytes=4 * MIB,
    repeats=2,
    thin_mbit=(),
    crowd=Size(nodes=4, processes=2, units=2, numel=10_000, interval_s=0.5, seconds=2.0),
    memory=Size(nodes=MEMORY_NODES, processes=1, units=2, numel=100_000, interval_s=0.2, seconds=1.0),
)


def measure(args: argparse.Namespace) -> Sequence[Report]:
    reports = []
    if args.only in (None, "hub"):
        reports.append(measure_hub(args.quick))
    if args.only in (None, "push"):
        reports.append(measure_pushes(args.quick))
    if args.only in (None, "members"):
        reports.append(measure_members(args.quick))
    if args.only in (None, "merges"):
        reports.append(measure_merges(args.quick))
    if args.only in (None, "shards"):
        reports.append(calculate_shards(args.quick))
    return reports


def calculate_shards(quick: bool) -> Report:
    """Calculate the hubs of a model of 70 B parameters from rates that are measured here."""
    sizes = QUICK if quick else Sizes()
    pushed = push_times(sizes.push_bytes, sizes.repeats)
    path = speeds(Kind(text="", codec="bf16", quorum=4), sizes.numel, sizes.rounds).path_gb_s
    rates = Rates(path, 1e-9 * sizes.push_bytes / median(pushed.grpc.seconds))
    found = [largest(hubs, NODES_OF_70B, rates) for hubs in HUBS]
    needed = {minutes: hubs_for(60 * minutes, NODES_OF_70B, rates) for minutes in ROUND_MIN}
    texts = [f"a round in {minutes} min: {hubs or 'no number of'} hubs" for minutes, hubs in needed.items()]
    return Report(
        "hub: 70 B parameters, calculated",
        (
            f"Measured: push to anchor {rates.path_gb_s:.2f} GB/s of fp32, gRPC {rates.wire_gb_s:.2f} GB/s."
            f" A round: {NODES_OF_70B} nodes push bf16 and pull fp32.",
            f"Seconds of one core of the largest hub. With a core per hub: {'; '.join(texts)}.",
        ),
        ("hubs", "parameters", "memory, GB", "pushes, s", "merges, s", "pulls, s", "round, s"),
        tuple(_shard_row(one) for one in found),
        (),
        {"rates": asdict(rates), "shards": [asdict(one) for one in found], "needed": needed},
    )


def _shard_row(one: Shard) -> tuple[str, ...]:
    times = (one.push_s, one.merge_s, one.pull_s, one.core_s)
    return str(one.hubs), f"{1e-9 * one.params:.1f} B", f"{one.memory_gb:.0f}", *(f"{s:,.0f}" for s in times)


def measure_merges(quick: bool) -> Report:
    """Measure merges on several threads, alone and while snapshots are written; the best of some runs."""
    load = Load(units=4, numel=2**18, seconds=0.5) if quick else Load(units=16, numel=2_000_000, seconds=4.0)
    rows = []
    for snapshots in (False, True):
        runs = [merging(load, n, snapshots=snapshots) for _ in range(1 if quick else 3) for n in THREADS]
        rows += [max((one for one in runs if one.threads == n), key=lambda one: one.gb_s) for n in THREADS]
    beside = min(one.gb_s for one in rows[len(THREADS) :])
    return Report(
        "hub: merges at once",
        (
            f"GB/s of fp32 by wall time, bf16 pushes, {load.units} units of {load.numel:,} parameters"
            f" ({load.params_bytes / MIB:.0f} MiB), Nesterov; best of {1 if quick else 3}.",
            "Snapshots: one after the other meanwhile. Memory: the most above that of the idle hub.",
        ),
        ("threads", "snapshots", "merges, GB/s", "a snapshot, s", "memory, MiB"),
        tuple(_merging_row(one) for one in rows),
        (Bar(f"merges go on beside snapshots: {beside:.2f} GB/s", None if quick else beside > 0),),
        {"merging": [asdict(one) for one in rows]},
    )


def _merging_row(one: Merging) -> tuple[str, ...]:
    took = f"{one.snapshot_s:.2f}" if one.snapshots else ""
    return str(one.threads), str(one.snapshots), f"{one.gb_s:.2f}", took, f"{one.peak_bytes / MIB:.0f}"


def measure_pushes(quick: bool) -> Report:
    """Measure pushes over loopback and over thin wires."""
    sizes = QUICK if quick else Sizes()
    pushed = push_times(sizes.push_bytes, sizes.repeats)
    rates = () if tun_link.why_not() else sizes.thin_mbit
    thin = {rate: thin_wire.filled(rate, sizes.thin_bytes) for rate in rates}
    bars = (_push_bar(pushed), *(_thin_bar(rate, share) for rate, share in thin.items()))
    return Report(
        "hub: pushes",
        (
            f"{sizes.push_bytes // MIB} MiB over loopback, median of {sizes.repeats} by turns with a bare"
            f" socket; {sizes.thin_bytes // MIB} MiB over thin wires with a round trip of 80 ms.",
        ),
        ("what", "share", "in detail"),
        (*_push_rows(sizes.push_bytes, pushed), *(_thin_row(rate, share) for rate, share in thin.items())),
        tuple(Bar(bar.text, None) for bar in bars) if quick else bars,
        {"push": asdict(pushed), "thin wires": thin},
    )


def measure_members(quick: bool) -> Report:
    """Measure what calls cost with many members."""
    found = [costs(members, 40 if quick else 400) for members in (MEMBERS[:2] if quick else MEMBERS)]
    most = found[-1]
    text = f"a heartbeat with {most.members:,} members: {1e3 * most.beat_s:.3f} ms, bar 0.3 ms"
    return Report(
        "hub: many members",
        (
            "CPU time of a thread at the hub, without the network; members push and are paced (`dylu`).",
            "Lock: the longest time for which other calls wait.",
        ),
        (
            "members",
            "heartbeat, ms",
            "99th percentile",
            "look what is due",
            "push and merge",
            "lock, status",
            "lock, snapshot",
        ),
        tuple(_members_row(one) for one in found),
        (Bar(text, None if quick else most.beat_s <= WANTED_CALL_S),),
        {"costs": [asdict(one) for one in found]},
    )


def _members_row(one: Costs) -> tuple[str, ...]:
    times = (one.beat_s, one.slowest_beat_s, one.idle_tick_s, one.push_s, one.status_s, one.snapshot_s)
    return f"{one.members:,}", *(f"{1e3 * seconds:.3g}" for seconds in times)


def measure_hub(quick: bool) -> Report:
    """Measure merges, a crowd and the memory."""
    sizes = QUICK if quick else Sizes()
    merges = {kind.text: speeds(kind, sizes.numel, sizes.rounds) for kind in KINDS}
    seen = crowd(sizes.crowd)
    memories = {name: memory(sizes.memory, settings) for name, settings in SETTINGS.items()}
    bars = (
        *(_merge_bar(name, found) for name, found in merges.items()),
        _crowd_bar(sizes.crowd, seen),
        *(_memory_bar(name, found) for name, found in memories.items()),
    )
    return Report(
        "hub",
        (
            f"Merge: GB/s of fp32 from push to anchor, {sizes.numel:,} parameters, by CPU time.",
            f"{sizes.crowd.nodes} nodes for {sizes.crowd.seconds:g} s; memory:"
            f" {sizes.memory.units * sizes.memory.numel:,} parameters, {MEMORY_NODES} nodes that push bf16.",
        ),
        ("what", "measured", "in detail"),
        (
            *(_merge_row(name, found) for name, found in merges.items()),
            _crowd_row(sizes.crowd, seen),
            *(_memory_row(name, found) for name, found in memories.items()),
        ),
        tuple(Bar(bar.text, None) for bar in bars) if quick else bars,
        {
            "merges": {name: asdict(found) for name, found in merges.items()},
            "crowd": asdict(seen),
            "memory": {name: asdict(found) for name, found in memories.items()},
        },
    )


def _merge_row(name: str, found: Speeds) -> tuple[str, ...]:
    parts = (
        ("encode", found.encode_gb_s),
        ("decode", found.decode_gb_s),
        ("check", found.check_gb_s),
        ("merge", found.merge_gb_s),
    )
    detail = ", ".join(f"{part} {speed:.2g}" for part, speed in parts)
    return f"merge, {name}", f"{found.path_gb_s:.2f} GB/s", detail


def _merge_bar(name: str, found: Speeds) -> Bar:
    text = f"{name}: {found.path_gb_s:.2f} GB/s per core from push to anchor, bar {WANTED_GB_S}"
    return Bar(text, found.path_gb_s >= WANTED_GB_S)


def _push_rows(num_bytes: int, times: PushTimes) -> Iterator[tuple[str, ...]]:
    ways = {
        "push over gRPC": times.grpc,
        "the same bytes over gRPC, unchecked": times.unchecked,
        "push over a TCP connection that gRPC opens": times.channel,
        "bare socket": times.bare,
    }
    gb = 1e-9 * num_bytes
    for name, way in ways.items():
        detail = (
            f"{gb / median(way.seconds):.2f} GB/s, {sum(way.cpu_s) / len(way.cpu_s) / gb:.2f} s of CPU/GB"
        )
        yield name, percent(_share(way, times.bare), 0), detail


def _share(way: Way, bare: Way) -> float:
    return median([theirs / ours for ours, theirs in zip(way.seconds, bare.seconds, strict=True)])


def _push_bar(times: PushTimes) -> Bar:
    share = _share(times.grpc, times.bare)
    text = f"a push is {percent(share, 0)} as fast as a bare socket, bar {percent(WANTED_SHARE, 0)}"
    return Bar(text, share >= WANTED_SHARE)


def _thin_row(rate_mbit: float, share: float) -> tuple[str, ...]:
    return (
        f"push over {rate_mbit:g} Mbit/s, 80 ms",
        percent(share, 0),
        "share of the wire, one push at a time",
    )


def _thin_bar(rate_mbit: float, share: float) -> Bar:
    text = f"a push fills {percent(share, 0)} of {rate_mbit:g} Mbit/s, 80 ms, bar {percent(WANTED_FILLED, 0)}"
    return Bar(text, share >= WANTED_FILLED)


def _crowd_row(size: Size, seen: Crowd) -> tuple[str, ...]:
    detail = (
        f"median {1e3 * _quantile(seen, 0.5):.1f} ms, {len(seen.heartbeat_s) / size.seconds:.0f} a second,"
        f" {seen.merged / size.seconds:.0f} pushes/s, {seen.refused} refused, {seen.late} late"
    )
    return f"heartbeat, {size.nodes} nodes, p99", f"{1e3 * _quantile(seen, 0.99):.1f} ms", detail


def _crowd_bar(size: Size, seen: Crowd) -> Bar:
    most_s = _quantile(seen, 0.99)
    text = f"99 % of the control calls of {size.nodes} nodes within {1e3 * most_s:.1f} ms, bar 50 ms"
    return Bar(text, most_s <= WANTED_BEAT_S)


def _quantile(seen: Crowd, share: float) -> float:
    return seen.heartbeat_s[min(len(seen.heartbeat_s) - 1, int(share * len(seen.heartbeat_s)))]


def _memory_row(name: str, found: Memory) -> tuple[str, ...]:
    detail = (
        f"{found.own / MIB:.0f} MiB without files, {found.idle / MIB:.0f} MiB idle, parameters"
        f" {found.params / MIB:.0f} MiB"
    )
    return f"memory, {name}", f"{found.peak / MIB:.0f} MiB", detail


def _memory_bar(name: str, found: Memory) -> Bar:
    text = f"{name}: {found.peak / MIB:.0f} MiB at most, bar {found.allowed / MIB:.0f} MiB"
    return Bar(text, found.peak <= found.allowed)


def _options(parser: argparse.ArgumentParser) -> None:
    tables = ("hub", "push", "members", "merges", "shards")
    parser.add_argument("--only", choices=tables, help="measure only one of the tables")


if __name__ == "__main__":
    main("hub", "Merge speed, push speed, response and memory of a hub.", measure, options=_options)
