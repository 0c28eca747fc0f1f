"""A rollout server in this process on a free port, with tiny policies, and a trainer's end of its stream."""

import queue
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import torch

from aedit.proto.rpc import Server, SigningKey, author_metadata, new_secret
from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.proto.versions import VersionLayout, VersionsClient, VersionStore, patterns
from aedit.spec_rollout.audit.statement import spans_of
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.sampling import ROLLOUT_PROTOCOL, encode_sampling
from aedit.spec_rollout.server import (
    EngineHost,
    HostLimits,
    RolloutService,
    ServerIdentity,
    StreamLimits,
    TrainerLines,
)
from aedit.types import Layout, TensorLayout, UnitLayout
from kit.rollouts import tiny_policy

RUN = "run"
MAX_TOKENS = 128
WAIT_S = 60.0
BEAT_S = 0.5
PATIENCE_S = 6000.0


@dataclass
class PlainLineEngine:
    """Engine of a line without a learned drafter; `gate` is called before each step."""

    engine: Engine
    gate: object
    drafter_version: int = 0
    closed: bool = False

    def between_steps(self):
        self.gate()

    def close(self):
        self.closed = True


def layout_of(model):
    """Return the layout of the model's policy versions: one unit."""
    tensors = tuple(TensorLayout(name, tuple(p.shape)) for name, p in model.named_parameters())
    kinds = {torch.float64: "fp64", torch.float32: "fp32"}
    return VersionLayout(Layout((UnitLayout("rest", tensors),)), kinds[model.dtype])


