"""Tests of peers that average their parameters: the outer step, rounds that fail, peers that come late."""

import numpy as np
import pytest
import torch
from kit.averagers import Meeting
from kit.nodes import batches, loss, tower

from aedit.async_sgd.rules import Nesterov
from aedit.edit import AveragingExchange, EditConfig, EverySteps, LayerSync
from aedit.proto.dht.averaging import Comparison

EVERY, LR, MOMENTUM = 3, 0.6, 0.5


class Peer:
    """One peer with real inner steps."""

    def __init__(self, averager, seed, model=None, landing="arrival"):
        self.model = model or tower(0)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.events = []
        self.exchange = AveragingExchange(averager, outer=Nesterov(lr=LR, momentum=MOMENTUM))
        self.exchange.on_event = lambda event, **values: self.events.append((event, values))
        config = EditConfig(every=EVERY, landing=landing)
        self.sync = LayerSync.of(
            self.model, self.inner, exchange=self.exchange, schedule=EverySteps(EVERY), config=config
        )
        self.data = iter(batches(seed, 100))
        self.outcomes = []
        self.sync.on_round = lambda outcome, waited_s: self.outcomes.append(outcome)

    def step(self, count=1):
        for _ in range(count):
            loss(self.model, next(self.data)).backward()
            self.inner.step()
            self.inner.zero_grad()
            self.sync.step()

    def land(self):
        self.sync.finish()

    @property
    def values(self):
        """All parameters in the order of the units, as the averager sees them."""
        return torch.cat([unit.flat() for unit in self.sync.units]).double().numpy()

    @property
    def anchors(self):
        units = range(len(self.sync.units))
        return torch.cat([self.exchange.store.peek(i)[0] for i in units]).double().numpy()


def peers_of(count, *, models=None, landing="arrival"):
    numel = sum(p.numel() for p in tower(0).parameters())
    meeting = Meeting(numel, count)
    models = models or [None] * count
    made = [Peer(a, i, models[i], landing) for i, a in enumerate(meeting.averagers)]
    for peer in made:
        peer.sync.__enter__()
    return meeting, made


def detach(peers):
    """Leave without a last round."""
    for peer in peers:
        peer.sync.__exit__(ValueError, None, None)


def test_peers_take_the_outer_step_from_their_weighted_mean():
    meeting, (a, b) = peers_of(2)
    anchor, momentum = a.anchors, np.zeros_like(a.anchors)
    for _ in range(4):
        a.step(EVERY)
        b.step(EVERY)
        meeting.averagers[1].steps = 2 * EVERY  # as if it were faster
        mean = (EVERY * a.values + 2 * EVERY * b.values) / (3 * EVERY)
        meeting.meet()
        a.land()
        b.land()
        D = anchor - mean
        momentum = MOMENTUM * momentum + D
        anchor = anchor - LR * (MOMENTUM * momentum + D)
        for peer in (a, b):
            np.testing.assert_allclose(peer.anchors, anchor, rtol=0, atol=2e-6)
            np.testing.assert_allclose(peer.values, anchor, rtol=0, atol=2e-6)
    assert [event for event, _ in a.events] == ["average"] * 4
    assert [outcome.nodes for outcome in a.outcomes] == [2] * 4
    assert a.exchange.bytes_sent == 4 * 4 * a.values.size  # 2 (n - 1) / n of the vector per round
    detach([a, b])


def test_steps_that_follow_the_round_stay_when_its_answer_lands():
    meeting, (a, b) = peers_of(2)
    a.step(EVERY)
    b.step(EVERY)
    sent = a.values
    a.step(2)
    later = a.values - sent
    meeting.meet()
    a.land()
    np.testing.assert_allclose(a.values, a.anchors + later, rtol=0, atol=2e-6)
    detach([a, b])


