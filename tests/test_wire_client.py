"""Tests a client that retries while that can help, reports why when it cannot, and loses no received byte."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
from kit.waiting import until
from kit.wire import MemoryCore, cutting, noise
from zlib_ng.zlib_ng import crc32

from aedit.launch.cli.keys import make_keys
from aedit.proto.rpc import client as client_module
from aedit.proto.rpc import frames, hub_pb2
from aedit.proto.rpc import server as server_module
from aedit.proto.rpc.client import HubClient, channel
from aedit.proto.rpc.keys import client_keys, server_keys
from aedit.proto.rpc.limits import ByteBudget
from aedit.proto.rpc.retry import HubRefused, HubUnreachable, Patience, PortClosed, TransferBroken
from aedit.proto.rpc.server import serve
from aedit.proto.rpc.service import Refusal
from aedit.proto.rpc.transfer import KEPT_S, Download, PartialPushes, PrefixHash

MIB = 2**20
NOBODY = "127.0.0.1:9"


@pytest.fixture
def connect(monkeypatch):
    """Yield a function that makes clients, which end with the test; their pauses are short."""
    clients = []

    def made(address, timeout_s=10.0, sleep=None, random=lambda: 0.1, **options):
        client = HubClient(address, call_timeout_s=timeout_s, **options)
        client._sleep = sleep or client._sleep
        monkeypatch.setattr("aedit.proto.rpc.client.random.random", random)
        clients.append(client)
        return client

    yield made
    for client in clients:
        client.close()


@pytest.fixture
def start():
    servers = []

    def started(core, address="127.0.0.1:0", **options):
        servers.append(serve(core, address, **options))
        return servers[-1]

    yield started
    for server in servers:
        server.stop(0.0)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


# --- how long to go on


def test_pauses_grow_up_to_two_seconds_and_are_drawn_anew():
    patience = Patience(1000, 1000, Clock())
    assert [patience.pause_s(0.5) for _ in range(7)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert patience.pause_s(0.0) == 0
    patience.moved(1)
    assert patience.pause_s(0.5) == 0.05, "after progress the pauses begin anew"


def test_patience_ends_when_nothing_moves_and_in_any_case_at_the_deadline():
    clock = Clock()
    patience = Patience(10, 25, clock)
    clock.now_s = 109
    assert patience.pause_s(0.0) == 0
    clock.now_s = 111
    assert patience.pause_s(0.0) is None
    patience.moved(5)
    assert patience.pause_s(0.0) == 0
    clock.now_s = 124
    patience.moved(5)
    assert (patience.pause_s(0.0), patience.left_s, patience.num_bytes) == (0, 1, 10)
    clock.now_s = 125
    assert patience.pause_s(0.0) is None


# --- no hub there


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("Heartbeat", lambda client: client.heartbeat(hub_pb2.HeartbeatRequest())),
        ("push unit 4", lambda client: client.push(hub_pb2.PushHead(unit=4), memoryview(noise(3 * MIB)))),
        ("pull unit 4", lambda client: client.pull(hub_pb2.PullRequest(unit=4), memoryview(bytearray(9)))),
    ],
)
def test_an_address_where_nobody_is_is_named_at_the_deadline(connect, what, call):
    client = connect(NOBODY, timeout_s=2.0)
    began_s = time.monotonic()
    with pytest.raises(HubUnreachable, match=f"{NOBODY}, asked to {what}: no program listens there.*refused"):
        call(client)
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize("patience_s", [0.5, 60.0])
def test_that_nobody_listens_is_told_apart_and_at_once_to_whom_it_is_news_enough(connect, patience_s):
    """Whoever can ask another hub does not wait for one whose process has ended."""
    client = connect(NOBODY, timeout_s=patience_s, until_it_listens=patience_s < 1.0)
    began_s = time.monotonic()
    with pytest.raises(PortClosed, match="no program listens there"):
        client.hello(hub_pb2.HelloRequest())
    assert time.monotonic() - began_s < 20


def test_a_silent_hub_is_not_taken_for_one_that_has_ended(connect, start):
    core, over = MemoryCore(), threading.Event()
    core.heartbeat = lambda request: over.wait(30) and hub_pb2.News()
    try:
        with pytest.raises(HubUnreachable) as silent:
            connect(start(core).address, until_it_listens=False).heartbeat(hub_pb2.HeartbeatRequest(), 0.3)
        assert not isinstance(silent.value, PortClosed)
    finally:
        over.set()


def test_a_hub_that_says_later_is_asked_again_and_one_that_says_no_is_not(connect, start):
    core = MemoryCore()
    answers = ["RESOURCE_EXHAUSTED", "UNAVAILABLE", "NOT_FOUND"]

    def heartbeat(request):
        raise Refusal(grpc.StatusCode[answers.pop(0)], "as told")

    core.heartbeat = heartbeat
    pauses = []
    client = connect(start(core).address, sleep=pauses.append, random=lambda: 0.5)
    with pytest.raises(HubRefused, match="asked to Heartbeat: as told") as refused:
        client.heartbeat(hub_pb2.HeartbeatRequest())
    assert (refused.value.code, pauses, answers) == (grpc.StatusCode.NOT_FOUND, [0.05, 0.1], [])


def test_a_hub_that_does_not_answer_is_given_up_at_the_deadline(connect, start):
    core = MemoryCore()
    over = threading.Event()
    core.heartbeat = lambda request: over.wait(30) and hub_pb2.News()
    try:
        with pytest.raises(HubUnreachable, match=r"(?i)deadline"):
            connect(start(core).address).heartbeat(hub_pb2.HeartbeatRequest(), timeout_s=0.3)
    finally:
        over.set()


def test_a_push_that_the_hub_sits_on_is_given_up(connect, start):
    core = MemoryCore()
    core.open.clear()
    try:
        with pytest.raises(HubUnreachable, match=r"nothing moved for 0.3 s"):
            connect(start(core).address, timeout_s=0.3).push(
                hub_pb2.PushHead(num_bytes=4 * MIB), memoryview(noise(4 * MIB))
            )
    finally:
        core.open.set()


def test_closing_ends_what_others_wait_for(connect):
    client = connect(NOBODY, timeout_s=60.0, random=lambda: 0.99)
    said = []

    def call():
        try:
            client.heartbeat(hub_pb2.HeartbeatRequest())
        except HubUnreachable as error:
            said.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    client.close()
    thread.join(10)
    assert said == [f"{NOBODY}, asked to Heartbeat: closed here"]


# --- it broke, and goes on


class Breaking(MemoryCore):
    """Core whose pulls, except the last, end with UNAVAILABLE after at least one more MiB."""

    def __init__(self, anchors, breaks):
        super().__init__(anchors)
        self.breaks = breaks

    def pull(self, request):
        head, data = super().pull(request)
        if self.breaks:
            self.breaks -= 1
            data = _ends_early(data, request.offset + MIB)
        return head, data


class _ends_early:
    """Bytes that cannot be read from `end` on."""

    def __init__(self, data, end):
        self.data, self.end, self.nbytes = data, end, data.nbytes

    def __getitem__(self, span):
        if span.start >= self.end:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "cut")
        return self.data[span]


def test_a_pull_that_breaks_goes_on_at_the_byte_it_has_reached(connect, start):
    core = Breaking([noise(6 * MIB + 5)], breaks=3)
    into = bytearray(7 * MIB)
    connect(start(core).address).pull(hub_pb2.PullRequest(), memoryview(into))
    assert into[: 6 * MIB + 5] == core.anchors[0]
    sent = sum(2**14 * 2**i for i in range(7))  # chunks of 16 KiB to 1 MiB
    assert core.calls == [("pull", int(i > 0), i * sent) for i in range(4)]


@pytest.fixture
def tiring(monkeypatch):
    """Return options of a client with a patience of 10 s, for which every pause lasts 4 s."""
    clock = Clock()

    def sleep(seconds):
        clock.now_s += 4

    monkeypatch.setattr("aedit.proto.rpc.client.Patience", partial(Patience, clock=clock))
    return {"timeout_s": 10.0, "sleep": sleep}


def test_a_pull_that_moves_on_between_breaks_is_not_given_up(connect, start, tiring):
    core = Breaking([noise(7 * MIB)], breaks=6)
    into = bytearray(7 * MIB)
    connect(start(core).address, **tiring).pull(hub_pb2.PullRequest(), memoryview(into))
    assert into == core.anchors[0]


@pytest.mark.parametrize(("size", "tries"), [(7 * MIB, 6), (0, 3)])
def test_a_push_is_given_up_only_when_nothing_moves_any_more(connect, start, tiring, size, tries):
    core = MemoryCore()
    core.push = lambda head, data: core.calls.append("push") or (_gone() if len(core.calls) < 6 else _done())
    client = connect(start(core).address, **tiring)
    push = partial(client.push, hub_pb2.PushHead(seq=1, num_bytes=size), memoryview(bytes(size)))
    if size:
        assert push().accepted
    else:
        with pytest.raises(HubUnreachable, match="asked to push unit 0"):
            push()
    assert len(core.calls) == tries


def _done():
    return hub_pb2.PushReply(accepted=True)


def test_a_pull_goes_on_at_another_address(connect, start):
    anchor = noise(3 * MIB + 5)
    first, second = Breaking([anchor], breaks=10**6), MemoryCore([anchor])
    first.pull = lambda request, pull=first.pull: pull(request) if request.offset == 0 else _gone()
    into = bytearray(4 * MIB)
    download = Download(hub_pb2.PullRequest(), memoryview(into))
    with pytest.raises(HubUnreachable, match=r"cut|gone"):
        connect(start(first).address, timeout_s=0.5).fetch(download)
    reached = download.received
    assert MIB <= reached < 3 * MIB
    connect(start(second).address).fetch(download)
    assert second.calls == [("pull", 1, reached)]
    assert into[: 3 * MIB + 5] == anchor


def _gone():
    raise Refusal(grpc.StatusCode.UNAVAILABLE, "gone")


def test_a_version_that_is_gone_when_a_pull_goes_on_is_replaced_whole(connect, start):
    core = Breaking([noise(3 * MIB)], breaks=1)
    later = noise(2 * MIB, seed=7)

    def sleep(seconds):
        core.anchors, core.version = [later], 5

    into = bytearray(4 * MIB)
    client = connect(start(core).address, sleep=sleep)
    answer = client.pull(hub_pb2.PullRequest(), memoryview(into))
    assert (answer.version, into[: 2 * MIB]) == (5, later)


def messages(data, head=None, offset=0):
    digest = hashlib.sha256(data).digest()
    head = head or hub_pb2.PullHead(version=1, num_bytes=len(data), sha256=digest)
    return [
        frames.pack_chunk(chunk)
        for chunk in frames.chunks(
            head.SerializeToString(), memoryview(data), offset=offset, chunk_bytes=1000
        )
    ]


def ignored(num_bytes):
    pass


def test_another_answer_of_the_same_version_does_not_complete_the_first():
    whole, chain = noise(4000), noise(3000, seed=1)
    into = bytearray(4000)
    download = Download(hub_pb2.PullRequest(), memoryview(into))
    with pytest.raises(TransferBroken, match="ended after 2000"):
        download.take(iter(messages(whole)[:2]), ignored)
    assert (download.request.version, download.request.offset) == (1, 2000)
    with pytest.raises(TransferBroken, match="something else"):
        download.take(iter(messages(chain, offset=2000)), ignored)
    assert (download.request.version, download.request.offset) == (0, 0)
    assert download.take(iter(messages(chain)), ignored).num_bytes == 3000
    assert into[:3000] == chain


def test_a_damaged_chunk_is_fetched_again_and_nothing_before_it():
    data = noise(4000)
    good = messages(data)
    bad = bytearray(good[2])
    bad[500] ^= 1
    into = bytearray(4000)
    download = Download(hub_pb2.PullRequest(), memoryview(into))
    with pytest.raises(TransferBroken, match="checksum"):
        download.take(iter([*good[:2], bytes(bad), good[3]]), ignored)
    assert into == data[:2000] + bytes(2000)
    download.take(iter(messages(data, offset=download.request.offset)), ignored)
    assert into == data


def test_bytes_from_before_count_for_the_hash():
    data = noise(4000)
    for start, fine in ((data[:2000], True), (bytes(2000), False)):
        into = bytearray(start + bytes(2000))
        download = Download(hub_pb2.PullRequest(version=1, offset=2000), memoryview(into))
        if fine:
            download.take(iter(messages(data, offset=2000)), ignored)
        else:
            with pytest.raises(TransferBroken, match="SHA-256"):
                download.take(iter(messages(data, offset=2000)), ignored)
            assert download.request.offset == 0


def test_an_anchor_with_another_hash_is_not_believed_however_often_it_comes(connect, start):
    core = MemoryCore([noise(MIB)])
    answer = hub_pb2.PullHead(version=1, num_bytes=MIB, sha256=bytes(32))
    core.pull = lambda request: core.calls.append("pull") or (answer, memoryview(core.anchors[0]))
    with pytest.raises(HubRefused, match="not what its SHA-256 says"):
        connect(start(core).address).pull(hub_pb2.PullRequest(), memoryview(bytearray(MIB)))
    assert core.calls == ["pull"] * 3


def test_an_answer_that_has_no_room_is_refused(connect, start):
    client = connect(start(MemoryCore([noise(1000)])).address)
    with pytest.raises(HubRefused, match="1000 bytes, where 999 have room"):
        client.pull(hub_pb2.PullRequest(), memoryview(bytearray(999)))


def test_a_push_that_was_damaged_is_sent_again(connect, start, monkeypatch):
    """The test flips a bit in the first message of the first try."""
    core = MemoryCore()
    pack, packed = frames.pack_chunk, []

    def damaged(chunk):
        packed.append(chunk)
        message = bytearray(pack(chunk))
        message[len(message) // 2] ^= len(packed) == 1
        return bytes(message)

    monkeypatch.setattr(frames, "pack_chunk", damaged)
    data = noise(3 * MIB)
    connect(start(core).address).push(hub_pb2.PushHead(num_bytes=3 * MIB), memoryview(data))
    assert (core.pushes[0, 0], core.calls[-1]) == (data, "push")
    assert core.calls[:-1] == [("garbled", 0, "damaged")]


# --- the hub is killed, and comes back

HUB = """
import sys
from kit.wire import MemoryCore, noise
from aedit.proto.rpc.server import serve
core = MemoryCore([noise({num_bytes})], 2**40)
server = serve(core, sys.argv[1])
print(server.port, flush=True)
for line in sys.stdin:
    print(len(core.pushes), flush=True)
