"""OpenTelemetry traces of pushes and rollouts: one tree of spans over all processes. Off by default.

`begin` turns them on in this process and imports OpenTelemetry; without it a span costs one comparison. Spans
are exported by a thread of their own: an endpoint that does not answer costs spans, which are counted, and no
time.

The context of a span goes to another process as W3C trace context, `traceparent`: in the metadata of a gRPC
call, in a field of a message of a stream, and as integers in shared memory. A value from a peer is used only
if it has exactly that form; it decides nothing but where a span stands in a trace.
"""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aedit.types import UserError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span as Recorded

log = logging.getLogger(__name__)

KEY = "traceparent"
"""Name of the metadata of a gRPC call."""
MOST_CONTEXTS = 64
"""Contexts of one message of a peer that are used; also the most links of a span."""
EXPORT_S = 1.0
"""Interval of exports."""
LIMIT_S = 5.0
"""Longest time of one export, and of `end_traces`."""
MOST_WAITING = 2048
"""Ended spans that wait for their export; further ones are dropped."""
_BATCH = 512
_WARN_S = 60.0
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_LENGTH = 55
_BITS = 64
Fact = str | int | float | bool


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of any process: what a span of another process names as its parent."""

    trace: int
    """128 bits, not 0."""
    span: int
    """64 bits, not 0."""

    def __str__(self) -> str:
        """Return the value of `traceparent`."""
        return f"00-{self.trace:032x}-{self.span:016x}-01"

    @property
    def words(self) -> tuple[int, int, int]:
        """Return the context as three signed integers of 64 bits; see `of_words`."""
        parts = self.trace >> _BITS, self.trace & (1 << _BITS) - 1, self.span
        high, low, span = (part - (1 << _BITS) if part >> (_BITS - 1) else part for part in parts)
        return high, low, span


NO_WORDS = (0, 0, 0)
"""`TraceContext.words` without a span."""


def of_words(words: Sequence[int]) -> TraceContext | None:
    """Return the context with these `words`; None for `NO_WORDS`."""
    high, low, span = (word % (1 << _BITS) for word in words)
    trace = high << _BITS | low
    return TraceContext(trace, span) if trace and span else None


def parsed(text: object) -> TraceContext | None:
    """Return the context of a sampled span that a `traceparent` of version 00 names; None for anything else.

    None also without traces in this process.
    """
    context, is_sampled = _read(text) if _tracing is not None else (None, False)
    return context if is_sampled else None


def _read(text: object) -> tuple[TraceContext | None, bool]:
    """Return the span that a `traceparent` names, None if it has another form, and whether it is sampled."""
    if not isinstance(text, str) or len(text) != _LENGTH or not (found := _FORM.fullmatch(text)):
        return None, False
    trace, span = int(found[1], 16), int(found[2], 16)
    context = TraceContext(trace, span) if trace and span else None
    return context, context is not None and bool(int(found[3], 16) & 1)


def received(metadata: Sequence[tuple[str, object]]) -> TraceContext | None:
    """Return the context in the metadata of a call; None unless exactly one is there, valid and sampled."""
    return None if _tracing is None else parsed(_only_value(metadata))


def _only_value(metadata: Iterable[tuple[str, object]]) -> object:
    """Return the value of `KEY`; None unless there is exactly one."""
    values = [value for key, value in metadata if key == KEY]
    return values[0] if len(values) == 1 else None


def sent() -> tuple[tuple[str, str], ...]:
    """Return the metadata with which a call carries the context of the block; none outside of a span."""
    context = current().context
    return () if context is None else ((KEY, str(context)),)


class TraceSpan:
    """A span that has begun. One that is not recorded has no context, and all calls do nothing."""

    __slots__ = ("_recorded", "context")

    def __init__(self, recorded: "Recorded | None" = None) -> None:
        self._recorded = recorded
        self.context: TraceContext | None = None
        if recorded is not None:
            made = recorded.get_span_context()
            self.context = TraceContext(made.trace_id, made.span_id)

    def note(self, **facts: Fact) -> None:
        """Add attributes."""
        if self._recorded is not None:
            for name, value in facts.items():
                self._recorded.set_attribute(f"aedit.{name}", value)

    def end(self, **facts: Fact) -> None:
        """End the span now, with these further attributes. Later calls do nothing."""
        recorded, tracing = self._recorded, _tracing
        if recorded is not None:
            self.note(**facts)
            self._recorded = None
            if tracing is not None:
                tracing.end(recorded)


OFF = TraceSpan()
"""The span of what is not traced."""
_NOT_TRACED = nullcontext(OFF)
_current: ContextVar[TraceSpan] = ContextVar("span", default=OFF)
_tracing: "_Tracing | None" = None


class _ExporterLog(logging.Handler):
    """Takes the lines of the exporter, and keeps the status of HTTP that they name.

    An endpoint that is away would fill the log, and the lines have the URL, which may be secret.
    """

    status = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line."""
        found = re.search(r"code: (\d{3})", record.getMessage())
        self.status = found[1] if found else self.status


