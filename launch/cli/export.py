"""Load the newest anchors of a run into a model; export it, with its drafter, as a model directory."""

import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel
from transformers.utils import logging

from aedit.async_sgd.hub import Hub
from aedit.edit import Shards, find_units, flat_layout
from aedit.launch.config import RunConfig, load_run, parse_config
from aedit.launch.data import CorpusTokenizer, load_tokenizer
from aedit.launch.hub import replayed
from aedit.launch.node import Mark, NodeCheckpoints, build_model, facts_of, load_data, make_shared
from aedit.launch.views import is_hub
from aedit.proto.rpc import (
    ClientKeys,
    HubClient,
    HubRefused,
    HubUnreachable,
    PullRequest,
    Who,
    caller_keys,
    greet,
)
from aedit.spec_rollout.drafters import (
    DraftLayer,
    Eagle3Layer,
    load_drafter,
    trained_steps,
    write_drafter,
)
from aedit.types import Layout, UserError, first_line, model_sha256

_logging: Any = logging  # its functions carry no types

ATTEMPTS = 5
"""A run that goes on removes old checkpoints, also while they are being read."""
TIMEOUT_S = 10.0
"""Timeout of a call to a hub."""
IN_RUN = "nodes/*/drafter.safetensors"
"""Written by each node next to its checkpoints."""
FOLDER = "drafter"
"""Folder of the drafter in an exported model."""


def export(
    place: str | Path,
    out: Path,
    keys: Path | None = None,
    *,
    insecure: bool = False,
    needs_drafter: bool = False,
) -> None:
    """Write config, safetensors, tokenizer and generation config of a run to the directory `out`.

    The weights are those of `load_run_model`; the run may still be in progress. The run's drafter, if it has
    one, is written to the folder `drafter` in `out`, which is written whole or not at all. A drafter of the
    form `eagle3` is written as `speculators` does: an engine that is given the folder starts both. Raises
    UserError if `out` is not empty, if there is no run, checkpoint or hub, or with `needs_drafter` no drafter
    of that form.
    """
    check_out_folder(out, "OUT")
    _logging.disable_progress_bar()
    model, tokenizer, where = load_run_model(place, keys, insecure=insecure)
    drafter, drafter_path = _drafter(model, place)
    if needs_drafter and not isinstance(drafter, Eagle3Layer):
        found = "one of another form" if drafter is not None else "none"
        raise UserError(
            f"--drafter: {place} must have a drafter that other engines load, and has {found}; train with "
            'drafter.form = "eagle3"'
        )
    write_model(model, tokenizer, out, drafter)
    print(f"{out}: {where}")
    if drafter is not None:
        print(f"{out / FOLDER}: drafter of {drafter_path}")


def _drafter(model: PreTrainedModel, place: str | Path) -> tuple[DraftLayer | None, Path | None]:
    """Return the newest drafter of a run directory and its file. Raises UserError if it is damaged."""
    if is_hub(place):
        return None, None
    run_dir = Path(place).parent if (Path(place) / "part.json").exists() else Path(place)
    path = drafter_of_run(run_dir)
    if path is None:
        return None, None
    try:
        return load_drafter(path, model), path
    except (OSError, ValueError) as error:
        raise UserError(f"the run's drafter: {error}; remove {path} to export the model alone") from None


