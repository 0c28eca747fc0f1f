"""Tests a node of a hub: it does not wait, no step is lost, distrusted steps are not sent."""

import json
import random
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.deferred import move, round_numbers, step
from kit.hubs import Hub, HubLink, anchors_of, hub_node
from kit.nodes import batches, furthest, loss, parameters, plain_training, tower

from aedit.edit import OwnPace, PenaltyConfig, snapshot
from aedit.launch.node.train import TrainingNode
from aedit.proto.transports import PeersMissing
from aedit.types import Verdict

X = torch.ones(1, 5)


def one_node(*, every=3, hub=None, model=None, **config):
    hub, model = hub or Hub(), model or tower()
    link = HubLink(hub, model)
    sync, inner = hub_node(model, link, schedule=OwnPace(every), **config)
    return hub, link, sync, inner


def moved_step(sync, rng):
    """Run a forward, in which answers land, and a scripted inner step; return what the step added."""
    sync.model(X)
    moved = move(sync.model, rng)
    sync.step()
    return moved


def plus(total, moved):
    return {name: total.get(name, 0) + moved[name] for name in moved}


# -- nothing is lost


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
@pytest.mark.parametrize("fragments", [1, 3])
def test_what_all_nodes_learned_is_in_the_anchors_or_still_with_them(fragments, seed):
    """Order of steps, late and missing answers, refusals and late joins are random; the sum has all bits."""
    chance = random.Random(seed)
    kinds = [Verdict.MERGED, Verdict.MERGED, Verdict.REFUSED]
    hub, start = Hub(judge=lambda push: chance.choice(kinds)), round_numbers(tower())
    total, syncs, rng = {}, [], torch.Generator().manual_seed(seed)
    first = parameters(start)
    for _ in range(chance.choice([1, 2, 4])):
        model = deepcopy(start)
        link, pace = HubLink(hub, model), OwnPace(chance.randint(2, 4))
        sync, _ = hub_node(model, link, schedule=pace, fragments=fragments, every=300, max_steps_ahead=9)
        sync.__enter__()
        syncs.append((sync, link))
        for _ in range(chance.randint(5, 40)):
            sync, link = chance.choice(syncs)
            link.away = chance.random() < 0.6 and sync.local_steps % 9 != 8
            if chance.random() < 0.1:
                link.lost = set(chance.sample(range(len(sync.units)), chance.randint(0, 3)))
            link.lost = link.lost if sync.local_steps % 9 != 8 else set()
            total = plus(total, moved_step(sync, rng))
    for sync, link in syncs:
        link.away, link.lost = False, set()
        sync.__exit__(None, None, None)
        assert link.left
    outstanding = {}
    for sync, link in syncs:
        own = Hub(anchors=link.anchors)
        taken = anchors_of(own, sync)
        still = {name: p - taken[name] for name, p in parameters(sync.model).items()}
        outstanding = plus(outstanding, still)
    ended = anchors_of(hub, syncs[0][0])
    for name, learned in total.items():
        assert torch.equal(ended[name] - first[name] + outstanding[name], learned)


def test_a_node_alone_with_a_hub_trains_as_without_one():
    data = batches(0, 20)
    expected = plain_training(tower(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), data)
    hub, link, sync, inner = one_node(every=3)
    with sync:
        for n, batch in enumerate(data):
            link.away = n % 5 < 2
            step(sync, inner, batch)
        link.away = False
    assert furthest(parameters(sync.model), expected) <= 1e-6
    assert furthest(anchors_of(hub, sync), expected) <= 1e-6
    assert sync.waited_s == 0


def test_a_refused_push_travels_again_with_what_was_learned_since():
    verdicts = iter([Verdict.REFUSED] * 4 + [Verdict.MERGED] * 100)
    hub, _, sync, _ = one_node(hub=Hub(judge=lambda push: next(verdicts)), model=round_numbers(tower()))
    rng, start, total, seen = torch.Generator().manual_seed(0), parameters(sync.model), {}, []
    sync.on_round = lambda outcome, waited_s: seen.append(outcome)
    with sync:
        for _ in range(9):
            total = plus(total, moved_step(sync, rng))
    assert [push.steps for push in hub.pushes] == [3] * 4 + [6] * 4 + [3] * 4
    assert [push.tokens for push in hub.pushes[:5]] == [30] * 4 + [60]
    assert [push.base for push in hub.pushes] == [1] * 8 + [2] * 4
    assert [sorted(outcome.refused) for outcome in seen] == [
        [0, 1, 2, 3],
        [],
        [],
        [],
    ]  # the last one is empty
    for name, anchor in anchors_of(hub, sync).items():
        assert torch.equal(anchor - start[name], total[name])


