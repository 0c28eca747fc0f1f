"""Lines of policy versions at a server: each has an engine of its own, and one author.

Versions are checked when they arrive, kept for others, and given to the engine of their line.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import torch
from torch import Tensor

from aedit.proto.rpc import SECRET_CHARS, Caller, Limits, Refusal, Service, is_author
from aedit.proto.versions import (
    LineUnknown,
    Manifest,
    Patterns,
    VersionLayout,
    VersionsCore,
    VersionStore,
    versions_service,
)
from aedit.spec_rollout.engine import Engine, EngineSpeed, SpeedMeter
from aedit.spec_rollout.server.host import EngineHost
from aedit.spec_rollout.server.host_line import OnNewVersion
from aedit.types import check

CLOSE_S = 60.0
_TORCH = {
    "bf16": ("<i2", torch.bfloat16),
    "fp32": ("<f4", torch.float32),
    "fp64": ("<f8", torch.float64),
}


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Limits of the streams of trainers, and of their lines of policy versions."""

    streams: int = 64
    """Streams at a time, including those that have not sent Open."""
    streams_per_host: int = 48
    """Streams of one host at a time: none takes all places."""
    waiting: int = 1024
    """Samples of one stream beyond the rows of its engine."""
    lines: int = 4
    """Lines of trainers at a time. Each one takes memory for its engine and for its newest versions."""
    open_s: float = 10.0
    """Time until Open has come, and longest wait for another line that is being opened."""
    silent_s: float = 10.0
    """Timeout of a stream from which nothing comes. Trainers send Beat every 2 s."""
    stall_s: float = 10.0
    """Timeout of a trainer that takes no message; it is cut off."""
    unsent_bytes: int = 16 << 20
    """Memory for what waits to be sent to one trainer. Beyond it the trainer is cut off."""
    figures_s: float = 0.5
    """Interval of Figures."""
    version_s: float = 120.0
    """Longest wait of a sample for the policy version that it begins with."""
    line_idle_s: float = 120.0
    """Seconds until a line that no stream uses is closed, unless another one needs its place before."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check(getattr(self, name) > 0, name, "must be above 0", getattr(self, name))


class LineEngine(Protocol):
    """Engine of a line, with what happens around its steps."""

    @property
    def engine(self) -> Engine:
        """Return the engine."""

    @property
    def drafter_version(self) -> int:
        """Return the number of the learned drafter in use; 0 without one."""

    def between_steps(self) -> None:
        """Adopt a newer drafter. Called in the engine's thread before each step."""

    def close(self) -> None:
        """Take note that the line is closed and its engine is gone."""


@dataclass(slots=True, eq=False)
class TrainerLine:
    """A line that is open here."""

    name: str
    made: LineEngine
    secret: str
    """Secret of the author; empty for a line whose versions this server fetches by itself."""
    on_new_version: OnNewVersion = "recompute"
    num_streams: int = 0
    used_s: float = 0.0
    """Time at which the last stream left it."""
    replace: Callable[[], None] | None = None
    """Ends the stream of the author."""
    more_figures: Callable[[], Mapping[str, float]] = dict
    """Returns further totals of `figures`."""
    _meter: SpeedMeter = field(default_factory=SpeedMeter)
    _measured: tuple[int, int, int, float] = (0, 0, 0, 0.0)

    @property
    def engine(self) -> Engine:
        """Return the engine."""
        return self.made.engine

    def before_step(self) -> None:
        """Measure the last step. Called in the engine's thread before the next one."""
        meters = self.engine.meters
        steps, rows, tokens, total_s = self._measured
        now = meters.num_steps, meters.num_rows, meters.num_tokens, meters.total_s
        if now[0] == steps + 1 and now[2] > tokens:
            num_live = now[1] - rows
            self._meter.add(num_live, (now[3] - total_s) * num_live / (now[2] - tokens))
        self._measured = now
        self.made.between_steps()

    def speed(self) -> EngineSpeed | None:
        """Return the measured time of a step; None before the first one."""
        return self._meter.speed()

    def drafter_version(self) -> int:
        """Return the number of the learned drafter in use."""
        return self.made.drafter_version

    def figures(self) -> dict[str, Any]:
        """Return totals of the engine by name."""
        meters = self.engine.meters
        return {
            **meters.speed_up.figures(),
            "rollout_tokens": meters.num_tokens,
            "rollout_s": meters.total_s,
            "passes": meters.num_passes,
            "draft_s": meters.draft_s,
            "plain_s": meters.plain_s,
            "plain_tokens": meters.plain_tokens,
            "drafted_tokens": meters.drafted_tokens,
            "drafted_passes": meters.drafted_passes,
            "arms": dict(meters.arms),
            **self.more_figures(),
        }


