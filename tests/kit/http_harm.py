"""Well-behaved clients beside others: whether their answers stay right while a server is treated badly."""

import asyncio
import json
import random
from contextlib import asynccontextmanager, suppress

from kit.http_fuzz import ALLOWED, HttpFuzzer, answer

LIMIT_S = 60.0
GREEDY = {"model": "m", "prompt": "t1 t2 t3", "max_tokens": 6, "temperature": 0}
SEEDED = {
    "model": "m",
    "prompt": [4, 5, 6],
    "max_tokens": 6,
    "temperature": 1.0,
    "seed": 7,
    "n": 2,
    "logprobs": 1,
}
STREAMED = {**SEEDED, "stream": True, "seed": 8, "n": 1}


def post(path, body, *headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: s", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


def get(path, *headers):
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: s", *headers, "", ""]).encode()


@asynccontextmanager
async def connected(port):
    """Open a connection; it is closed afterwards, whatever the server has done."""
    reader, writer = await asyncio.wait_for(
        asyncio.open_connection("127.0.0.1", port, limit=1 << 24), LIMIT_S
    )
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def send(port, text):
    """Return status, headers and body of one request on a connection of its own; None if it was closed."""
    async with connected(port) as (reader, writer):
        with suppress(ConnectionError):
            writer.write(text)
            await writer.drain()
        return await answer(reader, LIMIT_S)


def said(found):
    """Return what must be equal in two answers to equal requests."""
    status, headers, body = found
    assert status == 200, (status, body[:500])
    if headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in body.decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]", body[-500:]
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        return "".join(choice["text"] for event in events for choice in event["choices"])
    choices = json.loads(body)["choices"]
    return [(each["text"], each["finish_reason"], each["logprobs"]) for each in choices]


async def answers(port):
    """Return the answers to three requests of a well-behaved client."""
    return [said(await send(port, post("/v1/completions", body))) for body in (GREEDY, SEEDED, STREAMED)]


def close(a, b):
    """Return true if two answers are equal; log-probabilities up to the rounding of other batches."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) < 1e-4
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    return a == b


@asynccontextmanager
async def well_behaved(port):
    """Send requests of a well-behaved client all the time; all answers must be those of the beginning.

    Yields the list of answers since then.
    """
    right, got, ends = await answers(port), [], asyncio.Event()

    async def go_on():
        while not ends.is_set():
            got.append(await answers(port))
            assert close(got[-1], right)

    client = asyncio.create_task(go_on())
    try:
        yield got
        count = len(got)
        while len(got) < count + 2 and not client.done():  # one more after the last attack
            await asyncio.sleep(0.01)
    finally:
        ends.set()
        await client


async def fuzz(port, num_requests, seed, num_connections=8):
    """Send fuzzed requests over some connections at a time. Returns the number of answers by status.

    Raises AssertionError at an answer that no request may get, or that has another form than OpenAI's.
    """
    statuses = {}
    left = iter(range(num_requests))

    async def connection(number):
        fuzzer = HttpFuzzer(random.Random(f"{seed} {number}"))
        for _ in left:
            text, is_plain = fuzzer.request()
            found = await (send(port, text) if is_plain else raw(port, text))
            status = "closed" if found is None else found[0]
            statuses[status] = statuses.get(status, 0) + 1
            if found is None:
                assert not is_plain, ("no answer", text[:2000])
                continue
            assert status in ALLOWED, (found, text[:2000])
            if is_plain and status != 200:
                check_error(found, text)

    await asyncio.gather(*(connection(number) for number in range(num_connections)))
    return statuses


def check_error(found, text):
    """Check an error's form: what is wrong, in words, and no inside of the program."""
    status, headers, body = found
    if headers.get("content-type", "").startswith("application/json"):
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}, (found, text[:2000])
        assert 5 < len(error["message"]) < 2000, (found, text[:2000])
        assert "Traceback" not in error["message"]
    else:  # the server below the application, which does not see what is no HTTP
        assert status == 400, (found, text[:2000])
    if status == 429:
        assert int(headers["retry-after"]) >= 1


async def raw(port, text):
    """Return the answer to bytes after which the client sends nothing more; None if there is none."""
    async with connected(port) as (reader, writer):
        with suppress(OSError):  # the server may have closed the connection already
            writer.write(text)
            await writer.drain()
            writer.write_eof()
        try:
            return await answer(reader, LIMIT_S)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