@pytest.mark.parametrize("refused", [[], [1], [0, 1, 2, 3]])
def test_a_node_records_a_round_when_the_hub_has_answered_and_says_if_it_took_none(refused):
    def judge(push):
        return Verdict.REFUSED if push.unit in refused and push.seq == 1 else Verdict.MERGED

    _, link, sync, _ = one_node(hub=Hub(judge=judge), every=3)
    written = []
    recorder = SimpleNamespace(event=lambda event, **values: written.append((event, values["refused"])))
    positions = SimpleNamespace(ended=lambda *step, **outcome: None)
    node = SimpleNamespace(sync=sync, recorder=recorder, positions=positions, bytes_before=0, num_accepted=0)
    sync.on_round = partial(TrainingNode.record_round, node)
    rng = torch.Generator().manual_seed(0)
    with sync:
        link.away = True
        for _ in range(5):
            moved_step(sync, rng)
        assert not written, "the push is under way"
        link.away = False
        moved_step(sync, rng)
        assert written[0] == ("round_refused" if len(refused) == 4 else "round", refused)
        assert node.num_accepted == len([event for event, _ in written if event == "round"])


def test_units_whose_owner_cannot_be_reached_are_left_out_and_travel_whole_when_it_is_back():
    hub, link, sync, _ = one_node(every=3, model=round_numbers(tower()))
    rng, start, total, rounds = torch.Generator().manual_seed(0), parameters(sync.model), {}, []
    sync.on_round = lambda outcome, waited_s: rounds.append((outcome.round.id, outcome.units, sync.round_id))
    link.lost = {1}
    with sync:
        for number in range(1, 20):
            total = plus(total, moved_step(sync, rng))
            link.lost = {1} if number < 17 else set()
        assert sync.waited_s == 0
    assert [push.steps for push in hub.pushes if push.unit == 0] == [3, 7, 3, 3, 3]
    assert [push.steps for push in hub.pushes if push.unit == 1] == [3, 16]
    without, whole = (0, 2, 3), (0, 1, 2, 3)
    newest = (2, 3, 4, 4, 5)  # which never goes back to the round that lands late
    assert rounds[:5] == [
        (number, units, highest)
        for number, units, highest in zip(
            (2, 3, 4, 1, 5), (without, without, without, whole, whole), newest, strict=True
        )
    ]
    assert sync.round_id == 6, "of the last one, in which the node leaves"
    for name, anchor in anchors_of(hub, sync).items():
        assert torch.equal(anchor - start[name], total[name])


def test_units_that_are_only_late_put_the_round_off_and_move_together():
    hub, link, sync, _ = one_node(every=3)
    link.lost = {1}
    with sync:
        for number in range(1, 13):
            moved_step(sync, torch.Generator())
            link.lost = {1} if number < 8 else set()
    assert [push.steps for push in hub.pushes if push.unit == 0] == [3, 6, 3]
    assert [push.steps for push in hub.pushes if push.unit == 1] == [3, 6, 3]


# -- who founds and who joins


def test_the_first_nodes_parameters_are_the_anchors_and_later_nodes_adopt_them():
    founder, joiner = tower(1), tower(2)
    hub = Hub()
    with one_node(hub=hub, model=founder)[2] as first, one_node(hub=hub, model=joiner)[2]:
        assert furthest(parameters(founder), parameters(tower(1))) == 0
        assert furthest(parameters(joiner), parameters(founder)) == 0
        assert furthest(anchors_of(hub, first), parameters(founder)) == 0


def test_a_hub_has_no_synchronous_phase():
    with pytest.raises(ValueError, match=r"edit\.warmup_steps = 5 must be 0"):
        one_node(warmup_steps=5)


# -- what is not believed


def test_whom_the_hub_distrusts_adopts_the_anchor_and_forgets_its_moments():
    judge = lambda push: Verdict.DISTRUSTED if push.unit == 2 else Verdict.MERGED  # noqa: E731
    model = tower()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = one_node(hub=Hub(judge=judge), model=model, inner=inner, every=4)[2]
    start, seen = parameters(model), []
    sync.on_round = lambda outcome, waited_s: seen.append(outcome.distrusted)
    with sync:
        for batch in batches(0, 5):
            step(sync, inner, batch)
        model(X)
        assert seen == [(2,)]
        forgotten = {n for n, p in model.named_parameters() if not inner.state[p]["exp_avg"].any()}
        assert forgotten == {"middle.weight", "middle.bias"}
        assert torch.equal(model.middle.weight, start["middle.weight"])
        assert not torch.equal(model.first.weight, start["first.weight"])


