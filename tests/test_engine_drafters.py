"""Tests the shipped drafters in a real engine.

None changes a token, and one trains on the engine's features.
"""

import hashlib
from dataclasses import replace

import pytest
import torch
from kit.drafters import engine_of, fresh, learned_by_heart
from kit.rollouts import KINDS, decode_plainly, samples, tiny_policy, tokens_of

from aedit.spec_rollout.drafters import SuffixDrafter, parse_arm, tapped
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target

LAYER_ARMS = ("layer:4", "off", "layer:3x2x6", "layer:1", "layer:8", "layer:4x3x12", "layer:2")
SUFFIX_ARMS = ("suffix:4", "suffix:1", "off", "suffix:3x2x6", "suffix:8")


def checksum(model):
    words = [name.encode() + value.numpy().tobytes() for name, value in model.state_dict().items()]
    return hashlib.sha256(b"".join(words)).hexdigest()


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def mixed():
    return samples(KINDS)


@pytest.fixture(scope="module")
def plain(policy, mixed):
    return decode_plainly(policy, mixed)


@pytest.fixture(scope="module")
def trained(policy, mixed):
    return learned_by_heart(policy, mixed, fresh(policy))


@pytest.mark.parametrize(("kind", "rows"), [("random", 4), ("random", 16), ("trained", 1), ("trained", 16)])
def test_a_learned_drafter_changes_no_token(policy, mixed, plain, trained, kind, rows):
    some = slice(None, None, 4 if rows == 1 else 1)
    engine = engine_of(policy, rows, LAYER_ARMS, layer=trained if kind == "trained" else fresh(policy))
    assert tokens_of(engine, mixed[some]) == plain[some]


@pytest.mark.parametrize("rows", [1, 16])
def test_the_suffix_drafter_changes_no_token(policy, mixed, plain, rows):
    some = slice(None, None, 4 if rows == 1 else 1)
    assert tokens_of(engine_of(policy, rows, SUFFIX_ARMS, suffix=True), mixed[some]) == plain[some]


def test_drafters_take_turns_and_change_no_token(policy, mixed, plain, trained):
    arms = [arm for pair in zip(LAYER_ARMS, SUFFIX_ARMS, strict=False) for arm in pair]
    assert tokens_of(engine_of(policy, 4, arms, layer=trained, suffix=True), mixed) == plain


def test_a_drafter_replaced_in_the_middle_changes_no_token_and_nothing_of_the_policy(
    policy, mixed, plain, trained
):
    """Defect 13 of fastrl: loading a drafter overwrote the policy's embedding."""
    before = checksum(policy)
    engine = engine_of(policy, 4, LAYER_ARMS, layer=fresh(policy))
    drafter = engine.drafters["layer"]
    made = [engine.add(prompt) for prompt in mixed]
    for version, layer in enumerate((trained, fresh(policy), trained), 1):
        for _ in range(3):
            engine.step()
        drafter.replace(layer, version)
    list(engine.generate([]))
    assert [rollout.tokens for rollout in made] == plain
    versions = [observed.view.versions["layer"] for observed in engine.chooser.seen]
    assert versions[:10] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert checksum(policy) == before


def test_what_was_learned_in_the_engine_s_own_features_is_accepted_more_often(policy, mixed, trained):
    lengths = {}
    for name, layer in {"fresh": fresh(policy), "trained": trained}.items():
        engine = engine_of(policy, 16, ["layer:4"], layer=layer)
        list(engine.generate(mixed))
        lengths[name] = engine.status()["accepted_length"]
    assert lengths["trained"] > lengths["fresh"] + 0.5


def test_three_taps_are_learned_from_and_drafted_with_and_change_no_token(policy, mixed, plain):
    taps = tapped(3, policy.config.num_hidden_layers)
    layers = fresh(policy, taps=3), learned_by_heart(policy, mixed, fresh(policy, taps=3), taps=taps)
    lengths = []
    for layer in layers:
        engine = engine_of(policy, 4, LAYER_ARMS, layer=layer, taps=taps)
        assert tokens_of(engine, mixed) == plain
        lengths.append(engine.status()["accepted_length"])
    assert lengths[1] > lengths[0] + 0.3


