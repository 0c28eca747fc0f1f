"""Requests that an HTTP server must bear: spoilt JSON, raw bytes, endless headers, tricks with lengths."""

import asyncio
import copy
import json

GOOD = {
    "/v1/completions": {
        "model": "m",
        "prompt": "t1 t2",
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "n": 2,
        "logprobs": 1,
        "stop": ["t9"],
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "echo": True,
        "user": "u",
        "logit_bias": {"4": 1.5},
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "return_token_ids": True,
    },
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "t1"},
            {"role": "user", "content": [{"type": "text", "text": "t2"}]},
        ],
        "max_completion_tokens": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 1,
        "stream": True,
        "tools": [],
        "seed": 1,
        "stop": "t5",
    },
    "/inference/v1/generate": {
        "model": "m",
        "token_ids": [1, 2, 3],
        "sampling_params": {
            "max_tokens": 3,
            "temperature": 1.0,
            "logprobs": 1,
            "stop_token_ids": [7],
            "prompt_logprobs": 1,
        },
        "request_id": "r1",
        "priority": 0,
        "stream": False,
    },
    "/tokenize": {"prompt": "t1 t2", "add_special_tokens": False},
    "/detokenize": {"tokens": [1, 2, 3]},
}
IMAGE = {"type": "image_url", "image_url": "file:///etc/passwd"}
VALUES = (
    *(None, True, False, 0, -1, 1, 2, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 0.5, -0.5, 1e308),
    *(
        1e-320,
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        "t1",
        "\0",
        "\ud800",
        "\udfff\ud800",
        "x" * 5000,
    ),
    *("\u20ac\U0001f41f", "NaN", "1", [], [[]], [[[]]], [1], [[1], [2]], ["t1", "t2"], [1, "t1"], [None]),
    *([-1], [10**9], [2**70], [1.5], [True], ["x"] * 300, [1] * 3000, [[1]] * 200, {}, {"": ""}),
    *({"type": "text"}, {"1": 1}, {"x" * 100: "y"}, [{}], [{"role": "user"}], [{"role": 1, "content": 2}]),
    *([{"role": "user", "content": [IMAGE]}], "../../etc/passwd", "{{ 7*7 }}"),
)
ALLOWED = {200, 400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 415, 422, 429, 431, 501, 503, 505}
"""Statuses of answers: never 500."""


def encoded(value):
    """Return JSON as a careless client would write it: with NaN, and lone surrogates as escapes."""
    return json.dumps(value).encode()