"""


class Hub:
    """Hub in its own process, at the same address after every kill."""

    def __init__(self, num_bytes):
        self.program = HUB.format(num_bytes=num_bytes)
        self.address = "127.0.0.1:0"
        self.start()

    def start(self):
        words = (sys.executable, "-c", self.program, self.address)
        here = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        port = self.process.stdout.readline().strip()
        assert port, "the hub did not start"
        self.address = f"127.0.0.1:{port}"

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def hub_process():
    hubs = []

    def made(num_bytes):
        hubs.append(Hub(num_bytes))
        return hubs[-1]

    yield made
    for hub in hubs:
        if hub.process.poll() is None:
            hub.kill()


def test_a_hub_killed_in_the_middle_of_a_pull_comes_back_and_the_pull_goes_on(connect, hub_process):
    hub = hub_process(16 * MIB)
    client = connect(hub.address, timeout_s=30.0)
    into = bytearray(16 * MIB)
    download = Download(hub_pb2.PullRequest(), memoryview(into))
    take, started_at = download.take, []

    def killing(answer, moved):
        started_at.append(download.received)
        if len(started_at) == 1:
            answer = _killing_after(answer, 8, hub)
        return take(answer, moved)

    download.take = killing
    client.fetch(download)
    assert into == noise(16 * MIB)
    assert started_at[0] == 0
    assert min(started_at[1:]) >= MIB  # the first six chunks have 16 KiB to 512 KiB


def _killing_after(answer, count, hub):
    for i, message in enumerate(answer):
        if i == count:
            hub.kill()
            threading.Thread(target=hub.start).start()
        yield message


def test_a_hub_killed_in_the_middle_of_a_push_comes_back_and_gets_all_of_it_once(connect, hub_process):
    hub = hub_process(0)
    client = connect(hub.address, timeout_s=30.0)
    data = _Killing(noise(24 * MIB), hub)
    assert client.push(hub_pb2.PushHead(unit=1, num_bytes=24 * MIB), data).accepted
    assert data.killed
    hub.process.stdin.write("\n")
    hub.process.stdin.flush()
    assert hub.process.stdout.readline() == "1\n"


class _Killing:
    """Bytes whose second half, the first time it is read, kills the hub."""

    def __init__(self, data, hub):
        self.data, self.nbytes, self.hub, self.killed = memoryview(data), len(data), hub, False

    def __getitem__(self, span):
        if span.start >= self.nbytes // 2 and not self.killed:
            self.killed = True
            self.hub.kill()
            threading.Thread(target=self.hub.start).start()
        return self.data[span]


def test_a_hub_that_is_stopped_is_noticed_long_before_the_deadline(hub_process, monkeypatch):
    """The hub's kernel still acknowledges what it is sent. Here the times are a fifth of the real ones."""
    times = dict(client_module._QUICK)
    assert times["grpc.keepalive_time_ms"] + times["grpc.http2.ping_timeout_ms"] <= 8_000
    monkeypatch.setattr(client_module, "_QUICK", tuple((name, ms // 5) for name, ms in times.items()))
    hub = hub_process(0)
    with channel(hub.address, None, quick=True) as line:
        heartbeat = line.unary_unary("/aedit.v1.Membership/Heartbeat")
        heartbeat(b"", timeout=10)
        hub.process.send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.RpcError) as failed:
            heartbeat(b"", timeout=60)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


# --- other people at the address


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the keys of two runs: this one with a node named `alpha`, and another one."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "ours", ["localhost"], ["alpha"])
    make_keys(folder / "theirs", ["localhost"], ["alpha"])
    return folder


@pytest.mark.parametrize(
    ("served", "certificates", "called", "told"),
    [
        ("", False, "ours/alpha", "it does not speak TLS: call it without keys"),
        ("ours/hub", False, "", "perhaps it speaks TLS and wants keys"),
        ("ours/hub", False, "theirs/alpha", "its certificate is not from our authority"),
        ("ours/hub", True, "without", "perhaps it wants a node certificate"),
    ],
)
def test_who_calls_with_the_wrong_keys_is_told_why(
    connect, start, folder, served, certificates, called, told
):
    keys = server_keys(folder / served, require_client_certificates=certificates) if served else None
    server = start(MemoryCore(), credentials=keys)
    ours = {
        "": lambda: None,
        "without": lambda: grpc.ssl_channel_credentials((folder / "ours/alpha/ca.crt").read_bytes()),
    }.get(called, lambda: client_keys(folder / called))()
    with pytest.raises((HubRefused, HubUnreachable), match=told) as failed:
        connect(server.address, timeout_s=0.5, keys=ours).hello(hub_pb2.HelloRequest())
    assert server.address in str(failed.value)


def test_the_right_keys_carry_arrays_too(connect, start, folder):
    core = MemoryCore([noise(3 * MIB)])
    server = start(core, credentials=server_keys(folder / "ours/hub", require_client_certificates=True))
    client = connect(server.address, keys=client_keys(folder / "ours/alpha"))
    into = bytearray(3 * MIB)
    client.pull(hub_pb2.PullRequest(), memoryview(into))
    client.push(hub_pb2.PushHead(num_bytes=3 * MIB), memoryview(into))
    assert core.pushes[0, 0] == into == core.anchors[0]


def test_small_calls_and_every_channel_have_a_connection_of_their_own(connect, start):
    server = start(MemoryCore([noise(10)]))
    client = connect(server.address, channels=2)
    for _ in range(2):
        client.pull(hub_pb2.PullRequest(), memoryview(bytearray(10)))
        client.heartbeat(hub_pb2.HeartbeatRequest())
    ours = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == server.port]
    assert len(ours) == 3


# --- a link that is cut again and again


def test_a_download_over_a_link_that_is_cut_every_250_kb_goes_on_after_each_cut(connect, start):
    core = MemoryCore([noise(2 * MIB)])
    into = bytearray(2 * MIB)
    with cutting(start(core).address) as (address, connections):
        connect(address).pull(hub_pb2.PullRequest(), memoryview(into))
    assert into == core.anchors[0]
    offsets = [offset for _, _, offset in core.calls]
    assert sorted(offsets) == offsets, "no try begins further back; a cut may come before the first chunk"
    assert len({*offsets}) >= 8
    assert 8 <= len(connections) < 30


@pytest.fixture
def offsets(monkeypatch):
    """Return the bytes from which on hubs are sent pushes, which grows."""
    begin, found = PartialPushes.begin, []
    monkeypatch.setattr(PartialPushes, "begin", lambda *call: found.append(call[2]) or begin(*call))
    return found


def test_a_push_over_a_link_that_is_cut_every_250_kb_goes_on_after_each_cut(connect, start, offsets):
    core, data = MemoryCore(), noise(2 * MIB)
    head = hub_pb2.PushHead(unit=1, seq=1, num_bytes=len(data))
    with cutting(start(core).address) as (address, connections):
        assert connect(address).push(head, memoryview(data)).accepted
    assert core.pushes == {(1, 1): data}
    assert core.calls == ["push"], "the core sees it once, and no violation"
    assert sorted(offsets) == offsets, "no try begins further back; a cut may come before the first chunk"
    assert len({*offsets}) >= 8
    assert 8 <= len(connections) < 60


def begin_and_break(server, head, data):
    """Send the first three chunks of 1000 bytes of a push, and end the call."""
    sent = list(frames.chunks(head.SerializeToString(), memoryview(data), chunk_bytes=1000))[:3]
    with channel(server.address, None) as line, pytest.raises(grpc.RpcError) as error:
        line.stream_unary("/aedit.v1.Exchange/Push")(map(frames.pack_chunk, sent), timeout=30)
    assert error.value.code() is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_push_that_an_earlier_call_has_begun_goes_on_unless_the_hub_was_restarted(
    connect, start, offsets, is_restarted
):
    core, data = MemoryCore(), noise(MIB)
    head = hub_pb2.PushHead(unit=1, seq=1, num_bytes=len(data))
    server = start(core)
    begin_and_break(server, head, data)
    if is_restarted:
        server = start(core)
    head.who.session = 7  # it has joined again meanwhile
    assert connect(server.address).push(head, memoryview(data), continues=True).accepted
    assert core.pushes == {(1, 1): data}
    assert offsets == [0, 0 if is_restarted else 3000]


def without_resume(monkeypatch):
    """Let hubs be of the version before `Resume`."""

    def services(*args, made=server_module.hub_services):
        return tuple(
            replace(each, handlers={k: v for k, v in each.handlers.items() if k != "Resume"})
            for each in made(*args)
        )

    monkeypatch.setattr(server_module, "hub_services", services)


def test_a_hub_of_an_older_version_gets_a_push_anew_and_the_cut_is_named_if_that_never_ends(
    connect, start, monkeypatch
):
    without_resume(monkeypatch)
    core = MemoryCore()
    with cutting(start(core).address) as (address, _):
        client = connect(address, timeout_s=1.0)
        for size in (150_000, 60_000, 150_000):  # two of them are more than one connection carries
            assert client.push(hub_pb2.PushHead(seq=size, num_bytes=size), memoryview(noise(size))).accepted
        with pytest.raises(HubUnreachable) as error:
            client.push(hub_pb2.PushHead(seq=9, num_bytes=MIB), memoryview(noise(MIB)))
    assert re.search(
        r"asked to push unit 0, after \d+ bytes: .*(connection was cut|[Dd]eadline)", str(error.value)
    )
    assert "TLS" not in str(error.value)


def test_a_hub_that_has_answered_before_and_hangs_up_is_not_asked_for_keys(connect, start):
    with cutting(start(MemoryCore()).address, cut_bytes=20_000) as (address, _):
        client = connect(address, timeout_s=0.5)
        client.hello(hub_pb2.HelloRequest())
        with pytest.raises(HubUnreachable) as error:
            client.hello(hub_pb2.HelloRequest(version="x" * 30_000))
    assert "it has ended, or the connection was cut" in str(error.value)
    assert "TLS" not in str(error.value)


def test_a_link_that_is_cut_too_often_is_named_with_the_bytes_and_not_tls(connect, start):
    with cutting(start(MemoryCore([noise(MIB)])).address, cut_bytes=40_000) as (address, _):
        client = connect(address, timeout_s=0.5)
        with pytest.raises(HubUnreachable) as error:
            client.pull(hub_pb2.PullRequest(), memoryview(bytearray(MIB)))
    assert re.search(r"asked to pull unit 0, after \d+ bytes: ", str(error.value))
    assert "TLS" not in str(error.value)


# --- parts of pushes at the hub


def head_of(node=1, unit=0, num_bytes=100, **fields):
    return hub_pb2.PushHead(who=hub_pb2.Who(node=node), unit=unit, num_bytes=num_bytes, **fields)


def begun(pushes, head, data, offset=0, keeps=True):
    """Bring bytes of a push in a call that ends early."""
    arrival = pushes.begin(head, offset, 10**6)
    arrival.add(frames.Chunk(offset, crc32(data), data))
    pushes.end(arrival, keeps=keeps)
    return arrival


@pytest.fixture
def pushes():
    """Return the parts of pushes in a budget of 250 bytes, with a clock that stands still."""
    return PartialPushes(ByteBudget(250), Clock())


def test_a_part_is_found_by_the_same_push_of_the_same_node_only(pushes):
    data = noise(40)
    begun(pushes, head_of(seq=3), data)
    there = pushes.find(head_of(seq=3))
    assert (there.num_bytes, there.sha256) == (40, hashlib.sha256(data).digest())
    for other in (
        head_of(node=2, seq=3),
        head_of(unit=1, seq=3),
        head_of(seq=4),
        head_of(seq=3, steps=1),
        head_of(seq=3, codec="bf16"),
        head_of(seq=3, num_bytes=99),
    ):
        assert pushes.find(other) == hub_pb2.PartialPush()
        with pytest.raises(frames.ArrayIncomplete, match="starts at byte 40"):
            pushes.begin(other, 40, 10**6)


def test_a_push_does_not_go_on_beyond_what_is_here(pushes):
    begun(pushes, head_of(), noise(40))
    with pytest.raises(frames.ArrayIncomplete, match="starts at byte 41"):
        pushes.begin(head_of(), 41, 10**6)


def test_a_sender_whose_data_differ_or_whose_hub_lies_starts_anew():
    data = memoryview(noise(100))
    right = hub_pb2.PartialPush(num_bytes=40, sha256=hashlib.sha256(data[:40]).digest())
    prefix = PrefixHash()
    assert prefix.resume_at(data, right) == 40
    assert prefix.resume_at(data, hub_pb2.PartialPush(num_bytes=50, sha256=right.sha256)) == 0
    assert prefix.resume_at(data, right) == 40, "a hub that has gone back is no liar"
    assert PrefixHash().resume_at(memoryview(noise(100, seed=1)), right) == 0
    assert (
        prefix.resume_at(data, hub_pb2.PartialPush(num_bytes=101, sha256=hashlib.sha256(data).digest())) == 0
    )


def test_a_call_that_hangs_adds_nothing_once_another_has_asked(pushes):
    hanging = pushes.begin(head_of(), 0, 10**6)
    data = noise(60)
    hanging.add(frames.Chunk(0, crc32(data[:20]), data[:20]))
    assert pushes.find(head_of()).num_bytes == 20
    with pytest.raises(frames.ArrayIncomplete, match="another call"):
        hanging.add(frames.Chunk(20, crc32(data[20:]), data[20:]))
    begun(pushes, head_of(), data[20:], offset=20)
    pushes.end(hanging, keeps=True)
    assert pushes.find(head_of()).sha256 == hashlib.sha256(data).digest()


def test_no_call_changes_data_that_the_core_has_checked(pushes):
    data = noise(100)
    first = pushes.begin(head_of(), 0, 10**6)
    first.add(frames.Chunk(0, crc32(data), data))
    assert pushes.find(head_of()).num_bytes == 100
    second = pushes.begin(head_of(), 50, 10**6)
    with pytest.raises(frames.ArrayIncomplete, match="another call"):
        pushes.complete(first)
    second.add(frames.Chunk(50, crc32(data[50:]), data[50:]))
    pushes.complete(second)
    with pytest.raises(frames.ArrayIncomplete, match="starts at byte 50"):
        pushes.begin(head_of(), 50, 10**6)
    for arrival in (first, second):
        pushes.end(arrival, keeps=True)
    assert pushes._budget.taken == 0


def test_what_is_no_push_or_complete_or_old_is_not_kept_and_its_bytes_are_given_back(pushes):
    begun(pushes, head_of(), noise(40), keeps=False)
    assert (pushes.find(head_of()).num_bytes, pushes._budget.taken) == (0, 0)
    arrival = pushes.begin(head_of(num_bytes=40), 0, 10**6)
    arrival.add(frames.Chunk(0, crc32(noise(40)), noise(40)))
    pushes.complete(arrival)
    assert pushes._budget.taken == 40, "the core still holds it"
    pushes.end(arrival, keeps=True)
    assert (pushes.find(head_of(num_bytes=40)).num_bytes, pushes._budget.taken) == (0, 0)
    begun(pushes, head_of(), noise(40))
    pushes._clock.now_s += KEPT_S - 1
    pushes.expire()
    assert pushes.find(head_of()).num_bytes == 40, "and asking for it begins its time anew"
    pushes._clock.now_s += KEPT_S
    pushes.expire()
    assert (pushes.find(head_of()).num_bytes, pushes._budget.taken) == (0, 0)


def test_parts_give_way_to_new_pushes_first_those_of_the_node_that_has_most(pushes):
    begun(pushes, head_of(node=1), noise(40))
    for unit in (0, 1):
        pushes._clock.now_s += 1
        begun(pushes, head_of(node=2, unit=unit, num_bytes=70), noise(40))
    assert pushes._budget.taken == 240
    kept = pushes.begin(head_of(node=3, num_bytes=70), 0, 10**6)
    found = [pushes.find(head_of(node=1)), *(pushes.find(head_of(2, u, 70)) for u in (0, 1))]
    assert [there.num_bytes for there in found] == [40, 0, 40]
    with pytest.raises(Refusal, match="at most 250 may be"):
        pushes.begin(head_of(node=4, num_bytes=200), 0, 10**6)
    assert pushes.find(head_of(node=1)).num_bytes == 40, "none is dropped where that makes no room"
    pushes.end(kept, keeps=True)


def test_many_pushes_of_one_unit_take_no_more_than_the_budget_though_only_one_is_kept(pushes):
    held = [pushes.begin(head_of(seq=seq), 0, 10**6) for seq in (1, 2)]
    with pytest.raises(Refusal):
        pushes.begin(head_of(seq=3), 0, 10**6)
    for arrival in held:
        pushes.end(arrival, keeps=True)
    assert pushes._budget.taken == 0, "nothing of them has arrived"


def test_a_hub_gives_back_what_nobody_continues_without_a_further_call(start, monkeypatch):
    monkeypatch.setattr("aedit.proto.rpc.service.KEPT_S", 0.05)
    monkeypatch.setattr("aedit.proto.rpc.transfer.KEPT_S", 0.0)
    made = []
    monkeypatch.setattr(
        "aedit.proto.rpc.service.PartialPushes",
        lambda budget: made.append(PartialPushes(budget)) or made[-1],
    )
    head = hub_pb2.PushHead(num_bytes=3000)
    first = next(frames.chunks(head.SerializeToString(), memoryview(noise(3000)), chunk_bytes=1000))
    with channel(start(MemoryCore()).address, None) as line, pytest.raises(grpc.RpcError) as error:
        line.stream_unary("/aedit.v1.Exchange/Push")(iter([frames.pack_chunk(first)]), timeout=30)
    assert error.value.code() is grpc.StatusCode.DATA_LOSS
    until(lambda: all(each._budget.taken == 0 and not each._kept for each in made), "the bytes")
