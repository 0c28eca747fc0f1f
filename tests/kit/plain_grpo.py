"""A policy-gradient loop in plain PyTorch, float64 and one sample at a time, and records to compare with it.

Rewards, advantages, losses and AdamW are written here again, from their definitions.
"""

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from kit.policy_losses import Case, gradient

END = 256
"""End-of-text token of the tokenizer `byte`."""


@dataclass
class Recording:
    """What a node has done: plain values, which a process can send."""

    start: dict = field(default_factory=dict)
    batches: list = field(default_factory=list)
    """Per batch its groups; a group is a list of (prompt, tokens, log-probabilities, versions, reward)."""
    steps: list = field(default_factory=list)
    """After each inner step, before any round: (gradients before they are clipped, weights)."""

    def watch(self, node):
        """Record what `node` does from now on."""
        model, stream, sync = node.sync.model, node.objective.stream, node.sync
        self.start = whole(model.named_parameters())
        gradients = {}

        def next_batch(original=stream.next_batch):
            groups = original()
            self.batches.append([_plain(group) for group in groups])
            return groups

        def average(original=sync.average_gradients):
            gradients.update(whole((name, p.grad) for name, p in model.named_parameters()))
            original()

        def step(original=sync.step):
            self.steps.append((dict(gradients), whole(model.named_parameters())))
            original()

        node.objective.stream = _Followed(stream, next_batch)
        sync.average_gradients, sync.step = average, step


class _Followed:
    """A stream whose batches are recorded."""

    def __init__(self, stream, next_batch):
        self._stream, self.next_batch = stream, next_batch

    def __getattr__(self, name):
        return getattr(self._stream, name)


def whole(named):
    """Return copies of tensors by name, sharded ones gathered."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in named
    }


def _plain(group):
    return [
        (list(r.prompt.tokens), list(r.tokens), list(r.logprobs), list(r.versions), reward)
        for r, reward in zip(group.rollouts, group.rewards, strict=True)
    ]


def digits(tokens):
    """Return the reward `kit.rl_rewards:digits` of these tokens."""
    text = bytes(token for token in tokens if token != END).decode(errors="replace")
    return sum(" " <= letter <= "?" for letter in text) / max(1, len(text))


def shaped(tokens, rl):
    """Return the reward with the penalty of long answers."""
    over = len(tokens) - (rl.sampling.max_new_tokens - rl.overlong)
    return digits(tokens) - (max(0, over) / rl.overlong if rl.overlong else 0)


def group_advantages(rewards, kind):
    """Return the advantages of the rewards of a group."""
    rewards = np.array(rewards, dtype=np.float64)
    if np.ptp(rewards) < 1e-6:
        return np.zeros(len(rewards))
    if kind == "leave-one-out":
        others = [np.delete(rewards, i).mean() for i in range(len(rewards))]
        return rewards - others
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) if kind == "std" else 1.0)


class PlainTrainer:
    """Trains a float64 copy of `model`, which has the weights of the start."""

    def __init__(self, model, start, config):
        self.model = copy.deepcopy(model).double()
        self.take(start)
        self.config, self.reference = config, copy.deepcopy(self.model)
        self.moments = {name: [0.0, 0.0] for name, _ in self.model.named_parameters()}
        self.count = 0
        self.seen = []
        """Per step: the numbers that the loss was given, and the entropy of each token."""

    def take(self, weights):
        """Continue with these weights."""
        for name, p in self.model.named_parameters():
            p.data.copy_(weights[name])

    def logprobs(self, model, sample):
        """Return log-probabilities and entropies of a sample's tokens at the temperature of sampling."""
        prompt, tokens = sample[0], sample[1]
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logp = (logits / self.config.rl.sampling.temperature).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        return logp[range(len(tokens)), tokens], entropy.detach().numpy()

    def proximal(self, groups):
        """Return the log-probabilities of the samples of a batch before its first step."""
        with torch.no_grad():
            return [self.logprobs(self.model, sample)[0].numpy() for group in groups for sample in group]

    def step(self, groups, proximal):
        """Take an inner step on these groups; return the gradients before they are clipped."""
        rl = self.config.rl
        samples = [sample for group in groups for sample in group]
        A = [group_advantages([shaped(s[1], rl) for s in group], rl.advantage) for group in groups]
        found = [self.logprobs(self.model, sample) for sample in samples]
        with torch.no_grad():
            held = [self.logprobs(self.reference, sample)[0].numpy() for sample in samples]
        shape = len(samples), max(len(sample[1]) for sample in samples)
        case = Case(
            logp=_padded([logp.detach().numpy() for logp, _ in found], shape),
            behaviour=_padded([sample[2] for sample in samples], shape),
            mask=_padded([np.ones(len(sample[1])) for sample in samples], shape) > 0,
            advantages=np.concatenate(A),
            reference=_padded(held, shape),
            proximal=_padded(proximal, shape),
            max_tokens=rl.sampling.max_new_tokens,
        )
        self.seen.append((case, np.concatenate([entropy for _, entropy in found])))
        self.model.zero_grad()
        slopes = gradient(rl.loss, case, rl)
        for (logp, _), slope in zip(found, slopes, strict=True):
            logp.backward(torch.tensor(slope[: len(logp)]))
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        self._adamw(gradients)
        return gradients

    @torch.no_grad()
    def _adamw(self, gradients):
        train, eps = self.config.train, 1e-8
        self.count += 1
        norm = sum((g**2).sum() for g in gradients.values()).sqrt()
        scale = min(1.0, train.grad_clip / (norm + 1e-6))
        for name, p in self.model.named_parameters():
            g, (m, v), (b1, b2) = gradients[name] * scale, self.moments[name], train.betas
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            self.moments[name] = [m, v]
            p.mul_(1 - train.lr * train.weight_decay * (p.ndim >= 2))
            m, v = m / (1 - b1**self.count), v / (1 - b2**self.count)
            p.sub_(train.lr * m / (v.sqrt() + eps))


