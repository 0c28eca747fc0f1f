"""Tests paths that only a GPU takes, each beside an oracle on the CPU: rounds, copies, engine, runs.

With `cpu` the same tests run without a GPU. Captured graphs, the pinned store, the idle stream and the noise
have tests of their own beside those of their modules.
"""

import copy
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dist_jobs.library_jobs import PLAIN, Tower, batches, loss
from kit.families import FAMILIES, family_model
from kit.gpu import DEVICES, GPU
from kit.local_sgd import furthest, local_sgd, trainable
from kit.rl_nodes import config_of as rl_config_of
from kit.rl_nodes import records
from kit.rl_nodes import run as run_rl
from kit.rollouts import Flips, decode_plainly, prompts_of, tiny_policy, tokens_of
from kit.text_nodes import config_of, run
from test_library import together
from test_weight_swap import expected, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit.async_sgd.rules import Average
from aedit.edit import EditConfig, EverySteps, LayerSync, MeanExchange
from aedit.edit.apply_anchor import recorded
from aedit.edit.flat_layout import SharedVector, pin
from aedit.proto.transports import TorchTransport
from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter, SuffixDrafter
from aedit.spec_rollout.engine import Engine, WeightSwap
from aedit.spec_rollout.model import KVMemoryError, Target

# --- rounds of EDiT


@contextmanager
def world_of_one(device):
    """Yield the mesh of a world of this process only, with NCCL for tensors on a GPU."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (1, 1), mesh_dim_names=("sync", "shard"))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_rounds_over_a_process_group_are_local_sgd_with_anchors_offloaded_from_a_gpu(device, is_sharded):
    data = batches(0, 11)
    wanted = local_sgd(Tower(), [data], loss, every=3)
    with world_of_one(device) as mesh:
        model = Tower().to(device)
        if is_sharded:
            for block in model.blocks:
                fully_shard(block, mesh=mesh["shard"])
            fully_shard(model, mesh=mesh["shard"])
        inner, offload = torch.optim.SGD(model.parameters(), lr=0.1), device == "cuda"
        transport = TorchTransport(mesh.get_group("sync"), timeout_s=60)
        exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN, offload=offload)
        config = EditConfig(offload=offload)
        sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySteps(3), config=config)
        rounds = []
        sync.on_round = lambda outcome, waited_s: rounds.append(outcome.round.steps)
        try:
            with sync:
                for batch in data:
                    loss(model, batch.to(device)).backward()
                    inner.step()
                    inner.zero_grad()
                    sync.step()
        finally:
            transport.close()
        found = {name: (p.full_tensor() if is_sharded else p).detach().cpu() for name, p in trainable(model)}
    assert rounds == [3, 3, 3, 2]
    assert furthest(found, wanted) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_two_nodes_on_one_device_average_with_anchors_offloaded_from_a_gpu(device):
    data = [batches(node, 8) for node in range(2)]
    wanted = local_sgd(Tower(), data, loss, every=3)
    models = [Tower().to(device) for _ in range(2)]
    on_device = [[batch.to(device) for batch in mine] for mine in data]
    offload = device == "cuda"
    results = together(models, on_device, every=3, config=EditConfig(offload=offload), offload=offload)
    for found, _, _ in results:
        assert furthest({name: p.cpu() for name, p in found.items()}, wanted) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_a_vector_in_shared_memory_gets_what_was_written_in_the_order_of_the_stream(device):
    whole = np.zeros(1 << 20, np.float32)
    if device == "cuda":
        pin([whole])
    places = [slice(0, 1000), slice(5000, len(whole))]
    vector = SharedVector(whole, places, torch.device(device))
    values = torch.arange(1000 + len(whole) - 5000, dtype=torch.float32, device=device)
    doubled = values * 2
    vector.write(doubled)
    del doubled
    torch.full_like(values, -1.0)  # would take the memory of what is still being copied
    done = threading.Event()
    vector.when_written(done.set)
    assert done.wait(60)
    assert vector.written()
    wanted = np.arange(len(values), dtype=np.float32) * 2
    assert np.array_equal(np.concatenate([whole[place] for place in places]), wanted)
    assert not whole[1000:5000].any()
    assert torch.equal(vector.read().cpu(), torch.from_numpy(wanted))


@pytest.mark.parametrize("device", [GPU])
def test_a_pass_that_a_graph_captures_is_noticed_and_later_ones_are_not(device):
    x, graph = torch.ones(3, device=device), torch.cuda.CUDAGraph()
    assert not recorded()
    with torch.cuda.graph(graph):
        x += 1
        inside = recorded()
    assert inside
    assert not recorded()


# --- the engine


LAYERED = ("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "smollm3", "mixtral", "qwen3 moe")
"""Families of which draft layers are tested."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_generates_the_tokens_of_its_own_forward_pass_on_a_cpu(name, device):
    model, prompts = family_model(name), prompts_of(4, seed=2, max_new_tokens=10, temperature=1.0)
    wanted = decode_plainly(model, prompts)
    model = copy.deepcopy(model).to(device)
    target = Target.of(model, rows=2, max_tokens=40, nodes=12)
    drafters = {"suffix": SuffixDrafter(min_match=1, device=device)}
    arms = ["off", "suffix:4"]
    if name in LAYERED:
        layer = DraftLayer.of(model, generator=torch.Generator(device).manual_seed(1))
        drafters["layer"] = LayerDrafter.of(layer, target)
        arms += ["layer:3", "layer:3x2x6"]
    assert tokens_of(Engine(target, drafters=drafters, chooser=Flips(*arms)), prompts) == wanted
    if device == "cuda" and target.weights.is_static:
        assert len(target.graphs) > 1


