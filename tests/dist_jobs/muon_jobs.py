"""Jobs of tests/test_muon.py: a model sharded over several ranks."""

import torch
from benchmarks.kit.small_llama import llama
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit.launch.config import TrainConfig
from aedit.launch.node import blocks, make_inners
from aedit.types import UserError

MUON = TrainConfig(optimizer="muon", lr=0.01, weight_decay=0.0)


def sharded(size):
    """Return the model of the tests, sharded over all ranks."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    model = llama(32, 1, 16, seed=3)
    for _, block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def give(model, gradients):
    """Give each parameter its part of a whole gradient."""
    for name, p in model.named_parameters():
        like = p.detach()
        whole = gradients[name]
        p.grad = (
            torch.distributed.tensor.distribute_tensor(whole, like.device_mesh, like.placements)
            if hasattr(like, "placements")
            else whole.clone()
        )


def step(model, inners, gradients):
    give(model, gradients)
    for inner in inners:
        inner.step()
        inner.zero_grad()


def steps(rank, size, gradients):
    """Return the whole parameters after one step for each gradient."""
    model = sharded(size)
    inners = make_inners(model, MUON)
    for each in gradients:
        step(model, inners, each)
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def resumed(rank, size, gradients):
    """Return whether steps after a restore have the bits of those without one, and the number of moments."""
    model = sharded(size)
    inners = make_inners(model, MUON)
    for each in gradients[:2]:
        step(model, inners, each)
    state, moments = get_state_dict(model, inners)
    kept = {name: tensor.clone() for name, tensor in state.items()}, _copied(moments)
    step(model, inners, gradients[2])
    other = sharded(size)
    others = make_inners(other, MUON)
    set_state_dict(other, others, model_state_dict=kept[0], optim_state_dict=kept[1])
    step(other, others, gradients[2])
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs), [len(o.state) for o in others]


def _copied(state):
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_copied(value) for value in state)
    return state.clone() if isinstance(state, torch.Tensor) else state


def refusal(rank, size):
    """Return the error for a model with a matrix of fewer rows than ranks."""
    mesh = init_device_mesh("cpu", (size,))
    model = torch.nn.ModuleList([torch.nn.Linear(8, 2, bias=False)])
    model._no_split_modules = ["Linear"]
    fully_shard(model[0], mesh=mesh)
    try:
        make_inners(model, MUON)
    except UserError as error:
        return str(error)
    return ""
