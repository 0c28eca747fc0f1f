"""Tests when a hub merges, how it measures the speed of its nodes, and how it leases samples."""

import math

import numpy as np
import pytest
from kit.hub_machine import Training, World, config, joiner, kinds, plan, through_a_file, values, world

from aedit.async_sgd.hub import Denied
from aedit.async_sgd.hub.status import hub_status, run_news
from aedit.async_sgd.rules import Leased, Left, Merged, OuterConfig, RoundOpened
from aedit.types import Verdict

# --- quorum


def test_a_quorum_waits_a_share_of_the_usual_time_for_the_others():
    made = world(3, quorum=2, grace=0.5, expire_s=1000)
    made.tick(10)
    made.push(0, 1.0), made.push(1, 1.0), made.push(2, 1.0)  # all are there: at once, after 10 s
    assert Merged in kinds(made.tick())
    made.push(0, 2.0)
    made.now += 3
    made.push(1, 4.0)
    assert Merged not in kinds(made.tick(4.9))
    assert Merged in kinds(made.tick(0.2))
    np.testing.assert_allclose(values(made), -1.0 - 2 / 3 * 3.0, rtol=1e-6)  # two of three


@pytest.mark.parametrize("together", [4, 2])
def test_nodes_of_one_speed_are_one_round_of_nesterov_with_a_quorum_of_one(together):
    """All four pushes come in the grace period, or two of them and then the other two."""
    outer = OuterConfig(kind="nesterov", lr=0.7, momentum=0.9)
    made = World(plan(config(quorum=1, grace=0.5, expire_s=1000), outer=outer))
    for node in range(4):
        made.join(f"node{node}")
    made.found()
    phi, u, s = 0.0, 0.0, together / 4
    decay = 0.9**s
    for round_number in range(5):
        made.now += 10
        for first in range(0, 4, together):
            pushed = [float(node + round_number) for node in range(first, first + together)]
            for node, value in zip(range(first, first + together), pushed, strict=True):
                made.push(node, value)
            made.tick(0 if together == 4 else 10)  # hub.grace_cap_s
            mean = sum(pushed) / together
            u = decay * u + s * mean
            phi -= 0.7 * (s * mean + 0.9 * (1 - decay) / 0.1 * u)
        np.testing.assert_allclose(values(made), phi, rtol=1e-5)
    merges = [record for record in made.journal if isinstance(record, Merged) and record.version > 1]
    assert {len(record.parts) for record in merges if record.unit == 0} == {together}
    assert all(part.staleness == 0 for record in merges for part in record.parts)


def test_a_quorum_of_one_does_not_wait_longer_than_the_grace_period():
    made = world(3, quorum=1, grace=0.5, expire_s=1000)
    made.tick(10)
    made.push(0, 3.0)
    assert Merged not in kinds(made.tick(4.9))
    made.push(1, 3.0)
    assert Merged in kinds(made.tick(0.2))
    np.testing.assert_allclose(values(made), -2.0, rtol=1e-6)  # two of three


def test_the_grace_period_has_a_longest():
    made = world(3, quorum=2, grace=0.5, grace_cap_s=1.0, expire_s=1000)
    made.tick(10)
    made.push(0, 1.0), made.push(1, 1.0)
    assert Merged not in kinds(made.tick(0.9))
    assert Merged in kinds(made.tick(0.2))


def test_who_comes_in_the_grace_period_ends_it():
    made = world(2, quorum=1, grace=0.5)
    made.push(0, 1.0)
    assert Merged in kinds(made.tick())
    made = world(3, quorum=2, grace=0.5, expire_s=1000)
    made.tick(100)
    made.push(0, 1.0), made.push(1, 1.0)
    assert Merged not in kinds(made.tick(1))
    made.push(2, 1.0)
    assert Merged in kinds(made.tick())


def test_a_node_that_leaves_does_not_block_the_others():
    made = world(3, quorum="all")
    made.push(0, 1.0), made.push(1, 3.0)
    assert Merged not in kinds(made.tick(1))
    made.do(made.hub.leave(2))
    assert Merged in kinds(made.tick())
    assert (values(made) == -2.0).all()


def test_what_a_node_brought_before_it_left_is_merged():
    made = world(2, quorum=2)
    made.push(0, 5.0)
    made.do(made.hub.leave(0)), made.do(made.hub.leave(1))
    made.settle()
    assert (values(made) == -5.0).all()


def test_a_silent_node_is_given_up_and_the_merge_goes_on_without_it():
    made = world(2, quorum="all", expire_s=15)
    for _ in range(10):
        made.tick(1)
        made.heartbeat(0)
    made.push(0, 1.0)
    for _ in range(5):
        assert Left not in kinds(made.tick(1))
        made.heartbeat(0)
    assert kinds(made.tick(0.5))[-3:] == [Left, Merged] or Merged in kinds(made.tick())
    assert made.hub.state.members[1].gone == "silent for 15 s"
    assert (values(made) == -1.0).all()


