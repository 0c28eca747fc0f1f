"""Tests the whole algorithm against plain torch and a second EDiT in float64 (tests/kit/oracle.py)."""

from copy import deepcopy
from dataclasses import asdict

import numpy as np
import pytest
import torch
from kit.nodes import (
    UNITS,
    batches,
    follow_script,
    furthest,
    in_threads,
    parameters,
    plain_training,
    tower,
    train,
)
from kit.oracle import Rules, edit

from aedit.async_sgd.rules import Average, Nesterov
from aedit.edit import EditConfig, MeanExchange, PenaltyConfig

JOBS = "tests/dist_jobs/oracle_jobs.py"
GRID = [
    *[(1, 1, "all"), (2, 1, "all"), (3, 1, "all"), (2, 2, "scale-free")],
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in [(1, 2, "all"), (2, 2, "all"), (3, 2, "all")]),
]
"""Nodes, ranks and rules. FSDP2 of a small model takes most of the time, and two nodes with one set of rules
show all of it: the rules see the norms of whole units."""
PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=None)
INNER = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}
AVERAGING = [("sgd", 0), ("adamw", "all")]
STEPS, SHARDED_STEPS = 12, 6
ROUNDS = 20
RULES = {
    "scale-free": Rules(weights="scale-free", detector="robust", step_weight=0.5, clip=0.5),
    "paper": Rules(weights="paper", detector="ema", ema=0.2, temperature=0.5, clip=0.5, warmup_rounds=5),
}


def joined(shards, steps=STEPS):
    """Return the batches of all nodes joined, for one process."""
    return [torch.cat(parts) for parts in zip(*(batches(seed, steps) for seed in range(shards)), strict=True)]


# -- a round after every step, plain averaging: data parallelism


@pytest.mark.parametrize(("inner", "warmup_steps"), [("sgd", 0), ("adamw", "all"), ("sgd", 5)])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_averaging_every_step_is_one_process_with_the_joined_batch(nodes, inner, warmup_steps):
    model = tower()

    def job(transport, node):
        own = deepcopy(model)
        exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
        config = EditConfig(every=1, warmup_steps=warmup_steps)
        train(own, INNER[inner](own), exchange, batches(node, STEPS), config)
        return parameters(own)

    expected = plain_training(model, INNER[inner], joined(nodes))
    assert furthest(expected, parameters(model)) > 0.05, "the training must go somewhere"
    for trained in in_threads(nodes, job):
        assert furthest(trained, expected) <= 1e-6


# -- the whole of EDiT


def script(nodes, seed=7):
    """Return what the inner steps of each node add before each round, with faults that must be detected.

    Round 8: node 0's first block goes astray. Round 11: every node's middle block does. Round 14: a NaN in
    the last block of the last node, in one number only.
    """
    rng = np.random.default_rng(seed)
    shapes = {name: tuple(p.shape) for name, p in tower().named_parameters()}
    moves = [[] for _ in range(nodes)]
    for r in range(1, ROUNDS + 1):
        shared = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        for n in range(nodes):
            size = 0.3 / (1 + r / 40) * (1 + 0.4 * n) * (1 + 0.1 * rng.normal())
            move = {
                name: (size * (shared[name] + 0.5 * rng.normal(size=shape)) / 4).astype(np.float32)
                for name, shape in shapes.items()
            }
            moves[n].append(_go_astray(move, r, n, nodes))
    return moves, rng.integers(1, 4, size=(nodes, ROUNDS)).tolist()


def _go_astray(move, r, n, nodes):
    unit = {8: "first" if n == 0 else None, 11: "middle"}.get(r)
    for name in UNITS.get(unit, ()):
        move[name] = move[name] * np.float32(25)
    if r == 14 and n == nodes - 1:
        move["last.weight"][0, -1] = np.nan
    return move


def expectation(moves, steps, rules):
    """Return the oracle's result for every unit."""
    start = {name: p.detach().numpy() for name, p in tower().named_parameters()}
    steps_RN = np.array(steps).T
    return {
        unit: edit(
            flat(start, names),
            np.array([[flat(m, names) for m in node] for node in moves]).swapaxes(0, 1),
            steps_RN,
            rules,
        )
        for unit, names in UNITS.items()
    }


