"""The engine of a rank: policy, drafters and chooser of the arm."""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aedit.launch.config import DrafterConfig, RunConfig
from aedit.launch.data import CorpusTokenizer
from aedit.launch.node.model import build_model
from aedit.launch.node.objective import NodeParts
from aedit.launch.node.world import World
from aedit.spec_rollout.choose import ArmChooser, Goodput
from aedit.spec_rollout.drafters import (
    Drafter,
    DrafterKind,
    DraftForm,
    DraftLayer,
    LayerDrafter,
    SuffixDrafter,
    load_drafter,
    parse_arm,
)
from aedit.spec_rollout.engine import Engine, EngineSource
from aedit.spec_rollout.model import TargetModel, make_target, unwrapped
from aedit.spec_rollout.sampling import Rollout
from aedit.spec_rollout.training import (
    DraftTrainingConfig,
    ForwardFeatures,
    IdleConfig,
    LearningConfig,
    LossConfig,
    OnlineConfig,
    OnlineDrafter,
    PolicySource,
    TrainedPolicy,
    TrainedText,
)
from aedit.types import UserError, first_line

ARMS = ("suffix:2", "suffix:4", "suffix:8", "layer:1", "layer:2", "layer:4", "layer:8", "layer:4x2x8")
"""Arms that are chosen from besides off, as far as their drafters are there."""
MAX_DRAFTED_TOKENS = 32
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def make_engine_source(parts: NodeParts, longest: int) -> tuple[EngineSource, OnlineDrafter | None]:
    """Return the engine of this rank as the source of its rollouts, and its learned drafter.

    longest: tokens of the longest prompt. Raises UserError if the model has too few positions for it, or is
    not supported.
    """
    config, world, tokenizer = parts.config, parts.world, parts.tokenizer
    rows = config.rl.rows or config.rl.groups // world.ranks * config.rl.group_size
    try:
        target = make_target(
            _policy(config, parts.sync.model, tokenizer, world),
            rows=rows,
            max_tokens=longest + config.rl.sampling.max_new_tokens,
            nodes=MAX_DRAFTED_TOKENS,
            taps=taps_of(config.drafter, parts.sync.model),
        )
    except ValueError as error:
        raise UserError(f"the rollout engine does not support this model: {error}") from None
    online = make_online(parts, target)
    drafters = _drafters(config, target, online.drafter if online is not None else None)
    engine = Engine(
        target, drafters=drafters, chooser=choose_among(drafters, target), tokenizer=StopDecoder(tokenizer)
    )
    return EngineSource(engine, online), online


def make_helper_engine(parts: NodeParts, like: TargetModel, online: OnlineDrafter | None) -> Engine:
    """Return a further engine like that of `like`, of a policy of its own, for samples of other nodes.

    It drafts as the rank's own engine does: `hand_drafter` gives it the newest layer.
    """
    config, tokenizer = parts.config, parts.tokenizer
    policy: nn.Module = build_model(
        config.model, tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id
    )
    policy.to(device=like.device, dtype=like.dtype).requires_grad_(False)
    target = make_target(
        policy,
        rows=like.rows,
        max_tokens=like.max_tokens,
        nodes=MAX_DRAFTED_TOKENS,
        taps=taps_of(config.drafter, policy),
    )
    layer = None
    if online is not None and online.drafter is not None:
        layer = LayerDrafter.of(online.layer, target)
    drafters = _drafters(config, target, layer)
    chooser = choose_among(drafters, target)
    return Engine(target, drafters=drafters, chooser=chooser, tokenizer=StopDecoder(tokenizer))


def hand_drafter(online: OnlineDrafter | None, engine: Engine) -> None:
    """Let an engine of `make_helper_engine` draft with the layer with which this rank drafts now."""
    drafter = engine.drafters.get("layer")
    if online is None or online.drafter is None or not isinstance(drafter, LayerDrafter):
        return
    drafter.replace(online.layer, online.drafter.version)


