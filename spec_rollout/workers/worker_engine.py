"""The engine of a rollout worker, made of what the rank has told it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from aedit.spec_rollout.choose import ArmChooser, Fixed, Goodput
from aedit.spec_rollout.drafters import (
    Arm,
    Drafter,
    DrafterKind,
    DraftLayer,
    LayerDrafter,
    SuffixDrafter,
    parse_arm,
    tapped,
)
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import TargetModel, make_target

_transformers: Any = (AutoConfig, AutoModelForCausalLM, AutoTokenizer)  # their methods carry no types


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Description of an engine in words that JSON can hold."""

    model: Mapping[str, Any]
    """Configuration of the `transformers` model, as `PretrainedConfig.to_dict` gives it."""
    dtype: str
    """Name of the dtype in torch, such as `float32`."""
    device: str
    rows: int
    max_tokens: int
    arms: tuple[str, ...]
    tokenizer: str = ""
    """Directory of a saved tokenizer; empty: none."""
    taps: int = 0
    """Number of layers whose outputs the layer drafter reads besides the last one."""
    options: Mapping[str, Any]
    """`WorkerConfig.options`."""


def make_engine(spec: EngineSpec) -> Engine:
    """Return an engine whose policy has the right shapes and random weights."""
    configs, models, tokenizers = _transformers
    sizes = dict(spec.model)
    config = configs.for_model(sizes.pop("model_type"), **sizes)
    model = models.from_config(config, dtype=torch.float32)
    model = model.to(spec.device, getattr(torch, spec.dtype)).eval().requires_grad_(False)
    arms = [parse_arm(arm) for arm in spec.arms]
    nodes = max(16, *(arm.nodes for arm in arms))
    taps = tapped(spec.taps, config.get_text_config().num_hidden_layers)
    target = make_target(model, rows=spec.rows, max_tokens=spec.max_tokens, nodes=nodes, taps=taps)
    tokenizer = (
        tokenizers.from_pretrained(spec.tokenizer, trust_remote_code=False) if spec.tokenizer else None
    )
    drafters = _drafters({arm.drafter for arm in arms}, model, target, spec.taps)
    return Engine(target, drafters=drafters, chooser=_chooser(arms, target), tokenizer=tokenizer)


def _drafters(
    kinds: set[DrafterKind], model: Any, target: TargetModel, taps: int
) -> dict[DrafterKind, Drafter]:
    drafters: dict[DrafterKind, Drafter] = {}
    if "suffix" in kinds:
        drafters["suffix"] = SuffixDrafter(device=str(target.device))
    if "layer" in kinds:
        drafters["layer"] = LayerDrafter.of(DraftLayer.of(model, taps=taps), target)
    return drafters


def _chooser(arms: list[Arm], target: TargetModel) -> ArmChooser:
    fitting = [arm for arm in arms if arm.is_chain or target.supports_trees]
    return Goodput(fitting) if len(fitting) > 1 else Fixed(*fitting)
