"""Drafters in the format `speculators`, version 0.9, which vLLM loads: `config.json` and `model.safetensors`.

The configuration has the sizes of the layer and the place of its policy ("verifier"); an engine that is given
the directory starts both. Tensors have the names and layouts of EAGLE-3: q and k in transformers' order of
rotary positions, `d2t` with an offset per draft token (token = index + offset), `t2d` with a bool per token.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from aedit.spec_rollout.drafters.draft_layer import (
    DraftLayer,
    DraftShape,
    Eagle3Layer,
    Eagle3Shape,
    checked_weights,
)
from aedit.types import first_line
from aedit.weights import save_tensors

CONFIG, WEIGHTS = "config.json", "model.safetensors"
VERSION = "0.9.0"
_LAYER = "layers.0."
_NAMES = {
    "gain": f"{_LAYER}input_layernorm.weight",
    "feature_norm": f"{_LAYER}hidden_norm.weight",
    "middle_norm": f"{_LAYER}post_attention_layernorm.weight",
    "final_norm": "norm.weight",
    "reduce.weight": "fc.weight",
    "attended.weight": f"{_LAYER}self_attn.o_proj.weight",
    "down.weight": f"{_LAYER}mlp.down_proj.weight",
    "output.weight": "lm_head.weight",
}
"""Names of tensors that are the same in both, by their own names."""
_QKV = [f"{_LAYER}self_attn.{name}_proj.weight" for name in "qkv"]
_GATE_UP = [f"{_LAYER}mlp.{name}_proj.weight" for name in ("gate", "up")]
_EMBEDDING = "embed_tokens.weight"
_VOCABULARY = ("d2t", "t2d")
_NEEDED = ("speculators_model_type", "speculators_config", "transformer_layer_config", "draft_vocab_size")
_KEYS = {
    *_NEEDED, "speculators_version", "target_hidden_size", "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad",
}  # fmt: skip
"""Keys of the configuration besides those that every transformers configuration has."""


def is_speculator(folder: Path) -> bool:
    """Return true if the configuration in a folder is of this format."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "speculators_model_type" in found


def write_drafter(layer: DraftLayer, policy: Any, folder: Path, *, verifier: str) -> None:
    """Write a drafter of any form to a folder that exists; `load_drafter` reads it.

    One of the form `eagle3` is written as `write_speculator` does, others as tensors and their sizes.
    policy, verifier: see there.
    """
    if isinstance(layer, Eagle3Layer):
        write_speculator(layer, policy, folder, verifier=verifier)
        return
    layer.save(folder / WEIGHTS)
    sizes = json.dumps(asdict(layer.shape), indent=2)
    (folder / CONFIG).write_text(f"{sizes}\n", encoding="utf-8")


def load_drafter(path: Path, model: Any) -> DraftLayer:
    """Return the drafter of a file, or of a folder that `write_drafter` or the library speculators wrote.

    model: The policy, or only its configuration.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged, or the drafter was trained for a policy of other sizes.
    """
    if is_speculator(path):
        return read_speculator(path, model)
    if not path.is_dir():
        return DraftLayer.load(path, model)
    layer = DraftLayer.load(path / WEIGHTS, model)
    try:
        sizes = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / CONFIG}: not a JSON file: {first_line(error)}") from error
    if sizes != json.loads(json.dumps(asdict(layer.shape))):
        raise ValueError(f"{path / CONFIG}: its sizes are not those of {WEIGHTS}")
    return layer