def test_layers_that_are_tapped_are_those_of_eagle_3():
    assert [tapped(3, layers) for layers in (2, 4, 12, 32)] == [(0, 1, 1), (1, 2, 2), (2, 6, 9), (2, 16, 29)]
    assert tapped(0, 12) == ()
    with pytest.raises(ValueError, match="taps must be 0 or 3, got 2"):
        tapped(2, 12)


def test_new_weights_of_the_policy_are_at_once_those_of_its_drafter(mixed, trained):
    """Defect 12 of fastrl: the drafter's embedding and head remained those of an old policy."""
    model, new = tiny_policy(), tiny_policy(seed=5)
    engine = engine_of(model, 4, LAYER_ARMS, layer=trained, suffix=True)
    made = [engine.add(prompt) for prompt in mixed[:4]]
    for _ in range(3):
        engine.step()
    said = [list(rollout.tokens) for rollout in made]
    engine.update_weights(new.state_dict(), version=1)
    drafter = engine.drafters["layer"]
    assert torch.equal(drafter._runner.embedding, new.model.embed_tokens.weight)
    assert torch.equal(drafter._runner.head, new.lm_head.weight)
    list(engine.generate([]))
    rest = [
        replace(
            prompt,
            tokens=(*prompt.tokens, *tokens),
            sampling=replace(prompt.sampling, max_new_tokens=prompt.sampling.max_new_tokens - len(tokens)),
        )
        for prompt, tokens in zip(mixed, said, strict=False)
    ]
    for rollout, tokens, more in zip(made, said, decode_plainly(new, rest), strict=True):
        assert rollout.tokens == tokens + more


class Texts:
    """Drafter that drafts nothing of its own and writes down the text of each row as it is informed."""

    needs_features = False

    def __init__(self):
        self.inner, self.texts, self.ended, self.num_updates = SuffixDrafter(), {}, [], 0

    def begin(self, rows):
        self.inner.begin(rows)
        self.texts |= {row.row: list(row.tokens) for row in rows}

    def update(self, update):
        self.inner.update(update)
        self.num_updates += 1
        for row, tokens in enumerate(update.tokens):
            self.texts[row] += tokens

    def move(self, source, target):
        self.inner.move(source, target)
        self.texts[target] = self.texts.pop(source)

    def end(self, row):
        self.inner.end(row)
        self.ended.append(self.texts.pop(row))

    def propose(self, arm, rows, noise, temperature_B):
        self.proposed = [list(self.texts[row]) for row in range(rows)]
        return self.inner.propose(arm, rows, noise, temperature_B)


class Rarely:
    """Chooser that drafts in each `every`-th step, and wants to be asked only then if it rests."""

    def __init__(self, every, rests):
        self.every, self.steps, self.seen = every, 0, []
        if rests:
            self.rest = lambda view: (parse_arm("off"), every - 2 if self.steps % every == 1 else 0)

    def choose(self, view):
        return parse_arm("suffix:4") if self.steps % self.every == 0 else parse_arm("off")

    def trim(self, view, arm, draft):
        return draft.tokens_BN.shape[1]

    def learn(self, observed):
        self.steps += 1 + observed.skipped.num_steps
        self.seen.append(observed)


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_drafter_of_tokens_has_the_whole_text_whenever_it_drafts_and_no_step_is_lost(
    policy, mixed, rows, rests
):
    drafter, chooser = Texts(), Rarely(5, rests)
    target = Target.of(policy, rows=rows, max_tokens=64, nodes=4)
    engine = Engine(target, drafters={"suffix": drafter}, chooser=chooser)
    for prompt in mixed[::3]:
        engine.add(prompt)
    emitted = steps = 0
    ended = []
    while engine.running or engine.waiting:
        drafter.proposed = None
        before = {id(each): [*each.prompt.tokens, *each.tokens] for each in engine.running}
        step = engine.step()
        texts = [before.get(id(each), list(each.prompt.tokens)) for each in step.rollouts]
        assert drafter.proposed in (None, texts)
        emitted, steps = emitted + sum(step.counts), steps + 1
        ended += [[*each.prompt.tokens, *each.tokens] for each in step.finished]
    assert sorted(drafter.ended) == sorted(ended)
    assert drafter.num_updates < steps or rows > 1
    skipped = engine._skipped
    assert sum(1 + seen.skipped.num_steps for seen in chooser.seen) + skipped.num_steps == steps
    assert sum(seen.emitted + seen.skipped.emitted for seen in chooser.seen) + skipped.emitted == emitted
    assert (len(chooser.seen) < steps) == rests
