"""One pass of the policy over all running rows: verification of drafts and the tokens after them.

Shapes: B rows, N drafted nodes, q = N + 1 verified tokens, of which at most M are accepted, V vocabulary, f
feature size.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from aedit.spec_rollout.drafters import Draft
from aedit.spec_rollout.engine.rows import RowScheduler
from aedit.spec_rollout.model import KVMemoryError, to_device
from aedit.spec_rollout.sampling import (
    AcceptedTokens,
    NoiseKeys,
    Rollout,
    TopLogprobs,
    accept_path,
    coupled_tokens,
    logprobs,
    node_depths,
    rejection_accept,
    top_logprobs,
    warp_logits,
)

VerifyMode = Literal["coupled", "rejection"]
"""How drafts are verified: "coupled" gives the tokens that there would be without drafts; "rejection" gives
others, of the same distribution."""


class NoNextTokenError(ValueError):
    """Some samples have no next token: logits are not finite, or no allowed token has a finite one."""

    def __init__(self, message: str, rollouts: Sequence[Rollout]) -> None:
        super().__init__(message)
        self.rollouts = tuple(rollouts)
        """The samples without a next token. The others can go on when these have left the engine."""


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """Result of the pass for rows 0 .. B - 1, before the ends of rollouts are searched."""

    tokens: list[list[int]]
    """New tokens of each row, at least one."""
    logprobs: list[list[float]]
    """Log-probabilities of these tokens; see `Rollout.logprobs`."""
    path: list[list[int]] | None
    """For a tree: indices of the accepted tokens of each row, root first, as many as there are new tokens."""
    features_BMf: Tensor
    """The policy's hidden states of the accepted tokens, followed by others."""
    verified: tuple[int, ...] = ()
    """Drafted nodes of each row that the pass has verified; empty without a draft."""
    top_logprobs: list[list[TopLogprobs]] | None = None
    """The most likely tokens at the places of the accepted ones, followed by others. None if no row asks."""

    @property
    def accepted(self) -> tuple[int, ...]:
        """Return the number of accepted drafted nodes of each row."""
        return tuple(len(tokens) - 1 for tokens in self.tokens)

    def check_finite(self, rollouts: Sequence[Rollout], version: int) -> None:
        """Check that each token was drawn from a distribution.

        Raises:
            NoNextTokenError: Logits are not finite, or no allowed token has a finite one.
        """
        pairs = zip(rollouts, self.logprobs, strict=True)
        bad = [rollout for rollout, values in pairs if any(map(math.isnan, values))]
        if bad:
            names = ", ".join(rollout.prompt.name for rollout in bad[:5])
            names += f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            raise NoNextTokenError(
                f"policy version {version} has no next token for rollout {names}: its logits are NaN or "
                "infinite, or no allowed token has a finite one. No sample got a token of this step. Load "
                "finite weights with update_weights, or abort these samples",
                bad,
            )

    def features(self, counts: Sequence[int]) -> Tensor:
        """Return the features of the first counts[b] accepted tokens, then zeros: (B, m, f).

        m is the largest count; see `StepUpdate.features`.
        """
        m = max(counts)
        if m == 1 == self.features_BMf.shape[1]:  # plain decoding: each row has one new token
            return self.features_BMf
        features_Bmf = self.features_BMf[:, :m]
        if min(counts) == m:
            return features_Bmf
        counts_B1 = to_device(counts, features_Bmf.device)[:, None]
        is_filler_Bm = torch.arange(m, device=features_Bmf.device) >= counts_B1
        return features_Bmf.masked_fill(is_filler_Bm[..., None], 0)


def truncate_draft(draft: Draft, kept: int | Sequence[int], most: int) -> Draft | None:
    """Return the first nodes of each row; None if there are none.

    Args:
        draft: Draft of B rows.
        kept: Number of nodes that are kept, of all rows or of each.
        most: Upper limit of it.
    """
    num_nodes = min(kept if isinstance(kept, int) else max(kept), most, draft.tokens_BN.shape[1])
    if num_nodes <= 0:
        return None
    counts_B = draft.counts_B
    if not isinstance(kept, int) and min(kept) < num_nodes:
        kept_B = to_device(kept, draft.tokens_BN.device)
        counts_B = kept_B if counts_B is None else torch.minimum(counts_B, kept_B)
    elif num_nodes == draft.tokens_BN.shape[1]:
        return draft

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, :num_nodes]

    return replace(
        draft,
        tokens_BN=draft.tokens_BN[:, :num_nodes],
        parents_BN=cut(draft.parents_BN),
        counts_B=None if counts_B is None else counts_B.clamp(max=num_nodes),
        scores_BN=draft.scores_BN[:, :num_nodes],
        logq_BNV=cut(draft.logq_BNV),
    )


