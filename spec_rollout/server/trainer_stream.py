"""One stream of a trainer: its samples in the host, and what is sent about them.

Three threads meet here. The reader handles the trainer's messages, the engine's thread reports tokens and
ends, and the sender takes what waits in the outbox. None of them waits for another one. What one sample gets
until the next message is sent is one message. Every field of a request is checked before it is used.

A worker process has one stream too, that of its rank: without an identity. It signs nothing and has no limits
of settings; its figures come before each end; they stop when its engine stops, so that its rank notices.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from aedit.proto.rpc import SigningKey
from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.audit import Origin, signature_of, statement_of, versions_of
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.sampling import (
    ROLLOUT_PROTOCOL,
    Prompt,
    Rollout,
    SampleKey,
    Sampling,
    TopLogprobs,
    decode_sampling,
)
from aedit.spec_rollout.server.host import EngineHost
from aedit.spec_rollout.server.tickets import HostTicket, Overloaded, Priority
from aedit.spec_rollout.server.trainer_lines import StreamLimits, TrainerLine
from aedit.traces import parsed

PART_TOKENS = 512
"""Most tokens of one message."""
RETRY_S = 1.0
MAX_STOPS = 256
"""Most stop tokens, and most stop strings, of a sample from a trainer: each one costs time at each token."""
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 64
GATHER_S = 0.02
"""Time over which tokens are gathered, so that a step costs no message of its own."""
TOKEN_BYTES = 32
ITEM_BYTES = 256
"""Memory that a token, and a message, are counted with."""


@dataclass(slots=True)
class TokenRun:
    """Tokens of one sample that follow each other."""

    key: SampleKey
    start: int
    """Place of the first one in the answer."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    passes: int = 0
    """Of the sample so far."""

    def parts(self, most: int) -> Iterator["TokenRun"]:
        """Yield runs of at most so many tokens."""
        for i in range(0, len(self.tokens), most):
            part = slice(i, i + most)
            lists = self.tokens[part], self.logprobs[part], self.versions[part], self.top_logprobs[part]
            yield TokenRun(self.key, self.start + i, *lists, self.passes)


Item = TokenRun | Callable[[], bytes]
"""Tokens to send, or a function that returns the message to send."""