class HttpFuzzer:
    """Generator of requests: `request()` returns the bytes for a connection, and whether it is plain HTTP.

    A plain request has a right length, so another may follow on the same connection.
    """

    def __init__(self, rng):
        self.rng = rng

    def request(self):
        kind = self.rng.random()
        if kind < 0.75:
            return self.post(self.rng.choice([*GOOD]), self.body()), True
        if kind < 0.85:
            return self.post(
                self.rng.choice([*GOOD, "/", "/v1/models", "/nothing", "/health"]), self.noise()
            ), True
        return self.raw(), False

    def body(self):
        path = self.rng.choice([*GOOD])
        value = copy.deepcopy(GOOD[path])
        value["model"] = (
            self.rng.choice((value.get("model"), "m", None, 1)) if self.rng.random() < 0.1 else "m"
        )
        for _ in range(self.rng.choice((0, 0, 1, 1, 2, 4))):
            self._spoil(value)
        text = encoded(value)
        if self.rng.random() < 0.1:
            text = text[:-1] + b', "prompt": [3], "max_tokens": 2}'  # keys twice
        return self._damaged(text) if self.rng.random() < 0.15 else text

    def noise(self):
        rng = self.rng
        return rng.choice(
            (
                b"",
                b"null",
                b"[]",
                b'"x"',
                b"1e999",
                rng.randbytes(rng.randint(1, 300)),
                b"[" * rng.choice((10, 1000, 100_000)),
                b'{"a":' * rng.choice((10, 1000, 20_000)) + b"1",
                b'{"prompt": "' + b"t1 " * 20_000 + b'"}',
                b'{"prompt": "\xed\xa0\x80", "max_tokens": 1}',
                b'{"prompt": "\xff", "max_tokens": 1}',
                b'\xef\xbb\xbf{"prompt": "t1", "max_tokens": 1}',
                '{"prompt": "t1", "max_tokens": 1}'.encode("utf-16"),
                b'{"prompt": [' + b"1," * 50_000 + b"1]}",
                b'{"prompt": "t1", "max_tokens": ' + b"9" * 5000 + b"}",
            )
        )

    def post(self, path, body):
        kind = self.rng.choice(
            ("application/json",) * 8 + ("text/plain", "multipart/form-data; boundary=x", "\xe9")
        )
        extra = self.rng.choice(
            ("",) * 6
            + (
                "X-Request-Id: " + "r" * self.rng.choice((1, 500)) + "\r\n",
                "Authorization: Bearer \xff\r\n",
                "Accept-Encoding: gzip\r\n",
                "Expect: 100-continue\r\n",
                "X-Request-Id: a\r\nX-Request-Id: b\r\n",
                "Idempotency-Key: \r\n",
            )
        )
        head = f"POST {path} HTTP/1.1\r\nHost: s\r\nContent-Type: {kind}\r\n{extra}"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body

    def raw(self):
        rng = self.rng
        whole = self.post("/v1/completions", encoded(GOOD["/v1/completions"]))
        head, _, body = whole.partition(b"\r\n\r\n")
        chunked = b"POST /v1/completions HTTP/1.1\r\nHost: s\r\nTransfer-Encoding: chunked\r\n\r\n"
        return rng.choice(
            (
                rng.randbytes(rng.randint(1, 2000)),
                whole[: rng.randrange(len(whole))],
                self._damaged(whole),
                head + b"\r\n" + b"X: y\r\n" * rng.choice((50, 5000)) + b"\r\n" + body,
                head + b"\r\nX: " + b"y" * rng.choice((1000, 200_000)) + b"\r\n\r\n" + body,
                b"GET /" + b"a" * rng.choice((100, 100_000)) + b" HTTP/1.1\r\nHost: s\r\n\r\n",
                head + b"\r\nContent-Length: 5\r\n\r\n" + body,
                head + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + body,
                chunked + b"zz\r\n" + body,
                chunked + b"fffffffffffffffffffff\r\n" + body,
                chunked + b"5\r\nhello",
                chunked + b"%x;%s\r\n" % (len(body), b"e" * 20_000) + body + b"\r\n0\r\n\r\n",
                chunked + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n",
                chunked + b"0\r\nTrailer: x\r\n\r\n",
                whole.replace(b"Content-Length: ", b"Content-Length: -"),
                whole.replace(b"Content-Length: ", b"Content-Length: 99999999999999999999"),
                whole.replace(b"HTTP/1.1", b"HTTP/1.0"),
                whole.replace(b"HTTP/1.1", b"HTTP/3.7"),
                whole.replace(b"POST", b"PO\0ST"),
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
                b"GET /v1/models HTTP/1.1\r\nHost: s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
                b"GET /../../etc/passwd HTTP/1.1\r\nHost: s\r\n\r\n",
                b"GET /%00%ff HTTP/1.1\r\nHost: s\r\n\r\n",
                whole * 20,  # pipelined
            )
        )

    def _spoil(self, value):
        """Replace, remove or add one part somewhere in the value."""
        at = value
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = self.rng.choice(keys)
            if isinstance(at[key], dict | list) and at[key] and self.rng.random() < 0.7:
                at = at[key]
                continue
            if self.rng.random() < 0.8:
                at[key] = copy.deepcopy(self.rng.choice(VALUES))
            else:
                del at[key]
            return
        if isinstance(at, dict):
            at["unknown"] = copy.deepcopy(self.rng.choice(VALUES))

    def _damaged(self, text):
        damaged = bytearray(text)
        for _ in range(self.rng.randint(1, 4)):
            where = self.rng.randrange(len(damaged))
            if self.rng.random() < 0.5:
                damaged[where] = self.rng.randrange(256)
            else:
                del damaged[where : where + self.rng.randint(1, 8)]
                damaged = damaged or bytearray(b"x")
        return bytes(damaged)


async def answer(reader, limit_s):
    """Return status, headers and body of one answer; None if the connection was closed before its status.

    Raises AssertionError if the answer is no HTTP, and TimeoutError.
    """
    async with asyncio.timeout(limit_s):
        try:
            line = await reader.readline()
        except ConnectionError:
            return None
        if not line:
            return None
        words = line.split(b" ", 2)
        assert words[0] == b"HTTP/1.1", line
        headers = {}
        while (line := await reader.readline()).strip():
            name, _, text = line.partition(b":")
            headers[name.decode("latin-1").lower()] = text.strip().decode("latin-1")
        if words[1] == b"100":
            return await answer(reader, limit_s)
        return int(words[1]), headers, await _body(reader, headers)


async def _body(reader, headers):
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readuntil(b"\n")
        await reader.readuntil(b"\n")
        return b"".join(parts)
    return await reader.readexactly(int(headers.get("content-length", 0)))
