"""Tests the library without the command line: five lines in a plain loop, against plain torch."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dist_jobs.library_jobs import PLAIN, Block, Tower, batches, loss, scale
from kit.local_sgd import furthest, local_sgd, trainable
from torch import nn
from torch.utils.checkpoint import checkpoint

from aedit.async_sgd.rules import Average
from aedit.edit import EditConfig, EverySteps, LayerSync, MeanExchange
from aedit.launch.config import ModelConfig
from aedit.launch.node import build_model
from aedit.launch.node import loss as lm_loss
from aedit.launch.node.model import compile_blocks
from aedit.proto.transports import MemoryWorld

JOBS = "tests/dist_jobs/library_jobs.py"


def together(
    models, data, every, loss=loss, accumulate=1, config=None, wrap=None, after_step=None, offload=False
):
    """Train one model per thread with the five lines; return each node's parameters, sync and rounds.

    wrap: returns the transport to use for a given one. after_step: called with the sync, the step and the
    node.
    """
    world = MemoryWorld(len(models), timeout_s=10)

    def node(i):
        model, transport, rounds = models[i], world.node(i), []
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        between = wrap(transport) if wrap else transport
        exchange = MeanExchange(between, outer=Average(), penalty=PLAIN, offload=offload)
        try:
            sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySteps(every), config=config)
            sync.on_round = lambda outcome, waited_s: rounds.append(outcome)
            with sync:
                for batch in data[i]:
                    for part in batch.chunk(accumulate):
                        (loss(model, part) / accumulate).backward()
                    inner.step()
                    inner.zero_grad()
                    sync.step()
                    if after_step:
                        after_step(sync, sync.steps, i)
        finally:
            transport.close()
        return {name: p.detach().clone() for name, p in trainable(model)}, sync, rounds

    with ThreadPoolExecutor(len(models)) as pool:
        return [future.result(60) for future in [pool.submit(node, i) for i in range(len(models))]]


def replicas(model, count):
    return [copy.deepcopy(model) for _ in range(count)]


def assert_same_bits(results):
    first = results[0][0]
    for found, _, _ in results[1:]:
        assert all(torch.equal(found[name], first[name]) for name in first)


def test_five_lines_make_a_plain_mlp_a_node():
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    data = [batches(i, 7) for i in range(3)]
    results = together(replicas(model, 3), data, every=3)
    assert_same_bits(results)
    assert furthest(results[0][0], local_sgd(model, data, loss, every=3)) < 1e-6
    assert [outcome.round.steps for outcome in results[0][2]] == [3, 3, 1]


def test_a_sharded_model_whose_weights_are_scaled_for_each_pass_is_local_sgd(world):
    args = {"nodes": 2, "ranks": 2, "every": 2, "num_steps": 5, "scaled": 0.5}

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        scale(model, 0.5)
        loss(model, batch).backward()
        scale(model, 2.0)
        optimizer.step()

    expected = local_sgd(Tower(), [batches(i, 5) for i in range(2)], loss, every=2, train=step)
    for _, found in world.run(JOBS, "train_sharded", size=4, args=args):
        assert furthest(found, expected) < 1e-6


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (1, 1), (2, 1)])
def test_the_same_five_lines_work_on_an_fsdp2_model(world, nodes, ranks):
    args = {"nodes": nodes, "ranks": ranks, "every": 2, "num_steps": 5}
    results = world.run(JOBS, "train_sharded", size=nodes * ranks, args=args)
    expected = local_sgd(Tower(), [batches(i, 5) for i in range(nodes)], loss, every=2)
    for landed, found in results:
        assert landed == [2, 2, 1]  # also where the shard group has one rank (F6)
        assert all(torch.equal(found[name], results[0][1][name]) for name in found)
        assert furthest(found, expected) < 1e-6


def test_what_lands_after_an_evaluation_is_what_a_sharded_root_runs_on(world):
    for said, expected in world.run(JOBS, "land_after_an_evaluation", size=2):
        assert (said - expected).abs().max() < 1e-6


def test_a_step_is_an_optimizer_step_whatever_the_number_of_micro_batches():
    model, data = Tower(), [batches(i, 4) for i in range(2)]
    results = together(replicas(model, 2), data, every=2, accumulate=4)
    assert furthest(results[0][0], local_sgd(model, data, loss, every=2)) < 1e-6
    assert [outcome.round.steps for outcome in results[0][2]][:2] == [2, 2]


class Recomputed(Tower):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_activation_checkpointing_runs_every_hook_twice_and_changes_nothing():
    data = [batches(i, 6) for i in range(2)]
    results = together(replicas(Recomputed(), 2), data, every=2)
    assert_same_bits(results)
    assert furthest(results[0][0], local_sgd(Tower(), data, loss, every=2)) < 1e-6


def test_tied_embeddings_travel_once_and_stay_tied():
    sizes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    model = build_model(ModelConfig(sizes=sizes), 32, 8, seed=0, eos_id=1)
    random = torch.Generator().manual_seed(0)
    data = [[torch.randint(32, (2, 9), generator=random) for _ in range(4)] for _ in range(2)]

    def next_token(model, batch):
        return lm_loss(model, batch, "fp32")

    models = replicas(model, 2)
    results = together(models, data, every=2, loss=next_token)
    names = [name for unit in results[0][1].units for name in unit.names]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    assert all(m.lm_head.weight is m.model.embed_tokens.weight for m in models)
    assert_same_bits(results)
    assert furthest(results[0][0], local_sgd(model, data, next_token, every=2)) < 1e-6


class Adapted(nn.Module):
    """Model as PEFT leaves it: only a few parameters of each block are trainable, and none of the root."""

    def __init__(self):
        super().__init__()
        self.base = Tower().requires_grad_(False)
        self.adapters = nn.ModuleList([Block(5) for _ in self.base.blocks])

    def forward(self, x):
        for block, adapter in zip(self.base.blocks, self.adapters, strict=True):
            x = adapter(block(x))
        return self.base.head(x)


def test_with_a_frozen_root_only_the_adapters_travel():
    model, data = Adapted(), [batches(i, 4) for i in range(2)]
    models = replicas(model, 2)
    results = together(models, data, every=2)
    assert [unit.name for unit in results[0][1].units] == ["adapters.0", "adapters.1", "adapters.2"]
    assert_same_bits(results)
    assert furthest(results[0][0], local_sgd(model, data, loss, every=2)) < 1e-6
    frozen = zip(models[0].base.parameters(), model.base.parameters(), strict=True)
    assert all(torch.equal(after, before) for after, before in frozen)
    assert len(results[0][2]) >= 2  # F7: the authors' code never exchanges here


class Parts(nn.ModuleDict):
    """Root module that is a container: it has no forward of its own and is never called."""


def run_parts(parts, x):
    for block in parts["body"]:
        x = block(x)
    return parts["head"](x)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_container_that_never_runs_itself_can_be_the_root(prefetch):
    model = Parts({"body": nn.ModuleList([Block(5), Block(5)]), "head": nn.Linear(5, 1)})

    def parts_loss(parts, x):
        return (run_parts(parts, x) - x.sum(-1, keepdim=True)).square().mean()

    data = [batches(i, 5) for i in range(2)]
    results = together(
        replicas(model, 2), data, every=2, loss=parts_loss, config=EditConfig(prefetch=prefetch)
    )
    assert_same_bits(results)
    assert furthest(results[0][0], local_sgd(model, data, parts_loss, every=2)) < 1e-6


def test_a_root_may_be_passed_by_and_its_parts_run_one_by_one():
    data = [batches(i, 5) for i in range(2)]

    def loss_on_parts(model, x):  # as those who want hidden states do; the root's own forward never runs
        y = x
        for block in model.blocks:
            y = block(y)
        return (model.head(y) - x.sum(-1, keepdim=True)).square().mean()

    results = together(replicas(Tower(), 2), data, every=2, loss=loss_on_parts)
    assert furthest(results[0][0], local_sgd(Tower(), data, loss, every=2)) < 1e-6


def test_bf16_parameters_have_fp32_anchors():
    model = Tower().bfloat16()
    data = [[x.bfloat16() for x in batches(i, 6)] for i in range(2)]
    results = together(replicas(model, 2), data, every=2)
    assert_same_bits(results)
    found, sync, _ = results[0]
    assert all(p.dtype == torch.bfloat16 for p in found.values())
    assert all(sync.exchange.store.peek(i)[0].dtype == torch.float32 for i in range(len(sync.units)))
    assert furthest(found, local_sgd(model, data, loss, every=2)) == 0


class Listed(Tower):
    _no_split_modules = ("Block",)


def test_blocks_may_be_compiled():
    models, data = replicas(Listed(), 2), [batches(i, 4) for i in range(2)]
    for model in models:
        compile_blocks(model, backend="eager")
    results = together(models, data, every=2)
    assert_same_bits(results)
    assert furthest(results[0][0], local_sgd(Tower(), data, loss, every=2)) < 1e-6


def test_a_model_compiled_as_a_whole_lands_too():
    models, data = replicas(Tower(), 2), [batches(i, 4) for i in range(2)]
    compiled = {id(model): torch.compile(model, backend="eager") for model in models}
    results = together(models, data, every=2, loss=lambda model, x: loss(compiled[id(model)], x))
    assert_same_bits(results)
    assert furthest(results[0][0], local_sgd(Tower(), data, loss, every=2)) < 1e-6


@pytest.mark.parametrize("counts", [(5, 11), (12, 3, 6), (0, 4)])
def test_nodes_with_unequal_numbers_of_batches_end_together(counts):
    data = [batches(i, count) for i, count in enumerate(counts)]
    results = together(replicas(Tower(), len(counts)), data, every=2)
    assert_same_bits(results)
    assert furthest(results[0][0], local_sgd(Tower(), data, loss, every=2)) < 1e-6


class Drift(nn.Module):
    """Model whose gradient is its input, whatever its weight: a node's steps do not depend on landings."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return (self.weight * x).sum()


