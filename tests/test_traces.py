"""Tests traces of pushes over real processes, and that neither an endpoint nor a peer can do harm with them.

The endpoint is a receiver of OTLP over HTTP that reads the protocol with OpenTelemetry's own messages.
"""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit.hub_process import real_hub
from kit.hub_processes import Client, HubProcess, ending, hello, status, write_run
from kit.places import LIMIT_S, Place
from kit.rl_hub import NodeThread, hub_of
from kit.rl_nodes import config_of
from kit.rollout_servers import TrainerEnd, tiny_server
from kit.rollouts import prompts_of, tiny_policy
from kit.served_models import saved
from kit.served_runs import ServeProcess, write_served_run
from kit.serving import ask, byte_tokenizer, served, text_policy
from kit.waiting import until
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from test_own_hub_loop import HUB, Net, steps

from aedit import traces
from aedit.edit import HubExchange, LayerSync
from aedit.launch.cli import main, serve_model
from aedit.launch.config import RunConfig, TraceConfig, load, of_this_machine
from aedit.launch.hub.folder import pushes_of
from aedit.launch.node.rl_groups import GroupStream
from aedit.proto.rpc import client as rpc_client
from aedit.spec_rollout.sampling import Rollout
from aedit.spec_rollout.server.tickets import Priority
from aedit.types import UserError


class Seen:
    """A span that was exported, as plain values."""

    def __init__(self, span, resource):
        self.name, self.id, self.parent, self.trace = (
            span.name,
            span.span_id,
            span.parent_span_id,
            span.trace_id,
        )
        self.begin, self.end, self.links = span.start_time_unix_nano, span.end_time_unix_nano, span.links
        self.process = _values(resource.attributes)
        self.facts = _values(span.attributes)

    def __repr__(self):
        return f"{self.process.get('service.name')} {self.name} {self.id.hex()} below {self.parent.hex()}"


def _values(attributes):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


class Collector:
    """Receiver of OTLP over HTTP. hold: an event that every answer waits for."""

    def __init__(self, code=200, hold=None):
        self.spans, self.code, self.hold, self.asked = [], code, hold, threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                data = self.rfile.read(int(self.headers["content-length"]))
                collector.asked.set()
                if collector.hold is not None:
                    collector.hold.wait(LIMIT_S)
                if collector.code == 200:
                    collector.take(ExportTraceServiceRequest.FromString(data))
                with contextlib.suppress(OSError):  # the exporter has not waited
                    self.send_response(collector.code)
                    self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret-path/v1/traces"

    def take(self, request):
        found = [
            Seen(span, of_process.resource)
            for of_process in request.resource_spans
            for of_scope in of_process.scope_spans
            for span in of_scope.spans
        ]
        self.spans.extend(found)

    def named(self, name):
        return [span for span in self.spans if span.name == name]

    def below(self, parent):
        return {
            span.name: span for span in self.spans if (span.trace, span.parent) == (parent.trace, parent.id)
        }


@contextmanager
def collector(**options):
    made = Collector(**options)
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        if made.hold is not None:
            made.hold.set()
        made.server.shutdown()
        made.server.server_close()
        thread.join(LIMIT_S)


@pytest.fixture(autouse=True)
def off_again():
    yield
    traces.end_traces()


# -- a push through all processes


def train(address, found, count):
    """Take steps in a loop of one's own, as a node of the hub whose spans go to the collector `found`."""
    model = Net(1)
    exchange = HubExchange.join(address, model, name="a", tokens_per_step=7, traces=found.url)
    sync = LayerSync.of(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=exchange)
    with sync:
        steps(sync, torch.Generator().manual_seed(1), count)
    assert not traces.is_on(), "they end with the exchange"


ROOT = Path(__file__).parent.parent
PARTS = ("async_sgd", "edit", "launch", "proto", "spec_rollout")

OF_A_HUB = {
    "hub: receive",
    "hub: check",
    "hub: journal write",
    "hub: journal sync",
    "hub: standby confirmation",
}


