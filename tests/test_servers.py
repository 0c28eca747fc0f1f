"""Tests the connection of a rank with rollout servers: whatever they do, each sample comes once and is right.

The servers and the rank's own worker draw tokens made of keys, so that every sample can be checked.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit.fake_server import LIES, LOGPROB, FakeServer
from kit.fake_worker import token
from kit.tiny_policies import policy
from kit.waiting import until

from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout import Prompt, Sampling, WorkerConfig, WorkerSource
from aedit.spec_rollout.audit import Origin
from aedit.spec_rollout.remote import Servers, workers
from aedit.spec_rollout.remote.discovery import Place
from aedit.spec_rollout.remote.dispatcher import RequestedSample
from aedit.spec_rollout.remote.links import layout_of
from aedit.spec_rollout.remote.session import ServerFacts, Session
from aedit.spec_rollout.sampling import encode_sampling

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
    monkeypatch.setattr(workers, "MODULE", "kit.fake_worker")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    with ExitStack() as stack:

        def serve(name="fake", **settings):
            server = FakeServer(layout, name, **settings)
            stack.callback(server.close)
            return server

        def start(*servers, does="be slow", num_ready=None, **settings):
            events = []
            config = WorkerConfig(rows=2, options={"does": does}, max_tokens=500, dtype=model.dtype)
            found = Servers.at(*(server.address for server in servers), **settings)
            source = WorkerSource(
                model, config, servers=found, report=lambda event, fields: events.append((event, fields))
            )
            stack.callback(source.close)
            source.update_weights(model.state_dict(keep_vars=True), 1)
            num_ready = len(servers) if num_ready is None else num_ready
            until(lambda: source.step() or ready(source, num_ready), "the servers", LIMIT_S)
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
    assert status["server_tokens"] == sum(server.drawn for server in servers) > 0
    assert {name for name, each in status["servers"].items() if each["tokens"]} == {"a", "b"}
    assert sorted(fields["server"] for event, fields in events if event == "server_joined") == ["a", "b"]
    assert status["server_version_bytes"] > 0


def lost(events):
    return [fields for event, fields in events if event == "server_lost"]


def by_servers(rollouts):
    """Return the number of tokens that servers have drawn."""
    return sum(value == LOGPROB for each in rollouts for value in each.logprobs)


def use(source, server):
    """Ask for samples until the server has drawn some; a machine under load may seem silent meanwhile."""
    before, first = server.drawn, 1000

    def is_used():
        nonlocal first
        first += 1000
        asked = samples(12, first=first, length=20)
        source.add(asked)
        finish(source, asked)
        return server.drawn > before

    until(is_used, "tokens of the server", LIMIT_S, look_s=1.0)


def publish(source, model, version):
    weights = {name: value.detach() * version for name, value in model.state_dict().items()}
    source.update_weights(weights, version)


def test_servers_that_lie_are_left_and_nothing_that_they_have_drawn_is_used(opened, model):
    """One server for each lie. Their other samples had right tokens; they are drawn again too."""
    serve, start = opened
    liars = {lie.replace(" ", "-"): serve(lie.replace(" ", "-"), lie=lie) for lie in LIES}
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
    lies = [fields for fields in lost(events) if fields["violation"]]  # a busy machine loses connections, too
    reasons = {fields["server"]: fields for fields in lies}
    assert {*reasons} == {*liars}
    for lie, text in LIES.items():
        name = lie.replace(" ", "-")
        liar = liars[name]
        assert text in reasons[name]["reason"]
        status = source.status()["servers"][name]
        assert (status["violations"], status["connected"]) == (1, False)
        assert liar.lie == ""
    whole = [each for each in ended if by_servers([each]) == 12]
    assert by_servers(ended) == 12 * len(whole), "tokens of a liar were continued"
    assert len(whole) <= 3, "only what had ended before the lie"
    until(lambda: source.step() or len(source.status()["servers_away"]) == len(LIES), "the reasons")
    assert {each["error"] for each in source.status()["servers_away"]} == {each["reason"] for each in lies}


@pytest.mark.slow  # the same
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
    assert "keys" not in lost(events)[0]["reason"], "it had answered: keys are not why it is gone"
    retried = [fields for event, fields in events if event == "rollout_retried"]
    assert [fields["server"] for fields in retried] == ["a"]
    assert (
        retried[0]["samples"] == source.status()["retried"] == source.status()["servers"]["a"]["taken_back"]
    )
    (end,) = lost(events)
    assert (end["server"], end.get("violation")) == ("a", None)
    starts = [(add.rollout, add.sample, len(add.tokens)) for add in other.added if add.tokens]
    assert starts, "no sample was continued at the other server"
    use(source, serve("a", port=int(first.address.rpartition(":")[2]), key=first.key))


@pytest.mark.slow  # waits until a measured speed is forgotten
def test_a_server_that_falls_silent_is_left_within_seconds_and_its_late_tokens_are_ignored(opened):
    """It sends nothing for a while, as when it is stopped, and then goes on as if nothing had happened."""
    serve, start = opened
    server = serve("a", pace_s=0.02)
    source, events = start(server, silent_s=1.0)
    asked, silent = samples(8, length=60), []

    def stop():
        if not silent and server.drawn > 60:
            server.silent = True
            silent.append(server.drawn)
        if silent and lost(events):
            server.silent = False

    source.add(asked)
    finish(source, asked, stop)
    assert silent
    assert "no sign of life for" in lost(events)[0]["reason"]
    server.pace_s = 0.001
    use(source, server)


@pytest.mark.slow
def test_samples_leave_servers_that_stall_refuse_or_end_and_all_come_without_any_server(opened):
    serve, start = opened
    servers = {name: serve(name) for name in ("stalled", "refuses", "ends")}
    source, events = start(*servers.values(), stalled_s=1.0)
    servers["stalled"].stalled = True
    servers["refuses"].rejects = True
    asked = samples(24, length=60)
    source.add(asked)

    def leave():
        servers["ends"].ending = servers["ends"].drawn > 40

    finish(source, asked, leave)
    reasons = {fields["server"]: fields["reason"] for fields in lost(events)}
    assert reasons["ends"] == "it is about to leave"
    assert "refuses" not in reasons
    assert servers["refuses"].added, "it was never asked"
    assert "stalled" not in reasons, "it returns samples when it is asked to"
    for server in servers.values():
        server.close()
    until(lambda: source.step() or source.status()["servers_connected"] == 0, "the losses", LIMIT_S)
    asked = samples(4, first=100)
    source.add(asked)
    ended = finish(source, asked)
    assert by_servers(ended) == 0


def test_cancelled_samples_end_and_their_keys_can_be_added_again_at_once(opened):
    serve, start = opened
    server = serve("a", pace_s=0.01)
    source, _ = start(server)
    source.add(samples(16, length=400))
    until(lambda: source.step() or server.drawn > 40, "first tokens", LIMIT_S)
    source.cancel()
    assert (source.running, source.pending()) == (0, [])
    server.pace_s = 0.001
    asked = samples(24, length=30)
    source.add(asked)
    ended = finish(source, asked)
    assert by_servers(ended) > 0


@pytest.mark.slow  # the same
def test_a_killed_connection_process_is_started_again_and_pending_samples_are_whole(opened):
    serve, start = opened
    server = serve("a", pace_s=0.01)
    source, events = start(server)
    asked = samples(12, length=80)
    source.add(asked)
    until(lambda: source.step() or server.drawn > 100, "first tokens", LIMIT_S)
    os.kill(source.status()["server_pid"], signal.SIGKILL)
    for prompt in source.pending():
        if prompt.partial is not None:
            assert prompt.partial.tokens == [token(*prompt.key, i) for i in range(len(prompt.partial.tokens))]
    finish(source, asked)
    (end,) = [fields for event, fields in events if event == "servers_lost"]
    assert "ended with -9" in end["reason"]
    use(source, server)


@pytest.mark.slow
def test_versions_change_while_samples_run_and_each_token_has_one_that_its_server_was_given(opened, model):
    serve, start = opened
    servers = [serve("a", pace_s=0.01), serve("b", pace_s=0.01)]
    source, _ = start(*servers)
    asked, published = samples(16, length=60), [1]

    def change():
        if len(published) < 4 and sum(server.drawn for server in servers) > 60 * len(published):
            published.append(published[-1] + 1)
            publish(source, model, published[-1])

    source.add(asked)
    ended = finish(source, asked, change)
    assert published == [1, 2, 3, 4]
    for each in ended:
        assert each.versions == sorted(each.versions)
    assert {v for each in ended for v in each.versions} >= {1, 2}
    for server in servers:
        (line,) = server.store.lines
        with server.store.hold(line, 4) as units:
            found = units["rest"].view("<f8")[: model.get_input_embeddings().weight.numel()]
        assert found.tolist() == (model.get_input_embeddings().weight.detach() * 4).flatten().tolist()


@pytest.fixture
def half_open():
    """Return the address of a program that accepts connections and neither reads nor writes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield SimpleNamespace(address=f"127.0.0.1:{listening.getsockname()[1]}")


