"""Tests nodes with bad numbers: they are left out and repaired, and the other nodes are unaffected."""

from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest
import torch
from kit.nodes import (
    UNITS,
    batches,
    fingerprint,
    follow_script,
    furthest,
    in_threads,
    loss,
    parameters,
    tower,
    train,
)
from kit.oracle import Rules, edit

from aedit.async_sgd.rules import Average, Nesterov
from aedit.edit import EditConfig, LayerSync, MeanExchange, PenaltyConfig
from aedit.types import Round

ROUNDS = 9
POISONED = 7
"""Round, counted from 1, before which node 1's first block goes bad."""

BAD = {"nan": np.float32(np.nan), "inf": np.float32(np.inf), "a thousandfold": None}
FIRST = list(UNITS).index("first")
JOBS = "tests/dist_jobs/defect_jobs.py"


def script(bad):
    """Return what three nodes add to their parameters before each round."""
    rng = np.random.default_rng(3)
    shapes = {name: tuple(p.shape) for name, p in tower().named_parameters()}
    moves = [[] for _ in range(3)]
    for _ in range(ROUNDS):
        shared = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        for node in range(3):
            own = {name: shared[name] + 0.3 * rng.normal(size=shape) for name, shape in shapes.items()}
            moves[node].append({name: (0.05 * move).astype(np.float32) for name, move in own.items()})
    for name in UNITS["first"]:
        move = moves[1][POISONED - 1][name]
        if BAD[bad] is None:
            moves[1][POISONED - 1][name] = move * np.float32(1000)
        else:
            move.flat[0] = BAD[bad]
    return moves


def expected(moves, unit):
    """Return the oracle's result for a unit, round by round."""
    names = UNITS[unit]
    flat = [[np.concatenate([move[name].reshape(-1) for name in names]) for move in node] for node in moves]
    start = np.concatenate(
        [p.detach().numpy().reshape(-1) for n, p in tower().named_parameters() if n in names]
    )
    return edit(start, np.array(flat).swapaxes(0, 1), np.ones((ROUNDS, 3), dtype=int), Rules())


def followed(moves):
    model = tower()

    def job(transport, node):
        own = deepcopy(model)
        return follow_script(
            own, transport, moves[node], [1] * ROUNDS, outer=Nesterov(), penalty=PenaltyConfig()
        )

    return in_threads(3, job)


@pytest.mark.parametrize("bad", BAD)
def test_a_poisoned_unit_is_left_out_healed_and_trusted_again(bad):
    moves = script(bad)
    runs = followed(moves)
    landed = {unit: expected(moves, unit) for unit in UNITS}
    for r in range(ROUNDS):
        assert len({seen[r].fingerprint for seen in runs}) == 1
        distrusted = [seen[r].outcome.distrusted for seen in runs]
        assert distrusted == [(), (FIRST,) if r == POISONED - 1 else (), ()]
        for unit, names in UNITS.items():
            got = np.concatenate([runs[0][r].parameters[name].numpy().reshape(-1) for name in names])
            np.testing.assert_allclose(got, landed[unit][r].anchor, atol=5e-6)
    assert runs[1][POISONED - 1].outcome.weights[FIRST] == 0
    assert runs[1][POISONED].outcome.weights[FIRST] > 0


def test_how_a_node_is_bad_makes_no_difference_to_the_others():
    kinds = [followed(script(bad)) for bad in BAD]
    assert len({run[0][ROUNDS - 1].fingerprint for run in kinds}) == 1


def test_a_poisoned_node_forgets_its_moments_and_never_learns_the_norm():
    model = tower()

    def job(transport, n):
        own = deepcopy(model)
        inner = torch.optim.AdamW(own.parameters(), lr=0.01)
        moments = []

        def act(sync, step):
            if (n, step) == (1, 4):  # one step before the second round: all gradients are NaN by then
                with torch.no_grad():
                    own.first.weight[0, 0] = float("nan")
                    own.first.bias[0] = float("inf")
            if step == 6:
                moments.append(inner.state[own.last.weight]["step"].item())

        exchange = MeanExchange(transport, outer=Average())
        sync = train(own, inner, exchange, batches(n, 12), EditConfig(every=3), act=act)
        state = [t for p in own.parameters() for t in inner.state[p].values()]
        return parameters(own), moments, sync.exchange.history, all(t.isfinite().all() for t in state)

    results = in_threads(3, job)
    for trained, moments, history, finite in results:
        assert furthest(trained, results[0][0]) == 0
        assert finite
        assert all(p.isfinite().all() for p in trained.values())
        assert history.mean_L.isfinite().all()
        assert not history.norms_WL.isinf().any()
        assert moments == ([1] if trained is results[1][0] else [7])  # steps they remember


