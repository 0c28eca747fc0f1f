"""Tests a node that waits, gives up, is distrusted, or leaves the warm-up."""

import pydoc_data.topics
import random
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from kit.deferred import Held, Slow, alone, anchors, node, step
from kit.nodes import batches, furthest, in_threads, loss, parameters, tower
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.async_sgd.rules import Average, Nesterov
from aedit.edit import EditConfig, LayerSync, MeanExchange, PenaltyConfig, Shards
from aedit.edit.waiting import Waiter
from aedit.proto.transports import MemoryWorld
from aedit.types import Round


def test_a_distrusted_node_adopts_the_mean_and_forgets_its_moments():
    model = tower()

    def job(transport, n):
        own = deepcopy(model)
        inner = torch.optim.AdamW(own.parameters(), lr=0.01)
        exchange = MeanExchange(transport, outer=Average(), penalty=PenaltyConfig(weights="uniform"))
        sync = LayerSync.of(own, inner, exchange=exchange, config=EditConfig(every=1000))
        with sync:
            loss(own, batches(n, 1)[0]).backward()
            inner.step()
            if n == 1:
                with torch.no_grad():
                    own.middle.weight[0, 0] = float("nan")
            sync.begin(Round(1, 1))
            own(torch.ones(1, 5))
            moments = {name: inner.state[p]["exp_avg"].abs().sum() for name, p in own.named_parameters()}
            sync.schedule.last_id = 1
        return parameters(own), {name for name, size in moments.items() if size == 0}

    (trusted, kept), (other, forgotten) = in_threads(2, job)
    assert furthest(trusted, other) == 0
    assert (kept, forgotten) == (set(), {"middle.weight", "middle.bias"})


# -- waiting


class Windows:
    """Idle work that records its windows and takes a quarter of a second in each."""

    def __init__(self, used_s=0.0):
        self.causes, self.used_s = [], used_s

    @contextmanager
    def window(self, cause):
        self.causes.append(cause)
        yield
        self.used_s += 0.25


def forward_with_idle_work(kind):
    model, ticks = tower(), iter(range(1000))
    sync, _ = node(model, kind(MemoryWorld(1).node(0)))
    sync.idle, sync.clock = Windows(), lambda: next(ticks)
    with sync:
        sync.begin(Round(1, 1))
        assert sync.idle.causes == []
        model(torch.ones(1, 5))
        sync.schedule.last_id = 1
        return sync.idle.causes.copy(), sync.waited_s, sync.idle_used_s


def test_idle_work_is_let_in_while_the_node_waits():
    causes, waited_s, idle_used_s = forward_with_idle_work(Slow)
    assert causes == ["round"] * 6  # the opening, the names of buffers and four units
    assert (waited_s, idle_used_s) == (6, 1.5)


def test_idle_work_stays_out_when_answers_are_here():
    assert forward_with_idle_work(Held) == ([], 0, 0)


def test_idle_time_used_is_what_the_attached_work_reports_not_the_length_of_the_wait():
    sync, _ = node(tower(), Slow(MemoryWorld(1).node(0)))
    first, second = Windows(used_s=100.0), Windows(used_s=7.0)
    sync.clock = lambda: 0.0  # the waits take no time, the work does
    assert sync.idle_used_s == 0
    sync.idle = first
    assert sync.idle_used_s == 0, "what the work had used before does not count"
    first.used_s += 3.0
    sync.idle = second
    first.used_s += 50.0
    second.used_s += 0.5
    assert sync.idle_used_s == 3.5
    sync.idle = None
    second.used_s += 50.0
    assert (sync.idle_used_s, sync.waited_s) == (3.5, 0.0)


def test_a_wait_can_be_given_up():
    model = tower()
    sync, _ = node(model, Slow(MemoryWorld(1).node(0)))
    asked = []

    def give_up(position):
        asked.append(position)
        raise KeyboardInterrupt

    sync.while_waiting = give_up
    sync.exchange.anchor()
    sync.schedule.last_id = 4
    sync.begin(Round(4, 1))
    with pytest.raises(KeyboardInterrupt):
        sync.finish()
    assert asked == [4]


