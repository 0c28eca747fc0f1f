"""The course of a request for text: its samples from submission to the end or to the client's departure.

`respond` reads a request, generates, and answers whole or with server-sent events. `noise_keys` names the
noise of the samples, so that a repeated request gets the same tokens.
"""

import asyncio
import hashlib
import json
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from aedit import traces
from aedit.spec_rollout.engine import Scoring
from aedit.spec_rollout.http.errors import ApiError, bad_request, host_error
from aedit.spec_rollout.http.fields import RouteBody, parse_body
from aedit.spec_rollout.http.service import HttpService, json_body
from aedit.spec_rollout.sampling import Prompt, Rollout, SampleKey, Sampling
from aedit.spec_rollout.server import DeadlinePassed, HostTicket

log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Work of a request for the engine."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling | None
    """None: nothing is generated."""
    n: int
    """Samples of each prompt."""
    keys: Sequence[SampleKey]
    """Noise of each sample, those of the first prompt first."""
    prompt_logprobs: int | None = None
    """Alternatives at each place of the prompts; None: prompts are not scored."""
    stream: bool = False
    request_id: str = ""
    """Id that the client has given; empty: none."""

    @property
    def num_samples(self) -> int:
        """Return the number of samples that are generated."""
        return 0 if self.sampling is None else len(self.keys)


A = TypeVar("A", bound=RouteBody)


class ClientGone(Exception):
    """The client has closed the connection."""


class Generation:
    """The work of one request."""

    def __init__(self, service: HttpService, call: Call) -> None:
        self.call = call
        self._service = service
        self.feed = service.feed(call.num_samples, is_stream=call.stream)
        self.scores: list[Scoring] = []
        """Scores of the prompts, after `wait_scores`."""
        self._tickets: list[HostTicket] = []
        self._scorings: list[Future[Scoring]] = []
        self._is_gone = False

    def start(self) -> None:
        """Submit everything.

        Raises:
            ApiError: The engine cannot serve it, or is overloaded. Nothing is left behind.
        """
        call, service = self.call, self._service
        check_call(service, call)
        service.running.add(call.request_id, self)
        try:
            if call.prompt_logprobs is not None:
                temperature = 1.0 if call.sampling is None else call.sampling.temperature
                for tokens in call.prompts:
                    scoring = Scoring(tokens, temperature=temperature, top=call.prompt_logprobs)
                    future = service.host.score(service.line, scoring)
                    _end_with(future, traces.opened("server: score", tokens=len(tokens)))
                    self._scorings.append(future)
            if call.sampling is not None:
                self._submit(call.sampling)
        except Exception as error:
            self.cancel()
            raise host_error(error) from error
        service.metrics.prompt_tokens.inc(sum(map(len, call.prompts)))

    def _submit(self, sampling: Sampling) -> None:
        call, service, samples = self.call, self._service, iter(self.feed.samples)
        keys = iter(call.keys)
        for tokens in call.prompts:
            group = service.next_group()
            for _ in range(call.n):
                rollout, sample = next(keys)
                prompt = Prompt(tokens=tokens, rollout=rollout, sample=sample, group=group, sampling=sampling)
                receiver, limit_s = next(samples), service.limits.request_s
                self._tickets.append(service.host.submit(service.line, prompt, receiver, deadline_s=limit_s))

    def cancel(self) -> None:
        """Cancel what is not over, when no answer waits for it any more."""
        self._service.running.remove(self.call.request_id, self)
        for future in self._scorings:
            future.cancel()
        self.abort()

    def abort(self) -> None:
        """End the samples that are not over with the tokens that they have; the answer says so."""
        for ticket, sample in zip(self._tickets, self.feed.samples, strict=False):
            if not sample.is_over:
                self._service.host.cancel(ticket)

    async def watch(self, receive: Receive) -> None:
        """Wait until the client goes away, and let the waiting methods raise `ClientGone` then."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        for future in self._scorings:
            future.cancel()
        self.feed.news.set()

    async def wait_scores(self) -> None:
        """Wait for the scores of the prompts.

        Raises:
            ApiError: They cannot be computed.
            ClientGone: The client has gone.
        """
        try:
            async with asyncio.timeout(self._service.limits.request_s):
                for future in self._scorings:
                    self.scores.append(await asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if self._is_gone:
                raise ClientGone from None
            raise
        except TimeoutError:
            raise host_error(DeadlinePassed("the prompts were not scored in time")) from None
        except Exception as error:
            raise host_error(error) from error

    async def news(self) -> AsyncIterator[None]:
        """Yield whenever samples have news, the last time when all are over.

        Raises:
            ApiError: A sample has failed.
            ClientGone: The client has gone.
        """
        while True:
            if not self.feed.is_over:
                await self.feed.news.wait()
            self.feed.news.clear()
            is_over = self.feed.is_over
            if self._is_gone:
                raise ClientGone
            try:
                self.feed.check()
            except Exception as error:
                raise host_error(error) from error
            yield
            if is_over:
                return

    async def finish(self, receive: Receive) -> None:
        """Wait for the end of everything.

        Raises:
            ApiError: A sample has failed.
            ClientGone: The client has gone.
        """
        watching = asyncio.create_task(self.watch(receive))
        try:
            await self.wait_scores()
            async for _ in self.news():
                pass
        finally:
            watching.cancel()
            self.cancel()

    def rollout(self, i: int) -> Rollout:
        """Return the rollout of a sample that is over."""
        rollout, _ = self.feed.samples[i].state
        assert rollout is not None
        return rollout


def _end_with(future: Future[Scoring], span: traces.TraceSpan) -> None:
    if span is not traces.OFF:
        future.add_done_callback(lambda _: span.end())


def check_call(service: HttpService, call: Call) -> None:
    """Check what the engine would refuse, and the size of the answer.

    Raises:
        ApiError: The parameter that is wrong.
    """
    target, most, sampling = service.engine.target, service.max_tokens, call.sampling
    num_new = 0 if sampling is None else sampling.max_new_tokens
    for tokens in call.prompts:
        if not tokens:
            raise bad_request("prompt", "is empty: it must have at least one token")
        if len(tokens) + num_new > most:
            what = f"{len(tokens)} tokens, and max_tokens {num_new}, exceed the {most} of this model"
            raise bad_request("prompt", what, "context_length_exceeded")
        if not 0 <= min(tokens) <= max(tokens) < target.vocabulary:
            raise bad_request("prompt", f"has a token outside the vocabulary of {target.vocabulary}")
    if sampling is not None:
        for name, ids in (("stop_token_ids", sampling.stop_tokens), ("logit_bias", sampling.logit_bias)):
            if ids and not 0 <= min(ids) <= max(ids) < target.vocabulary:
                raise bad_request(name, f"has a token outside the vocabulary of {target.vocabulary}")
    top = 0 if sampling is None else sampling.top_logprobs
    num_entries = call.num_samples * num_new * (1 + top)
    if call.prompt_logprobs is not None:
        num_entries += sum(map(len, call.prompts)) * (1 + call.prompt_logprobs)
    if num_entries > service.limits.max_entries:
        rule = (
            f"and logprobs of all samples may be {num_entries} numbers, at most {service.limits.max_entries}"
        )
        raise ApiError(400, f"max_tokens {rule}: ask for less in one request", param="max_tokens")


def noise_keys(
    prompts: Sequence[Sequence[int]], n: int, *, seed: int | None, request_id: str
) -> list[SampleKey]:
    """Return a key for each sample, those of the first prompt first.

    With a seed, the keys depend on seed and prompt only: the same prompt in another request gets the same
    tokens. Without one they depend on the request id. Without that they are random. The samples of a request
    have different keys, also those of equal prompts.

    Args:
        prompts: Token ids.
        n: Samples of each prompt.
        seed: The seed of the request.
        request_id: Name of the request, which is the same when it is repeated; empty: none.
    """
    if seed is None:
        rollout = _hash(b"request", request_id.encode()) if request_id else secrets.randbits(63)
        return [(rollout, sample) for sample in range(len(prompts) * n)]
    seen = Counter[int]()
    keys = []
    for tokens in prompts:
        rollout = _hash(b"seed", str(seed).encode(), np.asarray(tokens, "<i8").tobytes())
        keys += [(rollout, seen[rollout] * n + sample) for sample in range(n)]
        seen[rollout] += 1
    return keys


def _hash(*parts: bytes) -> int:
    """Return 64 bits, as a signed number, that depend on all parts."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest(), "little", signed=True)


