"""Tests the engine as a library: row assignment, per-token features and refused requests."""

from dataclasses import replace

import pytest
import torch
from kit.prefill import Recorder, features_of
from kit.rollouts import (
    VOCABULARY,
    Flips,
    Insider,
    Stubborn,
    decode_plainly,
    logprobs_of,
    prompts_of,
    tiny_policy,
)

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target, make_target
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(seed=1)


def texts_of(prompts, answers):
    return [[*prompt.tokens, *tokens] for prompt, tokens in zip(prompts, answers, strict=True)]


def engine_of(policy, rows=4, drafter=None, arms=("off",), **more):
    target = Target.of(policy, rows=rows, max_tokens=64, nodes=12)
    drafters = {} if drafter is None else {"layer": drafter}
    return Engine(target, drafters=drafters, chooser=Flips(*arms), **more)


def finish(engine):
    """Run the engine to its end; return its rollouts, by sample."""
    return {rollout.prompt.sample: rollout for rollout in engine.generate([])}


def test_five_lines_are_enough(policy):
    engine = Engine.of(policy, rows=2, max_tokens=32)
    asked = [Prompt(tokens=(1, 2, 3), sampling=Sampling(max_new_tokens=5, temperature=0.0))]
    rollouts = list(engine.generate(asked))
    assert [rollout.tokens for rollout in rollouts] == decode_plainly(policy, asked)
    assert rollouts[0].finish_reason == "length"


def test_rollouts_come_as_they_finish_and_nobody_waits_for_a_long_one(policy):
    lengths = (20, 3, 4, 5, 6, 2)
    asked = [
        replace(prompt, sampling=Sampling(max_new_tokens=n))
        for prompt, n in zip(prompts_of(6), lengths, strict=True)
    ]
    engine = engine_of(policy, rows=2)
    done = [rollout.prompt.sample for rollout in engine.generate(asked)]
    assert done == [1, 2, 3, 4, 0, 5] or done == [1, 2, 3, 4, 5, 0]
    # One row made 20 tokens, and the other one 3 + 4 + 5 + 6 + 2 at the same time.
    assert engine.status()["steps"] == 20


def test_a_place_is_refilled_at_once_and_the_last_row_moves_into_an_empty_one(policy):
    lengths = (2, 6, 6, 2, 4)
    asked = [
        replace(prompt, sampling=Sampling(max_new_tokens=n))
        for prompt, n in zip(prompts_of(5), lengths, strict=True)
    ]
    engine = engine_of(policy, rows=3)
    for prompt in asked:
        engine.add(prompt)
    here = []
    while engine.running or engine.waiting:
        engine.step()
        here.append([rollout.prompt.sample for rollout in engine.running])
    assert here == [[0, 1, 2], [3, 1, 2], [3, 1, 2], [4, 1, 2], [4, 1, 2], [4], [4], []]


def test_each_token_has_the_log_probability_that_teacher_forcing_gives(policy):
    asked = [
        replace(prompt, sampling=Sampling(temperature=t, top_k=k, top_p=p, max_new_tokens=12))
        for prompt, (t, k, p) in zip(
            prompts_of(4), [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 0, 0.8), (1.3, 9, 1.0)], strict=True
        )
    ]
    texts = texts_of(asked, decode_plainly(policy, asked))
    for rollout in engine_of(policy, drafter=Insider(texts), arms=("layer:4", "layer:4x3x12")).generate(
        asked
    ):
        expected = logprobs_of(policy, rollout.prompt, rollout.tokens)
        assert rollout.logprobs == pytest.approx(expected, abs=1e-6)  # the temperature is a float32
        assert len(rollout.versions) == len(rollout.tokens)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_log_probabilities_in_narrow_types(dtype, close):
    policy = tiny_policy(seed=2, dtype=dtype, spread=0.1)
    exact = tiny_policy(seed=2, dtype=dtype, spread=0.1).double()
    asked = [
        prompt
        for seed, t in enumerate((0.7, 1.0))
        for prompt in prompts_of(4, seed, max_new_tokens=12, temperature=t)
    ]
    arms = ("layer:4", "off", "layer:4x3x12")
    rollouts = list(engine_of(policy, drafter=Stubborn(), arms=arms).generate(asked))
    assert len(rollouts) == 8
    for rollout in rollouts:
        expected = logprobs_of(exact, rollout.prompt, rollout.tokens)
        assert rollout.logprobs == pytest.approx(expected, abs=close)


