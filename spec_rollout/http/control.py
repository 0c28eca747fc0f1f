"""Control routes: pause, weights, samples. They change the server, so they have an address of their own."""

import asyncio
import hashlib
import math
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import PlainValidator
from safetensors import SafetensorError
from safetensors.torch import load_file
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor
from transformers import PreTrainedModel

from aedit.spec_rollout.http.errors import ApiError, bad_request, host_error
from aedit.spec_rollout.http.fields import Body, Text, between, check_texts, parse_body
from aedit.spec_rollout.http.service import HttpService, in_thread, json_body
from aedit.system import check_folder, opened_below, read_index

UPDATE_S = 600.0
"""Time for new weights to be read and taken over, and for running samples to end before a pause."""
MODES = ("keep", "wait", "abort")


class AbortBody(Body):
    """Requests whose samples are to end; None: all."""

    request_ids: Annotated[list[str], PlainValidator(check_texts)] | None = None


class WeightsBody(Body):
    """New weights."""

    weight_dir: Text | None = None
    version: Annotated[int, between(0, (1 << 63) - 1)] | None = None


class ChecksumBody(Body):
    """A request for checksums, or for a comparison with earlier ones."""

    action: Text = "checksum"
    baseline: Any = None


def control_routes(root: Path | None) -> list[Route]:
    """Return the control routes; weights are read from directories below `root` only, None: from none."""
    lock = asyncio.Lock()

    async def update_weights(request: Request) -> Response:
        return await _update_weights(request, root, lock)

    return [
        Route("/pause", pause, methods=["POST"]),
        Route("/resume", resume, methods=["POST"]),
        Route("/is_paused", is_paused),
        Route("/abort_requests", abort_requests, methods=["POST"]),
        Route("/update_weights", update_weights, methods=["POST"]),
        Route("/weight_info", weight_info),
        Route("/weight_checker", weight_checker, methods=["POST"]),
        Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
        Route("/liveness", liveness),
        Route("/get_world_size", world_size),
        Route("/status", status),
    ]


async def pause(request: Request) -> Response:
    """Stop generating.

    mode: "keep" (default) lets samples wait where they are, "wait" lets those that run end and answers
    then, "abort" ends all that are here. Requests that come meanwhile are queued. timeout_s: longest wait
    for the samples that run.
    """
    service = _service(request)
    async with json_body(request, service, empty={}) as body:
        parse_body(Body, body, service)  # a mode in the body would have no effect
    if unknown := sorted({*request.query_params} - {"mode", "timeout_s", "clear_cache"}):
        raise bad_request(unknown[0][:64], "is no parameter of /pause: give mode, timeout_s, clear_cache")
    host, mode = service.host, request.query_params.get("mode", "keep")
    if mode not in MODES:
        raise bad_request("mode", f"must be one of {', '.join(MODES)}, got {mode[:64]!r}")
    clear = request.query_params.get("clear_cache", "false").lower()
    if clear not in ("true", "1", "false", "0"):
        raise bad_request("clear_cache", f"must be true or false, got {clear[:64]!r}")
    limit_s = _timeout_s(request, mode)
    if mode == "keep":
        host.pause()
    else:
        await _no_sample_runs(service, limit_s, abort=mode == "abort")
    if clear in ("true", "1"):
        await _finished(host.call(service.line, _clear_prefix_cache))
    return JSONResponse({"status": "paused", "mode": mode})


