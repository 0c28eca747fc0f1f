"""Tests the numbers that the policy loss of a node is given, and what it makes of them."""

from dataclasses import replace

import pytest
import torch
from kit import rl_losses, tiny_policies
from kit.audited import generate
from kit.plain_grpo import Recording
from kit.rl_nodes import config_of, records, run, weights

from aedit.edit import Shards
from aedit.launch.config import ModelConfig, PromptConfig, RLConfig, RunConfig, TrainConfig
from aedit.launch.node import build_model
from aedit.launch.node.rl_policy import PolicyGradient
from aedit.spec_rollout.rl import LOSSES
from aedit.types import ImportPath

SPY = {"rl__loss": ImportPath("kit.rl_losses:spy"), "drafter__kind": "off"}


@pytest.fixture
def seen():
    """Return the inputs of the loss, emptied before the test."""
    rl_losses.SEEN.clear()
    return rl_losses.SEEN


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_trainer_and_engine_agree_on_the_probability_of_each_token(tmp_path, seen, temperature):
    run(config_of(tmp_path, rl__sampling__temperature=temperature, rl__sampling__max_new_tokens=5, **SPY))
    assert len(seen) == 8  # 4 steps of 12 rollouts in two micro-batches
    for inputs in seen:
        apart = (inputs["logp_BT"] - inputs["behaviour_BT"])[inputs["mask_BT"]]
        assert apart.abs().max() < 1e-5
        assert inputs["logp_BT"][inputs["mask_BT"]].max() < 0
    total = sum(int(inputs["mask_BT"].sum()) for inputs in seen[:2])
    assert [inputs["num_tokens"] for inputs in seen[:2]] == [total, total]
    assert [inputs["num_sequences"] for inputs in seen[:2]] == [12, 12]


def test_micro_batches_change_no_weight_beyond_rounding(tmp_path):
    one = run(config_of(tmp_path / "one", train__batch_size=12, train__steps=1, drafter__kind="off"))
    four = run(config_of(tmp_path / "four", train__batch_size=3, train__steps=1, drafter__kind="off"))
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(four)[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("setting", [{"rl__importance": "token"}, {"rl__old_logprobs": "trainer"}])
def test_ratios_can_be_relative_to_the_policy_before_the_first_step_on_the_batch(tmp_path, seen, setting):
    keys = {**setting, "rl__epochs": 2, "train__batch_size": 12, "train__steps": 4}
    run(config_of(tmp_path, **keys, **SPY))
    first, second, third, fourth = seen
    for before, after in ((first, second), (third, fourth)):
        assert torch.equal(before["proximal_BT"], before["logp_BT"])
        assert torch.equal(after["proximal_BT"], before["logp_BT"])
        assert not torch.allclose(after["logp_BT"], before["logp_BT"], atol=1e-4)


def test_rollouts_without_a_reward_are_left_out_and_counted(tmp_path, seen):
    config = config_of(tmp_path, reward__functions=("kit.rl_rewards:some",), train__steps=2, **SPY)
    run(config)
    last = records(config, "metrics")[-1]["rl"]
    assert last["rollouts"] == 24
    assert 0 < last["excluded"] < 24
    trained = sum(int((inputs["mask_BT"].any(1)).sum()) for inputs in seen)
    assert trained == 24 - last["excluded"]
    assert last["reward"] > 0


def test_groups_without_signal_are_replaced_by_further_prompts(tmp_path):
    keys = {"reward__functions": ("kit.rl_rewards:rarely",), "rl__group_size": 2, "drafter__kind": "off"}
    plain = config_of(tmp_path / "plain", **keys)
    run(plain)
    dynamic = config_of(tmp_path / "dynamic", rl__dynamic_sampling=True, **keys)
    run(dynamic)
    without, replaced = (records(each, "metrics")[-1]["rl"] for each in (plain, dynamic))
    assert without["groups"] == 12
    assert without["no_signal"] > 0
    assert replaced["groups"] - replaced["no_signal"] == 12
    assert replaced["no_signal"] > 0


def test_answers_end_with_the_end_tokens_of_a_pretrained_model_too(tmp_path):
    """A chat model often ends its turn with another token than a text."""
    plain = config_of(tmp_path)
    model, ends = build_model(plain.model, 257, 16, 0, 256), range(60)
    model.generation_config.eos_token_id = list(ends)
    model.save_pretrained(tmp_path / "model")
    recording = Recording()
    keys = {"model__pretrained": str(tmp_path / "model"), "train__steps": 1, "drafter__kind": "off"}
    run(config_of(tmp_path, **keys), recording.watch)
    answers = [sample[1] for group in recording.batches[0] for sample in group]
    assert any(answer[-1] in ends for answer in answers)
    assert not any(token in ends for answer in answers for token in answer[:-1])


def gradient_of(samples, size=2, **rl):
    """Return gradients, rows of each pass back, and metrics of a step on `samples`, `size` at a time."""
    config = RunConfig(
        prompts=PromptConfig(source="a.jsonl"),
        model=ModelConfig(),
        rl=RLConfig(**rl),
        train=TrainConfig(batch_size=size),
    )
    model = tiny_policies.policy(dtype=torch.float32, loudness=1.0)
    made = PolicyGradient(
        config=config,
        model=model,
        reference=tiny_policies.policy(dtype=torch.float32, loudness=0.5) if config.rl.kl else None,
        shards=Shards(),
        device=torch.device("cpu"),
    )
    rows, learned = [], []
    model.register_forward_pre_hook(lambda *args: rows.append(len(args[2]["input_ids"])), with_kwargs=True)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: learned.append(rows[-1]))
    made.accumulate(samples, lambda loss: None)
    return {n: p.grad for n, p in model.named_parameters()}, learned, made.means()