def load_run_model(
    place: str | Path, keys: Path | None = None, *, insecure: bool = False
) -> tuple[PreTrainedModel, CorpusTokenizer, str]:
    """Return a run's newest anchors as an fp32 model on CPU, its tokenizer, and a text with the source.

    Args:
        place: A run directory, a hub's folder in one, or HOST:PORT of a hub (several, separated by commas,
            split the units) or of a peer of a swarm. A directory with a hub gives the hub's anchors. A
            directory whose nodes joined a hub elsewhere gives that hub's anchors if it answers. Otherwise the
            newest checkpoint of any node gives its anchors, or its weights if it has no anchors.
        keys: Folder of keys that `aedit keys` made, for a hub with TLS.
        insecure: Connect to a hub on another machine without TLS.

    Raises:
        UserError: There is no run, no checkpoint, or no hub that answers.
    """
    if is_hub(place):
        trust = caller_keys(str(place), keys, insecure)
        greeting = greet(str(place), trust)
        config = parse_config(greeting.config, f"the configuration of {place}")
        model, tokenizer = _model(config)
        owners = greeting.addresses if config.swarm.on else str(place).split(",")
        where = _from_network(model, config, owners, trust)
    else:
        run_dir = Path(place)
        folders = _hub_folders(run_dir)
        # The file of the node that joined last has the hub's address.
        joined = [] if folders else sorted(run_dir.glob("join_*.toml"), key=_written_at)
        config = load_run(joined[-1] if joined else run_dir / "run.toml")
        model, tokenizer = _model(config)
        where = from_folders(model, config, folders)
        where = where or _of_joined(model, config, run_dir, keys, insecure) or _fill(model, run_dir)
    model.config.use_cache = True  # off for training only
    return model, tokenizer, where


def _model(config: RunConfig) -> tuple[PreTrainedModel, CorpusTokenizer]:
    tokenizer = load_tokenizer(config.data)
    sizes = (tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id)
    return build_model(config.model, *sizes), tokenizer


def _written_at(path: Path) -> float:
    return path.stat().st_mtime


def _hub_folders(run_dir: Path) -> list[Path]:
    """Return the folders of the hubs in a run directory.

    For the folder of one hub, also the others beside it.
    """
    around = run_dir.parent if (run_dir / "part.json").exists() else run_dir
    found = [*around.glob("*/part.json"), *around.glob("peers/*/part_*/part.json")]
    return sorted(path.parent for path in found)


def _of_joined(
    model: PreTrainedModel, config: RunConfig, run_dir: Path, keys: Path | None, insecure: bool
) -> str:
    """Load the anchors of the hub that this directory's nodes have joined; return a text with the source.

    "" if there is no such hub or it does not answer.
    """
    if not any(run_dir.glob("join_*.toml")):
        return ""
    try:
        trust = caller_keys(config.hub.address, keys, insecure)
        return _from_network(model, config, config.hub.address.split(","), trust)
    except UserError as error:
        print(
            f"aedit: using the newest checkpoint here, as the hub cannot be asked: {error}", file=sys.stderr
        )
        return ""


def _fill(model: PreTrainedModel, run_dir: Path) -> str:
    """Load the newest checkpoint into `model`; return a text with its name."""
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


def _newest(run_dir: Path) -> tuple[NodeCheckpoints, Mark]:
    found = []
    for directory in sorted(run_dir.glob("nodes/*/checkpoints")):
        checkpoints = NodeCheckpoints(directory, keep=1, shards=Shards())
        found += [(checkpoints, mark) for mark in checkpoints.marks()]
    if not found:
        raise UserError(f"{run_dir} has no checkpoint yet; the first comes after checkpoint.every rounds")
    return max(found, key=lambda one: one[1])  # the first node's among equal ones


def _load(model: PreTrainedModel, checkpoints: NodeCheckpoints, mark: Mark) -> str:
    saved = _sizes(checkpoints.path(mark))
    anchored = any(name.startswith("sync.anchor/") for name in saved)
    sources = {name: _source(model, name, saved) for name in _own_names(model)}
    state: dict[str, dict[str, Tensor]] = {"model": {}, "sync": {}}
    for part, key in sources.values():
        state[part][key] = torch.empty(saved[f"{part}.{key}"])
    with warnings.catch_warnings():  # reading in a single process is intended
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        checkpoints.load(mark, state)
    own = model.state_dict()
    for name, (part, key) in sources.items():
        own[name].copy_(state[part][key])
    return "anchors" if anchored else "weights"


def _sizes(path: Path) -> dict[str, torch.Size]:
    """Return the full shape of each tensor in a checkpoint, for any number of ranks that wrote it."""
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove it to use an older one") from error
    known = metadata.state_dict_metadata.items()
    return {name: entry.size for name, entry in known if isinstance(entry, TensorStorageMetadata)}