class Drifts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Drift(), Drift(), Drift(), Drift()])

    def forward(self, x):
        return sum(part((n + 1) * x) for n, part in enumerate(self.parts))


class Slow:
    """Transport whose answers are done only after `asks` calls of `done`."""

    def __init__(self, transport, asks):
        self.transport, self.asks = transport, asks

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def channel(self, name=None):
        return self

    def gather(self, key, row):
        return SlowAnswer(self.transport.gather(key, row), self.asks)

    def weighted_mean(self, key, value, weight):
        return SlowAnswer(self.transport.weighted_mean(key, value, weight), self.asks)


class SlowAnswer:
    def __init__(self, pending, asks):
        self.pending, self.asks, self.result = pending, asks, pending.result

    def done(self):
        self.asks -= 1
        return self.asks < 0 and self.pending.done()


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("asks", [0, 1, 4])
def test_under_arrival_landing_every_step_counts_once_however_late_answers_are(fragments, asks):
    data = [[x.sum(0) for x in batches(i, 13)] for i in range(2)]
    config = EditConfig(every=4, landing="arrival", fragments=fragments)
    results = together(
        replicas(Drifts(), 2),
        data,
        every=4 // fragments,
        loss=lambda model, x: model(x),
        config=config,
        wrap=lambda transport: Slow(transport, asks),
    )
    assert_same_bits(results)
    learned = sum(torch.stack(mine).sum(0) for mine in data) / 2
    expected = {f"parts.{n}.weight": torch.ones(5) - 0.1 * (n + 1) * learned for n in range(4)}
    assert furthest(results[0][0], expected) < 2e-5


