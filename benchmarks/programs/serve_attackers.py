"""Clients that a server must bear, in one process: abandoned, malformed, oversized, unauthenticated, slow.

For each line on stdin, an `Attack` as JSON, it prints one line, the `Outcome` as JSON.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args
from urllib.parse import urlsplit

Kind = Literal["abandoned", "malformed", "oversized", "unauthenticated", "slow"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ANSWERS_WITHIN_S = 60.0
MANY_BYTES = 32 << 20
"""Of an oversized body, as far as the server reads it."""
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One kind of attack on one server."""

    url: str
    control_url: str
    """Of the control routes, which need a token."""
    model: str
    kind: Kind
    seconds: float
    rate_hz: float
    """Requests begun per second; `slow` begins as many at once as come in ten seconds and keeps them."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of an attack."""

    begun: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    """Answers by status; `closed`: the server has closed the connection; `left`: this side did."""


def request(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """Return a POST request."""
    lines = [f"POST {path} HTTP/1.1", "Host: server", "Content-Type: application/json", *headers]
    lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def status_of(reader: asyncio.StreamReader) -> str:
    """Return the status of an answer, `closed` without one."""
    try:
        line = await asyncio.wait_for(reader.readline(), ANSWERS_WITHIN_S)
    except (OSError, ValueError):
        return "closed"
    words = line.split()
    return words[1].decode() if len(words) > 1 else "closed"


MALFORMED = (
    b'{"model": ',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": "t1", "max_tokens": NaN}',
    b'{"prompt": [[[1]]]}',
    b'{"prompt": "t1", "n": -1}',
    b'{"prompt": "t1", "temperature": "hot"}',
    b"\xff\xfe\x00",
    b"[" * 50_000,
    b'{"prompt": [99999999999999999999]}',
    b'{"prompt": "t1", "stop": [' + b'"x",' * 5000 + b'"x"]}',
)
RAW = (b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"A: b\r\n\r\n")
CONTROL = ("/pause", "/resume", "/update_weights", "/abort_requests")


class Attacker:
    """An attack that goes on for its time."""

    def __init__(self, attack: Attack) -> None:
        self.attack, self.outcome = attack, Outcome()
        self._rng = random.Random(attack.seed)
        self._statuses: Counter[str] = Counter()
        where = urlsplit(attack.control_url if attack.kind == "unauthenticated" else attack.url)
        assert where.hostname is not None
        assert where.port is not None
        self._where = where.hostname, where.port

    async def run(self) -> Outcome:
        """Attack until the time is over and return what became of it."""
        one: dict[Kind, Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[str]]] = {
            "abandoned": self._abandoned,
            "malformed": self._malformed,
            "oversized": self._oversized,
            "unauthenticated": self._unauthenticated,
            "slow": self._slow,
        }
        self._ends_s = time.monotonic() + self.attack.seconds
        running: set[asyncio.Task[None]] = set()
        for _ in range(round(10 * self.attack.rate_hz) if self.attack.kind == "slow" else 0):
            running.add(asyncio.create_task(self._one(one["slow"])))
        while time.monotonic() < self._ends_s:
            if self.attack.kind != "slow":
                task = asyncio.create_task(self._one(one[self.attack.kind]))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(1 / self.attack.rate_hz)
        await asyncio.gather(*running)
        self.outcome.statuses = dict(self._statuses)
        return self.outcome

    async def _one(self, act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[str]]) -> None:
        self.outcome.begun += 1
        try:
            reader, writer = await asyncio.open_connection(*self._where)
        except OSError:
            self._statuses["closed"] += 1
            return
        try:
            self._statuses[await act(reader, writer)] += 1
        except OSError:
            self._statuses["closed"] += 1
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _abandoned(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        body = {"model": self.attack.model, "prompt": "t1 t2 t3", "max_tokens": 256, "stream": True}
        writer.write(request("/v1/completions", json.dumps(body).encode()))
        await writer.drain()
        status = await status_of(reader)
        if status == "200":
            with suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await asyncio.wait_for(reader.readuntil(b"data: "), ANSWERS_WITHIN_S)
            writer.transport.abort()
            return "left"
        return status

    async def _malformed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        if self._rng.random() < 0.1:
            writer.write(self._rng.choice(RAW))
        else:
            path = self._rng.choice(("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"))
            writer.write(request(path, self._rng.choice(MALFORMED)))
        await writer.drain()
        return await status_of(reader)

    async def _oversized(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        writer.write(request("/v1/completions", b"", length=MANY_BYTES))
        answered = asyncio.create_task(status_of(reader))
        with suppress(OSError):
            for _ in range(MANY_BYTES // CHUNK_BYTES):
                if answered.done():
                    break
                writer.write(b"t" * CHUNK_BYTES)
                await writer.drain()
        return await answered

    async def _unauthenticated(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        wrong = ("Authorization: Bearer wrong",) if self._rng.random() < 0.5 else ()
        writer.write(request(self._rng.choice(CONTROL), b"{}", *wrong))
        await writer.drain()
        return await status_of(reader)

    async def _slow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Send one byte per second: of the headers, or of the body."""
        text = request("/v1/completions", b'{"prompt": "' + b"t" * 10_000)
        if self._rng.random() < 0.5:
            writer.write(text[: text.index(b"{")])
        answered = asyncio.create_task(status_of(reader))
        for i in range(len(text)):
            if answered.done() or time.monotonic() > self._ends_s:
                break
            writer.write(text[i : i + 1])
            with suppress(OSError):
                await writer.drain()
            await asyncio.sleep(1)
        if answered.done():
            return await answered
        answered.cancel()
        writer.transport.abort()
        return "left"


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asdict(asyncio.run(Attacker(Attack(**json.loads(line))).run()))), flush=True)


if __name__ == "__main__":
    main()