def samples_with(advantages):
    samples = generate(tiny_policies.policy(dtype=torch.float32, loudness=1.0), len(advantages))
    return [replace(each, advantage=a) for each, a in zip(samples, advantages, strict=True)]


@pytest.mark.parametrize(("advantages", "size", "rl", "rows"), [
    ((0.0, 1.0, None, 0.0, -1.0, 0.0), 2, {}, [2]),
    ((0.0, 1.0, -1.0, 0.5, 0.0, 0.0), 2, {}, [2, 1]),
    ((0.0, 1.0, None, 0.0, -1.0, 0.0), 6, {}, [2]),
    ((0.0,) * 6, 2, {}, [2]),
    ((0.0, 1.0, None, 0.0, -1.0, 0.0), 2, {"kl": 0.1}, [2, 2, 2]),
    ((0.0, 1.0, None, 0.0, -1.0, 0.0), 2, {"loss": SPY["rl__loss"]}, [2, 2, 2]),
])  # fmt: skip
def test_samples_without_a_gradient_have_no_backward_pass(advantages, size, rl, rows, seen):
    """The oracle is a loss of one's own that is the same: of it nothing is known, so all are passed back."""
    samples = samples_with(advantages)
    found, learned, metrics = gradient_of(samples, size, **rl)
    whole, all_learned, all_metrics = gradient_of(samples, size, **rl | {"loss": SPY["rl__loss"]})
    assert (learned, sum(all_learned)) == (rows, 6)
    assert metrics == pytest.approx(all_metrics)
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-8)
    assert any(value.any() for value in whole.values()) == any(advantages)


@pytest.mark.parametrize("loss", LOSSES)
def test_with_the_trainers_log_probabilities_those_of_the_engine_have_no_influence(loss):
    samples = samples_with((0.0, 1.0, -1.0, 0.5, 0.0, -0.5))
    rounded = [replace(each, logprobs=[p - 1e-3 for p in each.logprobs]) for each in samples]
    for whose in ("trainer", "engine"):
        one, other = (gradient_of(each, loss=loss, old_logprobs=whose)[0] for each in (samples, rounded))
        equal = all(torch.equal(one[name], other[name]) for name in one)
        assert equal == (whose == "trainer")
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-2, atol=1e-3)
