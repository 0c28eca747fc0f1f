"""Measure swarms of many peers: the cost of gossip and parts, owners under churn, and the balance of load.

Real peers, each in a process of its own with its hubs, and nodes of a fixed pace, many in each of two
processes. And 1,000 simulated peers, of which only the signed cards exist, in the code by which a peer places
parts.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.kit import netns
from benchmarks.kit.netns import Place
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.peers_parts.crowd import NODE, NODE_PROCESSES, Crowd, Size, crowd
from benchmarks.peers_parts.simulated import Balance, balance

PARTS, COPIES = 8, 3
CROWDS = (32, 64)
QUICK = (Size(peers=6, processes=2, parts=2, copies=COPIES, steady_s=8, changes=2, change_every_s=6),)
SIMULATED, SIMULATED_QUICK = (32, 64, 1000), (100,)
SIMULATED_PARTS, CHANGES, CHANGES_QUICK = 64, 100, 20
RATE_MBIT = 1000
_SEED = 1


def measure(args: argparse.Namespace) -> list[Report]:
    """Return the tables of real and of simulated peers."""
    full = tuple(map(_size, args.peers or CROWDS))
    sizes, simulated = (QUICK, SIMULATED_QUICK) if args.quick else (full, SIMULATED)
    changes = CHANGES_QUICK if args.quick else CHANGES
    reports: list[Report] = []
    if args.only != "simulated":
        crowds = [_crowd(size) for size in sizes]
        reports += [_costs(crowds, sizes[0]), _moves(crowds, sizes[0])]
    if args.only != "real":
        balances = [balance(peers, SIMULATED_PARTS, COPIES, changes, _SEED) for peers in simulated]
        reports += [_load(balances)]
    return reports


def _size(peers: int) -> Size:
    return Size(
        peers=peers, processes=peers, parts=PARTS, copies=COPIES, steady_s=30, changes=6, change_every_s=5
    )


def options(parser: argparse.ArgumentParser) -> None:
    """Add the choice of tables."""
    parser.add_argument("--only", choices=("real", "simulated"), help="only the tables of these peers")
    sizes = f"real peers of each crowd (default {' '.join(map(str, CROWDS))})"
    parser.add_argument("--peers", type=int, nargs="+", metavar="N", help=sizes)


def _crowd(size: Size) -> Crowd:
    with tempfile.TemporaryDirectory() as name, _place() as place:
        return crowd(Path(name), size, place, _SEED)


@contextmanager
def _place() -> Iterator[Place | None]:
    """Yield a network namespace, whose loopback device counts the bytes of this benchmark alone."""
    if netns.why_not() is not None:
        yield None
        return
    with netns.network(1, RATE_MBIT) as places:
        yield places[0]


def _costs(crowds: list[Crowd], size: Size) -> Report:
    rows = tuple(
        (
            str(found.peers),
            f"{found.pushes_per_s:.1f}",
            f"{found.calls_per_s:.2f}",
            f"{found.gossip_bytes_per_s / 1e3:.1f}",
            "-" if found.other_bytes_per_s is None else f"{found.other_bytes_per_s / 1e3:.1f}",
            f"{1e3 * found.peer_cpu:.1f}",
            f"{1e3 * found.hub_cpu:.1f}",
            f"{1e3 * found.node_cpu:.1f}",
        )
        for found in crowds
    )
    failed, refused = sum(found.failed for found in crowds), sum(found.refused for found in crowds)
    return Report(
        "many peers: cost per peer",
        (f"Each replica is a hub process; {NODE_PROCESSES} processes host all nodes. The lease of a card is a"
         f" second for each peer. {size.parts} parts, {size.copies} copies; means over {size.steady_s:g} s.",
         f"A node pushes {NODE.units} units of {4 * NODE.numel / 1e3:.0f} kB every"
         f" {NODE.every * NODE.step_s:g} s. Other bytes: all else on the loopback device."),
        ("peers", "pushes/s", "gossip calls/s", "gossip kB/s", "other kB/s", "peer CPU ms/s",
         "hubs' CPU ms/s", "node CPU ms/s"),
        rows,
        (Bar(f"nodes that ended too early: {failed}", failed == 0),
         Bar(f"pushes that were not merged: {refused}", refused == 0)),
        {"crowds": [asdict(found) for found in crowds]},
    )  # fmt: skip


def _moves(crowds: list[Crowd], size: Size) -> Report:
    rows = tuple(
        (
            str(found.peers),
            str(found.changes),
            str(found.owners_moved),
            str(found.ideal_owners_moved),
            str(found.replicas_begun),
            str(found.ideal_replicas_begun),
            f"{found.settled_s:.1f}",
        )
        for found in crowds
    )
    return Report(
        "many peers: owners under churn",
        (f"Peers leave and others come by turns, one change every {size.change_every_s:g} s."
         " By keys: what placement asks for, calculated from the keys of those who are there.",),
        ("peers", "changes", "owner changes", "by keys", "replicas begun", "by keys", "settled after s"),
        rows,
        (Bar("every part has all copies and the owner that it is to have",
             all(found.is_settled for found in crowds)),),
        {"crowds": [asdict(found) for found in crowds]},
    )  # fmt: skip


def _load(balances: list[Balance]) -> Report:
    rows = tuple(
        (
            str(found.peers),
            f"{found.mean:.2f}",
            f"{found.most}",
            f"{found.ideal_most:.1f} [{found.ideal_most_within[0]}, {found.ideal_most_within[1]}]",
            f"{found.most / found.mean:.1f}",
            f"{found.moved:.2f}",
            f"{found.ideal_moved:.2f}",
            f"{found.owners_moved:.3f}",
            f"{found.ideal_owners_moved:.3f}",
            f"{1e3 * found.look_s:.1f}",
        )
        for found in balances
    )
    needless = sum(found.needless for found in balances)
    inside = all(found.most <= found.ideal_most_within[1] for found in balances)
    return Report(
        "simulated peers: balance",
        (f"{SIMULATED_PARTS} parts, {COPIES} copies; {balances[0].changes} times a peer leaves or one comes.",
         "Ideal: independent random scores (NumPy), mean and 95 % of 200 draws; parts x copies / peers."),
        ("peers", "replicas a peer", "most", "ideal most", "most / mean", "moved a change", "ideal",
         "owners moved", "ideal", "a look, CPU ms"),
        rows,
        (Bar(f"replicas that moved without need: {needless}", needless == 0),
         Bar("the peer with most has no more than 97.5 % of independent draws give", inside)),
        {"balances": [asdict(found) for found in balances]},
    )  # fmt: skip


if __name__ == "__main__":
    main(
        "peers",
        "Many peers of a swarm: cost of gossip and parts, churn, and balance.",
        measure,
        options=options,
    )