@pytest.mark.parametrize("device", DEVICES)
def test_new_weights_are_used_from_the_next_step_on_and_captured_graphs_stay(device):
    target = Target.of(tiny_policy(seed=1).to(device), rows=4, max_tokens=96, nodes=12)
    target.update_weights(weights(1), 1)
    engine = Engine(target)
    swap = WeightSwap(engine)
    rollouts = [engine.add(prompt) for prompt in prompts_of(5, seed=5, max_new_tokens=24)]
    for _ in range(8):
        engine.step()
    before = len(target.graphs or ())
    swap.fill({name: value.to(device) for name, value in weights(2).items()})
    swap.recompute(2)
    assert len(target.graphs or ()) == before
    while engine.running or engine.waiting:
        engine.step()
    assert any({1, 2} <= set(rollout.versions) for rollout in rollouts)
    for rollout in rollouts:
        assert rollout.tokens == expected(rollout)


@pytest.mark.parametrize("device", [GPU])
def test_on_a_gpu_rows_share_a_pool_of_blocks_that_fits_into_its_free_memory(device):
    model = tiny_policy().to(device)
    free_bytes, _ = torch.cuda.mem_get_info()
    target = Target.of(model, rows=4096, max_tokens=100_000, nodes=0)
    assert 0 < target.kv_bytes_reserved < free_bytes
    assert target.kv_bytes == 0
    prompts = prompts_of(3, seed=1, max_new_tokens=40)
    assert tokens_of(Engine(target), prompts) == decode_plainly(tiny_policy(), prompts)
    assert target.kv_bytes == 0, "blocks of ended samples are free again"
    with pytest.raises(KVMemoryError):
        target.cache.reserve([(row, 0, 100_000) for row in range(4096)])


# --- runs


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_on_text_that_was_stopped_continues_where_it_was(device, tmp_path):
    keys = {"device": device, "edit__offload": device == "cuda", "checkpoint__every": 4, "train__steps": 16}
    whole = run(config_of(made(tmp_path / "whole"), **keys))
    config = config_of(made(tmp_path / "parts"), **keys)

    def stop_later(node):
        step = node.sync.step

        def stepped():
            step()
            node.stop._signalled |= node.sync.steps == 9

        node.sync.step = stepped

    assert run(config, stop_later).sync.steps == 9
    second = run(config, attempt=2)
    assert second.resumed
    assert (second.sync.steps, whole.sync.steps) == (16, 16)
    last = [
        [each["loss"] for each in records(node.config, "events") if each["event"] == "eval"][-1]
        for node in (whole, second)
    ]
    assert last[0] == pytest.approx(last[1], rel=1e-3), "the same samples and dropout after the stop"
    assert next(iter(second.sync.model.parameters())).device.type == device


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_of_reinforcement_learning_generates_with_the_weights_that_it_trains(device, tmp_path):
    keys = {"device": device, "drafter__kind": "layer", "drafter__train": True, "train__steps": 6}
    node = run_rl(rl_config_of(tmp_path, **keys))
    rl = records(node.config, "metrics")[-1]["rl"]
    assert node.sync.steps == 6
    assert rl["rollout_tokens"] > 0
    assert abs(rl["mismatch_kl"]) < 1e-3, "log-probabilities of the engine and of the training forward"


def made(directory):
    directory.mkdir()
    return directory
