"""Tests keys and values that move with their sample: same tokens, nothing recomputed or lost.

Those of another policy version are not used.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from kit.rollouts import KINDS, VOCABULARY, decode_plainly, engine_of, samples, tiny_policy
from kit.tiny_policies import drafter, policy

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import LayerDrafter
from aedit.spec_rollout.engine import Engine, prefill
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.remote import LocalEngine
from aedit.spec_rollout.sampling import Prompt, Rollout, SampleKV, Sampling, decode_prompt, encode_prompt
from aedit.spec_rollout.training import FeatureReader, FeatureRing, RingShape, RowFeatures

JOBS = "tests/dist_jobs/handing_jobs.py"


@pytest.fixture(scope="module")
def model():
    return tiny_policy()


@pytest.fixture(scope="module")
def asked():
    return samples(["T = 1", "top-p"])


@pytest.fixture(scope="module")
def plain(model, asked):
    return dict(zip(map(name_of, asked), decode_plainly(model, asked), strict=True))


def name_of(prompt):
    return prompt.rollout, prompt.sample


def begun(engine, prompts, steps=3):
    made = [engine.add(prompt) for prompt in prompts]
    for _ in range(steps):
        engine.step()
    return made


def num_kept(prompt):
    return len(prompt.tokens) + len(prompt.partial.tokens) - 1


# --- inside one process


def test_samples_that_bring_their_keys_and_values_are_not_computed_again(model, asked, plain):
    """Samples move from any row into any row, also of engines of other sizes."""
    here, there = engine_of(model, 5), engine_of(model, 3)
    made = begun(here, asked)
    moving = [
        here.remove(rollout, kv=True) for rollout in [here.running[4], here.running[0], here.running[1]]
    ]
    expected = sum(map(num_kept, moving))
    moved = [there.add(prompt) for prompt in moving]
    for engine in (there, here):
        list(engine.generate([]))
    assert there.status()["restored_tokens"] == expected > 20
    assert there.status()["prefilled_tokens"] == 0
    ended = {name_of(each.prompt): each.tokens for each in [*made, *moved] if each.finish_reason}
    assert ended == plain


def test_a_sample_moves_on_from_every_engine_it_comes_to(model, asked, plain):
    engines = [engine_of(model, rows) for rows in (8, 1, 4)]
    rollout = begun(engines[0], asked[:4], 1)[2]
    for i in range(1, 9):
        prompt = engines[(i - 1) % 3].remove(rollout, kv=True)
        rollout = engines[i % 3].add(prompt)
        engines[i % 3].step()
    (rollout,) = (r for r in engines[8 % 3].generate([]) if name_of(r.prompt) == name_of(asked[2]))
    assert rollout.tokens == plain[name_of(asked[2])]
    assert engines[1].status()["prefilled_tokens"] == 0


@pytest.mark.parametrize("what", ["version", "shape", "dtype", "tokens"])
def test_keys_and_values_that_do_not_fit_are_computed_anew(model, asked, what):
    """The oracle is a new start with the text so far as the prompt."""
    here, there = engine_of(model, 4), engine_of(model, 4)
    if what == "version":
        model_there = tiny_policy(seed=1)
        there = engine_of(model_there, 4)
        there.update_weights(model_there.state_dict(), 1)
    rollout = begun(here, asked[:1])[0]
    prompt = here.remove(rollout, kv=True)
    kept = prompt.partial.kv
    other = {
        "version": kept,
        "shape": SampleKV(kept.kv[:1].clone(), 0),
        "dtype": SampleKV(kept.kv.float(), 0),
        "tokens": SampleKV(kept.kv[:, :, :, :-1].clone(), 0),
    }[what]
    moved = there.add(replace(prompt, partial=replace(prompt.partial, kv=other)))
    list(there.generate([]))
    assert (there.status()["restored_tokens"], there.status()["prefilled_tokens"]) == (0, num_kept(prompt))
    text = (*prompt.tokens, *prompt.partial.tokens)
    left = replace(
        prompt.sampling, max_new_tokens=prompt.sampling.max_new_tokens - len(prompt.partial.tokens)
    )
    anew = replace(prompt, tokens=text, partial=None, sampling=left)
    (expected,) = decode_plainly(there.target.model, [anew])
    assert moved.tokens == [*prompt.partial.tokens, *expected]


def test_new_weights_while_it_waits_make_them_useless(model, asked):
    here, there = engine_of(model, 2), engine_of(model, 1)
    there.add(asked[1])
    there.step()
    rollout = begun(here, asked[:1])[0]
    there.add(here.remove(rollout, kv=True))
    assert there.status()["transferred_kv_bytes"] > 0
    there.update_weights(model.state_dict(), 1)
    list(there.generate([]))
    assert there.status()["restored_tokens"] == 0


def test_one_that_waits_keeps_them_until_it_has_a_row_and_nobody_after_that(model, asked):
    here, full, there = engine_of(model, 2), engine_of(model, 1), engine_of(model, 2)
    begun(full, asked[1:2], 1)
    rollout = begun(here, asked[:1])[0]
    prompt = here.remove(rollout, kv=True)
    size = prompt.partial.kv.num_bytes
    memory = weakref.ref(prompt.partial.kv.kv)
    waits = full.add(prompt)
    assert full.status()["transferred_kv_bytes"] == size
    prompt = full.remove(waits, kv=True)
    assert full.remove(full.running[0]).partial.kv is None  # `kv` was not requested
    moved = there.add(prompt)
    there.step()
    del prompt
    gc.collect()
    assert memory() is None  # though all of its rollouts are still there
    assert (waits.finish_reason, moved.finish_reason) == ("", "")
    assert there.status()["transferred_kv_bytes"] == 0
    assert there.status()["restored_tokens"] > 0


def test_engines_of_one_process_move_them_unless_told_otherwise(model, asked):
    for kv, carried in ((True, True), (False, False)):
        engines = [LocalEngine(engine_of(model, 4), kv=kv) for _ in range(2)]
        begun(engines[0].engine, asked[:2])
        for live in (1, 4):
            engines[0]._meter.add(live, 0.01 + 0.001 * live)
        engines[1].add(engines[0].remove(name_of(asked[0])))
        engines[1].step()
        status = engines[1].engine.status()
        assert (status["restored_tokens"] > 0, status["prefilled_tokens"] == 0) == (carried, carried)
        assert (engines[0].load().speed.prefill_s == 0) == kv


# --- who follows the rows


def drafting(model, rows=3):
    """Return an engine that drafts with a layer and writes into a ring, and the reader of that ring."""
    target = Target.of(model, rows=rows, max_tokens=64)
    layer = LayerDrafter.of(drafter(model), target)
    engine = Engine(target, drafters={"layer": layer}, chooser=Fixed.of("layer:3"))
    shape = RingShape.within(400_000, 32, torch.float64, 4)
    memory = bytearray(shape.num_bytes)
    engine.sink = RowFeatures(FeatureRing(memory, shape), flush_steps=3)
    return engine, FeatureReader(memory)


def long_prompts():
    for i in range(3):
        prompt = (3, 1, 4, 1, 5, 9, 2, 6 + i % 2)
        yield Prompt(tokens=prompt, sample=i, group=i % 2, sampling=Sampling(max_new_tokens=30))


def test_drafter_and_ring_go_on_with_the_last_features(monkeypatch):
    """Five tokens are read again; features of earlier ones are not moved.

    One sample begins after the move.
    """
    monkeypatch.setattr(prefill, "RECOMPUTED_TOKENS", 5)
    model = policy()
    expected = {r.prompt.sample: r.tokens for r in drafting(model)[0].generate(long_prompts())}
    (here, _), (there, reader) = drafting(model), drafting(model)
    first, _, third = long_prompts()
    begun(here, [first], 4)
    prompt = here.remove(here.running[0], kv=True)
    moved = there.add(prompt)
    there.step()
    assert (there.status()["restored_tokens"], there.status()["prefilled_tokens"]) == (num_kept(prompt), 5)
    late = there.add(third)
    list(there.generate([]))
    assert (moved.tokens, late.tokens) == (expected[0], expected[2])
    assert there.status()["arms"] == {"layer:3": there.status()["steps"]}
    said = {tuple([*first.tokens, *moved.tokens][num_kept(prompt) - 5 :]): 5}
    said[(*third.tokens, *late.tokens)] = 0
    for sample in map(reader.read, reader.entries()):
        tokens = sample.tokens_N.tolist()
        assert tuple(tokens) in said
        whole = [*first.tokens, *moved.tokens] if said.pop(tuple(tokens)) else tokens
        hidden = model.model(input_ids=torch.tensor([whole])).last_hidden_state[0]
        features = hidden[len(whole) - len(tokens) : -1]
        torch.testing.assert_close(sample.features_MF, features, rtol=0, atol=1e-5)
    assert not said


# --- between ranks


def test_what_is_sent_is_what_is_read():
    allowed = torch.arange(VOCABULARY) % 3 > 0
    sampling = Sampling(temperature=0.7, stop_tokens=(3, 4), stop_strings=("\n\u00e9",), allowed=allowed)
    prompt = Prompt(tokens=(1, 2), rollout=-(1 << 63), sample=7, group=3, sampling=sampling)
    rollout = Rollout(prompt, [5, 6], [-0.1, float("-inf")], [0, 1], passes=2)
    for sent in (prompt, rollout.to_prompt(), *samples(KINDS)):
        read = decode_prompt(encode_prompt(sent))
        assert read == replace(sent, partial=read.partial)
        assert (read.sampling.allowed is None) == (sent.sampling.allowed is None)
    read = decode_prompt(encode_prompt(rollout.to_prompt()))
    assert torch.equal(read.sampling.allowed, allowed)
    assert read.partial == rollout


def test_a_rank_goes_on_with_what_another_sends_without_computing_it_again(world, asked, plain):
    ours, theirs = world.run(JOBS, "move", 2, {"asked": asked})
    assert ours["sent"] == [True] * 4
    assert theirs["carried"] == ours["kept"] > 20
    assert theirs["prefilled"] == 0
    assert {**ours["ended"], **theirs["ended"]} == plain
    assert len(ours["ended"]) + len(theirs["ended"]) == len(plain)


def test_a_rank_of_another_version_computes_the_text_itself(world, asked, plain):
    ours, theirs = world.run(JOBS, "move", 2, {"asked": asked, "version": 1})
    shared = len(asked[0].tokens) - 1  # two of those that move have the same prompt
    assert (theirs["carried"], theirs["prefilled"]) == (0, ours["kept"] - shared)
    assert {**ours["ended"], **theirs["ended"]} == plain  # its weights are the same ones


def test_what_a_rank_cannot_serve_stays_with_the_sender(world, asked, plain):
    ours, theirs = world.run(JOBS, "move", 2, {"asked": asked, "max_tokens": 30})
    assert not all(ours["sent"])
    assert any(ours["sent"])
    assert {**ours["ended"], **theirs["ended"]} == plain


@pytest.mark.parametrize("how", ["gone", "gone after the text", "silent"])
def test_a_receiver_that_fails_costs_no_sample(world, asked, plain, how):
    ours, _ = world.run(JOBS, "fail", 2, {"asked": asked, "how": how})
    assert "rank 1" in ours["error"]
    assert ours["ended"] == plain
    assert ours["waited_s"] < 20
