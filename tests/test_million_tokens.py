"""Compares a million tokens with plain decoding, and each of them with an oracle of its own.

Worlds: policies of several families in float64 and float32. Cells of a world: each drafter (suffix, layers
that have learned and not, an insider that knows the text and lies, one with a constant guess) with chains,
trees and changes of the arm, at several batch sizes; new weights in the middle; samples that move to another
engine and back; prompts in parts; a prefix cache that is off, large, or too small.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle

import pytest
import torch
from kit.drafters import fresh, learned_by_heart
from kit.model_families import tiny_model
from kit.own_draws import Judge, ends_where_it_should, philox4x32
from kit.rollouts import KINDS, VOCABULARY, Flips, Insider, Stubborn, tiny_policy
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter, SuffixDrafter
from aedit.spec_rollout.engine import Engine, EngineLimits
from aedit.spec_rollout.model import make_target
from aedit.spec_rollout.sampling import Prompt, Sampling

WINDOWED = (partial(MistralConfig, sliding_window=24), MistralForCausalLM)
"""(Fewer positions than most samples have.)"""
POLICIES = {
    "llama": lambda dtype, seed: tiny_policy(seed, dtype),
    "qwen3": lambda dtype, seed: tiny_policy(seed, dtype, (Qwen3Config, Qwen3ForCausalLM)),
    "mistral": lambda dtype, seed: tiny_policy(seed, dtype, WINDOWED),
    "gpt-neox": lambda dtype, seed: neox(seed),
}
WORLDS = (
    ("llama", torch.float64, "fast", 1),
    ("llama", torch.float32, "fast", 1),
    ("qwen3", torch.float64, "fast", 2),
    ("mistral", torch.float64, "auto", 2),
    ("gpt-neox", torch.float64, "generic", 1),
)
"""Family, dtype, forward pass, and of how many cells one is taken."""
SHARE = -(-1_000_000 // len(WORLDS))
"""Tokens that each world compares at least."""
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Tokens whose noisy logits differ by less are tied."""
MAX_TOKENS, NODES = 192, 12
USUAL = EngineLimits()
SHAPES = ("1", "4", "8", "3x2x6", "4x3x12")
UPDATE_EVERY, MOVE_EVERY = 17, 5


@dataclass(frozen=True)
class Cell:
    """One way to generate all samples."""

    drafter: str
    shapes: tuple[str, ...]
    """Arms of the drafter, in turn; empty for plain decoding."""
    rows: int
    updates: bool = False
    moves: bool = False
    limits: EngineLimits = USUAL

    def __str__(self):
        events = [name for name in ("updates", "moves") if getattr(self, name)]
        events += [] if self.limits == USUAL else [str(self.limits)]
        return " ".join([self.drafter, *self.shapes, f"rows {self.rows}", *events])

    @property
    def arms(self):
        by = self.drafter if self.drafter == "suffix" else "layer"
        return [f"{by}:{shape}" if shape != "off" else "off" for shape in self.shapes or ("off",)]


def cells():
    drafters = ("suffix", "fresh", "trained", "insider", "constant")
    flips = ("4", "off", "4x3x12", "1", "3x2x6", "8")
    yield Cell("none", (), 5)
    for drafter in drafters:
        for rows, shapes in zip(cycle((32, 16)), (*((shape,) for shape in SHAPES), flips), strict=False):
            yield Cell(drafter, shapes, rows)
        yield Cell(drafter, flips, 5)
        yield Cell(drafter, flips, 16, updates=True)
        yield Cell(drafter, flips, 12, moves=True)
    yield Cell("none", (), 16, updates=True)
    yield Cell("none", (), 12, moves=True)
    yield Cell("suffix", flips, 12, updates=True, moves=True)
    uncached = EngineLimits(prefill_tokens=1 << 20, prefix_cache_bytes=0)
    chunked = EngineLimits(prefill_tokens=7, prefix_cache_bytes=0)
    evicting = EngineLimits(prefill_tokens=5, prefix_cache_bytes=1 << 17)
    for limits in (uncached, chunked, evicting):
        yield Cell("none", (), 6, limits=limits)
        for drafter in ("suffix", "trained", "insider"):
            yield Cell(drafter, flips, 16, limits=limits)
        yield Cell("fresh", flips, 12, updates=True, moves=True, limits=limits)


