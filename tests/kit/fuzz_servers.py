"""Invalid messages to the services of rollout servers.

Directory and Versions of a hub, Rollouts and Versions of a server.
"""

import json
import zlib
from collections import Counter, deque

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aedit.proto.rpc import author_metadata, directory_pb2, rollouts_pb2, versions_pb2
from aedit.proto.rpc.directory import card_statement
from aedit.spec_rollout.sampling import ROLLOUT_PROTOCOL
from kit.fuzz import Wild

CALL_S = 60.0
UNDER_WAY = 16
DIRECTORY = {
    "Directory/Announce": directory_pb2.ServerCard,
    "Directory/Withdraw": directory_pb2.WithdrawRequest,
    "Directory/Servers": directory_pb2.ServersRequest,
    "Directory/Accuse": directory_pb2.Accusation,
}
VERSIONS = {"Versions/Newest": versions_pb2.NewestRequest, "Versions/Get": versions_pb2.GetRequest}
OFFER, PUT = "Versions/Offer", "Versions/Put"
STATUS, GENERATE = "Rollouts/ServerStatus", "Rollouts/Generate"
SETTINGS = (0, 1, -1, 2**31, 2**70, 0.5, -0.0, 1e308, None, True, "", "x", "\0", [], [1], [[]], {}, {"a": 1})


class DirectoryFuzzer(Wild):
    """Cards, withdrawals and accusations; most of them are valid but for one field."""

    def __init__(self, rng, who):
        super().__init__(rng)
        self.who, self.key = who, Ed25519PrivateKey.generate()
        self.methods = (*DIRECTORY, "Directory/Announce", "Directory/Accuse", *VERSIONS)

    def call(self):
        """Return a method, messages and metadata."""
        method = self.rng.choice(self.methods)
        message = (
            self._near(method) if self.rng.random() < 0.7 else self.wild({**DIRECTORY, **VERSIONS}[method])
        )
        if method == "Versions/Newest":
            message.wait_s = 0.0
        return method, [self.spoilt(message.SerializeToString(), 0.1)], ()

    def _near(self, method):
        name = f"liar-{self.rng.randrange(40)}"
        if method == "Directory/Announce":
            return self._card(name)
        if method == "Directory/Accuse":
            evidence = self.rng.choice([b"{}", b"[", b'{"a": 1}', b'{"a": ' * 300, b"\xff", b'{"a": NaN}'])
            message = directory_pb2.Accusation(run="run", server=name, reason="margin", evidence=evidence)
            message.node, message.session = self.who.node, self.who.session
            message.public_key = self.key.public_key().public_bytes_raw()
        elif method == "Directory/Withdraw":
            message = directory_pb2.WithdrawRequest(
                run="run", name=self.rng.choice([name, "good"]), process=5
            )
        elif method == "Directory/Servers":
            return directory_pb2.ServersRequest(run="run")
        elif method == "Versions/Newest":
            message = versions_pb2.NewestRequest(line="run")
        else:
            message = versions_pb2.GetRequest(line="run", serial=1, unit=self.rng.choice(["unit0", "unit1"]))
        self.one_wild_field(message)
        return message

    def _card(self, name):
        card = directory_pb2.ServerCard(run="run", name=self.rng.choice([name, name, "good"]))
        card.address, card.process, card.state = "10.0.0.9:7001", 5, "serving"
        key = self.rng.choice([self.key, Ed25519PrivateKey.generate()])
        card.public_key = key.public_key().public_bytes_raw()
        for _ in range(self.rng.choice([0, 1, 1, 2])):
            self.one_wild_field(card)
        if self.rng.random() < 0.8:
            card.signature = key.sign(card_statement(card))
        return card


