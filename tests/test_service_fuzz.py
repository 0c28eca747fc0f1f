"""Tests the services of rollout servers under attack: nobody is harmed, and memory does not grow.

Beside invalid messages there are 500 connections on which nothing is ever sent.
"""

import os
import random
import socket
import subprocess
import sys
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from kit.fuzz_servers import (
    DIRECTORY,
    GENERATE,
    OFFER,
    PUT,
    STATUS,
    VERSIONS,
    DirectoryFuzzer,
    ServerFuzzer,
    attack,
)
from kit.hub_processes import Client, HubProcess, ending, write_run
from kit.rollout_servers import Author, TrainerEnd, tiny_server
from kit.rollouts import decode_plainly, prompts_of, tiny_policy
from kit.servers import Announcer
from kit.waiting import until
from test_security import expired, tls_of, token_of, with_token

from aedit.launch.cli.keys import make_keys
from aedit.proto.rpc import DirectoryClient, Limits, channel, client_keys, server_keys
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.versions import VersionsClient

SLOW = [pytest.mark.slow, pytest.mark.timeout(1500)]
MORE = "[hub.limits]\ncalls_per_s = 1e9\nservers = 30\n"
SAID = {
    "OK",
    "ABORTED",
    "ALREADY_EXISTS",
    "DATA_LOSS",
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OUT_OF_RANGE",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
}
MIB = 2**20


