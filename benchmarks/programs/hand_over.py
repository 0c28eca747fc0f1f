"""Hand-over of new weights from a trainer that is sharded over processes to the engine of one of them.

Each rank is a process of its own (`python -m benchmarks.programs.hand_over JOB`). Measured is the peak of
its resident memory during `update_weights`, over what it had before.
"""

import gc
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from aedit.spec_rollout.engine import Engine
from benchmarks.kit.processes import run_jobs
from benchmarks.kit.random_policy import PolicyShape, random_policy

RANKS, UPDATES = 2, 3
SHAPE = PolicyShape(
    vocab_size=16_384,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=16,
)
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Job:
    """One rank of the trainer; the first one has an engine in bf16."""

    rank: int
    store: str
    shape: dict[str, int]


@dataclass(frozen=True, slots=True)
class HandOver:
    """Hand-over from an fp32 trainer of `RANKS` ranks to an engine in bf16."""

    peak_bytes: tuple[int, ...]
    """Additional resident memory of each rank at its peak, the most of `UPDATES` updates."""
    largest_bytes: int
    """The largest tensor in the engine's dtype."""
    model_bytes: int
    """The whole model in the engine's dtype."""
    equal: bool
    """Whether the engine has the trainer's weights, rounded."""


def hand_over(shape: PolicyShape = SHAPE) -> HandOver | str:
    """Measure a hand-over; return why not where the system does not tell peaks."""
    if not CLEAR_REFS.exists():
        return "hand-over: this system does not tell the peak of resident memory"
    with tempfile.TemporaryDirectory() as folder:
        jobs = [Job(rank, f"{folder}/store", asdict(shape)) for rank in range(RANKS)]
        told = run_jobs("benchmarks.programs.hand_over", jobs)
    first = told[0]
    return HandOver(
        tuple(one["peak_bytes"] for one in told), first["largest_bytes"], first["model_bytes"], first["equal"]
    )


def _run(job: Job) -> dict[str, Any]:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=job.rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    shape = PolicyShape(**job.shape)
    trainer = _sharded(random_policy(shape, "fp32"))
    own = random_policy(shape, "bf16", seed=1)
    engine = Engine.of(own, rows=1, max_tokens=16) if job.rank == 0 else None
    peaks = []
    for version in range(1, 1 + UPDATES):
        weights = trainer.state_dict()
        gc.collect()
        dist.barrier()
        before = _forget_peak()
        if engine is not None:
            engine.update_weights(weights, version)
        else:
            Engine.take_part(weights)
        peaks.append(_peak() - before)
        with torch.no_grad():
            for value in trainer.parameters():
                value.mul_(2)  # new weights for the next version
    whole = {id(value): value for value in own.state_dict().values()}.values()
    sizes = [value.numel() * value.element_size() for value in whole]
    told = {
        "peak_bytes": max(peaks),
        "largest_bytes": max(sizes),
        "model_bytes": sum(p.numel() * p.element_size() for p in own.parameters()),
        "equal": job.rank > 0 or _is(own, random_policy(shape, "fp32"), 2.0 ** (UPDATES - 1)),
    }
    dist.destroy_process_group()
    return told


def _sharded(model: PreTrainedModel) -> PreTrainedModel:
    untyped: Any = model  # its modules carry no types
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in (*untyped.model.layers, untyped):
        fully_shard(block, mesh=mesh)
    return model


def _is(own: PreTrainedModel, trained: PreTrainedModel, factor: float) -> bool:
    """Return whether the engine's model has the trained weights times the factor, rounded to its dtype."""
    wanted = dict(trained.named_parameters())
    return all(
        torch.equal(value, (wanted[name] * factor).to(value)) for name, value in own.named_parameters()
    )


def _forget_peak() -> int:
    """Make the resident memory the new peak, and return it in bytes."""
    CLEAR_REFS.write_text("5")
    return int(psutil.Process().memory_info().rss)


def _peak() -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(_run(job)), flush=True)


if __name__ == "__main__":
    main()
