"""Compare plain decoding with `transformers.generate` on the same policy.

`generate` has no queue: it ends when its longest answer does. So this race differs from that of stream.py: a
batch of prompts with long answers, in both with a fixed number of new tokens and no stop token. Prompts are
padded on the left, for `generate` only. Its drafts (prompt lookup, a smaller policy) work for one prompt at a
time, with their default settings.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Sampling
from benchmarks.policies import Policy, prompts, tasks
from benchmarks.rollout_parts.same import Same
from benchmarks.rollout_parts.stream import MAX_PROMPT

OURS, THEIRS, LOOKUP, ASSISTED = "plain", "generate", "prompt lookup", "assisted"
LOOKUP_TOKENS = 10
_config: Any = GenerationConfig  # it carries no types


@dataclass(frozen=True, slots=True, eq=False)
class Theirs:
    """Inputs of `generate`."""

    policy: Policy
    model: PreTrainedModel
    assistant: PreTrainedModel | None
    """None: no assisted generation."""
    num_new: int
    """Tokens of each answer."""
    temperature: float

    def race(self, rows: int, repeats: int, rng: random.Random) -> tuple[dict[str, list[float]], Same]:
        """Return the tokens per second of each way, by repeat, and at T = 0 the comparison of tokens."""
        engine = Engine(Target.of(self.model, rows=rows, max_tokens=MAX_PROMPT + self.num_new))
        asked = self._prompts(rows * (repeats + 1))
        ways = self._ways(engine, rows)
        for way in ways.values():
            way(asked[:rows])
        found: dict[str, list[float]] = {name: [] for name in ways}
        same = Same()
        for repeat in range(1, repeats + 1):
            batch, said = asked[rows * repeat : rows * (repeat + 1)], {}
            for name in rng.sample(list(ways), len(ways)):
                began_s = time.perf_counter()
                said[name] = ways[name](batch)
                found[name].append(rows * self.num_new / (time.perf_counter() - began_s))
            if self.temperature == 0:
                pairs = zip(batch, said[OURS], said[THEIRS], strict=True)
                same += sum((Same.of_tokens(self.model, *pair) for pair in pairs), Same())
        return found, same

    def _ways(self, engine: Engine, rows: int) -> dict[str, Callable[[Sequence[Prompt]], list[list[int]]]]:
        ways: dict[str, Callable[[Sequence[Prompt]], list[list[int]]]] = {
            OURS: partial(_ours, engine),
            THEIRS: self._generate,
        }
        if rows == 1:
            ways[LOOKUP] = partial(self._generate, lookup=LOOKUP_TOKENS)
            if self.assistant is not None:
                ways[ASSISTED] = partial(self._generate, by=self.assistant)
        return ways

    def _generate(
        self, batch: Sequence[Prompt], by: PreTrainedModel | None = None, lookup: int | None = None
    ) -> list[list[int]]:
        longest, pad = max(len(prompt.tokens) for prompt in batch), ByteTokenizer().eos_id
        padded = [[pad] * (longest - len(p.tokens)) + [*p.tokens] for p in batch]
        real = [[0] * (longest - len(p.tokens)) + [1] * len(p.tokens) for p in batch]
        ids, mask = (torch.tensor(numbers, device=self.model.device) for numbers in (padded, real))
        config = _config(
            max_new_tokens=self.num_new,
            pad_token_id=pad,
            use_cache=True,
            prompt_lookup_num_tokens=lookup,
            do_sample=self.temperature > 0,
            temperature=self.temperature or None,
            top_k=0 if self.temperature > 0 else None,
        )
        untyped: Any = self.model  # its methods carry no types
        with torch.inference_mode():
            made = untyped.generate(ids, attention_mask=mask, generation_config=config, assistant_model=by)
        answers: list[list[int]] = made[:, longest:].tolist()
        if any(len(answer) != self.num_new for answer in answers):
            raise RuntimeError(f"generate has ended early: {len(answers[0])} tokens, not {self.num_new}")
        return answers

    def _prompts(self, num: int) -> list[Prompt]:
        """Return questions whose right answers are long enough."""
        sampling = Sampling(temperature=self.temperature, max_new_tokens=self.num_new)
        if self.policy.task == "python":
            texts = prompts(self.policy, num, seed=1)
        else:
            drawn = (task for chunk in count(1 << 20) for task in tasks(64, chunk))
            long = (t for t in drawn if len(t.answer) >= self.num_new and len(t.prompt) <= MAX_PROMPT)
            texts = [tuple(t.prompt.encode()) for t in islice(long, num)]
        return [Prompt(tokens=text, sample=i, sampling=sampling) for i, text in enumerate(texts)]


def without_stop(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model, with no token at which `generate` would stop."""
    config: Any = model.generation_config
    config.eos_token_id = None
    return model


def _ours(engine: Engine, batch: Sequence[Prompt]) -> list[list[int]]:
    rollouts = [engine.add(prompt) for prompt in batch]
    while engine.running or engine.waiting:
        engine.step()
    return [rollout.tokens for rollout in rollouts]