def write_speculator(
    layer: Eagle3Layer, policy: Any, folder: Path, *, verifier: str, num_tokens: int = 4
) -> None:
    """Write a drafter to a folder that exists.

    Args:
        layer: Drafter.
        policy: Configuration of its policy.
        folder: Folder.
        verifier: Directory or name on the hub under which an engine finds the policy.
        num_tokens: Tokens that an engine drafts at a time.

    Raises:
        OSError: A file cannot be written.
        ValueError: The layer is not of this policy.
    """
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "transformer_layer_config": _layer_config(layer.shape, policy),
        "draft_vocab_size": layer.shape.num_draft_tokens,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in layer.shape.tap_layers],
        "norm_before_residual": layer.shape.residual_after_norm,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": policy.architectures or []},
        },
    }
    if _shape(config, policy, layer.draft_tokens, layer.attended.weight, folder) != layer.shape:
        raise ValueError(f"{folder}: the drafter has other rotary positions or sizes than this policy")
    save_tensors(exported_tensors(layer), folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_speculator(folder: Path, model: Any) -> Eagle3Layer:
    """Return the drafter in a folder for this transformers model, on its device.

    Args:
        folder: Folder of `write_speculator`, or of a published drafter.
        model: The policy, or only its configuration.

    Raises:
        OSError: A file cannot be read.
        ValueError: A key or tensor is unknown, missing, or of another shape; the format is not EAGLE-3's or
            has parts that this layer lacks; the drafter is of another policy.
    """
    policy = getattr(model, "config", model)
    config = _read_config(folder / CONFIG)
    try:
        found = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS}: not a safetensors file: {error}") from error
    tensors = {name.replace("midlayer.", _LAYER): value for name, value in found.items()}
    where, vocabulary = folder / WEIGHTS, int(policy.vocab_size)
    tokens = _draft_tokens(tensors, config["draft_vocab_size"] or vocabulary, vocabulary, where)
    tensors = checked_weights({name: t for name, t in tensors.items() if name not in _VOCABULARY}, where)
    _check_embedding(tensors.pop(_EMBEDDING, None), model, where)
    shape = _shape(config, policy, tokens, tensors.get(_NAMES["attended.weight"]), folder / CONFIG)
    try:
        layer = Eagle3Layer.outline(shape)
        wanted = exported_tensors(layer)
    except (RuntimeError, TypeError) as error:  # such as a size beyond 64 bits
        raise ValueError(f"{folder / CONFIG}: transformer_layer_config: {first_line(error)}") from error
    for name in sorted({*wanted, *tensors}.difference(_VOCABULARY)):
        if name not in wanted:
            raise ValueError(f"{where}: tensor {name!r} is unknown")
        if name not in tensors:
            raise ValueError(f"{where}: tensor {name!r} is missing")
        shapes = tuple(wanted[name].shape), tuple(tensors[name].shape)
        if shapes[0] != shapes[1]:
            raise ValueError(f"{where}: tensor {name!r} must be of shape {shapes[0]}, got {shapes[1]}")
    layer.load_state_dict(_imported(tensors, shape), assign=True)
    return layer if isinstance(model, PretrainedConfig) else layer.to(model.device)


def _layer_config(shape: Eagle3Shape, policy: Any) -> dict[str, Any]:
    """Return the configuration of a Llama with one layer of these sizes."""
    config: Any = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=policy.max_position_embeddings,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters=dict(policy.rope_parameters),
        tie_word_embeddings=False,
    )
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return fields | {"model_type": "llama", "hidden_act": "silu", "vocab_size": shape.vocabulary}


