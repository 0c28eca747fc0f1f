"""vLLM in an HTTP server as the engine of a rollout worker.

`make_vllm_server_engine` is the worker's `make`. The server is vLLM's own, with the plug-in
`aedit.spec_rollout.vllm` installed beside it. It belongs to one rank: this worker pushes each version to it.
Running samples are ended before a version and continued after it, so that each token is of one version. With
each answer the server names the version that has drawn it; another one than that pushed here is an error.
"""

import hashlib
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from aedit.spec_rollout.server.vllm_engine import (
    VllmEngine,
    VllmOutput,
    VllmProbe,
    engine_over,
    model_of,
)
from aedit.weights import save_tensors

if TYPE_CHECKING:
    from aedit.spec_rollout.server.worker_engine import EngineSpec

STARTS_S = 240.0
"""Limit of the time until the server answers."""
CALL_S = 300.0
"""Limit of a call that changes it."""
STEP_S = 0.05
"""Longest wait for news in one step."""
JSON = {"Content-Type": "application/json"}
GENERATE = "/inference/v1/generate"
START = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model DIR --enable-scale-out"
    ' --weight-transfer-config \'{"backend": "aedit"}\', with the plug-in (pip install ./spec_rollout/vllm)'
)


class VllmServerError(RuntimeError):
    """The server does not answer as it should."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request at the server, from `add` to its end; a pause ends its present stream."""

    name: str
    tokens: list[int]
    """Prompt, and what was drawn before the present stream."""
    settings: dict[str, Any]
    connection: HTTPConnection | None = None
    lines: list[bytes] = field(default_factory=list)
    """Events of the present stream."""


@dataclass(frozen=True, slots=True)
class _LogProb:
    rank: int
    logprob: float