def requests():
    """Return samples of each kind: groups of one prompt, long prompts, short ones, some with stop tokens.

    Long prompts have a common beginning, which a prefix cache keeps.
    """
    draw, made, rollouts = torch.Generator().manual_seed(0), [], count(1)
    beginning = torch.randint(VOCABULARY, (36,), generator=draw).tolist()
    for kind, settings in KINDS.items():
        for group in range(8):
            length = (3, 40, 1, 12)[group % 4]
            tokens = torch.randint(VOCABULARY, (length,), generator=draw).tolist()
            tokens = (*beginning, *tokens[:4]) if length == 40 else tuple(tokens)
            stops = {"stop_tokens": (5, 11), "min_new_tokens": 40} if group % 3 == 0 else {}
            for sample in range(3 if group % 2 else 2):
                sampling = Sampling(**settings, **stops, max_new_tokens=140 - 10 * sample)
                own = next(rollouts) + (len(kind) << 33)  # ids of more than 32 bits
                name = {"rollout": own, "sample": sample, "group": own - sample if group % 2 else -1}
                made.append(Prompt(tokens=tokens, **name, sampling=sampling))
    return made


class Constant(Stubborn):
    """Drafter with a constant guess; a sample that came with keys and values lacks older features."""

    def begin(self, rows):
        self.rows |= {begun.row: list(begun.tokens) for begun in rows}


class KnowsTheText(Insider):
    """Insider that finds the text of a row fast."""

    begin = Constant.begin

    def __init__(self, texts):
        super().__init__([])
        self._by_start = {}
        for text in texts:
            self._by_start.setdefault(text[0], []).append(text)

    def _truth(self, text, depth):
        self.texts = self._by_start.get(text[0], [])
        return super()._truth(text, depth)


def neox(seed):
    """Return a policy of a family without a fast path."""
    policy = tiny_model("GPT-NeoX", max_position_embeddings=256)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return policy