def values_of(model, layout):
    """Return the bit patterns of the model's weights, as an author publishes them."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    return {"rest": patterns(flat, layout.dtype)}


def patient(**limits):
    """Return limits whose timeouts no busy machine reaches, with these changes."""
    timeouts = ("open_s", "silent_s", "stall_s", "version_s", "line_idle_s")
    return StreamLimits(**(dict.fromkeys(timeouts, PATIENCE_S) | limits))


class Clock:
    """Monotonic seconds, to which a test adds."""

    def __init__(self):
        self.added_s = 0.0

    def __call__(self):
        return time.monotonic() + self.added_s

    def pass_patience(self):
        """Let more time pass than the timeouts of `patient`."""
        self.added_s += PATIENCE_S + 1.0


class TinyServer:
    """Server of rollouts with the services Rollouts and Versions.

    `publish` gives a line its weights past the network; `Author` does it as a trainer does.
    Time passes by `clock` for its streams.
    """

    def __init__(
        self, name="server", *, rows=4, seed=9, limits=None, gate=lambda: None, keys=None, wire_limits=None
    ):
        self.name, self.rows, self.seed, self.gate = name, rows, seed, gate
        self.limits, self.clock = limits or patient(), Clock()
        self.made = {}
        self.host = EngineHost(HostLimits())
        self.identity = ServerIdentity(RUN, name, SigningKey())
        num_lines = self.limits.lines + 1
        layout = layout_of(tiny_policy(seed))
        more = {"ring": 2, "max_lines": num_lines, "clock": self.clock}
        self.lines = TrainerLines(self.host, self._make, layout, self.limits, **more)
        self.service = RolloutService(self.identity, self.host, self.lines, self.limits, clock=self.clock)
        services = [self.service.service(), self.lines.service(wire_limits)]
        self.server = Server(services, "127.0.0.1:0", keys=keys)
        self.address = self.server.address

    def _make(self, line):
        engine = Engine.of(tiny_policy(self.seed), rows=self.rows, max_tokens=MAX_TOKENS)
        self.made[line] = PlainLineEngine(engine, lambda: self.gate())
        return self.made[line]

    def publish(self, line, model, version):
        """Give a line the weights of `model` as policy version `version`."""
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.host.swap(line, lambda: weights, version).result(WAIT_S)

    def close(self):
        self.service.close()
        self.server.stop(0.0)
        self.host.close()


@contextmanager
def tiny_server(*args, **options):
    server = TinyServer(*args, **options)
    try:
        yield server
    finally:
        server.close()


class Author:
    """The author of a line, who gives its versions to servers."""

    def __init__(self, line="line"):
        self.line, self.store = line, VersionStore(layout_of(tiny_policy(0)))

    def publish(self, model, version):
        """Make a new version."""
        self.store.publish(self.line, version, values_of(model, self.store.layout))
        return self

    def give(self, address, version, secret):
        """Give a version to a server as the author with this secret."""
        client = VersionsClient(address)
        try:
            client.give(self.store, self.line, version, secret)
        finally:
            client.close()


@dataclass
class Received:
    """Everything that came about one sample."""

    tokens: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    versions: list = field(default_factory=list)
    top: list = field(default_factory=list)
    ended: pb.Ended | None = None
    order: list = field(default_factory=list)
    """Kinds of the messages in the order in which they came."""


class TrainerEnd:
    """The trainer's end of a stream: what was received, by key. Reads in a thread until `close`.

    beats: reports by itself that it lives, which a server demands of a trainer every few seconds.
    """

    def __init__(self, address, line="line", *, secret=None, reads=True, beats=False, **opening):
        self.secret = secret or new_secret()
        # Otherwise all ends of this process share one connection, and are cut off with it.
        self._channel = grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),))
        self._out = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.samples = defaultdict(Received)
        self.rejected, self.removed, self.figures, self.opened, self.error = [], [], [], None, None
        settings = {"protocol": ROLLOUT_PROTOCOL, "run": RUN, "line": line, "trainer": "trainer"} | opening
        self.send(open=pb.Open(**settings))
        start = self._channel.stream_stream(
            "/aedit.v1.Rollouts/Generate",
            request_serializer=pb.ToServer.SerializeToString,
            response_deserializer=pb.ToTrainer.FromString,
        )
        self.call = start(iter(self._out.get, None), metadata=author_metadata(self.secret))
        if reads:
            threading.Thread(target=self._read, daemon=True).start()
        self._closed = threading.Event()
        if beats:
            threading.Thread(target=self._beat, daemon=True).start()

    def send(self, **message):
        self._out.put(pb.ToServer(**message))

    def add(self, prompt, min_version=1, **more):
        """Request a sample of an `Engine`'s prompt. more: further fields of the request."""
        begun = prompt.partial
        if begun is not None:
            spans = [pb.Span(version=v, start=a, end=b) for v, a, b in spans_of(begun.versions)]
            more |= {"tokens": begun.tokens, "logprobs": begun.logprobs, "spans": spans}
        request = pb.Add(
            rollout=prompt.rollout,
            sample=prompt.sample,
            group=prompt.group,
            prompt=prompt.tokens,
            sampling=encode_sampling(prompt.sampling),
            min_version=min_version,
            **more,
        )
        self.send(add=request)

    def remove(self, key):
        self.send(remove=pb.Remove(rollout=key[0], sample=key[1]))

    def wait(self, ask, what, limit_s=WAIT_S):
        """Wait until `ask()` is true after a message, or the stream has ended."""
        with self.changed:
            assert self.changed.wait_for(lambda: ask() or self.error is not None, limit_s), f"no {what}"
            assert ask(), f"the stream ended before {what}: {self.error!r}"

    def ends(self, count):
        """Wait for so many ended samples."""
        self.wait(lambda: sum(each.ended is not None for each in self.samples.values()) >= count, "ends")

    def end(self):
        """Wait until the server has ended the stream, and return code and text."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.error is not None, WAIT_S), "the stream has not ended"
        return None if isinstance(self.error, EOFError) else (self.error.code(), self.error.details())

    def end_quietly(self):
        """End the stream from this side, as a trainer that leaves."""
        self._out.put(None)
        self.end()

    def close(self):
        self._closed.set()
        self._out.put(None)
        self.call.cancel()
        self._channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _beat(self):
        while not self._closed.wait(BEAT_S):
            self.send(beat=pb.Beat())

    def _read(self):
        try:
            for message in self.call:
                self._take(message)
            error = EOFError("ended")
        except grpc.RpcError as raised:
            error = raised
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def _take(self, message):
        kind = message.WhichOneof("message")
        found = getattr(message, kind)
        with self.changed:
            if kind in ("opened",):
                self.opened = found
            elif kind == "figures":
                self.figures.append(found)
            else:
                sample = self.samples[found.rollout, found.sample]
                sample.order.append(kind)
                getattr(self, f"_{kind}")(sample, found)
            self.changed.notify_all()

    def _tokens(self, sample, found):
        versions = list(found.versions)
        sample.tokens += found.tokens
        sample.logprobs += found.logprobs
        sample.versions += versions * len(found.tokens) if len(versions) == 1 else versions
        sample.top.append(found.top_logprobs)

    def _ended(self, sample, found):
        sample.ended = found

    def _removed(self, sample, found):
        self.removed.append(found)

    def _rejected(self, sample, found):
        self.rejected.append(found)
