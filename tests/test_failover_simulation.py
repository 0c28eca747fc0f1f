"""Tests failover in a simulation of the classes of `aedit hub`: no promise is broken in any history.

Journals, votes and configurations are those of production, on simulated disks, clocks and links; see
`kit.failover`.
"""

import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from kit.failover.disk import DISKS, SYSTEM, Disk, SimPath
from kit.failover.histories import (
    RECIPES,
    History,
    Simulation,
    copying_the_leader,
    failure,
    first_failure,
    history,
    losing_power,
    shortest,
    twin,
)
from kit.failover.hub import simulated
from kit.failover.mutants import MUTANTS
from kit.failover.world import Fault, Process, World

from aedit.async_sgd.replication import mirror
from aedit.system import num_cores, write_atomically

FAST, PARTS, SLOW, MOST = 200, 3, 100_000, 300
"""Histories of one part of `make test`, number of parts, histories in `make test-slow`, and until a mistake
must be found."""
LINE_S = 60.0
OLDER, FULL = (2537, 5749, 8290, 35295, 34800), (12363, 29622, 23858, 37663, 62886, 10922, 46155, 54581)
"""Histories in which an older folder led or was elected; in which a full hub put out or held up the rest,
lost a thread, or gave way before a standby had all that it had."""
SHOWN, OF_THE_TEST = (10781,), (14293, 41580, 80273)
"""A node was shown a version that was not on disk; a paused node took an old answer, a second disk went."""
TWINS = (2142, 3814, 8907, 17949, 20765, 22129, 1735, 20728, 81338, 33268, 30694, 65740, 70210)
"""Of two processes of one folder both led one term, or each left the votes to the other."""
NODES, TORN = (68552, 72336), (24154,)
"""A node that started again before its first vote was another voter; a follower kept torn values."""
EVENTS = ("behind", "cannot_lead", "journal_full", "must_be_elected", "snapshot", "standby_lost", "twin")


@pytest.fixture(autouse=True)
def _simulated():
    with simulated():
        yield


def check(seeds):
    """Run the histories of these seeds; show the shortest one that fails."""
    found = first_failure(seeds)
    assert found is None, "seed {}: {}\nshortest failing history:\n{}".format(*found)


@pytest.mark.timeout(900)
def test_no_promise_is_broken_and_the_histories_contain_what_they_are_to_show():
    """Failovers, replicas that come back, journals that are cut, snapshots, full disks, and real work."""
    seen, num_resigned = Counter(), 0
    for seed in range(FAST):
        what = history(seed)
        simulation = Simulation(what)
        try:
            simulation.run()
        except Exception:
            check([seed])
            raise
        seen[what.recipe] += 1
        seen["pushes"] += simulation.accounts.count
        seen["failovers"] += len(simulation.accounts.leaders) - 1
        seen["excused"] += simulation.accounts.is_excused
        seen["hubs, at least four"] += what.num_hubs > 3
        seen["with a liar"] += what.has_liar
        for hub in simulation.hubs:
            events = Counter(name for name, _ in hub.events)
            seen["in sync again"] += events["standby_follows"] > 1
            seen["ends with a reason"] += len(hub.reasons)
            num_resigned += events["resign"]
            for name in EVENTS:
                seen[f"event {name}"] += events[name]
            seen["set aside"] += any("/set_aside/" in name for name in hub.disk.names)
    assert seen["pushes"] > 10 * FAST
    assert seen["failovers"] > FAST / 4
    assert seen["excused"] < FAST / 5
    few = [name for name, count in seen.items() if count < FAST / 60]
    assert len(seen) == 8 + len(EVENTS) + len(set(RECIPES)), seen
    assert not few, seen
    assert num_resigned, "no leader has resigned"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(1, PARTS))
def test_no_promise_is_broken_in_more_histories(part):
    check(range(part * FAST, (part + 1) * FAST))


def first_failing_seed(seeds):
    """Return the first of these seeds whose history fails, or None. Runs in processes of a pool."""
    with simulated():
        return next((seed for seed in seeds if failure(history(seed))), None)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_no_promise_is_broken_in_many_more_histories(capsys):
    began_s = last_s = time.monotonic()
    first = PARTS * FAST
    parts = [range(at, min(at + 100, first + SLOW)) for at in range(first, first + SLOW, 100)]
    with ProcessPoolExecutor(num_cores(), get_context("spawn")) as pool:
        for part, seed in zip(parts, pool.map(first_failing_seed, parts), strict=True):
            if seed is not None:
                pool.shutdown(wait=False, cancel_futures=True)
                check([seed])
                pytest.fail(f"seed {seed}: failed in a process of its own, and not here")
            if (now := time.monotonic()) - last_s > LINE_S:
                last_s = now
                with capsys.disabled():
                    print(f"\n{part.stop - first} of {SLOW} histories in {now - began_s:.0f} s", flush=True)


@pytest.mark.parametrize("seed", [*OLDER, *FULL, *SHOWN, *OF_THE_TEST, *TWINS, *NODES, *TORN])
def test_histories_that_found_a_fault_break_no_promise(seed):
    check([seed])


