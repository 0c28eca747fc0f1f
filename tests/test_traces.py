"""Tests traces of pushes over real processes, and that neither an endpoint nor a peer can do harm with them.

The endpoint is a receiver of OTLP over HTTP that reads the protocol with OpenTelemetry's own messages.
"""

import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from kit.hub_processes import Client, HubProcess, ending, hello, status, write_run
from kit.places import LIMIT_S, Place
from kit.rl_hub import NodeThread, hub_of
from kit.rl_nodes import config_of
from kit.rollout_servers import TrainerEnd, tiny_server
from kit.rollouts import prompts_of, tiny_policy
from kit.served_runs import ServeProcess
from kit.waiting import until
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from aedit import traces
from aedit.launch.cli import main
from aedit.launch.config import RunConfig, TraceConfig, load, of_this_machine
from aedit.launch.hub.folder import pushes_of
from aedit.launch.node.rl_groups import GroupStream
from aedit.proto.rpc import client as rpc_client
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

ROOT = Path(__file__).parent.parent
PARTS = ("async_sgd", "edit", "launch", "proto", "spec_rollout")

RUN = """
name = "x"
dir = "{dir}"
device = "cpu"
[model]
sizes = {{ hidden_size = 32, intermediate_size = 64, num_hidden_layers = 1, num_attention_heads = 2 }}
[data]
source = "{dir}/text.txt"
seq_len = 32
held_out = 0.3
[train]
steps = 12
batch_size = 2
eval_every = 0
[edit]
every = 4
landing = "arrival"
[hub]
address = "127.0.0.1:0"
standby = "127.0.0.1:0"
quorum = 1
heartbeat_s = 0.1
expire_s = 60.0
[traces]
endpoint = "{more}"
"""

OF_A_HUB = {
    "hub: receive",
    "hub: check",
    "hub: journal write",
    "hub: journal sync",
    "hub: standby confirmation",
}


@pytest.mark.timeout(600)
def test_a_push_is_one_trace_over_trainer_agent_hub_and_standby(tmp_path):
    place = Place(tmp_path)
    with collector() as found, ending():
        toml = write_run(tmp_path, found.url, template=RUN)
        hub = HubProcess(toml, tmp_path / "run" / "hub")
        standby = HubProcess(toml, tmp_path / "run" / "standby", "--standby")
        until(lambda: status(standby.address)["follows"] == hub.address, "the standby")
        assert "secret-path" not in hello(hub.address).config
        try:
            flags = f"--traces.endpoint={found.url}", f"--dir={tmp_path}/node", "--device=cpu"
            joined = place.aedit("join", hub.address, *flags)
            assert joined.wait(LIMIT_S) == 0, joined.communicate()
        finally:
            place.end()
        accepted = {(push.unit, push.seq) for push in pushes_of(tmp_path / "run" / "hub") if push.base}
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

SERVED = """
name = "x"
dir = "{dir}"
device = "cpu"
[model]
sizes = {{ hidden_size = 32, intermediate_size = 48, num_hidden_layers = 1, num_attention_heads = 2 }}
[data]
seq_len = 64
[train]
steps = 100000
[prompts]
source = "aedit.spec_rollout.rl.tasks.arithmetic:rows"
[rl]
servers = "hub"
groups = 2
group_size = 2
eval_every = 0
[rl.sampling]
max_new_tokens = 8
[drafter]
kind = "off"
[edit]
every = 2
landing = "arrival"
[hub]
address = "127.0.0.1:0"
expire_s = 600.0
quorum = 1
[serve]
rows = 4
[traces]
endpoint = "{more}"
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
        hub = HubProcess(write_run(tmp_path, found.url, template=SERVED), tmp_path / "run" / "hub")
        endpoint = f"--traces.endpoint={found.url}"
        server = ServeProcess(hub.address, tmp_path, endpoint)
        try:
            until(lambda: list(tmp_path.glob("x/servers/s1/events.jsonl")), "the server", LIMIT_S)
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
        for prompt, text in zip(prompts_of(len(texts), max_new_tokens=4), texts, strict=True):
            end.add(prompt, traceparent=text)
        end.ends(len(texts))
        traces.end_traces()
    (span,) = found.named("server: generate")
    assert (span.trace.hex(), span.parent.hex()) == tuple(VALID.split("-")[1:3])
    assert (span.facts["aedit.sample"], span.facts["aedit.tokens"]) == (len(INVALID), 4)


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
    assert all(line.endswith(f"answers with status {code}") for line in log)
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
