"""Tests which nodes may join a hub and which pushes it accepts, on a clock that the test moves."""

import math
from dataclasses import replace

import numpy as np
import pytest
from kit.hub_machine import FACTS, LAYOUT, World, joiner, kinds, picture, plan, poison, values, world

from aedit.async_sgd.hub import Denied
from aedit.async_sgd.hub.status import hub_status, run_news
from aedit.async_sgd.rules import (
    Accepted,
    Founded,
    Garbled,
    Joined,
    Left,
    LimitConfig,
    Merged,
    PushFilterConfig,
    Refused,
    StalenessConfig,
)
from aedit.types import Layout, TensorLayout, UnitLayout, Verdict

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


def test_an_earlier_session_of_the_same_process_joins_again_and_one_of_another_process_ends():
    made = world(1)
    sessions = []
    for process in (5, 5, 6):
        made.do(made.hub.join(joiner("node0", process=process), made.now))
        sessions.append(made.hub.state.members[0].session)
        found = []
        for session in sessions[:-1]:
            with pytest.raises(Denied) as denied:
                made.hub.member(0, session)
            found.append(denied.value.kind)
        assert found == {5: ["unknown"] * len(found), 6: ["replaced"] * 2}[process]
        assert made.hub.member(0, sessions[-1]).name == "node0"


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
        ({"name": ""}, "1 to 128 letters"),
        ({"name": "b\x1b[31m"}, r"'b\?\[31m' is not 1 to 128 letters"),
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
    np.testing.assert_allclose(values(made), -7.0 / 3, rtol=1e-6)  # each counts as a third of a round
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
    assert made.hub.state.members[0].decision(0).verdict == Verdict.MERGED
    assert made.hub.state.members[0].decision(0).seq == push.seq


