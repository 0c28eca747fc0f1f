"""Rollout server without a model, in this process: draws tokens made of keys, as `fake_worker`, and may lie.

Its versions are real ones: `Versions` keeps what trainers give it. `lie` names what it does wrong, once, at
the first sample that has `LIE_AT` tokens. Other attributes make it slow or silent in parts: `opens` (answers
the opening of a stream), `deaf` (answers no request to return a sample, and goes on with it), `token_s`
(least time between two tokens), `favours` (draws for its oldest sample only), `ends` (says that a sample has
ended; else it dies instead). It says all the time that it
lives.
"""

import hashlib
import json
import queue
import threading
import time
from contextlib import contextmanager

import grpc
import numpy as np

from aedit.proto.rpc import FairPool, Server, Service, SigningKey, secret_of
from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.proto.versions import VersionLayout, VersionsCore, VersionStore, versions_service
from aedit.spec_rollout.audit.statement import PURPOSE
from aedit.spec_rollout.sampling import ROLLOUT_PROTOCOL
from kit.fake_worker import token

LIE_AT = 5
LOGPROB = -0.25
"""Of each token of a server; those of the fake worker have -0.5."""
LIES = {
    "a token outside the vocabulary": "with a vocabulary of 48",
    "a gap": "is next",
    "a repetition": "is next",
    "nan": "a log-probability of nan",
    "a positive log-probability": "a log-probability of 0.5",
    "fewer log-probabilities": "log-probabilities",
    "an older version": "below, version",
    "a version that was not offered": "which it was not given",
    "an unknown key": "which it does not have",
    "a stop without a stop token": "and there is none",
    "an early end": "an end by length after 5 tokens",
    "an unknown reason": "an end for the reason 'bored'",
    "a token after the end": "which it does not have",
    "too many tokens": "tokens of at most",
    "a signature of other tokens": "a signature that does not fit",
    "a return that nobody asked for": "a wrong answer to the request to return",
    "most likely tokens": "that were not asked for",
    "garbage": "a message that cannot be read",
    "opened again": "a message of kind opened",
}


class FakeServer:
    """Serves on a free port from its creation. `pace_s`: time per token of all samples."""

    def __init__(self, layout, name="fake", *, run="", lie="", rows=4, pace_s=0.002, port=0, key=None):
        self.name, self.run, self.lie, self.rows, self.pace_s = name, run, lie, rows, pace_s
        self.key = key or SigningKey()
        self.store = VersionStore(VersionLayout(layout, "fp64"), ring=4)
        self.secrets, self.streams, self.added, self.told = {}, [], [], 0
        self.silent, self.stalled, self.rejects, self.ending = False, False, False, False
        self.opens, self.deaf, self.favours, self.token_s = True, False, False, 0.0
        self.drawn, self.ends = 0, True
        core = VersionsCore(self.store, lambda line, caller: self.secrets.get(line) == caller.secret)
        pool = FairPool(8, "fake")
        generate = lambda messages, context: _Stream(self, messages, context).run()  # noqa: E731
        generate.experimental_thread_pool = pool
        handlers = {"Generate": grpc.stream_stream_rpc_method_handler(generate)}
        services = [Service("aedit.v1.Rollouts", handlers, (pool,)), versions_service(core)]
        self.server = Server(services, f"127.0.0.1:{port}")
        self.address = self.server.address

    def close(self):
        """End as a killed process does: without a word."""
        for stream in self.streams:
            stream.over = True
            stream.context.cancel()
        self.server.stop(0.0)