def test_bad_gradients_in_the_warm_up_harm_nobody():
    model, steps = tower(), 4
    data = [batches(n, steps) for n in range(3)]
    poisoned = [list(one) for one in data]
    poisoned[1][2] = torch.full((4, 5), float("nan"))

    def job(transport, n):
        own = deepcopy(model)
        inner = torch.optim.SGD(own.parameters(), lr=0.1)
        exchange = MeanExchange(transport, outer=Average())
        train(own, inner, exchange, poisoned[n], EditConfig(every=1, warmup_steps="all"))
        return parameters(own)

    plain = deepcopy(model)
    inner = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(steps):
        there = [n for n in range(3) if (n, step) != (1, 2)]
        loss(plain, torch.cat([data[n][step] for n in there])).backward()
        inner.step()
        inner.zero_grad()
    results = in_threads(3, job)
    assert len({tuple(p.sum().item() for p in trained.values()) for trained in results}) == 1
    assert furthest(results[0], parameters(plain)) < 1e-6


@pytest.mark.parametrize("culprit", [0, 2])
def test_anchors_whose_bits_have_flipped_are_found_at_the_next_round_and_healed(culprit):
    model = tower()
    calm = heal(model, None)
    sick = heal(model, culprit)
    healthy = (culprit + 1) % 3
    for n, (prints, rounds, _) in enumerate(sick):
        assert prints == sick[0][0], "replicas differ after a round"
        assert [outcome.healed_from for outcome in rounds] == [
            None,
            (1 if culprit == 0 else 0) if n == culprit else None,
            *[None] * (len(rounds) - 2),
        ]
        assert set(rounds[1].weights) == {0.0 if n == culprit else 0.5}
    assert sick[healthy][0][0] == calm[healthy][0][0]
    for (_, _, mine), (_, _, theirs) in pairwise(sick):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def heal(model, culprit):
    """Train three nodes.

    Flip one bit of the culprit's first anchor between the first and the second round.
    """

    def job(transport, n):
        own = deepcopy(model)
        inner = torch.optim.SGD(own.parameters(), lr=0.05)
        prints, rounds = [], []
        penalty = PenaltyConfig(weights="uniform")
        exchange = MeanExchange(transport, outer=Nesterov(), penalty=penalty)
        sync = LayerSync.of(own, inner, exchange=exchange, config=EditConfig(every=2))
        sync.on_round = lambda outcome, waited_s: rounds.append(outcome)
        with sync:
            for step, batch in enumerate(batches(n, 7)):
                value = loss(own, batch)
                if rounds and len(prints) < len(rounds):
                    prints.append(fingerprint(own))  # the anchors that have just landed
                value.backward()
                inner.step()
                inner.zero_grad()
                if (n, step) == (culprit, 2):
                    anchor, _ = exchange.store.peek(1)
                    anchor.view(torch.int32)[0] ^= 1
                sync.step()
        return prints, rounds, [tensor for pair in kept(sync) for tensor in pair]

    return in_threads(3, job)


def test_when_nobody_is_trusted_the_unit_rolls_back_and_its_momentum_stays():
    model = tower()

    def job(transport, n):
        own = deepcopy(model)
        exchange = MeanExchange(transport, outer=Nesterov())
        inner = torch.optim.SGD(own.parameters(), lr=0.05)
        rounds = []
        sync = LayerSync.of(own, inner, exchange=exchange, config=EditConfig(every=1000))
        sync.on_round = lambda outcome, waited_s: rounds.append(outcome)
        with sync:
            for r, batch in enumerate(batches(n, 2)):
                loss(own, batch).backward()
                inner.step()
                inner.zero_grad()
                before = kept(sync)
                if r == 1:
                    with torch.no_grad():
                        own.middle.bias.fill_(float("nan"))
                sync.begin(Round(r + 1, 1))
                own(torch.ones(1, 5))
            sync.schedule.last_id, sync.steps, sync.schedule.last_step = 2, 2, 2
            after = kept(sync)
        return before, after, parameters(own), rounds

    for before, after, trained, rounds in in_threads(3, job):
        middle = list(UNITS).index("middle")
        assert rounds[1].rolled_back == (middle,)
        assert rounds[1].effective_nodes[middle] == 0
        for i in range(len(UNITS)):
            same = [torch.equal(a, b) for a, b in zip(before[i], after[i], strict=True)]
            assert same == ([True, True] if i == middle else [False, False])
        assert before[middle][1].abs().sum() > 0
        flat = torch.cat([trained[name].reshape(-1) for name in UNITS["middle"]])
        assert torch.equal(flat, before[middle][0])


def kept(sync):
    """Return copies of anchor and momentum, by unit."""
    values = [sync.exchange.store.peek(i) for i in range(len(sync.units))]
    return [(anchor.clone(), state.momentum.clone()) for anchor, state in values]


@pytest.mark.parametrize("bad", BAD)
def test_real_processes_leave_a_poisoned_node_out_as_threads_do(world, bad):
    moves = script(bad)
    results = world.run(JOBS, "follow", size=3, args={"moves": moves, "rounds": ROUNDS}, timeout_s=60)
    landed = {unit: expected(moves, unit)[-1] for unit in UNITS}
    assert len({prints for _, prints, _ in results}) == 1
    assert [distrusted for _, _, distrusted in results] == [[], [POISONED], []]
    for unit, names in UNITS.items():
        got = np.concatenate([results[0][0][name].numpy().reshape(-1) for name in names])
        np.testing.assert_allclose(got, landed[unit].anchor, atol=5e-6)