class _Tracing:
    """Traces of this process, and the exporter that counts the spans which are dropped."""

    def __init__(self, exporter: "SpanExporter", ratio: float, place: str, names: dict[str, Fact]) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        self._api, self._exporter, self._place = trace, exporter, place
        self._lock = threading.Lock()
        self._waiting = self._dropped = self._warned = 0
        self._warned_s = -_WARN_S
        self._answers = True
        self._log = _ExporterLog()
        quiet = logging.getLogger(type(exporter).__module__)
        quiet.propagate = False
        quiet.addHandler(self._log)
        self.steps = deque[tuple[TraceContext, ...]](maxlen=MOST_CONTEXTS)
        """Spans of the groups that each of the newest inner steps has trained."""
        self._provider = TracerProvider(
            ParentBased(TraceIdRatioBased(ratio)), Resource.create(names), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self,  # type: ignore[arg-type]  # it has the methods of an exporter that are called
                max_queue_size=2 * MOST_WAITING,  # never full: `end` drops spans before
                schedule_delay_millis=1000 * EXPORT_S,
                max_export_batch_size=_BATCH,
            )
        )
        self._tracer = self._provider.get_tracer("aedit")

    def open(
        self, name: str, parent: TraceContext | None, links: Sequence[TraceContext], begun_ns: int | None
    ) -> "Recorded | None":
        """Return a new span; None if its trace is not sampled."""
        api, context = self._api, None
        if parent is not None:
            context = api.set_span_in_context(api.NonRecordingSpan(self._known(parent)))
        linked = [api.Link(self._known(each)) for each in links]
        made = self._tracer.start_span(name, context, links=linked, start_time=begun_ns)
        return made if made.is_recording() else None

    def _known(self, context: TraceContext) -> Any:
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        return self._api.SpanContext(context.trace, context.span, is_remote=True, trace_flags=flags)

    def end(self, recorded: "Recorded") -> None:
        """End a span, and let it wait for its export; drop it if too many wait."""
        with self._lock:
            if self._waiting >= MOST_WAITING:
                self._dropped += 1
                return
            self._waiting += 1
        recorded.end()

    def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
        """Export spans, in the thread of the exports."""
        self._log.status = ""
        answers = False
        try:
            result = self._exporter.export(spans)
            answers = result.name == "SUCCESS"
        finally:
            with self._lock:
                self._waiting -= len(spans)
                self._dropped += 0 if answers else len(spans)
                self._answers = answers
        if time.monotonic() - self._warned_s >= _WARN_S:
            self._warn()
        return result

    def _warn(self) -> None:
        if self._dropped > self._warned:
            said = (
                f"answers with status {self._log.status}"
                if self._log.status
                else "does not take them in time"
            )
            log.warning("traces.endpoint: %d spans dropped: %s %s", self._dropped, self._place, said)
            self._warned, self._warned_s = self._dropped, time.monotonic()

    def force_flush(self, timeout_millis: int = 0) -> bool:
        """Return true: nothing waits here."""
        return True

    def shutdown(self) -> None:
        """Close the connections."""
        self._exporter.shutdown()

    def close(self) -> None:
        """Export what waits, if the endpoint takes it within `LIMIT_S` and has taken the spans before."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(LIMIT_S if self._answers else 0.0)
        with self._lock:
            self._dropped += self._waiting
        self._warn()


def check_package(endpoint: str) -> None:
    """Raise UserError if traces are wanted and the package is missing, or refuses its environment."""
    if not endpoint:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"traces.endpoint: needs OpenTelemetry: pip install 'aedit[otel]', or leave the key out ({error})"
        ) from None
    except ValueError as error:
        raise _environment_fault(error) from None


def _environment_fault(error: Exception) -> UserError:
    return UserError(
        f"traces.endpoint: OpenTelemetry cannot start: {error}; check the environment variables OTEL_*"
    )


def begin(endpoint: str, service: str, *, ratio: float = 1.0, **facts: Fact) -> None:
    """Export the spans of this process to a receiver of OTLP over HTTP; "" does nothing.

    Does nothing either if they are exported already.

    Args:
        endpoint: URL, such as http://127.0.0.1:4318/v1/traces.
        service: Kind of this process, such as "node": `service.name` in the traces is "aedit-node".
        ratio: Share of the traces that begin in this process which are recorded. Those that another process
            has begun are recorded if it records them.
        facts: Attributes of the process.

    Raises:
        UserError: The package is missing, or refuses an environment variable.
    """
    global _tracing
    if not endpoint or _tracing is not None:
        return
    check_package(endpoint)
    from urllib.parse import urlsplit

    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    parts = urlsplit(endpoint)
    place = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    names = {"service.name": f"aedit-{service}", **{f"aedit.{name}": value for name, value in facts.items()}}
    try:
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=LIMIT_S)
        _tracing = _Tracing(exporter, ratio, place, names)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        raise _environment_fault(error) from None


def end_traces() -> None:
    """Export what is left, for at most `LIMIT_S`, and turn traces off."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        tracing.close()


