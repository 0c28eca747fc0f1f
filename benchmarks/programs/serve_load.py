"""Generate load on an OpenAI-compatible server: concurrent streaming clients in one process.

    echo '{"url": "http://127.0.0.1:8000", "clients": 8, ...}' | python -m benchmarks.programs.serve_load

For each line on stdin, a `Load` as JSON, it prints one line, a `Seen` as JSON. A client sends its next
request when the last one has ended.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

ENDS_WITHIN_S = 300.0
"""Limit for one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load on one server."""

    url: str
    model: str
    clients: int
    seconds: float
    """Time in which tokens are counted and requests begin; what is on the way then is read to its end."""
    vocabulary: int
    """Words t0, t1, ... of the prompts; one word is one token."""
    prompt: tuple[int, int] = (16, 64)
    """Least and most words of a prompt."""
    max_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    """Of the prompts. The same seed gives the same prompts, in the order of each client."""
    sends_seed: bool = False
    """Send a seed with each request, so that its answer can be compared with that of an equal request."""
    most_requests: int = 0
    """Requests of all clients together, after which they stop; 0: no limit."""
    leaves: bool = False
    """At the end of the time leave the answers that are on the way, instead of reading them to their end."""


@dataclass(slots=True)
class Seen:
    """What the clients have seen."""

    seconds: float = 0.0
    tokens: int = 0
    """Within the time."""
    finished: int = 0
    """Requests that were answered in full."""
    first_s: list[float] = field(default_factory=list)
    """From the request to its first token. A request that was refused begins anew with each try."""
    gaps_s: list[float] = field(default_factory=list)
    """Between two pieces of text of one answer, each of one token or more."""
    refused: int = 0
    """Answers 429."""
    waits_s: list[float] = field(default_factory=list)
    """Retry-After of the answers 429 that have one."""
    failures: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """Answers by client and number, if seeds were sent."""
    cpu_s: float = 0.0
    """Processor time of this process."""


@dataclass(slots=True)
class Answer:
    """One answer, which grows: text, times at which its pieces came, and numbers of tokens in them."""

    text: str = ""
    at_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    finish_reason: str = ""


class RefusedError(Exception):
    """The server answered 429. The argument is its Retry-After in seconds, None without one."""


def prompt_of(load: Load, client: int, number: int) -> str:
    """Return the prompt of a client's request."""
    rng = random.Random(f"{load.seed} {client} {number}")
    return " ".join(f"t{rng.randrange(load.vocabulary)}" for _ in range(rng.randint(*load.prompt)))


def body_of(load: Load, client: int, number: int) -> dict[str, Any]:
    """Return the body of a client's request."""
    body: dict[str, Any] = {
        "model": load.model,
        "prompt": prompt_of(load, client, number),
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "stream": True,
    }
    return body | ({"seed": 1000 * client + number} if load.sends_seed else {})


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream until its end or `[DONE]`."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            if line == "data: [DONE]":
                return
            yield json.loads(line.removeprefix("data: "))


async def ask(http: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> None:
    """Send a streaming request and read its answer into `answer`.

    Raises:
        RefusedError: The server answered 429.
        ValueError: It answered something else than 200, or sent an error or no reason for the end.
    """
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code == 429:
            raise RefusedError(response.headers.get("retry-after"))
        if response.status_code != 200:
            raise ValueError(
                f"{response.status_code}: {(await response.aread())[:200].decode(errors='replace')}"
            )
        async for event in events(response):
            if "error" in event:
                raise ValueError(f"error in the stream: {event['error']}")
            for choice in event["choices"]:
                if choice.get("text"):
                    answer.text += choice["text"]
                    answer.at_s.append(time.perf_counter())
                    answer.counts.append(len(choice["text"].split()))
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if not answer.finish_reason:
        raise ValueError(f"the stream ended after {sum(answer.counts)} tokens without finish_reason")


class Clients:
    """Clients of one server for the time of one load."""

    def __init__(self, load: Load) -> None:
        self.load, self.seen = load, Seen()
        self._left = load.most_requests or sys.maxsize
        self._ends_s = 0.0

    async def run(self) -> Seen:
        """Run all clients to their ends and return what they saw."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=self.load.url, timeout=ENDS_WITHIN_S, limits=limits) as http:
            began_s, cpu_s = time.perf_counter(), time.process_time()
            self._ends_s = began_s + self.load.seconds
            clients = [asyncio.create_task(self._client(http, i)) for i in range(self.load.clients)]
            _, late = await asyncio.wait(clients, timeout=self.load.seconds if self.load.leaves else None)
            for client in late:
                client.cancel()
            for error in await asyncio.gather(*clients, return_exceptions=True):
                if isinstance(error, Exception):
                    raise error
            self.seen.seconds = min(time.perf_counter() - began_s, self.load.seconds)
            self.seen.cpu_s = time.process_time() - cpu_s
        return self.seen

    async def _client(self, http: httpx.AsyncClient, client: int) -> None:
        number = 0
        while self._left > 0 and time.perf_counter() < self._ends_s:
            self._left -= 1
            try:
                await self._request(http, client, number)
            except (ValueError, httpx.HTTPError) as error:
                self.seen.failures.append(f"{type(error).__name__}: {error}"[:300])
                if len(self.seen.failures) > 100:
                    return  # a server that is gone answers at once
            number += 1

    async def _request(self, http: httpx.AsyncClient, client: int, number: int) -> None:
        body = body_of(self.load, client, number)
        while True:
            began_s, answer = time.perf_counter(), Answer()
            try:
                await ask(http, body, answer)
            except asyncio.CancelledError:
                self._note(began_s, answer)
                raise
            except RefusedError as refused:
                wait_s, left_s = self._note_refusal(refused.args[0]), self._ends_s - time.perf_counter()
                await asyncio.sleep(max(0.0, min(wait_s, left_s)))
                if wait_s > left_s:
                    return
                continue
            self.seen.finished += 1
            self._note(began_s, answer)
            if self.load.sends_seed:
                self.seen.texts[f"{client} {number}"] = answer.text
            return

    def _note_refusal(self, retry_after: str | None) -> float:
        self.seen.refused += 1
        if retry_after is None:
            return 1.0
        self.seen.waits_s.append(float(retry_after))
        return float(retry_after)

    def _note(self, began_s: float, answer: Answer) -> None:
        in_time = [
            count for at_s, count in zip(answer.at_s, answer.counts, strict=True) if at_s <= self._ends_s
        ]
        self.seen.tokens += sum(in_time)
        if answer.at_s:
            self.seen.first_s.append(answer.at_s[0] - began_s)
        self.seen.gaps_s += [b - a for a, b in zip(answer.at_s, answer.at_s[1:], strict=False)]


def main() -> None:
    for line in sys.stdin:
        told = json.loads(line)
        load = Load(**told | {"prompt": tuple(told["prompt"])})
        print(json.dumps(asdict(asyncio.run(Clients(load).run()))), flush=True)


if __name__ == "__main__":
    main()