def test_samples_of_a_group_share_the_prompt_s_computation(policy, monkeypatch):
    asked = prompts_of(6, group_size=6, max_new_tokens=8)
    plain = decode_plainly(policy, asked)
    engine = engine_of(policy, rows=4, drafter=Insider(texts_of(asked, plain)), arms=("layer:2",))
    lengths = []
    prefill = engine.target.prefill
    monkeypatch.setattr(
        engine.target,
        "prefill",
        lambda segments: lengths.extend(len(each.tokens) for each in segments) or prefill(segments),
    )
    rollouts = {rollout.prompt.sample: rollout.tokens for rollout in engine.generate(asked)}
    assert [rollouts[i] for i in range(6)] == plain
    assert lengths == [len(asked[0].tokens) - 1]


def test_features_are_those_of_the_text_whatever_was_drafted(policy):
    asked = prompts_of(6, seed=3, group_size=2, max_new_tokens=14)
    texts = texts_of(asked, decode_plainly(policy, asked))
    engine = engine_of(policy, rows=4, drafter=Insider(texts), arms=("layer:4", "layer:4x3x12", "off"))
    engine.sink = sink = Recorder()
    list(engine.generate(asked))
    assert sorted(tokens for tokens, *_ in sink.ended) == sorted(texts)
    for tokens, features, num_prompt, version, finished in sink.ended:
        assert (len(tokens) - num_prompt, version, finished) == (14, 0, True)
        assert torch.allclose(torch.cat(features), features_of(policy, tokens)[:-1], atol=1e-9)


def test_new_weights_make_every_later_token_theirs(policy):
    old, new = tiny_policy(seed=1), tiny_policy(seed=4)
    asked = prompts_of(5, group_size=2, max_new_tokens=16)
    plain = decode_plainly(old, asked)
    engine = engine_of(
        tiny_policy(seed=1), rows=3, drafter=Insider(texts_of(asked, plain)), arms=("layer:2", "off")
    )
    engine.sink = sink = Recorder()
    made = [engine.add(prompt) for prompt in asked]
    for _ in range(3):
        engine.step()
    before = [list(rollout.tokens) for rollout in made]
    assert all(before[:3])
    engine.update_weights(new.state_dict(), version=7)
    finish(engine)
    for prompt, rollout, tokens in zip(asked, made, before, strict=True):
        sampling = replace(prompt.sampling, max_new_tokens=16 - len(tokens))
        rest = replace(prompt, tokens=(*prompt.tokens, *tokens), sampling=sampling)
        assert rollout.tokens == tokens + decode_plainly(new, [rest])[0]
        assert rollout.versions == [0] * len(tokens) + [7] * (16 - len(tokens))
        assert rollout.logprobs[len(tokens) :] == pytest.approx(
            logprobs_of(new, prompt, rollout.tokens)[len(tokens) :], abs=1e-6
        )
    assert [finished for *_, finished in sink.ended].count(False) == 3
    for tokens, features, *_, version, _ in sink.ended:
        assert torch.allclose(
            torch.cat(features), features_of(new if version else old, tokens)[:-1], atol=1e-9
        )


def test_weights_that_do_not_fit_are_refused_and_change_nothing(policy):
    asked = prompts_of(2, max_new_tokens=8)
    engine = engine_of(policy)
    made = [engine.add(prompt) for prompt in asked]
    engine.step()
    weights = dict(policy.state_dict())
    name = next(name for name in weights if "q_proj" in name)
    with pytest.raises(ValueError, match="q_proj"):
        engine.update_weights({**weights, name: weights[name][:, :-1]}, version=1)
    finish(engine)
    assert [rollout.tokens for rollout in made] == decode_plainly(policy, asked)
    assert {version for rollout in made for version in rollout.versions} == {0}


