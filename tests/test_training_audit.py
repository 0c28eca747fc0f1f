"""Tests of the audit in the training forward: margins, exclusion from the loss, accusation."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.kit import tiny_policies
from tests.kit.audited import generate, held

from aedit.edit import Shards
from aedit.launch.config import ModelConfig, PromptConfig, RLConfig, RunConfig, parse_config
from aedit.launch.config.rl import AuditConfig, RLSamplingConfig
from aedit.launch.node.rl_audit import TrainingAudit, audit_options
from aedit.launch.node.rl_objective import PolicyObjective
from aedit.launch.node.rl_policy import PolicyGradient
from aedit.spec_rollout.audit import (
    Calibration,
    ClaimedTokens,
    calibrate,
    calibration,
    margins,
    weights_files,
    write_calibrations,
)
from aedit.spec_rollout.audit.auditor import make_auditor
from aedit.spec_rollout.rl import Group, Problem
from aedit.spec_rollout.sampling import Sampling

VERSION = 6
SAMPLING = Sampling(max_new_tokens=20, temperature=0.8)


def policy():
    return tiny_policies.policy(dtype=torch.float32, loudness=1.0)


def config(**rl):
    sampling = RLSamplingConfig(temperature=0.8, max_new_tokens=20)
    return RunConfig(
        prompts=PromptConfig(source="a.jsonl"),
        rl=RLConfig(loss="grpo", sampling=sampling, **rl),
        model=ModelConfig(),
    )


def batch(lie=False):
    """Return six samples, the fourth one of a server; with `lie` one of its tokens is another."""
    rollouts = generate(policy(), 6, version=VERSION, sampling=SAMPLING)
    rollouts[3].servers.append((0, "liar"))
    if lie:
        rollouts[3].tokens[5] = (rollouts[3].tokens[5] + 1) % 48
    return [replace(each, advantage=(-1.0) ** i) for i, each in enumerate(rollouts)]


def gradient(samples, version=VERSION, steps=1):
    """Return the gradients of a policy loss on samples, and the accusations."""
    accused = []
    audit = TrainingAudit.of(config(), lambda *found: accused.append(found))
    made = PolicyGradient(
        config=config(),
        model=policy().train(),
        reference=None,
        shards=Shards(),
        device=torch.device("cpu"),
        audit=audit,
    )
    for step in range(steps):
        made.model.zero_grad()
        made.accumulate(samples, lambda loss: None, version if step == 0 else None)
    return {name: each.grad.clone() for name, each in made.model.named_parameters()}, accused


def objective(groups, settings, audit):
    """Return the objective of a rank whose next batch is `groups`, at policy version `VERSION`."""
    made = PolicyGradient(
        config=settings,
        model=policy().train(),
        reference=None,
        shards=Shards(),
        device=torch.device("cpu"),
        audit=audit,
    )
    return PolicyObjective(
        config=settings,
        sync=SimpleNamespace(steps=0),
        stream=SimpleNamespace(
            next_batch=lambda: groups, trained=lambda count: (), first_pending=lambda: len(groups)
        ),
        gradient=made,
        warm_up=None,
        records=SimpleNamespace(add_batch=lambda groups, version: None, train_s=0.0, newest={}),
        held_out=(),
        curriculum=None,
        greedy=SAMPLING,
        online=None,
        watch=None,
        directory=Path(),
        kept=SimpleNamespace(add_first=lambda step, groups, samples: None),
        version=VERSION,
        started=True,
    )


def groups_of(samples, size):
    """Return groups of `size` samples each, whose rewards are 1 and 0 in turn."""
    return [
        Group(
            position=i,
            problem=Problem(index=i, prompt="", tokens=(), columns={}),
            rollouts=tuple(samples[start : start + size]),
            rewards=tuple(float(j % 2) for j in range(size)),
        )
        for i, start in enumerate(range(0, len(samples), size))
    ]


def train(groups, **rl):
    """Train one batch with weights that move between the inner steps.

    Returns:
        The audit, the accusations, the objective, and the number of forward passes.
    """
    accused, passes = [], []
    settings = config(**rl)
    audit = TrainingAudit.of(settings, lambda *found: accused.append(found))
    made = objective(groups, settings, audit)
    model = made.gradient.model
    model.register_forward_hook(lambda *_: passes.append(1))
    made.take_groups()
    while made.has_steps():
        model.zero_grad()
        made.accumulate_gradients(lambda loss: None)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
        made.end_step()
    return audit, accused, made, len(passes)


def oracle(samples, num_tokens_of=None):
    """Return the gradients of the GRPO loss of these samples in plain torch, one at a time.

    At the first step all ratios are 1 and nothing is clipped: the loss is -A p / mu, averaged over the tokens
    of a sequence, then over `num_tokens_of` sequences.
    """
    model = policy().train()
    for sample in samples:
        prompt, rollout = sample.prompt.tokens, sample
        logits_TV = model(input_ids=torch.tensor([[*prompt, *rollout.tokens]])).logits[
            0, len(prompt) - 1 : -1
        ]
        logp_T = (logits_TV / 0.8).log_softmax(-1).gather(1, torch.tensor(rollout.tokens)[:, None])[:, 0]
        ratio_T = (logp_T - torch.tensor(rollout.logprobs)).exp()
        (-sample.advantage * ratio_T.mean() / (num_tokens_of or len(samples))).backward()
    return {name: each.grad for name, each in model.named_parameters()}


def assert_same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


def test_a_true_sample_of_a_server_is_trained_as_any_other():
    samples = batch()
    found, accused = gradient(samples)
    assert accused == []
    assert_same(found, oracle(samples))


def test_a_false_sample_has_no_part_in_the_loss_and_its_server_is_accused():
    samples = batch(lie=True)
    found, accused = gradient(samples)
    assert_same(found, oracle(samples[:3] + samples[4:], num_tokens_of=6))
    ((server, reason, evidence),) = accused
    assert server == "liar"
    assert reason.startswith("sample 7/3: a token is not the one")
    assert (evidence["place"], evidence["key"], evidence["version"]) == (5, [7, 3], VERSION)
    assert evidence["token"] == samples[3].tokens[5]
    assert evidence["right_token"] == batch()[3].tokens[5]


def test_it_stays_left_out_at_later_steps_on_the_batch():
    samples = batch(lie=True)
    found, accused = gradient(samples, steps=2)
    assert_same(found, oracle(samples[:3] + samples[4:], num_tokens_of=5))
    assert len(accused) == 1


@pytest.mark.parametrize("importance", ["off", "token"])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_false_sample_is_found_in_every_part_of_a_batch_before_the_weights_move(place, epochs, importance):
    samples = batch()
    rollout = samples[place]
    rollout.servers[:] = [(0, "liar")]
    rollout.tokens[5] = (rollout.tokens[5] + 1) % 48
    audit, accused, _, _ = train(groups_of(samples, 2), batches=3, epochs=epochs, importance=importance)
    ((server, _, evidence),) = accused
    assert (server, evidence["place"], evidence["version"]) == ("liar", 5, VERSION)
    assert audit.excluded == {rollout.prompt.key}


@pytest.mark.parametrize("importance", ["off", "token"])
def test_true_samples_of_servers_are_judged_once_each_and_pass_in_every_part(importance):
    samples = batch()
    for each in samples:
        each.servers[:] = [(0, "true")]
    audit, accused, made, _ = train(groups_of(samples, 2), batches=3, epochs=2, importance=importance)
    assert (accused, audit.excluded) == ([], set())
    record = audit.servers["true"]
    assert record.num_samples == len(samples)
    assert record.num_tokens == sum(len(each.tokens) for each in samples)
    assert set(made.gradient.proximal) == (
        {each.prompt.key for each in samples} if importance == "token" else set()
    )
    for each in samples if importance == "token" else ():
        # The engine's log-probabilities are those of the weights before the first step.
        found, known = made.gradient.proximal[each.prompt.key], each.logprobs
        torch.testing.assert_close(found.tolist(), known, rtol=0, atol=1e-4)


def test_a_false_sample_of_a_later_part_has_no_part_in_the_loss():
    samples = batch(lie=True)
    settings = config(batches=2)
    audit = TrainingAudit.of(settings, lambda *found: None)
    made = objective((), settings, audit).gradient
    made.before_steps([samples[:3], samples[3:]], VERSION)
    made.accumulate(samples[3:], lambda loss: None, None)
    found = {name: each.grad for name, each in made.model.named_parameters()}
    assert_same(found, oracle(samples[4:]))


def test_only_what_has_to_be_checked_costs_a_forward_pass_and_as_many_on_each_rank():
    groups, rl = groups_of(batch(), 2), {"batches": 3, "epochs": 1}
    assert train(groups, **rl)[3] == 3 + 1  # the fourth sample, in the second part
    for group in groups:
        for rollout in group.rollouts:
            rollout.servers.clear()
    assert train(groups, **rl)[3] == 3
    assert train(groups, importance="token", **rl)[3] == 3 + 1  # all six in one
    gradient = objective((), config(**rl), TrainingAudit.of(config(), print)).gradient
    gradient.shards = SimpleNamespace(size=1, most=lambda numbers: [2])
    assert len(gradient._to_check(batch()[1:], VERSION)) == 2, "another rank has two to check"
    assert gradient._to_check(batch()[1:], VERSION)[0].servers == [(0, "liar")]


@pytest.mark.parametrize(
    "change",
    [
        lambda rollout: rollout.servers.clear(),  # an engine of this node has generated it
        lambda rollout: rollout.servers.append((3, "")),  # only the first tokens are the server's
        lambda rollout: rollout.versions.__setitem__(slice(0, 10), [VERSION - 1] * 10),
    ],
    ids=["own", "continued here", "older version"],
)
def test_tokens_of_others_and_of_other_versions_are_not_judged(change):
    samples = batch(lie=True)
    change(samples[3])
    samples[3].tokens[12:] = batch()[3].tokens[12:]
    _, accused = gradient(samples)
    # Tokens after the false one were drawn after another text: only those before it are right.
    assert [each[2]["place"] for each in accused if each[2]["place"] <= 5] == []


def test_without_a_version_nothing_is_judged():
    _, accused = gradient(batch(lie=True), version=None)
    assert accused == []


def test_the_keys_of_the_configuration_turn_it_off_and_choose_the_limits():
    def of(text):
        return TrainingAudit.of(parse_config(text, "test"), print)

    assert of("[audit]\ntraining = false") is None
    assert of("[audit]\non = false") is None
    assert of("").dtype == torch.float32
    assert of('[model]\ndtype = "bf16"').dtype == torch.bfloat16
    assert of('[rl]\nengine_dtype = "bf16"').dtype == torch.bfloat16


def test_the_auditor_of_the_connection_is_made_from_the_configuration(tmp_path):
    text = """
