"""Tests rollout workers with a real policy in float64: the same tokens whatever happens to the processes.

The oracle is the model's own uncached forward pass with the noise of each sample's key.
"""

import os
import signal
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
import torch
from kit.rollouts import decode_plainly, logprobs_of, next_logits, perturbed, prompts_of
from kit.tiny_policies import SIZES, policy
from kit.waiting import until

from aedit.child import Restarts
from aedit.spec_rollout import Engine, RolloutSource, WorkerConfig, WorkerSource

LENGTH = 48
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def models():
    """Return the policy's versions 1, 2 and 3."""
    made = {1: policy()}
    for version in (2, 3):
        made[version] = policy()
        with torch.no_grad():
            for parameter in made[version].parameters():
                parameter.mul_(1 + 0.1 * version)
    return made


@pytest.fixture(scope="module")
def causes():
    return []


@pytest.fixture(scope="module")
def source(models, causes):
    @contextmanager
    def window(cause):
        causes.append(cause)
        yield

    config = WorkerConfig(
        processes=2,
        rows=3,
        max_tokens=64,
        dtype=torch.float64,
        arms=("off", "suffix:4"),
        restarts=Restarts(pause_s=0.0),
    )
    made = WorkerSource(models[1], config, window=window)
    made.update_weights(models[1].state_dict(keep_vars=True), 1)
    yield made
    made.close()


def asked(seed, count=8, length=LENGTH):
    prompts = prompts_of(count, seed=seed, group_size=4, max_new_tokens=length)
    return [replace(p, tokens=tuple(t % SIZES["vocab_size"] for t in p.tokens)) for p in prompts]


def run(source, prompts, disturb=lambda: None, late=()):
    """Return the finished rollouts by key, those of `late` included, which `disturb` adds between steps."""
    source.add(prompts)
    done = {}

    def step():
        disturb()
        done.update((rollout.prompt.key, rollout) for rollout in source.step())
        return not source.running

    until(step, "the samples", LIMIT_S, look_s=0)
    assert sorted(done) == sorted(prompt.key for prompt in (*prompts, *late))
    return done


def check(model, prompts, done):
    """Check samples of one version against plain decoding, and against an engine that nothing has disturbed.

    A rank trains on behaviour log-probabilities in fp32. There they are equal bit by bit.
    """
    engine = Engine.of(model, rows=3, max_tokens=64)
    undisturbed = {rollout.prompt.key: rollout for rollout in engine.generate(prompts)}
    for prompt, tokens in zip(prompts, decode_plainly(model, prompts), strict=True):
        rollout = done[prompt.key]
        assert rollout.tokens == tokens
        assert rollout.logprobs == pytest.approx(logprobs_of(model, prompt, tokens), abs=1e-5)
        assert as_trained(rollout) == as_trained(undisturbed[prompt.key])


def as_trained(rollout):
    return torch.tensor(rollout.logprobs, dtype=torch.float64).float().tolist()


def num_begun(source):
    return sum(len(prompt.partial.tokens) for prompt in source.pending() if prompt.partial)


def test_workers_generate_what_plain_decoding_does(source, models, causes):
    checked: RolloutSource = source
    assert source.status()["worker_idle_s"] == 0
    prompts = asked(1, count=4)
    done = run(checked, prompts)
    check(models[1], prompts, done)
    assert {version for rollout in done.values() for version in rollout.versions} == {1}
    assert "rollouts" in causes
    # A worker that gave a sample away reports its last tokens a moment later.
    until(lambda: source.step() or source.status()["rollout_tokens"] == 4 * LENGTH, "the last figures")
    status = source.status()
    until(lambda: source.step() or source.status()["worker_idle_s"] > 0, "time of workers without samples")
    assert status["rollout_tokens"] >= status["plain_tokens"] > 0
    assert status["passes"] == sum(rollout.passes for rollout in done.values())
    for pid in status["pids"]:
        sockets = psutil.Process(pid).net_connections("all")
        assert {each.laddr for each in sockets} <= {""}, "no address at which others could reach a worker"


@pytest.mark.slow  # what it disturbs must not have ended: a machine without other work
def test_a_killed_worker_changes_no_token_and_no_logprob(source, models):
    prompts, killed = asked(2), []

    def disturb():
        if not killed and num_begun(source) > 3 * LENGTH:
            killed.append(source.status()["pids"][0])
            os.kill(killed[0], signal.SIGKILL)

    done = run(source, prompts, disturb)
    assert killed
    check(models[1], prompts, done)
    assert source.status()["retried"] > 0


@pytest.mark.slow  # what it disturbs must not have ended: a machine without other work
def test_all_workers_killed_during_a_change_of_weights_mix_no_versions(source, models):
    """Each token is that of the version that its span names, and versions only grow within a sample."""
    prompts, published = asked(3), []

    def disturb():
        if not published and num_begun(source) > 2 * LENGTH:
            source.update_weights(models[2].state_dict(keep_vars=True), 2)
            for pid in source.status()["pids"]:
                os.kill(pid, signal.SIGKILL)
            published.append(2)

    done = run(source, prompts, disturb)
    assert published
    check_spans(models, prompts, done)
    assert {version for rollout in done.values() for version in rollout.versions} == {1, 2}


@pytest.mark.slow  # what it disturbs must not have ended: a machine without other work
def test_weights_change_between_two_steps_of_running_samples_and_before_new_ones(source, models):
    prompts, published = asked(4), []

    def disturb():
        if not published and num_begun(source) > 2 * LENGTH:
            source.update_weights(models[3].state_dict(keep_vars=True), 3)
            published.append(3)
            source.add(late)

    late = asked(5, count=4, length=4)
    done = run(source, prompts, disturb, late)
    check_spans(models, prompts, done)
    check(models[3], late, done)
    mixed = [rollout for rollout in done.values() if len(set(rollout.versions)) > 1]
    assert mixed
    assert all(set(done[prompt.key].versions) == {3} for prompt in late)


def check_spans(models, prompts, done):
    """Check each token against the model of its version, and that versions grow."""
    for prompt in prompts:
        rollout = done[prompt.key]
        assert rollout.versions == sorted(rollout.versions)
        for i, (token, version) in enumerate(zip(rollout.tokens, rollout.versions, strict=True)):
            text = [*prompt.tokens, *rollout.tokens[:i]]
            logits_V = next_logits(models[version], [text])[0]
            assert token == int(perturbed(logits_V, prompt, len(text)).argmax())
