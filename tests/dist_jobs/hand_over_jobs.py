"""Jobs of the tests of landing between steps and of the hand-over from sharded trainers to engines."""

from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from kit.deferred import round_numbers
from kit.hubs import Hub, SharedLink, box_of, hub_node, move_sharded
from kit.memory import peak_bytes
from kit.nodes import parameters, tower
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.edit import OwnPace
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.weights import agree, gather, gather_bytes


class Slow(SharedLink):
    """Link of a rank that sees each answer `looks` looks late."""

    def __init__(self, *args, looks):
        super().__init__(*args)
        self.looks, self.seen = looks, {}

    def answer(self, unit, seq):
        found = super().answer(unit, seq)
        if found is None:
            return None
        self.seen[unit, seq] = self.seen.get((unit, seq), 0) + 1
        return found if self.seen[unit, seq] > self.looks else None


def shard(model: nn.Module, size, blocks, timeout_s=60.0):
    group = dist.new_group(range(size), timeout=timedelta(seconds=timeout_s))
    # A name of its own: DTensor keeps plans by mesh, with the name of a group that the next job may not have.
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ranks",))
    for block in (*blocks, model):
        fully_shard(block, mesh=mesh)
    return model


def land_between_steps(rank, size):
    """Train over a hub that adds to the anchors; return what `land` returned, and the parameters."""
    model, hub = round_numbers(tower()), Hub()
    link = Slow(box_of(model, rank, size), rank, hub, looks=3 if rank == size - 1 else 0)
    if size > 1:
        shard(model, size, (model.first, model.middle, model.last))
    sync, _ = hub_node(model, link, schedule=OwnPace(2))
    landed = []
    with sync:
        for n in range(12):
            model(torch.ones(1, 5)).sum().backward()
            move_sharded(model, torch.Generator().manual_seed(n))
            model.zero_grad()
            sync.step()
            landed += [sync.land(), sync.land()]
            now = parameters(model)
            model(torch.ones(1, 5)).sum().backward()
            assert all(torch.equal(value, now[name]) for name, value in parameters(model).items())
    return landed, parameters(model)


TINY = {
    "vocab_size": 67,  # no two ranks have equally many rows
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def llama(seed=0, **sizes):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**TINY | sizes))


def sharded_llama(size, timeout_s=60.0, **sizes):
    model = llama(**sizes)
    return shard(model, size, model.model.layers, timeout_s)


def trained(sync, inner, n):
    text = torch.arange(24).view(2, 12) + n
    sync.model(input_ids=text, labels=text).loss.backward()
    inner.step()
    inner.zero_grad()
    sync.step()


def asked():
    sampling = Sampling(max_new_tokens=8)
    return [Prompt(tokens=(1, 2 + i), rollout=i, sampling=sampling) for i in range(3)]


def said(engine):
    made = sorted(engine.generate(asked()), key=lambda rollout: rollout.prompt.rollout)
    return [(rollout.tokens, rollout.versions) for rollout in made]


def by_other_weights(model, weights, dtype):
    """Return what a new engine says with `weights`, which are whole and by name."""
    other = llama(seed=9, tie_word_embeddings=model.config.tie_word_embeddings)
    other.load_state_dict({**other.state_dict(), **weights})
    return [tokens for tokens, _ in said(Engine.of(other.to(dtype), rows=3, max_tokens=32))]


def train_and_generate(rank, size, engines, dtype, tied):
    """Hand each step's weights to the engines of the ranks `engines`; return versions and what they said."""
    model, hub = sharded_llama(size, tie_word_embeddings=tied), Hub()
    link = SharedLink(box_of(model, rank, size), rank, hub)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    sync, _ = hub_node(model, link, inner=inner, schedule=OwnPace(2))
    engine = None
    if rank in engines:
        own = llama(seed=rank + 1, tie_word_embeddings=tied).to(dtype)
        engine = Engine.of(own, rows=3, max_tokens=32)
    versions, correct = [], []
    with sync:
        for n in range(4):
            while sync.in_flight:  # this hub answers when it is asked
                sync.land()
            versions += [sync.update_engine(engine), sync.update_engine(engine)]
            weights = parameters(model)
            if engine is not None:
                texts = said(engine)
                correct.append([tokens for tokens, _ in texts] == by_other_weights(model, weights, dtype))
                own = engine.target.model.named_parameters()
                correct.append(all(torch.equal(p, weights[name].to(dtype)) for name, p in own))
                correct.append({v for _, spans in texts for v in spans} == {versions[-1]})
            trained(sync, inner, n)
    return versions, correct