@pytest.mark.parametrize("messages", [600, pytest.param(10_000, marks=SLOW)])
def test_a_hub_under_attack_lists_honest_servers_and_serves_its_versions(tmp_path, messages):
    hub = HubProcess(write_run(tmp_path, MORE), tmp_path / "hub")
    with ending(), channel(hub.address, None) as line:
        node, liar = Client(hub.address, "node").found(), Client(hub.address, "liar")
        other = Client(hub.address, "other")
        other.join()
        liar.join()
        good, versions = Announcer(hub.address, "good"), VersionsClient(hub.address)
        fuzzer, said, sizes = DirectoryFuzzer(random.Random(messages), liar.who), Counter(), []
        idle = [socket.create_connection(split(hub.address)) for _ in range(500)]
        for _ in range(20):
            assert not good.announce().banned
            said += attack(line, fuzzer, messages // 20)
            assert good.client.servers()[0].public_key == good.public_key
            assert until(lambda: versions.newest("run"), "a version").serial == 1
            assert node.heartbeat().nodes == 3
            sizes.append(resident_bytes(hub.process.pid))
        assert node.merged(0).verdict == pb.MERGED
        hub.kill()
        for one in idle:
            one.close()
    print(f"{messages} messages: {dict(said)}; MiB: {[round(size / MIB) for size in sizes]}")
    assert set(said) <= SAID, said
    assert said["OK"] > messages / 20, said
    assert "Traceback" not in hub.log.read_text()
    assert max(sizes[-3:]) < 1.05 * max(sizes[: len(sizes) // 3 + 1]) + 8 * MIB, sizes


def split(address):
    host, _, port = address.rpartition(":")
    return host, int(port)


def resident_bytes(pid):
    """Return the bytes of a process's own memory."""
    info = psutil.Process(pid).memory_info()
    return info.rss - info.shared


def test_without_the_token_no_service_of_a_server_or_hub_answers_anything_else(tmp_path):
    """Nor with a certificate that has expired, or one of another run."""
    keys, others = tmp_path / "keys", tmp_path / "others"
    for folder in (keys, others):
        make_keys(folder, ["127.0.0.1"], ["alpha"], servers={"spare": ["127.0.0.1"]})
    old = expired(keys, tmp_path / "old", "node")
    hub = HubProcess(write_run(tmp_path, "certificates = true"), tmp_path / "hub", f"--keys={keys / 'hub'}")
    mutual = server_keys(keys / "spare", require_client_certificates=True)
    wrong = {
        "no token": tls_of(keys, keys / "alpha"),
        "wrong token": with_token(tls_of(keys, keys / "alpha"), "w" * 43),
        "expired": with_token(tls_of(keys, old), token_of(keys)),
        "another run": with_token(tls_of(keys, others / "alpha"), token_of(keys)),
        "no certificate": with_token(tls_of(keys), token_of(keys)),
    }
    with ending(), tiny_server(keys=mutual) as server:
        for address, methods in ((hub.address, HUB_METHODS), (server.address, SERVER_METHODS)):
            for name, credentials in wrong.items():
                with grpc.secure_channel(address, credentials) as line:
                    wanted = "UNAUTHENTICATED" if "token" in name else "UNAVAILABLE"
                    assert [answer_to(line, method) for method in methods] == [wanted] * len(methods)
        good = client_keys(keys / "alpha")
        assert VersionsClient(server.address, good).newest("line") is None
        assert DirectoryClient([hub.address], "run", good).servers() == ()
        assert server.service.num_calls == 0


HUB_METHODS = (*DIRECTORY, *VERSIONS)
SERVER_METHODS = (*VERSIONS, OFFER, PUT, STATUS, GENERATE)


def answer_to(line, method):
    """Return the code with which an empty message is answered."""
    try:
        deque(line.stream_stream(f"/aedit.v1.{method}")(iter([b""]), timeout=60), maxlen=0)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


class Honest:
    """A trainer that goes on during the attack: every answer must be that of a plain engine."""

    def __init__(self, address):
        self.model, self.author, self.version = tiny_policy(5), Author("honest"), 0
        self.end = TrainerEnd(address, "honest")
        self.end.wait(lambda: self.end.opened, "Opened")
        self.address, self.ended = address, 0

    def batch(self):
        """Give the server new weights, and let it generate with them."""
        self.version += 1
        with torch.no_grad():
            next(self.model.parameters()).mul_(1.01)
        self.author.publish(self.model, self.version).give(self.address, self.version, self.end.secret)
        prompts = [
            replace(prompt, rollout=1000 * self.version + prompt.rollout)
            for prompt in prompts_of(4, max_new_tokens=6)
        ]
        for prompt in prompts:
            self.end.add(prompt, min_version=self.version)
        self.ended += len(prompts)
        self.end.ends(self.ended)
        for prompt, tokens in zip(prompts, decode_plainly(self.model, prompts), strict=True):
            assert self.end.samples[prompt.key].tokens == tokens
        self.end.samples.clear()
        self.ended = 0


@contextmanager
def attacked_server(log, own_process):
    """Yield the address of a server and the id of its process: its own one, or this one."""
    if not own_process:
        with tiny_server(wire_limits=Limits(calls_per_s=1e9)) as server:
            yield server.address, os.getpid()
        return
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kit.attacked_server"],
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        yield process.stdout.readline().strip(), process.pid
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(30)


@pytest.mark.parametrize("messages", [200, pytest.param(10_000, marks=SLOW)])
def test_a_server_under_attack_gives_an_honest_trainer_the_right_tokens(tmp_path, caplog, messages):
    """With many messages it is a process of its own, so that its memory can be measured."""
    log, own_process = tmp_path / "log", messages > 1000
    with attacked_server(log, own_process) as (address, pid), channel(address, None) as line:
        honest, liar = Honest(address), Author("line").publish(tiny_policy(3), 1)
        idle = [socket.create_connection(split(address)) for _ in range(500)]
        with TrainerEnd(address, "line") as opened:  # so that the liar's line is there
            opened.wait(lambda: opened.opened, "Opened")
            manifest = liar.store.manifest("line", 1).message
            fuzzer = ServerFuzzer(random.Random(messages), manifest, opened.secret)
            said, sizes, rounds = Counter(), [], min(20, messages // 40)
            for _ in range(rounds):
                said += attack(line, fuzzer, messages // rounds)
                honest.batch()
                sizes.append(resident_bytes(pid))
        honest.end.close()
        for one in idle:
            one.close()
    print(f"{messages} messages: {dict(said)}; MiB: {[round(size / MIB) for size in sizes]}")
    assert set(said) <= SAID, said
    assert said["OK"] > messages / 20, said
    assert "Traceback" not in (log.read_text() if own_process else caplog.text)
    if own_process:
        assert max(sizes[-3:]) < 1.05 * max(sizes[3:8]) + 8 * MIB, sizes
