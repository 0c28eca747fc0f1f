"""Settings that determine the result of a run: equal on hub, standby and nodes, whatever their builds.

Two builds with the same protocol number train the same run if these settings are equal; equal code is not
required. Values at the build's default are left out, so that a build with a new setting at its default agrees
with one that does not know it. A changed default therefore needs a new `PROTOCOL`.
"""

from collections.abc import Mapping

from aedit.launch.config.config import RunConfig
from aedit.launch.config.fields import literal, values

_DECIDES = (
    "seed",
    "model.family",
    "model.sizes.",
    "data.seq_len",
    "data.held_out",
    "train.optimizer",
    "train.lr",
    "train.lr_by_nodes",
    "train.lr_warmup",
    "train.lr_final",
    "train.weight_decay",
    "train.betas",
    "train.grad_clip",
    "edit.schedule",
    "edit.every",
    "edit.warmup_steps",
    "edit.units",
    "edit.landing",
    "edit.fragments",
    "edit.penalty.",
    "outer.",
    "hub.merge",
    "hub.merge_cut",
    "hub.weights",
    "hub.codec",
    "hub.codec_down",
    "reward.functions",
    "reward.weights",
    "reward.options.",
    "rl.group_size",
    "rl.loss",
    "rl.advantage",
    "rl.clip_low",
    "rl.clip_high",
    "rl.importance",
    "rl.importance_cap",
    "rl.kl",
    "rl.max_staleness",
    "rl.epochs",
    "rl.batches",
    "rl.dynamic_sampling",
    "rl.overlong",
    "rl.supervised_steps",
    "rl.supervised_lr",
    "rl.sampling.",
    "drafter.kind",
    "drafter.share",
)
"""Not here: what each machine chooses for itself (batch size, dtype, paths, time-outs), the problems, whose
digest is compared, and what the hub alone applies and an operator may change between two of its starts
(quorum, grace, staleness, screen, budget)."""


def method(config: RunConfig) -> dict[str, str]:
    """Return the settings that determine the result and are not at their default, each as TOML text."""
    usual = dict(values(RunConfig()))
    found = ((name, value) for name, value in values(config) if _decides(name))
    return {name: literal(value) for name, value in found if name not in usual or usual[name] != value}


def defaults() -> dict[str, str]:
    """Return the defaults of all settings that determine the result, as TOML text."""
    return {name: literal(value) for name, value in values(RunConfig()) if _decides(name)}


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the first setting that differs, its value in `ours` and in `theirs`; None if all are equal."""
    usual = defaults()
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            default = usual.get(name, "its default")
            return name, ours.get(name, default), theirs.get(name, default)
    return None


def _decides(name: str) -> bool:
    return name.startswith(tuple(key for key in _DECIDES if key.endswith("."))) or name in _DECIDES