@pytest.mark.filterwarnings("ignore:buffers of this model change")
def test_a_push_is_one_trace_over_trainer_agent_hub_and_standby(tmp_path):
    """The trainer is this process; `test_hub_runs.py` has the spans of one that `aedit run` starts."""
    with collector() as found, ending():
        text = HUB.replace('"127.0.0.1:0"', '"127.0.0.1:0"\nstandby = "127.0.0.1:0"')
        toml = tmp_path / "run.toml"
        toml.write_text(f'dir = "{tmp_path}"\n{text}[traces]\nendpoint = "{found.url}"\n')
        hub = HubProcess(toml, tmp_path / "test" / "hub")
        standby = HubProcess(toml, tmp_path / "test" / "standby", "--standby")
        until(lambda: status(standby.address)["follows"] == hub.address, "the standby")
        assert "secret-path" not in hello(hub.address).config
        train(hub.address, found, 12)
        accepted = {(push.unit, push.seq) for push in pushes_of(tmp_path / "test" / "hub") if push.base}
        assert accepted
        until(lambda: len(found.named("standby: mirror")) >= len(accepted), "the standby's spans")
        hub.stop()
        standby.stop()
    pushes = found.named("push")
    assert len({span.trace for span in pushes}) == len(pushes), "a trace for each push"
    arrived = Counter()
    for push in pushes:
        assert (push.process["service.name"], push.parent) == ("aedit-node", b"")
        assert push.facts["aedit.verdict"] == "MERGED"
        (sent,) = found.below(push).values()
        assert (sent.name, sent.process["service.name"]) == ("agent: push", "aedit-agent")
        by_agent = found.below(sent)
        assert by_agent.keys() == {"agent: encode", "hub: push", "agent: pull"}
        received = by_agent["hub: push"]
        assert received.process["service.name"] == "aedit-hub"
        assert received.process["aedit.folder"] == "hub"
        by_hub = found.below(received)
        assert by_hub.keys() == OF_A_HUB | {"hub: merge", "standby: mirror"}
        assert by_hub["standby: mirror"].process["aedit.folder"] == "standby"
        assert all(by_hub[name].process == received.process for name in by_hub if name != "standby: mirror")
        assert push.facts["aedit.version"] == by_hub["hub: merge"].facts["aedit.version"]
        arrived[received.facts["aedit.unit"], received.facts["aedit.seq"]] += 1
    assert set(arrived) == accepted, "the journal has the same pushes"
    assert set(arrived.values()) == {1}
    processes = {span.process["service.instance.id"] for span in found.spans}
    assert len(processes) == 4
    assert all(span.end >= span.begin > 0 for span in found.spans)


# -- a rollout

OF_A_SERVED_RUN = """
[rl]
servers = "hub"
groups = 2
group_size = 2
eval_every = 0
[edit]
every = 2
landing = "arrival"
[traces]
endpoint = "{url}"
"""