def refuse(rank, size, change):
    """Hand over weights that do not fit the first rank's engine; return the errors and what it says after."""
    model = sharded_llama(size)
    engine = Engine.of(llama(seed=1), rows=3, max_tokens=32) if rank == 0 else None
    before = said(engine) if rank == 0 else None
    weights, version = dict(model.state_dict()), 1
    if change == "other model":
        weights = sharded_llama(size, hidden_size=40).state_dict()
    elif change == "missing":
        del weights["model.norm.weight"]
    elif change == "old version":
        version = -1
    elif change == "other ranks":
        weights |= {"more": weights["lm_head.weight"]} if rank == 1 else {}
    try:
        engine.update_weights(weights, version) if rank == 0 else Engine.take_part(weights)
    except ValueError as error:
        return str(error), rank == 1 or (said(engine) == before and engine.version == 0)
    return "", False


def lose_a_rank(rank, size):
    """Lose the second rank in the middle of a hand-over; return what the first rank's engine says then."""
    model = sharded_llama(size)
    weights = model.state_dict()
    group = weights["lm_head.weight"].device_mesh.get_group()
    dist.barrier(group)  # on a busy machine the ranks come late; from here on they are together
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=10), group)
    if rank == 1:
        dtype = agree(weights, None, refused=False)
        first = dict(list(weights.items())[:3])
        return gather(first, dtype, lambda tensor, whole: None)
    engine, errors = Engine.of(llama(seed=1), rows=3, max_tokens=32), []
    for act in (lambda: engine.update_weights(weights, 1), engine.step, lambda: said(engine)):
        try:
            engine.add(replace(asked()[0], rollout=99)) if act == engine.step else None
            act()
        except RuntimeError as error:
            errors.append(str(error))
    engine.update_weights(llama(seed=2).state_dict(), 1)
    engine.close()
    right = [tokens for tokens, _ in said(engine)] == by_other_weights(
        llama(), llama(seed=2).state_dict(), torch.float32
    )
    return errors, right, engine.version


def shard_after_the_engine(rank, size):
    """Shard the model of an engine; return the errors of generating and of each way to update."""
    model, errors = llama(), []
    engine = Engine.of(model, rows=3, max_tokens=32)
    shard(model, size, model.model.layers)
    updates = [lambda: engine.update_weights(None, 1), lambda: engine.update_weights(model.state_dict(), 1)]
    for act in (lambda: said(engine), *updates):
        try:
            act()
        except (RuntimeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def measure(rank, size, dtype):
    """Return the peaks of a hand-over and of one by whole copies, what is predicted, and the fp32 bytes."""
    sizes = {"vocab_size": 4000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 14}
    model = sharded_llama(size, **sizes)
    engine = Engine.of(llama(seed=1, **sizes).to(dtype), rows=3, max_tokens=32) if rank == 0 else None
    shapes = [tuple(p.shape) for p in model.parameters()]
    weights = model.state_dict()

    def update(version, given):
        engine.update_weights(given, version) if rank == 0 else Engine.take_part(weights)

    def update_by_copies(version):
        whole = {name: tensor.full_tensor() for name, tensor in weights.items()}
        engine.update_weights(whole, version) if rank == 0 else None

    update(1, weights)
    peak, wasteful = peak_bytes(lambda: update(2, weights)), peak_bytes(lambda: update_by_copies(3))
    fp32_bytes = 4 * sum(p.numel() for p in model.parameters())
    return peak, wasteful, gather_bytes(shapes, size, dtype), fp32_bytes
