"""Tests failover in a simulation of hubs, nodes, disks and network: no promise is broken in any history."""

from collections import Counter

import pytest
from kit.failover.histories import Simulation, failure, first_failure, history, shortest
from kit.failover.mutants import MUTANTS

FAST, SLOW, SHARDS = 2_000, 100_000, 20


def check(seeds):
    """Run the histories of these seeds; show the shortest one that fails."""
    found = first_failure(seeds)
    assert found is None, "seed {}: {}\nshortest failing history:\n{}".format(*found)


@pytest.mark.timeout(300)
def test_no_promise_is_broken_in_two_thousand_histories():
    check(range(FAST))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_promise_is_broken_in_a_hundred_thousand_histories(shard):
    size = SLOW // SHARDS
    check(range(FAST + shard * size, FAST + (shard + 1) * size))


@pytest.mark.parametrize("name", MUTANTS)
def test_every_broken_protocol_is_found_within_a_thousand_histories(name, capsys):
    found = first_failure(range(1000), *MUTANTS[name])
    assert found is not None, f"{name}: not found"
    seed, why, least = found
    with capsys.disabled():
        print(f"\n{name}: found in history {seed + 1}, {len(least.faults)} faults: {why[:80]}")
    assert failure(least, *MUTANTS[name]), "the shortest history fails as well"
    assert not failure(least), "it is the mutant that fails, and not the protocol"


def test_a_history_is_decided_by_its_seed():
    def told(seed):
        simulation = Simulation(history(seed))
        simulation.run()
        return simulation.world.accounts, [hub.disk.log for hub in simulation.hubs]

    assert told(3) == told(3)
    assert told(3) != told(4)


def test_the_histories_contain_what_they_are_to_show():
    """Else they would prove nothing: failovers, dropped and readmitted replicas, and real work."""
    seen = Counter()
    for seed in range(100):
        simulation = Simulation(history(seed))
        simulation.run()
        accounts = simulation.world.accounts
        newest = [one for hub in simulation.hubs for one in hub.machine.configs[-1:]]  # a disk may be new
        seen["failovers"] += len(accounts.leaders) - 1
        seen["pushes"] += len(accounts.acknowledged)
        seen["in sync again"] += any(len(one.replicas) > 1 for one in newest)
        seen["hand-overs"] += sum(hub.handed_over for hub in simulation.hubs)
        seen["ruined"] += any(hub.ruined for hub in simulation.hubs)
        seen["cut back"] += sum(hub.cut for hub in simulation.hubs)
        seen["with three hubs"] += len(simulation.hubs) == 3
    assert seen["failovers"] > 50
    assert seen["pushes"] > 2_000
    assert seen["in sync again"] > 50
    assert seen["with three hubs"] > 20
    assert seen["hand-overs"] > 20
    assert seen["cut back"] > 20
    assert seen["ruined"] > 2


def test_the_shortest_history_has_only_the_faults_that_matter():
    what = history(5)
    guilty = what.faults[-1]
    assert shortest(what, lambda h: guilty in h.faults).faults == (guilty,)