def test_a_group_is_one_trace_from_request_to_training_and_the_pushes_that_have_it_name_it(
    tmp_path, monkeypatch
):
    """The hub is in this process, and the engine in that of the trainer."""
    settings = {"drafter__kind": "off", "checkpoint__every": 0, "rl__groups": 2, "rl__group_size": 3}
    config = config_of(tmp_path, train__steps=4, **settings)
    positions, original = [], GroupStream.trained

    def follow(stream, count):
        groups = original(stream, count)
        positions.extend(group.position for group in groups)
        return groups

    monkeypatch.setattr(GroupStream, "trained", follow)
    with collector() as found:
        traces.begin(found.url, "node")
        node = NodeThread(config, hub_of(config), "a")
        node.start()
        node.end()
        traces.end_traces()
    trained = found.named("train")
    groups = {span.id: span for span in found.named("group")}
    assert sorted(groups[span.parent].facts["aedit.position"] for span in trained) == sorted(positions)
    assert len({span.trace for span in trained}) == len(positions) >= 4 * 2
    for span in trained:
        group = groups[span.parent]
        assert (group.trace, group.parent) == (span.trace, b"")
        assert found.below(group).keys() == {"reward", "train"}
    pushes = found.named("push")
    for unit in (units := {push.facts["aedit.unit"] for push in pushes}):
        linked = [link.span_id for push in pushes if push.facts["aedit.unit"] == unit for link in push.links]
        assert sorted(linked) == sorted(span.id for span in trained), "each group is in one push of each unit"
    assert len(units) > 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sample_of_a_server_is_below_its_group_over_all_processes(tmp_path):
    place = Place(tmp_path)
    with collector() as found, ending():
        toml = write_served_run(tmp_path, drafter="off", more=OF_A_SERVED_RUN.format(url=found.url))
        hub = HubProcess(toml, tmp_path / "run" / "hub")
        endpoint = f"--traces.endpoint={found.url}"
        server = ServeProcess(hub.address, tmp_path, endpoint)
        try:
            until(lambda: list(tmp_path.glob("run/servers/s1/events.jsonl")), "the server", LIMIT_S)
            node = place.aedit("join", hub.address, endpoint, f"--dir={tmp_path}/node", "--device=cpu")

            def is_there():
                assert node.poll() is None, node.communicate()
                linked = {link.span_id for push in found.named("push") for link in push.links}
                traced = {span.trace for span in found.named("server: generate")}
                return [span for span in found.named("train") if span.trace in traced and span.id in linked]

            trained = until(is_there, "a group of the server in a push", LIMIT_S)[0]
            node.terminate()
            node.communicate(timeout=LIMIT_S)
            server.stop()
        finally:
            place.end()
            server.process.kill()
            server.process.wait(LIMIT_S)
    by_id = {span.id: span for span in found.spans}
    group = by_id[trained.parent]
    assert (group.name, group.parent, group.process["service.name"]) == ("group", b"", "aedit-node")
    generated = [span for span in found.named("server: generate") if span.trace == group.trace]
    for span in generated:
        sample = by_id[span.parent]
        assert (sample.name, sample.parent) == ("sample", group.id)
        assert sample.process == group.process == trained.process
        assert span.process["service.name"] == "aedit-serve"
        assert span.facts["aedit.sample"] == sample.facts["aedit.sample"]
        assert span.facts["aedit.tokens"] == sample.facts["aedit.tokens"] > 0
    assert generated


# -- what a peer sends

VALID = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
INVALID = (
    "",
    VALID[:-3],
    VALID + "0",
    VALID + "-01",
    VALID.upper(),
    "ff" + VALID[2:],
    "01" + VALID[2:],
    VALID[:-1] + "0",  # not sampled
    VALID.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
    VALID.replace("00f067aa0ba902b7", "0" * 16),
    VALID.replace("-", "_"),
    VALID.replace("4", " "),
    "00-" + "a" * 6000,
    "{}",
)


def test_what_is_used_of_a_traceparent_is_what_opentelemetry_reads_in_it():
    with collector() as found:
        traces.begin(found.url, "node")
        for text in (VALID, *INVALID, VALID[:-2] + "03", VALID[:-2] + "ff"):
            context = TraceContextTextMapPropagator().extract({"traceparent": text})
            theirs = trace.get_current_span(context).get_span_context()
            if (ours := traces.parsed(text)) is not None:
                assert (ours.trace, ours.span) == (theirs.trace_id, theirs.span_id)
                assert theirs.trace_flags.sampled
        assert str(traces.parsed(VALID)) == VALID
        assert [traces.parsed(text) for text in INVALID] == [None] * len(INVALID)
        assert [traces.parsed(value) for value in (None, 3, VALID.encode())] == [None] * 3
        assert traces.received([("traceparent", VALID), ("traceparent", VALID)]) is None
    traces.end_traces()
    assert traces.parsed(VALID) is None, "without traces nothing is read"


@pytest.mark.parametrize("span", [(1, 1), (2**128 - 1, 2**64 - 1), (2**127, 2**63), (1 << 64, 5)])
def test_a_context_passes_through_shared_memory_as_it_is(span):
    context = traces.TraceContext(*span)
    assert all(-(2**63) <= word < 2**63 for word in context.words)
    assert traces.of_words(context.words) == context
    assert traces.of_words(traces.NO_WORDS) is None


def test_a_hub_takes_each_push_whatever_trace_its_node_names(tmp_path, monkeypatch):
    with collector() as found, ending():
        more = f'[traces]\nendpoint = "{found.url}"\n'
        node = Client(HubProcess(write_run(tmp_path, more), tmp_path / "hub").address).found()
        for text in INVALID:
            monkeypatch.setattr(rpc_client.traces, "sent", lambda text=text: (("traceparent", text),))
            assert node.push(0).accepted
        monkeypatch.setattr(rpc_client.traces, "sent", lambda: (("traceparent", VALID),))
        assert node.push(0).accepted
        until(lambda: found.named("hub: push"), "the span of the last push")
        node.hub.close()
        for process in HubProcess.started:
            process.terminate()
            process.wait(LIMIT_S)
    (received,) = found.named("hub: push")
    assert (received.trace.hex(), received.parent.hex()) == tuple(VALID.split("-")[1:3])
    assert received.facts["aedit.seq"] == len(INVALID) + 2  # after the first anchor