def timed(source, asked):
    """Finish the samples; return the longest time between two steps, and why servers were away meanwhile."""
    longest_s, before_s, errors = 0.0, time.monotonic(), {}

    def look():
        nonlocal longest_s, before_s
        longest_s, before_s = max(longest_s, time.monotonic() - before_s), time.monotonic()
        errors.update({each["address"]: each["error"] for each in source.status()["servers_away"]})

    source.add(asked)
    finish(source, asked, look)
    look()
    return longest_s, errors


def test_a_sample_moves_away_from_a_server_that_does_not_answer_when_it_is_asked_to_return_it(opened):
    """It draws a token every 0.4 s, so that nothing stalls: its samples of 160 tokens would take 64 s."""
    serve, start = opened
    server = serve("deaf")
    source, events = start(server, does="serve")
    server.deaf, server.token_s = True, 0.4
    longest_s, _ = timed(source, samples(16, length=160))
    assert longest_s < 5.0, "a step waits 50 ms when nothing comes; a busy machine takes longer"
    status = source.status()
    assert status["moved"] >= status["servers"]["deaf"]["moved"] > 0
    assert status["servers"]["deaf"]["samples"] == 0, "also the last ones that it draws at a time have moved"
    assert lost(events) == []


def test_no_step_waits_for_a_server_whatever_it_does_and_all_samples_come(opened, half_open):
    """Each server but the last one says all the time that it lives; the own worker draws the rest."""
    serve, start = opened
    servers = {name: serve(name) for name in ("favours-one", "never-draws", "never-opens")}
    servers["never-opens"].opens = False
    source, events = start(*servers.values(), half_open, num_ready=2, stalled_s=1.0, connect_s=0.5)
    servers["favours-one"].favours, servers["favours-one"].pace_s = True, 0.05
    servers["never-draws"].stalled = servers["never-draws"].deaf = True
    longest_s, errors = timed(source, samples(48))
    assert longest_s < 5.0
    status = source.status()["servers"]
    for name in ("favours-one", "never-draws"):
        assert status[name]["taken_back"] > 0
    assert errors[servers["never-opens"].address] == "no answer within 0.5 s"
    assert half_open.address in errors
    ends = {end["server"]: end["reason"] for end in lost(events)}
    assert "to the request to return sample" in ends["never-draws"]