class World:
    """A policy, another one of the same shape, drafters, and plain decoding of all samples."""

    def __init__(self, family, dtype, path, requests):
        self.policy, other = (POLICIES[family](dtype, seed) for seed in (0, 1))
        self.path = path
        self.weights = [
            {name: value.clone() for name, value in each.state_dict().items()}
            for each in (self.policy, other)
        ]
        self.requests, self.close = requests, CLOSE[dtype]
        self.judge = Judge(self.policy, other)
        self.layers = {}
        if path != "generic":
            heart = [self._short(prompt) for prompt in self.requests[::4]]
            self.layers["fresh"] = fresh(self.policy)
            self.layers["trained"] = learned_by_heart(self.policy, heart, fresh(self.policy))
        self.plain = self.generated(Cell("none", (), 32))
        self.texts = [[*each.prompt.tokens, *each.tokens] for each in self.plain]

    def engine(self, cell):
        target = make_target(self.policy, rows=cell.rows, max_tokens=MAX_TOKENS, nodes=NODES, path=self.path)
        layer = self.layers.get(cell.drafter)
        if isinstance(layer, DraftLayer):
            layer = LayerDrafter.of(layer, target)
        elif cell.drafter in ("insider", "constant"):
            layer = KnowsTheText(self.texts) if cell.drafter == "insider" else Constant()
        drafters = {} if layer is None else {"layer": layer}
        if cell.drafter == "suffix":
            drafters["suffix"] = SuffixDrafter(min_match=1)
        return Engine(target, drafters=drafters, chooser=Flips(*cell.arms), limits=cell.limits)

    def generated(self, cell):
        """Return the finished rollout of each request."""
        here = self.engine(cell)
        # The other engine drafts differently; it shares the policy.
        there = self.engine(Cell("constant", ("2", "off"), 3)) if cell.moves else None
        ended = []
        for prompt in self.requests:
            here.add(prompt)
        for step in count(1):
            engines = [engine for engine in (here, there) if engine is not None]
            if not any(engine.running or engine.waiting for engine in engines):
                break
            for engine in engines:
                ended += engine.step().finished
            if there is not None and step % MOVE_EVERY == 0:
                self.move(here, there, step // MOVE_EVERY)
            if cell.updates and step % UPDATE_EVERY == 0:
                self.update(engines, step // UPDATE_EVERY)
        if cell.updates:
            self.update(engines, 2 * step)
        assert set(here.status()["arms"]) >= set(cell.arms)
        num_hits, limit = here.status()["prefix_cache"]["hit_tokens"], cell.limits.prefix_cache_bytes
        assert num_hits if limit >= 1 << 20 else num_hits == 0 or limit  # a small cache may evict all before
        made = {self._name(each.prompt): each for each in ended}
        assert len(ended) == len(made) == len(self.requests)
        return [made[self._name(prompt)] for prompt in self.requests]

    def update(self, engines, version):
        """Give the engines the weights of this version. They share the parameters: one writes them."""
        for i, engine in enumerate(engines):
            engine.update_weights(self.weights[version % 2] if i == 0 else None, version)

    def move(self, here, there, turn):
        """Move a running sample, and one back; every other time with its keys and values."""
        if here.running and len(there.running) + len(there.waiting) < 3:
            some = here.running[turn % len(here.running)]
            there.add(here.remove(some, kv=turn % 2 == 0))
        if there.running and turn % 3 == 0:
            here.add(there.remove(there.running[0], kv=turn % 2 == 0))

    def wrong(self, cell, found):
        """Yield what is wrong with the rollouts, one line each, and return the number of ties in `found`."""
        rollouts = self.generated(cell)
        for prompt, rollout, plain, shortfalls in zip(
            self.requests, rollouts, self.plain, self.judge.shortfalls(rollouts), strict=True
        ):
            found["tokens"] += len(rollout.tokens)
            found["ties"] += int((shortfalls > 0).sum())
            found["versions"] += len(set(rollout.versions)) > 1
            found["others"] += rollout.tokens != plain.tokens
            at = int(shortfalls.argmax())
            if shortfalls[at] >= self.close:
                yield f"{cell}: {self._name(prompt)}: token {at} is {shortfalls[at]:g} below the best"
            if not ends_where_it_should(prompt, rollout.tokens):
                yield f"{cell}: {self._name(prompt)}: ends after {len(rollout.tokens)} tokens"
            exact = self.close < 1e-6 and not cell.updates
            if exact and rollout.tokens != plain.tokens:
                yield f"{cell}: {self._name(prompt)}: not the tokens of plain decoding"

    @staticmethod
    def _name(prompt):
        return prompt.rollout, prompt.sample

    @staticmethod
    def _short(prompt):
        return Prompt(tokens=prompt.tokens[:13], rollout=prompt.rollout, sampling=Sampling(max_new_tokens=24))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("family", "dtype", "path", "one_of"), WORLDS)
def test_none_of_a_million_tokens_is_wrong(family, dtype, path, one_of):
    here, found, seen = World(family, dtype, path, requests()), Counter(), []
    for cell in list(cells())[::one_of]:
        if cell.drafter in ("fresh", "trained") and not here.layers:
            continue
        seen += here.wrong(cell, found)
        assert not seen, seen[:20]
    assert found["tokens"] >= SHARE
    assert found["versions"] > 100, "weights have changed in the middle of samples"
    assert found["ties"] <= (0 if dtype == torch.float64 else found["tokens"] / 1000)


@pytest.fixture(scope="module")
def small():
    return World("llama", torch.float64, "fast", requests()[::2])


def test_the_oracle_finds_what_is_wrong(small):
    rollout = small.plain[1]
    assert not small.judge.shortfalls([rollout])[0].any()
    wrong = [*rollout.tokens]
    wrong[7] = (wrong[7] + 1) % VOCABULARY
    assert small.judge.shortfalls([Changed(rollout, tokens=wrong)])[0][7] > 1e-3
    other = [0] * 9 + [1] * (len(wrong) - 9)
    found = small.judge.shortfalls([Changed(rollout, versions=other)])[0]
    assert not found[:9].any()
    assert found[9:].max() > 0.1
    assert ends_where_it_should(rollout.prompt, rollout.tokens)
    assert not ends_where_it_should(rollout.prompt, rollout.tokens[:-1])


class Changed:
    """A rollout with other contents."""

    def __init__(self, rollout, **other):
        self.prompt, self.tokens, self.versions = rollout.prompt, rollout.tokens, rollout.versions
        self.__dict__ |= other


def test_the_oracles_generator_is_philox_by_the_vectors_of_its_authors():
    key, counter = (0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert [int(word) for word in philox4x32(counter, key)] == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


def test_with_new_weights_and_moves_at_once_no_token_is_wrong(small):
    found = Counter()
    cell = Cell("insider", ("4", "4x3x12"), 5, updates=True, moves=True)
    assert list(small.wrong(cell, found)) == []
    assert found["versions"] > 10