def verified_nodes(draft: Draft) -> tuple[int, ...]:
    """Return the number of nodes of each row that a pass verifies, on a GPU with those that are not real.

    There, reading the counts would wait for the device.
    """
    num_rows, num_nodes = draft.tokens_BN.shape
    if draft.counts_B is None or draft.counts_B.device.type != "cpu":
        return (num_nodes,) * num_rows
    return tuple(draft.counts_B.tolist())


def verify_within_memory(
    rows: RowScheduler, draft: Draft | None, depth: int, mode: VerifyMode
) -> tuple[Verification, bool]:
    """Verify drafts; if memory for keys and values is short, without drafts, then with fewer samples.

    Args:
        rows: Running rows. The last ones return to the queue if memory does not suffice for them.
        draft: See `verify_drafts`.
        depth: See `verify_drafts`.
        mode: See `verify_drafts`.

    Returns:
        The result for the rows that are still running, and whether memory sufficed for all with their drafts.

    Raises:
        KVMemoryError: Memory does not suffice for one sample.
    """
    with suppress(KVMemoryError):
        return verify_drafts(rows, draft, depth, mode), True
    while True:
        try:
            return verify_drafts(rows, None, 0, mode), False
        except KVMemoryError:
            if rows.is_alone:
                raise
            rows.make_room()


def verify_drafts(rows: RowScheduler, draft: Draft | None, depth: int, mode: VerifyMode) -> Verification:
    """Verify each row's last token and its draft in one pass; keep accepted keys and values in the cache.

    Args:
        rows: Running rows.
        draft: Drafted tokens; None for plain decoding.
        depth: Upper limit of the depth of the draft's nodes.
        mode: How drafts are verified.
    """
    verify_pass, parents_BN = _VerifyPass.of(rows, draft, depth), None if draft is None else draft.parents_BN
    verified = () if draft is None else verified_nodes(draft)
    # Copies to the device are queued before the pass: later ones could have to wait for it.
    random_numbers, num_drawn_Bq = verify_pass.random_numbers(mode), verify_pass.num_drawn()
    logits_BqV, hidden_Bqf = verify_pass.computed(parents_BN, verified)
    adjustments = rows.adjustments
    adjusted_BqV = logits_BqV if adjustments is None else adjustments.apply(logits_BqV, draft)
    warped_BqV = warp_logits(adjusted_BqV, rows.sampling, num_drawn_Bq)
    accepted = verify_pass.accepted(warped_BqV, random_numbers, mode)
    if parents_BN is not None:
        rows.target.keep_path(verify_pass.lengths, accepted.path_BM, accepted.counts_B)
        logits_BqV = _gather_tokens(logits_BqV, accepted.path_BM)
        hidden_Bqf = _gather_tokens(hidden_Bqf, accepted.path_BM)
    logprobs_BM = logprobs(logits_BqV, accepted.emitted_BM, rows.sampling)
    if rows.sampling.has_masks or adjustments is not None:
        is_possible_BM = _scores(warped_BqV, accepted) > -torch.inf
        logprobs_BM = logprobs_BM.where(is_possible_BM, torch.nan)
    made = _to_host(accepted, logprobs_BM, hidden_Bqf, is_tree=parents_BN is not None)
    made = replace(made, verified=verified)
    if not rows.sampling.max_top_logprobs:
        return made
    settings = [each.rollout.prompt.sampling for each in rows.running]
    tops = _top_logprobs(*top_logprobs(logits_BqV, rows.sampling), [each.top_logprobs for each in settings])
    return replace(made, top_logprobs=tops)