def session():
    """Return a session, and the messages to the rank and to the server."""
    to_rank, to_server = [], []
    origin = Origin("run", "line", "fake")
    facts = ServerFacts(name="fake", rows=2, room=8, public_key=b"", origin=origin)
    made = Session(facts, to_rank.append, to_server.append, vocabulary=48)
    made.versions = {1}
    return made, to_rank, to_server


def test_a_sample_whose_server_dies_with_its_last_token_ends_there(opened):
    """The word of the end is lost, as it is a message of its own."""
    serve, start = opened
    server = serve("a")
    server.ends = False
    source, _ = start(server)
    asked = samples(4, length=12)
    source.add(asked)
    found = []
    until(lambda: found.extend(source.step()) or len(found) == 4, "the samples", LIMIT_S)
    for rollout in found:
        assert rollout.tokens == [token(*rollout.prompt.key, place) for place in range(12)]
        assert (rollout.finish_reason, len(rollout.logprobs), len(rollout.versions)) == ("length", 12, 12)


@pytest.mark.parametrize(("sampling", "tokens", "given", "left"), [
    ({"stop_tokens": (9,)}, (4, 9), 0, (4,)),
    ({"stop_tokens": (9,)}, (9, 4), 0, (9, 4)),
    ({"stop_tokens": (9,)}, (4, 9), 2, (4, 9)),
    ({"max_new_tokens": 2}, (4, 5), 0, (4,)),
    ({"stop_strings": ("x",)}, (4, 5), 1, (4,)),
    ({}, (4, 5), 0, (4, 5)),
])  # fmt: skip
def test_a_sample_that_may_have_ended_is_continued_before_its_last_token(sampling, tokens, given, left):
    prompt = Prompt(tokens=(1,), sampling=Sampling(**{"max_new_tokens": 40} | sampling))
    rollout = prompt.to_rollout()
    rollout.tokens.extend(tokens[:given])
    sample = RequestedSample(rollout, b"")
    rollout.tokens.extend(tokens[given:])
    rollout.logprobs.extend([-1.0] * len(tokens))
    rollout.versions.extend([3] * len(tokens))
    rollout.servers.extend([(0, "a"), (len(tokens) - 1, "b")])
    sample.reopen()
    assert tuple(rollout.tokens) == left
    assert len(rollout.logprobs) == len(rollout.versions) == len(left)
    assert rollout.servers == [(0, "a"), (1, "b")][: len(left)]