class ServedVllm:
    """A `VllmBackend` over HTTP. A thread for each request reads its stream."""

    def __init__(self, url: str, folder: Path) -> None:
        """Connect.

        Args:
            url: `http://HOST:PORT` of the server.
            folder: For weights, which the server reads at the same path.

        Raises:
            VllmServerError: The server does not answer in time, or was not started with what this needs.
        """
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._folder = folder
        self._owner = secrets.token_hex(8)
        self._label = ""
        """Name of the newest version at the server."""
        self._wanted: Mapping[str, Tensor] = {}
        self._has_base = False
        self._requests: dict[str, _Request] = {}
        self._events: queue.SimpleQueue[tuple[_Request, Exception | None, bool]] = queue.SimpleQueue()
        wait_until_ready(self._host, self._port, STARTS_S)

    def init(self, tensors: Mapping[str, Tensor], draft: Mapping[str, Tensor]) -> None:
        """Take note of the tensors that each version must have."""
        self._wanted = tensors

    def add(self, name: str, tokens: Sequence[int], settings: Mapping[str, Any]) -> None:
        """Start a request.

        Raises:
            ValueError: The server would draw it otherwise.
        """
        if settings["min_tokens"]:  # the server would forbid its own end tokens too
            raise ValueError(f"prompt {name}: min_new_tokens is not served by a vLLM server: leave it out")
        request = self._requests[name] = _Request(name, [*tokens], dict(settings))
        self._start(request)

    def step(self) -> list[VllmOutput]:
        """Return the samples that have ended, after a wait for news.

        Raises:
            VllmServerError: The server has failed, or has other weights.
        """
        return self._outputs(STEP_S)

    def abort(self, name: str) -> None:
        """End a request: the server notices that its connection is closed."""
        request = self._requests.pop(name, None)
        if request is not None:
            _close(request)

    def draft(self, depth: int) -> None:
        """Do nothing: the server drafts as it was started."""

    def pause(self) -> list[VllmOutput]:
        """End all streams at the server, and return what they have brought."""
        self._call("/pause?mode=abort")
        outputs, deadline_s = [], time.monotonic() + CALL_S
        while any(each.connection is not None for each in self._requests.values()):
            outputs += self._outputs(STEP_S)
            self._call("/abort_requests", {})  # also those that have come to the server since then
            if time.monotonic() > deadline_s:
                raise VllmServerError("samples that were aborted have not ended at the vLLM server")
        return outputs

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Push a version.

        Raises:
            ValueError: It does not fit or is not finite, or the server refuses it.
            VllmServerError: The server cannot take versions.
        """
        _check(weights, self._wanted)
        path = self._folder / f"aedit-{self._host}-{self._port}.safetensors"
        try:
            try:
                save_tensors(weights, path)
                with path.open("rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise VllmServerError(f"{path} cannot be written: {error}") from error
            if not self._has_base:
                self._call("/init_weight_transfer_engine", {"init_info": {"base": str(path)}})
                self._has_base = True
            self._call("/start_weight_update")
            try:
                self._call("/update_weights", {"update_info": {"path": str(path), "sha256": sha256}})
            except VllmServerError as error:
                raise ValueError(f"the vLLM server has refused version {version}: {error}") from error
            label = f"aedit/{self._owner}/{version}"
            self._call("/finish_weight_update", {"weight_version": label})
        finally:
            path.unlink(missing_ok=True)
        self._call("/reset_prefix_cache")
        self._label = label

    def resume(self) -> None:
        """Let the server generate, and continue the samples that `pause` has ended."""
        self._call("/resume")
        for request in self._requests.values():
            if request.connection is None:
                self._start(request)

    def probe(self, tokens: Sequence[int], settings: Mapping[str, Any]) -> VllmProbe:
        """Score a text and draw a token."""
        found = json.loads(self._call(GENERATE, {"token_ids": [*tokens], "sampling_params": dict(settings)}))
        pairs = zip(tokens[1:], found["prompt_logprobs"][1:], strict=True)
        (place,) = found["choices"][0]["logprobs"]["content"]
        scores = [place[str(token)]["logprob"] for token, place in pairs]
        return VllmProbe(scores, place["token_id"], place["logprob"])

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return the body of an answer. Raises VllmServerError if there is none, or it is an error."""
        return call(self._host, self._port, path, body)

    def _start(self, request: _Request) -> None:
        request.lines = []
        request.connection = HTTPConnection(self._host, self._port)
        thread = threading.Thread(target=self._read, args=(request, request.connection), daemon=True)
        thread.start()

    def _read(self, request: _Request, connection: HTTPConnection) -> None:
        """Read a stream to its end, in a thread of its own."""
        body = {"token_ids": request.tokens, "sampling_params": request.settings, "stream": True}
        body["stream_options"] = {"include_usage": True}  # with the counts of drafts, if the server has them
        lines, error = request.lines, None
        try:
            connection.request("POST", GENERATE, json.dumps(body).encode(), JSON)
            answer = connection.getresponse()
            if answer.status != 200:
                text = answer.read(300).decode(errors="replace")
                raise VllmServerError(f"sample {request.name}: {answer.status}: {text}")
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    break
                if line.startswith(b"data: "):
                    lines.append(line[6:])
                    self._events.put((request, None, False))
            else:
                raise VllmServerError(f"sample {request.name}: the stream of the vLLM server has broken")
        except Exception as failed:
            error = failed
        finally:
            connection.close()
        self._events.put((request, error, True))

    def _outputs(self, timeout_s: float) -> list[VllmOutput]:
        """Return samples whose streams have ended, and empty outputs as signs of life of the others."""
        outputs: list[VllmOutput] = []
        with suppress(queue.Empty):
            found = self._events.get(timeout=timeout_s)
            while True:
                outputs += self._handle(*found)
                found = self._events.get_nowait()
        return outputs

    def _handle(self, request: _Request, error: Exception | None, is_over: bool) -> list[VllmOutput]:
        if self._requests.get(request.name) is not request:
            return []  # aborted
        if error is not None:
            raise VllmServerError(f"sample {request.name}: {type(error).__name__}: {error}") from error
        if not is_over:
            return [VllmOutput(request.name, (), (), None, 0)]
        request.connection = None
        output = self._read_answer(request)
        if output.finish_reason != "abort":
            del self._requests[request.name]
            return [output]
        request.tokens += output.tokens
        num, settings = len(output.tokens), request.settings
        request.settings = {**settings, "max_tokens": settings["max_tokens"] - num}
        return [replace(output, finish_reason=None)]

    def _read_answer(self, request: _Request) -> VllmOutput:
        """Return what a stream has brought.

        Raises:
            VllmServerError: It is no answer, or other weights have drawn it.
        """
        tokens: list[int] = []
        logprobs: list[Mapping[int, _LogProb]] = []
        finish_reason, num_accepted = None, 0
        spans: list[dict[str, Any]] = []
        for line in request.lines:
            event = json.loads(line)
            if "error" in event:
                raise VllmServerError(f"sample {request.name}: {event['error']}")
            if not event["choices"]:
                metrics = event.get("metrics") or {}
                num_accepted = (metrics.get("speculative_decoding") or {}).get("num_accepted_draft_tokens", 0)
                continue
            (choice,) = event["choices"]
            tokens += choice["token_ids"] or []
            for place in (choice["logprobs"] or {}).get("content") or []:
                shown = [place, *place["top_logprobs"]]
                logprobs.append({each["token_id"]: _LogProb(each["rank"], each["logprob"]) for each in shown})
            finish_reason, spans = choice["finish_reason"], choice["weight_versions"] or spans
        others = {span["version"] for span in spans} - {self._label}
        if others or (tokens and not spans):
            raise VllmServerError(
                f"sample {request.name}: the vLLM server names weights {', '.join(others) or '?'}, expected"
                f" {self._label}, which were pushed last: give each rank a server of its own"
            )
        if finish_reason is None or len(logprobs) != len(tokens):
            raise VllmServerError(f"sample {request.name}: the vLLM server's answer is not complete")
        # The last pass may have accepted tokens behind the end.
        passes = max(len(tokens) - num_accepted, bool(tokens))
        return VllmOutput(request.name, tokens, logprobs, finish_reason, passes)


