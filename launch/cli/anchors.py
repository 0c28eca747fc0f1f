"""Load the anchors of hubs into a model, from their folders or over the network, and digests of new ones."""

import json
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from aedit.async_sgd.hub import Hub
from aedit.edit import find_units, flat_layout
from aedit.launch.config import RunConfig
from aedit.launch.data import load_tokenizer
from aedit.launch.hub import replayed
from aedit.launch.node import build_model, facts_of, load_data, make_shared
from aedit.proto.rpc import ClientKeys, HubClient, PullRequest, Who
from aedit.types import Layout, UserError, model_sha256

TIMEOUT_S = 10.0
"""Without an answer for so long, a hub is given up."""


def from_folders(model: PreTrainedModel, config: RunConfig, folders: Iterable[Path]) -> str:
    """Load the anchors in these folders of hubs into `model`.

    Of several replicas the one of the highest term and the newest versions is used. Returns a text with the
    source, "" if there are no anchors yet. Raises UserError if a part of them is missing, or they belong to
    another model.
    """
    newest: dict[int, tuple[Hub, Path]] = {}
    for folder in folders:
        hub = replayed(folder)
        part, _ = json.loads((folder / "part.json").read_text())
        if part not in newest or _progress(hub) > _progress(newest[part][0]):
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


def _progress(hub: Hub) -> tuple[int, int]:
    return hub.state.term, sum(unit.version for unit in hub.state.units.values())


def from_network(
    model: PreTrainedModel, config: RunConfig, addresses: Sequence[str], keys: ClientKeys
) -> str:
    """Load the newest anchors of the hubs at `addresses`, one for each part, into `model`.

    Return a text with the source.

    Raises HubUnreachable, HubRefused, or UserError if they belong to another model.
    """
    layout = _layout(model, config)
    clients = [HubClient(address, keys, call_timeout_s=TIMEOUT_S) for address in addresses]
    try:
        _copy(model, layout, _pulled(layout, config.name, clients))
    finally:
        for client in clients:
            client.close()
    return f"anchors of the hub at {','.join(addresses)}"


def _pulled(layout: Layout, run: str, clients: Sequence[HubClient]) -> Iterator[NDArray[np.float32]]:
    for index, unit in enumerate(layout.units):
        values = np.empty(unit.numel, dtype=np.float32)
        request = PullRequest(who=Who(run=run), unit=index)
        head = clients[index % len(clients)].pull(request, values.data.cast("B"))
        if head.codec != "fp32" or head.num_bytes != values.nbytes:
            raise UserError(
                f"the hub's unit {unit.name} has another size than in run.toml: the hub serves another model"
            )
        yield values


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
    anchors = [_digest([p.detach() for p in unit.params]) for unit in units]
    lines = [f'  "{digest}",  # {unit.name}' for digest, unit in zip(anchors, units, strict=True)]
    lines += [f'  "",  # {shared.unit.name}: any'] if shared else []
    model_line = f'model_sha256 = "{model_sha256(layout, described, data.num_samples)}"'
    return "\n".join(["[hub]", model_line, "anchors_sha256 = [", *lines, "]"])


def _digest(params: list[Tensor]) -> str:
    found = sha256()
    for values in params:
        found.update(values.to(torch.float32).contiguous().cpu().numpy().data.cast("B"))
    return found.hexdigest()
