"""Faults of a swarm: whole machines are killed, stopped and cut off, owners and the first one included.

The processes of hivemind's hash tables are killed too, of one machine and of all at once.
"""

import random
import signal
import time
from collections.abc import Callable
from functools import partial

from benchmarks.chaos_parts.swarm_peers import SwarmPeer
from benchmarks.chaos_parts.swarm_scene import Scene
from benchmarks.chaos_parts.swarm_tables import table_processes

KILL_EVERY_S, AWAY_EVERY_S, AWAY_S = 20.0, 40.0, 30.0
TABLES_FROM_S, TABLES_EVERY_S, TABLES_WAIT_S = 47.0, 60.0, 30.0
"""The first time, and every second one after it, is between two times at which a machine is away."""
AIM_S = 6.0
"""How long a kill waits for a push of the large unit."""

Act = Callable[[Scene], None]


def fault_plan(
    seconds: float, chance: random.Random, away_s: float, *, wires: bool, tables: int = 0
) -> list[tuple[float, Act]]:
    """Return (second, fault) in order. tables: machines that have a hash table."""
    kills: list[Act] = [_kill_owner, _kill_at_push, _kill_first, _kill_any]
    aways: list[Act] = [partial(_stop, away_s), partial(_cut if wires else _stop, away_s)]
    found: list[tuple[float, Act]] = []
    # A machine is stopped or cut off between two kills: the one that was killed last is about to be back.
    for every_s, first_s, kinds in ((KILL_EVERY_S, 5.0, kills), (AWAY_EVERY_S, 15.0, aways)):
        at_s, bag = first_s, list[Act]()
        while at_s < seconds - 5:
            bag = bag or chance.sample(kinds, len(kinds))  # all kinds by turns
            found.append((at_s, bag.pop()))
            at_s += every_s
    at_s, num = TABLES_FROM_S, tables
    while tables and at_s < seconds - 5:
        found.append((at_s, partial(_kill_tables, num)))
        at_s, num = at_s + TABLES_EVERY_S, 1 if num == tables else tables
    return sorted(found, key=lambda entry: entry[0])


def _kill_owner(scene: Scene) -> None:
    _kill(scene, scene.owner(scene.chance.randrange(scene.ground.shape.parts)), "owner killed")


def _kill_at_push(scene: Scene) -> None:
    """Kill the owner of the large unit while a node pushes it."""
    scene.until(scene.pushes_large, AIM_S)
    time.sleep(scene.chance.uniform(0, 0.1))
    _kill(scene, scene.owner(0), "owner killed in a push")


def _kill_first(scene: Scene) -> None:
    first = scene.ground.peers[0]
    _kill(scene, first if first in scene.present() else None, "first machine killed")


def _kill_any(scene: Scene) -> None:
    _kill(scene, None, "machine killed")


def _kill(scene: Scene, peer: SwarmPeer | None, kind: str) -> None:
    """Kill a machine, any if `peer` is None. It comes back, or another takes its place.

    One with an empty disk comes only if all parts have all their copies: only then does a majority of each
    outlive it and the machine that is stopped or cut off.
    """
    if peer is None:
        peer, kind = scene.chance.choice(scene.present()), "machine killed"
    renewed = scene.chance.random() < 0.5 and all_in_sync(scene, peer)
    scene.note(f"{kind}, disk lost" if renewed else kind, peer)
    peer.kill()
    peer.due_s = time.monotonic() + (absent_s := scene.chance.uniform(0.0, scene.back_within_s))
    scene.story.absent_s += absent_s
    if renewed:
        scene.ground.replace_machine(peer)


def _kill_tables(num: int, scene: Scene, until_s: float | None = None) -> None:
    """Kill the hash tables of so many machines at once; of fewer if there are no more for a while.

    A table that is not up yet is waited for while other faults go on. until_s: how long.
    """
    ground, tables = scene.ground, scene.story.tables
    now = time.monotonic()
    until_s = until_s or now + TABLES_WAIT_S
    away = {outage.machine for outage in tables.open()}
    mine = [peer for peer in scene.present() if peer in scene.with_tables() and peer.name not in away]
    found = [peer for peer in mine if peer.slot in ground.tables and table_processes(peer)]
    if len(found) < num and now < until_s:
        scene.mends.append((now + 1.0, partial(_kill_tables, num, scene, until_s)))
        return
    first = len(tables.outages) % max(1, len(found))  # by turns
    if killed := [*found[first:], *found[:first]][:num]:
        scene.note("hash table killed" if len(killed) == 1 else "all hash tables killed at once", *killed)
        tables.kill(killed)


def all_in_sync(scene: Scene, victim: SwarmPeer) -> bool:
    """Return whether each part has all its copies, and all are on machines that run."""
    if any(peer.is_away or peer.process is None for peer in scene.ground.peers):
        return False
    status = scene.status(next(peer for peer in scene.present() if peer is not victim))
    followers = scene.ground.shape.copies - 1
    return status is not None and all(part and part["in_sync"] >= followers for part in status["parts"])


def _stop(away_s: float, scene: Scene) -> None:
    peer = scene.owner(scene.chance.randrange(scene.ground.shape.parts)) or scene.ground.peers[0]
    scene.note("machine stopped", peer)
    peer.is_away = True
    scene.ground.stopped.add(peer.name)
    peer.send(signal.SIGSTOP)
    now = time.monotonic()
    scene.mends.append((now + away_s, partial(_go_on, scene, peer, now)))


def _go_on(scene: Scene, peer: SwarmPeer, since_s: float) -> None:
    scene.story.absent_s += time.monotonic() - since_s
    peer.is_away = False
    peer.send(signal.SIGCONT)


def _cut(away_s: float, scene: Scene) -> None:
    peer = scene.owner(scene.chance.randrange(scene.ground.shape.parts)) or scene.ground.peers[0]
    scene.note("machine cut off", peer)
    peer.is_away = True
    scene.ground.cut(peer, "down")
    scene.mends.append((time.monotonic() + away_s, partial(_mend, scene, peer)))


def _mend(scene: Scene, peer: SwarmPeer) -> None:
    peer.is_away = False
    scene.ground.cut(peer, "up")