def _check(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Check names, shapes, dtypes and values.

    Raises:
        ValueError: They do not fit, or are not finite.
    """
    for name in sorted({*weights, *wanted}):
        if name not in weights or name not in wanted:
            what = "missing" if name in wanted else "no tensor of the model"
            raise ValueError(f"weights: {name} is {what}")
        found, other = weights[name], wanted[name]
        if (found.shape, found.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"weights: {name} is {tuple(found.shape)}, {found.dtype}, expected {tuple(other.shape)},"
                f" {other.dtype}"
            )
        if found.is_floating_point() and not bool(torch.isfinite(found).all()):
            raise ValueError(f"weights: {name} has values that are not finite")


def _close(request: _Request) -> None:
    """Close a stream that another thread reads."""
    connection = request.connection
    if connection is not None and connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def call(
    host: str, port: int, path: str, body: Mapping[str, Any] | None = None, method: str = "POST"
) -> bytes:
    """Return the body of an answer.

    Raises:
        VllmServerError: There is none in time, or it is an error.
    """
    connection = HTTPConnection(host, port, timeout=CALL_S)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, JSON)
        answer = connection.getresponse()
        found = answer.read()
    except (OSError, HTTPException) as error:
        raise VllmServerError(f"{path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if answer.status != 200:
        text = " ".join(found[:300].decode(errors="replace").split())
        raise VllmServerError(f"{path}: {answer.status}: {text}")
    return found


def wait_until_ready(host: str, port: int, limit_s: float) -> None:
    """Wait for a server, and check that it has the routes.

    Raises:
        VllmServerError: It does not answer in time, or has not.
    """
    deadline_s, where = time.monotonic() + limit_s, f"{host}:{port}"
    while True:
        try:
            call(host, port, "/health", method="GET")
            break
        except VllmServerError as error:
            if time.monotonic() >= deadline_s:
                raise VllmServerError(f"no vLLM server at {where} ({error}): start it: {START}") from None
            time.sleep(1.0)
    try:
        call(host, port, "/resume")  # a worker that was killed may have left it paused
        call(host, port, GENERATE, {"token_ids": [0], "sampling_params": {"max_tokens": 1}})
    except VllmServerError as error:
        message = f"the vLLM server at {where} lacks routes ({error}): start it: {START}"
        raise VllmServerError(message) from None


def check_vllm_server(url: str) -> None:
    """Check that a server answers now, and has the routes.

    Raises:
        VllmServerError: It does not, or has not.
    """
    parts = urlsplit(url)
    wait_until_ready(parts.hostname or "", parts.port or 80, 0.0)


def make_vllm_server_engine(spec: "EngineSpec") -> VllmEngine:
    """Return an engine whose vLLM is a server.

    `spec.options`: `server`, `http://HOST:PORT`; `folder`, which it shares with this process.

    Raises:
        VllmServerError: The server does not answer, or was not started with what this needs.
        ValueError: vLLM cannot compute in this dtype.
    """
    model, dtype = model_of(spec)
    backend = ServedVllm(spec.options["server"], Path(spec.options["folder"]))
    return engine_over(backend, spec, model, dtype)
