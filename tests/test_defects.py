"""Tests for each defect of the EDiT authors' code (ATorch).

Four cannot occur in this code as they are; the tests check what they would have broken:

    F3   GTA: the reduced value is discarded               what lands is the mean, on every node
    F13  Megatron: averaging ends at the wrong step        averaging ends with the warm-up
    F14  DDP averager: checkpoints without anchors         all nodes go on bit for bit
    F18  GTA: three times the traffic                      a round sends each parameter once
"""

from copy import deepcopy

import pytest
import torch
from kit.nodes import Script, batches, fingerprint, furthest, in_threads, loss, parameters, tower, train
from torch import nn

from aedit.async_sgd.rules import Average, Nesterov
from aedit.edit import EditConfig, EverySeconds, LayerSync, MeanExchange, PenaltyConfig, snapshot
from aedit.edit.detector import NormHistory, judge

JOBS = "tests/dist_jobs/defect_jobs.py"
PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=None)


class Watched:
    """Transport that records what was sent under which key."""

    def __init__(self, transport):
        self.transport, self.sent = transport, []

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def channel(self, name=None):
        return self

    def gather(self, key, row):
        self.sent.append((key, row.numel()))
        return self.transport.gather(key, row)

    def weighted_mean(self, key, value, weight):
        self.sent.append((key, value.numel()))
        return self.transport.weighted_mean(key, value, weight)


def local_sgd(model, data, config, *, penalty=None, outer=None, act=lambda sync, step: None, wrap=None):
    """Train one node per list of batches; return (parameters, outcomes, transport) of each."""
    models = model if isinstance(model, list) else [deepcopy(model) for _ in data]

    def job(transport, n):
        inner = torch.optim.SGD(models[n].parameters(), lr=0.05)
        exchange = MeanExchange(transport, outer=outer, penalty=penalty)
        rounds = []

        def note(sync, step):
            sync.on_round = lambda outcome, waited_s: rounds.append(outcome)
            act(sync, step)

        train(models[n], inner, exchange, data[n], config, act=note)
        return parameters(models[n]), rounds, transport

    return in_threads(len(data), job, wrap=wrap or (lambda transport, node: transport))