def test_the_policy_s_own_weights_are_used_in_place(policy):
    policy = tiny_policy(seed=1)
    engine = engine_of(policy)
    with torch.no_grad():
        for mine, other in zip(policy.parameters(), tiny_policy(seed=4).parameters(), strict=True):
            mine.copy_(other)
    engine.update_weights(policy.state_dict(), version=1)
    asked = prompts_of(2, max_new_tokens=8)
    assert [rollout.tokens for rollout in engine.generate(asked)] == decode_plainly(
        tiny_policy(seed=4), asked
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": ()}, "empty"),
        ({"tokens": (1, VOCABULARY)}, "token 64 is outside"),
        ({"tokens": (1, -1)}, "token -1 is outside"),
        ({"tokens": tuple([1] * 57)}, "57 tokens and max_new_tokens 8 exceed max_tokens 64"),
        ({"rollout": 1 << 64}, "64 bits"),
        ({"sampling": {"stop_tokens": (64,)}}, "stop token 64 is outside"),
        ({"sampling": {"stop_strings": ("x",)}}, "tokenizer"),
        ({"sampling": {"allowed": torch.ones(3, dtype=torch.bool)}}, "allowed must be bool"),
        ({"sampling": {"allowed": torch.ones(64)}}, "allowed must be bool"),
        ({"sampling": {"allowed": torch.zeros(64, dtype=torch.bool)}}, "no token is allowed"),
        (
            {"sampling": {"allowed": torch.arange(64) == 3, "stop_tokens": (3,), "min_new_tokens": 1}},
            "only stop tokens",
        ),
        ({"partial": Rollout(Prompt(tokens=(1,)), [1] * 8, [0.0] * 8, [0] * 8)}, "ended already"),
        ({"partial": Rollout(Prompt(tokens=(1,)), [1], [], [])}, "another number"),
        ({"partial": Rollout(Prompt(tokens=(1,)), [99], [0.0], [0])}, "token 99 is outside"),
    ],
)
def test_a_bad_prompt_is_refused_in_a_line_and_harms_no_other_sample(policy, changes, says):
    sampling = Sampling(max_new_tokens=8, **changes.get("sampling", {}))
    bad = Prompt(**{"tokens": (1, 2), "rollout": 3, **changes, "sampling": sampling})
    good = prompts_of(2, max_new_tokens=8)
    engine = engine_of(policy)
    made = [engine.add(prompt) for prompt in good]
    engine.step()
    for ask in (lambda: engine.add(bad), lambda: engine.generate([*prompts_of(1), bad])):
        with pytest.raises(ValueError, match=says) as refusal:
            ask()
        assert "\n" not in str(refusal.value)
    assert engine.waiting == []
    finish(engine)
    assert [rollout.tokens for rollout in made] == decode_plainly(policy, good)


@pytest.mark.parametrize("path", ["fast", "generic"])
def test_inside_autocast_a_policy_generates_in_the_dtype_of_its_weights(path):
    """Found: an error about dtypes of keys and values. A training loop may be inside autocast as a whole."""
    found = []
    for is_on in (False, True):
        policy = tiny_policy(seed=1).float()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            engine = Engine(make_target(policy, rows=2, max_tokens=64, path=path))
            rollouts = [engine.add(prompt) for prompt in prompts_of(3, seed=2, max_new_tokens=20)]
            for _ in range(5):
                engine.step()
            with torch.no_grad():
                policy.lm_head.weight.mul_(1.5)
            engine.update_weights(None, 1)
            finish(engine)
        found.append([(rollout.tokens, rollout.logprobs) for rollout in rollouts])
    assert found[0] == found[1]


def test_a_row_can_be_filled_to_the_last_token_while_others_draft(policy):
    prompts = prompts_of(2)
    asked = [
        replace(prompt, tokens=prompt.tokens[:4], sampling=Sampling(max_new_tokens=n))
        for prompt, n in zip(prompts, (64 - len(prompts[0].tokens[:4]), 30), strict=True)
    ]
    plain = decode_plainly(policy, asked)
    engine = engine_of(policy, drafter=Insider(texts_of(asked, plain)), arms=("layer:8", "layer:4x3x12"))
    made = {rollout.prompt.sample: rollout.tokens for rollout in engine.generate(asked)}
    assert [made[0], made[1]] == plain


