"""Rejection sampling of drafted chains, the second verification mode.

Speculative sampling (Leviathan, Kalman and Matias 2023, algorithm 1; Chen et al. 2023): a token x drawn from
q is accepted with probability min(1, p(x) / q(x)). The first rejected token is replaced by a draw from max(p
- q, 0); after a chain that is accepted as a whole, one more token is drawn from p. The emitted tokens are
distributed as p. Unlike in coupled mode, the tokens themselves depend on the drafts.

All randomness is looked up by position: drafts use the Gumbel noise, acceptance and replacement use the
uniforms. A position may be drafted and verified in several passes with the same numbers. This is sound
because nothing that is emitted before a position's own token depends on the numbers of that position.

Shapes: B rows, N drafted nodes of a chain, q = N + 1 verified tokens, V vocabulary.
"""

import torch
from torch import Tensor

from aedit.spec_rollout.drafters import Draft
from aedit.spec_rollout.sampling.verify import AcceptedTokens


def rejection_accept(
    draft: Draft, warped_BqV: Tensor, uniforms_Bq2: Tensor, temperature_B: Tensor | None = None
) -> AcceptedTokens:
    """Return the accepted prefix of a chain and the token after it.

    Args:
        draft: Chain; its `logq_BNV` is the distribution that the tokens were drawn from.
        warped_BqV: Result of `distribution.warp_logits`.
        uniforms_Bq2: `noise.uniforms` at the positions of the q tokens that may be emitted.
        temperature_B: Temperatures; rows at 0 emit the argmax. None if no row is greedy.

    Raises:
        ValueError: The draft is a tree.
    """
    if draft.parents_BN is not None:
        raise ValueError("rejection sampling verifies chains only, got a tree: use coupled mode for trees")
    guesses_BN = draft.tokens_BN
    if temperature_B is not None:
        # Rows at temperature 0: all probability on the argmax.
        best_Bq1 = warped_BqV.argmax(-1, keepdim=True)
        best_BqV = torch.full_like(warped_BqV, -torch.inf).scatter(-1, best_Bq1, 0.0)
        warped_BqV = warped_BqV.where((temperature_B > 0)[:, None, None], best_BqV)
    is_accepted_BN = _is_accepted(
        uniforms_Bq2[:, :-1, 0], _p_of_guesses(guesses_BN, warped_BqV), _q_of_guesses(draft)
    )
    is_real_BN = _is_real(draft)
    counts_B1 = (is_accepted_BN & is_real_BN).long().cumprod(1).sum(1, keepdim=True)
    p_BV = _rows_at(warped_BqV, counts_B1).double().softmax(-1)
    left_BV = _residual(p_BV, _q_of_rejected(draft, is_real_BN, counts_B1, p_BV))
    # Draw by inversion; right=True never draws a weight of 0.
    sums_BV, u_B1 = left_BV.cumsum(-1), uniforms_Bq2[..., 1].gather(1, counts_B1)
    next_B1 = torch.searchsorted(sums_BV, u_B1 * sums_BV[:, -1:], right=True)
    next_B1.clamp_(max=sums_BV.shape[1] - 1)  # sums of NaN contain no u
    emitted_Bq = torch.cat((guesses_BN, next_B1), dim=1).scatter(1, counts_B1, next_B1)
    path = torch.arange(emitted_Bq.shape[1], device=emitted_Bq.device)
    return AcceptedTokens(path.expand_as(emitted_Bq), counts_B1[:, 0], emitted_Bq)


def _is_real(draft: Draft) -> Tensor:
    """Return which nodes are drafted tokens and not padding, (B, N)."""
    nodes_N = torch.arange(draft.tokens_BN.shape[1], device=draft.tokens_BN.device)
    if draft.counts_B is None:
        return (nodes_N >= 0).expand_as(draft.tokens_BN)
    return nodes_N < draft.counts_B[:, None]


def _p_of_guesses(guesses_BN: Tensor, warped_BqV: Tensor) -> Tensor:
    x_BNV = warped_BqV[:, :-1]
    chosen_BN = x_BNV.gather(-1, guesses_BN[..., None])[..., 0]
    return (chosen_BN.double() - x_BNV.logsumexp(-1)).exp()


def _q_of_guesses(draft: Draft) -> Tensor:
    if draft.logq_BNV is None:
        return torch.ones_like(draft.tokens_BN, dtype=torch.float64)
    return draft.logq_BNV.gather(-1, draft.tokens_BN[..., None])[..., 0].double().exp()


def _is_accepted(u: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Return true with probability min(1, p / q), and never where p is 0."""
    return u * q < p


def _q_of_rejected(draft: Draft, is_real_BN: Tensor, counts_B1: Tensor, p_BV: Tensor) -> Tensor:
    """Return q of the first rejected token, (B, V); zeros after a chain that was accepted as a whole."""
    num_nodes = draft.tokens_BN.shape[1]
    if num_nodes == 0:
        return torch.zeros_like(p_BV)
    node_B1 = counts_B1.clamp(max=num_nodes - 1)
    if draft.logq_BNV is None:
        q_BV = torch.zeros_like(p_BV).scatter(1, draft.tokens_BN.gather(1, node_B1), 1.0)
    else:
        q_BV = _rows_at(draft.logq_BNV, node_B1).double().exp()
    has_failed_B1 = (counts_B1 < num_nodes) & is_real_BN.gather(1, node_B1)
    return q_BV * has_failed_B1


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """Return max(p - q, 0), not normalized; p where rounding leaves nothing, as p and q are equal there."""
    left = (p - q).clamp_(min=0)
    return left.where(left.sum(-1, keepdim=True) > 0, p)


def _rows_at(x_BmV: Tensor, index_B1: Tensor) -> Tensor:
    return x_BmV.gather(1, index_B1[..., None].expand(-1, -1, x_BmV.shape[-1]))[:, 0]
