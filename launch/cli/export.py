"""A run's newest anchors as a Hugging Face model directory."""

import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel

from aedit.edit.shards import Shards
from aedit.launch.config.load import load
from aedit.launch.data.tokenizer import Tokenizer, load_tokenizer
from aedit.launch.hub.replay import replayed
from aedit.launch.node.checkpoint import Checkpoints, Mark
from aedit.launch.node.model import build_model
from aedit.types import UserError

ATTEMPTS = 5
"""A run that goes on removes old checkpoints, also while they are being read."""


def export(run_dir: Path, out: Path) -> None:
    """Write config, safetensors, tokenizer and generation config of a run to the directory `out`.

    The weights are the hub's anchors if the run directory has a hub, else the anchors of the newest
    checkpoint of any node, in fp32; those of the node itself where there are no anchors yet (warm-up), or
    where the hub is on another machine. The run may still be going on. `out` appears whole or not at all.
    Raises UserError if `out` holds something, or there is no run or no checkpoint.
    """
    _check_empty(out)
    model, tokenizer, where = read_run(run_dir)
    try:
        write_model(model, tokenizer, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from None
    print(f"{out}: {where}")


def read_run(run_dir: Path) -> tuple[PreTrainedModel, Tokenizer, str]:
    """The newest anchors of a run as a model on CPU in fp32, its tokenizer, and where they were, in words.
    UserError if there is no run or no checkpoint."""
    config = load(run_dir / "run.toml", []).config
    tokenizer = load_tokenizer(config.data.tokenizer)
    model = build_model(
        config.model, tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id
    )
    where = _fill_from_hubs(model, run_dir) or _fill(model, run_dir)
    model.config.use_cache = True  # off for training only
    return model, tokenizer, where


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already: choose another OUT, or remove it")


def _fill_from_hubs(model: PreTrainedModel, run_dir: Path) -> str:
    """Load the anchors that the run's hubs own into `model`; returns where they were, empty if nowhere."""
    directories = [path.parent for path in sorted(run_dir.glob("hub*/part.json"))]
    own = dict(model.named_parameters())
    num_found = 0
    for directory in directories:
        hub = replayed(directory)
        for index in hub.state.units if hub.state.layout else ():
            tensors = hub.state.layout.units[index].tensors if hub.state.layout else ()
            values = torch.from_numpy(hub.anchor(index)[1].copy())
            if not values.numel():
                return ""
            parts = torch.split(values, [tensor.numel for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                _copy(own, tensor.name, part.view(tensor.shape))
                num_found += 1
    return f"anchors of {', '.join(map(str, directories))}" if num_found else ""


def _copy(own: dict[str, torch.nn.Parameter], name: str, value: Tensor) -> None:
    if name not in own or own[name].shape != value.shape:
        raise UserError(f"the hub has no {name} of the shape that run.toml describes: was it edited?")
    with torch.no_grad():
        own[name].copy_(value)


def _fill(model: PreTrainedModel, run_dir: Path) -> str:
    """Load the newest checkpoint into `model`; returns which one it was, in words."""
    for _ in range(ATTEMPTS):
        checkpoints, mark = _newest(run_dir)
        try:
            kind = _load(model, checkpoints, mark)
        except UserError:
            if checkpoints.path(mark).exists():
                raise
        else:
            return f"{kind} of {checkpoints.path(mark)}"
    raise UserError(f"{run_dir}: its checkpoints are replaced faster than they can be read; try again later")


def _newest(run_dir: Path) -> tuple[Checkpoints, Mark]:
    found = []
    for directory in sorted(run_dir.glob("nodes/*/checkpoints")):
        checkpoints = Checkpoints(directory, keep=1, shards=Shards())
        found += [(checkpoints, mark) for mark in checkpoints.marks()]
    if not found:
        raise UserError(f"{run_dir} has no checkpoint yet; the first comes after checkpoint.every rounds")
    return max(found, key=lambda one: one[1])  # of equal ones the first node's


def _load(model: PreTrainedModel, checkpoints: Checkpoints, mark: Mark) -> str:
    saved = _sizes(checkpoints.path(mark))
    anchored = any(name.startswith("sync.anchor/") for name in saved)
    sources = {name: _source(model, name, saved) for name in _own_names(model)}
    state: dict[str, dict[str, Tensor]] = {"model": {}, "sync": {}}
    for part, key in sources.values():
        state[part][key] = torch.empty(saved[f"{part}.{key}"])
    with warnings.catch_warnings():  # that this is a single process is as it should be
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        checkpoints.load(mark, state)
    own = model.state_dict()
    for name, (part, key) in sources.items():
        own[name].copy_(state[part][key])
    return "anchors" if anchored else "weights"


def _sizes(path: Path) -> dict[str, torch.Size]:
    """Full shape of every tensor in a checkpoint, however many ranks have written it."""
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove it to use an older one") from error
    known = metadata.state_dict_metadata.items()
    return {name: entry.size for name, entry in known if isinstance(entry, TensorStorageMetadata)}


def _own_names(model: PreTrainedModel) -> list[str]:
    """Parameters and saved buffers; of tied weights only the first name, under which their anchor is
    kept."""
    first = {name for name, _ in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [name for name in model.state_dict() if name in first or name not in every]


def _source(model: PreTrainedModel, name: str, saved: dict[str, torch.Size]) -> tuple[str, str]:
    """Where in the checkpoint the value of `name` is: frozen parameters and buffers have no anchor."""
    part, key = ("sync", f"anchor/{name}") if f"sync.anchor/{name}" in saved else ("model", name)
    size = saved.get(f"{part}.{key}")
    if size != model.state_dict()[name].shape:
        raise UserError(f"the checkpoint has no {name} of the shape that run.toml describes: was it edited?")
    return part, key


def write_model(model: PreTrainedModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write a directory that `from_pretrained` reads, whole or not at all; an empty one may be there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    writing = out.parent / f".{out.name}-{os.getpid()}"
    writing.mkdir()
    try:
        model.save_pretrained(writing)
        tokenizer.save(writing)
        for path in writing.iterdir():  # safetensors lets nobody but the owner read
            path.chmod((writing / "config.json").stat().st_mode)
        os.rename(writing, out)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