def test_one_who_is_alive_but_brings_nothing_does_not_block_the_others_for_ever():
    made = world(2, quorum="all", expire_s=15)

    def wait(seconds):
        for _ in range(seconds):
            made.heartbeat(0), made.heartbeat(1)
            made.tick(1)

    wait(20)
    made.push(0, 1.0), made.push(1, 1.0)
    made.settle()  # 20 s are usual
    wait(20)
    made.push(0, 1.0)
    wait(59)
    assert made.hub.state.units[0].pending
    wait(2)
    assert not made.hub.state.units[0].pending


@pytest.mark.parametrize("state", ["joining", "stalled"])
def test_nobody_waits_for_one_who_fetches_its_weights_or_is_stuck(state):
    made = world(2, quorum="all")
    made.push(0, 1.0)
    assert Merged not in kinds(made.tick(1))
    made.heartbeat(1, state)
    assert Merged in kinds(made.tick())


def test_all_means_all_who_are_there_now():
    made = world(3, quorum="all", expire_s=1e6)
    made.push(0, 1.0), made.push(1, 1.0)
    made.do(made.hub.leave(0))
    assert Merged not in kinds(made.tick(1))  # two have come and two are there, but not the same two
    made.push(2, 1.0)
    assert Merged in kinds(made.tick())


def test_patience_begins_with_the_first_who_has_come():
    made = world(4, quorum=3, expire_s=15)
    for second in range(1, 15):
        for node in range(4):
            made.heartbeat(node)
        made.push(0, 1.0) if second == 1 else made.push(1, 1.0) if second == 14 else None
        assert Merged not in kinds(made.tick(1)), second
    assert Merged in kinds(made.tick(1.5))


def test_a_quorum_weighs_by_tokens_when_told_to():
    made = world(2, quorum=2, weights="tokens")
    made.push(0, 1.0, tokens=200, steps=10), made.push(1, 4.0, tokens=100, steps=10)
    made.settle()
    np.testing.assert_allclose(values(made), -(4 * 1.0 + 1 * 4.0) / 5, rtol=1e-6)


def test_a_merge_of_nothing_but_pushes_without_steps_leaves_the_anchor_as_it_is():
    made = world(1, more={"outer": OuterConfig()})
    made.push(0, 1.0)
    made.settle()
    before = made.hub.state.units[0].anchor
    made.push(0, 3.0, steps=0)
    made.settle()
    after = made.hub.state.units[0].anchor
    assert (after.version, after.values is before.values) == (before.version + 1, True)
    assert after.outer is before.outer
    assert made.hub.state.members[0].decision(0).verdict == Verdict.MERGED


def test_an_outer_step_that_overflows_leaves_the_anchor_as_it_is():
    made = world(1)
    made.push(0, -3e38)
    made.settle()
    assert (values(made) == np.float32(3e38)).all()
    made.push(0, -3e38)
    made.settle()
    assert made.hub.anchor(0)[0] == 3
    assert (values(made) == np.float32(3e38)).all()


# --- pace, rounds, budget


def test_each_node_does_the_steps_it_can_while_the_fastest_does_all():
    made = world(4, more={"every": 128}, expire_s=1e9)
    training = Training(made, (0.58, 0.75, 1.51, 3.33), 100)
    assert run_news(made.hub, 0, made.now).pace_steps == 128
    training.run(999.0)
    assert [made.hub.pace_steps(node) for node in range(4)] == [128, 98, 49, 22]
    made.do(made.hub.leave(0))
    assert [made.hub.pace_steps(node) for node in range(1, 4)] == [128, 63, 28]
    assert made.hub.paces() == {1: 128, 2: 63, 3: 28}
    assert [node["pace_steps"] for node in hub_status(made.hub, made.now)["nodes"]] == [0, 128, 63, 28]


def test_a_node_that_claims_any_speed_cannot_stop_the_others():
    made = world(3, more={"every": 128}, expire_s=1e9)
    training = Training(made, (1.0,) * 3, 128)
    made.heartbeat(2, steps_per_s=1e30)
    assert [made.hub.pace_steps(node) for node in range(3)] == [128, 128, 128]  # nobody has pushed yet
    training.run(400.0)
    for bad in (math.nan, math.inf, -1.0):
        made.heartbeat(2, steps_per_s=bad)
        assert [made.hub.pace_steps(node) for node in range(3)] == [128, 128, 128]