class StopDecoder:
    """The tokenizer as the engine reads it to find stop strings."""

    def __init__(self, tokenizer: CorpusTokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        """Return the text of `token_ids` in which stop strings are searched."""
        return self._tokenizer.decode(token_ids, raw=True)


def _policy(config: RunConfig, model: nn.Module, tokenizer: CorpusTokenizer, world: World) -> nn.Module:
    """Return the model that generates: the trained one, or one of its own for the hand-over to write into."""
    kind = config.rl.engine_dtype
    if kind == "same" and world.ranks == 1:
        return model
    dtype = DTYPES.get(kind, torch.float32)
    if world.ranks == 1:
        return copy.deepcopy(model).to(dtype).requires_grad_(False)
    whole: nn.Module = build_model(
        config.model, tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id
    )
    return whole.to(device=world.device, dtype=dtype).requires_grad_(False)


def _drafters(
    config: RunConfig, target: TargetModel, layer: LayerDrafter | None
) -> dict[DrafterKind, Drafter]:
    found: dict[DrafterKind, Drafter] = {}
    if layer is not None:
        found["layer"] = layer
    if config.drafter.kind in ("suffix", "auto"):
        found["suffix"] = SuffixDrafter(device=str(target.device))
    return found


def choose_among(drafters: Mapping[DrafterKind, Drafter], target: TargetModel) -> ArmChooser | None:
    """Return the chooser of the arms that these drafters and this policy can do; None without drafters."""
    arms = [arm for arm in map(parse_arm, ARMS) if arm.drafter in drafters]
    arms = [arm for arm in arms if arm.is_chain or target.supports_trees]
    return Goodput(arms) if arms else None


FILE = "drafter.safetensors"
"""In the directory of the node: written with each checkpoint, read by a resume and by `aedit export`."""


def draft_form(config: DrafterConfig) -> DraftForm:
    """Return the form of the trained layer."""
    return DraftForm(config.form, config.vocabulary)


def taps_of(config: DrafterConfig, model: Any) -> tuple[int, ...]:
    """Return the layers of this model whose outputs its trained layer reads.

    Raises UserError if the model has too few for the form.
    """
    if config.kind not in ("layer", "auto"):
        return ()
    try:
        return draft_form(config).taps(model.config)
    except ValueError as error:
        raise UserError(f'drafter.form = "{config.form}": {error}; use "own"') from None


def make_online(parts: NodeParts, policy: PolicySource) -> OnlineDrafter | None:
    """Return the drafter of this rank, with its trainer; None if the configuration has none.

    policy: the target of the rank's engine, or the trained model of a rank without one.

    Raises UserError if `drafter.kind = "layer"` and there is no draft layer for this type of model, or if
    `drafter.pretrained` cannot be used.
    """
    kind = parts.config.drafter.kind
    if kind not in ("layer", "auto"):
        return None
    try:
        return start_online(parts, policy)
    except ValueError as error:
        if kind == "auto":
            return None
        raise UserError(f'drafter.kind = "layer": {error}; use "suffix" or "auto"') from None


def start_online(parts: NodeParts, policy: PolicySource) -> OnlineDrafter:
    """Return the drafter of this rank, with its trainer; see `make_online`.

    Raises ValueError if there is no draft layer for this type of model.
    """
    config, directory, rank = parts.config, parts.recorder.directory, parts.world.rank
    return OnlineDrafter.of(
        policy,
        layer=saved_layer(directory / FILE, policy) or pretrained_layer(config.drafter, policy),
        config=online_config(config.drafter, directory / f"drafter_{rank}.log"),
        checkpoint=directory / f"drafter_{rank}.training",
        seed=config.seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardLearner:
    """Learned drafter of a rank, which learns from the training forward: that computes its features anyway.

    Steps of an engine would be slowed down, so that only a part of their features could be collected.
    """

    policy: PolicySource
    """Target of the rank's engine, or the trained model of a rank without one."""
    online: OnlineDrafter
    features: ForwardFeatures

    @classmethod
    def of(cls, parts: NodeParts, policy: PolicySource, online: OnlineDrafter) -> "ForwardLearner":
        """Return the learner of the drafter `online` of this policy."""
        taps = taps_of(parts.config.drafter, unwrapped(parts.sync.model))
        return cls(policy=policy, online=online, features=ForwardFeatures(online.sink, taps))

    def begin(self, version: int) -> None:
        """Read the policy of which features follow. All ranks of the node together.

        Not at the hand-over: in the wait for rollouts after that, the features are of the version before.
        """
        if isinstance(self.policy, TrainedPolicy):
            self.policy.update(version)
        self.online.after_update()

    def collecting(self, model: nn.Module, samples: Sequence[Rollout]) -> AbstractContextManager[None]:
        """Return a context that collects the features of the forward pass in it; `features.write` follows."""
        texts = [
            TrainedText((*each.prompt.tokens, *each.tokens), len(each.prompt.tokens)) for each in samples
        ]
        return self.features.collecting(model, texts, self.policy.version)


def make_learner(parts: NodeParts) -> ForwardLearner | None:
    """Return the drafter of a rank without an engine; None for vLLM with a drafter of its own.

    See `make_online`.
    """
    if parts.config.rl.engine == "vllm" and not parts.config.rollout.vllm.has_own_drafter:
        return None
    policy = TrainedPolicy(parts.sync.model, taps=taps_of(parts.config.drafter, unwrapped(parts.sync.model)))
    online = make_online(parts, policy)
    return None if online is None else ForwardLearner.of(parts, policy, online)


STARVED_SHARE, STARVED_OVER_S = 0.1, 60.0
"""A trainer is starved that got less than this share of so many seconds in which it was let run."""


@dataclass(slots=True)
class TrainerWatch:
    """Reports deaths of the drafter's trainer process, and that it gets hardly any processor time."""

    online: OnlineDrafter
    record: Callable[..., None]
    """Takes the name of an event and its fields."""
    remedy: str
    """What helps a starved trainer."""
    reported: int = 0
    starved: bool = False
    """Whether the trainer got no share worth mentioning of the last `STARVED_OVER_S`."""
    _before: tuple[float, float, bool] = (0.0, 0.0, False)
    _allowed_s: float = 0.0
    _used_s: float = 0.0

    @classmethod
    def of(cls, online: OnlineDrafter, record: Callable[..., None], config: DrafterConfig) -> "TrainerWatch":
        """Return the watch of a node with these settings."""
        is_idle = config.priority == "idle"
        remedy = 'set drafter.priority = "normal"' if is_idle else "other programs use all processors"
        return cls(online, record, remedy)

    def report(self) -> None:
        """Record an event if the process has died or starves since the last call."""
        status = self.online.status()
        if "allowed_s" in status:
            self._measure(status["allowed_s"], status["cpu_s"], has_work=status["has_work"])
        deaths = status.get("deaths", 0)  # without a process of its own there are none
        if deaths > self.reported:
            self.reported = deaths
            self.record(
                "drafter_trainer_died", deaths=self.reported, reason=status["error"], state=status["state"]
            )

    def _measure(self, allowed_s: float, used_s: float, *, has_work: bool) -> None:
        """Add what the trainer was allowed and used since the last call, if it had work all the while."""
        before_allowed_s, before_used_s, had_work = self._before
        self._before = allowed_s, used_s, has_work
        if had_work and has_work:
            self._allowed_s += allowed_s - before_allowed_s
            self._used_s += used_s - before_used_s
        if self._allowed_s < STARVED_OVER_S:
            return
        was_starved, self.starved = self.starved, self._used_s < STARVED_SHARE * self._allowed_s
        if self.starved and not was_starved:
            self.record(
                "drafter_trainer_starved",
                used_s=round(self._used_s, 1),
                allowed_s=round(self._allowed_s, 1),
                remedy=self.remedy,
            )
        self._allowed_s = self._used_s = 0.0


def save_drafter(online: OnlineDrafter, directory: Path, *, steps: int = 0) -> None:
    """Write the drafter in use. If that fails, print the error and continue: the older file is intact.

    steps: of its training, by which an export chooses among nodes that share no drafter.
    """
    try:
        online.layer.save(directory / FILE, steps=steps)
    except OSError as error:
        print(f"aedit: {directory / FILE} was not written: {error}", file=sys.stderr, flush=True)


def online_config(config: DrafterConfig, log: Path) -> OnlineConfig:
    """Return the settings of the training; `log`: file of the trainer's output."""
    return OnlineConfig(
        learning=LearningConfig(
            training=DraftTrainingConfig(lr=config.lr, loss=LossConfig(tokens=config.loss))
        ),
        idle=IdleConfig(log=log, niceness=19 if config.priority == "idle" else 0),
        memory_bytes=config.memory_bytes,
        form=draft_form(config),
        train=config.idle_training,
    )


def pretrained_layer(config: DrafterConfig, policy: PolicySource) -> DraftLayer | None:
    """Return the drafter of `drafter.pretrained`; None if it is empty.

    Raises UserError if it cannot be read, was trained for a policy of other sizes, or has another form.
    """
    if not config.pretrained:
        return None
    name = f"drafter.pretrained = {config.pretrained!r}"
    try:
        layer = load_drafter(Path(config.pretrained).expanduser(), policy.model)
        taps = policy.feature_size // policy.embedding.shape[1] - 1
        wanted = draft_form(config).new(policy.model, taps=taps)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: no usable drafter there ({first_line(error)})") from None
    if _tensor_shapes(layer) != _tensor_shapes(wanted):
        raise UserError(
            f'{name}: its tensors are not those of drafter.form = "{config.form}" and drafter.vocabulary ='
            f" {config.vocabulary}; set the values with which it was trained"
        )
    return layer.to(policy.device)


def _tensor_shapes(layer: DraftLayer) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in layer.state_dict().items()}


def saved_layer(path: Path, policy: PolicySource) -> DraftLayer | None:
    """Return the drafter of an earlier attempt; None without one. A damaged file costs its training only."""
    if not path.exists():
        return None
    try:
        return DraftLayer.load(path, policy.model)
    except (OSError, ValueError) as error:
        print(f"aedit: the drafter begins anew: {error}", file=sys.stderr, flush=True)
        return None