@pytest.mark.parametrize(
    ("changes", "words", "distrusted", "violation"),
    [
        ({"norms": (1.0,)}, "1 norms for 2 parameters", True, True),
        ({"steps": 4097}, "4097 in one push", True, True),
        ({"norms": (1.0, math.nan)}, "not finite", True, True),
        ({"norms": (math.inf, 1.0)}, "not finite", True, True),
        ({"base": 5}, "version 5, and 1 is the newest", False, False),
        ({"base": 0}, "has an anchor", True, False),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(changes, words, distrusted, violation):
    made = world(2)
    (refused,) = made.do(made.hub.offer(replace(made.make(1, 1.0), **changes), made.now))
    assert words in refused.reason
    assert (refused.distrusted, refused.violation) == (distrusted, violation)
    made.settle()
    assert (values(made) == 0.0).all()


@pytest.mark.parametrize("seq", [2, 9, 2**64 - 1])
def test_a_push_that_skips_a_number_changes_nothing_and_its_node_joins_again(seq):
    made = world(2)
    before = picture(made.hub)
    with pytest.raises(Denied, match=f"push {seq} where 1 was due") as denied:
        made.push(1, 1.0, seq=seq)
    assert denied.value.kind == "unknown"
    assert picture(made.hub) == before
    assert kinds(made.push(1, 1.0, seq=1)) == [Accepted]


def test_what_is_too_old_is_refused_and_its_node_keeps_its_progress():
    made = world(2, staleness=StalenessConfig(rule="constant", cutoff=3))
    for _ in range(3):
        made.push(0, 1.0)
        made.settle()
    (refused,) = made.push(1, 1.0, base=1)
    assert refused.reason == "stale: measured 3 versions ago"
    assert not refused.distrusted
    assert not refused.violation
    assert kinds(made.push(1, 1.0, base=2)) == [Accepted]


def test_what_was_accepted_counts_even_if_others_made_it_too_old_while_it_waited():
    made = world(4, staleness=StalenessConfig(rule="constant", cutoff=2))
    for node in range(4):
        made.push(node, 1.0, base=1)
    made.settle()
    assert (values(made) == -1.0).all()


def test_staleness_scales_a_push_also_when_it_is_merged_alone():
    made = world(2, staleness=StalenessConfig(rule="polynomial", power=0.5))
    made.push(0, 1.0)
    made.settle()
    made.push(1, 1.0, base=1)
    made.settle()
    np.testing.assert_allclose(values(made), -(1 + 2**-0.5) / 2, rtol=1e-6)


def test_one_unit_has_one_push_of_a_node_at_a_time():
    made = world(2, quorum=2)
    made.push(0, 1.0)
    (refused,) = made.push(0, 1.0)
    assert refused.reason.startswith("early")
    made.push(1, 1.0)
    made.settle()  # the first one is merged, but the last word is about the second
    assert made.hub.state.members[0].decision(0).seq == refused.seq
    assert made.hub.state.members[0].decision(0).verdict == Verdict.REFUSED


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


# --- violations


def test_a_node_that_lies_is_put_out_and_does_not_come_back():
    made = world(2, push_filter=PushFilterConfig(violations=3))
    for _ in range(2):
        assert kinds(poison(made, 1)) == [Refused]
    _, left = poison(made, 1)
    assert left.excluded
    with pytest.raises(Denied, match="excluded after 3 violations, the last one not finite") as denied:
        made.join("node1")
    assert denied.value.kind == "excluded"
    assert hub_status(made.hub, made.now)["nodes"][1]["refused"] == {"not finite": 3}
    assert run_news(made.hub, 0, made.now).nodes == 1


def test_bytes_that_come_garbled_are_offences_and_the_push_may_still_come_whole():
    made = world(2, push_filter=PushFilterConfig(violations=3))
    for _ in range(2):
        assert kinds(made.do(made.hub.garbled(1, 0, "damaged: chunk at byte 0"))) == [Garbled]
    assert kinds(made.push(1, 1.0)) == [Accepted]
    _, left = made.do(made.hub.garbled(1, 0, "damaged: chunk at byte 0"))
    assert left.reason == "excluded after 3 violations, the last one damaged: chunk at byte 0"
    assert hub_status(made.hub, made.now)["nodes"][1]["refused"] == {"damaged": 3}


def test_a_push_from_far_ahead_does_not_make_the_next_lies_free():
    made = world(2, push_filter=PushFilterConfig(violations=3))
    with pytest.raises(Denied):
        made.push(1, math.nan, seq=2**62)
    assert [kinds(poison(made, 1, 1)) for _ in range(3)] == [[Refused], [Refused], [Refused, Left]]


def test_one_bad_round_is_one_offence_however_many_units_it_has():
    made = world(2, push_filter=PushFilterConfig(violations=2))
    assert [kinds(poison(made, 1, unit)) for unit in (0, 1)] == [[Refused], [Refused]]
    assert made.hub.state.members[1].violations == 1


def test_sixteen_accepted_pushes_make_one_offence_forgotten():
    made = world(2, push_filter=PushFilterConfig(threshold=1e9, cosine=False, clip=None))
    poison(made, 1)
    for count in range(16):
        assert made.hub.state.members[1].violations == 1, count
        made.push(1, 1.0)
        made.settle()
    assert made.hub.state.members[1].violations == 0


def test_a_push_a_thousand_times_too_long_is_refused_by_what_the_others_sent():
    made = world(2, push_filter=PushFilterConfig())
    for _ in range(6):
        made.push(0, 1.0)
        made.settle()
    before = values(made)
    (refused,) = made.push(1, 1000.0)
    assert refused.reason.startswith("norm: ")
    assert refused.distrusted
    assert refused.violation
    made.settle()
    assert (values(made) == before).all()


def test_in_the_first_merge_of_four_the_one_that_is_far_longer_weighs_nothing_and_is_told():
    made = world(5, quorum=5, push_filter=PushFilterConfig())
    for node in range(5):
        for unit in (0, 1):
            made.push(node, 1000.0 if node == 0 else 1.0, unit)
    made.settle()
    assert (values(made) == -1.0).all()
    assert made.hub.state.members[0].decision(0).verdict == Verdict.DISTRUSTED
    assert made.hub.state.members[1].decision(0).verdict == Verdict.MERGED
    assert made.hub.state.members[0].violations == 1  # for both units together


def test_in_a_merge_of_four_the_one_that_points_away_weighs_nothing():
    made = world(5, quorum=5, push_filter=PushFilterConfig(clip=None))
    for node in range(5):
        made.push(node, -2.0 if node == 2 else 1.0)
    made.settle()
    assert (values(made) == -1.0).all()
    assert made.hub.state.members[2].decision(0).reason.startswith("away")
    assert hub_status(made.hub, made.now)["nodes"][2]["refused"] == {"away": 1}


def test_a_node_gets_the_index_it_prefers_if_nobody_has_it():
    made = World(plan())

    def join(name, prefers=None):
        decided = made.do(made.hub.join(replace(joiner(name), prefers=prefers), made.now))
        return next(record.node for record in decided if isinstance(record, Joined))

    assert join("c", 2) == 2
    assert join("x", 2) == 3, "somebody has it"
    assert join("a", 0) == 0
    assert join("b", 1) == 1
    assert join("y") == 4
    assert join("c", 0) == 2, "the same name, the same index"
    assert [node["name"] for node in hub_status(made.hub, made.now)["nodes"]] == ["a", "b", "c", "x", "y"]


def test_a_process_that_joins_again_because_the_reply_was_lost_keeps_its_data():
    made = World(plan())
    made.do(made.hub.join(joiner("a", process=7), made.now))
    blocks = made.lease(0, 10)
    assert kinds(made.do(made.hub.join(joiner("a", process=7), made.now))) == [Joined]
    assert made.hub.state.pool.outstanding(0) == blocks
    assert kinds(made.do(made.hub.join(joiner("a", process=8), made.now))) == [Left, Joined]
    assert made.hub.state.pool.outstanding(0) == []
