"""Tests that no request harms the HTTP server or its other clients: 500s, wrong answers, memory, hangs."""

import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager, suppress

import psutil
import pytest
import torch
from kit.http_fuzz import answer, encoded
from kit.http_harm import (
    GREEDY,
    LIMIT_S,
    SEEDED,
    STREAMED,
    answers,
    check_error,
    close,
    connected,
    fuzz,
    get,
    post,
    said,
    send,
    well_behaved,
)
from kit.served_models import CHAT, saved
from kit.waiting import until
from transformers import AutoModelForCausalLM, AutoTokenizer

from aedit.async_sgd.hub import hub_status
from aedit.async_sgd.service import MetricsPage
from aedit.launch.config import RunConfig
from aedit.launch.hub.folder import make_hub
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.http import HttpServer, HttpService, TextCodec, control_routes, make_app
from aedit.spec_rollout.http.server import HttpLimits
from aedit.spec_rollout.server import EngineHost, HostLimits

KEY = "k" * 40
LIMITS = HttpLimits(max_connections=64, idle_s=0.5, body_s=0.5, write_s=2.0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 110))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return saved("llama", tmp_path_factory.mktemp("served") / "m", chat=CHAT)


class Served:
    """A server in this process."""

    def __init__(self, directory, root=None):
        model = AutoModelForCausalLM.from_pretrained(directory).eval().requires_grad_(False)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        engine = Engine.of(model, rows=4, max_tokens=128, tokenizer=tokenizer)
        self.host = EngineHost(HostLimits(max_waiting_public=256))
        self.host.open("model", lambda: engine)
        self.service = HttpService(
            host=self.host, line="model", codec=TextCodec(tokenizer), model="m", eos=(), limits=LIMITS
        )
        self.service.metrics.follow(self.host.status)
        self.server = HttpServer(make_app(self.service), "127.0.0.1", 0, LIMITS)
        app = make_app(self.service, [KEY], control_routes(root))
        self.control = HttpServer(app, "127.0.0.1", 0, LIMITS)
        self.port, self.control_port = (
            int(server.address.rpartition(":")[2]) for server in (self.server, self.control)
        )

    def is_empty(self):
        """Return true if nothing is left of any request."""
        status = self.host.status()
        return status["samples"] == 0 == self.service.num_buffered_bytes

    def close(self):
        for server in (self.server, self.control):
            server.close()
        self.host.close()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def module_server(directory, root):
    with closing(Served(directory, root)) as served:
        yield served


@pytest.fixture
def served(module_server, caplog):
    """Return the server; afterwards nothing is left of the requests, and nothing was logged as an error."""
    with caplog.at_level(logging.WARNING):
        yield module_server
    until(module_server.is_empty, "the end of all requests", 60)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors


def test_well_behaved_clients_get_the_tokens_of_transformers(served, directory):
    greedy, _, _ = run(answers(served.port))
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    assert greedy[0][0].split() == [f"t{i}" for i in ids]


