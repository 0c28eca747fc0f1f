"""Jobs of tests/test_export.py: a node that trains briefly and saves as `aedit run` does."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit.edit import EditConfig, LayerSync, MeanExchange, snapshot
from aedit.launch.config import load
from aedit.launch.data import load_tokenizer
from aedit.launch.node import NodeCheckpoints, blocks, build_model, loss
from aedit.launch.node.checkpoint import training_state
from aedit.proto.transports import MemoryWorld


def train_and_save(run_dir, node, mark, mesh=None, config=None):
    """Save one checkpoint after a round and one local step; return whole anchors and whole parameters."""
    described = load(Path(run_dir) / "run.toml", []).config
    tokenizer = load_tokenizer(described.data)
    model = build_model(described.model, tokenizer.vocab_size, described.data.seq_len, node, tokenizer.eos_id)
    for _, block in blocks(model) if mesh else ():
        fully_shard(block, mesh=mesh)
    if mesh:
        fully_shard(model, mesh=mesh)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = MeanExchange(MemoryWorld(1).node(0))
    sync = LayerSync.of(model, inner, exchange=exchange, config=config or EditConfig(every=2))
    with sync:
        for step in range(3):
            ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(10 * node + step))
            loss(model, ids, "fp32").backward()
            inner.step()
            inner.zero_grad()
            sync.step()
        directory = Path(run_dir) / "nodes" / str(node) / "checkpoints"
        checkpoints = NodeCheckpoints(directory, keep=2, shards=sync.shards)
        checkpoints.save(mark, training_state(sync), {"sync": snapshot.numbers(sync, [])})
        found = {name: whole(tensor) for name, tensor in snapshot.tensors(sync).items()}
    anchors = {name[len("anchor/") :]: t for name, t in found.items() if name.startswith("anchor/")}
    return anchors, {name: whole(p) for name, p in model.named_parameters()}


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def save_sharded(rank, size, run_dir, mark):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    anchors, _ = train_and_save(run_dir, node=0, mark=mark, mesh=mesh)
    return anchors
