"""Log-probabilities of the tokens of a given text under an engine's policy, computed in parts.

The model's own forward computes them, with a cache of its own: no row of the engine is used. Shapes: T tokens
of a part, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from aedit.spec_rollout.engine.engine import Engine
from aedit.spec_rollout.model import cache_argument, generating
from aedit.spec_rollout.sampling import TopLogprobs

PART_TOKENS = 256
"""Upper limit of the tokens of one part."""
PART_BYTES = 64 << 20
"""Upper limit of the logits of one part in bytes, unless one token has more."""

_cache: Any = DynamicCache


class Scoring:
    """A text that is being scored."""

    def __init__(self, tokens: Sequence[int], *, temperature: float = 1.0, top: int = 0) -> None:
        """Begin.

        Args:
            tokens: The text.
            temperature: Logits are divided by it; 0 counts as 1, as in `Rollout.logprobs`.
            top: Number of most likely tokens that are reported at each place.
        """
        self.tokens, self._temperature, self._top = tuple(tokens), temperature or 1.0, top
        self._begin(-1)

    @property
    def has_begun(self) -> bool:
        """Return true if a part was computed."""
        return self._num_done > 0

    @property
    def num_left(self) -> int:
        """Return the number of tokens that are still to be computed."""
        return len(self.tokens) - self._num_done

    def advance(self, engine: Engine) -> bool:
        """Compute the next part; return whether it was the last one. New weights begin again.

        Raises:
            ValueError: Logits are not finite.
        """
        target = engine.target
        if target.version != self._version:
            self._begin(target.version)
        most = max(1, min(PART_TOKENS, PART_BYTES // (4 * target.vocabulary)))
        part = self.tokens[self._num_done : self._num_done + most]
        with generating(target.device):
            ids = torch.tensor([part], device=target.device)
            kv = {cache_argument(target.model): self._kv}
            logits_TV = target.model(input_ids=ids, use_cache=True, **kv).logits[0]
            self._num_done += len(part)
            self._read(logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float())
        return self._num_done == len(self.tokens)

    def _begin(self, version: int) -> None:
        self._version, self._num_done, self._kv = version, 0, _cache()
        self.logprobs: list[float | None] = [None]
        """Log-probability of each token after those before it; None for the first one."""
        self.top_logprobs: list[TopLogprobs] = [()]
        """The most likely tokens at the place of each token, the most likely one first."""

    def _read(self, logits_TV: Tensor) -> None:
        """Append the log-probabilities of the tokens that follow those of this part."""
        following = self.tokens[len(self.logprobs) : self._num_done + 1]
        if not following:
            return
        logp_TV = (logits_TV[: len(following)] / self._temperature).log_softmax(-1)
        index_T1 = torch.tensor(following, device=logp_TV.device)[:, None]
        values = logp_TV.gather(1, index_T1)[:, 0].tolist()
        if any(value != value for value in values):
            raise ValueError(f"policy version {self._version} has logits that are not finite for this text")
        self.logprobs += values
        if self._top:
            best = logp_TV.topk(min(self._top, logp_TV.shape[1]), dim=-1)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            self.top_logprobs += [tuple(zip(*pair, strict=True)) for pair in pairs]
        else:
            self.top_logprobs += [()] * len(values)