def _padded(rows, shape):
    found = np.zeros(shape)
    for i, row in enumerate(rows):
        found[i, : len(row)] = row
    return found


def metrics_of(batch, seen, config, version):
    """Return the figures of a batch whose first step had weights of this version.

    seen: what `PlainTrainer` has computed in the steps on it.
    """
    samples = [sample for group in batch for sample in group]
    rewards = [digits(sample[1]) for sample in samples]
    ages = [version - each for sample in samples for each in sample[3]]
    lengths = [len(sample[1]) for sample in samples]
    log_r = np.concatenate([(case.logp - case.behaviour)[case.mask] for case, _ in seen])
    return {
        "reward": np.mean(rewards),
        "solved": np.mean([reward >= config.reward.solved for reward in rewards]),
        "length": np.mean(lengths),
        "length_max": max(lengths),
        "staleness": np.mean(ages),
        "staleness_max": max(ages),
        "mismatch_kl": np.mean(np.expm1(log_r) - log_r),
        "entropy": np.mean(np.concatenate([entropy for _, entropy in seen])),
        "clip_share": np.mean(np.concatenate([_clipped(case, config.rl)[case.mask] for case, _ in seen])),
    }


def _clipped(case, rl):
    """Return which tokens have no gradient of the policy term, by the definition of each loss."""
    A = np.broadcast_to(case.advantages[:, None], case.logp.shape)
    if rl.loss == "dppo-tv":
        moved = np.exp(case.logp) - np.exp(case.behaviour)
        return (A > 0) & (moved > rl.clip_high) | (A < 0) & (moved < -rl.clip_low)
    log_r = case.logp - (case.behaviour if rl.importance == "off" else case.proximal)
    if rl.loss == "gspo":
        log_r = (np.where(case.mask, log_r, 0).sum(1) / case.mask.sum(1))[:, None] + 0 * log_r
    r = np.exp(log_r)
    if rl.loss == "cispo":
        return r > 1 + rl.clip_high
    return (A > 0) & (r > 1 + rl.clip_high) | (A < 0) & (r < 1 - rl.clip_low)
