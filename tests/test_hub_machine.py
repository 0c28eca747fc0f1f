"""The hub's rules, one by one, under a clock that only moves when it is told to."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hub_machine import AVERAGE, FACTS, LAYOUT, Int8, Numbers, World, config, picture, plan, through_a_file

from aedit.async_sgd import upward
from aedit.async_sgd.config import LimitConfig, OuterConfig, ScreenConfig, StalenessConfig
from aedit.async_sgd.joins import Denied, Joiner
from aedit.async_sgd.news import news, status, unit_news
from aedit.async_sgd.outer import make_outer
from aedit.async_sgd.records import (
    Accepted,
    Founded,
    Joined,
    Layout,
    Leased,
    Led,
    Left,
    Merged,
    Refused,
    RoundOpened,
    TensorLayout,
    Ticked,
    UnitLayout,
)


def world(nodes=1, more=None, **settings):
    """A founded hub with so many members, a quorum of one and plain averaging unless told otherwise."""
    made = World(plan(config(**settings), **(more or {})))
    for i in range(nodes):
        made.join(f"node{i}")
    made.found()
    return made


def kinds(decided):
    return [type(record) for record in decided]


def values(made, unit=0):
    return made.hub.anchor(unit)[1]


# --- joining


def test_the_first_to_join_founds_the_run_with_its_own_parameters():
    made = World(plan())
    assert kinds(made.do(made.hub.join(joiner("a"), made.now))) == [Founded, Joined]
    made.push(0, 3.5, 0, base=0, steps=0)
    made.push(0, 4.5, 1, base=0, steps=0)
    made.settle()
    assert [made.hub.anchor(unit)[0] for unit in (0, 1)] == [1, 1]
    assert (values(made) == 3.5).all()
    assert (values(made, 1) == 4.5).all()


def joiner(name, **changes):
    return replace(Joiner(name=name, layout=LAYOUT, facts=FACTS, num_samples=1000), **changes)


def test_only_the_founder_founds_and_when_it_dies_the_next_joiner_does_the_rest():
    made = World(plan())
    made.join("a"), made.join("b")
    (refused,) = made.push(1, 7.0, 0, base=0)
    assert isinstance(refused, Refused)
    assert refused.distrusted
    made.push(0, 1.0, 0, base=0, steps=0)
    made.do(made.hub.leave(0))
    made.join("c")
    made.push(2, 9.0, 0, base=0, steps=0)  # unit 0 has its founding push already
    made.push(2, 2.0, 1, base=0, steps=0)
    made.settle()
    assert values(made)[0] == 1.0
    assert values(made, 1)[0] == 2.0


def test_one_who_waits_may_found_once_it_joins_again_and_keeps_its_data():
    made = World(plan())
    made.join("a"), made.join("b")
    blocks = made.lease(1, 10)
    made.do(made.hub.leave(0))
    decided = made.do(made.hub.join(joiner("b", session=2), made.now))
    assert kinds(decided) == [Joined]
    assert made.hub.state.founder == 1
    assert made.hub.state.pool.outstanding(1) == blocks


def test_a_name_keeps_its_index_and_gets_a_new_session():
    made = world(2)
    assert made.join("node1") == 1
    assert made.hub.state.members[1].session == 3
    with pytest.raises(Denied) as denied:
        made.hub.member(1, session=2)
    assert denied.value.kind == "replaced"
    assert made.hub.member(1, session=3).name == "node1"


def test_a_restarted_process_of_a_node_gives_back_the_data_of_the_old_one():
    made = world(1)
    assert made.lease(0, 10) == [(0, 10)]
    assert kinds(made.do(made.hub.join(joiner("node0"), made.now))) == [Left, Joined]
    assert made.lease(0, 10) == [(0, 10)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"facts": (("data.seq_len", "256"), ("seed", "0"))}, "data.seq_len is 128 in this run and 256 on b"),
        ({"facts": FACTS[:1]}, "seed is 0 in this run and not set on b"),
        ({"num_samples": 7}, "corpus has 1000 training samples, b has 7"),
        ({"layout": Layout(LAYOUT.units[:1])}, "1 units, 2 in this run"),
        ({"layout": Layout(LAYOUT.units[::-1])}, "unit second where this run has first"),
        (
            {"layout": Layout((UnitLayout("first", (TensorLayout("w", (2, 3)),)), LAYOUT.units[1]))},
            r"first.w \(2, 3\) where this run has w \(3, 2\)",
        ),
        ({"name": ""}, "printable"),
        ({"name": "b\x1b[31m"}, "printable"),
    ],
)
def test_who_trains_something_else_is_told_the_difference(changes, words):
    made = world(1)
    with pytest.raises(Denied, match=words) as denied:
        made.hub.join(replace(joiner("b"), **changes), made.now)
    assert denied.value.kind == "different"


def test_a_hub_takes_no_more_members_than_it_is_told_to():
    made = world(2, limits=LimitConfig(nodes=2))
    with pytest.raises(Denied, match=r"hub\.limits\.nodes") as denied:
        made.join("third")
    assert denied.value.kind == "full"
    made.do(made.hub.leave(0))
    assert made.join("third") == 2


# --- pushes


def test_with_a_quorum_of_one_every_arrival_is_a_version_of_its_own():
    made = world(3)
    for node, value in enumerate((1.0, 2.0, 4.0)):
        made.push(node, value, base=1)
    made.settle()
    assert made.hub.anchor(0)[0] == 4
    assert (values(made) == -7.0).all()
    parts = [record.parts[0] for record in made.journal if isinstance(record, Merged) and record.version > 1]
    assert [(part.node, part.staleness) for part in parts] == [(0, 0), (1, 1), (2, 2)]


def test_the_same_push_again_changes_nothing_and_its_answer_can_be_had_again():
    made = world(1)
    push = made.make(0, 1.0)
    assert kinds(made.do(made.hub.offer(push, made.now))) == [Accepted]
    assert made.hub.offer(push, made.now) == []
    made.settle()
    assert made.hub.offer(push, made.now) == []
    assert made.hub.offer(replace(push, seq=1), made.now) == []
    assert (values(made) == -1.0).all()
    assert unit_news(made.hub, 0, 0).verdict == "merged"
    assert unit_news(made.hub, 0, 0).seq == push.seq


@pytest.mark.parametrize(
    ("changes", "words", "distrusted", "offence"),
    [
        ({"norms": (1.0,)}, "1 norms for 2 parameters", True, True),
        ({"steps": 4097}, "4097 in one push", True, True),
        ({"norms": (1.0, math.nan)}, "not finite", True, True),
        ({"norms": (math.inf, 1.0)}, "not finite", True, True),
        ({"seq": 9}, "push 9 where 1 was due", False, False),
        ({"base": 5}, "version 5, and 1 is the newest", False, False),
        ({"base": 0}, "has an anchor", True, False),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(changes, words, distrusted, offence):
    made = world(2)
    (refused,) = made.do(made.hub.offer(replace(made.make(1, 1.0), **changes), made.now))
    assert words in refused.reason
    assert (refused.distrusted, refused.offence) == (distrusted, offence)
    made.settle()
    assert (values(made) == 0.0).all()


def test_after_a_gap_a_node_goes_on_from_its_own_count():
    made = world(2)
    made.push(1, 1.0, seq=9)
    assert unit_news(made.hub, 1, 0).verdict == "refused"
    assert kinds(made.push(1, 1.0, seq=10)) == [Accepted]


def test_what_is_too_old_is_refused_and_its_node_keeps_its_progress():
    made = world(2, staleness=StalenessConfig(rule="constant", cutoff=3))
    for _ in range(3):
        made.push(0, 1.0)
        made.settle()
    (refused,) = made.push(1, 1.0, base=1)
    assert refused.reason == "stale: measured 3 versions ago"
    assert not refused.distrusted
    assert not refused.offence
    assert kinds(made.push(1, 1.0, base=2)) == [Accepted]


def test_what_was_accepted_counts_even_if_others_made_it_too_old_while_it_waited():
    made = world(4, staleness=StalenessConfig(rule="constant", cutoff=2))
    for node in range(4):
        made.push(node, 1.0, base=1)
    made.settle()
    assert (values(made) == -4.0).all()


def test_staleness_scales_a_push_also_when_it_is_merged_alone():
    made = world(2, staleness=StalenessConfig(rule="polynomial", power=0.5))
    made.push(0, 1.0)
    made.settle()
    made.push(1, 1.0, base=1)
    made.settle()
    np.testing.assert_allclose(values(made), -1 - 2**-0.5, rtol=1e-6)


def test_one_unit_has_one_push_of_a_node_at_a_time():
    made = world(2, quorum=2)
    made.push(0, 1.0)
    (refused,) = made.push(0, 1.0)
    assert refused.reason.startswith("early")


def test_who_is_no_member_is_denied_and_told_to_join_again():
    made = world(2)
    push = made.make(1, 1.0)
    made.do(made.hub.leave(1))
    for call in (lambda: made.hub.offer(push, made.now), lambda: made.hub.lease(1, 5, made.now)):
        with pytest.raises(Denied, match="left") as denied:
            call()
        assert denied.value.kind == "unknown"
    with pytest.raises(Denied, match="no node 9"):
        made.hub.member(9, 0)


# --- offences


def poison(made, node, unit=0, **changes):
    return made.push(node, 1.0, unit, norms=(math.nan,) * len(LAYOUT.units[unit].tensors), **changes)


def test_a_node_that_lies_is_put_out_and_does_not_come_back():
    made = world(2, screen=ScreenConfig(offences=3))
    for _ in range(2):
        assert kinds(poison(made, 1)) == [Refused]
    _, left = poison(made, 1)
    assert left.put_out
    with pytest.raises(Denied, match="put out after 3 offences, the last one not finite") as denied:
        made.join("node1")
    assert denied.value.kind == "put out"
    assert status(made.hub, made.now)["nodes"][1]["refused"] == {"not finite": 3}
    assert news(made.hub, 0, made.now).nodes == 1


def test_one_bad_round_is_one_offence_however_many_units_it_has():
    made = world(2, screen=ScreenConfig(offences=2))
    assert [kinds(poison(made, 1, unit)) for unit in (0, 1)] == [[Refused], [Refused]]
    assert made.hub.state.members[1].offences == 1


def test_sixteen_accepted_pushes_make_one_offence_forgotten():
    made = world(2, screen=ScreenConfig(threshold=1e9, cosine=False, clip=None))
    poison(made, 1)
    for count in range(16):
        assert made.hub.state.members[1].offences == 1, count
        made.push(1, 1.0)
        made.settle()
    assert made.hub.state.members[1].offences == 0


def test_a_push_a_thousand_times_too_long_is_refused_by_what_the_others_sent():
    made = world(2, screen=ScreenConfig())
    for _ in range(6):
        made.push(0, 1.0)
        made.settle()
    before = values(made)
    (refused,) = made.push(1, 1000.0)
    assert refused.reason.startswith("norm: ")
    assert refused.distrusted
    assert refused.offence
    made.settle()
    assert (values(made) == before).all()


def test_in_the_first_merge_of_four_the_one_that_is_far_longer_weighs_nothing_and_is_told():
    made = world(5, quorum=5, screen=ScreenConfig())
    for node in range(5):
        for unit in (0, 1):
            made.push(node, 1000.0 if node == 0 else 1.0, unit)
    made.settle()
    assert (values(made) == -1.0).all()
    assert unit_news(made.hub, 0, 0).verdict == "distrusted"
    assert unit_news(made.hub, 1, 0).verdict == "merged"
    assert made.hub.state.members[0].offences == 1  # for both units together


def test_in_a_merge_of_four_the_one_that_points_away_weighs_nothing():
    made = world(5, quorum=5, screen=ScreenConfig(clip=None))
    for node in range(5):
        made.push(node, -2.0 if node == 2 else 1.0)
    made.settle()
    assert (values(made) == -1.0).all()
    assert unit_news(made.hub, 2, 0).reason.startswith("away")
    assert status(made.hub, made.now)["nodes"][2]["refused"] == {"away": 1}


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
    assert (values(made) == -4.0).all()


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
        made.beat(0)
    made.push(0, 1.0)
    for _ in range(5):
        assert Left not in kinds(made.tick(1))
        made.beat(0)
    assert kinds(made.tick(0.5))[-3:] == [Left, Merged] or Merged in kinds(made.tick())
    assert made.hub.state.members[1].gone == "silent for 15 s"
    assert (values(made) == -1.0).all()


def test_one_who_is_alive_but_brings_nothing_does_not_block_the_others_for_ever():
    made = world(2, quorum="all", expire_s=15)

    def wait(seconds):
        for _ in range(seconds):
            made.beat(0), made.beat(1)
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
    made.beat(1, state)
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
            made.beat(node)
        made.push(0, 1.0) if second == 1 else made.push(1, 1.0) if second == 14 else None
        assert Merged not in kinds(made.tick(1)), second
    assert Merged in kinds(made.tick(1.5))


def test_a_quorum_weighs_by_tokens_when_told_to():
    made = world(2, quorum=2, weights="tokens")
    made.push(0, 1.0, tokens=300, steps=10), made.push(1, 4.0, tokens=100, steps=10)
    made.settle()
    np.testing.assert_allclose(values(made), -(9 * 1.0 + 1 * 4.0) / 10, rtol=1e-6)


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
    assert unit_news(made.hub, 0, 0).verdict == "merged"


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
    made = world(4, more={"every": 128})
    assert news(made.hub, 0, made.now).pace_steps == 128
    for node, speed in enumerate((1 / 0.58, 1 / 0.75, 1 / 1.51, 1 / 3.33)):
        made.beat(node, steps_per_s=speed)
    assert [made.hub.pace_steps(node) for node in range(4)] == [128, 98, 49, 22]
    made.do(made.hub.leave(0))
    assert [made.hub.pace_steps(node) for node in range(1, 4)] == [128, 63, 28]


def test_a_node_that_claims_any_speed_cannot_stop_the_others():
    made = world(3, more={"every": 128})
    for node, speed in enumerate((1.0, 1.0, 1e30)):
        made.beat(node, steps_per_s=speed)
    assert [made.hub.pace_steps(node) for node in range(3)] == [2, 2, 128]
    for bad in (math.nan, math.inf, -1.0):
        made.beat(2, steps_per_s=bad)
        assert [made.hub.pace_steps(node) for node in range(3)] == [128, 128, 128]


def test_rounds_by_the_clock_keep_to_their_grid_and_open_once_after_a_pause():
    made = world(1, pace="seconds", expire_s=1e6, more={"every": 10})
    opened = []
    for seconds in (9.9, 0.3, 9.6, 0.3, 35.0, 0.1, 9.7, 0.3):
        opened.append([record for record in made.tick(seconds) if isinstance(record, RoundOpened)])
    assert [len(rounds) for rounds in opened] == [0, 1, 0, 1, 1, 0, 0, 1]
    at_s = [rounds[0].at_s for rounds in opened if rounds]
    np.testing.assert_allclose(at_s, [10.0, 20.0, 55.1, 65.1])
    assert news(made.hub, 0, made.now).round == 4
    assert news(made.hub, 0, made.now).pace_steps == 0


def test_the_budget_is_the_mean_over_members_and_the_run_ends_with_it():
    made = world(2, more={"steps": 20})
    for node, (steps, progress) in enumerate([(10, 0.25), (30, 1.0)]):
        for unit in (0, 1):
            made.push(node, 1.0, unit, steps=steps)
        made.settle()
        said = news(made.hub, 0, made.now)
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
    assert not news(again, 0, 1e6 + 39).finished
    assert news(again, 0, 1e6 + 40).finished


def test_the_first_of_the_living_evaluates():
    made = world(3)
    made.do(made.hub.leave(0))
    assert [news(made.hub, node, made.now).evaluates for node in range(3)] == [False, True, False]


def test_nodes_hear_of_each_others_donors():
    made = world(1)
    made.join("x", donor="h:1"), made.join("y", donor="h:2")
    assert news(made.hub, 1, made.now).donors == ("h:2",)
    made.do(made.hub.leave(2))
    assert news(made.hub, 0, made.now).donors == ("h:1",)


# --- data


def test_no_position_is_with_two_nodes_and_what_comes_back_goes_out_first():
    made = world(2)
    assert made.lease(0, 10) == [(0, 10)]
    assert made.lease(1, 10) == [(10, 20)]
    assert made.lease(0, 5) == [(20, 25)]
    made.do(made.hub.use(0, 0, 4))
    made.do(made.hub.leave(0))
    assert made.lease(1, 8) == [(4, 10), (20, 22)]
    assert made.lease(1, 8) == [(22, 25), (25, 30)]


def test_use_may_be_said_twice_and_of_what_is_gone():
    made = world(2)
    made.lease(0, 10)
    assert len(made.do(made.hub.use(0, 0, 4))) == 1
    assert made.hub.use(0, 0, 4) == []
    assert made.hub.use(0, 0, 3) == []
    assert made.hub.use(1, 0, 9) == []
    assert len(made.do(made.hub.use(0, 0, 99))) == 1
    assert made.hub.state.pool.outstanding(0) == []
    assert made.hub.use(0, 0, 99) == []


def test_use_may_be_said_twice_in_one_breath():
    made = world(1)
    made.lease(0, 10)
    for upto in (4, 10):
        made.do([*made.hub.use(0, 0, upto), *made.hub.use(0, 0, upto), *made.hub.use(0, 0, 2)])
    assert made.hub.state.pool.outstanding(0) == []
    assert made.hub.state.pool.returned == []


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
    made.do(made.hub.use(0, 0, 3))
    made.now += 16
    made.beat(1)
    made.tick()
    assert made.lease(1, 4) == [(3, 7)]
    decided = made.do(made.hub.join(joiner("node0", session=session), made.now))
    assert decided[1:] == [Leased(0, 7, 10), Leased(0, 10, 20)]
    made.do(made.hub.use(0, 0, 10))  # it speaks of the lease by the position at which that began
    assert made.hub.state.pool.outstanding(0) == [(10, 20)]
    assert made.hub.state.pool.outstanding(1) == [(3, 7)]


def test_it_gets_back_its_own_and_leaves_what_others_gave_back_around_it():
    made = world(3, expire_s=15)
    session = made.hub.state.members[1].session
    for node in range(3):
        made.lease(node, 10)
    made.do(made.hub.leave(0)), made.do(made.hub.leave(2))
    made.tick(16)
    assert made.hub.state.pool.returned == [(0, 30)]
    decided = made.do(made.hub.join(joiner("node1", session=session), made.now))
    assert decided[1:] == [Leased(1, 10, 20)]
    assert made.hub.state.pool.returned == [(0, 10), (20, 30)]


# --- the way down


@pytest.mark.parametrize("feedback", [False, True])
def test_a_chain_of_deltas_leads_to_the_bits_that_the_hub_hands_out(feedback):
    codec = Int8(feedback=feedback)
    made = World(plan(config(codec_down="e3m0" if feedback else "int8")), codec)
    made.join()
    made.found(value=1.0)
    rng, held = np.random.default_rng(0), values(made)
    for _ in range(20):
        base = made.hub.anchor(0)[0]
        made.push(0, rng.normal(size=8))
        made.settle()
        for _, delta in made.hub.chain(0, base):
            held = held + codec.decode(delta, 8, 0, 8)
        assert held.tobytes() == values(made).tobytes()
    assert made.hub.chain(0, 1) is None
    assert made.hub.chain(0, 0) is None
    assert made.hub.chain(0, 99) is None
    assert made.hub.chain(0, 21) == ()


def test_what_a_coarse_step_leaves_out_is_made_up_for_by_the_next():
    made = World(plan(config(codec_down="e3m0")), Int8(levels=1, feedback=True))
    made.join()
    made.found()
    exact = np.zeros(8)
    rng = np.random.default_rng(0)
    for _ in range(200):
        pushed = rng.normal(size=8).astype(np.float32)
        exact -= pushed
        made.push(0, pushed)
        made.settle()
        assert np.abs(values(made) - exact).max() < 25.0
    made.push(0, np.zeros(8))
    for _ in range(30):
        made.settle()
        made.push(0, np.zeros(8))
    np.testing.assert_allclose(values(made), exact, atol=1e-3)


def test_what_is_handed_out_looks_ahead_when_told_to():
    made = world(1, more={"outer": OuterConfig(kind="nesterov", lr=0.5, momentum=0.5, look_ahead=True)})
    made.push(0, 1.0)
    made.settle()
    assert (made.hub.state.units[0].anchor.values == -0.75).all()  # 0.5 * (1 + 0.5 * 1)
    assert (values(made) == -1.0).all()  # and 0.5 * 0.5 * 1 further


@pytest.mark.parametrize("down", ["fp32", "int8", "e3m0"])
def test_a_unit_of_many_slices_steps_as_one(down):
    numel = 200_001
    layout = Layout((UnitLayout("big", (TensorLayout("w", (numel,)),)),))
    outer = OuterConfig(kind="delayed-nesterov", lr=0.7, momentum=0.9, delay=3, activation=0.2)
    codec = None if down == "fp32" else Int8(feedback=down == "e3m0")
    made = World(plan(config(codec_down=down), outer=outer), codec, layout)
    made.join()
    rng = np.random.default_rng(0)
    x = rng.normal(size=numel).astype(np.float32)
    made.push(0, x, base=0, steps=0), made.settle()
    rule, state = make_outer(outer), make_outer(outer).init(x)
    for _ in range(7):
        g = rng.normal(size=numel).astype(np.float32)
        step, state = rule.update(g, state)
        x = x - step
        made.push(0, g), made.settle()
    error = {"fp32": 1e-6, "int8": 0.2, "e3m0": 0.05}[down]
    np.testing.assert_allclose(values(made), x, atol=error)
    np.testing.assert_allclose(made.hub.state.units[0].anchor.outer.momentum, state.momentum, atol=1e-6)


def test_arrays_of_a_version_never_change():
    made = world(1, more={"outer": OuterConfig(kind="delayed-nesterov")})
    for _ in range(6):
        seen = [values(made), *made.hub.state.units[0].anchor.outer.arrays]
        copies = [array.copy() for array in seen]
        made.push(0, 1.0)
        made.settle()
        assert all((a == b).all() for a, b in zip(seen, copies, strict=True))
        assert not any(array.flags.writeable for array in seen)


# --- several hubs


def test_two_hubs_split_the_units():
    made = World(plan(part=(1, 2)))
    made.join()
    made.found(value=2.0)
    assert list(made.hub.state.units) == [1]
    with pytest.raises(Denied, match="no unit 0"):
        made.hub.offer(replace(made.make(0, 1.0, 1), unit=0), made.now)
    made.push(0, 1.0, 1, steps=8)
    made.settle()
    assert news(made.hub, 0, made.now).total_steps == 8
    assert (values(made, 1) == 1.0).all()


def test_a_region_tells_the_parent_its_progress_once_and_none_is_lost_on_the_way():
    a = 0.25
    made = World(plan(config(parent="p:1", parent_every=2, parent_mix=a)))
    made.join()
    made.found(value=4.0)
    assert upward.due(made.hub) == []
    made.push(0, 1.0), made.settle()
    made.push(0, 1.0), made.settle()
    assert upward.due(made.hub) == [0]
    made.do([upward.send(made.hub, 0)])
    assert (upward.owed(made.hub, 0) == 2.0).all()
    assert upward.due(made.hub) == []
    made.push(0, 1.0), made.settle()  # while it is on its way: params 1, sent 2
    made.do([upward.mix(made.hub, 0, Numbers([10.0] * 8))])
    assert (values(made) == 0.75 * 1 + 0.25 * 10).all()
    made.push(0, 1.0), made.settle()
    made.push(0, 1.0), made.settle()
    made.do([upward.send(made.hub, 0)])
    np.testing.assert_allclose(upward.owed(made.hub, 0), 0.75 * 1 + 2)  # HALoS would say 2


def test_what_the_parent_does_not_believe_is_still_owed():
    made = World(plan(config(parent="p:1", parent_every=1, parent_mix=0.5)))
    made.join()
    made.found(value=4.0)
    made.push(0, 1.0), made.settle()
    made.do([upward.send(made.hub, 0)])
    made.do([upward.withdraw(0)])
    made.do([upward.mix(made.hub, 0, Numbers([4.0] * 8))])
    assert (values(made) == 3.5).all()
    made.push(0, 1.0), made.settle()
    made.do([upward.send(made.hub, 0)])
    np.testing.assert_allclose(upward.owed(made.hub, 0), 0.5 * 1 + 1)


def test_a_region_can_take_the_parents_anchor_as_it_is():
    made = World(plan(config(parent="p:1")))
    made.join()
    made.found(value=4.0)
    made.do([upward.mix(made.hub, 0, Numbers([9.0] * 8), share=1.0)])
    assert (values(made) == 9.0).all()
    assert (made.hub.state.units[0].up == 9.0).all()


# --- restarts


def busy(outer=AVERAGE, quantiser=None, **settings):
    """A hub in the middle of everything."""
    made = World(plan(config(**settings), outer=outer), quantiser)
    made.join("a"), made.join("b")
    made.found()
    made.do([Led(3)])
    rng = np.random.default_rng(0)
    for turn in range(12):
        made.tick(1.3)
        made.beat(0), made.beat(1)
        made.push(turn % 2, rng.normal(size=8))
        made.push(1, rng.normal(size=5), 1)
        made.lease(turn % 2, 5 + turn)
        made.do(made.hub.use(0, 0, turn))
    poison(made, 0)
    made.do(made.hub.leave(0))
    made.push(1, 1.0, 1)
    return made


@pytest.mark.parametrize(
    "settings",
    [
        {"outer": OuterConfig()},
        {"outer": OuterConfig(kind="delayed-nesterov", delay=4, activation=0.1)},
        {"quorum": 2, "weights": "penalty", "screen": ScreenConfig(offences=3)},
        {"codec_down": "int8", "quantiser": Int8()},
        {"codec_down": "e3m0", "quantiser": Int8(levels=7, feedback=True)},
        {"parent": "p:1", "parent_every": 2},
    ],
)
def test_replay_and_snapshot_give_the_same_bits(settings):
    made = busy(**settings)
    if "parent" in settings:
        made.do([upward.send(made.hub, 0)])
    saved, since = through_a_file(made.hub.saved()), len(made.journal)
    assert picture(made.replayed()) == picture(made.hub)
    assert picture(made.replayed(saved, since)) == picture(made.hub)
    made.push(1, 3.0), made.tick(5), made.settle()
    if "parent" in settings:
        made.do([upward.mix(made.hub, 0, Numbers(range(8)))])
    assert picture(made.replayed()) == picture(made.hub)
    assert picture(made.replayed(saved, since)) == picture(made.hub)


def test_after_a_restart_nobody_is_given_up_before_he_could_have_been_heard():
    made = world(2, expire_s=15)
    again = made.replayed()
    assert [r for r in again.tick(1e6) if isinstance(r, Left)] == []
    assert [r for r in again.tick(1e6 + 14) if isinstance(r, Left)] == []
    assert len([r for r in again.tick(1e6 + 16) if isinstance(r, Left)]) == 2


def test_deciding_changes_nothing_that_is_journaled():
    made = busy(quorum=2)
    before = picture(made.hub)
    made.hub.tick(made.now + 100)
    made.hub.join(joiner("new"), made.now)
    made.hub.offer(made.make(1, 1.0), made.now)
    made.hub.lease(1, 3, made.now)
    made.hub.use(1, 0, 3)
    made.hub.leave(1)
    news(made.hub, 1, made.now)
    assert picture(made.hub) == before


def test_a_merge_may_be_computed_while_others_push():
    made = world(3, quorum=2, grace=0.0)
    made.push(0, 1.0), made.push(1, 3.0)
    decided = made.hub.tick(made.now)
    (record,) = [record for record in decided if isinstance(record, Merged)]
    computed = made.hub.compute(record)
    made.push(2, 5.0)
    made.hub.apply(record, computed)
    assert (values(made) == -2.0).all()
    assert len(made.hub.state.units[0].pending) == 1


def test_the_status_can_be_written_as_json():
    made = busy(quorum=2)
    said = json.loads(json.dumps(status(made.hub, made.now), allow_nan=False))
    assert [node["name"] for node in said["nodes"]] == ["a", "b"]
    assert said["nodes"][0]["state"] == "gone: left"
    assert said["units"][0]["version"] == made.hub.anchor(0)[0]


def test_the_age_of_the_run_is_written_down_once_a_second():
    made = world(1)
    found = [record for _ in range(100) for record in made.tick(0.05) if isinstance(record, Ticked)]
    assert 4 <= len(found) <= 5


def test_the_hub_needs_no_torch():
    words = "import sys, aedit.async_sgd.hub, aedit.async_sgd.news; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], timeout=60).returncode == 0
