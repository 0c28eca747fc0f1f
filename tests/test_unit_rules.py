"""Tests a unit that is trained apart from the model, such as a shared drafter: averaged by its own steps."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.hub_machine import LAYOUT, World, config, picture, plan, through_a_file
from kit.nodes import batches, in_threads, loss, parameters, tower
from torch import nn

from aedit.async_sgd.hub import Denied
from aedit.async_sgd.inprocess import InProcessHub
from aedit.async_sgd.rules import (
    DRAFTER,
    Nesterov,
    OuterConfig,
    PenaltyConfig,
    PushFilterConfig,
    Refused,
    UnitRule,
)
from aedit.clock import VirtualClock
from aedit.edit import EditConfig, HubExchange, LayerSync, MeanExchange, find_units, flat_layout
from aedit.launch.config import DrafterConfig, PromptConfig, RunConfig, unit_rules
from aedit.types import Verdict

APART = {"second": UnitRule()}
NESTEROV = OuterConfig(kind="nesterov", lr=0.7, momentum=0.9)


def shared(nodes=2, quiet=False, **settings):
    """Return a founded hub whose unit 1, of five values, is trained apart; `rest` under Nesterov momentum."""
    hub = config(**({"quorum": "all"} | settings))
    made = World(replace(plan(hub, outer=NESTEROV), rules=APART, penalty=PenaltyConfig(clip=1e-3)))
    for node in range(nodes):
        made.join(f"node{node}")
    made.found()
    return made


def drafter(made):
    return made.hub.anchor(1)[1]


# --- at the hub


def test_at_a_hub_it_is_the_average_of_those_who_trained_weighted_by_their_own_steps():
    made, x = shared(3), np.zeros(5)
    rng = np.random.default_rng(0)
    steps = [30, 10, 0]
    for turn in range(6):
        for node in range(3):
            D = rng.normal(size=5).astype(np.float32)
            made.push(node, D, 1, steps=steps[node]), made.settle()
            if turn >= 2:
                x = x - steps[node] / 40 * D
        if turn == 1:
            x = drafter(made).astype(np.float64)
    np.testing.assert_allclose(drafter(made), x, atol=1e-5)


def test_nobody_waits_for_it_whatever_the_quorum_of_the_model_is():
    made = shared(3)
    made.push(0, 1.0, 1), made.settle()
    assert made.hub.anchor(1)[0] == 2
    made.push(0, 1.0, 0), made.settle()
    assert made.hub.anchor(0)[0] == 1


def test_it_is_neither_screened_nor_clipped_by_size_but_what_is_not_finite_is_refused():
    made = shared(1, push_filter=PushFilterConfig(violations=99))
    for size in (1e-6, 1e-6, 1e-6, 1e4):
        made.push(0, size, 1), made.settle()
    np.testing.assert_allclose(drafter(made), -1e4, rtol=1e-6)
    (refused,) = made.push(0, np.nan, 1)
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("not finite")


def test_its_steps_are_no_steps_of_the_run():
    made = shared(1)
    made.push(0, 1.0, 0, steps=10), made.push(0, 1.0, 1, steps=500), made.settle()
    assert (made.hub.state.total_steps, made.hub.state.mean_steps) == (10, 10.0)
    assert made.hub.state.members[0].steps == 10
    assert made.hub.state.units[1].steps == 500


def test_more_of_its_steps_than_a_push_can_hold_are_refused():
    made = shared(1)
    (refused, *_) = made.push(0, 1.0, 1, steps=10**6)
    assert refused.reason.startswith("steps")


def test_one_without_steps_gets_the_newest_anchor_and_changes_nothing():
    made = shared(2)
    made.push(0, 1.0, 1, steps=20), made.settle()
    before = drafter(made).copy()
    made.push(1, 5.0, 1, steps=0), made.settle()
    assert drafter(made).tobytes() == before.tobytes()
    assert made.hub.state.members[1].decisions[1].verdict == Verdict.MERGED


def test_journal_and_snapshot_give_the_same_bits():
    made = shared(2)
    rng = np.random.default_rng(3)
    for node in (0, 1, 1, 0):
        made.push(node, rng.normal(size=5), 1, steps=int(rng.integers(0, 9))), made.settle()
    saved, since = through_a_file(made.hub.saved()), len(made.journal)
    made.push(0, 3.0, 1), made.settle()
    assert picture(made.replayed()) == picture(made.hub)
    assert picture(made.replayed(saved, since)) == picture(made.hub)
    assert made.replayed(saved, since).state.units[1].apart


def test_a_hub_process_that_would_own_it_alone_refuses_the_run():
    of_two = World(replace(plan(config(quorum="all"), outer=NESTEROV), rules=APART, part=(1, 2)))
    with pytest.raises(Denied, match="hub process 1 of 2 would own no unit of the model"):
        of_two.join("a")
    assert not of_two.journal


# --- on nodes


class Apart(nn.Module):
    """A tower, and a drafter that no loss of it reaches."""

    def __init__(self):
        super().__init__()
        self.tower = tower(0)
        self.drafter = nn.Linear(3, 2)

    def forward(self, x):
        return self.tower(x)


def apart():
    torch.manual_seed(5)
    return Apart()


class Trained:
    """The drafter of a node, trained by hand: `steps` more at a time, each adds `by`."""

    def __init__(self, model, by):
        self.model, self.by, self.total = model, by, 100

    @torch.no_grad()
    def train(self, steps):
        self.total += steps
        for p in self.model.drafter.parameters():
            p += steps * self.by


OWN = [[4, 2, 0], [0, 6, 0], [2, 0, 0]]
"""The drafter's steps of each node before each round."""
EVERY = 3