class Outbox:
    """Queue with a limit in bytes. Adding never waits: beyond the limit the queue is full, and stays so."""

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_bytes, self._clock = limit_bytes, clock
        self._changed = threading.Condition()
        self._items: list[Item] = []
        self._open: dict[SampleKey, TokenRun] = {}
        self._num_bytes = 0
        self._is_urgent = self._is_closed = False
        self._taken_s = clock() - GATHER_S
        self.is_full = False
        """More had to wait than the limit allows. What came later was dropped."""

    def add(self, key: SampleKey, message: Callable[[], bytes]) -> None:
        """Add a message about a sample, after all that was added before; it is made when it is sent."""
        with self._changed:
            if self._has_room(ITEM_BYTES):
                self._open.pop(key, None)
                self._items.append(message)
                self._is_urgent = True
                self._changed.notify_all()

    def add_tokens(self, key: SampleKey, rollout: Rollout, start: int) -> None:
        """Add the tokens of a sample from `start` on, which are joined to those that wait."""
        new = slice(start, len(rollout.tokens))
        top = rollout.top_logprobs[new]
        num_bytes = (new.stop - start + sum(map(len, top))) * TOKEN_BYTES + ITEM_BYTES
        with self._changed:
            if not self._has_room(num_bytes):
                return
            run = self._open.get(key)
            if run is None:
                run = self._open[key] = TokenRun(key, start)
                self._items.append(run)
                if len(self._items) == 1:  # the sender waits for it; what joins it wakes nothing
                    self._changed.notify_all()
            run.tokens += rollout.tokens[new]
            run.logprobs += rollout.logprobs[new]
            run.versions += rollout.versions[new]
            run.top_logprobs += top
            run.passes = rollout.passes

    def take(self, timeout_s: float) -> Sequence[Item]:
        """Return what waits, after up to `timeout_s` seconds; empty if that is nothing, or it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_closed, timeout_s)
            left_s = self._taken_s + GATHER_S - self._clock()
            if left_s > 0:
                self._changed.wait_for(lambda: self._is_urgent or self._is_closed, min(left_s, GATHER_S))
            items, self._items = self._items, []
            self._open.clear()
            self._num_bytes, self._is_urgent, self._taken_s = 0, False, self._clock()
            return [] if self._is_closed else items

    def close(self) -> None:
        """Drop what waits and all that is added later; end a wait in `take`."""
        with self._changed:
            self._is_closed = True
            self._items = []
            self._open.clear()
            self._changed.notify_all()

    def _has_room(self, num_bytes: int) -> bool:
        if self._is_closed or self.is_full:
            return False
        self._num_bytes += num_bytes
        self.is_full = self._num_bytes > self._limit_bytes
        return not self.is_full


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """Names under which a server answers and signs."""

    run: str
    name: str
    key: SigningKey


@dataclass(slots=True, eq=False)
class StreamSample:
    """A sample and its place in its stream; a `SampleReceiver` of the host."""

    stream: "TrainerStream" = field(repr=False)
    key: SampleKey
    sampling: bytes
    """As the trainer has sent it: a part of the signed statement."""
    num_given: int
    """First tokens of the answer that came with the request."""
    min_version: int
    added_s: float
    ticket: HostTicket | None = None
    num_removals: int = 0
    """Requests to return it, which are answered when it has left the engine."""
    late: str = ""
    """Why it was given up before its first token."""

    def tokens(self, rollout: Rollout, start: int) -> None:
        """Queue new tokens."""
        self.stream.outbox.add_tokens(self.key, rollout, start)

    def ended(self, rollout: Rollout) -> None:
        """Pass on the end."""
        self.stream.take_end(self, rollout)

    def failed(self, error: Exception) -> None:
        """Pass on the failure."""
        self.stream.take_failure(self, error)


class TrainerStream:
    """State of one stream after its Open."""

    def __init__(
        self,
        identity: ServerIdentity | None,
        host: EngineHost,
        line: TrainerLine,
        limits: StreamLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the state. identity: None for the stream of a worker process."""
        self.line, self.identity = line, identity
        self._host, self._limits, self._clock = host, limits, clock
        self._most = line.engine.target.rows + limits.waiting
        self.outbox = Outbox(limits.unsent_bytes, clock)
        self._lock = threading.Lock()
        self._samples: dict[SampleKey, StreamSample] = {}
        self._is_closed = False
        self._figures_s, self._figures_step = clock() - limits.figures_s, -1
        self.is_ending = False
        """The server is about to leave: Figures say so."""
        self.handed_s: float | None = None
        """Since when a message has not been taken by the connection; None: none is under way."""

    @property
    def num_samples(self) -> int:
        """Return the number of samples that run or wait."""
        return len(self._samples)

    def opened(self) -> bytes:
        """Return the answer to Open."""
        target = self.line.engine.target
        message = pb.Opened(
            protocol=ROLLOUT_PROTOCOL,
            server=self.identity.name if self.identity else "",
            rows=target.rows,
            max_waiting=self._limits.waiting,
            max_tokens=target.max_tokens,
            public_key=self.identity.key.public if self.identity else b"",
        )
        return pb.ToTrainer(opened=message).SerializeToString()

    # --- the reader's thread

    def handle(self, message: pb.ToServer) -> None:
        """Do what the trainer asks for.

        Raises:
            ValueError: It is no message that a trainer sends.
        """
        kind = message.WhichOneof("message")
        if kind == "add":
            self._add(message.add)
        elif kind == "remove":
            self._remove((message.remove.rollout, message.remove.sample))
        elif kind != "beat":
            raise ValueError(f"a stream continues with add, remove or beat, got {kind or 'nothing'}")

    def _add(self, add: pb.Add) -> None:
        key = add.rollout, add.sample
        try:
            prompt = read_prompt(add, self.line.engine, is_limited=self.identity is not None)
        except ValueError as error:
            self._reject(key, str(error), final=True)
            return
        wanted = max(1, add.min_version)
        sample = StreamSample(self, key, add.sampling, len(add.tokens), wanted, self._clock())
        with self._lock:
            same, refusal = self._samples.get(key), ""
            if same is not None and not same.num_removals:
                refusal = f"sample {key[0]}/{key[1]}: another sample of this stream has these ids"
            elif len(self._samples) >= self._most:
                refusal = f"this stream has {len(self._samples)} samples, which is the limit"
            else:
                self._samples[key] = sample
        if refusal:
            self._reject(key, refusal, retry_after_s=RETRY_S)
            return
        try:
            sample.ticket = self._host.submit(
                self.line.name,
                prompt,
                sample,
                priority=Priority.RUN,
                min_version=wanted,
                trace=parsed(add.traceparent),
            )
        except (Overloaded, LookupError, RuntimeError) as error:
            with self._lock:
                self._leave(sample)
            retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else RETRY_S
            self._reject(key, str(error), retry_after_s=retry_after_s)
            return
        if self._is_closed:
            self._host.cancel(sample.ticket)

    def _remove(self, key: SampleKey) -> None:
        with self._lock:
            sample = self._samples.get(key)
            if sample is None:
                self._say_removed(key)
                return
            sample.num_removals += 1
        assert sample.ticket is not None
        self._host.cancel(sample.ticket)

    # --- the engine's thread

    def take_end(self, sample: StreamSample, rollout: Rollout) -> None:
        """Queue the end of a sample, or that it was removed."""
        is_aborted = rollout.finish_reason == "abort"
        with self._lock:  # so that the answer to a removal comes after the end
            self._leave(sample)
            if not is_aborted:
                if self.identity is None:
                    self.outbox.add(sample.key, self._figures)
                self.outbox.add(sample.key, lambda: self._ended(sample, rollout))
            elif sample.late or not sample.num_removals:
                reason = sample.late or "the sample was aborted at this server"
                self._reject(sample.key, reason, retry_after_s=RETRY_S)
            for i in range(sample.num_removals):
                self._say_removed(sample.key, found=is_aborted and not sample.late and i == 0)

    def take_failure(self, sample: StreamSample, error: Exception) -> None:
        """Queue the reason for which a sample has no end."""
        if self.identity is None and self._host.error is not None:
            return  # the process of this worker ends with this error
        with self._lock:
            self._leave(sample)
            self._reject(sample.key, str(error) or type(error).__name__, retry_after_s=RETRY_S)
            for _ in range(sample.num_removals):
                self._say_removed(sample.key)

    def _leave(self, sample: StreamSample) -> None:
        if self._samples.get(sample.key) is sample:
            del self._samples[sample.key]

    # --- the sender's thread

    def messages(self) -> Iterator[bytes]:
        """Yield what is to be sent, until the stream is closed. A pause here: the trainer does not read."""
        while not self._is_closed:
            for item in self.outbox.take(self._limits.figures_s):
                for message in self._encoded(item):
                    if self._is_closed:
                        return
                    self.handed_s = self._clock()
                    yield message
                    self.handed_s = None
            if self._clock() - self._figures_s >= self._limits.figures_s and not self._is_closed:
                step, before = self.line.engine.meters.num_steps, self._figures_step
                if self.identity is None and self._samples and step == before:
                    continue  # its engine is at the same step as before
                self._figures_s, self._figures_step = self._clock(), step
                self.handed_s = self._figures_s
                yield self._figures()
                self.handed_s = None

    def _encoded(self, item: Item) -> Iterator[bytes]:
        if not isinstance(item, TokenRun):
            yield item()
            return
        for part in item.parts(PART_TOKENS):
            versions = part.versions[:1] if len(set(part.versions)) == 1 else part.versions
            top = json.dumps(part.top_logprobs).encode() if any(part.top_logprobs) else b""
            tokens = pb.Tokens(
                rollout=part.key[0],
                sample=part.key[1],
                start=part.start,
                tokens=part.tokens,
                logprobs=part.logprobs,
                versions=versions,
                top_logprobs=top,
                passes=part.passes,
            )
            yield pb.ToTrainer(tokens=tokens).SerializeToString()

    def _ended(self, sample: StreamSample, rollout: Rollout) -> bytes:
        signature = b""
        if self.identity is not None:
            origin = Origin(self.identity.run, self.line.name, self.identity.name)
            statement = statement_of(origin, rollout, sample.sampling, given=sample.num_given)
            signature = signature_of(statement, self.identity.key)
        message = pb.Ended(
            rollout=sample.key[0],
            sample=sample.key[1],
            finish_reason=rollout.finish_reason,
            passes=rollout.passes,
            signature=signature,
        )
        return pb.ToTrainer(ended=message).SerializeToString()

    def _figures(self) -> bytes:
        speed = self.line.speed()
        times = {} if speed is None else asdict(speed)
        message = pb.Figures(
            version=self.line.engine.version,
            drafter=self.line.drafter_version(),
            **times,
            json=json.dumps(self.line.figures()).encode(),
            ending=self.is_ending,
        )
        return pb.ToTrainer(figures=message).SerializeToString()

    def _reject(
        self, key: SampleKey, reason: str, *, final: bool = False, retry_after_s: float = 0.0
    ) -> None:
        message = pb.Rejected(
            rollout=key[0], sample=key[1], reason=reason, final=final, retry_after_s=retry_after_s
        )
        data = pb.ToTrainer(rejected=message).SerializeToString()
        self.outbox.add(key, lambda: data)

    def _say_removed(self, key: SampleKey, *, found: bool = False) -> None:
        data = pb.ToTrainer(
            removed=pb.Removed(rollout=key[0], sample=key[1], found=found)
        ).SerializeToString()
        self.outbox.add(key, lambda: data)

    # --- the watching thread

    def expire(self) -> None:
        """Give up samples whose first policy version has not come in time."""
        now_s, version = self._clock(), self.line.engine.version
        with self._lock:
            late = [
                each
                for each in self._samples.values()
                if each.min_version > version and now_s - each.added_s > self._limits.version_s
            ]
            for sample in late:
                sample.late = (
                    f"version {sample.min_version} of the policy did not come within"
                    f" {self._limits.version_s:g} s; version {version} is here"
                )
        for sample in late:
            if sample.ticket is not None:
                self._host.cancel(sample.ticket)

    def close(self) -> None:
        """End the stream and cancel its samples. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            tickets = [each.ticket for each in self._samples.values() if each.ticket is not None]
            self._samples.clear()
        self.outbox.close()
        for ticket in tickets:
            self._host.cancel(ticket)


def read_prompt(add: pb.Add, engine: Engine, *, is_limited: bool = True) -> Prompt:
    """Return the sample that a trainer asks for. is_limited: the numbers of stops and alternatives are.

    Raises:
        ValueError: This engine, and every other one of the same model, cannot serve it.
    """
    num_tokens, most = len(add.prompt) + len(add.tokens), engine.target.max_tokens
    if num_tokens >= most:
        raise ValueError(f"{num_tokens} tokens are given, where {most} are the limit with the answer")
    prompt = Prompt(
        tokens=tuple(add.prompt),
        rollout=add.rollout,
        sample=add.sample,
        group=add.group,
        sampling=_sampling(add.sampling, is_limited=is_limited),
    )
    if add.tokens:
        prompt = replace(prompt, partial=_begun(add, prompt))
    engine.check(prompt)
    return prompt


def _sampling(text: bytes, *, is_limited: bool) -> Sampling:
    try:
        sampling = decode_sampling(text)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"sampling settings: {type(error).__name__}: {str(error)[:200]}") from None
    if not is_limited:
        return sampling
    if len(sampling.stop_tokens) > MAX_STOPS or len(sampling.stop_strings) > MAX_STOPS:
        raise ValueError(f"sampling settings: more than {MAX_STOPS} stop tokens or stop strings")
    if any(len(text) > MAX_STOP_CHARS for text in sampling.stop_strings if isinstance(text, str)):
        raise ValueError(f"sampling settings: a stop string is longer than {MAX_STOP_CHARS} characters")
    if sampling.top_logprobs > MAX_TOP_LOGPROBS:
        raise ValueError(f"sampling settings: top_logprobs is above {MAX_TOP_LOGPROBS}")
    return sampling


def _begun(add: pb.Add, prompt: Prompt) -> Rollout:
    """Return the first part of the answer, which another server or engine has generated."""
    versions = versions_of([(span.version, span.start, span.end) for span in add.spans])
    if not len(add.tokens) == len(add.logprobs) == len(versions):
        raise ValueError(
            f"{len(add.tokens)} tokens are given, with {len(add.logprobs)} log-probabilities and the versions"
            f" of {len(versions)}"
        )
    if not all(map(math.isfinite, add.logprobs)):
        raise ValueError("a given log-probability is not finite")
    top = [()] * len(add.tokens) if prompt.sampling.top_logprobs else []
    return Rollout(prompt, list(add.tokens), list(add.logprobs), versions, list(top))