def test_a_round_given_up_and_opened_again_changes_nothing():
    data = batches(0, 6)

    def trained(give_up):
        model = tower()
        penalty = PenaltyConfig(step_weight=0.5)
        sync, inner = node(model, alone(), every=2, outer=Nesterov(), penalty=penalty)
        with sync:
            for batch in data:
                step(sync, inner, batch)
                if give_up and sync.in_flight:
                    for round in sync.abandon():
                        sync.begin(round)
        return parameters(model), sync.total_steps

    (ours, our_steps), (theirs, their_steps) = trained(True), trained(False)
    assert furthest(ours, theirs) == 0
    assert our_steps == their_steps == 6


# -- from the warm-up to the first local phases


def text(seed, count):
    """Return batches of 8 x 32 bytes of Python's own documentation."""
    topics = "".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
    starts = random.Random(seed)
    rows = [starts.randrange(len(topics) - 32) for _ in range(8 * count)]
    return torch.tensor([list(topics[row : row + 32]) for row in rows]).view(count, 8, 32)


def language_loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


def test_a_language_model_does_not_jump_when_the_warm_up_ends():
    """The held-out loss after each of the first local rounds is compared with that at the warm-up's end."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
    held_out, losses = text(99, 16).flatten(0, 1), {}

    def job(transport, n):
        own = deepcopy(model)
        inner = torch.optim.AdamW(own.parameters(), lr=3e-3)
        exchange = MeanExchange(transport, outer=Nesterov(), penalty=PenaltyConfig())
        sync = LayerSync.of(own, inner, exchange=exchange, config=EditConfig(every=8, warmup_steps=40))
        with sync:
            for ids in text(n, 72):
                language_loss(own, ids).backward()
                inner.step()
                inner.zero_grad()
                sync.step()
                if sync.steps in (40, 48, 56, 64, 72):
                    with torch.no_grad():  # lands
                        losses[n, sync.steps] = language_loss(own, held_out).item()
        assert sync.round_id == 5

    in_threads(2, job)
    assert losses[0, 40] < 3.6, "the warm-up has taught it something: a guess costs 4.85"
    for later in (48, 56, 64, 72):
        assert losses[0, later] <= 1.02 * losses[0, 40]
        assert losses[0, later] == losses[1, later]


def test_the_anchors_are_taken_where_the_warm_up_ends():
    model, data = tower(), batches(0, 6)
    sync, inner = node(model, alone(), warmup_steps=5, outer=Average(0.5))
    with sync:
        for batch in data[:5]:
            assert not sync.anchored
            step(sync, inner, batch)
        there = parameters(model)
        assert furthest(anchors(sync), there) == 0
        assert furthest(there, parameters(tower())) > 0.01
        step(sync, inner, data[5])
        assert furthest(anchors(sync), there) == 0


class Helping:
    """Two pieces of work for others, and the answer that comes after them."""

    is_helper = True

    def __init__(self, idle):
        self.left, self.idle, self.looks = 2, idle, 0

    @property
    def has_work(self):
        self.looks += 1
        return self.left > 0 and self.looks > 2

    def work(self):
        if not self.has_work:
            return False
        assert not self.idle.is_open
        self.left -= 1
        return True

    def done(self):
        return self.left == 0 and self.looks > 9

    def result(self):
        return "answer"


class OneWindow(Windows):
    is_open = False

    @contextmanager
    def window(self, cause):
        self.is_open = True
        with super().window(cause):
            yield
        self.is_open = False


@pytest.mark.parametrize("needed", [None, 3])
def test_a_helper_works_for_others_in_its_waits_while_idle_work_stands_still(needed):
    waiter, asked = Waiter(Shards(), 1.0), []
    waiter.idle, waiter.while_waiting = OneWindow(), asked.append
    waiter.help = help = Helping(waiter.idle)
    assert waiter.wait(help, needed=needed) == "answer"
    assert help.left == 0
    assert waiter.idle.causes == ["round", "round"]
    assert set(asked) == ({3} if needed else set())
