"""Tests the connection of a rank with rollout servers: whatever they do, each sample comes once and is right.

The servers and the rank's own worker draw tokens made of keys, so that every sample can be checked.
"""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from kit.fake_server import LIES, LOGPROB, FakeServer
from kit.fake_worker import token
from kit.tiny_policies import policy
from kit.waiting import until

from aedit.spec_rollout import Prompt, Sampling, WorkerConfig, WorkerSource
from aedit.spec_rollout.servers.config import Servers, layout_of
from aedit.spec_rollout.workers import worker_process

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def model():
    return policy()


@pytest.fixture(scope="module")
def layout(model):
    return layout_of([(name, tuple(value.shape)) for name, value in model.state_dict().items()])


@pytest.fixture
def opened(model, layout, monkeypatch):
    """Return functions that start a server, and a source that uses servers; all are closed at the end."""
    monkeypatch.setattr(worker_process, "MODULE", "kit.fake_worker")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    with ExitStack() as stack:

        def serve(name="fake", **settings):
            server = FakeServer(layout, name, **settings)
            stack.callback(server.close)
            return server

        def start(*servers, does="be slow", **settings):
            events = []
            config = WorkerConfig(rows=2, options={"does": does}, max_tokens=500, dtype=model.dtype)
            found = Servers.at(*(server.address for server in servers), **settings)
            source = WorkerSource(
                model, config, servers=found, report=lambda event, fields: events.append((event, fields))
            )
            stack.callback(source.close)
            source.update_weights(model.state_dict(keep_vars=True), 1)
            until(lambda: source.step() or ready(source, len(servers)), "the servers", LIMIT_S)
            return source, events

        yield serve, start


def ready(source, count):
    found = source.status()["servers"].values()
    return sum(each["version"] == source.version for each in found) == count


def samples(count, length=40, first=0, **sampling):
    sampling = Sampling(max_new_tokens=length, **sampling)
    return [
        Prompt(tokens=(1, 2), rollout=first + i // 4, sample=i % 4, group=i // 4, sampling=sampling)
        for i in range(count)
    ]


def finish(source, asked, disturb=lambda: None):
    """Return all samples; each must come once, whole and right."""
    ended = []

    def step():
        disturb()
        ended.extend(source.step())
        return not source.running

    until(step, "all samples", LIMIT_S, look_s=0)
    assert sorted(each.prompt.key for each in ended) == sorted(prompt.key for prompt in asked)
    for each in ended:
        assert each.tokens == [token(*each.prompt.key, i) for i in range(len(each.tokens))]
        assert (
            len(each.tokens)
            == each.prompt.sampling.max_new_tokens
            == len(each.logprobs)
            == len(each.versions)
        )
        assert each.finish_reason == "length"
    return ended


def test_servers_generate_and_their_figures_add_up(opened):
    serve, start = opened
    servers = [serve("a"), serve("b")]
    source, events = start(*servers)
    asked = samples(16)
    source.add(asked)
    finish(source, asked)
    status = source.status()
    assert status["server_tokens"] == sum(server.drawn for server in servers) > 8 * 40
    assert {name for name, each in status["servers"].items() if each["tokens"]} == {"a", "b"}
    assert sorted(fields["server"] for event, fields in events if event == "server_joined") == ["a", "b"]
    assert status["server_version_bytes"] > 0


def lost(events):
    return [fields for event, fields in events if event == "server_lost"]


def by_servers(rollouts):
    """Return the number of tokens that servers have drawn."""
    return sum(value == LOGPROB for each in rollouts for value in each.logprobs)


def publish(source, model, version):
    weights = {name: value.detach() * version for name, value in model.state_dict().items()}
    source.update_weights(weights, version)


def test_servers_that_lie_are_left_and_nothing_that_they_have_drawn_is_used(opened, model):
    """One server for each lie. Their other samples had right tokens; they are drawn again too."""
    serve, start = opened
    liars = {lie: serve(lie, lie=lie) for lie in LIES}
    source, events = start(*liars.values())
    publish(source, model, 2)
    until(lambda: source.step() or ready(source, len(liars)), "the second version", LIMIT_S)
    ended = []
    for round_ in range(20):
        asked = samples(8 * len(liars), length=12, first=1000 * round_)
        source.add(asked)
        ended += finish(source, asked)
        if not any(liar.lie for liar in liars.values()):
            break
    reasons = {fields["server"]: fields for fields in lost(events)}
    assert {*reasons} == {*LIES}
    for lie, liar in liars.items():
        assert LIES[lie] in reasons[lie]["reason"]
        assert reasons[lie]["violation"] is True
        status = source.status()["servers"][lie]
        assert (status["violations"], status["connected"]) == (1, False)
        assert liar.lie == ""
    whole = [each for each in ended if by_servers([each]) == 12]
    assert by_servers(ended) == 12 * len(whole), "tokens of a liar were continued"
    assert len(whole) <= 3, "only what had ended before the lie"
    until(lambda: source.step() or len(source.status()["servers_away"]) == len(LIES), "the reasons")
    assert {each["error"] for each in source.status()["servers_away"]} == {e["reason"] for e in lost(events)}


def test_a_killed_server_costs_no_token_and_is_used_again_when_it_is_back(opened):
    serve, start = opened
    first, other = serve("a"), serve("b")
    source, events = start(first, other)
    asked, killed = samples(24, length=100), []

    def kill():
        if not killed and first.drawn > 200:
            first.close()
            killed.append(first.drawn)

    source.add(asked)
    finish(source, asked, kill)
    assert killed
    retried = [fields for event, fields in events if event == "rollout_retried"]
    assert [fields["server"] for fields in retried] == ["a"]
    assert (
        retried[0]["samples"] == source.status()["retried"] == source.status()["servers"]["a"]["taken_back"]
    )
    (end,) = lost(events)
    assert (end["server"], end.get("violation")) == ("a", None)
    starts = [(add.rollout, add.sample, len(add.tokens)) for add in other.added if add.tokens]
    assert starts, "no sample was continued at the other server"
    again = serve("a", port=int(first.address.rpartition(":")[2]), key=first.key)
    asked = samples(16, first=100)
    until(lambda: source.step() or ready(source, 2), "the server", LIMIT_S)
    source.add(asked)
    finish(source, asked)
    assert again.drawn > 0
