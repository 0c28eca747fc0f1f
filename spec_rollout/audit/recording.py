"""Recorded rollouts of servers as JSON lines, with the weights of the newest policy versions beside them."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aedit.proto.rpc import RolloutStatement
from aedit.spec_rollout.audit.statement import (
    HeldRollout,
    Origin,
    is_signed,
    spans_of,
    versions_of,
)
from aedit.spec_rollout.sampling import ROLLOUT_PROTOCOL, decode_sampling
from aedit.weights import save_tensors

FILE = "rollouts.jsonl"
OLDER = "rollouts.1.jsonl"
"""The file before the last change of files; an older one is deleted."""
CONFIG = "config.json"
"""Configuration of the model, beside the weights."""


def weights_name(version: int) -> str:
    """Return the file name of a version's weights."""
    return f"version-{version}.safetensors"


class Recording:
    """Writes rollouts and weights into a directory. A full disk costs the recording, not the run."""

    def __init__(self, directory: Path, *, max_bytes: int, versions: int, model: Mapping[str, Any]) -> None:
        """Begin a file, or continue one.

        Args:
            directory: Created if it does not exist.
            max_bytes: Upper limit of the two files of rollouts together.
            versions: Newest policy versions whose weights are kept; 0: none.
            model: Configuration of the model.
        """
        self._directory, self._half_bytes, self._versions = directory, max_bytes // 2, versions
        self._error = ""
        self._do(lambda: self._begin(model))

    def rollout(self, held: HeldRollout) -> None:
        """Append a rollout."""
        self._do(lambda: self._append(to_line(held)))

    def weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Write the weights of a policy version, torch tensors by name, and delete those of old ones."""
        if self._versions:
            self._do(lambda: self._write(version, tensors))

    def _begin(self, model: Mapping[str, Any]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / CONFIG).write_text(json.dumps(dict(model), indent=1) + "\n")

    def _append(self, line: str) -> None:
        path = self._directory / FILE
        if path.exists() and path.stat().st_size + len(line) > self._half_bytes:
            path.replace(self._directory / OLDER)
        if len(line) <= self._half_bytes:
            with path.open("a") as file:
                file.write(line)

    def _write(self, version: int, tensors: Mapping[str, Any]) -> None:
        path = self._directory / weights_name(version)
        partial = path.with_suffix(".partial")
        save_tensors(tensors, partial)
        partial.replace(path)
        for old in sorted(weights_files(self._directory))[: -self._versions]:
            (self._directory / weights_name(old)).unlink()

    def _do(self, action: Any) -> None:
        """Run an action; print the first error of the disk and leave out what cannot be written."""
        try:
            action()
        except OSError as error:
            if not self._error:
                print(f"aedit: rollouts are not recorded: {error}", file=sys.stderr, flush=True)
            self._error = str(error)


def weights_files(directory: Path) -> dict[int, Path]:
    """Return the files of weights in a directory by version."""
    found = {}
    for path in directory.glob("version-*.safetensors"):
        number = path.stem.removeprefix("version-")
        if number.isdecimal():
            found[int(number)] = path
    return found


def to_line(held: HeldRollout) -> str:
    """Return a rollout as a line of JSON."""
    fields = {
        "protocol": ROLLOUT_PROTOCOL,
        "server": held.server,
        "public_key": held.public_key.hex(),
        "key": held.key,
        "prompt": held.prompt,
        "sampling": held.sampling.decode(),
        "tokens": held.tokens,
        "logprobs": held.logprobs,
        "spans": spans_of(held.versions),
        "start": held.start,
        "finish_reason": held.finish_reason,
        "statement": held.statement.hex(),
        "signature": held.signature.hex(),
    }
    return json.dumps(fields, separators=(",", ":")) + "\n"


def of_line(line: str) -> HeldRollout:
    """Return the rollout that `to_line` wrote.

    Raises:
        ValueError: The line is not one of these.
    """
    try:
        found = json.loads(line)
        rollout, sample = map(_integer, found["key"])
        sampling = found["sampling"].encode()
        decode_sampling(sampling)
        held = HeldRollout(
            server=str(found["server"]),
            public_key=bytes.fromhex(found["public_key"]),
            key=(rollout, sample),
            prompt=tuple(map(_integer, found["prompt"])),
            sampling=sampling,
            tokens=tuple(map(_integer, found["tokens"])),
            logprobs=tuple(map(float, found["logprobs"])),
            versions=tuple(
                versions_of([(_integer(v), _integer(a), _integer(b)) for v, a, b in found["spans"]])
            ),
            start=_integer(found["start"]),
            finish_reason=str(found["finish_reason"]),
            statement=bytes.fromhex(found["statement"]),
            signature=bytes.fromhex(found["signature"]),
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"no recorded rollout ({type(error).__name__}: {error})") from None
    if (protocol := found.get("protocol", 1)) != ROLLOUT_PROTOCOL:
        raise ValueError(
            f"a rollout of protocol {protocol}, expected {ROLLOUT_PROTOCOL}: audit it with the release of"
            " aedit that recorded it"
        )
    return held


def read_recording(path: Path) -> Iterator[HeldRollout]:
    """Yield the rollouts of a file.

    Raises:
        ValueError: A line is not a recorded rollout; it names the line.
        OSError: The file cannot be read.
    """
    with path.open(errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                yield of_line(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None


def signature_error(held: HeldRollout) -> str:
    """Return what is wrong with a rollout's signature; empty if it fits, or there is none."""
    if not (held.statement or held.signature):
        return ""
    statement = RolloutStatement()
    try:
        statement.ParseFromString(held.statement)
    except Exception:  # protobuf raises several kinds
        return "its statement is damaged"
    if not is_signed(statement, held.signature, held.public_key):
        return "its signature does not fit its statement"
    same = held.statement_of(Origin(statement.run, statement.line, held.server))
    return "" if same == statement else "it is not the rollout that was signed"


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 63) <= value < 1 << 63:
        raise TypeError(f"{value!r} is no integer")
    return value