def event(value: Any) -> bytes:
    """Return an event with a JSON value."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Answer in parts, which ends the generation when the client goes away or does not read."""

    media_type = "text/event-stream"

    def __init__(
        self, service: HttpService, generation: Generation, events: AsyncGenerator[bytes, None]
    ) -> None:
        """Make the answer of a generation that has started.

        Args:
            service: Limits and figures.
            generation: Is cancelled at the end of the answer.
            events: Events without the last one, `[DONE]`.
        """
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._service, self._generation, self._events = service, generation, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        watching = asyncio.create_task(self._generation.watch(receive))
        try:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await self._send(send, start)
            async with aclosing(self._guarded()) as events:
                async for part in events:
                    await self._send(send, {"type": "http.response.body", "body": part, "more_body": True})
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGone, OSError):
            self._service.metrics.cancelled.inc()
        except TimeoutError:
            self._service.metrics.cancelled.inc()
            log.info("a client did not read its answer for %g s", self._service.limits.write_s)
        finally:
            watching.cancel()
            self._generation.cancel()

    async def _guarded(self) -> AsyncGenerator[bytes, None]:
        """Yield the events and the last one, or an error as the last one."""
        try:
            async with aclosing(self._events) as events:
                async for part in events:
                    yield part
        except ApiError as error:
            yield event(error.body())
            return
        yield DONE

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        await asyncio.wait_for(send(message), self._service.limits.write_s)


class RouteAnswer(Generic[A]):
    """The answer to a request, whole or in parts."""

    def __init__(self, service: HttpService, asked: A, generation: Generation) -> None:
        self._service, self._asked, self._generation = service, asked, generation
        self._call = generation.call
        self._num_new = 0
        """New tokens that were shown."""

    def whole(self) -> Mapping[str, Any]:
        """Return it when everything is generated."""
        raise NotImplementedError

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield it in parts while it is generated."""
        raise NotImplementedError

    def usage(self) -> dict[str, Any]:
        """Return the object `usage`."""
        num_prompt = sum(map(len, self._call.prompts))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_new,
            "total_tokens": num_prompt + self._num_new,
        }


async def respond(
    request: Request,
    kind: type[A],
    call_of: Callable[[A, HttpService, Request], Awaitable[Call]],
    show: type[RouteAnswer[A]],
) -> Response:
    """Return the answer to a request.

    Args:
        request: The request.
        kind: Its fields.
        call_of: Returns its work for the engine. Raises ApiError if a field is not valid.
        show: Its answer.
    """
    service: HttpService = request.app.state.service
    async with json_body(request, service) as body:
        asked = parse_body(kind, body, service)
        call = await call_of(asked, service, request)
    generation = Generation(service, call)
    generation.start()
    shown = show(service, asked, generation)
    if call.stream:
        return EventStream(service, generation, shown.events())
    await generation.finish(request.receive)
    return JSONResponse(shown.whole())
