"""Tests that what would give wrong or equal samples without a word is an error that names the sample."""

from dataclasses import replace

import pytest
import torch
from kit.rollouts import (
    KINDS,
    VOCABULARY,
    Flips,
    Insider,
    decode_plainly,
    engine_of,
    prompts_of,
    samples,
    tiny_policy,
    tokens_of,
)

from aedit.spec_rollout.drafters import SuffixDrafter
from aedit.spec_rollout.engine import Engine, EngineLimits
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Rollout, RowSampling, Sampling, logprobs, warp_logits
from aedit.spec_rollout.sampling.samples import MAX_TEMPERATURE, MIN_TEMPERATURE

ARMS = ["off", "layer:4", "layer:4x3x12"]


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


# --- keys


def without_ids(count, **sampling):
    return [Prompt(tokens=(1, 2), sampling=Sampling(max_new_tokens=12, **sampling)) for _ in range(count)]


def test_samples_without_ids_get_keys_of_their_own_and_differ(policy):
    rollouts = list(engine_of(policy, 4).generate(without_ids(6)))
    assert sorted(rollout.prompt.key for rollout in rollouts) == [(-i, 0) for i in range(6, 0, -1)]
    assert len({tuple(rollout.tokens) for rollout in rollouts}) == 6


def test_keys_follow_the_order_of_adding_so_that_a_program_run_again_gets_the_same_texts(policy):
    made = []
    for _ in range(2):
        engine = engine_of(policy, 2)
        first = engine.add(without_ids(1)[0])
        rest = list(engine.generate(without_ids(3)))
        made.append([first.prompt.key, *sorted((each.prompt.key, tuple(each.tokens)) for each in rest)])
    assert made[0] == made[1]


def test_a_key_that_was_given_is_not_assigned_again(policy):
    engine = engine_of(policy, 2)
    given = [replace(without_ids(1)[0], rollout=-i, sample=0) for i in (1, 3)]
    made = [engine.add(given[0]), engine.add(without_ids(1)[0])]
    engine.generate([*without_ids(1), given[1]])
    keys = [rollout.prompt.key for rollout in engine.waiting]
    assert keys == [(-1, 0), (-2, 0), (-4, 0), (-3, 0)]
    assert made[1].prompt.key == (-2, 0)


@pytest.mark.parametrize("ids", [{"rollout": 5}, {"sample": 5}])
def test_an_id_that_is_not_given_beside_one_that_is_is_0(ids):
    prompt = Prompt(tokens=(1,), **ids)
    assert prompt.key == (ids.get("rollout", 0), ids.get("sample", 0))
    assert replace(prompt, group=3).key == prompt.key


def test_a_key_in_use_is_refused_by_name_and_nothing_is_queued(policy):
    engine = engine_of(policy, 1)
    one, other = (Prompt(tokens=(1, i), rollout=7, sample=i) for i in (2, 3))
    one, other = (replace(each, sampling=Sampling(max_new_tokens=4)) for each in (one, other))
    running = engine.add(one)
    engine.add(other)
    engine.step()
    for wrong in (one, other):
        with pytest.raises(ValueError, match=rf"prompt 7/{wrong.sample}: .* has these ids, .* give each"):
            engine.add(wrong)
    new = replace(one, sample=9)
    for batch in ([new, new], [new, other]):
        with pytest.raises(ValueError, match="has these ids"):
            engine.generate(batch)
    assert [each.prompt.sample for each in (*engine.running, *engine.waiting)] == [2, 3]
    list(engine.generate([]))
    again = next(engine.generate([one]))
    assert again.tokens == running.tokens


def test_a_key_is_free_when_its_sample_has_left(policy):
    engine, prompts = engine_of(policy, 1), prompts_of(3, max_new_tokens=6)
    made = [engine.add(prompt) for prompt in prompts]
    engine.step()
    moved = engine.remove(made[0])
    assert moved.key == prompts[0].key
    waiting = engine.remove(made[2])
    engine.abort(made[1])
    engine.add(moved)
    engine.add(waiting)
    engine.add(prompts[1])
    engine.close()
    assert tokens_of(engine, prompts) == decode_plainly(policy, prompts)


# --- abort