def _log_failure(manifest: Manifest, error: BaseException) -> None:
    log.error("version %d of line %s is not in use: %s", manifest.serial, manifest.line, error)


def _of_another(name: str) -> Refusal:
    return Refusal(grpc.StatusCode.PERMISSION_DENIED, f"line {name[:64]!r} belongs to another trainer")


def version_tensors(
    layout: VersionLayout, units: Mapping[str, Patterns], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return the parameters of a version by name, as copies in the engine's dtype on its device."""
    number, stored = _TORCH[layout.dtype]
    found = {}
    for unit in layout.layout.units:
        flat = torch.from_numpy(units[unit.name].view(number)).view(stored)
        sizes = [tensor.numel for tensor in unit.tensors]
        for tensor, part in zip(unit.tensors, torch.split(flat, sizes), strict=True):
            found[tensor.name] = part.view(tensor.shape).to(device=device, dtype=dtype, copy=True)
    return found


class TrainerLines:
    """All lines of a server, and their policy versions. Any thread may call."""

    def __init__(
        self,
        host: EngineHost,
        make: Callable[[str], LineEngine],
        layout: VersionLayout,
        limits: StreamLimits,
        *,
        ring: int,
        max_lines: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the table.

        Args:
            host: Runs the engines.
            make: Returns a new engine for the line of this name. Its weights may be any.
            layout: Units and dtype of all versions.
            limits: Number of lines of trainers, and how long an unused one is kept.
            ring: Newest versions of each line that are kept.
            max_lines: Lines that may be open in all.
            clock: Monotonic seconds.
        """
        self.store = VersionStore(layout, ring=ring, max_lines=max_lines)
        self.failed: Callable[[Manifest, BaseException], None] = _log_failure
        """Called with a version that could not be given to its engine."""
        self._versions = VersionsCore(self.store, self._may_author, self.arrived)
        self._host, self._make, self._limits, self._clock = host, make, limits, clock
        self._changing = threading.Lock()
        """Held while a line is opened or closed, which may take seconds."""
        self._lock = threading.Lock()
        self._lines: dict[str, TrainerLine] = {}

    def service(self, limits: Limits | None = None) -> Service:
        """Return the service `Versions`, in which only the author of a line may write. limits: per peer."""
        return versions_service(self._versions, limits)

    def arrived(self, manifest: Manifest) -> None:
        """Let the engine of its line generate with a version that is complete."""
        try:
            with self._lock:
                line = self._lines[manifest.line]
            done = self._host.swap(
                line.name, lambda: self._tensors(manifest), manifest.serial, line.on_new_version
            )
        except (LookupError, RuntimeError, ValueError) as error:
            self.failed(manifest, error)
            return
        done.add_done_callback(lambda future: self._swapped(manifest, future))

    def open_own(self, name: str) -> TrainerLine:
        """Open a line whose versions this server fetches by itself. It stays open."""
        with self._changing:
            return self._open(name, "")

    @contextmanager
    def used(
        self, name: str, secret: str, on_new_version: OnNewVersion, replace: Callable[[], None]
    ) -> Iterator[TrainerLine]:
        """Return a context in which a stream uses a line, which is opened if it is not there.

        Args:
            name: Of the line.
            secret: Of the caller; it becomes that of the author if the line is new.
            on_new_version: Of the stream: recompute or finish.
            replace: Ends this stream when a newer one of the same author comes.

        Raises:
            Refusal: The line belongs to another author, there is no room for it, or its engine cannot end
                samples with their old version.
        """
        if not self._changing.acquire(timeout=self._limits.open_s):
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "another line is being opened: try again later")
        try:
            line = self._found_or_opened(name, secret)
            if on_new_version == "finish" and not line.engine.keeps_old_versions:
                raise Refusal(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    'the engine here has one version at a time: set rl.on_new_version = "recompute"',
                )
            with self._lock:
                older = line.replace if line.secret else None
                line.num_streams += 1
                if line.secret:
                    line.replace, line.on_new_version = replace, on_new_version
        finally:
            self._changing.release()
        if older is not None:
            older()
        try:
            yield line
        finally:
            with self._lock:
                line.num_streams -= 1
                line.used_s = self._clock()
                if line.replace is replace:
                    line.replace = None

    def all(self) -> list[TrainerLine]:
        """Return the open lines."""
        with self._lock:
            return list(self._lines.values())

    def close_idle(self) -> None:
        """Close lines that no stream has used for a while. Does nothing while a line is being opened."""
        if not self._changing.acquire(blocking=False):
            return
        try:
            before_s = self._clock() - self._limits.line_idle_s
            for line in self._unused():
                if line.used_s <= before_s:
                    self._close(line)
        finally:
            self._changing.release()

    def _tensors(self, manifest: Manifest) -> dict[str, Tensor]:
        target = self._host.engine(manifest.line).target
        with self.store.hold(manifest.line, manifest.serial) as units:
            return version_tensors(self.store.layout, units, target.dtype, target.device)

    def _swapped(self, manifest: Manifest, done: "Future[None]") -> None:
        error = done.exception()
        if error is not None and not isinstance(error, LineUnknown):
            self.failed(manifest, error)

    def _may_author(self, name: str, caller: Caller) -> bool:
        """Return true for the author of a line.

        Raises:
            Refusal: The line is not open, or belongs to another author.
        """
        with self._lock:
            line = self._lines.get(name)
        if line is None:
            raise Refusal(
                grpc.StatusCode.NOT_FOUND, f"line {name[:64]!r} is not open here: open a stream for it first"
            )
        if not is_author(line.secret, caller.secret):
            raise _of_another(name)
        return True

    def _found_or_opened(self, name: str, secret: str) -> TrainerLine:
        with self._lock:
            line = self._lines.get(name)
        if line is not None:
            if line.secret and not is_author(line.secret, secret):
                raise _of_another(name)
            return line
        if len(secret) != SECRET_CHARS:
            raise Refusal(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a new line needs a secret of {SECRET_CHARS} characters in the metadata aedit-author",
            )
        self._make_room()
        return self._open(name, secret)

    def _make_room(self) -> None:
        """Close the line that has been unused for longest if there is no room for another one."""
        with self._lock:
            num_lines = sum(bool(line.secret) for line in self._lines.values())
        if num_lines < self._limits.lines:
            return
        unused = self._unused()
        if not unused:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"this server has {num_lines} lines of trainers, which is its limit (--serve.lines)",
            )
        self._close(min(unused, key=lambda line: line.used_s))

    def _unused(self) -> list[TrainerLine]:
        with self._lock:
            return [line for line in self._lines.values() if line.secret and not line.num_streams]

    def _open(self, name: str, secret: str) -> TrainerLine:
        try:
            self.store.open(name)
            made = self._make(name)
            line = TrainerLine(name, made, secret, used_s=self._clock())
            self._host.open(name, lambda: made.engine, between_steps=line.before_step)
        except ValueError as error:
            self._versions.close_line(name)
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        except BaseException:
            self._versions.close_line(name)
            raise
        with self._lock:
            self._lines[name] = line
        return line

    def _close(self, line: TrainerLine) -> None:
        with self._lock:
            self._lines.pop(line.name, None)
        self._host.close_line(line.name)
        deadline_s = time.monotonic() + CLOSE_S
        while line.name in self._host.lines() and time.monotonic() < deadline_s:  # until its step has ended
            time.sleep(0.01)
        self._versions.close_line(line.name)
        line.made.close()
