"""The engine of a rank: policy, drafters and chooser of the arm."""

import copy
from collections.abc import Mapping

import torch
from torch import nn

from aedit.launch.config import RunConfig
from aedit.launch.data import CorpusTokenizer
from aedit.launch.node.model import build_model
from aedit.launch.node.objective import NodeParts
from aedit.launch.node.rl_drafter import make_online
from aedit.launch.node.world import World
from aedit.spec_rollout.choose import ArmChooser, Goodput
from aedit.spec_rollout.drafters import Drafter, DrafterKind, SuffixDrafter, parse_arm
from aedit.spec_rollout.engine import Engine, EngineSource
from aedit.spec_rollout.model import TargetModel, make_target
from aedit.spec_rollout.training import OnlineDrafter
from aedit.types import UserError

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
        )
    except ValueError as error:
        raise UserError(f"the rollout engine does not support this model: {error}") from None
    online = make_online(parts, target)
    drafters = _drafters(config, target, online)
    engine = Engine(
        target, drafters=drafters, chooser=choose_among(drafters, target), tokenizer=StopDecoder(tokenizer)
    )
    if online is not None:
        engine.sink = online.sink
    return EngineSource(engine, online), online


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
    config: RunConfig, target: TargetModel, online: OnlineDrafter | None
) -> dict[DrafterKind, Drafter]:
    found: dict[DrafterKind, Drafter] = {}
    if online is not None and online.drafter is not None:
        found["layer"] = online.drafter
    if config.drafter.kind in ("suffix", "auto"):
        found["suffix"] = SuffixDrafter(device=str(target.device))
    return found


def choose_among(drafters: Mapping[DrafterKind, Drafter], target: TargetModel) -> ArmChooser | None:
    """Return the chooser of the arms that these drafters and this policy can do; None without drafters."""
    arms = [arm for arm in map(parse_arm, ARMS) if arm.drafter in drafters]
    arms = [arm for arm in arms if arm.is_chain or target.supports_trees]
    return Goodput(arms) if arms else None