def added(session, *prompts):
    for prompt in prompts:
        session.add(RequestedSample(prompt.to_rollout(), encode_sampling(prompt.sampling)).request(1))


def remove(session, key, *, drop=False):
    session.remove(pb.Remove(rollout=key[0], sample=key[1], drop=drop))


def told(to_rank):
    """Return kind, key, and `found` or `final`, of each message to the rank."""
    kinds = [(message.WhichOneof("message"), message) for message in to_rank]
    found = [(kind, getattr(message, kind)) for kind, message in kinds]
    return [
        (kind, (each.rollout, each.sample), getattr(each, {"removed": "found", "rejected": "final"}[kind]))
        if kind in ("removed", "rejected")
        else (kind, (each.rollout, each.sample))
        for kind, each in found
    ]


def tokens(key, start, *found):
    fields = {"rollout": key[0], "sample": key[1], "start": start, "tokens": found}
    return pb.ToTrainer(tokens=pb.Tokens(**fields, logprobs=[-0.25] * len(found), versions=[1]))


def test_each_sample_has_a_clock_of_its_own_and_goes_on_after_its_tokens():
    """Two samples: one gets a token every 8 s, as the limit is 10 s, the other one none after the first."""
    one, to_rank, to_server = session()
    added(one, *samples(2))
    one.handle(tokens((0, 1), 0, 5), 0.0)
    for i in range(3):
        one.handle(tokens((0, 0), i, 7), 8.0 * i)
        assert one.take_back_stalled(8.0, 10.0) == (i == 1)
    assert [*one.given] == [(0, 0)]
    assert (to_server[-1].remove.rollout, to_server[-1].remove.sample) == (0, 1)
    (held,) = one.held
    assert one.draining, "no more comes for it: it is to be judged now"
    one.release([held])
    assert told(to_rank) == [("tokens", (0, 1)), ("rejected", (0, 1), True)]
    assert (to_rank[0].tokens.tokens, to_rank[0].tokens.logprobs) == ([5], [-0.25])
    assert one.overdue == ((0, 1), 8.0)
    one.handle(tokens((0, 1), 1, 6), 24.0)  # sent before the server has read the request
    assert (one.held, [*one.given]) == ([], [(0, 0)])
    one.handle(pb.ToTrainer(removed=pb.Removed(rollout=0, sample=1, found=True)), 24.0)
    assert one.overdue is None


def test_a_key_that_comes_again_before_the_server_has_answered_waits_no_longer_than_a_sample():
    one, to_rank, to_server = session()
    (prompt,) = samples(1)
    added(one, prompt)
    remove(one, prompt.key, drop=True)
    assert told(to_rank) == [("removed", prompt.key, True)]
    added(one, prompt)
    assert not one.take_back_stalled(6.0, 10.0)
    assert one.take_back_stalled(6.0, 10.0)
    assert told(to_rank[1:]) == [("rejected", prompt.key, True)]
    assert [message.WhichOneof("message") for message in to_server] == ["add", "remove"]
    assert one.overdue == (prompt.key, 12.0)


@pytest.mark.parametrize("answer_s", [0.5, 5.0])
def test_a_sample_that_is_to_move_waits_a_second_for_its_last_tokens_and_is_returned_once(answer_s):
    one, to_rank, _ = session()
    (prompt,) = samples(1)
    added(one, prompt)
    one.handle(tokens(prompt.key, 0, 5), 0.0)
    remove(one, prompt.key)
    one.take_back_stalled(answer_s, 60.0)
    is_late = answer_s > 1.0
    one.handle(tokens(prompt.key, 1, 6), answer_s)
    one.handle(pb.ToTrainer(removed=pb.Removed(rollout=0, sample=0, found=True)), answer_s)
    one.release(list(one.held))
    assert told(to_rank) == [("tokens", prompt.key), ("removed", prompt.key, True)]
    assert to_rank[0].tokens.tokens == ([5] if is_late else [5, 6])
    assert one.overdue is None


def test_the_connection_process_loads_no_torch():
    """Each rank has one beside its workers; torch would cost it 180 MiB."""
    code = "import sys, aedit.spec_rollout.remote.link; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S, check=False).returncode == 0


def test_a_server_that_stalls_again_gets_no_samples_for_twice_as_long_until_it_finishes_one():
    place = Place("h:1")
    assert [place.stalled(100.0, 10.0) for _ in range(3)] == [110.0, 120.0, 140.0]
    assert not place.may_open(139.9)
    assert place.may_open(140.0)
    assert [place.stalled(0.0, 1.0) for _ in range(20)][-1] == 64.0