def test_a_node_whose_anchors_differ_is_found_and_healed_at_the_next_round():
    def corrupt(sync, step, node):
        if (node, step) == (2, 3):
            kept = [sync.exchange.store.peek(i) for i in range(len(sync.units))]
            sync.exchange.keep([(anchor + 1.0, state) for anchor, state in kept])

    data = [batches(i, 6) for i in range(3)]
    results = together(replicas(Tower(), 3), data, every=2, after_step=corrupt)
    assert_same_bits(results)
    assert [[outcome.healed_from for outcome in rounds[:3]] for _, _, rounds in results] == [
        [None, None, None],
        [None, None, None],
        [None, 0, None],
    ]
    healed = [rounds[1].weights for _, _, rounds in results]
    assert [set(weights) for weights in healed] == [{0.5}, {0.5}, {0.0}]


def test_an_exception_inside_the_block_leaves_no_hook_behind():
    model = Tower()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = LayerSync.of(model, inner, exchange=MeanExchange(MemoryWorld(1).node(0)))
    seen = []

    def fail_inside():
        with sync:
            seen.append(count_hooks(model, inner))
            sync.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert seen[0] > 3
    assert count_hooks(model, inner) == 0


def test_leaving_the_block_takes_the_hooks_off():
    model = Tower()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with LayerSync.of(model, inner, exchange=MeanExchange(MemoryWorld(1).node(0))):
        assert count_hooks(model, inner) > 3
    assert count_hooks(model, inner) == 0


def count_hooks(model, inner):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return sum(hooks) + len(inner._optimizer_step_pre_hooks)