def test_what_is_not_finite_is_never_sent_and_its_node_goes_back_to_the_anchor():
    hub, _, sync, inner = one_node(every=2)
    start = parameters(sync.model)
    with sync:
        loss(sync.model, batches(0, 1)[0]).backward()
        inner.step()
        with torch.no_grad():
            sync.model.middle.weight[0, 0] = float("nan")
        sync.step()
        sync.step()
        sync.step()
        sync.model(X)
        assert sorted(push.unit for push in hub.pushes) == [0, 1, 3]
        assert torch.equal(sync.model.middle.weight, start["middle.weight"])
        assert parameters(sync.model)["middle.weight"].isfinite().all()
        assert sync.exchange.used_steps == 2


def test_many_steps_after_an_outage_are_believed_and_a_jump_is_not():
    """At a drift of 1 per step, ten times the steps have ten times the norm, which is legitimate."""
    hub, link, sync, _ = one_node(every=4, penalty=PenaltyConfig())
    seen, chance = [], random.Random(0)
    sync.on_round = lambda outcome, waited_s: seen.append(outcome.distrusted)

    def drift(steps, size=1.0):
        for _ in range(steps):
            sync.model(X)
            with torch.no_grad():
                for p in sync.model.parameters():
                    p.add_(size * chance.uniform(0.95, 1.05))
            sync.step()

    with sync:
        drift(40)
        link.away = True
        drift(40)
        link.away = False
        drift(40)
        assert not any(seen)
        assert max(push.steps for push in hub.pushes) > 30
        drift(4 - (sync.local_steps - sync.schedule.last_step), size=20.0)
        drift(1)
        sync.model(X)
        assert seen[-1] == (0, 1, 2, 3)
        drift(2)
        sync.schedule.last_step = sync.local_steps


# -- while the hub is away


def test_a_round_is_put_off_while_its_units_are_under_way():
    hub, link, sync, _ = one_node(every=3)
    rng = torch.Generator().manual_seed(0)
    with sync:
        link.away = True
        for _ in range(8):
            moved_step(sync, rng)
        assert len(link._sent) == 4
        assert sync.round_id == 0
        link.away = False
        moved_step(sync, rng)  # here the answers are seen, and the next round opened at once
        assert [push.steps for push in hub.pushes[:4]] == [3] * 4
        sync.step()
        assert [push.steps for push in hub.pushes[4:8]] == [6] * 4


def test_training_goes_on_for_so_many_steps_without_an_answer_and_then_waits_by_name():
    _, link, sync, _ = one_node(every=3, max_steps_ahead=5, timeout_s=0.1)
    rng = torch.Generator().manual_seed(0)
    sync.__enter__()
    link.away = True
    for _ in range(7):
        moved_step(sync, rng)
    assert sync.waited_s == 0
    with pytest.raises(PeersMissing, match=r"the hub's answer for unit rest of round 1 .* 0\.1 s"):
        moved_step(sync, rng)
    link.away = False
    moved_step(sync, rng)
    assert sync.round_id == 1
    sync.__exit__(None, None, None)


def test_the_wait_ends_when_the_hub_is_back_or_somebody_wants_to_stop():
    class Stop(Exception):
        pass

    looks = []

    def back_soon(position):
        looks.append(position)
        link.away = len(looks) < 3

    def stop(position):
        raise Stop

    hub, link, sync, _ = one_node(every=3, max_steps_ahead=5)
    rng = torch.Generator().manual_seed(0)
    with sync:
        link.away, sync.while_waiting = True, back_soon
        for _ in range(8):
            moved_step(sync, rng)
        assert len(looks) == 3
        assert sync.waited_s > 0
        assert {push.steps for push in hub.pushes[:4]} == {3}
        link.away, sync.while_waiting = True, stop
        for _ in range(7):
            moved_step(sync, rng)
        with pytest.raises(Stop):
            moved_step(sync, rng)
        assert sync.abandon() == []
        assert not sync.in_flight
        link.away = False
        link.work()
        sync.schedule.last_step = sync.local_steps


def test_leaving_lands_what_is_under_way_and_pushes_what_is_left_once():
    hub, link, sync, _ = one_node(every=3, model=round_numbers(tower()))
    rng, start, total = torch.Generator().manual_seed(0), parameters(sync.model), {}
    with sync:
        for _ in range(5):
            total = plus(total, moved_step(sync, rng))
        assert not link.left
    assert link.left
    assert [push.steps for push in hub.pushes] == [3] * 4 + [2] * 4
    for name, anchor in anchors_of(hub, sync).items():
        assert torch.equal(anchor - start[name], total[name])
        assert torch.equal(parameters(sync.model)[name], anchor)


def test_a_node_that_has_learned_nothing_pushes_nothing():
    hub, link, sync, _ = one_node()
    with sync:
        sync.model(X)
    assert link.left
    assert hub.pushes == []


