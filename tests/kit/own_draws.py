"""An independent check of drawn tokens: full forward passes of transformers' model, and NumPy for the rest.

It imports nothing of the package. The token at a position is the one with the largest
logits / T + noise(rollout, sample, position, token) in float64, among those that mask, top-k and top-p keep;
the noise is -log t, with times t from words of Philox4x32-10 (Salmon et al., SC 2011): -log u of the token's
word, or from 16,384 tokens on the token's first arrival among V / 256 of a Poisson process of rate V, or for
other tokens the last arrival plus -log u.
"""

from copy import deepcopy
from itertools import count

import numpy as np
import torch

WORD = np.uint64(0xFFFFFFFF)
BORDER = 1e-5
"""Rounding of a float32 policy may put a token on either side of top-p within this."""


def philox4x32(counter, key):
    """Return four words for counters of four words, uint64 arrays that broadcast, under a key of two."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = (np.uint64(word) for word in key)
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (second >> np.uint64(32)) ^ c1 ^ k0,
            second & WORD,
            (first >> np.uint64(32)) ^ c3 ^ k1,
            first & WORD,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & WORD, (k1 + np.uint64(0xBB67AE85)) & WORD
    return c0, c1, c2, c3


def gumbel_noise(rollout, sample, positions, vocabulary):
    """Return the noise, (positions, vocabulary), float64."""
    blocks = np.arange(-(-vocabulary // 4), dtype=np.uint64)[None]
    low, high = 0xFFFFFFFF, 32
    counter = (
        blocks,
        np.asarray(positions, np.uint64)[:, None],
        (rollout >> high) & low,
        (sample >> high) & low,
    )
    words = np.stack(np.broadcast_arrays(*philox4x32(counter, (rollout & low, sample & low))), -1)
    times = waits(words.reshape(len(positions), -1)[:, :vocabulary])
    if vocabulary >= 16_384:
        blocks = np.arange(vocabulary // 256, dtype=np.uint64)[None] | np.uint64(0x80000000)
        upper, lower, gaps, _ = philox4x32((blocks, *counter[1:]), (rollout & low, sample & low))
        arrivals = np.cumsum(waits(gaps) / vocabulary, axis=1)
        times += arrivals[:, -1:]
        for row, at in np.ndindex(*arrivals.shape):
            token = ((int(upper[row, at]) << 32 | int(lower[row, at])) * vocabulary) >> 64
            times[row, token] = min(times[row, token], arrivals[row, at])
    return -np.log(times)


def waits(words):
    """Return -log of the uniform numbers that words stand for: waiting times of rate 1."""
    return -np.log((words.astype(np.float64) + 0.5) / 2.0**32)


def kept(scores, sampling, top_p):
    """Return which tokens top-k and top-p keep; scores: (T, V), divided by the temperature."""
    keep = np.ones(scores.shape, bool)
    if sampling.top_k:
        kth = np.sort(scores, axis=1)[:, -min(sampling.top_k, scores.shape[1])]
        keep = scores >= kth[:, None]
    if top_p < 1:
        shown = np.where(keep, scores, -np.inf)
        order = np.argsort(-shown, axis=1)
        p = np.exp(shown - shown.max(1, keepdims=True))
        p = np.take_along_axis(p / p.sum(1, keepdims=True), order, 1)
        before = np.cumsum(p, 1) - p
        in_order = before < top_p
        keep = np.zeros(scores.shape, bool)
        np.put_along_axis(keep, order, in_order, 1)
        keep &= shown > -np.inf
    return keep


def shortfalls(logits, prompt, tokens):
    """Return by how much the score of each token is below the best one, (T,); inf if it was not to be drawn.

    logits: (T, V), float64, those that drew the tokens.
    """
    sampling = prompt.sampling
    logits = logits.copy()
    logits[: sampling.min_new_tokens, list(sampling.stop_tokens)] = -np.inf
    own = np.arange(len(tokens)), np.asarray(tokens)
    if sampling.temperature == 0:
        return logits.max(1) - logits[own]
    scores = logits / sampling.temperature
    positions = len(prompt.tokens) + np.arange(len(tokens))
    noisy = scores + gumbel_noise(prompt.rollout, prompt.sample, positions, logits.shape[1])
    found = np.full(len(tokens), np.inf)
    for top_p in {sampling.top_p} | (
        {sampling.top_p - BORDER, sampling.top_p + BORDER} - {1 + BORDER, 1 - BORDER}
    ):
        allowed = np.where(kept(scores, sampling, top_p), noisy, -np.inf)
        found = np.minimum(found, allowed.max(1) - allowed[own])
    return found


def ends_where_it_should(prompt, tokens):
    """Return true if the sample ends at its first stop token or at its limit."""
    sampling = prompt.sampling
    stops = (
        i
        for i in count()
        if i >= len(tokens) or (tokens[i] in sampling.stop_tokens and i >= sampling.min_new_tokens)
    )
    return len(tokens) == min(next(stops) + 1, sampling.max_new_tokens)


class Judge:
    """Judges rollouts of policies by their own full forward passes in float64."""

    def __init__(self, *policies):
        """Take the policy of version 0, and those of odd and even versions after it."""
        self.policies = [deepcopy(policy).double() for policy in policies]
        self._known = {}

    def shortfalls(self, rollouts):
        """Return the shortfalls of the tokens of each rollout, each under the version that drew it."""
        asked = {self._key(rollout): rollout for rollout in rollouts}
        new = [rollout for key, rollout in asked.items() if key not in self._known]
        for start in range(0, len(new), 32):
            self._judge(new[start : start + 32])
        return [self._known[self._key(rollout)] for rollout in rollouts]

    @staticmethod
    def _key(rollout):
        prompt = rollout.prompt
        drawn_by = tuple(version % 2 for version in rollout.versions)
        return prompt.rollout, prompt.sample, tuple(rollout.tokens), drawn_by

    @torch.no_grad()
    def _judge(self, rollouts):
        texts = [[*each.prompt.tokens, *each.tokens] for each in rollouts]
        longest = max(map(len, texts))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        drawn_by = [np.array(each.versions) % len(self.policies) for each in rollouts]
        asked = {int(i) for versions in drawn_by for i in versions}
        logits = {i: self.policies[i](input_ids=padded, use_cache=False).logits.numpy() for i in asked}
        for row, each in enumerate(rollouts):
            at = len(each.prompt.tokens) - 1 + np.arange(len(each.tokens))
            of_tokens = np.stack([logits[int(i)][row, t] for i, t in zip(drawn_by[row], at, strict=True)])
            self._known[self._key(each)] = shortfalls(of_tokens, each.prompt, each.tokens)