def run_node(model, exchange, trained, own, data):
    """Train for one round per entry of `own`; return the drafter after each round."""
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    exchange.unit_steps.register(DRAFTER, lambda: trained.total)
    settings = EditConfig(every=EVERY, landing="arrival", units=("tower.*", "drafter"))
    sync = LayerSync.of(model, inner, exchange=exchange, config=settings)
    seen = []
    with sync:
        for n, batch in enumerate(data):
            if n % EVERY == 0:
                trained.train(own[n // EVERY])
            loss(model, batch).backward()
            inner.step()
            inner.zero_grad()
            sync.step()
            sync.land()
            if n % EVERY == EVERY - 1:
                sync.finish()
                seen.append(model.drafter.weight.detach().clone())
    return seen


def averaged(start, moves):
    """Return the drafter's weight after each round: x + sum_n g_n move_n / sum_n g_n, in float64."""
    x, seen = start.double(), []
    for round in range(len(OWN[0])):
        total = sum(own[round] for own in OWN)
        if total:
            x = x + sum(own[round] / total * own[round] * by for own, by in zip(OWN, moves, strict=True))
        seen.append(x)
    return seen


@pytest.mark.parametrize("penalty", [PenaltyConfig(clip=1e-4, threshold=1e-3, warmup_rounds=2)])
def test_in_a_world_of_nodes_it_is_averaged_by_its_own_steps_and_the_model_is_not(penalty):
    models, moves = [apart() for _ in range(3)], [0.5, -0.25, 1.0]
    start = models[0].drafter.weight.detach().clone()

    def job(transport, i):
        exchange = MeanExchange(transport, outer=Nesterov(), penalty=penalty, rules={DRAFTER: UnitRule()})
        trained = Trained(models[i], moves[i])
        return run_node(models[i], exchange, trained, OWN[i], batches(i, EVERY * 3))

    found = in_threads(3, job)
    for seen in found:
        for weight, expected in zip(seen, averaged(start, moves), strict=True):
            torch.testing.assert_close(weight.double(), expected, atol=1e-6, rtol=1e-6)
    # The model's own units are clipped to nearly nothing by the same penalty.
    moved = parameters(models[0].tower)["first.weight"] - parameters(apart().tower)["first.weight"]
    assert moved.norm() < 1e-2


def test_rules_that_differ_between_nodes_are_told():
    models = [apart() for _ in range(2)]

    def job(transport, i):
        rules = {DRAFTER: UnitRule(weights="uniform" if i else "steps")}
        exchange = MeanExchange(transport, rules=rules)
        sync = LayerSync.of(models[i], torch.optim.SGD(models[i].parameters(), lr=0.1), exchange=exchange)
        with pytest.raises(ValueError, match="rule of unit drafter"), sync:
            pass

    in_threads(2, job)


def test_a_checkpoint_keeps_its_anchor_and_the_momentum_of_the_others():
    model = apart()

    def job(transport, i):
        exchange = MeanExchange(transport, outer=Nesterov(), rules={DRAFTER: UnitRule()})
        run_node(model, exchange, Trained(model, 0.5), [4, 2], batches(0, 6))
        return exchange

    (exchange,) = in_threads(1, job)
    state = {name: tensor.clone() for name, tensor in exchange.state_dict().items()}
    assert "anchor/drafter.weight" in state
    assert "momentum/drafter.weight" not in state
    assert "momentum/tower.first.weight" in state
    (again,) = in_threads(1, lambda transport, i: _bound(transport, exchange.units))
    again.load_state_dict(state)
    for i in range(len(exchange.units)):
        assert torch.equal(again.store.peek(i)[0], exchange.store.peek(i)[0])


def _bound(transport, units):
    again = MeanExchange(transport, outer=Nesterov(), rules={DRAFTER: UnitRule()})
    again.bind(units, deepcopy(again.shards))
    return again


def test_a_node_of_a_hub_pushes_its_own_steps_and_pulls_what_others_have_trained():
    models = [apart() for _ in range(2)]
    units = ("tower.*", "drafter")
    layout = flat_layout.layout(find_units(models[0], units))
    own = replace(plan(config(quorum=1)), rules={DRAFTER: UnitRule()}, pace="steps", every=EVERY)
    hub = InProcessHub(own, layout, clock=VirtualClock())
    start = models[0].drafter.weight.detach().clone()
    first = Trained(models[0], 0.5)
    exchanges = [HubExchange(hub.link(name)) for name in ("a", "b")]
    syncs = []
    for model, exchange in zip(models, exchanges, strict=True):
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        settings = EditConfig(every=EVERY, landing="arrival", units=units)
        syncs.append(LayerSync.of(model, inner, exchange=exchange, config=settings))
    exchanges[0].unit_steps.register(DRAFTER, lambda: first.total)
    exchanges[1].unit_steps.register(DRAFTER, lambda: 0)
    index = [unit.name for unit in layout.units].index(DRAFTER)
    with syncs[0], syncs[1]:
        first.train(4)
        for _ in range(2):
            for sync, data in zip(syncs, (batches(0, EVERY), batches(1, EVERY)), strict=True):
                for batch in data:
                    loss(sync.model, batch).backward()
                    sync.inner.zero_grad()
                    sync.step()
                sync.finish()
        assert hub.hub.state.units[index].steps == 4
        assert not hub.tally.refused
    expected = start + 4 * 0.5  # of the nodes, only one trains the drafter: its arrival is a whole round
    for model in models:
        torch.testing.assert_close(model.drafter.weight.detach(), expected)


@pytest.mark.parametrize(
    ("source", "drafter", "apart"),
    [
        ("aedit.tasks", DrafterConfig(), True),
        ("", DrafterConfig(), False),
        ("aedit.tasks", DrafterConfig(share=False), False),
        ("aedit.tasks", DrafterConfig(kind="suffix"), False),
    ],
)
def test_a_run_has_such_a_unit_if_it_has_prompts_and_shares_a_drafter(source, drafter, apart):
    config = RunConfig(prompts=PromptConfig(source=source), drafter=drafter)
    assert (DRAFTER in unit_rules(config)) == apart


def test_the_layout_of_these_tests_has_the_unit():
    assert LAYOUT.units[1].name == "second"
