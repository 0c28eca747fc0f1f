"""Checks across keys: those without effect that the user has set, and objects named by import path.

Each such object is called once before anything starts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from aedit.launch.config.config import RunConfig
from aedit.launch.config.rl import AuditConfig, PromptConfig
from aedit.system import call_within
from aedit.types import UserError, imported, is_import_path

EffectRule = tuple[str, str, Callable[[Any, RunConfig], bool], str]
"""Keys without effect, separated by spaces, where one that ends in a dot is a table; the key that disables
them; whether its value does, given that and the configuration; values with which the keys have an effect."""


def _all_but(table: str, config: Any, name: str) -> str:
    """Return the keys of a table but one."""
    return " ".join(f"{table}.{each.name}" for each in fields(config) if each.name != name)


def _is_generated(source: str) -> bool:
    return source.startswith("gym:") or (is_import_path(source) and not source.startswith("hf:"))


LEARNED = (
    "drafter.form drafter.idle_training drafter.lr drafter.loss drafter.memory_bytes drafter.pretrained"
    " drafter.priority drafter.vocabulary"
)
"""Keys of a drafter that is trained."""

RULES: tuple[EffectRule, ...] = (
    (
        "edit.landing edit.prefetch edit.fragments edit.offload edit.penalty. outer.",
        "edit.warmup_steps",
        lambda v, _: v == "all",
        "a number of steps",
    ),
    ("edit.prefetch", "edit.landing", lambda v, _: v == "arrival", '"forward"'),
    (
        "hub.merge hub.merge_cut hub.grace_cap_s",
        "hub.grace",
        lambda _, c: c.has_hub and c.hub.each_alone,
        "above 0, or hub.quorum of 2 or more",
    ),
    (
        "hub.merge_cut",
        "hub.merge",
        lambda v, c: c.has_hub and v not in ("trimmed", "multi-krum"),
        '"trimmed" or "multi-krum"',
    ),
    ("hub.grace hub.grace_cap_s", "hub.quorum", lambda v, c: c.has_hub and v == "all", "a number of nodes"),
    (
        "edit.penalty.weights edit.penalty.temperature edit.penalty.step_weight",
        "hub.weights",
        lambda v, c: c.has_hub and v != "penalty",
        '"penalty"',
    ),
    (
        "edit.penalty.temperature",
        "edit.penalty.weights",
        lambda v, _: v == "uniform",
        '"scale-free" or "paper"',
    ),
    (
        "edit.penalty.threshold edit.penalty.warmup_rounds edit.penalty.window edit.penalty.ema"
        " edit.penalty.patience",
        "edit.penalty.detector",
        lambda v, _: v == "off",
        '"robust" or "ema"',
    ),
    ("edit.penalty.ema", "edit.penalty.detector", lambda v, _: v == "robust", '"ema"'),
    ("edit.penalty.window", "edit.penalty.detector", lambda v, _: v == "ema", '"robust"'),
    ("outer.momentum", "outer.kind", lambda v, _: v == "average", '"nesterov"'),
    (
        "outer.delay outer.activation",
        "outer.kind",
        lambda v, _: v in ("average", "nesterov", "heloco"),
        '"delayed-nesterov"',
    ),
    ("outer.correction", "outer.kind", lambda v, _: v != "heloco", '"heloco"'),
    ("hub.staleness.power", "hub.staleness.rule", lambda v, _: v != "polynomial", '"polynomial"'),
    ("hub.staleness.rate", "hub.staleness.rule", lambda v, _: v != "exponential", '"exponential"'),
    ("serve.", "hub.address", lambda v, _: not v, "HOST:PORT"),
    (
        "swarm.parts swarm.copies swarm.lease_s swarm.lost_s swarm.allow edit.penalty.",
        "swarm.exchange",
        lambda _, c: c.swarm.on and not c.swarm.has_parts,
        '"parts"',
    ),
    ("swarm.averaging_s", "swarm.exchange", lambda _, c: c.swarm.has_parts, '"hivemind"'),
    ("swarm.", "swarm.discovery", lambda v, _: not v, '"file" or "hivemind"'),
    ("checkpoint.time_share", "hub.address", lambda _, c: not c.has_hub, "HOST:PORT"),
    ("checkpoint.time_share", "checkpoint.every", lambda v, _: v == 0, "1 or more"),
    ("hub.parent_every hub.parent_mix", "hub.parent", lambda v, _: not v, "HOST:PORT"),
    ("model.family model.sizes.", "model.pretrained", lambda v, _: bool(v), '""'),
    ("train.eval_in_waits", "train.eval_every", lambda v, _: v == 0, "1 or more"),
    ("data.special_tokens", "data.tokenizer", lambda v, _: v == "byte", "a Hugging Face tokenizer"),
    ("data.split", "data.source", lambda v, _: not v.startswith("hf:"), '"hf:NAME"'),
    (
        f"{_all_but('prompts', PromptConfig, 'source')} prompts.options. reward. rl. rollout. audit.",
        "prompts.source",
        lambda v, _: not v,
        "a source of prompts",
    ),
    (
        LEARNED,
        "prompts.source",
        lambda v, c: not v and not c.drafter.train,
        "a source of prompts, or drafter.train to true",
    ),
    (  # nodes with loops of their own share a drafter if their hub has drafter.kind = "layer"
        "drafter.kind",
        "prompts.source",
        lambda v, c: not v and not c.hub.endless and not c.drafter.train,
        "a source of prompts, or drafter.train to true",
    ),
    (
        "drafter.share",
        "prompts.source",
        lambda v, c: not v and not c.hub.endless,
        "a source of prompts",
    ),
    (
        "data.source data.text_key data.split data.held_out train.accumulate train.eval_every"
        " train.eval_in_waits train.eval_samples drafter.train",
        "prompts.source",
        lambda v, _: bool(v),
        '"" to train on text',
    ),
    ("prompts.split", "prompts.source", lambda v, _: bool(v) and not v.startswith("hf:"), '"hf:NAME"'),
    (
        "prompts.size prompts.options.",
        "prompts.source",
        lambda v, _: bool(v) and not _is_generated(v),
        "gym:GENERATOR or a function as package.module:name",
    ),
    (
        "rl.server_silent_s rl.server_stalled_s rl.on_new_version audit.",
        "rl.servers",
        lambda _, c: bool(c.prompts.source) and not c.rl.has_servers,
        '"hub" or HOST:PORT',
    ),
    (  # each batch has ended before the next version
        "rl.on_new_version",
        "rl.max_staleness",
        lambda v, c: c.rl.has_servers and v == 0,
        "1 or more",
    ),
    ("rollout.", "rl.engine", lambda v, c: bool(c.prompts.source) and v == "aedit", '"vllm"'),
    (
        "rollout.vllm.choose",
        "rollout.vllm.speculative",
        lambda v, c: c.rl.engine == "vllm" and not v,
        '{ method = "suffix", num_speculative_tokens = 8 }',
    ),
    (
        "rollout.vllm.weights",
        "rollout.vllm.server",
        lambda v, c: c.rl.engine == "vllm" and not v,
        "http://HOST:PORT",
    ),
    (
        "drafter.",
        "rollout.vllm.speculative",
        lambda v, c: bool(c.prompts.source) and c.rl.engine == "vllm" and not c.rollout.vllm.has_own_drafter,
        '{ method = "eagle3" } or rl.engine = "aedit"',
    ),
    ("rl.clip_low", "rl.loss", lambda v, _: v == "cispo", "another loss"),
    ("rl.importance_cap", "rl.importance", lambda v, _: v == "off", '"token" or "sequence"'),
    ("rl.old_logprobs", "rl.importance", lambda v, _: v != "off", '"off"'),
    ("rl.supervised_batch rl.supervised_lr", "rl.supervised_steps", lambda v, _: v == 0, "1 or more"),
    (
        f"{LEARNED} drafter.share drafter.train",
        "drafter.kind",
        lambda v, _: v in ("off", "suffix"),
        '"layer" or "auto"',
    ),
    (_all_but("audit", AuditConfig, "on"), "audit.on", lambda v, _: not v, "true"),
    ("audit.record_bytes audit.record_versions", "audit.record", lambda v, c: c.audit.on and not v, "true"),
    ("drafter.vocabulary", "drafter.form", lambda v, _: v == "own", '"eagle3"'),
    ("traces.ratio", "traces.endpoint", lambda v, _: not v, "the URL of an OTLP receiver"),
    ("drafter.lr drafter.loss drafter.train", "drafter.idle_training", lambda v, _: not v, "true"),
)


def without_effect(config: RunConfig, name: str) -> Iterator[tuple[str, str]]:
    """Yield the keys that disable the key `name` in `config`, each with values that would not."""
    for disabled, cause, holds, remedy in RULES:
        keys = disabled.split()
        concerns = name in keys or name.startswith(tuple(key for key in keys if key.endswith(".")))
        if concerns and holds(attrgetter(cause)(config), config):
            yield cause, remedy


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
        for cause, remedy in without_effect(config, name):
            if layer >= layers.get(cause, 0):
                value = attrgetter(cause)(config)
                shown = f'"{value}"' if isinstance(value, str) else str(value)
                raise UserError(
                    f"{origin[name]}: {name} has no effect with {cause} = {shown}:"
                    f" remove {name}, or set {cause} to {remedy}"
                )


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
    tried: list[tuple[str, str, tuple[str, ...], str, Callable[[RunConfig], None]]] = [
        ("hub.codec", hub.codec, codec, _NUMPY, lambda c: _try_codec(c.hub.codec)),
        ("hub.codec_down", hub.codec_down, codec, _NUMPY, lambda c: _try_codec(c.hub.codec_down)),
        ("rl.loss", config.rl.loss, (), _TORCH, _try_loss),
    ]
    if not node or (config.swarm.has_parts and config.swarm.listen):
        arrays = _NUMPY if config.has_hub else _TORCH
        tried.append(("outer.kind", config.outer.kind, ("init", "update"), arrays, _try_outer))
        tried.append(("hub.merge", hub.merge, (), _NUMPY, _try_merge))
    for key, path, methods, arrays, attempt in tried:
        if is_import_path(path):
            load_object(key, path, methods)
            first_call(key, path, arrays, partial(attempt, config), limit_s=TRIAL_S)


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


def _try_merge(config: RunConfig) -> None:
    from aedit.async_sgd.rules import try_merge

    try_merge(config.hub.merge)
