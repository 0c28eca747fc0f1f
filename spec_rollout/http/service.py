"""State that all routes share: the engine's host, tokenizer, limits, figures and running requests.

Here are also the figures for Prometheus, and the reading of bodies (limited in size, time and in the memory
of all of them).

A `Feed` carries what becomes of a request's samples from the engine's thread to the event loop. It keeps the
newest state of each sample and no queue: however slowly a client reads, nothing grows but the samples.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect, Request

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.http.errors import ApiError, bad_request
from aedit.spec_rollout.http.server import HttpLimits
from aedit.spec_rollout.http.text_codec import TextCodec
from aedit.spec_rollout.sampling import Rollout
from aedit.spec_rollout.server import EngineHost

if TYPE_CHECKING:
    from aedit.spec_rollout.http.generation import Generation

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
BIG_BODY_BYTES = 1 << 18
"""Bodies above this size are parsed in another thread, so that the event loop goes on."""
LONG_CHARS = 4096
"""Texts above this size are encoded in another thread, so that the event loop goes on."""


class HttpMetrics:
    """Counters of requests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "aedit_http_requests", "Requests by route and status", ("route", "status"), registry=self.registry
        )
        self.cancelled = Counter(
            "aedit_http_cancelled", "Requests whose client went away or did not read", registry=self.registry
        )
        self.prompt_tokens = Counter("aedit_http_prompt_tokens", "Tokens of prompts", registry=self.registry)
        self.seconds = Histogram(
            "aedit_http_request_seconds", "Time of requests for text", ("route",),
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip

    def follow(self, status: Callable[[], dict[str, Any]]) -> None:
        """Add the figures of a host's `status`."""
        self.registry.register(_HostFigures(status))

    def text(self) -> bytes:
        """Return all figures in the text format of Prometheus."""
        return generate_latest(self.registry)


class _HostFigures(Collector):
    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the figures as they are now."""
        status = self._status()
        tokens = CounterMetricFamily("aedit_serve_tokens", "Tokens that were generated")
        tokens.add_metric([], status["tokens"])
        yield tokens
        over = CounterMetricFamily("aedit_serve_samples", "Samples that are over")
        over.add_metric([], status["over"])
        yield over
        for name, what in (
            ("samples", "Samples that wait or run"),
            ("waiting_run", "Waiting samples of training runs"),
            ("waiting_public", "Waiting samples of others"),
            ("tokens_per_s", "Tokens per second over the last 10 s"),
            ("paused", "1 while generation is paused"),
        ):
            yield GaugeMetricFamily(f"aedit_serve_{name}", what, float(status[name]))
        version = GaugeMetricFamily("aedit_serve_policy_version", "Policy version", labels=("line",))
        running = GaugeMetricFamily("aedit_serve_running", "Samples that are being decoded", labels=("line",))
        kv_bytes = GaugeMetricFamily("aedit_serve_kv_bytes", "Memory of keys and values", labels=("line",))
        for line, figures in status["lines"].items():
            version.add_metric([line], figures["version"])
            running.add_metric([line], figures["running"] + figures["finishing_samples"])
            kv_bytes.add_metric([line], figures["kv_bytes"])
        yield from (version, running, kv_bytes)


class Running:
    """The requests with an id. Used by the event loop only."""

    def __init__(self) -> None:
        self._by_id: dict[str, set[Generation]] = {}

    def add(self, request_id: str, request: "Generation") -> None:
        """Add a request; one without an id cannot be named, and is not kept."""
        if request_id:
            self._by_id.setdefault(request_id, set()).add(request)

    def remove(self, request_id: str, request: "Generation") -> None:
        """Remove a request. Idempotent."""
        requests = self._by_id.get(request_id, set())
        requests.discard(request)
        if not requests:
            self._by_id.pop(request_id, None)

    def abort(self, request_ids: Iterable[str]) -> int:
        """End the samples of all requests with these ids; return the number of requests."""
        found = [request for name in set(request_ids) for request in self._by_id.get(name, ())]
        for request in found:
            request.abort()
        return len(found)


class SampleFeed:
    """Newest state of one sample: `SampleReceiver` in the engine's thread, read in the event loop."""

    def __init__(self, feed: "Feed") -> None:
        self._feed = feed
        self.state: tuple[Rollout | None, int] = (None, 0)
        """The rollout, and how many of its tokens may be read."""
        self.is_over = False
        self.error: Exception | None = None

    def tokens(self, rollout: Rollout, start: int) -> None:
        """See `SampleReceiver`."""
        self.state = rollout, len(rollout.tokens)
        if self._feed.is_stream:
            self._feed.wake()

    def ended(self, rollout: Rollout) -> None:
        """See `SampleReceiver`."""
        self.state, self.is_over = (rollout, len(rollout.tokens)), True
        self._feed.wake()

    def failed(self, error: Exception) -> None:
        """See `SampleReceiver`."""
        self.error, self.is_over = error, True
        self._feed.wake()


class Feed:
    """The samples of one request."""

    def __init__(self, wake: "Callable[[Feed], None]", num_samples: int, *, is_stream: bool) -> None:
        """Make a feed; a stream is woken by tokens, others by the ends of samples only.

        wake: Sets `news` soon, from any thread.
        """
        self._wake, self.is_stream = wake, is_stream
        self.news = asyncio.Event()
        self.samples: Sequence[SampleFeed] = [SampleFeed(self) for _ in range(num_samples)]

    def wake(self) -> None:
        """Wake the reader of this feed. May be called from any thread."""
        self._wake(self)

    @property
    def is_over(self) -> bool:
        """Return true if all samples are over."""
        return all(sample.is_over for sample in self.samples)

    def check(self) -> None:
        """Raise the error of the first sample that has failed."""
        for sample in self.samples:
            if sample.error is not None:
                raise sample.error


@dataclass(slots=True, eq=False, kw_only=True)
class HttpService:
    """One policy, served over HTTP."""

    host: EngineHost
    line: str
    """Line of the host whose policy is served."""
    codec: TextCodec
    model: str
    """Name of the model for clients."""
    eos: tuple[int, ...]
    """Tokens that end an answer."""
    limits: HttpLimits = field(default_factory=HttpLimits)
    metrics: HttpMetrics = field(default_factory=HttpMetrics)
    created_s: int = field(default_factory=lambda: int(time.time()))
    num_buffered_bytes: int = 0
    """Bytes of bodies that are being read and parsed."""
    running: Running = field(default_factory=Running)
    _groups: "count[int]" = field(default_factory=lambda: count(1 << 62))
    _loop: asyncio.AbstractEventLoop | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _woken: set[Feed] = field(default_factory=set)
    """Feeds that are woken next."""

    @property
    def engine(self) -> Engine:
        """Return the engine, for its constants."""
        return self.host.engine(self.line)

    @property
    def max_tokens(self) -> int:
        """Return the upper limit of prompt and answer in tokens."""
        return self.engine.target.max_tokens

    def feed(self, num_samples: int, *, is_stream: bool) -> Feed:
        """Return a feed of the running event loop. All feeds that have news wake the loop with one call."""
        self._loop = asyncio.get_running_loop()
        return Feed(self._wake, num_samples, is_stream=is_stream)

    def _wake(self, feed: Feed) -> None:
        """Wake a feed soon. May be called from any thread."""
        with self._lock:
            is_first = not self._woken
            self._woken.add(feed)
        if is_first and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._wake_all)
            except RuntimeError:  # the loop is closed, and nothing waits
                self._woken.clear()

    def _wake_all(self) -> None:
        with self._lock:
            woken, self._woken = self._woken, set()
        for feed in woken:
            feed.news.set()

    def next_group(self) -> int:
        """Return a number for samples with one prompt."""
        return next(self._groups)