def test_a_failed_round_changes_nothing_and_its_steps_count_in_the_next_one():
    meeting, (a, b) = peers_of(2)
    a.step(EVERY)
    before, anchor = a.values, a.anchors
    meeting.averagers[1].ended = True
    meeting.meet([0])
    a.land()
    assert (a.values == before).all()
    assert (a.anchors == anchor).all()
    assert a.outcomes[-1].refused == tuple(range(len(a.sync.units)))
    assert (a.exchange.rounds, a.exchange.failed) == (1, 1)
    assert a.events == [("average_failed", {"round": 1, "error": "no other peer", "seconds": 0.0})]
    a.step(EVERY)
    assert meeting.averagers[0].steps == 2 * EVERY
    assert b.outcomes == []
    detach([a, b])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_unit_whose_values_are_not_finite_sends_its_anchor_and_takes_the_average(value):
    meeting, (a, b) = peers_of(2)
    a.step(EVERY)
    b.step(EVERY - 1)
    with torch.no_grad():
        b.model.first.weight[0, 0] = value
    b.sync.step()
    assert np.isfinite(meeting.averagers[1].sent).all()
    broken = next(i for i, unit in enumerate(b.sync.units) if unit.name == "first")
    meeting.meet()
    a.land()
    b.land()
    assert np.isfinite(b.values).all()
    np.testing.assert_allclose(b.anchors, a.anchors, rtol=0, atol=2e-6)
    assert b.outcomes[-1].distrusted == (broken,)
    assert not any(torch.is_nonzero(t.abs().sum()) for t in moments(b, "first"))
    detach([a, b])


def moments(peer, name):
    unit = next(unit for unit in peer.sync.units if unit.name == name)
    states = [peer.inner.state.get(p, {}) for p in unit.params]
    return [state["momentum_buffer"] for state in states if state.get("momentum_buffer") is not None]


def test_a_peer_that_comes_late_takes_the_average_of_the_others_as_its_anchor():
    meeting, (a, b, c) = peers_of(3, models=[tower(0), tower(0), tower(7)])
    meeting.averagers[0].rounds = meeting.averagers[1].rounds = 5
    for peer in (a, b, c):
        peer.step(EVERY)
    meeting.averagers[2].steps = 1e-9  # as the process weighs it
    mean = (a.values + b.values) / 2
    meeting.meet()
    c.land()
    np.testing.assert_allclose(c.values, mean, rtol=0, atol=2e-6)
    np.testing.assert_allclose(c.anchors, mean, rtol=0, atol=2e-6)
    assert c.outcomes[-1].distrusted == tuple(range(len(c.sync.units)))
    detach([a, b, c])


def test_anchors_that_differ_come_closer_in_every_round():
    meeting, (a, b) = peers_of(2, models=[tower(0), tower(1)])
    apart = [np.linalg.norm(a.anchors - b.anchors)]
    for _ in range(8):
        a.step(EVERY)
        b.step(EVERY)
        meeting.meet()
        a.land()
        b.land()
        apart.append(np.linalg.norm(a.anchors - b.anchors))
    assert apart[-1] < 0.05 * apart[0]
    detach([a, b])


def test_forward_landing_works_on_the_average_in_the_next_pass():
    meeting, (a, b) = peers_of(2, landing="forward")
    a.step(EVERY)
    b.step(EVERY)
    meeting.meet()
    loss(a.model, next(a.data))
    assert (a.values == a.anchors).all()
    detach([a, b])


def test_a_peer_resumes_with_its_anchors_and_momentum_to_the_same_bits():
    meeting, (a, b) = peers_of(2)
    a.step(EVERY)
    b.step(EVERY)
    meeting.meet()
    a.land()
    kept = {name: tensor.clone() for name, tensor in a.sync.state_dict().items()}
    again = Peer(Meeting(a.values.size, 1).averagers[0], 0, tower(5))
    again.sync.load_state_dict(kept)
    again.model.load_state_dict(a.model.state_dict())
    again.sync.__enter__()
    assert (again.anchors == a.anchors).all()
    for name, tensor in again.exchange.state_dict().items():
        assert torch.equal(tensor, kept[name]), name
    detach([a, b, again])


def test_leaving_ends_the_averager_and_reports_comparisons_and_totals():
    meeting, (a, b) = peers_of(2)
    a.step(EVERY)
    b.step(EVERY)
    meeting.meet()
    meeting.averagers[0].said = [Comparison(number=1, members=2, distances=(0.25,))]
    a.sync.__exit__(None, None, None)
    assert meeting.averagers[0].closed
    told = dict(a.events)
    assert told["averages_differ"]["error"] == "1 of 1 other peers have another average"
    assert told["averaging"] == {"rounds": 1, "failed": 0, "differing": 1}
    detach([b])


def test_a_model_of_another_size_is_refused():
    with pytest.raises(ValueError, match="the averager is for 7 parameters, and the model has"):
        Peer(Meeting(7, 1).averagers[0], 0)


def test_an_averager_serves_one_model():
    averager = Meeting(sum(p.numel() for p in tower(0).parameters()), 1).averagers[0]
    Peer(averager, 0)
    with pytest.raises(ValueError, match=r"has served another LayerSync.*a prefix of its own"):
        Peer(averager, 0)