def test_fuzzed_requests_harm_nobody(served):
    async def both():
        async with well_behaved(served.port) as got:
            statuses = await fuzz(served.port, 400, seed=1)
        return statuses, len(got)

    statuses, count = run(both())
    assert count >= 2
    assert statuses[200] > 20
    assert statuses[400] > 100
    assert sum(statuses.values()) == 400


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**30, 10**400, "\ud800", [[[]]], {}, True])
def test_no_value_of_any_parameter_is_a_failure(served, value):
    async def each():
        for name in (
            "n",
            "max_tokens",
            "temperature",
            "logprobs",
            "stop",
            "seed",
            "prompt",
            "stream",
            "model",
        ):
            found = await send(served.port, post("/v1/completions", encoded({**GREEDY, name: value})))
            assert found[0] in (200, 400, 404), (name, found)
            if found[0] != 200:
                check_error(found, name)

    run(each())


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 10**9}, "n"),
        ({"n": 0}, "n"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": ["x" * 10**6]}, "stop"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"prompt": [1] * 100_000}, "prompt"),
        ({"prompt": [[1]] * 100_000}, "prompt"),
        ({"prompt": [64]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
    ],
)
def test_a_refusal_names_the_parameter(served, change, param):
    found = run(send(served.port, post("/v1/completions", {**GREEDY, **change})))
    assert found[0] == 400
    check_error(found, change)
    assert json.loads(found[2])["error"]["param"] == param


def test_json_of_great_depth_and_bad_text_is_refused_with_a_reason(served):
    bodies = [b"[" * 200_000, b'{"a":' * 50_000 + b"1", b'{"prompt": "\xff"}', b"", b'{"prompt": "t1"', b"\0"]

    async def each():
        for body in bodies:
            found = await send(served.port, post("/v1/completions", body))
            assert found[0] == 400
            check_error(found, body)

    run(each())


def test_a_body_above_the_limit_is_refused_before_it_is_read(served):
    async def each():
        head = post("/v1/completions", b"").replace(b"Content-Length: 0", b"Content-Length: 99999999999")
        assert (await send(served.port, head))[0] == 413
        # Without a declared length it is refused where the limit is.
        async with connected(served.port) as (reader, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n")
            part = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
            try:
                for _ in range(64):
                    writer.write(part)
                    await writer.drain()
            except ConnectionError:
                return
            assert (await answer(reader, LIMIT_S))[0] == 413

    run(each())


def test_clients_that_vanish_free_their_samples(served):
    async def vanish():
        async with well_behaved(served.port):
            for i in range(30):
                async with connected(served.port) as (reader, writer):
                    body = {**STREAMED, "max_tokens": 100, "stream": i % 3 != 0, "n": 2}
                    writer.write(post("/v1/completions", body))
                    await writer.drain()
                    if i % 3 == 1:
                        await reader.readuntil(b"data: ")
                    writer.transport.abort()

    before = served.host.status()["over"]
    run(vanish())
    until(served.is_empty, "the end of all requests", 60)
    assert served.host.status()["over"] >= before

    def gauges():
        text = run(send(served.port, get("/metrics")))[2].decode()
        names = ("aedit_serve_running{", "aedit_serve_samples ", "aedit_serve_waiting_public ")
        return [line.split()[1] for line in text.splitlines() if line.startswith(names)]

    assert len(gauges()) == 3
    until(lambda: set(gauges()) == {"0.0"}, "gauges without samples")


def test_connections_that_idle_or_drip_are_closed_and_others_are_served(served):
    async def drip():
        async with well_behaved(served.port):
            texts = [b"", b"POST /v1/comp", post("/v1/completions", b"x" * 100)[:-50]]
            pairs = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(90)]
            for i, (_, writer) in enumerate(pairs):
                writer.write(texts[i % 3])
            async with asyncio.timeout(LIMIT_S):
                for reader, _ in pairs:
                    try:
                        end = await reader.read()
                    except ConnectionError:
                        end = b""
                    assert end == b"" or b" 408 " in end.split(b"\r\n")[0]
            for _, writer in pairs:
                writer.close()

    run(drip())


def test_a_client_that_does_not_read_is_ended(served):
    async def stall():
        async with well_behaved(served.port):
            with socket.create_connection(("127.0.0.1", served.port)) as stalled:
                stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                body = {**SEEDED, "n": 64, "max_tokens": 120, "logprobs": 5, "stream": True}
                stalled.sendall(post("/v1/completions", body))
                async with asyncio.timeout(LIMIT_S):
                    while served.host.status()["samples"] < 20:
                        await asyncio.sleep(0.01)
                    while served.host.status()["samples"] > 10:
                        await asyncio.sleep(0.05)

    run(stall())


def test_pipelined_requests_are_answered_in_order(served):
    async def pipeline():
        right = await answers(served.port)
        async with connected(served.port) as (reader, writer):
            writer.write(b"".join(post("/v1/completions", body) for body in (GREEDY, SEEDED, STREAMED) * 3))
            await writer.drain()
            return right, [said(await answer(reader, LIMIT_S)) for _ in range(9)]

    right, got = run(pipeline())
    assert all(close(a, b) for a, b in zip(got, right * 3, strict=True))


# --- requests whose length two programs may see differently, with another request hidden behind them

TEXT = b'{"prompt": "t1"}'
CHUNKED = "Transfer-Encoding: chunked"
CHUNKS = b"10\r\n" + TEXT + b"\r\n0\r\n\r\n"
LENGTH = f"Content-Length: {len(TEXT)}"
HIDDEN = get("/v1/models", "Connection: close")


def first(*headers, body=TEXT, version="1.1", end="\r\n"):
    return end.join([f"POST /tokenize HTTP/{version}", "Host: s", *headers, "", ""]).encode() + body


UNCLEAR = {
    "both lengths": first("Content-Length: 5", CHUNKED, body=b"0\r\n\r\n"),
    "both lengths, chunked first": first(CHUNKED, LENGTH, body=CHUNKS),
    "two lengths": first(LENGTH, "Content-Length: 3"),
    "a list of lengths": first(f"{LENGTH}, 3"),
    "a length with a sign": first(f"Content-Length: +{len(TEXT)}"),
    "a length in hexadecimal": first("Content-Length: 0x10"),
    "a length with an underscore": first("Content-Length: 1_6"),
    "no length": first("Content-Length: ", body=b""),
    "another coding": first("Transfer-Encoding: xchunked", body=CHUNKS),
    "two codings": first("Transfer-Encoding: gzip, chunked", body=CHUNKS),
    "no coding": first("Transfer-Encoding: identity", LENGTH),
    "the coding twice": first(CHUNKED, CHUNKED, body=CHUNKS),
    "a space before the colon": first("Transfer-Encoding : chunked", body=CHUNKS),
    "a control character before the coding": first("Transfer-Encoding: \x0bchunked", body=CHUNKS),
    "a continued line": first("X-A: a\r\n b", LENGTH),
    "a continued coding": first("Transfer-Encoding:\r\n chunked", body=CHUNKS),
    "lines without CR": first(LENGTH, end="\n"),
    "one line without CR": first(f"X-A: a\n{LENGTH}"),
    "a line with CR alone": first(f"X-A: a\r{LENGTH}", LENGTH),
    "NUL": first("X-A: a\0b", LENGTH),
    "chunked in HTTP/1.0": first(CHUNKED, "Connection: keep-alive", version="1.0", body=CHUNKS),
    "HTTP/1.2": first(LENGTH, version="1.2"),
    "two hosts": first("Host: t", LENGTH),
    "no end of a chunk": first(CHUNKED, body=b"10\r\n" + TEXT + b"XX0\r\n\r\n"),
    "chunks without CR": first(CHUNKED, body=CHUNKS.replace(b"\r\n", b"\n")),
    "an extension with LF": first(CHUNKED, body=CHUNKS.replace(b"10\r\n", b"10;a\nb\r\n")),
    "a chunk's size with a sign": first(CHUNKED, body=b"+" + CHUNKS),
    "a chunk's size in C": first(CHUNKED, body=b"0x" + CHUNKS),
}
"""Requests that are refused."""
CHUNKED_BODIES = {
    "plain": first(CHUNKED, body=CHUNKS),
    "extensions": first(CHUNKED, body=CHUNKS.replace(b"10\r\n", b'10;a=b;c="d"\r\n')),
    "an extension with CR": first(CHUNKED, body=CHUNKS.replace(b"10\r\n", b"10;a\rb\r\n")),
    "a trailer with a length": first(CHUNKED, body=CHUNKS[:-2] + b"Content-Length: 5\r\n\r\n"),
    "a trailer without CR": first(CHUNKED, body=CHUNKS[:-2] + b"\n"),
}
"""Requests that are answered, and nothing that comes after them on their connection."""


def exchanged(port, data):
    """Return the bytes that come back until the server closes the connection."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
        connection.sendall(data)
        with suppress(ConnectionError):  # what the server has not read resets the connection
            while part := connection.recv(1 << 16):
                found += part
    return found


def statuses_of(found):
    return re.findall(rb"(?m)^HTTP/1\.[01] (\d{3}) ", found.replace(b"}HTTP/", b"}\nHTTP/"))


@pytest.mark.parametrize("name", UNCLEAR)
def test_a_request_of_unclear_length_is_refused_and_nothing_behind_it_is_read(served, name):
    found = exchanged(served.port, UNCLEAR[name] + HIDDEN)
    assert statuses_of(found) == [b"400"], found
    head, _, body = found.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["message"].startswith("the request is not valid HTTP: ")


@pytest.mark.parametrize("name", CHUNKED_BODIES)
def test_a_chunked_body_is_the_last_one_of_its_connection(served, name):
    found = exchanged(served.port, CHUNKED_BODIES[name] + HIDDEN)
    assert statuses_of(found) == [b"200"], found
    assert b'"count":1,' in found


@pytest.mark.parametrize("length", [LENGTH, f"{LENGTH}\r\n{LENGTH}", f"{LENGTH}, {len(TEXT)}"])
def test_a_request_of_clear_length_keeps_its_connection(served, length):
    assert statuses_of(exchanged(served.port, first(length) + HIDDEN)) == [b"200", b"200"]


def test_damage_after_the_answer_has_begun_ends_the_connection_only(served):
    """The body goes on after the refusal; the client then sends what is no chunk."""

    async def late():
        async with well_behaved(served.port), connected(served.port) as (reader, writer):
            writer.write(b"POST /nothing HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n")
            assert (await answer(reader, LIMIT_S))[0] == 404
            writer.write(b"no size\r\n" + HIDDEN)
            assert await answer(reader, LIMIT_S) is None

    run(late())


def test_the_metrics_page_of_a_hub_answers_one_request_of_a_connection():
    rest = {"merges": 0, "merge_s": 0.0, "journal": {"bytes": 0}, "standby": False, "servers": []}
    hub = make_hub(RunConfig(), (0, 1))
    page = MetricsPage(lambda: hub_status(hub, 0.0) | rest, "127.0.0.1", 0)
    try:
        hidden = get("/metrics", "Connection: keep-alive")
        for name, data in {**UNCLEAR, **CHUNKED_BODIES, "clear": first(LENGTH)}.items():
            assert len(statuses_of(exchanged(page.port, data + hidden))) <= 1, name
        assert statuses_of(exchanged(page.port, hidden + hidden)) == [b"200"]
    finally:
        page.close()


def test_keys_given_twice_are_one_value_and_no_failure(served):
    body = json.dumps(GREEDY)[:-1].encode() + b', "max_tokens": 2}'
    found = run(send(served.port, post("/v1/completions", body)))
    assert found[0] in (200, 400)
    if found[0] == 200:
        assert len(json.loads(found[2])["choices"][0]["text"].split()) == 2


# --- control

CONTROL = (
    "/pause",
    "/resume",
    "/abort_requests",
    "/update_weights",
    "/weight_checker",
    "/reset_prefix_cache",
)
NO_KEYS = (
    "",
    "Bearer wrong",
    f"Bearer {KEY}x",
    f"Basic {KEY}",
    KEY,
    f"Bearer {KEY[:-1]}",
    "Bearer",
    "Bearer \xe9",
)


def test_without_its_key_the_second_address_tells_and_does_nothing(served, root):
    async def each():
        for path in (*CONTROL, "/status", "/weight_info", "/v1/completions", "/metrics", "/nothing"):
            for key in NO_KEYS:
                header = (f"Authorization: {key}",) if key else ()
                text = post(path, {"weight_dir": str(root)}, *header)
                found = await send(served.control_port, text)
                assert found[0] == 401, (path, key, found)
                check_error(found, path)
        twice = (f"Authorization: Bearer {KEY}", "Authorization: Bearer x")
        assert (await send(served.control_port, post("/pause", {}, *twice)))[0] == 401
        return served.host.is_paused

    assert run(each()) is False


def test_the_first_address_has_no_control_routes(served):
    async def each():
        for path in (*CONTROL, "/status", "/weight_info", "/is_paused"):
            for text in (post(path, {}), get(path), post(path, {}, f"Authorization: Bearer {KEY}")):
                assert (await send(served.port, text))[0] == 404

    run(each())


def controlled(served, path, body):
    return run(send(served.control_port, post(path, body, f"Authorization: Bearer {KEY}")))


def test_weights_come_from_below_the_root_only(served, root, directory, tmp_path):
    outside = tmp_path / "outside"
    saved("llama", outside, seed=5)
    (root / "link").symlink_to(outside)
    inner = root / "files"
    inner.mkdir()
    for name in ("config.json", "model.safetensors"):
        (inner / name).symlink_to(outside / name)
    sibling = root.with_name(root.name + "-more")
    saved("llama", sibling, seed=6)
    names = ["..", "../" + sibling.name, str(outside), "link", "files", "/etc", "/", "", ".", "x\0y", "~"]
    names += ["nothing", "a" * 10_000, "file:///etc", str(sibling), f"link/../{sibling.name}"]
    before = run(answers(served.port))
    for name in (*names, 1, None, [], {}, True):
        found = controlled(served, "/update_weights", {"weight_dir": name})
        assert found[0] == 400, (name, found)
        check_error(found, name)
        assert "root:" not in found[2].decode()
    assert close(run(answers(served.port)), before)


@pytest.mark.parametrize("damage", ["short", "header", "shapes", "names", "nan", "pickle"])
def test_damaged_weights_change_nothing(served, root, tmp_path, damage):
    from safetensors.torch import load_file, save_file

    folder = root / damage
    saved("llama", folder, seed=7)
    file = folder / "model.safetensors"
    tensors, data = load_file(file), file.read_bytes()
    if damage == "short":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "header":
        file.write_bytes(b"\xff" * 8 + data[8:])
    elif damage == "shapes":
        save_file({name: value[:1].clone() for name, value in tensors.items()}, file)
    elif damage == "names":
        save_file({name + "x": value for name, value in tensors.items()}, file)
    elif damage == "nan":
        save_file({name: torch.full_like(value, float("nan")) for name, value in tensors.items()}, file)
    else:
        file.unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    before = run(answers(served.port))
    found = controlled(served, "/update_weights", {"weight_dir": str(folder)})
    assert found[0] == 400, found
    check_error(found, damage)
    assert close(run(answers(served.port)), before)


# --- a process of its own, in full number


@contextmanager
def process(directory, *words):
    """Run `aedit serve`; yields its port, process and log."""
    log = directory.parent / "serve.log"
    command = [sys.executable, "-m", "aedit.launch.cli", "serve", str(directory), "--port=0", *words]
    with log.open("w") as out:
        started = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        line = until(lambda: started.poll() is not None or "serving" in log.read_text(), "the server", 120)
        assert started.poll() is None, log.read_text()
        assert line
        yield int(log.read_text().split(" at http://")[1].split()[0].rpartition(":")[2]), started, log
        started.terminate()
        assert started.wait(60) == 0, log.read_text()
    finally:
        started.kill()
        started.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_fuzzed_requests_leave_memory_and_answers_as_they_were(directory):
    with process(directory, "--served-name=m", "--rows=4") as (port, started, log):
        rss = []

        async def rounds():
            async with well_behaved(port):
                for number in range(10):
                    statuses = await fuzz(port, 1000, seed=100 + number)
                    assert sum(statuses.values()) == 1000
                    rss.append(psutil.Process(started.pid).memory_info().rss)

        asyncio.run(asyncio.wait_for(rounds(), 1700))
        assert max(rss[5:]) - rss[4] < 16 << 20, rss
        assert "Traceback" not in log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_hundred_idle_connections_keep_nobody_out(directory):
    with process(directory, "--served-name=m", "--rows=4") as (port, started, log), ExitStack() as stack:
        sockets = []
        for _ in range(500):
            sockets.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)))
        before = psutil.Process(started.pid).memory_info().rss

        async def serve():
            async with well_behaved(port) as got:
                async with asyncio.timeout(300):
                    while len(got) < 20:
                        await asyncio.sleep(0.05)

        asyncio.run(serve())
        assert psutil.Process(started.pid).memory_info().rss - before < 32 << 20
        assert "Traceback" not in log.read_text()