def flat(tensors, names):
    return np.concatenate([np.asarray(tensors[name]).reshape(-1) for name in names])


def penalty_of(rules):
    return {name: value for name, value in asdict(rules).items() if name not in ("lr", "momentum")}


def check_against_the_oracle(runs, expected):
    """Compare `runs`, what every node recorded round by round, with the oracle."""
    for r in range(ROUNDS):
        assert len({seen[r].fingerprint for seen in runs}) == 1, f"replicas differ after round {r + 1}"
        for n, seen in enumerate(runs):
            check_node(n, seen[r], [landed[r] for landed in expected.values()])


def check_node(n, seen, landed):
    outcome = seen.outcome
    assert outcome.distrusted == tuple(i for i, unit in enumerate(landed) if not unit.trusted[n])
    assert outcome.rolled_back == tuple(i for i, unit in enumerate(landed) if unit.rolled_back)
    np.testing.assert_allclose(outcome.norms, [unit.norms[n] for unit in landed], rtol=1e-4)
    np.testing.assert_allclose(outcome.weights, [unit.weights[n] for unit in landed], atol=2e-5)
    np.testing.assert_allclose(outcome.effective_nodes, [unit.effective_nodes for unit in landed], rtol=1e-4)
    for unit, names in zip(landed, UNITS.values(), strict=True):
        np.testing.assert_allclose(flat(seen.parameters, names), unit.anchor, atol=5e-6)


def check_that_it_is_a_test(nodes, expected):
    """Check that every kind of event has occurred; otherwise the comparison would show nothing."""
    first, middle, last = expected["first"], expected["middle"], expected["last"]
    assert not first[7].trusted[0]
    assert first[7].trusted[1:].all()
    assert middle[10].rolled_back
    assert last[13].trusted.tolist() == [True] * (nodes - 1) + [False]
    scales = [landed.scale for unit in expected.values() for landed in unit]
    assert min(scales) < 0.9
    assert max(scales) == 1.0
    assert nodes == 1 or any(not np.allclose(landed.weights, 1 / nodes, atol=0.02) for landed in first)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_edit_over_twenty_rounds_is_the_oracles(nodes, kind):
    rules = RULES[kind]
    moves, steps = script(nodes)
    expected = expectation(moves, steps, rules)
    check_that_it_is_a_test(nodes, expected)
    model = tower()
    outer, penalty = Nesterov(rules.lr, rules.momentum), PenaltyConfig(**penalty_of(rules))

    def job(transport, node):
        own = deepcopy(model)
        return follow_script(own, transport, moves[node], steps[node], outer=outer, penalty=penalty)

    check_against_the_oracle(in_threads(nodes, job), expected)


# -- both on real processes, sharded by FSDP2 inside a node


@pytest.fixture(scope="module", params=GRID, ids=lambda case: "{}x{}-{}".format(*case))
def processes(request, world):
    """Return nodes, ranks, rules and the results of a run of all cases, by rank."""
    nodes, ranks, kind = request.param
    chosen = list(RULES.values()) if kind == "all" else [RULES[kind]]
    moves, steps = script(nodes)
    following = [
        {"moves": moves, "steps": steps, "penalty": penalty_of(rules), "outer": (rules.lr, rules.momentum)}
        for rules in chosen
    ]
    args = {"nodes": nodes, "ranks": ranks, "averaging": AVERAGING, "following": following}
    args["steps"] = SHARDED_STEPS
    return nodes, ranks, chosen, world.run(JOBS, "everything", size=nodes * ranks, args=args)


def test_sharded_processes_that_average_every_step_are_one_process(processes):
    nodes, ranks, _, runs = processes
    for case, (inner, _) in enumerate(AVERAGING):
        expected = plain_training(tower(), INNER[inner], joined(nodes * ranks, SHARDED_STEPS))
        for averaged, _ in runs:
            assert furthest(averaged[case], expected) <= 1e-6


def test_edit_on_sharded_processes_over_twenty_rounds_is_the_oracles(processes):
    nodes, ranks, chosen, runs = processes
    for case, rules in enumerate(chosen):
        expected = expectation(*script(nodes), rules)
        check_that_it_is_a_test(nodes, expected)
        for shard in range(ranks):  # the ranks that hold the same shard
            check_against_the_oracle([followed[case] for _, followed in runs[shard::ranks]], expected)