def test_rounds_by_the_clock_keep_to_their_grid_and_open_once_after_a_pause():
    made = world(1, expire_s=1e6, more={"every": 10, "pace": "seconds"})
    opened = []
    for seconds in (9.9, 0.3, 9.6, 0.3, 35.0, 0.1, 9.7, 0.3):
        opened.append([record for record in made.tick(seconds) if isinstance(record, RoundOpened)])
    assert [len(rounds) for rounds in opened] == [0, 1, 0, 1, 1, 0, 0, 1]
    at_s = [rounds[0].at_s for rounds in opened if rounds]
    np.testing.assert_allclose(at_s, [10.0, 20.0, 55.1, 65.1])
    assert run_news(made.hub, 0, made.now).round == 4
    assert run_news(made.hub, 0, made.now).pace_steps == 0


def test_the_budget_is_the_mean_over_members_and_the_run_ends_with_it():
    made = world(2, more={"steps": 20})
    for node, (steps, progress) in enumerate([(10, 0.25), (30, 1.0)]):
        made.tick(1.0)  # in no time nobody makes 30 steps
        for unit in (0, 1):
            made.push(node, 1.0, unit, steps=steps)
        made.settle()
        said = run_news(made.hub, 0, made.now)
        assert said.progress == pytest.approx(progress)
        assert said.finished == (progress == 1.0)
    assert (said.total_steps, said.total_tokens) == (40, 200)


def test_the_budget_in_time_does_not_count_outages():
    made = world(1, more={"seconds": 100.0, "steps": 10**9}, expire_s=1e6)
    for _ in range(60):
        made.tick(1)
    again = made.replayed()
    assert again.elapsed_s(1e6) == 60.0
    assert again.elapsed_s(1e6 + 39) == 99.0
    assert not run_news(again, 0, 1e6 + 39).finished
    assert run_news(again, 0, 1e6 + 40).finished


def test_the_first_of_the_living_evaluates():
    made = world(3)
    made.do(made.hub.leave(0))
    assert [run_news(made.hub, node, made.now).evaluates for node in range(3)] == [False, True, False]


def test_nodes_hear_of_each_others_donors():
    made = world(1)
    made.join("x", donor="h:1"), made.join("y", donor="h:2")
    assert made.hub.state.roster.donors(1, 16) == ("h:2",)
    made.do(made.hub.leave(2))
    assert made.hub.state.roster.donors(0, 16) == ("h:1",)


# --- data


def test_no_position_is_with_two_nodes_and_what_comes_back_goes_out_first():
    made = world(2)
    assert made.lease(0, 10) == [(0, 10)]
    assert made.lease(1, 10) == [(10, 20)]
    assert made.lease(0, 5) == [(20, 25)]
    made.do(made.hub.use(0, [(0, 4)]))
    made.do(made.hub.leave(0))
    assert made.lease(1, 8) == [(4, 10), (20, 22)]
    assert made.lease(1, 8) == [(22, 25), (25, 30)]


def test_use_may_be_said_twice_and_of_what_is_gone():
    made = world(2)
    made.lease(0, 10)
    assert len(made.do(made.hub.use(0, [(0, 4)]))) == 1
    assert made.hub.use(0, [(0, 4)]) == []
    assert made.hub.use(0, [(0, 3)]) == []
    assert made.hub.use(1, [(0, 9)]) == []
    assert len(made.do(made.hub.use(0, [(0, 99)]))) == 1
    assert made.hub.state.pool.outstanding(0) == []
    assert made.hub.use(0, [(0, 99)]) == []


def test_use_may_be_said_twice_in_one_breath():
    made = world(1)
    made.lease(0, 10)
    for upto, rest in ((4, [(4, 10)]), (10, [])):
        made.do([*made.hub.use(0, [(0, upto)]), *made.hub.use(0, [(0, upto)]), *made.hub.use(0, [(0, 2)])])
        assert made.hub.state.pool.outstanding(0) == rest
    assert made.hub.state.pool.returned == []


def test_a_node_that_missed_a_reply_is_told_the_leases_that_it_lacks():
    made = world(2)
    made.lease(0, 10), made.lease(1, 5), made.lease(0, 10), made.lease(0, 5)
    made.do(made.hub.use(0, [(0, 4)]))
    pool = made.hub.state.pool
    assert pool.unknown(0, [(0, 10), (25, 30)]) == [(15, 25)]
    assert pool.unknown(0, []) == [(4, 10), (15, 25), (25, 30)]
    assert pool.unknown(0, [(25, 30), (0, 10), (15, 25)]) == []


def test_a_lease_has_a_longest_and_nobody_hoards():
    made = world(1, lease_samples=7)
    assert made.lease(0, 100) == [(0, 7)]
    assert made.lease(0, 0) == [(7, 14)]
    for _ in range(1022):
        made.lease(0, 1)
    with pytest.raises(Denied, match="1024 leases") as denied:
        made.lease(0, 1)
    assert denied.value.kind == "full"


