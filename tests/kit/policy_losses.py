"""Policy losses in float64 NumPy, token by token as the papers write them, and inputs to compare them on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aedit.spec_rollout import LossInputs, LossSettings

BOUND = 20.0


@dataclass(frozen=True)
class Case:
    """A batch of sequences, in float64."""

    logp: Any
    behaviour: Any
    mask: Any
    advantages: Any
    reference: Any
    proximal: Any = None
    max_tokens: int = 9

    @property
    def counts(self):
        return int(self.mask.sum()), int(self.mask.any(1).sum())

    def inputs(self, dtype=torch.float64, **changed):
        """Return what the library reads, with a leaf as logp_BT."""
        tokens, sequences = self.counts
        given = {
            "logp_BT": torch.tensor(self.logp, dtype=dtype, requires_grad=True),
            "behaviour_BT": torch.tensor(self.behaviour, dtype=dtype),
            "mask_BT": torch.tensor(self.mask),
            "advantages_B": torch.tensor(self.advantages, dtype=dtype),
            "reference_BT": torch.tensor(self.reference, dtype=dtype),
            "proximal_BT": None if self.proximal is None else torch.tensor(self.proximal, dtype=dtype),
            "num_tokens": tokens,
            "num_sequences": sequences,
            "max_tokens": self.max_tokens,
        }
        return LossInputs(**given | changed)


def case(seed, *, apart=0.5, sequences=6, tokens=8, proximal=False):
    """Return random sequences of unequal lengths, one of a single token, with gaps; one advantage is 0."""
    rng = np.random.default_rng(seed)
    shape = (sequences, tokens)
    behaviour = np.log(rng.uniform(0.02, 0.98, shape))
    logp = np.minimum(behaviour + apart * rng.standard_normal(shape), -1e-3)
    mask = np.arange(tokens) < rng.integers(2, tokens + 1, sequences)[:, None]
    mask &= rng.uniform(size=shape) > 0.2
    mask[0], mask[1] = np.arange(tokens) == 3, True
    advantages = rng.standard_normal(sequences)
    advantages[2] = 0.0
    reference = logp + 0.3 * rng.standard_normal(shape)
    start = logp + 0.2 * rng.standard_normal(shape) if proximal else None
    return Case(logp, behaviour, mask, advantages, reference, start)


def exp(x):
    return np.exp(np.clip(x, -BOUND, BOUND))


def surrogate(r, A, s):
    return -min(r * A, min(max(r, 1 - s.clip_low), 1 + s.clip_high) * A)


def oracle(name, x, c, s):
    """Return the loss at log-probabilities `x`; what a paper puts under sg[.] is taken at c.logp."""
    tokens, sequences = c.counts
    total = 0.0
    for i in range(len(x)):
        at = [t for t in range(x.shape[1]) if c.mask[i, t]]
        if not at:
            continue
        start = c.logp if c.proximal is None else c.proximal
        off = s.importance == "off"
        A, base = c.advantages[i], c.behaviour if off and s.old_logprobs == "engine" else start
        jump = {t: start[i, t] - c.behaviour[i, t] for t in at}
        if off:
            w = dict.fromkeys(at, 1.0)
        elif s.importance == "token":
            w = {t: min(exp(jump[t]), s.importance_cap) for t in at}
        else:
            w = dict.fromkeys(at, min(exp(sum(jump.values())), s.importance_cap))
        whole = exp(sum(x[i, t] - base[i, t] for t in at) / len(at))
        for t in at:
            r = exp(x[i, t] - base[i, t])
            if name in ("grpo", "dapo", "dr-grpo"):
                term = surrogate(r, A, s)
            elif name == "gspo":
                term = surrogate(whole, A, s)
            elif name == "cispo":
                term = -min(exp(c.logp[i, t] - base[i, t]), 1 + s.clip_high) * A * x[i, t]
            else:
                moved = np.exp(c.logp[i, t]) - np.exp((base if off else c.behaviour)[i, t])
                out = (A > 0 and moved > s.clip_high) or (A < 0 and moved < -s.clip_low)
                term = 0.0 if out else -r * A
            d = c.reference[i, t] - x[i, t]
            term = w[t] * term + s.kl * (w[t] * r) * (np.exp(d) - d - 1)
            divided = {"grpo": sequences * len(at), "gspo": sequences * len(at)}
            divided |= {"dr-grpo": sequences * c.max_tokens}
            total += term / divided.get(name, tokens)
    return total


def gradient(name, c, s, h=1e-6):
    """Return the derivative of the oracle by central differences (B, T)."""
    found = np.zeros_like(c.logp)
    for place in np.ndindex(c.logp.shape):
        up, down = c.logp.copy(), c.logp.copy()
        up[place] += h
        down[place] -= h
        found[place] = (oracle(name, up, c, s) - oracle(name, down, c, s)) / (2 * h)
    return found


SETTINGS = {
    "plain": LossSettings(),
    "unequal clips": LossSettings(clip_low=0.1, clip_high=0.35),
    "token": LossSettings(importance="token", importance_cap=1.3),
    "sequence": LossSettings(importance="sequence", importance_cap=1.7),
    "reference": LossSettings(kl=0.3),
    "trainer": LossSettings(old_logprobs="trainer", kl=0.1),
    "all": LossSettings(clip_low=0.15, clip_high=0.3, importance="token", importance_cap=1.5, kl=0.2),
}