async def resume(request: Request) -> Response:
    """Go on generating."""
    _service(request).host.resume()
    return JSONResponse({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    """Show whether generation is paused."""
    return JSONResponse({"is_paused": _service(request).host.is_paused})


async def abort_requests(request: Request) -> Response:
    """End samples with finish_reason "abort": those of the requests in request_ids, without it all."""
    service = _service(request)
    async with json_body(request, service, empty={}) as body:
        names = parse_body(AbortBody, body, service).request_ids
    if names is None:
        service.host.abort_all(service.line)
        return JSONResponse({"status": "aborted"})
    return JSONResponse({"status": "aborted", "requests": service.running.abort(names)})


async def _update_weights(request: Request, root: Path | None, lock: asyncio.Lock) -> Response:
    """Read weights from a directory and generate with them from the next step on.

    Names and shapes are checked before anything changes. Body: weight_dir, and version (default: the next
    one).
    """
    service = _service(request)
    async with json_body(request, service) as body:
        asked = parse_body(WeightsBody, body, service)
    if asked.weight_dir is None:
        raise bad_request("weight_dir", "is missing: name a directory below --weights-root")
    async with lock:
        engine = service.engine
        number = engine.version + 1 if asked.version is None else asked.version
        model = engine.target.model
        try:
            weights = await in_thread(load_weights, asked.weight_dir, root, model)
            done = service.host.swap(service.line, lambda: weights, number)
        except (ValueError, OSError) as error:
            raise bad_request("weight_dir", str(error)) from error
        except Exception as error:
            raise host_error(error) from error
        try:
            await asyncio.wait_for(asyncio.wrap_future(done), UPDATE_S)
        except ValueError as error:
            raise bad_request("weight_dir", str(error)) from error
        except TimeoutError:
            raise ApiError(504, f"no step has ended within {UPDATE_S:g} s", code="timeout") from None
    return JSONResponse({"status": "ok", "weight_version": str(number)})


async def weight_info(request: Request) -> Response:
    """Show the policy version."""
    return JSONResponse({"weight_version": str(_service(request).engine.version)})


async def weight_checker(request: Request) -> Response:
    """Return checksums of all weights, or compare them with given ones.

    Body: action ("checksum" or "compare"), baseline (for compare: what checksum returned).
    """
    service = _service(request)
    async with json_body(request, service) as body:
        asked = parse_body(ChecksumBody, body, service)
        action, baseline = asked.action, asked.baseline
    if action not in ("checksum", "compare"):
        raise bad_request("action", f"must be checksum or compare, got {action[:64]!r}")
    if action == "compare" and not isinstance(baseline, dict):
        raise bad_request("baseline", "must be the object `checksums` of an earlier answer")
    found = await _finished(service.host.call(service.line, lambda engine: checksums(engine.target.model)))
    shown: dict[str, Any] = {"weight_version": str(service.engine.version)}
    if action == "checksum":
        return JSONResponse({**shown, "checksums": found})
    names = sorted({*found, *baseline})
    different = [name[:256] for name in names if found.get(name) != baseline.get(name)]
    return JSONResponse({**shown, "equal": not different, "different": different})


async def reset_prefix_cache(request: Request) -> Response:
    """Drop keys and values that are kept for later requests."""
    service = _service(request)
    await _finished(service.host.call(service.line, _clear_prefix_cache))
    return JSONResponse({"status": "ok"})


async def liveness(request: Request) -> Response:
    """Answer 200 while the engine's thread runs, also while it is paused or ends."""
    error = _service(request).host.error
    if error is not None:
        raise ApiError(500, "the engine's thread has died: start the server again", code="failed")
    return JSONResponse({"status": "alive"})


async def world_size(request: Request) -> Response:
    """Return 1: the number of processes that have a part of the model."""
    return JSONResponse({"world_size": 1})


async def status(request: Request) -> Response:
    """Show the figures of the engine's host."""
    return JSONResponse(_service(request).host.status())


def _service(request: Request) -> HttpService:
    service: HttpService = request.app.state.service
    return service


def _timeout_s(request: Request, mode: str) -> float:
    """Return the parameter timeout_s of a pause."""
    text = request.query_params.get("timeout_s")
    if text is None:
        return UPDATE_S
    if mode == "keep":
        raise bad_request("timeout_s", "needs mode wait or abort: mode keep waits for no sample")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= UPDATE_S:
        raise bad_request("timeout_s", f"must be above 0 and at most {UPDATE_S:g}, got {text[:64]!r}")
    return value


async def _no_sample_runs(service: HttpService, limit_s: float, *, abort: bool) -> None:
    """Start no further samples, and wait until none runs.

    Raises:
        ApiError: The time has passed, another request has changed the pause, or the server is ending.
    """
    try:
        ended = service.host.pause_after_running()
        if abort:
            service.host.abort_all(service.line)
            ended = service.host.pause_after_running()  # ends after the command above
        await asyncio.wait_for(asyncio.wrap_future(ended), limit_s)
    except TimeoutError:
        counts = service.host.status()
        num_running = counts["samples"] - counts["waiting_run"] - counts["waiting_public"]
        message = (
            f"samples that still run after {limit_s:g} s: {num_running}. They go on, and no other one starts:"
            " ask again, or end the pause with /resume, or stop them with mode keep or abort"
        )
        raise ApiError(504, message, code="timeout") from None
    except Exception as error:
        raise host_error(error) from error


def _clear_prefix_cache(engine: Any) -> None:
    engine.clear_prefix_cache()


async def _finished(done: "Future[Any]") -> Any:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(done), UPDATE_S)
    except TimeoutError:
        raise ApiError(504, f"no step has ended within {UPDATE_S:g} s", code="timeout") from None
    except Exception as error:
        raise host_error(error) from error


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_weights(folder: str, root: Path | None, model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Return the weights of a directory that `save_pretrained` wrote, by the names of the model's state_dict.

    Nothing is unpickled: files in PyTorch's own format are not read.

    Args:
        folder: The directory, as an absolute path or below `root`.
        root: Directories below it may be read; None: none.
        model: The model that they are for.

    Raises:
        ValueError: The directory may not be read, has no weights, or they do not fit the model or are not
            finite.
    """
    path, top = _allowed(folder, root)
    kind: Any = type(model)
    try:
        given = _tensors(path, top)
    except SafetensorError as error:
        raise ValueError(f"cannot be read: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot be read: {Path(str(error.filename)).name}: {error.strerror}") from error
    try:
        loaded, found = kind.from_pretrained(
            None,  # no file is read by any name but those that were checked
            state_dict=given,
            config=model.config,
            generation_config=model.generation_config,  # weights alone need no file of it
            dtype=model.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # weights of other kinds fail in many ways
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot be read: {first}") from error
    wrong = [f"no weights for {name}" for name in sorted(found["missing_keys"])]
    wrong += [f"unknown weights {name}" for name in sorted(found["unexpected_keys"])]
    wrong += [
        f"{name} with shape {tuple(given)}, expected {tuple(own)}"
        for name, given, own in sorted(found["mismatched_keys"])
    ]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(f"does not fit the served model: it has {wrong[0]}{more}")
    weights: dict[str, Tensor] = loaded.state_dict()
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"has values in {name} that are not finite")
    return weights


def _tensors(folder: Path, top: Path) -> dict[str, Tensor]:
    """Return the tensors in the files of a directory, which must lie below `top`."""
    whole, index = folder / WEIGHTS, folder / INDEX
    if not whole.exists() and not index.exists():
        raise ValueError(f"has no weights: {folder.name} must have the file {WEIGHTS} or {INDEX}")
    tensors: dict[str, Tensor] = {}
    for path in [whole] if whole.exists() else read_index(index, top):
        with opened_below(path, top) as opened:
            tensors.update(load_file(opened))
    return tensors


def _allowed(folder: str, root: Path | None) -> tuple[Path, Path]:
    """Return a directory below `root`, and `root`, all links followed."""
    if root is None:
        raise ValueError("cannot be read: the server was started without --weights-root")
    top = root.resolve()
    try:
        path = (top / folder).resolve()
        is_directory = path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"is no path: {reason}") from None
    if not path.is_relative_to(top) or path == top:
        raise ValueError("must be a directory below --weights-root of the server")
    if not is_directory:
        raise ValueError("is no directory at the server")
    check_folder(path, top)
    return path, top


def checksums(model: torch.nn.Module) -> dict[str, str]:
    """Return 32 hexadecimal digits of BLAKE2b over shape, dtype and bytes of each tensor of a model."""
    found = {}
    for name, tensor in model.state_dict().items():
        digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        found[name] = digest.hexdigest()
    return found