def test_nothing_longer_than_the_rest_of_a_rollout_is_drafted(policy):
    asked = prompts_of(1, max_new_tokens=4)
    engine = engine_of(
        policy,
        drafter=Insider(texts_of(asked, decode_plainly(policy, asked)), honesty=1.0),
        arms=("layer:8",),
    )
    engine.add(asked[0])
    step = engine.step()
    assert (step.nodes, step.counts, step.accepted) == (3, (4,), (3,))


def test_masks_and_shortest_lengths_hold_inside_a_draft(policy):
    allowed = torch.arange(VOCABULARY) % 2 == 0
    asked = prompts_of(
        6,
        temperature=1.0,
        max_new_tokens=12,
        min_new_tokens=6,
        stop_tokens=tuple(range(0, 64, 4)),
        allowed=allowed,
    )
    plain = decode_plainly(policy, asked)
    for arm in ("off", "layer:8", "layer:4x3x12"):
        engine = engine_of(policy, drafter=Insider(texts_of(asked, plain)), arms=(arm,))
        rollouts = {rollout.prompt.sample: rollout for rollout in engine.generate(asked)}
        assert [rollouts[i].tokens for i in range(6)] == plain
    assert {len(tokens) for tokens in plain} & set(range(7, 12))
    assert all(token % 2 == 0 for tokens in plain for token in tokens)
    assert min(map(len, plain)) > 6


def test_status_tells_what_was_done_and_memory_does_not_grow(policy):
    asked = prompts_of(8, group_size=4, max_new_tokens=10)
    engine = engine_of(policy, drafter=Stubborn(), arms=("layer:2", "off"))
    fresh = engine.status()
    assert (fresh["tokens_per_s"], fresh["accepted_length"], fresh["running"]) == (0, 0, 0)
    times = iter(range(1000))
    engine.clock = engine.cost_clock = lambda: float(next(times))
    for prompt in asked:
        engine.add(prompt)
    engine.step()
    during = engine.status()
    assert (during["running"], during["waiting"], during["tokens"]) == (4, 4, during["tokens"])
    assert during["feature_bytes"] > 0
    assert during["features"] == {}
    finish(engine)
    after = engine.status()
    assert after["tokens"] == 80
    assert after["kv_bytes"] == fresh["kv_bytes"] == 0 < during["kv_bytes"] < during["kv_bytes_reserved"]
    assert after["kv_bytes_reserved"] == fresh["kv_bytes_reserved"] == engine.target.kv_bytes_reserved
    assert (after["running"], after["waiting"], after["feature_bytes"]) == (0, 0, 0)
    assert sum(after["arms"].values()) == after["steps"]
    assert len(after["accepted_by_position"]) == 2
    assert 0 < after["draft_share"] < 1


def test_what_an_arm_did_is_learned_once_per_step(policy):
    asked = prompts_of(3, max_new_tokens=9)
    plain = decode_plainly(policy, asked)
    engine = engine_of(
        policy, drafter=Insider(texts_of(asked, plain), honesty=1.0), arms=("layer:4x3x12", "off", "layer:2")
    )
    finished = list(engine.generate(asked))
    seen = engine.chooser.seen
    assert sum(each.emitted for each in seen) == sum(len(rollout.tokens) for rollout in finished) == 27
    assert seen[0].view.rows == 3
    assert seen[0].view.context == sum(len(prompt.tokens) - 1 for prompt in asked)
    assert seen[0].view.versions == {"layer": 0}
    tree, plain_step = seen[0], seen[1]
    assert tree.draft.parents_BN is not None
    for row, (count, path) in enumerate(zip(tree.accepted_B, tree.path_Bm, strict=True)):
        nodes = [node - 1 for node in path[1:]]
        assert (path[0], len(nodes)) == (0, count)
        assert [tree.draft.tokens_BN[row, node].item() for node in nodes] == plain[row][:count]
        assert [tree.draft.parents_BN[row, node].item() for node in nodes] == [-1, *nodes[:-1]][:count]
    assert (plain_step.draft, plain_step.nodes, plain_step.draft_s) == (None, 0, 0.0)
    assert all(each.total_s >= each.draft_s >= 0 for each in seen)


