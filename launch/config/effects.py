"""Keys that can have no effect under the rest of the configuration: given by a person, they are errors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from aedit.launch.config.config import RunConfig
from aedit.types import UserError


@dataclass(frozen=True, slots=True)
class Rule:
    """While `holds`, the value of `cause` makes `keys` useless. A key that ends in a dot is a table."""

    keys: tuple[str, ...]
    cause: str
    holds: Callable[[RunConfig], bool]
    remedy: str
    """What `cause` would have to be."""


def _has_hub(config: RunConfig) -> bool:
    return bool(config.hub.address)


RULES = (
    Rule(
        ("edit.landing", "edit.prefetch", "edit.fragments", "edit.offload", "edit.penalty.", "outer."),
        "edit.warmup_steps",
        lambda c: c.edit.warmup_steps == "all",
        "a number of steps",
    ),
    Rule(("edit.prefetch",), "edit.landing", lambda c: c.edit.landing == "arrival", '"forward"'),
    Rule(
        ("hub.merge", "hub.grace", "hub.grace_cap_s"),
        "hub.quorum",
        lambda c: _has_hub(c) and c.hub.quorum == 1,
        "2 or more",
    ),
    Rule(
        ("hub.grace", "hub.grace_cap_s"),
        "hub.quorum",
        lambda c: _has_hub(c) and c.hub.quorum == "all",
        "a number of nodes",
    ),
    Rule(
        ("edit.penalty.weights", "edit.penalty.temperature", "edit.penalty.step_weight"),
        "hub.weights",
        lambda c: _has_hub(c) and c.hub.weights != "penalty",
        '"penalty"',
    ),
    Rule(
        ("edit.penalty.temperature",),
        "edit.penalty.weights",
        lambda c: c.edit.penalty.weights == "uniform",
        '"scale-free" or "paper"',
    ),
    Rule(
        tuple(f"edit.penalty.{name}" for name in ("threshold", "warmup_rounds", "window", "ema", "patience")),
        "edit.penalty.detector",
        lambda c: c.edit.penalty.detector == "off",
        '"robust" or "ema"',
    ),
    Rule(
        ("edit.penalty.ema",), "edit.penalty.detector", lambda c: c.edit.penalty.detector == "robust", '"ema"'
    ),
    Rule(
        ("edit.penalty.window",),
        "edit.penalty.detector",
        lambda c: c.edit.penalty.detector == "ema",
        '"robust"',
    ),
    Rule(("outer.momentum",), "outer.kind", lambda c: c.outer.kind == "average", '"nesterov"'),
    Rule(
        ("outer.delay", "outer.activation"),
        "outer.kind",
        lambda c: c.outer.kind in ("average", "nesterov"),
        '"delayed-nesterov"',
    ),
    Rule(
        ("hub.staleness.power",),
        "hub.staleness.rule",
        lambda c: c.hub.staleness.rule != "polynomial",
        '"polynomial"',
    ),
    Rule(
        ("hub.staleness.rate",),
        "hub.staleness.rule",
        lambda c: c.hub.staleness.rule != "exponential",
        '"exponential"',
    ),
    Rule(("hub.parent_every", "hub.parent_mix"), "hub.parent", lambda c: not c.hub.parent, "HOST:PORT"),
    Rule(("model.family", "model.sizes."), "model.pretrained", lambda c: bool(c.model.pretrained), '""'),
    Rule(("data.split",), "data.source", lambda c: not c.data.source.startswith("hf:"), '"hf:NAME"'),
)


def without_effect(config: RunConfig, name: str) -> Iterator[Rule]:
    """Yield the rules by which the key `name` has no effect in `config`."""
    for rule in RULES:
        tables = tuple(key for key in rule.keys if key.endswith("."))
        if (name in rule.keys or name.startswith(tables)) and rule.holds(config):
            yield rule


def check_effects(config: RunConfig, layers: Mapping[str, int], origin: Mapping[str, str]) -> None:
    """Raise UserError for the first key that was given and can have no effect.

    layers: for each key that was given, the number of its file or of the flags. What a later layer has made
    useless is no error: whoever overrides a value cannot take away the keys that depended on it.
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
