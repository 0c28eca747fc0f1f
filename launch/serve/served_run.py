"""The model of a run as a rollout server builds it: equal to that of the nodes."""

import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from aedit.edit import canonical, find_units
from aedit.launch.config import RunConfig
from aedit.launch.data import CorpusTokenizer, load_tokenizer
from aedit.launch.node import DTYPES, MAX_DRAFTED_TOKENS, build_model, chosen_device
from aedit.proto.versions import VersionLayout
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
            layout=VersionLayout(canonical.layout(units), config.rl.version_dtype),
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
