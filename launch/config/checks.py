"""Checks across keys: those without effect that the user has set, and objects named by import path.

Each such object is called once before anything starts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from aedit.launch.config.config import RunConfig
from aedit.launch.config.rl import PromptConfig
from aedit.launch.config.serve import AuditConfig
from aedit.system import call_within
from aedit.types import UserError, imported, is_import_path


@dataclass(frozen=True, slots=True)
class EffectRule:
    """While `holds`, the value of the key `cause` disables `keys`. A key that ends in a dot is a table."""

    keys: tuple[str, ...]
    cause: str
    holds: Callable[[RunConfig], bool]
    remedy: str
    """Values of `cause` with which the keys have an effect."""


def _has_hub(config: RunConfig) -> bool:
    return config.has_hub


def _is_generated(source: str) -> bool:
    return source.startswith("gym:") or (is_import_path(source) and not source.startswith("hf:"))


RL_KEYS = (
    *("prompts.options.", "reward.", "rl.", "audit."),
    *("drafter.idle_training", "drafter.lr", "drafter.memory_bytes"),
)
"""Keys of reinforcement learning, besides those of `prompts`."""

RULES = (
    EffectRule(
        ("edit.landing", "edit.prefetch", "edit.fragments", "edit.offload", "edit.penalty.", "outer."),
        "edit.warmup_steps",
        lambda c: c.edit.warmup_steps == "all",
        "a number of steps",
    ),
    EffectRule(("edit.prefetch",), "edit.landing", lambda c: c.edit.landing == "arrival", '"forward"'),
    EffectRule(
        ("hub.merge", "hub.merge_cut", "hub.grace_cap_s"),
        "hub.grace",
        lambda c: _has_hub(c) and c.hub.each_alone,
        "above 0, or hub.quorum of 2 or more",
    ),
    EffectRule(
        ("hub.merge_cut",),
        "hub.merge",
        lambda c: _has_hub(c) and c.hub.merge not in ("trimmed", "multi-krum"),
        '"trimmed" or "multi-krum"',
    ),
    EffectRule(
        ("hub.grace", "hub.grace_cap_s"),
        "hub.quorum",
        lambda c: _has_hub(c) and c.hub.quorum == "all",
        "a number of nodes",
    ),
    EffectRule(
        ("edit.penalty.weights", "edit.penalty.temperature", "edit.penalty.step_weight"),
        "hub.weights",
        lambda c: _has_hub(c) and c.hub.weights != "penalty",
        '"penalty"',
    ),
    EffectRule(
        ("edit.penalty.temperature",),
        "edit.penalty.weights",
        lambda c: c.edit.penalty.weights == "uniform",
        '"scale-free" or "paper"',
    ),
    EffectRule(
        tuple(f"edit.penalty.{name}" for name in ("threshold", "warmup_rounds", "window", "ema", "patience")),
        "edit.penalty.detector",
        lambda c: c.edit.penalty.detector == "off",
        '"robust" or "ema"',
    ),
    EffectRule(
        ("edit.penalty.ema",), "edit.penalty.detector", lambda c: c.edit.penalty.detector == "robust", '"ema"'
    ),
    EffectRule(
        ("edit.penalty.window",),
        "edit.penalty.detector",
        lambda c: c.edit.penalty.detector == "ema",
        '"robust"',
    ),
    EffectRule(("outer.momentum",), "outer.kind", lambda c: c.outer.kind == "average", '"nesterov"'),
    EffectRule(
        ("outer.delay", "outer.activation"),
        "outer.kind",
        lambda c: c.outer.kind in ("average", "nesterov", "heloco"),
        '"delayed-nesterov"',
    ),
    EffectRule(("outer.correction",), "outer.kind", lambda c: c.outer.kind != "heloco", '"heloco"'),
    EffectRule(
        ("hub.staleness.power",),
        "hub.staleness.rule",
        lambda c: c.hub.staleness.rule != "polynomial",
        '"polynomial"',
    ),
    EffectRule(
        ("hub.staleness.rate",),
        "hub.staleness.rule",
        lambda c: c.hub.staleness.rule != "exponential",
        '"exponential"',
    ),
    EffectRule(("serve.",), "hub.address", lambda c: not c.hub.address, "HOST:PORT"),
    EffectRule(
        ("swarm.parts", "swarm.copies", "swarm.lease_s", "swarm.lost_s", "swarm.allow", "edit.penalty."),
        "swarm.exchange",
        lambda c: c.swarm.on and not c.swarm.has_parts,
        '"parts"',
    ),
    EffectRule(("swarm.averaging_s",), "swarm.exchange", lambda c: c.swarm.has_parts, '"hivemind"'),
    EffectRule(("swarm.",), "swarm.discovery", lambda c: not c.swarm.on, '"file" or "hivemind"'),
    EffectRule(("hub.parent_every", "hub.parent_mix"), "hub.parent", lambda c: not c.hub.parent, "HOST:PORT"),
    EffectRule(
        ("model.family", "model.sizes."), "model.pretrained", lambda c: bool(c.model.pretrained), '""'
    ),
    EffectRule(
        ("data.special_tokens",),
        "data.tokenizer",
        lambda c: c.data.tokenizer == "byte",
        "a Hugging Face tokenizer",
    ),
    EffectRule(("data.split",), "data.source", lambda c: not c.data.source.startswith("hf:"), '"hf:NAME"'),
    EffectRule(
        (*(f"prompts.{each.name}" for each in fields(PromptConfig) if each.name != "source"), *RL_KEYS),
        "prompts.source",
        lambda c: not c.prompts.source,
        "a source of prompts",
    ),
    EffectRule(  # nodes with loops of their own share a drafter if their hub has drafter.kind = "layer"
        ("drafter.kind", "drafter.share"),
        "prompts.source",
        lambda c: not c.prompts.source and not c.hub.endless,
        "a source of prompts",
    ),
    EffectRule(
        (
            *(f"data.{name}" for name in ("source", "text_key", "split", "held_out")),
            *(f"train.{name}" for name in ("accumulate", "eval_every", "eval_samples")),
        ),
        "prompts.source",
        lambda c: bool(c.prompts.source),
        '"" to train on text',
    ),
    EffectRule(
        ("prompts.split",),
        "prompts.source",
        lambda c: bool(c.prompts.source) and not c.prompts.source.startswith("hf:"),
        '"hf:NAME"',
    ),
    EffectRule(
        ("prompts.size", "prompts.options."),
        "prompts.source",
        lambda c: bool(c.prompts.source) and not _is_generated(c.prompts.source),
        "gym:GENERATOR or a function as package.module:name",
    ),
    EffectRule(
        ("rl.server_silent_s", "rl.server_stalled_s", "rl.on_new_version", "audit."),
        "rl.servers",
        lambda c: bool(c.prompts.source) and not c.rl.has_servers,
        '"hub" or HOST:PORT',
    ),
    EffectRule(  # each batch has ended before the next version
        ("rl.on_new_version",),
        "rl.max_staleness",
        lambda c: c.rl.has_servers and c.rl.max_staleness == 0,
        "1 or more",
    ),
    EffectRule(("rl.clip_low",), "rl.loss", lambda c: c.rl.loss == "cispo", "another loss"),
    EffectRule(
        ("rl.importance_cap",),
        "rl.importance",
        lambda c: c.rl.importance == "off",
        '"token" or "sequence"',
    ),
    EffectRule(
        ("rl.supervised_batch", "rl.supervised_lr"),
        "rl.supervised_steps",
        lambda c: c.rl.supervised_steps == 0,
        "1 or more",
    ),
    EffectRule(
        ("drafter.idle_training", "drafter.share", "drafter.lr", "drafter.memory_bytes"),
        "drafter.kind",
        lambda c: c.drafter.kind in ("off", "suffix"),
        '"layer" or "auto"',
    ),
    EffectRule(
        tuple(f"audit.{each.name}" for each in fields(AuditConfig) if each.name != "on"),
        "audit.on",
        lambda c: not c.audit.on,
        "true",
    ),
    EffectRule(
        ("audit.record_bytes", "audit.record_versions"),
        "audit.record",
        lambda c: c.audit.on and not c.audit.record,
        "true",
    ),
    EffectRule(("drafter.lr",), "drafter.idle_training", lambda c: not c.drafter.idle_training, "true"),
)


def without_effect(config: RunConfig, name: str) -> Iterator[EffectRule]:
    """Yield the rules by which the key `name` has no effect in `config`."""
    for rule in RULES:
        tables = tuple(key for key in rule.keys if key.endswith("."))
        if (name in rule.keys or name.startswith(tables)) and rule.holds(config):
            yield rule


def check_effects(config: RunConfig, layers: Mapping[str, int], origin: Mapping[str, str]) -> None:
    """Raise UserError for the first key that the user has set and that has no effect.

    Args:
        config: The complete configuration.
        layers: Per key that was set, the index of its file, or of the flags. A key that a later layer
            disables is no error, so that a file can be overridden without removing the keys that depend on
            it.
        origin: Per key, the file and line or flag that set it.
    """
    for name, layer in layers.items():
        for rule in without_effect(config, name):
            if layer >= layers.get(rule.cause, 0):
                table, _, key = rule.cause.rpartition(".")
                value = getattr(_table(config, table), key)
                raise UserError(
                    f"{origin[name]}: {name} has no effect with {rule.cause} = {_shown(value)}:"
                    f" remove {name}, or set {rule.cause} to {rule.remedy}"
                )


def _table(config: RunConfig, path: str) -> object:
    found: object = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


_NUMPY = "NumPy arrays, which it gets in a hub"
_TORCH = "torch tensors, which it gets in a node"

LOAD_S = 300.0
"""Limit of the time in which an object by import path is imported and made: it may load a model."""
TRIAL_S = 60.0
"""Limit of its first call with small arrays."""

T = TypeVar("T")


def check_imports(config: RunConfig, *, node: bool = False) -> None:
    """Raise UserError if an object that the configuration names by import path cannot be used.

    Each one is imported and called once with small arrays of the kind that it gets in the run: NumPy's in a
    hub, torch tensors in a node. What imports torch is imported only for a run that names such an object.

    node: check only what a node of a hub needs: codecs and policy loss. Outer optimizer and merge rule run in
    the hub, or in a peer of a swarm that others can reach.
    """
    hub, codec = config.hub, ("num_bytes", "encode_slice", "decode")
    _check("hub.codec", hub.codec, codec, _NUMPY, lambda: _try_codec(hub.codec))
    _check("hub.codec_down", hub.codec_down, codec, _NUMPY, lambda: _try_codec(hub.codec_down))
    _check("rl.loss", config.rl.loss, (), _TORCH, lambda: _try_loss(config))
    if not node or (config.swarm.has_parts and config.swarm.listen):
        arrays = _NUMPY if config.has_hub else _TORCH
        _check("outer.kind", config.outer.kind, ("init", "update"), arrays, lambda: _try_outer(config))
        _check("hub.merge", hub.merge, (), _NUMPY, lambda: _try_merge(hub.merge))


def _check(key: str, path: str, methods: tuple[str, ...], arrays: str, attempt: Callable[[], None]) -> None:
    if not is_import_path(path):
        return
    load_object(key, path, methods)
    first_call(key, path, arrays, attempt, limit_s=TRIAL_S)


def load_object(key: str, path: str, methods: tuple[str, ...] = ()) -> Any:
    """Return the object that `key` names as `package.module:Name`. Raises UserError without one."""
    try:
        return call_within(LOAD_S, lambda: imported(path, key, methods))
    except ValueError as error:
        raise UserError(f"{error}; install the module here, or add its folder to PYTHONPATH") from None
    except (Exception, SystemExit) as error:  # of code that is not ours
        raise UserError(f"{key}: {path} cannot be imported: {_reason(error)}") from None


def first_call(key: str, path: str, arguments: str, attempt: Callable[[], T], *, limit_s: float) -> T:
    """Return what `attempt` returns, the first call of an object by import path.

    arguments: what it is called with, as the error message says. Raises UserError after `limit_s`.
    """
    try:
        return call_within(limit_s, attempt)
    except (Exception, SystemExit) as error:  # of code that is not ours
        reason = _reason(error).replace(f"{key}: {path} ", "")
        raise UserError(f"{key}: {path}, called with {arguments}: {reason}") from None


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{'refused' if isinstance(error, ValueError) else type(error).__name__}: {text}"


def _try_codec(path: str) -> None:
    from aedit.proto.codecs import try_codec

    try_codec(path)


def _try_loss(config: RunConfig) -> None:
    from aedit.spec_rollout.rl import LossSettings, try_loss

    try_loss(config.rl.loss, LossSettings.of(config.rl))


def _try_outer(config: RunConfig) -> None:
    import numpy as np

    from aedit.async_sgd.rules import make_outer, try_outer

    anchor = np.linspace(-1, 1, 5, dtype=np.float32)
    outer, look_ahead = make_outer(config.outer), config.outer.look_ahead
    if config.has_hub:
        try_outer(outer, anchor, look_ahead=look_ahead)
    else:
        import torch

        try_outer(outer, torch.from_numpy(anchor), look_ahead=look_ahead)


def _try_merge(path: str) -> None:
    from aedit.async_sgd.rules import try_merge

    try_merge(path)