class ServerFuzzer(Wild):
    """Streams of trainers, and versions from authors."""

    def __init__(self, rng, manifest, secret):
        super().__init__(rng)
        self.manifest, self.secret, self.serial = manifest, secret, 1
        self.lines = ("line", "good", "other", "run")

    def call(self):
        """Return a method, messages and metadata."""
        method = self.rng.choice([*VERSIONS, OFFER, PUT, STATUS, *[GENERATE] * 5])
        messages = {GENERATE: self._stream, PUT: self._put}.get(method, lambda: [self._small(method)])()
        secret = self.rng.choice([self.secret, self.secret, self.secret, "", "x" * 64])
        chance = 0.02 if method == GENERATE else 0.1
        return (
            method,
            [self.spoilt(one, chance) for one in messages],
            author_metadata(secret) if secret else (),
        )

    def _small(self, method):
        kinds = {**VERSIONS, OFFER: versions_pb2.OfferRequest, STATUS: rollouts_pb2.ServerStatusRequest}
        if method == OFFER and self.rng.random() < 0.8:
            message = versions_pb2.OfferRequest(manifest=self._manifest())
        elif method in VERSIONS and self.rng.random() < 0.7:
            message = kinds[method](line=self.rng.choice(self.lines))
            self.one_wild_field(message)
        else:
            message = self.wild(kinds[method])
        if method == "Versions/Newest":
            message.wait_s = 0.0
        return message.SerializeToString()

    def _manifest(self):
        self.serial += 1
        manifest = versions_pb2.Manifest()
        manifest.CopyFrom(self.manifest)
        manifest.line, manifest.serial, manifest.parent = "line", self.serial, self.serial - 1
        for _ in range(self.rng.choice([0, 1, 1])):
            self.one_wild_field(self.rng.choice([manifest, manifest.units[0]]))
        return manifest

    def _put(self):
        unit = self.manifest.units[0]
        head = versions_pb2.TransferHead(line="line", serial=self.serial, unit=unit.name, encoding="aedit-1")
        data = self.rng.randbytes(self.rng.choice([0, 1, 100, 5000]))
        head.num_bytes, head.sha256 = len(data), self.rng.randbytes(32)
        for _ in range(self.rng.choice([0, 1, 1])):
            self.one_wild_field(head)
        first = head.SerializeToString()
        chunk = versions_pb2.VersionChunk(data=data, head=first, crc=zlib.crc32(first, zlib.crc32(data)))
        for _ in range(self.rng.choice([0, 0, 1])):
            self.one_wild_field(chunk)
        return [chunk.SerializeToString()] * self.rng.choice([1, 1, 1, 2])

    def _stream(self):
        opening = rollouts_pb2.Open(
            protocol=ROLLOUT_PROTOCOL, run="run", line=self.rng.choice(self.lines), trainer="t"
        )
        if self.rng.random() < 0.3:
            self.one_wild_field(opening)
        messages = [rollouts_pb2.ToServer(open=opening)]
        if self.rng.random() < 0.1:
            messages = []
        messages += [self._to_server() for _ in range(self.rng.choice([0, 1, 3, 8]))]
        return [one.SerializeToString() for one in messages]

    def _to_server(self):
        if self.rng.random() < 0.3:
            return self.wild(rollouts_pb2.ToServer)
        if self.rng.random() < 0.2:
            return rollouts_pb2.ToServer(remove=rollouts_pb2.Remove(rollout=self.rng.randrange(4), sample=0))
        add = rollouts_pb2.Add(rollout=self.rng.randrange(4), prompt=[1, 2, 3], min_version=1)
        add.sampling = json.dumps(self._sampling()).encode()
        for _ in range(self.rng.choice([0, 1, 1])):
            self.one_wild_field(add)
        return rollouts_pb2.ToServer(add=add)

    def _sampling(self):
        settings = {"max_new_tokens": 4, "temperature": 1.0, "seed": 3}
        names = (
            *settings,
            "top_k",
            "top_p",
            "min_p",
            "stop_tokens",
            "stop_strings",
            "top_logprobs",
            "nobody",
        )
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            settings[self.rng.choice(names)] = self.rng.choice(SETTINGS)
        return settings


def attack(line, fuzzer, count):
    """Send `count` calls, some at a time, and return how often each answer came."""
    said, under_way = Counter(), deque()
    for _ in range(count):
        under_way.append(_start(line, *fuzzer.call()))
        if len(under_way) >= UNDER_WAY:
            said[_end(*under_way.popleft())] += 1
    said.update(_end(*call) for call in under_way)
    return said


def _start(line, method, messages, metadata):
    path, rest = f"/aedit.v1.{method}", {"timeout": CALL_S, "metadata": metadata}
    if method == GENERATE:
        return True, line.stream_stream(path)(iter(messages), **rest)
    if method == PUT:
        return False, line.stream_unary(path).future(iter(messages), **rest)
    if method == "Versions/Get":
        return True, line.unary_stream(path)(messages[0], **rest)
    return False, line.unary_unary(path).future(messages[0], **rest)


def _end(streams, call):
    try:
        if streams:
            deque(call, maxlen=0)
        else:
            call.result()
        return "OK"
    except grpc.RpcError as error:
        if error.code().name in ("INTERNAL", "UNKNOWN"):
            return f"{error.code().name}: {error.details()}"
        return error.code().name
