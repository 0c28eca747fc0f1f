"""The run as its rollout server serves it: configuration, tokenizer, model, and the engines of its lines."""

import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from aedit.edit import find_units, flat_layout
from aedit.launch.config import RunConfig
from aedit.launch.data import CorpusTokenizer, load_tokenizer
from aedit.launch.node import (
    DTYPES,
    MAX_DRAFTED_TOKENS,
    StopDecoder,
    build_model,
    choose_among,
    chosen_device,
)
from aedit.launch.serve.server_drafter import LayerCopy, ServerDrafter
from aedit.proto.versions import VersionLayout
from aedit.spec_rollout.drafters import Drafter, DrafterKind, SuffixDrafter
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import TargetModel, make_target
from aedit.types import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """Configuration, tokenizer and model of a run."""

    config: RunConfig
    tokenizer: CorpusTokenizer
    device: torch.device
    model: nn.Module
    """As at the start of the run, on the CPU; engines get copies."""
    layout: VersionLayout

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Build the model. Raises UserError if it cannot be built here."""
        tokenizer = load_tokenizer(config.data)
        model = build_model(
            config.model, tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id
        )
        model.train(False)
        try:
            units = find_units(model, config.edit.units)
        except ValueError as error:
            raise UserError(str(error)) from None
        return cls(
            config=config,
            tokenizer=tokenizer,
            device=chosen_device(config.device),
            model=model,
            layout=VersionLayout(flat_layout.layout(units), config.rl.version_dtype),
        )

    @property
    def max_tokens(self) -> int:
        """Return the limit of prompt and answer of one sample."""
        return self.config.serve.max_tokens or self.config.data.seq_len

    def target(self) -> TargetModel:
        """Return a policy for a new engine, with weights of its own that are those of the start of the run.

        Raises UserError if there is no engine for this model.
        """
        dtype = DTYPES.get(self.config.rl.engine_dtype, torch.float32)
        own = copy.deepcopy(self.model).to(device=self.device, dtype=dtype).requires_grad_(False)
        try:
            return make_target(
                own, rows=self.config.serve.rows, max_tokens=self.max_tokens, nodes=MAX_DRAFTED_TOKENS
            )
        except ValueError as error:
            raise UserError(f"the rollout engine does not support this model: {error}") from None


@dataclass(slots=True, eq=False)
class ServedLine:
    """Engine of one line; a `LineEngine`."""

    engine: Engine
    is_trainers: bool
    """Its requests come from a trainer."""
    layer: LayerCopy | None
    drafter: ServerDrafter
    is_closed: bool = False

    @property
    def drafter_version(self) -> int:
        """Return the number of the learned drafter in use; 0 before the first trained one."""
        return 0 if self.layer is None else self.layer.number

    def between_steps(self) -> None:
        """Let the drafter learn from this line, and adopt the newest one."""
        self.drafter.before_step(self)

    def close(self) -> None:
        """Take note that the line is closed."""
        self.is_closed = True


@dataclass(frozen=True, slots=True)
class LineEngines:
    """Makes the engines of lines."""

    run: ServedRun
    drafter: ServerDrafter
    own_line: str

    def make(self, line: str) -> ServedLine:
        """Return a new engine for a line."""
        target = self.run.target()
        drafters: dict[DrafterKind, Drafter] = {}
        layer = self.drafter.copy_for(target)
        if layer is not None:
            drafters["layer"] = layer.drafter
        if self.run.config.drafter.kind in ("suffix", "auto"):
            drafters["suffix"] = SuffixDrafter(device=str(target.device))
        engine = Engine(
            target,
            drafters=drafters,
            chooser=choose_among(drafters, target),
            tokenizer=StopDecoder(self.run.tokenizer),
        )
        return ServedLine(engine, line != self.own_line, layer, self.drafter)