def test_only_steps_that_every_unit_has_brought_home_count_as_used():
    judge = lambda push: Verdict.REFUSED if push.unit == 1 and push.seq < 3 else Verdict.MERGED  # noqa: E731
    _, _, sync, _ = one_node(hub=Hub(judge=judge), every=2)
    rng, used = torch.Generator().manual_seed(0), []
    with sync:
        for _ in range(8):
            moved_step(sync, rng)
            used.append(sync.exchange.used_steps)
    assert used[-1] == 6
    assert set(used[:6]) == {0}
    assert sync.exchange.used_steps == 8


class SentReports:
    """Report of an exchange that was made by `join`; it keeps the samples that were told to be used."""

    trained, loss = 30, float("nan")

    def __init__(self):
        self.used = []

    def begin(self, shards):
        pass

    def step(self, steps, waited_s, used):
        pass

    def send(self, used):
        self.used.append(used)


@pytest.mark.parametrize(("refused", "used"), [((), 30), ((2,), 0), ((0, 1, 2, 3), 0)])
def test_a_node_that_ends_by_an_error_counts_no_samples_of_a_refused_push_as_used(refused, used):
    judge = lambda push: Verdict.REFUSED if push.unit in refused else Verdict.MERGED  # noqa: E731
    hub, link, sync, _ = one_node(hub=Hub(judge=judge), every=3)
    sync.exchange.report = report = SentReports()

    def fail():
        with sync:
            link.away = True
            for _ in range(3):
                moved_step(sync, torch.Generator())
            link.away = False
            raise RuntimeError("the loop")

    with pytest.raises(RuntimeError, match="the loop"):
        fail()
    assert len(hub.pushes) == 4
    assert (report.used, sync.exchange.used_steps, link.left) == ([used], used // 10, True)


@pytest.mark.parametrize("landing", ["forward", "arrival"])
def test_parameters_of_fewer_bits_lose_nothing_between_anchor_and_push(landing):
    hub, _, sync, inner = one_node(every=2, model=tower().bfloat16(), landing=landing)
    with sync:
        for batch in batches(0, 8):
            step(sync, inner, batch.bfloat16())
    for name, p in parameters(sync.model).items():
        assert torch.equal(p, anchors_of(hub, sync)[name].bfloat16())


def test_a_node_that_comes_back_keeps_its_norms_and_residuals_and_takes_the_hubs_anchors():
    hub, link, sync, inner = one_node(every=2, penalty=PenaltyConfig())
    link.rest = {0: np.full(3, 0.25, np.float32)}
    with sync:
        for batch in batches(0, 9):
            step(sync, inner, batch)
        saved, numbers = snapshot.tensors(sync), json.loads(json.dumps(snapshot.numbers(sync, [])))
        saved = {name: tensor.clone() for name, tensor in saved.items()}
    again = one_node(hub=hub, model=tower(5), every=2, penalty=PenaltyConfig())
    _, link, sync, inner = again
    link.rest = {0: np.zeros(3, np.float32)}
    assert snapshot.blank(sync, numbers).keys() == saved.keys()
    assert snapshot.restore(sync, saved, numbers) == []
    assert (sync.steps, sync.round_id) == (9, 3)  # the fourth is under way
    assert (link.rest[0] == 0.25).all()
    assert sync.exchange.detector.norms.rounds_L.tolist() == [4] * 4
    with sync:
        assert furthest(parameters(sync.model), anchors_of(hub, sync)) == 0
        before = len(hub.pushes)
        for batch in batches(1, 3):
            step(sync, inner, batch)
        assert [push.steps for push in hub.pushes[before:]] == [2] * 4
        assert sync.exchange.used_steps <= 3, "of this attempt"


# -- several ranks


def test_nodes_of_one_two_and_four_ranks_push_the_same(world):
    file = "tests/dist_jobs/hub_jobs.py"
    one, two, four = (world.run(file, "train_sharded", size=ranks)[0] for ranks in (1, 2, 4))
    assert (
        [numbers for numbers, _ in one] == [numbers for numbers, _ in two] == [numbers for numbers, _ in four]
    )
    assert [steps for (_, _, _, steps), _ in one] == [3] * 4 + [6] * 4 + [3] * 8 + [2] * 4
    for (_, ours), (_, theirs), (_, others) in zip(one, two, four, strict=True):
        assert np.array_equal(ours, theirs)
        assert np.array_equal(ours, others)


def test_a_wait_is_broken_off_on_all_ranks_or_on_none(world):
    told = world.run("tests/dist_jobs/hub_jobs.py", "wait_and_stop", size=2)
    assert told == [(8, "stopped", 7)] * 2