def test_a_server_takes_each_sample_whatever_trace_its_trainer_names():
    texts = (*INVALID, VALID)
    with collector() as found, tiny_server(rows=len(texts)) as server, TrainerEnd(server.address) as end:
        traces.begin(found.url, "serve")
        end.wait(lambda: end.opened, "Opened")
        server.publish("line", tiny_policy(3), 1)
        *prompts, begun = prompts_of(len(texts) + 1, max_new_tokens=4)
        for prompt, text in zip(prompts, texts, strict=True):
            end.add(prompt, traceparent=text)
        end.ends(len(texts))
        end.add(Rollout(begun, [5], [-1.0], [1]).to_prompt(), traceparent=VALID)
        end.ends(len(texts) + 1)
        traces.end_traces()
    spans = found.named("server: generate")
    for span in spans:
        assert (span.trace.hex(), span.parent.hex()) == tuple(VALID.split("-")[1:3])
    numbers = [(span.facts["aedit.sample"], span.facts["aedit.tokens"]) for span in spans]
    assert numbers == [(len(INVALID), 4), (len(texts), 3)], "a token that comes with a sample is not counted"


# -- requests over HTTP

TEXT_ROUTES = {
    "/v1/completions": {"prompt": "the quick brown", "max_tokens": 6, "n": 2, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "the"}],
        "max_tokens": 6,
        "n": 2,
        "ignore_eos": True,
    },
    "/inference/v1/generate": {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 6, "n": 2, "ignore_eos": True},
    },
}


@contextmanager
def traced_server(found, ratio=1.0, **options):
    """Serve a tiny policy over HTTP in this process, whose traces go to the collector."""
    tokenizer = byte_tokenizer()
    with served(text_policy(tokenizer), tokenizer, **options) as (service, address):
        traces.begin(found.url, "serve", ratio=ratio)
        yield service, address
    traces.end_traces()


