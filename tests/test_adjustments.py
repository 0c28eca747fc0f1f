"""Tests min-p, penalties, logit bias, constraints and top log-probabilities against transformers and NumPy.

The reference draws each token from a full forward pass of transformers' own model, with transformers' own
processors where there is one. All arms must give its tokens in float64.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.markov import chi_square
from kit.rollouts import VOCABULARY, Flips, Insider, engine_of, logprobs_of, next_logits, tiny_policy
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from aedit.launch.cli.generate import score_gap
from aedit.spec_rollout.drafters import Draft, DraftLayer, LayerDrafter, SuffixDrafter
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.engine import verification as verdict
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import (
    LogitAdjustments,
    Prompt,
    Rollout,
    RowSampling,
    Sampling,
    adjustments,
    decode_prompt,
    encode_prompt,
    gumbel,
)


class Steps:
    """Constraint: the next token is at most 20 ids from the last one, or from 30 at the beginning."""

    def __init__(self, form="mask", width=20, vocabulary=VOCABULARY):
        self.form, self.width, self.vocabulary, self.seen = form, width, vocabulary, []

    def allowed(self, tokens):
        self.seen.append(tokens)
        middle = tokens[-1] if tokens else 30
        ids = [i for i in range(self.vocabulary) if abs(i - middle) <= self.width]
        if self.form == "mask":
            mask = torch.zeros(self.vocabulary, dtype=torch.bool)
            mask[ids] = True
            return mask
        return ids if len(tokens) % 2 else range(ids[0], ids[-1] + 1)


KINDS = {
    "repetition": {"repetition_penalty": 1.8},
    "reward of repetition": {"repetition_penalty": 0.6, "temperature": 0.0},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5, "temperature": 0.0},
    "negative frequency": {"frequency_penalty": -0.7, "temperature": 0.7},
    "min-p": {"min_p": 0.1},
    "bias": {"logit_bias": {3: 4.0, 9: -50.0, 11: 1.5}},
    "constraint": {"constraint": Steps(), "temperature": 0.8},
    "constraint by ids, greedy": {"constraint": Steps("ids"), "temperature": 0.0},
    "all": {
        "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "min_p": 0.02,
        "logit_bias": {7: 2.0}, "constraint": Steps(), "temperature": 0.7, "top_k": 30, "top_p": 0.95,
        "top_logprobs": 3,
    },
    "none": {},
}  # fmt: skip
FLIPS = ["layer:4", "off", "layer:4x3x12", "suffix:4", "layer:2x2x4", "suffix:2"]


def samples():
    """Return three samples of each kind; two of them of one group, with a repetitive prompt."""
    made = []
    for number, kind in enumerate(KINDS):
        draw = torch.Generator().manual_seed(number)
        few = torch.randint(VOCABULARY, (4,), generator=draw)
        prompt = few[torch.randint(4, (9,), generator=draw)].tolist()
        for i, length in enumerate((9, 9, 3)):
            stops = {"stop_tokens": (5, 40), "min_new_tokens": 5} if i == 2 else {}
            sampling = Sampling(**KINDS[kind], **stops, max_new_tokens=20 - 4 * i)
            group = number if i < 2 else -1
            tokens = tuple(prompt[:length])
            made.append(Prompt(tokens=tokens, rollout=number, sample=i, group=group, sampling=sampling))
    return made


def adjusted(logits_V, prompt, answer):
    """Return the logits from which the token after the answer is drawn."""
    sampling, x = prompt.sampling, logits_V.clone()[None]
    for token, bias in sampling.logit_bias.items():
        x[0, token] += bias
    if sampling.repetition_penalty != 1:
        text = torch.tensor([[*prompt.tokens, *answer]])
        x = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(text, x)
    counts = np.bincount(np.array(answer, dtype=int), minlength=len(logits_V))
    penalty = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    x = x - torch.from_numpy(penalty)
    if sampling.constraint is not None:
        allowed = Steps("mask", vocabulary=len(logits_V)).allowed(answer)
        x = x.masked_fill(~allowed, -torch.inf)
    if len(answer) < sampling.min_new_tokens:
        x[0, list(sampling.stop_tokens)] = -torch.inf
    if sampling.temperature not in (0, 1):
        x = TemperatureLogitsWarper(sampling.temperature)(None, x)
    if sampling.top_k:
        x = TopKLogitsWarper(min(sampling.top_k, x.shape[-1]))(None, x)
    if sampling.top_p < 1:
        x = TopPLogitsWarper(sampling.top_p)(None, x)
    if sampling.min_p:
        x = MinPLogitsWarper(sampling.min_p)(None, x)
    return x[0]


def decode(model, prompts):
    """Return the tokens of each prompt, one full forward pass per token."""
    texts, going = [list(prompt.tokens) for prompt in prompts], list(range(len(prompts)))
    while going:
        logits = next_logits(model, [texts[i] for i in going])
        for i, logits_V in zip(list(going), logits, strict=True):
            prompt, text = prompts[i], texts[i]
            sampling, answer = prompt.sampling, tuple(text[len(prompt.tokens) :])
            scores = adjusted(logits_V, prompt, answer)
            if sampling.temperature:
                place = torch.tensor([[len(text)]])
                ids = (torch.tensor([number]) for number in prompt.key)
                scores = scores + gumbel(*ids, place, len(scores), dtype=torch.float64)[0, 0]
            text.append(int(scores.argmax()))
            if text[-1] in sampling.stop_tokens or len(answer) + 1 == sampling.max_new_tokens:
                going.remove(i)
    return [text[len(prompt.tokens) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.fixture(scope="module")
def world():
    policy, prompts = tiny_policy(), samples()
    return policy, prompts, decode(policy, prompts)


def engine_with(policy, rows, texts, *arms, mode="coupled"):
    """Return an engine with a drafter that knows most of the texts, and with the suffix drafter."""
    engine = engine_of(policy, rows, Insider(texts, honesty=0.8), *arms, mode=mode)
    drafters = {**engine.drafters, "suffix": SuffixDrafter(min_match=1)}
    return Engine(engine.target, drafters=drafters, chooser=engine.chooser, mode=mode)


def rollouts_of(engine, prompts):
    made = {rollout.prompt.key: rollout for rollout in engine.generate(prompts)}
    return [made[prompt.key] for prompt in prompts]


def texts_of(prompts, plain):
    return [[*prompt.tokens, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]


def test_every_setting_changes_the_tokens(world):
    policy, prompts, plain = world
    without = [replace(each, sampling=replace(each.sampling, **{
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0,
        "logit_bias": {}, "constraint": None,
    })) for each in prompts]  # fmt: skip
    other = decode(policy, without)
    for number, kind in enumerate(KINDS):
        mine = slice(3 * number, 3 * number + 3)
        assert (plain[mine] == other[mine]) == (kind == "none"), kind


@pytest.mark.parametrize("arms", [["off"], ["suffix:4"], ["layer:4"], ["layer:1"], ["layer:4x3x12"], FLIPS],
                         ids=lambda arms: "+".join(arms))  # fmt: skip
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_every_arm_gives_the_tokens_of_transformers_processors(world, arms, rows):
    policy, prompts, plain = world
    some = slice(None, None, 2 if rows == 1 else 1)
    engine = engine_with(policy, rows, texts_of(prompts, plain), *arms)
    made = rollouts_of(engine, prompts[some])
    assert [rollout.tokens for rollout in made] == plain[some]
    if arms != ["off"] and arms != ["suffix:4"]:
        assert engine.status()["accepted_length"] > 1.2
    for rollout in made:
        assert rollout.logprobs == pytest.approx(
            logprobs_of(policy, rollout.prompt, rollout.tokens), abs=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_a_program_changes_no_token(world, dtype):
    """Counts above 256 need more bits than bf16 has; a tree adds fp32 numbers to them."""
    policy, prompts, plain = world
    torch.set_default_dtype(dtype)
    try:
        engine = engine_with(policy, 33, texts_of(prompts, plain), *FLIPS)
        assert [rollout.tokens for rollout in rollouts_of(engine, prompts)] == plain
        sampling = Sampling(frequency_penalty=0.5, temperature=0.0)
        rollout = Rollout(Prompt(tokens=(1,), rollout=0, sample=0, sampling=sampling), [7] * 300)
        made = LogitAdjustments.of([rollout], VOCABULARY, "cpu")
        made.apply(torch.zeros(1, 1, VOCABULARY, dtype=torch.float32), None)
        rollout.tokens.append(7)
        logits = made.apply(torch.zeros(1, 1, VOCABULARY, dtype=torch.float32), None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits[0, 0, 7].item() == -0.5 * 301


def test_a_draft_layer_with_trees_gives_the_same_tokens(world):
    policy, prompts, plain = world
    target = Target.of(policy, rows=4, max_tokens=48, nodes=12)
    layer = DraftLayer.of(policy, generator=torch.Generator().manual_seed(0))
    flips = Flips("layer:4x3x12", "layer:3", "off")
    engine = Engine(target, drafters={"layer": LayerDrafter.of(layer, target)}, chooser=flips)
    assert [rollout.tokens for rollout in rollouts_of(engine, prompts)] == plain


def test_a_sample_that_moves_takes_its_counts_along(world):
    policy, prompts, plain = world
    texts = texts_of(prompts, plain)
    here, there = (engine_with(policy, rows, texts, *FLIPS) for rows in (4, 3))
    made, moved = [here.add(prompt) for prompt in prompts], []
    while here.running or here.waiting:
        here.step()
        there.step()
        if here.running and len(moved) < 12:
            moved.append(there.add(here.remove(here.running[-1], kv=len(moved) % 2 == 0)))
    list(there.generate([]))
    ended = {each.prompt.key: each for each in [*made, *moved] if each.finish_reason}
    assert [ended[prompt.key].tokens for prompt in prompts] == plain
    assert any(len(each.versions) > 0 for each in moved)
    for prompt in prompts:
        number = prompt.sampling.top_logprobs
        assert len(ended[prompt.key].top_logprobs) == (len(ended[prompt.key].tokens) if number else 0)


def test_scores_for_the_comparison_of_runs_are_those_of_the_reference(world):
    policy, prompts, plain = world
    target = Target.of(policy, rows=1, max_tokens=48)
    for prompt, tokens in zip(prompts, plain, strict=True):
        index = min(4, len(tokens) - 1)
        answer = tuple(tokens[:index])
        logits = next_logits(policy, [[*prompt.tokens, *answer]])[0]
        scores = adjusted(logits, prompt, answer)
        if prompt.sampling.temperature:
            place = torch.tensor([[len(prompt.tokens) + index]])
            ids = (torch.tensor([number]) for number in prompt.key)
            scores = scores + gumbel(*ids, place, VOCABULARY, dtype=torch.float64)[0, 0]
        other = int(scores.topk(2).indices[1])
        gap = score_gap(target, Rollout(prompt, tokens), Rollout(prompt, [*answer, other]), index)
        expected = float(scores[tokens[index]] - scores[other])
        assert gap == pytest.approx(expected, abs=1e-5)


# --- each node of a draft has a text of its own


def history_case(seed):
    """Return rollouts, a tree of drafted tokens with repeats, and logits."""
    draw = torch.Generator().manual_seed(seed)
    settings = [
        Sampling(repetition_penalty=1.7, frequency_penalty=0.5, presence_penalty=0.25),
        Sampling(),
        Sampling(frequency_penalty=-0.5, constraint=Steps(width=200, vocabulary=12)),
        Sampling(repetition_penalty=0.5, logit_bias={3: 1.0}),
    ]
    rollouts = [
        Rollout(Prompt(tokens=tuple(torch.randint(12, (4,), generator=draw).tolist()), sampling=each),
                torch.randint(12, (i * 2,), generator=draw).tolist())
        for i, each in enumerate(settings)
    ]  # fmt: skip
    tokens = torch.randint(4, (4, 7), generator=draw)
    parents = torch.tensor([[-1, -1, 0, 0, 2, 1, 4], list(range(-1, 6)), [-1] * 7, [-1, 0, 0, 1, 1, 2, 2]])
    return rollouts, tokens, parents, torch.randn(4, 8, 12, generator=draw, dtype=torch.float64)


def paths(parents):
    """Return the nodes from the root down to each verified token."""
    found = [[]]
    for n, parent in enumerate(parents):
        found.append([*found[parent + 1], n])
    return found


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_each_node_counts_the_drafted_tokens_above_it_and_itself(is_tree, seed):
    rollouts, tokens, parents, logits = history_case(seed)
    made = LogitAdjustments.of(rollouts, 12)
    draft = Draft(tokens, parents if is_tree else None, None, tokens.double())
    for _ in range(2):
        ours = made.apply(logits, draft)
        for row, rollout in enumerate(rollouts):
            above = parents[row].tolist() if is_tree else range(-1, 6)
            for index, path in enumerate(paths(above)):
                answer = [*rollout.tokens, *tokens[row, path].tolist()]
                prompt = replace(rollout.prompt, sampling=replace(
                    rollout.prompt.sampling, constraint=None, temperature=1.0))  # fmt: skip
                expected = adjusted(logits[row, index], prompt, answer)
                assert torch.allclose(ours[row, index], expected, rtol=0, atol=1e-12)
        for rollout in rollouts:  # emitted tokens are counted once
            rollout.tokens += [3, 3, 1]


def test_nobody_who_asks_for_nothing_pays():
    prompts = [Rollout(Prompt(tokens=(1,), sampling=Sampling(temperature=t))) for t in (0.0, 1.0)]
    assert LogitAdjustments.of(prompts, 12) is None
    rows = RowSampling.of([each.prompt.sampling for each in prompts], 12)
    assert (rows.log_min_p_B11, rows.is_cold_B11, rows.max_top_logprobs, rows.has_masks) == (
        None, None, 0, False,
    )  # fmt: skip


# --- top log-probabilities


@pytest.mark.parametrize("arm", ["off", "layer:4", "layer:4x3x12", "suffix:4"])
def test_top_log_probabilities_are_those_of_teacher_forcing(world, arm):
    policy, prompts, _ = world
    asked = [replace(prompt, sampling=replace(prompt.sampling, top_logprobs=i % 4))
             for i, prompt in enumerate(prompts)]  # fmt: skip
    plain = decode(policy, asked)
    engine = engine_with(policy, 5, texts_of(asked, plain), arm)
    for rollout in rollouts_of(engine, asked):
        sampling, text = rollout.prompt.sampling, [*rollout.prompt.tokens, *rollout.tokens]
        if not sampling.top_logprobs:
            assert rollout.top_logprobs == []
            continue
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([text]), use_cache=False).logits[0]
        logp = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
        expected = logp[len(rollout.prompt.tokens) - 1 : -1].topk(sampling.top_logprobs)
        assert len(rollout.top_logprobs) == len(rollout.tokens)
        for i, top in enumerate(rollout.top_logprobs):
            assert [token for token, _ in top] == expected.indices[i].tolist()
            assert [value for _, value in top] == pytest.approx(expected.values[i].tolist(), abs=1e-6)
            by_token = dict(top)
            if rollout.tokens[i] in by_token:
                assert by_token[rollout.tokens[i]] == pytest.approx(rollout.logprobs[i], abs=1e-12)


def test_more_top_log_probabilities_than_tokens_are_all_of_them(world):
    policy, prompts, _ = world
    asked = replace(prompts[0], sampling=Sampling(max_new_tokens=2, top_logprobs=1000))
    (rollout,) = rollouts_of(engine_of(policy, 1), [asked])
    assert [len(top) for top in rollout.top_logprobs] == [VOCABULARY] * 2
    assert sum(np.exp(value) for _, value in rollout.top_logprobs[0]) == pytest.approx(1.0)


# --- constraints


@pytest.mark.parametrize("arm", ["layer:4", "layer:4x3x12", "suffix:4"])
def test_a_constraint_sees_only_texts_that_a_rollout_can_have(world, arm):
    policy, prompts, plain = world
    constraint = Steps(width=12)
    stops = tuple(range(0, 64, 3))
    sampling = Sampling(constraint=constraint, stop_tokens=stops, min_new_tokens=2, max_new_tokens=9)
    asked = [replace(prompt, sampling=sampling) for prompt in prompts[:12]]
    engine = engine_with(policy, 4, texts_of(prompts, plain), arm)
    made = rollouts_of(engine, asked)
    assert any(rollout.finish_reason == "stop" for rollout in made)
    for text in constraint.seen:
        assert len(text) < 9
        assert not set(text[:-1][2:]) & set(stops)
        for before, token in zip((30, *text), text, strict=False):
            assert abs(before - token) <= 12
    assert {tuple(rollout.tokens[:1]) for rollout in made} <= set(constraint.seen)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (torch.ones(3, dtype=torch.bool), r"rollout 0/0: the mask has shape \(3,\), expected \(64,\)"),
        (torch.ones(64), "returned torch.float32"),
        ([True] * 64, "returned torch.bool"),
        ([1, 64], "token ids 1 to 64 exceed the vocabulary of 64"),
        ([-1], "token ids -1 to -1"),
        ([], "no allowed token"),
        (torch.zeros(64, dtype=torch.bool), "no allowed token"),
    ],
)
def test_a_constraint_that_answers_wrongly_is_named(world, answer, says):
    class Wrong:
        def allowed(self, tokens):
            return answer

    policy, prompts, _ = world
    engine = engine_of(policy, 1)
    rollout = engine.add(replace(prompts[0], sampling=Sampling(constraint=Wrong(), max_new_tokens=4)))
    with pytest.raises(ValueError, match=says):
        engine.step()
    assert rollout.tokens == []
    engine.abort(rollout)


def test_a_constraint_is_not_sent_and_everything_else_is():
    sampling = Sampling(**{**KINDS["all"], "constraint": None})
    prompt = Prompt(tokens=(1, 2), rollout=3, sample=4, sampling=sampling)
    top = ((3, -0.5), (4, -1.5), (5, -2.0))
    rollout = Rollout(prompt, [5], [-0.1], [0], top_logprobs=[top])
    read = decode_prompt(encode_prompt(rollout.to_prompt()))
    assert read.sampling == sampling
    assert read.partial.top_logprobs == [top]
    with pytest.raises(ValueError, match="sample 3/4 has a constraint"):
        encode_prompt(replace(prompt, sampling=Sampling(constraint=Steps())))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\]"),
        ({"min_p": float("nan")}, "min_p must be a finite number"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be in \[1e-06, 1000000.0\], got 0.0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty must be a finite number"),
        ({"presence_penalty": "1"}, "presence_penalty must be a finite number"),
        (
            {"logit_bias": {3: float("-inf")}},
            "logit_bias must be a mapping from a whole number to a finite number, got {3: -inf}",
        ),
        ({"logit_bias": {"3": 1.0}}, "logit_bias must be a mapping from a whole number to a finite number"),
        ({"top_logprobs": -1}, r"top_logprobs must be at least 0"),
        ({"top_logprobs": 1.0}, "top_logprobs must be a whole number at least 0, got 1.0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(settings, says):
    with pytest.raises(ValueError, match=says):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"logit_bias": {64: 1.0}}, "token 64 of logit_bias is outside the vocabulary of 64"),
        ({"constraint": lambda tokens: None}, "constraint must be Constraint or none"),
    ],
)
def test_a_setting_that_does_not_fit_the_policy_is_refused(world, settings, says):
    with pytest.raises(ValueError, match=says):
        engine_of(world[0], 1).add(Prompt(tokens=(1,), sampling=Sampling(**settings, max_new_tokens=4)))


# --- statistics of rejection mode

V, LENGTH, PROMPT = 8, 3, (1, 2, 3, 1, 2)
SETTINGS = {
    "repetition_penalty": 1.5, "frequency_penalty": 0.8, "presence_penalty": -0.5, "min_p": 0.03,
    "logit_bias": {4: 0.7}, "temperature": 0.8,
}  # fmt: skip


def small():
    return tiny_policy(kind=(lambda **sizes: LlamaConfig(**sizes | {"vocab_size": V}), LlamaForCausalLM))


def chances(policy, sampling):
    """Return the probability of every text of LENGTH tokens."""
    prompt, found = Prompt(tokens=PROMPT, sampling=sampling), {(): 1.0}
    for _ in range(LENGTH):
        texts = list(found)
        logits = next_logits(policy, [[*PROMPT, *text] for text in texts])
        found = {
            (*text, token): found[text] * p
            for text, logits_V in zip(texts, logits, strict=True)
            for token, p in enumerate(adjusted(logits_V, prompt, text).softmax(-1).tolist())
        }
    return found


def p_value(mode, num=2_000):
    policy, sampling = small(), Sampling(**SETTINGS, max_new_tokens=LENGTH)
    target = Target.of(policy, rows=100, max_tokens=len(PROMPT) + LENGTH, nodes=4)
    layer = DraftLayer.of(policy, generator=torch.Generator().manual_seed(0))
    drafters = {
        "layer": LayerDrafter.of(layer, target, mode=mode), "suffix": SuffixDrafter(min_match=1),
    }  # fmt: skip
    engine = Engine(target, drafters=drafters, chooser=Flips("layer:2", "suffix:2", "layer:1"), mode=mode)
    prompts = [Prompt(tokens=PROMPT, rollout=i, group=1, sampling=sampling) for i in range(num)]
    expected = chances(policy, sampling)
    seen = dict.fromkeys(expected, 0)
    for rollout in engine.generate(prompts):
        seen[tuple(rollout.tokens)] += 1
    counts, p = (np.array([table[text] for text in expected]) for table in (seen, expected))
    assert not counts[p == 0].any()
    return chi_square(counts[p > 0], num * p[p > 0])


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_every_text_is_as_likely_as_the_adjusted_policy_makes_it(mode):
    assert p_value(mode) > 1e-3


# --- mistakes


def the_draft_is_not_counted(patch):
    right = LogitAdjustments._counts
    patch.setattr(LogitAdjustments, "_counts", lambda self, draft, q: right(self, None, q))


def siblings_are_counted(patch):
    patch.setattr(adjustments, "ancestors", lambda parents: torch.ones(
        len(parents), parents.shape[1] + 1, parents.shape[1] + 1).tril())  # fmt: skip


def a_node_does_not_count_itself(patch):
    right = LogitAdjustments._counts

    def wrong(self, draft, q):
        return torch.cat((right(self, draft, q)[:, :1], right(self, draft, q)[:, :-1]), 1)

    patch.setattr(LogitAdjustments, "_counts", wrong)


def emitted_tokens_are_not_counted(patch):
    patch.setattr(LogitAdjustments, "_count_emitted", lambda self: None)


def emitted_tokens_are_counted_again(patch):
    right = LogitAdjustments._count_emitted

    def wrong(self):
        self.num_counted = [0] * len(self.rollouts)
        right(self)

    patch.setattr(LogitAdjustments, "_count_emitted", wrong)


def the_prompt_is_counted_as_answer(patch):
    right = LogitAdjustments.of.__func__

    def wrong(cls, *args):
        made = right(cls, *args)
        if made is not None:
            made.counts_BV += made.in_prompt_BV
        return made

    patch.setattr(LogitAdjustments, "of", classmethod(wrong))


def a_constraint_is_asked_once_per_step(patch):
    right = adjustments.allowed_after
    patch.setattr(adjustments, "allowed_after", lambda rollout, guesses, parents, vocabulary: {
        n: right(rollout, [], [], vocabulary)[0] for n in range(len(guesses) + 1)})  # fmt: skip


def a_constraint_is_not_asked_along_the_draft(patch):
    right = adjustments.allowed_after
    patch.setattr(adjustments, "allowed_after", lambda rollout, *rest: right(rollout, [], [], rest[-1]))


def log_probabilities_are_those_after_penalties(patch):
    right = LogitAdjustments.apply

    def wrong(self, logits, draft):
        logits.copy_(right(self, logits, draft))
        return logits

    patch.setattr(LogitAdjustments, "apply", wrong)


def what_is_said_of_one_row_is_said_of_all(patch):
    right = verdict.top_logprobs
    patch.setattr(verdict, "top_logprobs", lambda *args: tuple(x[:1].expand_as(x) for x in right(*args)))


MISTAKES = [
    the_draft_is_not_counted, siblings_are_counted, a_node_does_not_count_itself,
    emitted_tokens_are_not_counted, emitted_tokens_are_counted_again, the_prompt_is_counted_as_answer,
    a_constraint_is_asked_once_per_step, a_constraint_is_not_asked_along_the_draft,
    log_probabilities_are_those_after_penalties, what_is_said_of_one_row_is_said_of_all,
]  # fmt: skip


def facts(rollout, policy):
    logits = policy(input_ids=torch.tensor([[*rollout.prompt.tokens, *rollout.tokens]])).logits[0]
    logp = logits[len(rollout.prompt.tokens) - 1 : -1] / (rollout.prompt.sampling.temperature or 1.0)
    best = logp.argmax(-1).tolist() if rollout.prompt.sampling.top_logprobs else []
    return [token for (token, _), *_ in rollout.top_logprobs] == best


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_seen(world, mistake, monkeypatch):
    policy, prompts, plain = world
    mistake(monkeypatch)
    engine = engine_with(policy, 5, texts_of(prompts, plain), *FLIPS)
    try:
        made = rollouts_of(engine, prompts)
    except (AssertionError, RuntimeError, ValueError, IndexError):
        return
    same = [rollout.tokens for rollout in made] == plain
    logprobs = all(
        rollout.logprobs == pytest.approx(logprobs_of(policy, rollout.prompt, rollout.tokens), abs=1e-6)
        for rollout in made
    )
    assert not (same and logprobs and all(facts(rollout, policy) for rollout in made))
