"""Keys that have no effect under the rest of the configuration: an error if the user has set one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

from aedit.launch.config.audit import AuditConfig
from aedit.launch.config.config import RunConfig
from aedit.launch.config.rl import PromptConfig
from aedit.types import UserError, is_import_path


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
        lambda c: c.swarm.averages,
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