def children(found, parent, name):
    return [span for span in found.named(name) if (span.trace, span.parent) == (parent.trace, parent.id)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_over_http_goes_on_with_the_trace_of_its_client(stream):
    with collector() as found, traced_server(found) as (service, address):
        for path, body in TEXT_ROUTES.items():
            status, _, _ = ask(address, path, body | {"stream": stream}, headers={"traceparent": VALID})
            assert status == 200
        version = service.engine.version
    requests = {span.facts["aedit.route"]: span for span in found.named("server: request")}
    assert requests.keys() == TEXT_ROUTES.keys()
    for request in requests.values():
        assert (request.trace.hex(), request.parent.hex()) == tuple(VALID.split("-")[1:3])
        assert (request.process["service.name"], request.facts["aedit.status"]) == ("aedit-serve", 200)
        generated = children(found, request, "server: generate")
        assert [span.facts["aedit.tokens"] for span in generated] == [6, 6]
        assert {span.facts["aedit.version"] for span in generated} == {version}
        assert {span.facts["aedit.finish"] for span in generated} == {"length"}
        for span in generated:
            (queue,) = children(found, span, "server: queue")
            assert request.begin <= span.begin <= queue.begin <= queue.end <= span.end <= request.end
    assert len(found.spans) == 3 * (1 + 2 + 2)


def test_a_sample_that_waits_for_a_row_is_queued_until_another_one_has_ended():
    steps_ns = []
    options = {"rows": 1, "between_steps": lambda: steps_ns.append(time.time_ns())}
    with collector() as found, traced_server(found, **options) as (_, address):
        ask(address, "/v1/completions", TEXT_ROUTES["/v1/completions"])
    (request,) = found.named("server: request")
    first, second = sorted(children(found, request, "server: generate"), key=lambda span: span.end)
    (of_first,), (of_second,) = (children(found, span, "server: queue") for span in (first, second))
    assert of_first.end <= steps_ns[0] <= first.end <= of_second.end
    assert of_second.end <= min(step_ns for step_ns in steps_ns if step_ns >= first.end)


def test_a_sample_that_gives_its_row_to_a_trainer_is_queued_twice():
    steps, receiver = [], SimpleNamespace(tokens=lambda *_: None, ended=lambda *_: None)

    def between_steps():
        steps.append(1)
        if len(steps) == 3:
            (prompt,) = prompts_of(1, max_new_tokens=2)
            service.host.submit("model", prompt, receiver, priority=Priority.RUN)

    options = {"rows": 1, "between_steps": between_steps}
    with collector() as found, traced_server(found, **options) as (service, address):
        body = TEXT_ROUTES["/v1/completions"] | {"n": 1}
        assert ask(address, "/v1/completions", body)[2]["usage"]["completion_tokens"] == 6
    (request,) = found.named("server: request")
    (generated,) = children(found, request, "server: generate")
    assert generated.facts["aedit.tokens"] == 6, "each token is counted once"
    before, after = sorted(children(found, generated, "server: queue"), key=lambda span: span.begin)
    assert before.end < after.begin
    assert len(found.named("server: generate")) == 1, "a trainer that names no trace has none"


def test_only_a_sampled_trace_of_a_client_is_followed_and_others_begin_by_the_ratio():
    body = TEXT_ROUTES["/v1/completions"] | {"n": 1}

    def requests(ratio, *values):
        with collector() as found, traced_server(found, ratio) as (_, address):
            host, _, port = address.rpartition(":")
            for traceparents in values:
                with contextlib.closing(HTTPConnection(host, int(port), timeout=LIMIT_S)) as call:
                    call.putrequest("POST", "/v1/completions")
                    for text in traceparents:
                        call.putheader("traceparent", text)
                    call.putheader("content-length", str(len(data := json.dumps(body).encode())))
                    call.endheaders(data)
                    assert call.getresponse().status == 200
        return [span.trace.hex() if span.parent else "" for span in found.named("server: request")]

    theirs = VALID.split("-")[1]
    assert requests(0.0, [VALID], [], [VALID.upper()], [VALID, VALID]) == [theirs]
    unsampled, longer = VALID[:-1] + "0", "00-" + "a" * 6000
    assert requests(1.0, [unsampled], [longer], [VALID, VALID], [], [VALID]) == ["", "", "", theirs]


def test_a_refused_request_is_a_span_with_its_status_and_one_without_a_key_is_none():
    with collector() as found, traced_server(found, keys=("key",)) as (_, address):
        path, key = "/v1/completions", {"authorization": "Bearer key"}
        assert ask(address, path, {"prompt": ""}, headers=key)[0] == 400
        assert ask(address, path, TEXT_ROUTES[path], headers={"traceparent": VALID})[0] == 401
        assert ask(address, "/v1/models", headers=key)[0] == 200
        scored = {"prompt": "the quick", "max_tokens": 0, "echo": True, "logprobs": 1}
        answer = ask(address, path, scored, headers=key)[2]
    refused, accepted = found.named("server: request")
    assert [refused.facts["aedit.status"], accepted.facts["aedit.status"]] == [400, 200]
    assert not children(found, refused, "server: generate")
    (score,) = children(found, accepted, "server: score")
    assert score.facts["aedit.tokens"] == answer["usage"]["prompt_tokens"]


@pytest.fixture
def model_folder(tmp_path):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield saved("llama", tmp_path / "model")
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_served_model_directory_sends_traces(model_folder, monkeypatch):
    servers, original, answers = [], serve_model.start_servers, []

    def start_servers(*arguments):
        servers.extend(found := original(*arguments))
        return found

    def client():
        try:
            until(lambda: servers, "the server")
            body = {"prompt": "t1 t2", "max_tokens": 3, "ignore_eos": True}
            answers.append(ask(servers[0].address, "/v1/completions", body)[0])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(serve_model, "start_servers", start_servers)
    with collector() as found:
        thread = threading.Thread(target=client)
        thread.start()
        code = main(
            ["serve", str(model_folder), "--port=0", f"--traces.endpoint={found.url}", "--device=cpu"]
        )
        thread.join(LIMIT_S)
    assert (code, answers) == (0, [200])
    (request,) = found.named("server: request")
    assert request.process["aedit.model"] == "model"
    (generated,) = children(found, request, "server: generate")
    assert generated.facts["aedit.tokens"] == 3
    assert not traces.is_on()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--traces.ratio=0.5"], "flag: traces.ratio has no effect with traces.endpoint"),
        (["--traces.endpoint=ftp://h/secret"], "traces.endpoint must be an http:// or https:// URL"),
        (
            ["--traces.endpoint=http://127.0.0.1:1/v1/traces"],
            "needs OpenTelemetry: pip install 'aedit[otel]'",
        ),
    ],
)
def test_wrong_traces_of_a_served_model_are_one_line(model_folder, monkeypatch, capsys, words, text):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    assert main(["serve", str(model_folder), "--device=cpu", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aedit: ")
    assert text in line
    assert "secret" not in line.replace("may be secret", "")


# -- a loop of one's own


@pytest.mark.filterwarnings("ignore:buffers of this model change")
def test_a_loop_of_ones_own_gives_the_trace_of_each_push(tmp_path):
    with collector() as found, real_hub(tmp_path, f'{HUB}[traces]\nendpoint = "{found.url}"\n') as hub:
        train(hub.address, found, 7)
        accepted = {(push.unit, push.seq) for push in pushes_of(tmp_path / "hub") if push.base}
        until(lambda: len(found.named("hub: push")) >= len(accepted), "the spans of the hub", LIMIT_S)
    traced = set()
    for push in found.named("push"):
        assert (push.process["service.name"], push.process["aedit.node"]) == ("aedit-node", "a")
        assert (push.parent, push.facts["aedit.verdict"]) == (b"", "MERGED")
        (sent,) = children(found, push, "agent: push")
        assert sent.process["service.name"] == "aedit-agent"
        (received,) = children(found, sent, "hub: push")
        traced.add((received.facts["aedit.unit"], received.facts["aedit.seq"]))
    assert traced == accepted
    assert accepted


def test_wrong_traces_of_a_loop_of_ones_own_are_an_error_without_the_url(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="traces must be an http:// or https:// URL") as caught:
        HubExchange.join("127.0.0.1:1", Net(1), name="a", traces="ftp://secret")
    assert "//secret" not in str(caught.value)
    with pytest.raises(ValueError, match=r"trace_ratio must be in \[0, 1\], got 2"):
        HubExchange.join("127.0.0.1:1", Net(1), name="a", trace_ratio=2)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with real_hub(tmp_path, HUB) as hub, pytest.raises(ValueError, match="pip install 'aedit"):
        HubExchange.join(hub.address, Net(1), name="a", traces="http://127.0.0.1:1/")
    assert not traces.is_on()


# -- the endpoint


def end_spans(count):
    for i in range(count):
        traces.opened("push", root=True, number=i).end()


@pytest.fixture
def log():
    """Yield the lines of the log, without those of loggers that keep their lines to themselves."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler = Lines()
    logging.getLogger().addHandler(handler)
    yield lines
    logging.getLogger().removeHandler(handler)


def dropped(log):
    """Return the number of dropped spans that the last line names."""
    assert not [line for line in log if "secret-path" in line or "export" in line]
    return int(re.fullmatch(r"traces.endpoint: (\d+) spans dropped: 127.+", log[-1])[1]) if log else 0


def test_an_endpoint_that_does_not_answer_stops_nothing_and_what_it_costs_is_counted(log):
    """All spans end while its answer to the first ones is held back."""
    hold = threading.Event()
    with collector(hold=hold) as found:
        traces.begin(found.url, "node")
        end_spans(10)
        assert found.asked.wait(LIMIT_S)
        end_spans(3 * traces.MOST_WAITING)
        assert not found.spans
        hold.set()
        until(lambda: found.spans, "the first spans")
        traces.end_traces()
    seen = {(span.trace, span.id) for span in found.spans}
    assert len(seen) == len(found.spans) >= traces.MOST_WAITING
    assert len(seen) <= traces.MOST_WAITING + 512, "one batch may have been on its way"
    assert len(seen) + dropped(log) == 10 + 3 * traces.MOST_WAITING


@pytest.mark.parametrize("code", [401, 500])
def test_an_endpoint_that_refuses_is_one_warning_with_its_status(code, log):
    with collector(code=code) as found:
        traces.begin(found.url, "node")
        end_spans(5)
        assert found.asked.wait(LIMIT_S)
        until(lambda: dropped(log) == 5, "the warning")
        end_spans(7)
        traces.end_traces()
    assert log[0].endswith(f"answers with status {code}")
    late = ("does not take them in time", f"answers with status {code}")  # at the end on a busy machine
    assert log[-1].endswith(late)
    assert dropped(log) == 12
    assert len(log) == 2, "one a minute, and one at the end"


def test_a_closed_port_is_no_reason_to_wait(log):
    with collector() as found:
        url = found.url
    traces.begin(url, "node")
    end_spans(3)
    until(lambda: dropped(log) == 3, "the warning")
    traces.end_traces()
    assert log[-1].endswith("does not take them in time")


def test_a_share_of_the_traces_is_recorded_with_all_their_spans():
    with collector() as found:
        traces.begin(found.url, "node", ratio=0.5)
        for _ in range(200):
            with traces.below(traces.opened("push", root=True)) as push:
                traces.opened("part").end()
            push.end()
        traces.end_traces()
    roots, parts = found.named("push"), found.named("part")
    assert 50 < len(roots) < 150
    assert {(span.trace, span.id) for span in roots} == {(span.trace, span.parent) for span in parts}


def test_the_span_of_a_block_that_fails_names_the_error():
    with collector() as found:
        traces.begin(found.url, "node")
        push = traces.opened("push", root=True)
        with pytest.raises(KeyError), traces.spanning("part", push.context):
            raise KeyError("x")
        assert traces.current() is traces.OFF
        traces.end_traces()
    assert [span.facts for span in found.named("part")] == [{"aedit.error": "KeyError"}]


# -- off, and mistakes


def test_without_the_key_no_process_imports_opentelemetry():
    """Those of hub and agent are looked at; no other module imports it but `traces`."""
    code = "import sys, aedit.launch.hub.main, aedit.proto.agent.agent_main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True)
    assert "aedit.traces" in done.stdout.split()
    assert [name for name in done.stdout.split() if name.startswith("opentelemetry")] == []
    files = [file for part in PARTS for file in (ROOT / part).rglob("*.py")]
    assert len(files) > 300
    wanted = re.compile(r"^\s*(from|import) opentelemetry", re.M)
    assert [file for file in files if wanted.search(file.read_text())] == []


def test_without_the_key_no_span_or_block_is_made():
    assert traces.opened("push", root=True) is traces.OFF
    assert traces.spanning("a") is traces.spanning("b") is traces.below(traces.OFF)
    with traces.spanning("a") as span:
        assert span is traces.OFF
    assert traces.sent() == ()
    traces.begin("", "node")
    assert not traces.is_on()


@pytest.mark.parametrize("command", [["hub"], ["run", "--local=2"], ["run", "--dry-run"]])
def test_a_missing_package_is_one_line(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    toml = write_run(tmp_path, '[traces]\nendpoint = "http://127.0.0.1:4318/v1/traces"\n')
    assert main([command[0], str(toml), *command[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aedit: traces.endpoint: needs OpenTelemetry: pip install 'aedit[otel]'")


def test_a_wrong_environment_variable_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "many")
    toml = write_run(tmp_path, '[traces]\nendpoint = "http://127.0.0.1:4318/v1/traces"\n')
    assert main(["hub", str(toml)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aedit: traces.endpoint: OpenTelemetry cannot start: ")
    assert line.endswith("check the environment variables OTEL_*")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:4318", "ftp://h/secret", "http://", "grpc://h:4317", "http://h:0/", "http://[x"]
)
def test_an_endpoint_that_is_no_url_is_refused_without_being_shown(tmp_path, url):
    path = Path(tmp_path / "run.toml")
    path.write_text(f'[traces]\nendpoint = "{url}"\n')
    with pytest.raises(UserError, match=r"traces\.endpoint must be an http:// or https:// URL") as caught:
        load(path, [])
    assert "secret" not in str(caught.value).replace("may be secret", "")


def test_a_node_takes_no_endpoint_from_a_hub():
    shared = RunConfig(traces=TraceConfig(endpoint="https://example.org/secret"))
    assert of_this_machine(shared).traces == TraceConfig()