def test_a_copy_of_the_leaders_folder_at_another_address_leads_no_term_of_the_leader():
    """Found so: it led the term on while the leader was paused or gone, and that one led on as well."""
    for seed in (seed for seed in range(500) if RECIPES[seed % len(RECIPES)] is twin):
        assert not failure(copying_the_leader(history(seed))), seed


def test_values_that_a_follower_had_before_it_lost_power_are_compared():
    """Found so: what was torn was confirmed, and merged."""
    histories = [losing_power(history(seed)) for seed in range(20)]
    assert not any(map(failure, histories))
    uncompared = [(mirror, "check_payloads", lambda *_: None)]
    assert any(failure(one, uncompared) for one in histories)


def test_a_full_hub_that_starts_again_sends_its_journal_and_leads_on():
    """It ended: the file with its address could not be written, though it was there."""
    full = Fault(3.0, "full", 0, 0, 4.0)
    simulation = Simulation(History(1, "full", 2, 1, (full, Fault(3.5, "kill", 0, 0, 0.2))))
    simulation.run()
    assert not [reason for hub in simulation.hubs for reason in hub.reasons]
    assert simulation.accounts.count > 3


def test_what_comes_to_a_paused_process_is_done_in_order_when_it_goes_on():
    world, done = World(1), []
    process = Process(world, 0)
    process.alive = True
    process.pause(5.0)
    for at_s in (1.0, 2.0, 3.0, 6.0):
        world.at(at_s, process.awake, process.life, done.append, at_s)
    world.run(2.5)
    process.pause(world.now)
    world.run(4.0)
    assert done == [1.0, 2.0, 3.0]
    world.run(9.0)
    assert done == [1.0, 2.0, 3.0, 6.0]


def check_found(name, num_histories, capsys):
    """Check that a mutant is found; print the row of the table in docs/protocol.md."""
    found = first_failure(range(num_histories), MUTANTS[name])
    assert found is not None, f"{name}: not found in {num_histories} histories"
    seed, why, least = found
    with capsys.disabled():
        print(f"\n| {name} | {seed + 1} | {least.recipe} | {len(least.faults)} |\n{why}")
    assert failure(least, MUTANTS[name]), "the shortest history fails as well"
    assert not failure(least), "it is the mutant that fails, and not the protocol"


QUICK = ("votes are never saved", "a message counts for the voter that it names")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", QUICK)
def test_a_mistake_in_production_code_is_found(name, capsys):
    check_found(name, 100, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(set(MUTANTS) - set(QUICK)))
def test_every_mistake_in_production_code_is_found(name, capsys):
    check_found(name, MOST, capsys)


def test_the_table_of_the_documentation_names_every_mistake():
    text = (Path(__file__).parents[1] / "docs/protocol.md").read_text()
    _, _, table = text.partition("| mistake | history |")
    rows = [line.split(" | ") for line in table.partition("\n\n")[0].splitlines()[2:]]
    assert {row[0].removeprefix("| ") for row in rows} == set(MUTANTS)
    assert all(int(row[1]) <= MOST for row in rows)


def test_a_history_is_decided_by_its_seed():
    def disks(seed):
        simulation = Simulation(history(seed))
        simulation.run()
        files = {name: bytes(inode.data) for hub in simulation.hubs for name, inode in hub.disk.names.items()}
        return simulation.accounts.pushes, simulation.accounts.leaders, files

    assert disks(3) == disks(3)
    assert disks(3) != disks(4)


def test_the_shortest_history_has_only_the_faults_that_matter():
    what = history(4)
    guilty = what.faults[-1]
    assert shortest(what, lambda h: guilty in h.faults).faults == (guilty,)


@pytest.mark.parametrize("seed", range(50))
def test_a_crash_keeps_what_was_flushed_and_may_take_the_rest(seed):
    SYSTEM.random = random.Random(seed)
    disk = DISKS["d"] = Disk(SYSTEM.random)
    write_atomically(SimPath("/d/votes"), "promised")
    handle = SYSTEM.open(SimPath("/d/journal"), SYSTEM.O_RDWR | SYSTEM.O_CREAT)
    SYSTEM.pwrite(handle, b"records", 0)
    SYSTEM.fdatasync(handle)
    SYSTEM.fsync(SYSTEM.open(SimPath("/d"), SYSTEM.O_RDONLY))
    SYSTEM.pwrite(handle, b"more", 7)
    disk.crash()
    assert SimPath("/d/votes").read_text() == "promised"
    assert b"recordsmore".startswith(found := SimPath("/d/journal").read_bytes())
    assert found.startswith(b"records")


def test_some_crash_takes_what_was_not_flushed():
    kept = set()
    for seed in range(50):
        SYSTEM.random = random.Random(seed)
        disk = DISKS["d"] = Disk(SYSTEM.random)
        handle = SYSTEM.open(SimPath("/d/journal"), SYSTEM.O_RDWR | SYSTEM.O_CREAT)
        SYSTEM.pwrite(handle, b"records", 0)
        disk.crash()
        kept.add(bytes(disk.names["/d/journal"].data) if "/d/journal" in disk.names else None)
    assert {None, b"", b"records"} <= kept
    assert any(data and data != b"records" for data in kept), "torn"