def _own_names(model: PreTrainedModel) -> list[str]:
    """Return the names of parameters and saved buffers.

    Of tied weights the first name, which their anchor has.
    """
    first = {name for name, _ in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [name for name in model.state_dict() if name in first or name not in every]


def _source(model: PreTrainedModel, name: str, saved: dict[str, torch.Size]) -> tuple[str, str]:
    """Return the location of the value of `name` in the checkpoint.

    Frozen parameters and buffers have no anchor.
    """
    part, key = ("sync", f"anchor/{name}") if f"sync.anchor/{name}" in saved else ("model", name)
    size = saved.get(f"{part}.{key}")
    if size != model.state_dict()[name].shape:
        raise UserError(
            f"the checkpoint has no {name} with the shape of run.toml's model; restore an edited run.toml"
        )
    return part, key


def write_model(
    model: PreTrainedModel, tokenizer: CorpusTokenizer, out: Path, drafter: DraftLayer | None = None
) -> None:
    """Write a directory that `from_pretrained` reads, completely or not at all.

    It may exist if it is empty. drafter: written to a folder of its own in it.
    """
    with written_whole(out) as writing:
        if first := tokenizer.encode("").tolist():  # a new model's configuration has the end of text there
            model.config.bos_token_id = model.generation_config.bos_token_id = first[0]
        model.save_pretrained(writing)
        tokenizer.save(writing)
        if drafter is not None:
            folder = writing / FOLDER
            folder.mkdir()
            write_drafter(drafter, model.config, folder, verifier=str(out.absolute()))


def check_out_folder(out: Path, argument: str) -> None:
    """Raise UserError, with the name of the argument, unless `out` is a new directory or an empty one."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{argument}: {out} exists already; choose another one, or remove it")


@contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` when the block ends without an error, with a `config.json` in it.

    Raises UserError if it cannot be written.
    """
    writing = out.parent / f".{out.name}-{os.getpid()}"
    try:
        writing.mkdir(parents=True)
        yield writing
        for path in writing.rglob("*.*"):  # safetensors makes files readable by the owner only
            path.chmod((writing / "config.json").stat().st_mode)
        os.rename(writing, out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{out}: cannot be written: {reason}") from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def drafter_of_run(run_dir: Path) -> Path | None:
    """Return the file of the most trained drafter in a run directory, the newest of equal ones, or None."""
    found = list(run_dir.glob(IN_RUN))
    return max(found, key=lambda path: (trained_steps(path), _written_at(path)), default=None)


def drafter_beside(policy_dir: Path) -> Path | None:
    """Return the drafter that belongs to the policy of a run or model directory, or None."""
    folder = policy_dir / FOLDER
    return folder if folder.is_dir() else drafter_of_run(policy_dir)


def read_for(source: str, path: Path, model: PreTrainedModel) -> DraftLayer:
    """Return the drafter that belongs to a policy, and say so on stderr.

    Raises:
        UserError: It cannot be used.
    """
    try:
        layer = load_drafter(path, model)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{source}: its drafter cannot be used ({first_line(error)}); remove {path}, or give "
            "--drafter none"
        ) from None
    print(f"aedit: {source}: drafts with {path}", file=sys.stderr)
    return layer


def from_folders(model: PreTrainedModel, config: RunConfig, folders: Iterable[Path]) -> str:
    """Load the anchors in these folders of hubs into `model`.

    Of several replicas the one of the highest term and the newest versions is used. Returns a text with the
    source, "" if there are no anchors yet. Raises UserError if a part of them is missing, or they belong to
    another model.
    """

    def progress(hub: Hub) -> tuple[int, int]:
        return hub.state.term, sum(unit.version for unit in hub.state.units.values())

    newest: dict[int, tuple[Hub, Path]] = {}
    for folder in folders:
        hub = replayed(folder)
        part, _ = json.loads((folder / "part.json").read_text())
        if part not in newest or progress(hub) > progress(newest[part][0]):
            newest[part] = hub, folder
    layout, found = _layout(model, config), dict[int, NDArray[np.float32]]()
    for hub, _ in newest.values():
        for index, unit in hub.state.units.items() if hub.state.layout else ():
            if unit.anchor is not None:
                found[index] = hub.anchor(index)[1]
    if not found:
        return ""
    if missing := sorted(set(range(len(layout.units))) - found.keys()):
        names = ", ".join(layout.units[index].name for index in missing)
        raise UserError(f"no anchors of {names}: the folders of all hubs that split the units must be here")
    _copy(model, layout, (found[index] for index in range(len(layout.units))))
    return f"anchors of {', '.join(str(folder) for _, folder in newest.values())}"


def _from_network(
    model: PreTrainedModel, config: RunConfig, addresses: Sequence[str], keys: ClientKeys
) -> str:
    """Load the newest anchors of the hubs at `addresses`, one for each part, into `model`.

    Return a text with the source. Raises UserError if a hub cannot be asked, or they belong to another model.
    """
    layout = _layout(model, config)
    clients = [HubClient(address, keys, call_timeout_s=TIMEOUT_S) for address in addresses]

    def pulled() -> Iterator[NDArray[np.float32]]:
        for index, unit in enumerate(layout.units):
            values = np.empty(unit.numel, dtype=np.float32)
            request = PullRequest(who=Who(run=config.name), unit=index)
            head = clients[index % len(clients)].pull(request, values.data.cast("B"))
            if head.codec != "fp32" or head.num_bytes != values.nbytes:
                raise UserError(
                    f"the hub's unit {unit.name} has another size than in run.toml:"
                    " the hub serves another model"
                )
            yield values

    try:
        _copy(model, layout, pulled())
    except (HubUnreachable, HubRefused) as error:
        raise UserError(str(error)) from None
    finally:
        for client in clients:
            client.close()
    return f"anchors of the hub at {','.join(addresses)}"


def _layout(model: PreTrainedModel, config: RunConfig) -> Layout:
    try:
        return flat_layout.layout(find_units(model, config.edit.units))
    except ValueError as error:
        raise UserError(str(error)) from None


def _copy(model: PreTrainedModel, layout: Layout, anchors: Iterable[NDArray[np.float32]]) -> None:
    """Copy each anchor into the parameters of its unit."""
    own = dict(model.named_parameters())
    for unit, anchor in zip(layout.units, anchors, strict=True):
        if anchor.size != unit.numel:
            raise UserError(
                f"the hub's unit {unit.name} does not match the model of run.toml; restore an edited run.toml"
            )
        parts = torch.split(torch.from_numpy(np.asarray(anchor).copy()), [one.numel for one in unit.tensors])
        for tensor, part in zip(unit.tensors, parts, strict=True):
            with torch.no_grad():
                own[tensor.name].copy_(part.view(tensor.shape))


def model_digests(config: RunConfig) -> str:
    """Return what `aedit config model` prints: the lines of `[hub]` that fix model and first anchors.

    They are those that the first node would send.

    Raises UserError if the model or the data cannot be read here.
    """
    tokenizer = load_tokenizer(config.data)
    data = load_data(config, tokenizer, Path(config.dir) / config.name / "data")
    model = build_model(
        config.model, tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id
    )
    units = find_units(model, config.edit.units)
    shared = make_shared(config, model, torch.device("cpu"))
    layout = flat_layout.layout([*units, *([shared.unit] if shared else [])])
    facts = facts_of(config, model, tokenizer, data)
    described = tuple((name, str(value)) for name, value in facts.items())

    def digest(params: list[Tensor]) -> str:
        found = sha256()
        for values in params:
            found.update(values.to(torch.float32).contiguous().cpu().numpy().data.cast("B"))
        return found.hexdigest()

    anchors = [digest([p.detach() for p in unit.params]) for unit in units]
    lines = [f'  "{digest}",  # {unit.name}' for digest, unit in zip(anchors, units, strict=True)]
    lines += [f'  "",  # {shared.unit.name}: any'] if shared else []
    model_line = f'model_sha256 = "{model_sha256(layout, described, len(data.train))}"'
    return "\n".join(["[hub]", model_line, "anchors_sha256 = [", *lines, "]"])