def _shape(
    config: Mapping[str, Any], policy: Any, tokens: Tensor | None, attended: Tensor | None, where: Path
) -> Eagle3Shape:
    """Return the shape of a drafter with this configuration.

    attended: Its output projection of attention, of which each column is a dimension of a head.

    Raises:
        ValueError: It is not of this policy, or has parts that the layer lacks.
    """
    fields = dict(config["transformer_layer_config"])
    if fields.get("model_type", "llama") != "llama":
        raise ValueError(
            f"{where}: transformer_layer_config.model_type must be llama, got {fields['model_type']}"
        )
    try:
        layer: Any = LlamaConfig(**fields)
    except Exception as error:  # transformers refuses values by errors of many classes
        raise ValueError(f"{where}: transformer_layer_config: {first_line(error)}") from error
    for name, wanted in (
        ("num_hidden_layers", 1),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_size", policy.hidden_size),
        ("vocab_size", policy.vocab_size),
    ):
        if (value := getattr(layer, name)) != wanted:
            raise ValueError(f"{where}: transformer_layer_config.{name} must be {wanted}, got {value}")
    heads, head_size = layer.num_attention_heads, layer.head_dim
    if attended is not None and heads * head_size != attended.shape[-1]:  # before a table of frequencies
        name = _NAMES["attended.weight"]
        raise ValueError(
            f"{where}: transformer_layer_config has {heads} heads of {head_size}, and {name} is of shape"
            f" {tuple(attended.shape)}"
        )
    try:
        sizes = asdict(DraftShape.of(layer, taps=3))
    except Exception as error:
        raise ValueError(f"{where}: transformer_layer_config: {first_line(error)}") from error
    num_layers = policy.num_hidden_layers
    ids = config.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3]
    are_ids = isinstance(ids, list) and len(ids) == 3 and all(type(each) is int for each in ids)
    if not are_ids or ids != sorted(set(ids)) or not 1 <= ids[0] <= ids[-1] <= num_layers:
        rule = f"must be three ascending numbers from 1 to {num_layers}"
        raise ValueError(f"{where}: eagle_aux_hidden_state_layer_ids {rule}, got {ids}")
    for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_size"):
        if sizes[name] < 1:
            rule = f"transformer_layer_config must have {name} of 1 or more"
            raise ValueError(f"{where}: {rule}, got {sizes[name]}")
    return Eagle3Shape(
        **sizes | {"has_qk_norm": False, "has_qkv_bias": False},
        tap_layers=tuple(i - 1 for i in ids),
        draft_tokens=() if tokens is None else tuple(tokens.tolist()),
        residual_after_norm=bool(config.get("norm_before_residual", True)),
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: must hold an object")
    for key in _NEEDED:
        if key not in config:
            raise ValueError(f"{path}: key {key!r} is missing")
    for key, kinds, rule in (
        ("transformer_layer_config", dict, "an object"),
        ("draft_vocab_size", int | None, "an integer"),
    ):
        if not isinstance(config[key], kinds):
            raise ValueError(f"{path}: {key} must be {rule}, got {json.dumps(config[key])}")
    if unknown := sorted(config.keys() - _KEYS - PretrainedConfig().to_dict().keys() - {"auto_map"}):
        raise ValueError(f"{path}: key {unknown[0]!r} is unknown")
    for key, wanted in (
        ("speculators_model_type", ("eagle3",)),
        ("norm_before_fc", (False, None)),
        ("fc_norm", (False, None)),
        ("norm_output", (False, None)),
        ("target_hidden_size", (None, config["transformer_layer_config"].get("hidden_size"))),
    ):
        if config.get(key, wanted[0]) not in wanted:
            raise ValueError(f"{path}: {key} must be {json.dumps(wanted[0])}, got {json.dumps(config[key])}")
    return config


def _draft_tokens(
    tensors: Mapping[str, Tensor], num_tokens: int, vocabulary: int, where: Path
) -> Tensor | None:
    """Return the tokens of the draft vocabulary; None: all.

    Raises:
        ValueError: `d2t` and `t2d` are not there together, or contradict each other or the sizes.
    """
    offsets, known = tensors.get("d2t"), tensors.get("t2d")
    if (offsets is None) != (known is None) or (offsets is None and num_tokens != vocabulary):
        raise ValueError(f"{where}: tensor {'d2t' if offsets is None else 't2d'!r} is missing")
    if offsets is None or known is None:
        return None
    if offsets.is_floating_point():
        raise ValueError(f"{where}: d2t must hold integers, got {offsets.dtype}")
    if offsets.shape != (num_tokens,) or known.shape != (vocabulary,):
        sizes = f"({num_tokens},) and ({vocabulary},), got {tuple(offsets.shape)} and {tuple(known.shape)}"
        raise ValueError(f"{where}: d2t and t2d must be of shapes {sizes}")
    tokens = torch.arange(num_tokens) + offsets
    if not torch.equal(tokens, known.bool().nonzero()[:, 0]):
        raise ValueError(f"{where}: d2t must hold the offset of each token of t2d in ascending order")
    return None if num_tokens == vocabulary else tokens


def _check_embedding(embedding: Tensor | None, model: Any, where: Path) -> None:
    """Raise ValueError if the file has an embedding that is not the policy's."""
    if embedding is None or isinstance(model, PretrainedConfig):
        return
    own = model.get_input_embeddings().weight.detach()
    if embedding.shape != own.shape or not torch.equal(embedding.to(own), own):
        raise ValueError(f"{where}: {_EMBEDDING} is not the policy's embedding, which this layer uses")


def exported_tensors(layer: Eagle3Layer) -> dict[str, Tensor]:
    """Return copies of a layer's tensors by the names of the format; of `outline`, only their shapes."""
    shape, state = layer.shape, layer.state_dict()
    q, k = shape.split
    queries, keys, values = state["qkv.weight"].split([q, k, k])
    rotated = _halves(queries, shape.num_heads), _halves(keys, shape.num_kv_heads)
    tensors = {name: state[own] for own, name in _NAMES.items()}
    tensors |= dict(zip(_QKV, (*rotated, values), strict=True))
    tensors |= dict(zip(_GATE_UP, state["gate_up.weight"].chunk(2), strict=True))
    if layer.draft_tokens is not None:
        tokens = layer.draft_tokens.cpu()
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = torch.zeros(shape.vocabulary, dtype=torch.bool).index_fill_(0, tokens, True)
    values = {name: value.detach() for name, value in tensors.items()}
    return {n: v if v.is_meta else v.cpu().clone().contiguous() for n, v in values.items()}


def _imported(tensors: Mapping[str, Tensor], shape: Eagle3Shape) -> dict[str, Tensor]:
    """Return the state dict of a layer; the inverse of `exported_tensors`."""
    queries, keys, values = (tensors[name] for name in _QKV)
    joint = [_pairs(queries, shape.num_heads), _pairs(keys, shape.num_kv_heads), values]
    return {own: tensors[name] for own, name in _NAMES.items()} | {
        "qkv.weight": torch.cat(joint),
        "gate_up.weight": torch.cat([tensors[name] for name in _GATE_UP]),
    }


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows of neighbouring pairs: the first of each pair, then the second."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _pairs(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows as `_halves` does, in the other direction."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
