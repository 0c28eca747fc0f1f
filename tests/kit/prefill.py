"""Long prompts, and what an engine computes for them and passes on."""

import torch

from aedit.spec_rollout.sampling import Prompt, Sampling
from kit.rollouts import VOCABULARY


def long_prompts(lengths, *, seed=0, group=-1, max_new_tokens=8, temperature=1.0):
    """Return samples with random prompts of these lengths; those of a group have the same tokens."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (max(lengths) + len(lengths),), generator=draw).tolist()
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature)
    made = []
    for i, length in enumerate(lengths):
        start = 0 if group >= 0 else i
        text = tuple(tokens[start : start + length])
        made.append(Prompt(tokens=text, rollout=seed, sample=i, group=group, sampling=sampling))
    return made


def watched(engine, monkeypatch):
    """Return a list of events that grows.

    It is "pass" for each pass over running samples, and a list of (row, start, number of tokens) for each
    prefill.
    """
    events = []
    prefill, step = engine.target.prefill, engine.target.step

    def seen_prefill(segments):
        events.append([(segment.row, segment.start, len(segment.tokens)) for segment in segments])
        return prefill(segments)

    def seen_step(*args):
        events.append("pass")
        return step(*args)

    monkeypatch.setattr(engine.target, "prefill", seen_prefill)
    monkeypatch.setattr(engine.target, "step", seen_step)
    return events


class Recorder:
    """Feature sink that keeps all it receives, by row, and the ended samples."""

    def __init__(self):
        self.rows, self.ended = {}, []

    def begin(self, rows, version):
        for begun in rows:
            assert begun.row not in self.rows
            assert len(begun.features_Td) == len(begun.tokens) - 1
            self.rows[begun.row] = [
                list(begun.tokens),
                [begun.features_Td.clone()],
                begun.num_prompt,
                version,
            ]

    def update(self, taken, version):
        for row, tokens in enumerate(taken.tokens):
            assert self.rows[row][3] == version
            self.rows[row][0] += tokens
            self.rows[row][1].append(taken.features[row, : len(tokens)].clone())

    def move(self, source, target):
        assert target not in self.rows
        self.rows[target] = self.rows.pop(source)

    def end(self, row, finished):
        self.ended.append((*self.rows.pop(row), finished))

    def status(self):
        return {}


def features_of(policy, tokens):
    """Return transformers' last hidden states, after the final norm."""
    with torch.no_grad():
        return policy.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
