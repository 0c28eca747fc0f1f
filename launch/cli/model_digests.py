"""`aedit config model CONFIG`: digests of a run's model and its first anchors, for `hub.model_sha256`."""

from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from aedit.edit import canonical, find_units
from aedit.launch.config import RunConfig
from aedit.launch.data import load_tokenizer
from aedit.launch.node import build_model, facts_of, load_data, make_shared
from aedit.types import model_sha256


def model_digests(config: RunConfig) -> str:
    """Return the lines of `[hub]` that fix model and first anchors, as the first node would describe them.

    Raises UserError if the model or the data cannot be read here.
    """
    tokenizer = load_tokenizer(config.data)
    data = load_data(config, tokenizer, Path(config.dir) / config.name / "data")
    model = build_model(
        config.model, tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id
    )
    units = find_units(model, config.edit.units)
    shared = make_shared(config, model, torch.device("cpu"))
    layout = canonical.layout([*units, *([shared.unit] if shared else [])])
    facts = facts_of(config, model, tokenizer, data)
    told = tuple((name, str(value)) for name, value in facts.items())
    anchors = [_digest([p.detach() for p in unit.params]) for unit in units]
    lines = [f'  "{digest}",  # {unit.name}' for digest, unit in zip(anchors, units, strict=True)]
    lines += [f'  "",  # {shared.unit.name}: any'] if shared else []
    model_line = f'model_sha256 = "{model_sha256(layout, told, data.num_samples)}"'
    return "\n".join(["[hub]", model_line, "anchors_sha256 = [", *lines, "]"])


def _digest(params: list[Tensor]) -> str:
    found = sha256()
    for values in params:
        found.update(values.to(torch.float32).contiguous().cpu().numpy().data.cast("B"))
    return found.hexdigest()