def test_an_aborted_sample_keeps_its_tokens_and_the_others_are_not_changed(policy):
    prompts = samples(KINDS)
    plain = decode_plainly(policy, prompts)
    texts = [[*prompt.tokens, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    engine = engine_of(policy, 4, Insider(texts), *ARMS)
    made = [engine.add(prompt) for prompt in prompts]
    aborted = []
    for turn in range(6):
        engine.step()
        victim = [engine.running[0], *engine.waiting[-1:]][turn % 2]
        engine.abort(victim)
        aborted.append((victim, list(victim.tokens)))
    finished = list(engine.generate([]))
    assert any(tokens for _, tokens in aborted)
    assert any(not tokens for _, tokens in aborted)
    for victim, tokens in aborted:
        assert (victim.finish_reason, victim.tokens) == ("abort", tokens)
        assert victim not in finished
    for rollout, tokens in zip(made, plain, strict=True):
        assert rollout.tokens == tokens[: len(rollout.tokens)]
        assert rollout.finish_reason == "abort" or rollout.tokens == tokens
        assert rollout.finish_reason


def test_a_sample_can_be_aborted_inside_the_loop_that_generates(policy):
    engine = engine_of(policy, 3)
    short, long = (
        replace(prompt, sampling=Sampling(max_new_tokens=n))
        for prompt, n in zip(prompts_of(2), (2, 40), strict=True)
    )
    done = []
    for rollout in engine.generate([short, long]):
        done.append(rollout.prompt)
        for other in engine.running:
            engine.abort(other)
    assert done == [short]
    assert engine.status()["steps"] == 2


@pytest.mark.parametrize("steps", range(5))
def test_a_sample_whose_prompt_is_being_computed_in_parts_can_be_aborted(policy, steps):
    prompts = [replace(prompt, tokens=tuple(range(i, i + 20))) for i, prompt in enumerate(prompts_of(4))]
    plain = decode_plainly(policy, prompts)
    target = Target.of(policy, rows=2, max_tokens=48)
    engine = Engine(target, limits=EngineLimits(prefill_tokens=6))
    made = [engine.add(prompt) for prompt in prompts]
    for _ in range(steps):
        engine.step()
    engine.abort(made[1])
    list(engine.generate([]))
    for i in (0, 2, 3):
        assert made[i].tokens == plain[i]
    assert made[1].tokens == plain[1][: len(made[1].tokens)]
    assert made[1].finish_reason == "abort"


def test_what_has_ended_cannot_be_aborted_and_what_was_aborted_does_not_continue(policy):
    engine = engine_of(policy, 2)
    rollout = next(engine.generate(prompts_of(1, max_new_tokens=2)))
    with pytest.raises(ValueError, match="is not in this engine"):
        engine.abort(rollout)
    waiting = engine.add(prompts_of(1)[0])
    engine.abort(waiting)
    with pytest.raises(ValueError, match="ended already"):
        engine.add(waiting.to_prompt())


# --- weights that are not finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", ["greedy", "T = 1", "T = 0.7, top-k, top-p"])
@pytest.mark.parametrize("arm", ARMS)
def test_weights_that_are_not_finite_are_an_error_before_a_token_is_appended(value, kind, arm):
    broken, right = tiny_policy(), tiny_policy()
    prompts = samples([kind])[:3]
    plain = decode_plainly(right, prompts)
    texts = [[*prompt.tokens, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    engine = engine_of(broken, 3, Insider(texts), arm)
    made = [engine.add(prompt) for prompt in prompts]
    engine.step()
    before = [list(rollout.tokens) for rollout in made]
    weights = {name: tensor.clone() for name, tensor in right.state_dict().items()}
    weights["model.layers.1.mlp.up_proj.weight"][3] = value
    engine.update_weights(weights, 5)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"version 5 .* rollout 0/0, 0/1, 0/2: its logits are NaN"):
            engine.step()
        assert [rollout.tokens for rollout in made] == before
    engine.update_weights(right.state_dict(), 6)
    list(engine.generate([]))
    assert [rollout.tokens for rollout in made] == plain


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_an_error_in_rejection_mode(value):
    """No weight of such a distribution reaches the number that draws the token."""
    broken, prompts = tiny_policy(), samples(["T = 1"])[:3]
    engine = engine_of(broken, 3, Insider([]), "layer:3", mode="rejection")
    made = [engine.add(prompt) for prompt in prompts]
    weights = {name: tensor.clone() for name, tensor in broken.state_dict().items()}
    weights["model.layers.1.mlp.up_proj.weight"][3] = value
    engine.update_weights(weights, 5)
    with pytest.raises(ValueError, match=r"version 5 .* rollout 0/0, 0/1, 0/2: its logits are NaN"):
        engine.step()
    assert [rollout.tokens for rollout in made] == [[], [], []]


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_one_broken_sample_is_named_and_the_others_go_on_without_it(mode):
    """Only one text contains the token whose embedding is broken; another sample takes its row."""
    broken, right = tiny_policy(), tiny_policy()
    with torch.no_grad():
        broken.model.embed_tokens.weight[63] = torch.nan
    allowed = torch.arange(VOCABULARY) < 63
    prompts = prompts_of(5, temperature=0.0, max_new_tokens=8, allowed=allowed)
    prompts = [replace(each, tokens=tuple(token % 60 for token in each.tokens)) for each in prompts]
    prompts[1] = replace(prompts[1], tokens=(*prompts[1].tokens, 63, 1))
    target = Target.of(broken, rows=3, max_tokens=48)
    drafters = {"suffix": SuffixDrafter(min_match=1)}
    engine = Engine(target, drafters=drafters, chooser=Flips("suffix:4"), mode=mode)
    made = [engine.add(prompt) for prompt in prompts]
    with pytest.raises(ValueError, match=r"no next token for rollout 1/1: its"):
        list(engine.generate([]))
    engine.abort(made[1])
    list(engine.generate([]))
    others = [i for i in range(5) if i != 1]
    expected = decode_plainly(right, [prompts[i] for i in others])
    assert [made[i].tokens for i in others] == expected
    assert made[1].tokens == []


def test_a_sample_whose_allowed_tokens_are_all_impossible_is_an_error_and_not_token_0(policy):
    broken = tiny_policy()
    allowed = torch.zeros(VOCABULARY, dtype=torch.bool)
    allowed[5] = True
    infinite = torch.zeros(VOCABULARY)
    infinite[5] = -torch.inf
    engine = engine_of(broken, 1)
    logits = engine.target.logits
    engine.target.logits = lambda features: logits(features) + infinite
    engine.add(prompts_of(1, allowed=allowed)[0])
    with pytest.raises(ValueError, match="no allowed token has a finite one"):
        engine.step()


# --- numbers


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": float("nan")}, "temperature must be a finite number, got nan"),
        ({"temperature": float("inf")}, "temperature must be a finite number, got inf"),
        ({"temperature": 1e-38}, "temperature must be 0 or more: 0 .greedy., or 1e-30 to 1e.30, got 1e-38"),
        ({"temperature": 1e31}, "temperature must be"),
        ({"temperature": "1"}, "temperature must be a finite number"),
        ({"temperature": True}, "temperature must be a finite number"),
        ({"top_p": float("nan")}, "top_p must be a finite number"),
        ({"top_p": 1e-46}, r"top_p must be in \[1e-30, 1\]"),
        ({"top_p": 0}, r"top_p must be in \[1e-30, 1\]"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"top_k": float("inf")}, "top_k must be a whole number"),
        ({"max_new_tokens": 8.0}, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": float("nan")}, "max_new_tokens must be a whole number"),
        ({"min_new_tokens": True}, "min_new_tokens must be a whole number"),
        ({"stop_strings": "END"}, "stop_strings must be a list of text, got .END."),
    ],
)
def test_a_number_that_is_none_is_refused_by_name(settings, says):
    with pytest.raises(ValueError, match=says):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": torch.tensor([1, 2])}, "tokens must be a list of a whole number, got tensor"),
        ({"tokens": (1, 2.0)}, "tokens must be a list of a whole number"),
        ({"tokens": (True, 2)}, "tokens must be a list of a whole number"),
        ({"rollout": 1.0}, "rollout must be a whole number, got 1.0"),
        ({"sample": "0"}, "sample must be a whole number, got .0."),
        ({"group": None}, "group must be a whole number"),
        ({"rollout": -(1 << 63) - 1}, "rollout must fit into 64 bits"),
        ({"sampling": {"stop_tokens": (1.0,)}}, "stop_tokens must be a list of a whole number"),
        ({"sampling": {"allowed": [True] * VOCABULARY}}, "allowed must be a bool tensor, .* got list"),
        ({"partial": Rollout(Prompt(tokens=(1,)), [1.0], [0.0], [0])}, "tokens must be int, got float"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(policy, changes, says):
    def add():
        sampling = Sampling(**{"max_new_tokens": 8, **changes.get("sampling", {})})
        engine_of(policy, 1).add(Prompt(**{"tokens": (1, 2), **changes, "sampling": sampling}))

    with pytest.raises(ValueError, match=says):
        add()


def distribution(logits_V, temperature):
    """Return probabilities and log-probabilities in float64."""
    logp = (logits_V.double() / temperature).log_softmax(-1)
    return logp.exp(), logp


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 1e-20, 1e-6, 9e-3, 0.02, 1.0, 1e6, MAX_TEMPERATURE])
def test_distribution_and_log_probabilities_are_right_at_every_temperature_in_float32(temperature):
    draw = torch.Generator().manual_seed(0)
    logits = 10 * torch.randn(1, 40, 33, generator=draw)
    logits[0, :, 5] = logits[0].amax(-1)  # an exact tie of two, which the noise must decide
    logits[0, :20, 6] = logits[0, :20].amax(-1) * (1 - 1e-6)
    rows = RowSampling.of([Sampling(temperature=temperature)], 33)
    p, logp = distribution(logits[0], rows.temperature_B.double())
    assert torch.allclose(warp_logits(logits, rows)[0].double().softmax(-1), p, atol=2e-5)
    for token in range(33):
        tokens = torch.full((1, 40), token)
        ours = logprobs(logits, tokens, rows)[0].double()
        assert not ours.isnan().any()
        near = p[:, token] > 1e-6
        assert torch.allclose(ours[near], logp[near, token], rtol=1e-5, atol=1e-4)


def test_at_a_low_temperature_the_noise_decides_between_two_equal_tokens(policy):
    twins = tiny_policy(dtype=torch.float32)
    with torch.no_grad():
        twins.lm_head.weight[1::2] = twins.lm_head.weight[::2]
    asked = [
        replace(prompt, tokens=(1, 2, 3)) for prompt in prompts_of(40, temperature=1e-8, max_new_tokens=8)
    ]
    rollouts = list(engine_of(twins, 8).generate(asked))
    tokens = [token for rollout in rollouts for token in rollout.tokens]
    assert 0.35 < sum(token % 2 for token in tokens) / len(tokens) < 0.65
    for rollout in rollouts:
        assert rollout.logprobs == pytest.approx([-0.6931] * 8, abs=1e-2)