@dataclass(frozen=True, slots=True, eq=False)
class _VerifyPass:
    """Input of the pass."""

    rows: RowScheduler
    draft: Draft | None
    depth: int
    lengths: list[int]
    tokens_Bq: Tensor
    """Each row's last token and its draft."""
    depths_Bq: Tensor | None
    """Depths of the verified tokens; None for a chain, where they are 0, 1, ..."""

    @classmethod
    def of(cls, rows: RowScheduler, draft: Draft | None, depth: int) -> "_VerifyPass":
        lengths = [each.length for each in rows.running]
        roots_B1 = to_device([[each.last] for each in rows.running], rows.target.device)
        if draft is None:
            return cls(rows, None, 0, lengths, roots_B1, None)
        tokens_Bq = torch.cat((roots_B1, draft.tokens_BN), dim=1)
        if draft.parents_BN is None:
            return cls(rows, draft, draft.tokens_BN.shape[1], lengths, tokens_Bq, None)
        return cls(rows, draft, depth, lengths, tokens_Bq, node_depths(draft.parents_BN, depth))

    def computed(self, parents_BN: Tensor | None, verified: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the logits (B, q, V) and hidden states (B, q, f) of the pass; see `TargetModel.step`."""
        target = self.rows.target
        if self.draft is None and (last_Bf := self.rows.last_Bf) is not None:  # computed with the prompts
            return target.logits(last_Bf[:, None]), last_Bf[:, None]
        counts = [1 + nodes for nodes in verified] if verified else None
        return target.step(self.tokens_Bq, self.lengths, parents_BN, counts)

    def accepted(
        self, warped_BqV: Tensor, random_numbers: Tensor | NoiseKeys | None, mode: VerifyMode
    ) -> AcceptedTokens:
        """Return the accepted path; `random_numbers` is the result of `self.random_numbers`."""
        temperature_B = self.rows.mixed_temperature_B
        if self.draft is not None and mode == "rejection":
            assert isinstance(random_numbers, Tensor)
            return rejection_accept(self.draft, warped_BqV, random_numbers, temperature_B)
        drawn_Bq = coupled_tokens(warped_BqV, random_numbers, temperature_B)
        if self.draft is None:
            zero_B1 = torch.zeros_like(drawn_Bq)
            return AcceptedTokens(zero_B1, zero_B1[:, 0], drawn_Bq)
        return accept_path(self.draft, drawn_Bq, self.depth)

    def random_numbers(self, mode: VerifyMode) -> Tensor | NoiseKeys | None:
        """Return the random numbers of the positions after the verified tokens.

        Returns:
            Noise (B, q, V) or its keys, or None if all rows are greedy; for rejection uniforms (B, q, 2).
        """
        rows, count = range(len(self.lengths)), self.depth + 1
        if self.draft is not None and mode == "rejection":
            return self.rows.noise.uniforms(rows, self._first(), count)
        if self.rows.sampling.all_greedy:
            return None
        if not self.rows.noise.is_ahead:
            offsets = np.arange(count)[None] if self.depths_Bq is None else self.depths_Bq.numpy()
            return self.rows.noise.keys(rows, self._first(), offsets)
        noise_BDV = self.rows.noise.at(rows, self._first(), count)
        return noise_BDV if self.depths_Bq is None else _gather_tokens(noise_BDV, self.depths_Bq)

    def num_drawn(self) -> Tensor | None:
        """Return the number of new tokens before each drawn one, (B, q).

        Returns None if no row has min_new_tokens.
        """
        if self.rows.sampling.min_new_B1 is None:
            return None
        device = self.tokens_Bq.device
        drawn_B1 = to_device([[len(each.rollout.tokens)] for each in self.rows.running], device)
        return drawn_B1 + (
            torch.arange(self.depth + 1, device=device) if self.depths_Bq is None else self.depths_Bq
        )

    def _first(self) -> list[int]:
        """Return the position after each row's root, which is at position `length`."""
        return [length + 1 for length in self.lengths]


def _gather_tokens(x_BqD: Tensor, index_BM: Tensor) -> Tensor:
    """Return the entries of these tokens of each row, (B, M, D)."""
    return x_BqD.gather(1, index_BM[..., None].expand(-1, -1, x_BqD.shape[-1]))


def _scores(warped_BqV: Tensor, accepted: AcceptedTokens) -> Tensor:
    """Return the scores that the emitted tokens were drawn with, (B, M)."""
    vocabulary = warped_BqV.shape[-1]
    return warped_BqV.flatten(1).gather(1, accepted.path_BM * vocabulary + accepted.emitted_BM)


def _top_logprobs(values_BMn: Tensor, tokens_BMn: Tensor, counts: Sequence[int]) -> list[list[TopLogprobs]]:
    """Return the first counts[b] pairs of token and log-probability at each place of row b.

    The list of a row is empty if counts[b] is 0.
    """
    return [
        [tuple(zip(ids[:count], values[:count], strict=True)) for ids, values in zip(*row, strict=True)]
        if count
        else []
        for *row, count in zip(tokens_BMn.tolist(), values_BMn.tolist(), counts, strict=True)
    ]


def _to_host(
    accepted: AcceptedTokens, logprobs_BM: Tensor, features_BMf: Tensor, is_tree: bool
) -> Verification:
    """Copy all results that Python needs with one synchronization.

    float64 represents every token and float32 exactly.
    """
    parts = [accepted.counts_B[:, None], accepted.emitted_BM, logprobs_BM]
    if is_tree:
        parts.append(accepted.path_BM)
    table = torch.cat([part.double() for part in parts], dim=1).tolist()
    most = accepted.emitted_BM.shape[1]
    counts = [1 + int(row[0]) for row in table]

    def part(index: int) -> Iterator[list[float]]:
        first = 1 + index * most
        return (row[first : first + count] for row, count in zip(table, counts, strict=True))

    return Verification(
        tokens=[list(map(int, row)) for row in part(0)],
        logprobs=list(part(1)),
        path=[list(map(int, row)) for row in part(2)] if is_tree else None,
        features_BMf=features_BMf,
    )