def opened(
    name: str,
    parent: TraceContext | None = None,
    *,
    root: bool = False,
    links: Sequence[TraceContext] = (),
    begun_ns: int | None = None,
    **facts: Fact,
) -> TraceSpan:
    """Return a new span below `parent`, by default below that of the block; the caller ends it.

    Without a parent nothing is recorded, unless it is the root of a trace.

    Args:
        name: What is done.
        parent: Span of this or another process.
        root: Begin a trace.
        links: Spans of other traces that belong to it.
        begun_ns: Unix time at which it has begun; None: now.
        facts: Attributes.
    """
    if _tracing is None:
        return OFF
    parent = None if root else parent or _current.get().context
    if parent is None and not root:
        return OFF
    recorded = _tracing.open(name, parent, links[-MOST_CONTEXTS:], begun_ns)
    if recorded is None:
        return OFF
    span = TraceSpan(recorded)
    span.note(**facts)
    return span


def requested(name: str, headers: Iterable[tuple[bytes, bytes]], **facts: Fact) -> TraceSpan:
    """Return a new span for a request over HTTP, whose client may name the span of its own above it.

    It is below that span. It begins a trace if the client names none, or not in exactly one valid header.
    Nothing is recorded if the client's trace is not sampled.

    Args:
        name: What is done.
        headers: Names in lower case, and values.
        facts: Attributes.
    """
    if _tracing is None:
        return OFF
    values = ((key.decode("latin-1"), value.decode("latin-1")) for key, value in headers)
    parent, is_sampled = _read(_only_value(values))
    if parent is not None and not is_sampled:
        return OFF
    span = opened(name, parent, root=parent is None)
    span.note(**facts)
    return span


def end_trained(spans: Sequence[TraceSpan]) -> None:
    """End the spans of the groups that an inner step of this process has trained; see `trained_groups`."""
    if _tracing is not None:
        _tracing.steps.append(tuple(span.context for span in spans if span.context is not None))
        for span in spans:
            span.end()


def trained_groups(steps: int) -> list[TraceContext]:
    """Return the spans of the groups that the last `steps` inner steps have trained: links of their push."""
    newest = list(_tracing.steps)[-steps:] if _tracing is not None else []
    return [context for step in newest for context in step]


def is_on() -> bool:
    """Return whether spans of this process are exported."""
    return _tracing is not None


def current() -> TraceSpan:
    """Return the span of the innermost block of this thread; `OFF` outside of one."""
    return _current.get()


def spanning(
    name: str, parent: TraceContext | None = None, *, begun_ns: int | None = None, **facts: Fact
) -> AbstractContextManager[TraceSpan]:
    """Return a context with a span of the block, whose spans are below it; see `opened`."""
    if _tracing is None:
        return _NOT_TRACED
    span = opened(name, parent, begun_ns=begun_ns)
    span.note(**facts)
    return _NOT_TRACED if span is OFF else _block(span, ends=True)


def below(span: TraceSpan) -> AbstractContextManager[TraceSpan]:
    """Return a context in which spans and calls are below a span that has begun; it goes on."""
    return _NOT_TRACED if span is OFF else _block(span, ends=False)


@contextmanager
def _block(span: TraceSpan, *, ends: bool) -> Iterator[TraceSpan]:
    token = _current.set(span)
    try:
        yield span
    except BaseException as error:
        span.note(error=type(error).__name__)
        raise
    finally:
        _current.reset(token)
        if ends:
            span.end()
