"""Tests an engine in a process of its own behind an `EngineHost`, against plain decoding."""

import os
import signal
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from kit.hosts import LIMIT_S, Kept
from kit.rollouts import decode_plainly, prompts_of, tiny_policy
from kit.waiting import until

from aedit.child import Restarts
from aedit.spec_rollout.engine import NoNextTokenError
from aedit.spec_rollout.remote import EngineProcess, WorkerConfig
from aedit.spec_rollout.sampling import Sampling
from aedit.spec_rollout.server import EngineHost
from aedit.spec_rollout.server.tickets import Priority


@pytest.fixture(scope="module")
def models():
    return {1: tiny_policy(1), 2: tiny_policy(2)}


@pytest.fixture(scope="module")
def opened(models):
    """Return a host with the process of one engine, which loads torch once for all tests."""
    config = WorkerConfig(
        rows=2,
        max_tokens=256,
        dtype=torch.float64,
        restarts=Restarts(limit=2, pause_s=0.0),
        make="kit.refusing_worker:make_refusing",
    )

    def refuse(prompt):
        if prompt.sampling.top_k:
            raise ValueError("top_k is not served")

    engine = EngineProcess(deepcopy(models[1]), config, check_sample=refuse)
    engine.update_weights(None, 1)
    engine.wait_ready()
    made = EngineHost()
    made.open("line", lambda: engine)
    yield made
    made.close()


@pytest.fixture
def host(opened, models):
    """Return the host with the first model as its newest version."""
    opened.swap("line", models[1].state_dict, version_of(opened) + 1).result(LIMIT_S)
    return opened


def version_of(host):
    return host.status()["lines"]["line"]["version"]


def submitted(host, prompts, priority=Priority.PUBLIC):
    kept = [Kept() for _ in prompts]
    for prompt, receiver in zip(prompts, kept, strict=True):
        host.submit("line", prompt, receiver, priority=priority)
    return kept


def tokens_of(kept):
    return [each.result().tokens for each in kept]


def test_samples_weights_and_refusals_are_those_of_an_engine(host, models):
    prompts, now = prompts_of(5, max_new_tokens=40), version_of(host)
    first = submitted(host, prompts)
    wanted = decode_plainly(models[1], prompts)
    assert tokens_of(first) == wanted
    assert {version for each in first for version in each.rollout.versions} == {now}
    with pytest.raises(ValueError, match="top_k is not served"):
        host.submit("line", replace(prompts[0], sampling=Sampling(top_k=3, max_new_tokens=4)), Kept())
    harm = {name: tensor.clone() for name, tensor in models[2].state_dict().items()}
    harm["model.norm.weight"][0] = torch.inf
    with pytest.raises(ValueError, match=r"model\.norm\.weight has values that are not finite"):
        host.swap("line", lambda: harm, now + 1).result(LIMIT_S)
    short = {name: tensor for name, tensor in harm.items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match="norm"):
        host.swap("line", lambda: short, now + 1).result(LIMIT_S)
    with pytest.raises(ValueError, match="one version at a time"):
        host.swap("line", models[2].state_dict, now + 1, "finish").result(LIMIT_S)
    with pytest.raises(ValueError, match="with each new version only"):
        host.call("line", lambda engine: engine.clear_prefix_cache()).result(LIMIT_S)
    again = submitted(host, prompts)
    assert tokens_of(again) == wanted
    assert {version for each in again for version in each.rollout.versions} == {now}
    host.swap("line", models[2].state_dict, now + 1).result(LIMIT_S)
    later = submitted(host, prompts)
    assert tokens_of(later) == decode_plainly(models[2], prompts)
    assert {version for each in later for version in each.rollout.versions} == {now + 1}


def test_evicted_and_cancelled_samples_and_a_killed_process_cost_time_only(host, models):
    public = prompts_of(3, max_new_tokens=120)
    kept = submitted(host, public)
    until(kept[0].begun.is_set, "tokens", LIMIT_S)
    urgent = prompts_of(2, seed=7, max_new_tokens=20)  # they take the rows of the public ones
    first = submitted(host, urgent, Priority.RUN)
    os.kill(host.status()["lines"]["line"]["pids"][0], signal.SIGKILL)
    assert tokens_of(first) == decode_plainly(models[1], urgent)
    assert tokens_of(kept) == decode_plainly(models[1], public)
    receiver = Kept()
    host.cancel(host.submit("line", prompts_of(1, seed=8, max_new_tokens=200)[0], receiver))
    assert receiver.result().finish_reason in ("abort", "length")
    assert tokens_of(submitted(host, urgent)) == decode_plainly(models[1], urgent)


def test_a_sample_that_the_process_refuses_fails_alone(host, models):
    prompts = prompts_of(3, max_new_tokens=40)
    refused = replace(prompts[0], rollout=13)
    kept = submitted(host, [*prompts, refused])
    with pytest.raises(NoNextTokenError, match="this sample is refused"):
        kept[-1].result()
    assert tokens_of(kept[:-1]) == decode_plainly(models[1], prompts)
    assert tokens_of(submitted(host, prompts)) == decode_plainly(models[1], prompts)