def test_a_lease_of_crumbs_has_no_more_than_64_of_them():
    made = world(2)
    for _ in range(100):
        made.lease(0, 1), made.lease(1, 1)
    made.do(made.hub.leave(0))
    assert made.lease(1, 100) == [(position, position + 1) for position in range(0, 128, 2)]


def test_a_process_that_was_given_up_too_soon_gets_back_what_nobody_else_has_got():
    made = world(2, expire_s=15)
    session = made.hub.state.members[0].session
    made.lease(0, 10), made.lease(0, 10)
    made.do(made.hub.use(0, [(0, 3)]))
    made.now += 16
    made.heartbeat(1)
    made.tick()
    assert made.lease(1, 2) == [(20, 22)], "it may be back soon"
    made.do(made.hub.use(1, [(20, 22)]))
    for _ in range(31):
        made.now += 10
        made.heartbeat(1)
        made.tick()
    assert made.lease(1, 4) == [(3, 7)]
    decided = made.do(made.hub.join(joiner("node0", session=session), made.now))
    assert decided[:-1] == [Leased(0, 7, 10), Leased(0, 10, 20)]
    made.do(made.hub.use(0, [(0, 10)]))  # it speaks of the lease by the position at which that began
    assert made.hub.state.pool.outstanding(0) == [(10, 20)]
    assert made.hub.state.pool.outstanding(1) == [(3, 7)]


def silent_with_leases():
    """Return a hub of three of which node 0 has fallen silent with (3, 10), and the next new position."""
    made = world(3, expire_s=15)
    made.lease(0, 10)
    made.do(made.hub.use(0, [(0, 3)]))
    made.now += 16
    made.heartbeat(1), made.heartbeat(2)
    made.tick()
    assert made.hub.state.members[0].gone == "silent for 15 s"
    assert made.hub.state.pool.returned == [(3, 10)]
    return made, 10


def test_a_silent_node_that_is_back_has_all_its_samples_and_no_other_node_was_given_one():
    made, new = silent_with_leases()
    session = made.hub.state.members[0].session
    assert made.lease(1, 5) == [(new, new + 5)]
    decided = made.do(made.hub.join(joiner("node0", session=session), made.now))
    assert decided[:-1] == [Leased(0, 3, 10)]
    assert made.hub.state.pool.outstanding(0) == [(3, 10)]
    made.do(made.hub.leave(0))
    assert made.lease(1, 5) == [(3, 8)], "one that leaves does not come back for them"


def test_samples_of_a_silent_node_go_to_others_at_once_when_another_process_of_it_has_joined():
    made, _ = silent_with_leases()
    made.join("node0")
    assert made.lease(1, 5) == [(3, 8)]


@pytest.mark.parametrize("saved", [True, False])
def test_samples_of_a_silent_node_wait_for_it_over_a_restart_of_the_hub(saved):
    made, new = silent_with_leases()
    again, numbers = World(made.plan), through_a_file(made.hub.saved()) if saved else None
    again.hub, again.now = made.replayed(numbers, since=len(made.journal) if saved else 0), 5.0
    assert again.hub.state.pool.returned == [(3, 10)]
    assert again.lease(1, 5) == [(new, new + 5)]
    for _ in range(32):
        again.now += 10
        again.heartbeat(1)
        again.tick()
    assert again.lease(1, 5) == [(3, 8)]


def test_samples_wait_only_for_their_own_node_among_all_that_were_returned():
    made = world(4, expire_s=15)
    for node in (0, 1, 2, 0, 1):
        made.lease(node, 10)
    made.do(made.hub.leave(0))
    made.now += 16
    made.heartbeat(2), made.heartbeat(3)
    made.tick()
    assert made.hub.state.pool.returned == [(0, 20), (30, 50)]
    assert made.lease(3, 25) == [(0, 10), (30, 40), (50, 55)], "(10, 20) and (40, 50) are of a silent node"
    assert made.hub.state.pool.returned == [(10, 20), (40, 50)]


def test_it_gets_back_its_own_and_leaves_what_others_gave_back_around_it():
    made = world(3, expire_s=15)
    session = made.hub.state.members[1].session
    for node in range(3):
        made.lease(node, 10)
    made.do(made.hub.leave(0)), made.do(made.hub.leave(2))
    made.tick(16)
    assert made.hub.state.pool.returned == [(0, 30)]
    decided = made.do(made.hub.join(joiner("node1", session=session), made.now))
    assert decided[:-1] == [Leased(1, 10, 20)]
    assert made.hub.state.pool.returned == [(0, 10), (20, 30)]
