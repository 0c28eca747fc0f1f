"""Tests the benchmark of a moving policy: its measurements, its training and its bars."""

import math
from dataclasses import replace

import pytest
import torch
from benchmarks import drift as drift_drafters
from benchmarks.drift import (
    AHEAD,
    QUICK,
    Checkpoint,
    Gate,
    Mover,
    Standing,
    depths,
    moved,
    oracle,
    paced,
    policy_gradient,
    recovery,
    report,
)
from kit.tiny_policies import drafter, ends, policy, said
from torch.distributions import Categorical, kl_divergence
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.spec_rollout.sampling import Prompt, Rollout
from aedit.spec_rollout.training import held_out_match, pack_samples


def speaker(seed):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, initializer_range=0.2, **sizes, **heads)).eval()


def rollout(text, group=0, prompt="def f"):
    return Rollout(Prompt(tokens=tuple(prompt.encode()), group=group), [*text.encode()])


def of_many_lengths(count):
    return [
        rollout("e fee x"[: 3 + i % 5] * (1 + i // 3), i % 4, "def long"[: 2 + i % 6]) for i in range(count)
    ]


def test_how_far_a_policy_has_moved_is_the_divergence_of_its_whole_distributions():
    now, start = speaker(0), speaker(1)
    rollouts = of_many_lengths(20)
    kls, entropies = [], []
    for one in rollouts:
        ids = torch.tensor([[*one.prompt.tokens, *one.tokens]])
        p, p_start = (Categorical(logits=m(input_ids=ids).logits[0].detach().double()) for m in (now, start))
        said_at = slice(len(one.prompt.tokens) - 1, ids.shape[1] - 1)
        kls.append(kl_divergence(p, p_start)[said_at])
        entropies.append(p.entropy()[said_at])
    kl, entropy = moved(now, start, rollouts)
    assert kl == pytest.approx(float(torch.cat(kls).mean()), rel=1e-4)
    assert entropy == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-4)
    assert moved(now, now, rollouts)[0] == 0


def test_a_rollout_is_weighed_against_its_own_group_and_equal_ones_teach_nothing():
    texts = {"eeex": 0, "xxxy": 0, "xyxx": 0, "xyxz": 0, "ex": 1, "xe": 1}
    rollouts = [rollout(text, group) for text, group in texts.items()]
    num_tokens = sum(map(len, texts))
    lessons = policy_gradient([rollouts[i] for i in (4, 1, 0, 3, 5, 2)])
    weights = {bytes(one.rollout.tokens).decode(): one.weight * num_tokens for one in lessons}
    others = dict.fromkeys(("xxxy", "xyxx", "xyxz"), pytest.approx(-(3**-0.5)))
    assert weights == {"eeex": pytest.approx(3**0.5), **others}


def test_a_step_of_a_policy_follows_the_weighed_log_probabilities_of_answers_alone():
    """The oracle for the gradient that AdamW got is one text at a time in float32."""
    model, other = speaker(0), speaker(0)
    lessons = policy_gradient(of_many_lengths(18))
    mover, grads = Mover(model, 1e-3), {}
    mover._inner.register_step_pre_hook(
        lambda *_: grads.update({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    mover.learn(lessons)
    total = torch.zeros(())
    for lesson in lessons:
        prompt, answer = lesson.rollout.prompt.tokens, lesson.rollout.tokens
        ids = torch.tensor([[*prompt, *answer]])
        logp = other(input_ids=ids).logits[0, :-1].log_softmax(-1)
        total = total - lesson.weight * logp.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()
    total.backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    mine = torch.cat([grads[name].flatten() for name, _ in other.named_parameters()])
    right = torch.cat([p.grad.flatten() for p in other.parameters()])
    assert torch.cosine_similarity(mine, right, dim=0) > 0.999
    assert mine.norm() == pytest.approx(float(right.norm()), rel=0.01)


def test_a_rewarded_policy_says_more_of_what_is_rewarded_and_moves_away():
    model, start = speaker(0), speaker(0)
    mover, rollouts = Mover(model, 3e-3), [rollout("eeeeeeee"), rollout("xyxyxyxy")]
    for _ in range(10):
        mover.learn(policy_gradient(rollouts))
    ids = torch.tensor([[*rollouts[0].prompt.tokens]])
    before, after = (m(input_ids=ids).logits[0, -1].log_softmax(-1)[ord("e")] for m in (start, model))
    assert after > before + 0.5
    assert moved(model, start, rollouts)[0] > 0.05


def test_a_policy_keeps_to_its_schedule_however_far_a_step_takes_it():
    """The root of the policy's KL moves by `stride` per unit of the rates."""
    for stride in (0.01, 0.02, 0.05, 0.1):
        lr, lr_sum, seen = 1.0, 0.0, []
        for step in range(36):
            seen.append((stride * lr_sum) ** 2)
            lr = paced(lr, lr_sum, seen[-1], 1.5 * ((step + AHEAD) / 36) ** 2)
            lr_sum += lr
        late = [kl / (1.5 * (step / 36) ** 2) for step, kl in enumerate(seen) if step >= 24]
        assert 0.8 < min(late) <= max(late) < 1.25


def test_a_policy_that_has_not_moved_goes_on_as_it_was():
    assert paced(0.5, 0.0, 0.0, 0.3) == paced(0.5, 1.0, 0.0, 0.3) == 0.5


def test_the_schedule_ends_where_it_is_to_end_and_starts_where_it_began():
    size = replace(QUICK, steps=36, looks=6, kl_nats=1.5)
    assert size.wanted_nats(0) == 0
    assert size.wanted_nats(36) == 1.5
    assert size.wanted_nats(18) == pytest.approx(1.5 / 4)
    assert size.checkpoint_steps == [0, 6, 12, 18, 24, 30, 36]


def test_an_oracle_is_better_on_what_it_has_not_seen_and_stops_when_it_learns_no_more(monkeypatch):
    monkeypatch.setattr(drift_drafters, "ROUND_STEPS", 6)
    model = policy(dtype=torch.float32)
    prompts = torch.randint(48, (24, 4), generator=torch.Generator().manual_seed(0)).tolist()
    samples = said(model, prompts, 40)
    layer = drafter(model).float()
    apart = pack_samples([sample for sample in samples if sample.serial % 8 == 0], 512)
    best, steps = oracle(layer, samples, ends(model), most_rounds=2)
    assert steps == 12
    assert (
        held_out_match(best, apart, ends(model), 4).rate > held_out_match(layer, apart, ends(model), 4).rate
    )
    monkeypatch.setattr(drift_drafters, "LEARNS_NO_MORE", 1.0)
    _, steps = oracle(layer, samples, ends(model), most_rounds=20)
    assert steps == 6 * (drift_drafters.HALVINGS + 1)


def seen(step, kl, **tokens):
    four = (0.8, 0.7, 0.6, 0.4)
    drafters = {name.replace("_", "-"): Standing(value, four, four) for name, value in tokens.items()}
    drafters["suffix"] = Standing(1.1, (), ())
    return Checkpoint(
        step=step,
        kl_nats=kl,
        entropy_nats=0.5,
        drafters=drafters,
        gate=Gate(2, 5),
        trainer_s=3.0,
        idle_s=3.1,
        oracle_steps=64,
        unlike=0,
    )


GOOD = [
    seen(0, 0.0, static=3.0, idle_trained=3.0, control=3.0, oracle=3.1),
    seen(3, 0.08, static=2.9, idle_trained=2.9, control=2.9, oracle=3.1),
    seen(6, 0.5, static=2.0, idle_trained=2.8, control=2.1, oracle=3.0),
    seen(9, 1.2, static=1.8, idle_trained=2.9, control=1.9, oracle=3.0),
]


def verdicts(checkpoints):
    return [bar.passed for bar in report(checkpoints, QUICK).bars]


def test_bars_are_for_the_checkpoints_they_name_and_the_worst_of_these_decides():
    assert verdicts(GOOD) == [True] * 5
    assert recovery(GOOD[2]) == pytest.approx(0.8)
    harmed = [*GOOD, seen(1, 0.02, static=3.0, idle_trained=2.9, control=3.0, oracle=3.1)]
    assert verdicts(harmed) == [True, False, True, True, True]
    slow = [*GOOD, seen(8, 0.9, static=2.0, idle_trained=1.9, control=2.2, oracle=3.0)]
    assert verdicts(slow) == [True, True, False, False, False]
    assert verdicts(GOOD[:2]) == [False, True, None, None, None]


def test_what_an_oracle_cannot_better_is_no_recovery():
    assert math.isnan(recovery(seen(1, 0.4, static=3.0, idle_trained=3.0, control=3.0, oracle=3.0)))


def test_tables_have_a_cell_for_each_column():
    for made in (report(GOOD, QUICK), depths(GOOD)):
        assert {len(row) for row in made.rows} == {len(made.columns)}
    assert depths(GOOD).rows[0][5] == "0.50"