@asynccontextmanager
async def json_body(request: Request, service: HttpService, empty: Any = None) -> AsyncIterator[Any]:
    """Return a context with the JSON value of a request. Its bytes count as buffered inside the context.

    Args:
        request: The request.
        service: Limits and counters.
        empty: Value of an empty body; None: it must not be empty.

    Raises:
        ApiError: It is too large, too slow, or no JSON.
    """
    num_counted = 0
    try:
        try:
            async with asyncio.timeout(service.limits.body_s):
                parts = []
                async for part in _parts(request, service):
                    num_counted += len(part)
                    parts.append(part)
                body = b"".join(parts)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {service.limits.body_s:g} s") from None
        if not body and empty is not None:
            yield empty
        elif len(body) > BIG_BODY_BYTES:
            yield await asyncio.to_thread(parse_json, body)
        else:
            yield parse_json(body)
    finally:
        service.num_buffered_bytes -= num_counted


async def _parts(request: Request, service: HttpService) -> AsyncIterator[bytes]:
    """Yield the parts of a body, each counted as buffered."""
    limits, num_bytes = service.limits, 0
    declared = request.headers.get("content-length", "")
    too_large = f"the body exceeds {limits.max_body_bytes} bytes: send a smaller request"
    if declared.isdigit() and int(declared[:20]) > limits.max_body_bytes:
        raise ApiError(413, too_large)
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > limits.max_body_bytes:
                raise ApiError(413, too_large)
            if service.num_buffered_bytes + len(part) > limits.max_buffered_bytes:
                message = "the server is busy with other large requests: try again in 1 s"
                raise ApiError(429, message, code="overloaded", retry_after_s=1.0)
            service.num_buffered_bytes += len(part)
            yield part
    except ClientDisconnect:
        raise ApiError(400, "the client went away") from None


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ApiError: It is none.
    """
    try:
        return json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:128]
        raise bad_request(None, f"the body is not valid JSON: {reason}") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


async def encode(service: HttpService, text: str, *, special: bool) -> tuple[int, ...]:
    """Return the tokens of a text, without keeping the event loop for long."""
    if len(text) <= LONG_CHARS:
        return service.codec.encode(text, special=special)
    tokens: tuple[int, ...] = await in_thread(service.codec.encode, text, special=special)
    return tokens


async def in_thread(function: Any, *args: Any, **options: Any) -> Any:
    """Return the result of a function that takes long."""
    return await asyncio.to_thread(function, *args, **options)
