"""Samples of an engine as a server would send them, and Philox and Gumbel noise in plain Python and NumPy."""

import numpy as np

from aedit.spec_rollout.audit import HeldRollout
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.sampling import Prompt, Sampling, encode_sampling

PROMPT = (3, 1, 4, 1, 5)
WORD = 0xFFFFFFFF


def generate(model, count=1, *, sampling=None, version=1, first=0, tokens=PROMPT):
    """Return finished rollouts of an engine for `model`, with the keys (7, first), (7, first + 1), ..."""
    engine = Engine.of(model, rows=max(1, min(8, count)), max_tokens=128)
    engine.update_weights(None, version)
    chosen = sampling or Sampling(max_new_tokens=24, stop_tokens=(0,))
    prompts = [Prompt(tokens=tokens, rollout=7, sample=first + i, sampling=chosen) for i in range(count)]
    return sorted(engine.generate(prompts), key=lambda each: each.prompt.sample)


def held(rollout, *, server="a", start=0, **changes):
    """Return a rollout as a server sends it, with some fields replaced."""
    fields = {
        "server": server,
        "public_key": b"k" * 32,
        "key": rollout.prompt.key,
        "prompt": rollout.prompt.tokens,
        "sampling": encode_sampling(rollout.prompt.sampling),
        "tokens": tuple(rollout.tokens),
        "logprobs": tuple(rollout.logprobs),
        "versions": tuple(rollout.versions),
        "start": start,
        "finish_reason": rollout.finish_reason,
    }
    return HeldRollout(**fields | changes)


def philox(counter, key):
    """Return four words of Philox4x32-10, for four counter words and two key words, all int."""
    c, k = list(counter), list(key)
    for _ in range(10):
        low, high = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(high >> 32) ^ c[1] ^ k[0], high & WORD, (low >> 32) ^ c[3] ^ k[1], low & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def noise(key, position, vocabulary):
    """Return the Gumbel noise of a place in float64."""
    rollout, sample = (number % 2**64 for number in key)
    words = []
    for block in range(-(-vocabulary // 4)):
        words += philox((block, position, rollout >> 32, sample >> 32), (rollout & WORD, sample & WORD))
    u = (np.array(words[:vocabulary], dtype=np.float64) + 0.5) / 2**32
    times, now = -np.log(u), 0.0
    if vocabulary >= 2**14:
        marked = {}
        for block in range(vocabulary // 2**8):
            counter = (2**31 + block, position, rollout >> 32, sample >> 32)
            first, second, gap, _ = philox(counter, (rollout & WORD, sample & WORD))
            now += -np.log((gap + 0.5) / 2**32) / vocabulary
            marked.setdefault((first * 2**32 + second) * vocabulary // 2**64, now)
        times += now
        times[list(marked)] = list(marked.values())
    return -np.log(times)
