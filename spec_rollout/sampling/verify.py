"""Verification of drafted tokens in coupled mode, and by rejection sampling.

Coupled sampling: the token after position t is defined as the argmax of log p / T plus the Gumbel noise of
position t + 1 (`noise`). So the emitted tokens do not depend on the draft; only the number of tokens per pass
does. Greedy decoding is T = 0 without noise. A drafter that uses the same noise matches the token more often
(Daliri, Musco and Suresh 2024).

Shapes: B rows, N drafted nodes, q = N + 1 verified tokens (token 0 is the root, node n is token n + 1), D
levels of nodes, V vocabulary. No function synchronizes with the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.spec_rollout.drafters import Draft
from aedit.spec_rollout.sampling.noise import NoiseKeys
from aedit.spec_rollout.sampling.noisy_argmax import noisy_argmax


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """Tokens that one step emits. The first counts_B[b] + 1 entries of row b are valid."""

    path_BM: Tensor
    """int64, M = D + 1: indices of the accepted tokens, from the root (0) down."""
    counts_B: Tensor
    """int64, 0 to D: number of accepted drafted nodes."""
    emitted_BM: Tensor
    """int64: the token after each of them."""


def coupled_tokens(
    warped_BqV: Tensor, noise_BqV: Tensor | NoiseKeys | None, temperature_B: Tensor | None = None
) -> Tensor:
    """Return the token after each verified one, (B, q) int64, the lowest id among equals.

    Args:
        warped_BqV: Result of `distribution.warp_logits`.
        noise_BqV: Noise of the position of the drawn token: t + 1 + j at depth j under a root at t, or its
            keys. None if all rows are greedy.
        temperature_B: Temperatures; rows at 0 ignore the noise. None if no row is greedy.
    """
    if noise_BqV is None:
        return _argmax(warped_BqV)
    if isinstance(noise_BqV, NoiseKeys):
        drawn_Bq = noisy_argmax(warped_BqV, noise_BqV)
        if temperature_B is None:
            return drawn_Bq
        return drawn_Bq.where((temperature_B > 0)[:, None], _argmax(warped_BqV))
    if temperature_B is not None:
        noise_BqV = noise_BqV * (temperature_B > 0)[:, None, None]
    return _argmax(warped_BqV + noise_BqV)


def _argmax(x_BqV: Tensor) -> Tensor:
    """Return the index of the largest number, the first among equals."""
    if x_BqV.device.type != "cpu":
        return x_BqV.argmax(-1)
    return torch.from_numpy(x_BqV.numpy().argmax(-1))  # takes a tenth of the time


def accept_path(draft: Draft, tokens_Bq: Tensor, depth: int | None = None) -> AcceptedTokens:
    """Follow the drawn tokens from the root through the draft and return the accepted path.

    Of two children with the same token the first is taken.

    Args:
        draft: Chain or tree.
        tokens_Bq: int64, the token drawn after each verified one.
        depth: Upper limit of the depth of a tree's nodes, if known.
    """
    guesses_BN = draft.tokens_BN
    num_nodes = guesses_BN.shape[1]
    nodes_N = torch.arange(num_nodes, device=guesses_BN.device)
    if draft.counts_B is not None:
        guesses_BN = guesses_BN.where(nodes_N < draft.counts_B[:, None], -1)
    if draft.parents_BN is None:
        counts_B = (guesses_BN == tokens_Bq[:, :-1]).long().cumprod(1).sum(1)
        path = torch.arange(tokens_Bq.shape[1], device=tokens_Bq.device)
        return AcceptedTokens(path.expand_as(tokens_Bq), counts_B, tokens_Bq)
    return _accept_tree(guesses_BN, draft.parents_BN, tokens_Bq, depth or num_nodes)


def _accept_tree(guesses_BN: Tensor, parents_BN: Tensor, tokens_Bq: Tensor, depth: int) -> AcceptedTokens:
    """Find each token's matching child, then follow these links from the root."""
    num_rows, q = tokens_Bq.shape
    tokens_1q1 = torch.arange(q, device=tokens_Bq.device)[:, None]
    is_child_BqN = (parents_BN + 1)[:, None] == tokens_1q1
    found_Bq, child_Bq = (is_child_BqN & (guesses_BN[:, None] == tokens_Bq[..., None])).max(-1)
    no_child = q
    next_Bq1 = torch.full((num_rows, q + 1), no_child, device=tokens_Bq.device)
    next_Bq1[:, :q] = (child_Bq + 1).where(found_Bq, no_child)
    path = [next_Bq1.new_zeros(num_rows, 1)]
    for _ in range(depth):
        path.append(next_Bq1.gather(1, path[-1]))
    path_BM = torch.cat(path, dim=1)
    counts_B = (path_BM < no_child).sum(1) - 1
    path_BM = path_BM.clamp_(max=q - 1)
    return AcceptedTokens(path_BM, counts_B, tokens_Bq.gather(1, path_BM))


def node_depths(parents_BN: Tensor, depth: int | None = None) -> Tensor:
    """Return the depth of each verified token, (B, q) int64: 0 for the root, 1 for its children.

    Args:
        parents_BN: int64, parent of each node, -1 for the root.
        depth: Upper limit of the depths, if known.
    """
    up_Bq = torch.cat((parents_BN.new_zeros(len(parents_BN), 1), parents_BN + 1), dim=1)
    depths_Bq = torch.zeros_like(up_Bq)
    at_Bq = torch.arange(up_Bq.shape[1], device=up_Bq.device).expand_as(up_Bq)
    for _ in range(depth or parents_BN.shape[1]):
        depths_Bq += at_Bq > 0
        at_Bq = up_Bq.gather(1, at_Bq)
    return depths_Bq


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
