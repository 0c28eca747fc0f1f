"""Tests when a node of a hub pushes, and which data it draws."""

from dataclasses import replace

import numpy as np
import pytest

from aedit.edit import EditConfig, HubPace, OwnPace, Shards, Waiter, make_pace
from aedit.launch.data import LeasedOrder, SampleOrder
from aedit.proto.transports import PeersMissing
from aedit.types import News


def opened(schedule, steps, before=lambda step: None):
    """Return (step, id, steps) of the rounds opened over `steps` steps."""
    found = []
    for step in range(1, steps + 1):
        before(step)
        if round := schedule.due(step):
            found.append((step, round.id, round.steps))
    return found


class Told:
    def __init__(self, **news):
        self.news = News(**news)

    def __call__(self):
        return self.news

    def say(self, **news):
        self.news = replace(self.news, **news)


def test_a_node_at_its_own_pace_pushes_every_so_many_steps():
    assert opened(OwnPace(3), 9) == [(3, 1, 3), (6, 2, 3), (9, 3, 3)]


def test_a_round_that_was_put_off_is_due_at_once_and_the_next_one_a_whole_interval_later():
    pace = OwnPace(3)
    asked = [step for step in range(1, 13) if step not in (3, 4) and pace.due(step)]
    assert asked == [5, 8, 11]


def test_the_hub_says_how_many_steps_a_node_does():
    told = Told()
    pace = make_pace(EditConfig(schedule="dylu", every=4), told)

    def before(step):
        told.say(pace_steps={1: 0, 5: 2, 9: 6}.get(step, told.news.pace_steps))

    assert [step for step, *_ in opened(pace, 20, before)] == [4, 6, 8, 14, 20]


@pytest.mark.parametrize("pace", ["steps", "dylu"])
def test_with_fragments_rounds_come_as_much_more_often(pace):
    schedule = make_pace(EditConfig(schedule=pace, every=12, fragments=3), Told(pace_steps=6))
    assert [step for step, *_ in opened(schedule, 12)] == (
        [4, 8, 12] if pace == "steps" else [2, 4, 6, 8, 10, 12]
    )


def test_the_hub_opens_a_round_once_whatever_the_nodes_clock_says():
    told, now = Told(round=7, age_s=0.0), [0.0]
    pace = HubPace(10, told, clock=lambda: now[0])

    def before(step):
        now[0] += 30
        told.say(round=7 if step < 4 else 9)

    assert opened(pace, 8, before) == [(4, 1, 4)], (
        "rounds from before it came are not its own; two at once are one"
    )


def test_a_node_whose_hub_is_silent_keeps_time_by_itself():
    told, now = Told(round=1, age_s=0.0), [0.0]
    pace = HubPace(10, told, clock=lambda: now[0])

    def before(step):
        now[0] += 2
        told.say(age_s=now[0])

    assert [step for step, *_ in opened(pace, 20, before)] == [10, 15, 20]


def test_a_hub_whose_round_numbers_go_back_opens_none_until_they_have_caught_up():
    """A standby may take over at an older round.

    Its rounds 6 and 7 are not new to this node, which took part in them; until then the node keeps its own
    schedule.
    """
    told, now = Told(round=1, age_s=0.0), [0.0]
    pace = HubPace(10, told, clock=lambda: now[0])
    says = {1: (1, 0), 2: (8, 0), 3: (5, 0), 4: (5, 25), 5: (6, 0), 6: (7, 0), 7: (8, 0), 8: (9, 0)}

    def before(step):
        now[0] += 5
        told.say(round=says[step][0], age_s=says[step][1])

    assert [step for step, *_ in opened(pace, 8, before)] == [2, 4, 8]


def test_the_other_fragments_follow_before_the_hubs_next_round():
    told, now = Told(round=0, age_s=0.0), [0.0]
    pace = make_pace(EditConfig(schedule="seconds", every=9, fragments=3), told)
    pace.clock = lambda: now[0]

    def before(step):
        now[0] += 1
        told.say(round=step // 9)

    assert [step for step, *_ in opened(pace, 24, before)] == [9, 12, 15, 18, 21, 24]


# -- leased data


class Leases:
    def __init__(self, *blocks):
        self.blocks = list(blocks)

    def leases(self, upto=0):
        return tuple(self.blocks)


def alone():
    return Waiter(Shards(), timeout_s=5)


def stream(num_samples, seed, count):
    return SampleOrder(num_samples, seed).take(count)


def test_leased_data_is_the_stream_at_the_leased_positions():
    """The leases reach across blocks and across epochs."""
    whole, link = stream(10, 3, 50), Leases((5, 9), (20, 21), (28, 40))
    order = LeasedOrder(link, 10, 3, alone())
    drawn = np.concatenate([order.take(k) for k in (2, 3, 1, 7)])
    positions = [*range(5, 9), 20, *range(28, 36)]
    assert drawn.tolist() == whole[positions].tolist()
    assert order.epoch == 3.6
    order.take(4)
    assert order.epoch == 4.0


def test_a_step_that_was_undone_draws_the_same_again():
    link = Leases((0, 3), (6, 20))
    order = LeasedOrder(link, 10, 3, alone())
    order.take(2)
    state = order.state()
    first = order.take(6)
    assert order.resume(state).take(6).tolist() == first.tolist()


def test_ranks_that_see_the_leases_at_other_times_draw_alike():
    early, late = Leases((0, 3), (6, 20)), Leases((0, 3))
    orders = [LeasedOrder(link, 10, 3, alone()) for link in (early, late)]
    assert orders[0].take(3).tolist() == orders[1].take(3).tolist()
    orders[1].waiter.while_waiting = lambda position: late.blocks.append((6, 20))
    assert orders[0].take(5).tolist() == orders[1].take(5).tolist()


def test_a_node_without_data_waits_by_name():
    now = iter(range(100))
    order = LeasedOrder(Leases((0, 3)), 10, 3, alone())
    order.waiter.clock = lambda: next(now)
    order.take(2)
    with pytest.raises(PeersMissing, match="a lease of 2 samples from the hub did not come within 5 s"):
        order.take(2)
    assert order.drawn == 2
