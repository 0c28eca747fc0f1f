"""Estimate the memory of a run from its configuration, and compare it with this machine's.

Imports no torch.
"""

import json
import math
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from aedit.launch.config.config import RunConfig
from aedit.proto.codecs import codec
from aedit.types import UserError

FP32_BYTES = 4
BYTE_VOCABULARY = 257
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "olmo2")
"""Families whose feed-forward layers have three matrices, not two."""


def state_bytes(config: RunConfig, num_params: int, num_trained: int) -> dict[str, int]:
    """Return the bytes that one node needs for the whole run, by name, without activations and buffers."""
    edit, held = config.edit, num_trained * FP32_BYTES
    where = " (host memory)" if edit.offload else ""
    found = {"parameters": num_params * FP32_BYTES, "gradients": held}
    if config.train.optimizer == "adamw":
        found["AdamW moments"] = 2 * held
    else:
        found["Muon and AdamW moments, at most"] = 2 * held
    if config.train.eval_in_waits:
        found["copy for evaluation"] = num_params * FP32_BYTES
    if edit.warmup_steps == "all":
        return found
    found["anchors" + where] = held
    if config.has_hub:
        found["outbox"] = held
        if codec(config.hub.codec).feedback:
            found["error feedback"] = held
    elif config.outer.kind != "average":
        found["outer momentum" + where] = held
        if config.outer.kind == "delayed-nesterov":
            found["delayed gradients" + where] = held
    return found


def least_parameters(config: RunConfig) -> int | None:
    """Return a lower bound of the number of parameters; None if only the model's own code determines it."""
    if config.model.pretrained:
        return _saved_parameters(Path(config.model.pretrained).expanduser())
    sizes = config.model.own_sizes
    hidden, layers = _first(sizes, "hidden_size", "n_embd"), _first(sizes, "num_hidden_layers", "n_layer")
    if hidden is None or layers is None:
        return None
    heads = _first(sizes, "num_attention_heads", "n_head")
    width = heads * (_first(sizes, "head_dim") or hidden // heads) if heads else hidden
    keys = (_first(sizes, "num_key_value_heads") or 1) * width // heads if heads else 0
    inner = _first(sizes, "intermediate_size", "n_inner") or 0  # a family's default may be small
    matrices = 3 if config.model.family in _GATED else 2
    vocabulary = BYTE_VOCABULARY if config.data.tokenizer == "byte" else 0
    return layers * hidden * (2 * width + 2 * keys + matrices * inner) + vocabulary * hidden


def machine_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container that this process runs in."""
    total = psutil.virtual_memory().total
    for path in _LIMITS:
        with suppress(OSError, ValueError):
            total = min(total, int(path.read_text()))
    return total


def check_memory(config: RunConfig, num_params: int, *, nodes: int = 1, have: int | None = None) -> None:
    """Raise UserError if the nodes cannot fit even without activations and buffers.

    Args:
        config: Of the run.
        num_params: Number of parameters, or a lower bound.
        nodes: On this machine.
        have: Bytes available; by default the memory of this machine.
    """
    need = nodes * sum(state_bytes(config, num_params, num_params).values())
    have = machine_bytes() if have is None else have
    if need > have:
        raise UserError(
            f"memory: {nodes} node{'s' * (nodes > 1)} of {num_params / 1e9:.3g} billion parameters need"
            f" {_gib(need)} for weights, gradients and optimizer state, and this machine has {_gib(have)}:"
            " choose smaller model.sizes, or fewer nodes here"
        )


def trains_on_cpu(config: RunConfig) -> bool:
    """Return whether the nodes of this machine probably keep their state in main memory; needs no torch."""
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    return config.device == "cpu" or (config.device == "auto" and not has_gpu)


def _first(sizes: Mapping[str, Any], *names: str) -> int | None:
    return next((sizes[name] for name in names if type(sizes.get(name)) is int and sizes[name] > 0), None)


def _saved_parameters(directory: Path) -> int | None:
    """Return the number of values in the safetensors files of a directory, from their headers."""
    files = list(directory.glob("*.safetensors")) if directory.is_dir() else []
    total = 0
    try:
        for file in files:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                head = json.loads(opened.read(length))
            total += sum(math.prod(entry["shape"]) for name, entry in head.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, struct.error):
        return None
    return total or None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
