"""A policy and a drafter so small that the probability of every possible text is known.

Both are tables: the policy conditions on the last two tokens, the drafter on the last one. Enough rows are
rolled out at once to detect a wrong distribution, with the package's own noise, verification and rejection.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import stats

from aedit.spec_rollout.drafters import Draft
from aedit.spec_rollout.sampling import accept_path, coupled_tokens, gumbel, node_depths, rejection_accept
from aedit.spec_rollout.sampling.noise import uniforms

V = 8
LENGTH = 4
START, START_POSITION = 0, 5
DEPTH = 3
TREE_PARENTS = (-1, -1, 0, 0, 1, 2)


@dataclass(frozen=True)
class World:
    """Log-probabilities: the policy's after two tokens, (V, V, V), the drafter's after one, (V, V)."""

    policy: torch.Tensor
    drafter: torch.Tensor


def world(seed=3):
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(V, V, generator=generator, dtype=torch.float64)
    apart = 0.9 * torch.randn(V, V, V, generator=generator, dtype=torch.float64)
    return World((shared + apart).log_softmax(-1), shared.log_softmax(-1))


def total_variation(made):
    """Return the total variation of policy and drafter, averaged over the preceding tokens."""
    return float((made.policy.exp() - made.drafter.exp()).abs().sum(-1).mean() / 2)


@dataclass(frozen=True)
class Rows:
    """Rows before a step: their ids, last tokens, and numbers of tokens."""

    ids: torch.Tensor
    before: torch.Tensor
    """Tokens before the roots."""
    roots: torch.Tensor
    counts: torch.Tensor

    def positions(self, count):
        """Return the positions of the next tokens, (B, count)."""
        return START_POSITION + 1 + self.counts[:, None] + torch.arange(count)


def rolled_out(step, num, at_a_time=10_000):
    """Return (num, LENGTH) texts made by `step(rows) -> Accepted`, each row until it is long enough."""
    parts = [torch.arange(first, min(first + at_a_time, num)) for first in range(0, num, at_a_time)]
    return torch.cat([_some_rolled_out(step, ids) for ids in parts])


def _some_rolled_out(step, ids):
    texts = torch.full((len(ids), 2 + LENGTH + DEPTH + 1), START)
    counts = torch.zeros(len(ids), dtype=torch.long)
    while len(live := (counts < LENGTH).nonzero()[:, 0]):
        before, roots = (texts[live, counts[live] + place] for place in (0, 1))
        accepted = step(Rows(ids[live], before, roots, counts[live]))
        places = torch.arange(accepted.emitted_BM.shape[1])
        row, place = (places <= accepted.counts_B[:, None]).nonzero(as_tuple=True)
        texts[live[row], 2 + counts[live[row]] + place] = accepted.emitted_BM[row, place]
        counts[live] += accepted.counts_B + 1
    return texts[:, 2 : 2 + LENGTH]


def logits_of(made, rows, draft):
    """Return the policy's logits after each verified token, (B, q, V)."""
    tokens = torch.cat((rows.roots[:, None], draft.tokens_BN), dim=1)
    parents = draft.parents_BN
    parents = torch.arange(-1, DEPTH - 1) if parents is None else parents[0]
    before = torch.cat((rows.before[:, None], tokens[:, parents + 1]), dim=1)
    return made.policy[before, tokens]


def plain(made):
    """Sample without drafts, by the definition: the argmax of log p and the noise of the token's position."""

    def step(rows):
        noise = gumbel(rows.ids, rows.ids, rows.positions(1), V, torch.float64)
        tokens = (made.policy[rows.before, rows.roots][:, None] + noise).argmax(-1)
        nothing = torch.zeros(len(tokens), 0, dtype=torch.long)
        return accept_path(Draft(nothing, None, None, nothing.double()), tokens)

    return step


def chain_lengths(rows):
    """Return chain lengths of 1, 2 or 3 that depend on the past only."""
    return 1 + rows.roots % DEPTH


def draw_chain(made, rows):
    """Draw DEPTH tokens from the drafter with the noise of their positions; return them and their logits."""
    noise = gumbel(rows.ids, rows.ids, rows.positions(DEPTH), V, torch.float64)
    tokens, logq, before = [], [], rows.roots
    for i in range(DEPTH):
        logq.append(made.drafter[before])
        before = (logq[-1] + noise[:, i]).argmax(-1)
        tokens.append(before)
    tokens, logq = torch.stack(tokens, 1), torch.stack(logq, 1)
    counts = chain_lengths(rows)
    # Filler: whoever takes it for a guess says 0 too often.
    tokens = tokens.where(torch.arange(DEPTH) < counts[:, None], 0)
    return Draft(tokens, None, counts, torch.zeros(tokens.shape), logq)


def draw_tree(made, rows):
    """Draw the best two tokens under each of TREE_PARENTS, by the drafter and the noise per position."""
    noise = gumbel(rows.ids, rows.ids, rows.positions(DEPTH), V, torch.float64)
    said = [rows.roots]
    depths = [0]
    for n, parent in enumerate(TREE_PARENTS):
        sibling = TREE_PARENTS[:n].count(parent)
        best = (made.drafter[said[parent + 1]] + noise[:, depths[parent + 1]]).topk(2).indices
        said.append(best[:, sibling])
        depths.append(depths[parent + 1] + 1)
    tokens = torch.stack(said[1:], 1)
    return Draft(tokens, torch.tensor([TREE_PARENTS]).expand_as(tokens), None, torch.zeros(tokens.shape))


def same(rows, draft, logits):
    return draft, logits


def by_rejection(made, change=same, draft=draw_chain, shift=lambda numbers: numbers):
    """Return a step that verifies by rejection.

    change: how a mutant alters the draft and the logits it is verified with; shift: of the uniforms.
    """

    def step(rows):
        guess = draft(made, rows)
        guess, logits = change(rows, guess, logits_of(made, rows, guess))
        return rejection_accept(guess, logits, shift(uniforms(rows.ids, rows.ids, rows.positions(DEPTH + 1))))

    return step


def by_coupling(made, change=same, draft=draw_chain, shift=0):
    """Return a step that verifies by coupling.

    shift: of the positions whose noise verification takes.
    """

    def step(rows):
        guess = draft(made, rows)
        guess, logits = change(rows, guess, logits_of(made, rows, guess))
        noise = gumbel(rows.ids, rows.ids, rows.positions(DEPTH + 1) + shift, V, torch.float64)
        if guess.parents_BN is not None:
            depths = node_depths(guess.parents_BN)
            noise = noise.gather(1, depths[..., None].expand(-1, -1, V))
        return accept_path(guess, coupled_tokens(logits, noise))

    return step


def point_masses(rows, draft, logits):
    return replace(draft, logq_BNV=None), logits


def p_value(texts, made):
    """Return the p-value of Pearson's chi-square over all V ** LENGTH texts, rare ones pooled."""
    chances = made.policy.exp().numpy()
    exact = chances[START, START]
    before = START * V + np.arange(V)  # the last two tokens of each text, as one number
    for _ in range(LENGTH - 1):
        exact = (exact[:, None] * chances.reshape(V * V, V)[before]).ravel()
        before = (before[:, None] % V * V + np.arange(V)).ravel()
    powers = V ** np.arange(LENGTH - 1, -1, -1)
    seen = np.bincount(texts.numpy() @ powers, minlength=exact.size)
    return chi_square(seen, exact * len(texts))


def chi_square(seen, expected):
    rare = expected < 5
    if rare.any():
        seen, expected = (np.append(x[~rare], x[rare].sum()) for x in (seen, expected))
    return float(stats.chisquare(seen, expected).pvalue)