[audit]
rate = 0.5
floor = 0.25
halved_by = 9
versions = 2
record = true
record_versions = 1
"""
    model = policy()
    options = json.loads(
        json.dumps(audit_options(parse_config(text, "t"), model, torch.device("cpu"), str(tmp_path / "r")))
    )
    made = make_auditor(SimpleNamespace(tokenizer="", audit_options=options))
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    for version in (VERSION, VERSION + 1, VERSION + 2):
        made.publish(version, lambda: arrays)
    rollout = generate(model, 1, version=VERSION + 2, sampling=SAMPLING)[0]
    old = generate(model, 1, version=VERSION, sampling=SAMPLING)[0]
    assert made.rate("a") == 0.5
    assert made.select("a", [held(rollout)], draining=True) == 0
    assert made.check(held(rollout)).passed
    assert made.rate("a") == 0.25
    assert [made.can_judge(held(each)) for each in (old, rollout)] == [False, True]
    assert sorted(weights_files(tmp_path / "r")) == [VERSION + 2]
    assert len((tmp_path / "r" / "rollouts.jsonl").read_text().splitlines()) == 1
    options["calibration"] = str(tmp_path / "none.json")
    with pytest.raises(OSError, match=r"none\.json"):
        make_auditor(SimpleNamespace(tokenizer="", audit_options=options))


def test_measured_limits_hold_for_true_samples_and_find_log_probabilities_that_the_defaults_let_pass(
    tmp_path,
):
    rollouts = generate(policy(), 30, version=VERSION, sampling=SAMPLING)
    parts = []
    for each in rollouts[:15]:
        text = torch.tensor([[*each.prompt.tokens, *each.tokens]])
        logits_TV = policy()(input_ids=text).logits[0, len(each.prompt.tokens) - 1 : -1].detach()
        claimed = ClaimedTokens(each.prompt.key, SAMPLING, len(each.prompt.tokens), 0, each.tokens)
        parts.append((margins(logits_TV, claimed), torch.tensor(each.logprobs, dtype=torch.float64)))
    path = tmp_path / "calibration.json"
    write_calibrations(path, {"*": calibrate(parts, torch.float32)})
    for shift, limits, is_accused in ((0.0, str(path), 0), (5e-5, "", 0), (5e-5, str(path), 1)):
        accused = []
        settings = replace(config(), audit=AuditConfig(calibration=limits))
        audit = TrainingAudit.of(settings, lambda *found, accused=accused: accused.append(found))
        for each in rollouts[15:]:
            shifted = replace(each, logprobs=[x + shift for x in each.logprobs], servers=[(0, "one")])
            text = torch.tensor([[*each.prompt.tokens, *each.tokens]])
            logits_TV = policy()(input_ids=text).logits[0, len(each.prompt.tokens) - 1 : -1].detach()
            audit.check([replace(shifted, advantage=1.0)], logits_TV, VERSION)
        assert bool(accused) == is_accused, (shift, limits)


def test_errors_that_go_with_the_advantage_are_accused_beside_the_noise_of_own_samples(monkeypatch):
    """A server whose log-probabilities are too high where the advantage is, and too low elsewhere."""
    monkeypatch.setattr(calibration, "MEASURED_TOKENS", 2000)
    model = tiny_policies.policy(dtype=torch.bfloat16, loudness=1.0)
    rollouts = generate(model, 220, version=VERSION, sampling=SAMPLING)
    accused = []
    settings = replace(config(), model=ModelConfig(dtype="bf16"))
    audit = TrainingAudit.of(settings, lambda *found: accused.append(found))
    for number, each in enumerate(rollouts):
        is_own, advantage = number < 120, (-1.0) ** number
        text = torch.tensor([[*each.prompt.tokens, *each.tokens]])
        logits_TV = model(input_ids=text).logits[0, len(each.prompt.tokens) - 1 : -1].detach()
        false = replace(
            each,
            logprobs=[x + 0.02 * advantage for x in each.logprobs],
            servers=[(0, "true" if number % 4 < 2 else "false")],
        )
        given = replace(each, servers=[] if is_own else [(0, "true")]) if is_own or number % 4 < 2 else false
        audit.check([replace(given, advantage=advantage)], logits_TV, VERSION)
        if number == 119:
            assert audit.noise.limits.eps < Calibration.default(torch.bfloat16).eps
            assert accused == []
    assert {server for server, _, _ in accused} == {"false"}
    reasons = {reason.partition(": ")[2] for _, reason, _ in accused}
    assert reasons & {
        "the errors of its log-probabilities go with the reward",
        "the log-probabilities of whole samples differ by more than rounding",
    }
