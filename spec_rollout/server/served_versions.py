"""Policy versions of all lines of a server: checked when they arrive, kept for others, given to an engine."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from aedit.proto.rpc import Caller, Limits, Service
from aedit.proto.versions import (
    LineUnknown,
    Manifest,
    Patterns,
    VersionLayout,
    VersionsCore,
    VersionStore,
    versions_service,
)
from aedit.spec_rollout.server.host import EngineHost
from aedit.spec_rollout.server.trainer_lines import TrainerLines

_TORCH = {
    "bf16": ("<i2", torch.bfloat16),
    "fp32": ("<f4", torch.float32),
    "fp64": ("<f8", torch.float64),
}


log = logging.getLogger(__name__)


class ServedVersions:
    """Versions of the lines of a server. Any thread may call. Call `serve` before anything else."""

    def __init__(self, layout: VersionLayout, host: EngineHost, *, ring: int, max_lines: int) -> None:
        """Make an empty store.

        Args:
            layout: Units and dtype of all versions.
            host: Runs the engines.
            ring: Newest versions of each line that are kept.
            max_lines: Lines that may be open.
        """
        self.store = VersionStore(layout, ring=ring, max_lines=max_lines)
        self.failed: Callable[[Manifest, BaseException], None] = _log_failure
        """Called with a version that could not be given to its engine."""
        self._host = host
        self._core: VersionsCore | None = None
        self._lines: TrainerLines | None = None

    def serve(self, lines: TrainerLines, limits: Limits | None = None) -> Service:
        """Return the service `Versions`, in which only the author of a line may write. limits: per peer."""

        def may_author(line: str, caller: Caller) -> bool:
            lines.authored(line, caller.secret)  # its refusal has the reason
            return True

        self._lines = lines
        self._core = VersionsCore(self.store, may_author, self.arrived)
        return versions_service(self._core, limits)

    def open(self, line: str) -> None:
        """Begin to keep versions of a line. Raises ValueError for a wrong name or too many lines."""
        self.store.open(line)

    def close(self, line: str) -> None:
        """Forget the versions of a line, also one that is being received."""
        if self._core is None:
            self.store.close(line)
        else:
            self._core.close_line(line)

    def arrived(self, manifest: Manifest) -> None:
        """Let the engine of its line generate with a version that is complete."""
        assert self._lines is not None
        try:
            line = self._lines.named(manifest.line)
            done = self._host.swap(
                line.name, lambda: self._tensors(manifest), manifest.serial, line.on_new_version
            )
        except (LookupError, RuntimeError, ValueError) as error:
            self.failed(manifest, error)
            return
        done.add_done_callback(lambda future: self._swapped(manifest, future))

    def _tensors(self, manifest: Manifest) -> dict[str, Tensor]:
        target = self._host.engine(manifest.line).target
        with self.store.hold(manifest.line, manifest.serial) as units:
            return version_tensors(self.store.layout, units, target.dtype, target.device)

    def _swapped(self, manifest: Manifest, done: "Future[None]") -> None:
        error = done.exception()
        if error is not None and not isinstance(error, LineUnknown):
            self.failed(manifest, error)


def _log_failure(manifest: Manifest, error: BaseException) -> None:
    log.error("version %d of line %s is not in use: %s", manifest.serial, manifest.line, error)


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