def plain(model, data, steps, joined):
    """Take `steps` of SGD in torch alone, on the batches of one node or of all nodes joined."""
    model = deepcopy(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        loss(model, torch.cat([one[step] for one in data]) if joined else data[step]).backward()
        inner.step()
        inner.zero_grad()
    return model


def distance(a, b):
    ours, theirs = parameters(a), parameters(b)
    return torch.cat([(ours[n] - theirs[n]).reshape(-1) for n in ours]).norm().item()


def test_f01_the_anchor_is_taken_at_the_end_of_warm_up():
    model, warm = tower(), 6
    data = [batches(n, warm + 2) for n in range(2)]
    results = local_sgd(model, data, EditConfig(every=2, warmup_steps=warm), outer=Average(), penalty=PLAIN)
    warmed = plain(model, data, warm, joined=True)
    for n, (_, rounds, _) in enumerate(results):
        moved = distance(plain(warmed, data[n][warm:], 2, joined=False), warmed)
        whole = torch.tensor(rounds[0].norms).square().sum().sqrt().item()
        assert whole == pytest.approx(moved, rel=1e-4)  # not the way of the warm-up


def test_f02_without_warm_up_the_anchor_is_what_all_start_from():
    models = [tower(seed) for seed in range(3)]
    first = deepcopy(models[0])
    data = [batches(n, 2) for n in range(3)]
    results = local_sgd(models, data, EditConfig(every=2), outer=Average(), penalty=PLAIN)
    ends = [parameters(plain(first, one, 2, joined=False)) for one in data]
    mean = {name: sum(end[name] for end in ends) / 3 for name in ends[0]}
    assert furthest(results[0][0], mean) < 1e-6
    assert [furthest(trained, results[0][0]) for trained, _, _ in results] == [0, 0, 0]


def test_f03_what_lands_is_the_mean_and_no_node_s_own():
    model, data = tower(), [batches(n, 1) for n in range(3)]
    results = local_sgd(model, data, EditConfig(every=1), outer=Average(), penalty=PLAIN)
    own = [parameters(plain(model, one, 1, joined=False)) for one in data]
    mean = {name: sum(one[name] for one in own) / 3 for name in own[0]}
    for n, (trained, _, _) in enumerate(results):
        assert furthest(trained, mean) < 1e-6
        assert furthest(trained, own[n]) > 1e-3


@pytest.mark.parametrize("began_at", [0.0, 1.76e9])
def test_f04_a_clock_that_has_run_for_decades_loses_no_precision(began_at):
    now, opened = [began_at], []
    schedule = EverySeconds(1.0, clock=lambda: now[0])
    for step in range(1, 201):
        if schedule.due(step):
            opened.append(now[0])
        now[0] += 0.05
    gaps = [b - a for a, b in zip([began_at, *opened], opened, strict=False)]
    assert len(opened) == 9
    assert all(1.0 - 1e-3 <= gap <= 1.05 + 1e-3 for gap in gaps)


@pytest.mark.parametrize("timed", [True, False])
def test_f05_ranks_never_compare_clocks_so_the_user_s_collectives_do_not_get_in_between(world, timed):
    args = {"nodes": 2, "timed": timed, "steps": 12}
    results = world.run(JOBS, "collectives_of_the_users_own", 4, args)
    opened = [opened for opened, _ in results]
    assert opened[0] == opened[1]  # the ranks of one node, though their clocks go at unequal speeds
    assert opened[2] == opened[3]
    assert timed or opened == [[5, 10]] * 4
    assert all(furthest(trained, results[0][1]) == 0 for _, trained in results)


def test_f06_a_node_of_one_process_exchanges_too(world):
    args = {"nodes": 2, "every": 2, "micro": 1, "steps": 4}
    results = world.run(JOBS, "accumulate_without_gradient_sync", 2, args, timeout_s=60)
    assert [rounds[:2] for rounds, _ in results] == [[2, 2], [2, 2]]
    assert furthest(results[0][1], results[1][1]) == 0


class Container(nn.Module):
    """Root module without parameters of its own."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(5, 4), nn.Linear(4, 1)])

    def forward(self, x):
        return self.parts[1](self.parts[0](x).tanh())


def test_f07_a_root_without_parameters_and_a_frozen_root_exchange():
    frozen = tower()
    frozen.scale.requires_grad_(False)
    for model in (Container(), frozen):
        results = local_sgd(model, [batches(n, 4) for n in range(2)], EditConfig(every=2))
        for trained, rounds, _ in results:
            assert [outcome.round.steps for outcome in rounds] == [2, 2, 0]
            assert furthest(trained, results[0][0]) == 0
            assert furthest(trained, parameters(model)) > 1e-3


def told(norms, config=None):
    """Return for each of a series of norms whether it was trusted."""
    config = config or PenaltyConfig()
    history, believed = NormHistory.empty(1, config.window), []
    for norm in norms:
        told_L, history = judge(torch.tensor([norm], dtype=torch.float64), history, config)
        believed.append(bool(told_L.isfinite().all()))
    return believed


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["robust", "ema", "off"])
def test_f08_nan_and_inf_are_never_trusted_and_blind_nobody(bad, kind):
    config = PenaltyConfig(detector=kind)
    assert told([bad, bad, 1.0, bad], config) == [False, False, True, False]
    steady = [1.0, 1.1, 0.95, 1.05, 1.02, 0.98] * 10
    if kind != "off":
        assert told([*steady, bad, 1.0, 10.0], config)[-3:] == [False, True, False]
        assert told([bad, 1.0, 1.1, 0.95, 1.05, 10.0], config) == [False, *[True] * 4, False]


@pytest.mark.parametrize("kind", ["robust", "ema"])
def test_f09_a_spike_that_was_caught_is_caught_again_and_again(kind):
    steady = [1.0, 1.1, 0.95, 1.05, 1.02, 0.98] * 10
    believed = told([*steady, *[10.0, 1.0] * 20], PenaltyConfig(detector=kind))
    assert believed[len(steady) :] == [False, True] * 20


def test_f10_spikes_are_caught_from_the_first_rounds_on():
    norms = [5.0, 4.6, 4.5, 4.1]
    assert told([*norms, 40.0]) == [True] * 4 + [False]


def test_f11_looking_at_the_state_however_often_changes_nothing():
    data = [batches(n, 7) for n in range(2)]

    def look(sync, step):
        if not sync.in_flight:
            for _ in range(3):
                sync.model.state_dict()
                sync.inner.state_dict()
                assert snapshot.tensors(sync)
                assert snapshot.numbers(sync, [])

    calm = local_sgd(tower(), data, EditConfig(every=3))
    watched = local_sgd(tower(), data, EditConfig(every=3), act=look)
    assert [furthest(a[0], b[0]) for a, b in zip(calm, watched, strict=True)] == [0, 0]


def test_f12_uneven_step_counts_end_together_and_the_last_steps_count():
    model, data = tower(), [batches(0, 13), batches(1, 20)]
    results = local_sgd(model, data, EditConfig(every=5), outer=Average(), penalty=PLAIN)
    assert furthest(results[0][0], results[1][0]) == 0
    assert results[0][1][-1].total_steps == 33
    assert all(outcome.rolled_back == () for _, rounds, _ in results for outcome in rounds)
    assert sum(outcome.round.steps for outcome in results[0][1]) == 13
    assert sum(outcome.round.steps for outcome in results[1][1]) == 20


@pytest.mark.parametrize(("every", "warm"), [(3, 8), (8, 3), (2, 0)])
def test_f13_gradients_are_averaged_for_the_warm_up_and_not_one_step_longer(every, warm):
    model, steps = tower(), warm + 2
    data = [batches(n, steps) for n in range(2)]
    prints = [{}, {}]

    def note(sync, step):
        node = sync.exchange.transport.transport.node
        prints[node][step] = fingerprint(sync.model)

    results = local_sgd(model, data, EditConfig(every=every, warmup_steps=warm), act=note, wrap=watch)
    for step in range(steps):
        assert (prints[0][step] == prints[1][step]) == (step < warm)
    for _, _, transport in results:
        sent = [key for key, _ in transport.sent if not key.endswith("/buffers")]
        averaged = {key.split("/")[1] for key in sent if key.startswith("warmup/")}
        assert averaged == {str(step) for step in range(warm)}


def watch(transport, node):
    return Watched(transport)


def test_f14_every_node_s_anchors_momentum_and_detector_are_in_its_checkpoint():
    model, data = tower(), [batches(n, 12) for n in range(2)]
    config, stop = EditConfig(every=3), 7  # in the middle of an interval

    def one(transport, n, own, begin, saved=None):
        inner = torch.optim.SGD(own.parameters(), lr=0.05)
        exchange = MeanExchange(transport, outer=Nesterov())
        sync = LayerSync.of(own, inner, exchange=exchange, config=config)
        if saved:
            named = {name: tensor.clone() for name, tensor in saved["sync"].items()}
            snapshot.blank(sync, saved["numbers"])
            assert snapshot.restore(sync, named, saved["numbers"]) == []
        with sync:
            for step in range(begin, 12):
                if step == stop and not saved:
                    assert not sync.in_flight
                    kept = snapshot_of(sync)
                    numbers = snapshot.numbers(sync, [])
                    checkpoint = {"model": deepcopy(own.state_dict()), "sync": kept, "numbers": numbers}
                loss(own, data[n][step]).backward()
                inner.step()
                inner.zero_grad()
                sync.step()
            end = parameters(own) | snapshot_of(sync)
        return end, None if saved else checkpoint

    models = [deepcopy(model) for _ in range(4)]
    whole = in_threads(2, lambda transport, n: one(transport, n, models[n], 0))

    def resumed(transport, n):
        models[2 + n].load_state_dict(whole[n][1]["model"])
        return one(transport, n, models[2 + n], stop, whole[n][1])

    again = in_threads(2, resumed)
    for (ours, _), (theirs, _) in zip(whole, again, strict=True):
        assert [
            name for name in ours if not torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num())
        ] == []
    assert whole[0][1]["sync"]["momentum/first.weight"].abs().sum() > 0
    assert whole[0][1]["sync"]["history/rounds_L"].tolist() == [2.0] * 4


def snapshot_of(sync):
    sync.finish()
    return {name: tensor.clone() for name, tensor in snapshot.tensors(sync).items()}


def test_f15_step_weights_count_the_steps_since_the_last_round_only():
    model = tower()
    counts = [[9, 2, 2], [1, 2, 6]]

    def job(transport, n):
        own, rounds = models[n], []
        inner = torch.optim.SGD(own.parameters(), lr=1e-3)
        exchange = MeanExchange(transport, penalty=PenaltyConfig(step_weight=1.0))
        sync = LayerSync.of(own, inner, exchange=exchange, schedule=Script(counts[n]), config=EditConfig())
        sync.on_round = lambda outcome, waited_s: rounds.append(outcome.weights[0])
        with sync:
            for batch in batches(n, sum(counts[n])):
                loss(own, batch).backward()
                inner.step()
                inner.zero_grad()
                sync.step()
        return rounds[:3]

    models = [deepcopy(model) for _ in range(2)]
    weights = in_threads(2, job)
    assert weights[0] == pytest.approx([0.9, 0.5, 0.25])
    assert weights[1] == pytest.approx([0.1, 0.5, 0.75])


def test_f16_shard_peers_judge_as_one(world):
    results = world.run(JOBS, "one_rank_goes_bad", 4, {"nodes": 2}, timeout_s=60)
    rounds = [rounds for rounds, _, _ in results]
    assert rounds[0] == rounds[1]
    assert rounds[2] == rounds[3]
    assert [distrusted for distrusted, _ in rounds[0]][:3] == [(), (), ()]
    assert 1 in rounds[2][1][0]
    assert rounds[0][1][1][1] == 1.0  # all the weight of that unit
    assert all(furthest(trained, results[0][2]) == 0 for _, _, trained in results)
    assert all(p.isfinite().all() for p in results[0][2].values())


def test_f16_a_round_asks_once_whatever_the_number_of_units():
    results = local_sgd(tower(), [batches(n, 4) for n in range(2)], EditConfig(every=2), wrap=watch)
    for _, rounds, transport in results:
        asked = [key for key, _ in transport.sent if key.endswith("/open")]
        assert asked == [f"{outcome.round.id}/open" for outcome in rounds]


def test_f17_the_penalty_works_unasked_and_the_distrusted_do_not_count_in_the_divisor():
    model, data = tower(), [batches(n, 1) for n in range(3)]

    def spoil(sync, step):
        if sync.exchange.transport.node == 2:
            with torch.no_grad():
                sync.model.middle.bias.fill_(float("nan"))

    # NaN is put in before the round that the closing of the block opens.
    results = local_sgd(model, data, EditConfig(every=100), outer=Average(), act=spoil)
    _, rounds, _ = results[0]
    assert len(set(rounds[0].weights)) > 1  # not a plain mean
    assert results[2][1][0].distrusted == (2,)
    weights = torch.tensor([one[1][0].weights[2] for one in results], dtype=torch.float64)
    assert weights[2] == 0
    assert weights.sum() == pytest.approx(1.0)
    own = [parameters(plain(model, one, 1, joined=False))["middle.bias"] for one in data[:2]]
    expected = weights[0] * own[0] + weights[1] * own[1]
    assert (results[0][0]["middle.bias"] - expected).abs().max() < 1e-6


def test_f18_a_round_sends_each_parameter_once():
    model = tower()
    results = local_sgd(model, [batches(n, 4) for n in range(2)], EditConfig(every=2), wrap=watch)
    for _, rounds, transport in results:
        for outcome in rounds:
            ours = f"{outcome.round.id}/"
            rows = (f"{ours}open", f"{ours}buffers")
            values = [n for key, n in transport.sent if key.startswith(ours) and key not in rows]
            whole = sum(p.numel() for p in model.parameters())
            assert sum(values) == (whole if outcome.round.steps else 0)


@pytest.mark.parametrize("size", [2, 4])
def test_f19_accumulating_without_gradient_sync_does_not_stretch_the_interval(world, size):
    args = {"nodes": 2, "every": 2, "micro": 3, "steps": 6}
    results = world.run(JOBS, "accumulate_without_gradient_sync", size, args, timeout_s=60)
    assert [rounds for rounds, _ in results] == [[2, 2, 2, 0]] * size
    assert all(furthest(trained, results[0][1]) == 0 for _, trained in results)
