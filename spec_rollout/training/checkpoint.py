"""Checkpoint of drafter training, written in the background.

It contains the trained tensors and their optimizer moments. Embedding and head belong to the policy and are
never saved.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from aedit.system import sync_directory


class AsyncCheckpoint:
    """One checkpoint file that is replaced atomically. A failed write leaves the previous one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = 0
        self.failed = 0
        self.error = ""
        """Why the last write failed; empty if it succeeded."""
        self._thread: threading.Thread | None = None

    def save(self, tensors: Mapping[str, Tensor]) -> bool:
        """Start to write a copy of `tensors` in a thread and return at once.

        Returns:
            False if the previous write is still in progress; nothing is written then.
        """
        if self.is_writing:
            return False
        copies = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
        self._thread = threading.Thread(target=self._write, args=(copies,), name="checkpoint", daemon=True)
        self._thread.start()
        return True

    @property
    def is_writing(self) -> bool:
        """Return true while a write is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Wait until the write in progress has succeeded or failed.

        Raises:
            TimeoutError: It took longer than `timeout_s`.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"{self.path} was not written within {timeout_s:g} s")

    def load(self) -> dict[str, Tensor]:
        """Return the last written tensors; empty if there is no file.

        Raises:
            ValueError: The file cannot be read.
        """
        try:
            return load(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.path} is not a checkpoint of a drafter's training: {error}") from error

    def _write(self, tensors: dict[str, Tensor]) -> None:
        partial = self.path.with_name(self.path.name + ".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.write(save(tensors))
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path)
            sync_directory(self.path.parent)
        except (OSError, SafetensorError, MemoryError) as error:
            self.failed, self.error = self.failed + 1, f"{type(error).__name__}: {error}"
            # The partial file may have filled the disk.
            partial.unlink(missing_ok=True)
        else:
            self.written, self.error = self.written + 1, ""
