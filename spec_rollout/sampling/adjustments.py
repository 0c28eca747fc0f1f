"""Changes of the logits that depend on the text so far: bias, penalties, constraints.

Every verified token has a text of its own: prompt, emitted tokens, and its drafted ancestors. So a drafted
token is verified against exactly the distribution that plain decoding would draw it from.

The order is that of transformers and vLLM: logit bias, repetition penalty, frequency and presence penalty,
constraint; `distribution.warp_logits` follows.

Shapes: B running rows, N drafted nodes, q = N + 1 verified tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aedit.spec_rollout.drafters import Draft
from aedit.spec_rollout.model import ancestors, to_device
from aedit.spec_rollout.sampling.samples import Rollout


@dataclass(slots=True, eq=False)
class LogitAdjustments:
    """Adjustments of the running rows; each part is None where no row needs it.

    Build it when the rows change. Emitted tokens are counted by `apply`.
    """

    rollouts: Sequence[Rollout]
    bias_B1V: Tensor | None
    penalties_B: Tensor | None
    """float64, (B, 3): repetition, frequency and presence penalty."""
    in_prompt_BV: Tensor
    """Bool: tokens of the prompts. Empty if no row has a penalty."""
    counts_BV: Tensor
    """float32: how often each token was emitted. Empty if no row has a penalty."""
    has_constraints: bool
    num_counted: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, rollouts: Sequence[Rollout], vocabulary: int, device: torch.device | str = "cpu"
    ) -> "LogitAdjustments | None":
        """Return the adjustments of rows 0 .. B - 1; None if no row asks for any."""
        settings = [rollout.prompt.sampling for rollout in rollouts]
        neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
        has_bias = any(s.logit_bias for s in settings)
        has_penalties = any(getattr(s, name) != value for s in settings for name, value in neutral.items())
        has_constraints = any(each.constraint is not None for each in settings)
        if not (has_bias or has_penalties or has_constraints):
            return None
        where, shape = torch.device(device), (len(rollouts), vocabulary if has_penalties else 0)
        bias_B1V = torch.zeros(len(rollouts), 1, vocabulary if has_bias else 0, dtype=torch.float64)
        for row, each in enumerate(settings):
            for token, value in each.logit_bias.items():
                bias_B1V[row, 0, token] = value
        made = cls(
            rollouts,
            bias_B1V.to(where) if has_bias else None,
            None,
            torch.zeros(shape, dtype=torch.bool, device=where),
            torch.zeros(shape, dtype=torch.float32, device=where),
            has_constraints,
            [0] * len(rollouts),
        )
        if has_penalties:
            penalties = [(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in settings]
            made.penalties_B = to_device(penalties, where, torch.float64)
            pairs = [(row, token) for row, each in enumerate(rollouts) for token in each.prompt.tokens]
            rows, tokens = to_device(pairs, where, torch.int64).unbind(1)
            made.in_prompt_BV[rows, tokens] = True
        return made

    def apply(self, logits_BqV: Tensor, draft: Draft | None) -> Tensor:
        """Return the adjusted logits.

        Args:
            logits_BqV: Logits of the policy after each row's last token and after each drafted node.
            draft: The drafted nodes; None if there are none.

        Returns:
            float32, or float64 for float64 logits.
        """
        wide = torch.float64 if logits_BqV.dtype == torch.float64 else torch.float32
        x = logits_BqV.to(wide)
        if self.bias_B1V is not None:
            x = x + self.bias_B1V.to(wide)
        if self.penalties_B is not None:
            x = self._penalize(x, draft, self.penalties_B.to(wide))
        if self.has_constraints:
            x = x.masked_fill(self._forbidden(draft, x), -torch.inf)
        return x

    def _penalize(self, x_BqV: Tensor, draft: Draft | None, penalties_B3: Tensor) -> Tensor:
        repetition, frequency, presence = penalties_B3[:, :, None, None].unbind(1)
        counts_BqV = self._counts(draft, x_BqV.shape[1])
        is_seen_BqV = (counts_BqV > 0) | self.in_prompt_BV[:, None]
        x = torch.where(is_seen_BqV, torch.where(x_BqV < 0, x_BqV * repetition, x_BqV / repetition), x_BqV)
        return x - frequency * counts_BqV - presence * (counts_BqV > 0)

    def _counts(self, draft: Draft | None, q: int) -> Tensor:
        """Return how often each token occurs in the answer up to each verified token, (B, q, V)."""
        self._count_emitted()
        counts_BqV = self.counts_BV[:, None].repeat(1, q, 1)
        if draft is None:
            return counts_BqV
        guesses_BN = draft.tokens_BN
        if draft.parents_BN is None:
            is_before_BqN = torch.ones(q, q - 1, dtype=torch.float32, device=guesses_BN.device).tril(-1)[None]
        else:
            is_before_BqN = ancestors(draft.parents_BN)[:, :, 1:].float()
        index_BqN = guesses_BN[:, None].expand(-1, q, -1)
        return counts_BqV.scatter_add_(2, index_BqN, is_before_BqN.expand(index_BqN.shape))

    def _count_emitted(self) -> None:
        """Count the tokens that have been emitted since the last call."""
        pairs = [
            (row, token)
            for row, each in enumerate(self.rollouts)
            for token in each.tokens[self.num_counted[row] :]
        ]
        if not pairs:
            return
        rows, tokens = to_device(pairs, self.counts_BV.device, torch.int64).unbind(1)
        self.counts_BV.index_put_((rows, tokens), self.counts_BV.new_ones(()), accumulate=True)
        self.num_counted = [len(each.tokens) for each in self.rollouts]

    def _forbidden(self, draft: Draft | None, x_BqV: Tensor) -> Tensor:
        """Return the tokens that constraints exclude after each verified token, (B, q, V)."""
        forbidden_BqV = torch.zeros(x_BqV.shape, dtype=torch.bool)
        chains = [] if draft is None else draft.tokens_BN.tolist()
        parents = None if draft is None or draft.parents_BN is None else draft.parents_BN.tolist()
        counts = None if draft is None or draft.counts_B is None else draft.counts_B.tolist()
        for row, rollout in enumerate(self.rollouts):
            if rollout.prompt.sampling.constraint is None:
                continue
            guesses = chains[row][: None if counts is None else counts[row]] if chains else []
            above = parents[row] if parents else range(-1, len(guesses) - 1)
            for index, allowed_V in allowed_after(rollout, guesses, above, x_BqV.shape[-1]).items():
                torch.logical_not(allowed_V, out=forbidden_BqV[row, index])
        return forbidden_BqV.to(x_BqV.device)


def allowed_after(
    rollout: Rollout, guesses: Sequence[int], parents: Sequence[int], vocabulary: int
) -> dict[int, Tensor]:
    """Ask a sample's constraint along its draft and return the allowed tokens, bool (V,), on the CPU.

    The constraint sees only texts that the rollout can have: it is not asked after a drafted token that it
    forbids, after a stop token, and beyond max_new_tokens.

    Args:
        rollout: Running rollout with a constraint.
        guesses: Drafted tokens. Parents precede their children.
        parents: Index of each one's parent, -1 for the rollout's last token.
        vocabulary: V.

    Returns:
        The tokens allowed after the last token (at 0) and after drafted token n (at n + 1); those that the
        constraint was not asked about are missing.

    Raises:
        ValueError: The constraint returned something else than a mask or token ids.
    """
    sampling = rollout.prompt.sampling
    texts: dict[int, list[int]] = {0: list(rollout.tokens)}
    allowed = {0: _ask(rollout, texts[0], vocabulary)}
    for n, (token, parent) in enumerate(zip(guesses, parents, strict=False)):
        above = parent + 1
        if above not in texts or not allowed[above][token] or token in sampling.stop_tokens:
            continue
        text = [*texts[above], token]
        if len(text) < sampling.max_new_tokens:
            texts[n + 1], allowed[n + 1] = text, _ask(rollout, text, vocabulary)
    return allowed


def _ask(rollout: Rollout, text: list[int], vocabulary: int) -> Tensor:
    constraint = rollout.prompt.sampling.constraint
    assert constraint is not None
    answer, name = constraint.allowed(tuple(text)), f"constraint of rollout {rollout.prompt.name}"
    if answer is None:
        return torch.ones(vocabulary, dtype=torch.bool)
    if isinstance(answer, Tensor) and answer.dtype == torch.bool:
        if answer.shape != (vocabulary,):
            raise ValueError(f"{name}: the mask has shape {tuple(answer.shape)}, expected ({vocabulary},)")
        return answer.cpu()
    ids = torch.as_tensor(answer if isinstance(answer, Tensor) else list(answer))
    if not ids.numel():
        return torch.zeros(vocabulary, dtype=torch.bool)
    if ids.dtype.is_floating_point or ids.dtype == torch.bool or ids.dim() != 1:
        raise ValueError(
            f"{name}: returned {ids.dtype}, {tuple(ids.shape)}; expected a bool tensor ({vocabulary},), "
            "token ids, or None"
        )
    lowest, highest = int(ids.min()), int(ids.max())
    if not 0 <= lowest <= highest < vocabulary:
        raise ValueError(f"{name}: token ids {lowest} to {highest} exceed the vocabulary of {vocabulary}")
    return torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids.long().cpu(), True)
