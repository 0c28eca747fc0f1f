"""Samples and scores of one request, from submission to the end or to the client's departure."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from starlette.types import Receive

from aedit.spec_rollout.engine import Scoring
from aedit.spec_rollout.http.errors import ApiError, bad_request, host_error
from aedit.spec_rollout.http.feeds import Feed
from aedit.spec_rollout.http.noise_keys import Key
from aedit.spec_rollout.http.service import Service
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling
from aedit.spec_rollout.server import DeadlinePassed, Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Work of a request for the engine."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling | None
    """None: nothing is generated."""
    n: int
    """Samples of each prompt."""
    keys: Sequence[Key]
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


class ClientGone(Exception):
    """The client has closed the connection."""


class Generation:
    """The work of one request."""

    def __init__(self, service: Service, call: Call) -> None:
        self.call = call
        self._service = service
        self.feed = Feed(service.bridge(), call.num_samples, is_stream=call.stream)
        self.scores: list[Scoring] = []
        """Scores of the prompts, after `wait_scores`."""
        self._tickets: list[Ticket] = []
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
                    self._scorings.append(service.host.score(service.line, scoring))
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
        """Cancel what is not over; nobody waits for it any more."""
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


def check_call(service: Service, call: Call) -> None:
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