class _Stream:
    def __init__(self, server, messages, context):
        self.server, self.messages, self.context = server, messages, context
        self.samples, self.inbox, self.over = {}, queue.SimpleQueue(), False
        self.token_at_s = 0.0
        server.streams.append(self)

    def run(self):
        server, opened = self.server, pb.ToServer.FromString(next(self.messages)).open
        self.line = opened.line
        server.secrets[self.line] = secret_of(self.context.invocation_metadata())
        server.store.open(self.line)
        threading.Thread(target=self._read, daemon=True).start()
        facts = pb.Opened(
            protocol=ROLLOUT_PROTOCOL,
            server=server.name,
            rows=server.rows,
            max_waiting=8,
            public_key=server.key.public,
        )
        while not server.opens and not self.over:
            time.sleep(0.01)
        yield _out(opened=facts)
        told_s = 0.0
        while not self.over:
            if server.silent:
                time.sleep(0.01)
                continue
            yield from self._answers()
            if time.monotonic() - told_s > 0.2:
                told_s = time.monotonic()
                yield _out(figures=pb.Figures(version=self.version, ending=server.ending))
            yield from self._step()
            time.sleep(server.pace_s)

    @property
    def version(self):
        newest = self.server.store.newest(self.line)
        return 0 if newest is None else newest.serial

    def _read(self):
        try:
            for message in self.messages:
                self.inbox.put(pb.ToServer.FromString(message))
        except Exception:
            pass
        self.over = True

    def _answers(self):
        while True:
            try:
                message = self.inbox.get_nowait()
            except queue.Empty:
                return
            if message.HasField("add"):
                add = message.add
                self.server.added.append(add)
                if self.server.rejects:
                    yield _out(rejected=pb.Rejected(rollout=add.rollout, sample=add.sample, reason="full"))
                    continue
                self.samples[add.rollout, add.sample] = _Sample(add)
            elif message.HasField("remove") and not self.server.deaf:
                key = message.remove.rollout, message.remove.sample
                found = self.samples.pop(key, None) is not None
                yield _out(removed=pb.Removed(rollout=key[0], sample=key[1], found=found))

    def _step(self):
        if self.server.stalled or time.monotonic() - self.token_at_s < self.server.token_s:
            return
        ready = [each for each in self.samples.values() if each.add.min_version <= self.version]
        for sample in ready[: 1 if self.server.favours else self.server.rows]:
            self.token_at_s = time.monotonic()
            if self.server.lie and len(sample.tokens) >= LIE_AT:
                lie, self.server.lie = self.server.lie, ""
                yield from self._lie(sample, lie)
                continue
            yield self._token(sample)
            if len(sample.tokens) == sample.most and not self.server.ends:
                self.over = True
                return
            if len(sample.tokens) == sample.most:
                yield self._end(sample)

    def _token(self, sample, **changes):
        add, place = sample.add, len(sample.tokens)
        drawn = token(add.rollout, add.sample, place)
        sample.tokens.append(drawn)
        sample.versions.append(self.version)
        self.server.drawn += 1
        fields = {"rollout": add.rollout, "sample": add.sample, "start": place, "tokens": [drawn]}
        fields |= {"logprobs": [LOGPROB], "versions": [self.version]}
        return _out(tokens=pb.Tokens(**fields | changes))

    def _end(self, sample, **changes):
        add = sample.add
        self.samples.pop((add.rollout, add.sample), None)
        reason = changes.pop("finish_reason", "length")
        signed = self._statement(sample, reason).SerializeToString(deterministic=True)
        signature = changes.pop("signature", None) or self.server.key._key.sign(PURPOSE + signed)
        ended = pb.Ended(
            rollout=add.rollout, sample=add.sample, finish_reason=reason, passes=4, signature=signature
        )
        return _out(ended=ended)

    def _statement(self, sample, reason):
        """Build the statement anew, after the words of rollouts.proto."""
        add = sample.add
        spans = []
        for i, version in enumerate(sample.versions):
            if not spans or spans[-1].version != version:
                spans.append(pb.Span(version=version, start=i))
            spans[-1].end = i + 1
        return pb.RolloutStatement(
            run=self.server.run,
            line=self.line,
            server=self.server.name,
            rollout=add.rollout,
            sample=add.sample,
            prompt_sha256=_sha(add.prompt, "<u4"),
            sampling_sha256=hashlib.sha256(add.sampling).digest(),
            answer_sha256=_sha(sample.tokens, "<u4"),
            logprobs_sha256=_sha([*add.logprobs, *[LOGPROB] * (len(sample.tokens) - len(add.tokens))], "<f4"),
            spans=spans,
            finish_reason=reason,
            given=len(add.tokens),
        )

    def _lie(self, sample, lie):
        place, version = len(sample.tokens), self.version
        tokens = {
            "a token outside the vocabulary": {"tokens": [48]},
            "a gap": {"start": place + 1},
            "a repetition": {"start": place - 1},
            "nan": {"logprobs": [float("nan")]},
            "a positive log-probability": {"logprobs": [0.5]},
            "fewer log-probabilities": {"logprobs": []},
            "an older version": {"versions": [version - 1]},
            "a version that was not offered": {"versions": [version + 1]},
            "an unknown key": {"rollout": 77},
            "most likely tokens": {"top_logprobs": b"[[]]"},
        }
        ends = {
            "a stop without a stop token": {"finish_reason": "stop"},
            "an early end": {"finish_reason": "length"},
            "an unknown reason": {"finish_reason": "bored"},
        }
        if lie in tokens:
            yield self._token(sample, **tokens[lie])
        elif lie in ends:
            yield self._end(sample, **ends[lie])
        elif lie == "too many tokens":
            extra = sample.most
            yield self._token(sample, tokens=[1] * extra, logprobs=[-1.0] * extra)
        elif lie == "garbage":
            yield b"\xff\xff\xff"
        elif lie == "opened again":
            yield _out(opened=pb.Opened(protocol=ROLLOUT_PROTOCOL))
        elif lie == "a return that nobody asked for":
            yield _out(removed=pb.Removed(rollout=sample.add.rollout, sample=sample.add.sample, found=True))
        else:
            while len(sample.tokens) < sample.most:
                yield self._token(sample)
            other = b"x" * 64 if lie == "a signature of other tokens" else None
            yield self._end(sample, signature=other)
            if lie == "a token after the end":
                yield self._token(sample)


class _Sample:
    def __init__(self, add):
        self.add, self.tokens = add, list(add.tokens)
        self.versions = [span.version for span in add.spans for _ in range(span.start, span.end)]
        self.most = json.loads(add.sampling)["max_new_tokens"]


def _sha(values, dtype):
    return hashlib.sha256(np.asarray(list(values), dtype).tobytes()).digest()


def _out(**message):
    return pb.ToTrainer(**message).SerializeToString()


@contextmanager
def fake_servers(layout, *names, **settings):
    servers = [FakeServer(layout, name, **settings) for name in names]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()