def test_an_engine_that_is_closed_or_has_nothing_to_do_does_nothing(policy):
    engine = engine_of(policy, drafter=Stubborn(), arms=("layer:2",))
    assert engine.step().rollouts == ()
    for prompt in prompts_of(6):
        engine.add(prompt)
    engine.step()
    engine.close()
    assert (engine.running, engine.waiting, engine.step().counts) == ([], [], ())


def test_a_sink_is_not_changed_under_live_samples(policy):
    engine = engine_of(policy)
    engine.add(prompts_of(1)[0])
    engine.step()
    with pytest.raises(ValueError, match="only while no sample is running"):
        engine.sink = Recorder()


class Untrained(Insider):
    """Drafter that nothing has trained yet; `train` makes it know the texts."""

    version = -1

    def begin(self, rows):
        for start in rows:
            self.began.append((start.row, list(start.tokens), len(start.features_Td)))
            self.rows[start.row] = list(start.tokens)

    began: list


def test_a_drafter_follows_from_when_it_is_trained_and_no_token_changes(policy):
    asked = prompts_of(5, group_size=1, max_new_tokens=16)
    plain = decode_plainly(policy, asked)
    drafter = Untrained(texts_of(asked, plain))
    drafter.began = []
    engine = engine_of(policy, rows=3, drafter=drafter, arms=("layer:2",))
    engine.chooser = Fixed.of("layer:2")
    made = [engine.add(prompt) for prompt in asked]
    for _ in range(4):
        assert engine.step().arm.is_off
    assert not drafter.began
    drafter.version = 1
    texts = [[*each.prompt.tokens, *each.tokens] for each in engine.running]
    assert engine.step().arm.is_off, "its rows have no features yet"
    assert drafter.began == [(row, text, 0) for row, text in enumerate(texts)]
    drafter.began.clear()
    step = engine.step()
    assert str(step.arm) == "layer:2"
    assert max(step.counts) > 1
    finish(engine)
    assert [rollout.tokens for rollout in made] == plain
    assert drafter.began
    assert all(len(text) - 1 == num for _, text, num in drafter.began), "later samples begin with features"


def test_a_sink_gets_its_share_of_the_cost_and_whole_samples(policy):
    """Each update is said to cost a tenth of a step, and a hundredth is allowed."""
    now_s = [0.0]

    class Costly(Recorder):
        max_share = 0.01

        def update(self, taken, version):
            super().update(taken, version)
            now_s[0] += 0.1

    asked = [replace(each, group=-1) for each in prompts_of(400, max_new_tokens=4)]
    engine = engine_of(policy, rows=1)
    step = engine.target.step

    def timed(*given):
        now_s[0] += 1.0
        return step(*given)

    engine.target.step, engine.cost_clock = timed, lambda: now_s[0]
    engine.sink = sink = Costly()
    list(engine.generate(asked))
    assert 0.06 <= len(sink.ended) / 400 <= 0.14
    for tokens, features, num_prompt, *_ in sink.ended:
        assert len(tokens) - num_prompt == 4
        assert sum(map(len, features)) == len(tokens) - 1


def test_what_is_not_collected_costs_no_features(policy):
    """A later sample with the same beginning starts with the features that are known."""
    asked = prompts_of(3, max_new_tokens=30, seed=5)
    texts = texts_of(asked, decode_plainly(policy, asked))
    engine = engine_of(policy, rows=2)
    engine.sink = sink = Recorder()
    sink.collects = False
    list(engine.generate(asked))
    assert not sink.ended
    sink.collects = True
    starts = []

    def begin(rows, version):
        starts.extend(rows)
        for each in rows:
            sink.rows[each.row] = [list(each.tokens), [each.features_Td.clone()], each.num_prompt, version]

    sink.begin = begin
    again = [
        Prompt(tokens=tuple(text), rollout=50 + i, sampling=Sampling(max_new_tokens=3))
        for i, text in enumerate(texts)
    ]
    list(engine.generate(again))
    assert len(starts) == 3
    for start in starts:
        known = features_of(policy, start.tokens)[:-1]
        num = len(start.features_Td)
        assert num < len(start.tokens) - 1, "the blocks of its text have none"
        assert torch.allclose(start.features_Td, known[len(known) - num :], atol=1e-9)
