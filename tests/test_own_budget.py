"""Tests the budget of a peer that nobody counts for: it ends with the round in which all peers meet."""

from types import SimpleNamespace

import pytest

from aedit.edit import EditConfig
from aedit.launch.config import RunConfig, TrainConfig
from aedit.launch.node.build_averaging import OwnBudget


class Peer:
    """A peer whose steps take `step_s`, from `began_s` on, with a round at every multiple of 10 s."""

    def __init__(self, began_s, step_s, *, steps=10**6):
        self.now, self.step_s = began_s, step_s
        self.sync = SimpleNamespace(steps=0, local_steps=0, schedule=SimpleNamespace(last_step=0))
        self.exchange = SimpleNamespace(began_s=began_s, members=3)
        config = RunConfig(
            edit=EditConfig(schedule="seconds", every=10), train=TrainConfig(steps=steps, seconds=60.0)
        )
        self.budget = OwnBudget(config, self.sync, self.exchange, evaluates=True, now=lambda: self.now)

    def train(self):
        """Return when training ends."""
        while self.budget.goes_on():
            before = self.now // 10
            self.now += self.step_s
            self.sync.steps = self.sync.local_steps = self.sync.steps + 1
            if self.now // 10 > before:
                self.sync.schedule.last_step = self.sync.local_steps
        return self.now


@pytest.mark.parametrize("first_s", [1000.0, 1003.0, 1004.9, 1005.1, 1009.0])
def test_peers_that_have_met_end_with_the_same_round(first_s):
    peers = [Peer(first_s, 0.3), Peer(first_s + 2.0, 0.7)]
    for peer in peers:
        peer.exchange.began_s = first_s
    ends = [peer.train() // 10 for peer in peers]
    assert ends[0] == ends[1]
    assert abs(ends[0] * 10 - (first_s + 60)) <= 5.7


def test_a_peer_that_opens_no_round_ends_one_interval_later():
    peer = Peer(1000.0, 0.5)
    peer.sync.schedule.last_step = -1
    peer.now += 61
    assert peer.budget.goes_on()
    peer.now += 10
    assert not peer.budget.goes_on()


def test_progress_is_the_larger_share_of_steps_and_time():
    peer = Peer(1000.0, 0.5, steps=100)
    peer.now += 15
    assert peer.budget.progress() == 0.25
    peer.sync.steps = 50
    assert peer.budget.progress() == 0.5
    peer.sync.steps = 100
    assert not peer.budget.goes_on()
    assert (peer.budget.nodes(), peer.budget.evaluates()) == (3, True)
