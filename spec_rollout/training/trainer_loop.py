"""Loop of the trainer process: read the policy, train, publish, save in the background."""

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from aedit.spec_rollout.training.publishing import all_finite
from aedit.spec_rollout.training.trainer_memory import StatusWord, TrainerMemory, TrainerState, Training
from aedit.system import sync_directory

NOTHING_TO_LEARN_S = 0.02
"""Pause in seconds after a call without training data."""


class TrainerLoop:
    """Loop of the trainer process. It may be suspended between any two instructions."""

    def __init__(self, memory: TrainerMemory, training: Training, cpu_start_s: float = 0.0) -> None:
        """Make the loop; `cpu_start_s` is the processor time before the first window."""
        self._cpu_start_s = cpu_start_s
        self._memory, self._status, self._training = memory, memory.trainer_status, training
        self._checkpoints = AsyncCheckpoint(memory.plan.checkpoint) if memory.plan.checkpoint else None
        self._saved_at_s = time.process_time()
        self._policy, self._version, self._offered = 0, 0, 0

    def begin(self) -> None:
        """Read the policy, and continue from the last publication, offer or checkpoint.

        Raises:
            RuntimeError: The shared memory contains no valid drafter or no valid policy.
        """
        self._update_policy()
        given = self._memory.drafter.last_good()
        if self._policy == 0 or given is None:
            raise RuntimeError("the shared memory contains no valid drafter or no valid policy")
        offered = self._memory.offered.newest()
        if offered is not None:
            self._offered = offered.number
        if offered is not None and offered.version >= given.number:
            self._training.begin(offered.tensors)
            return  # the checkpoint is older
        self._training.begin(given.tensors)
        self._resume()

    def run_once(self) -> bool:
        """Run one microbatch, with its publication and checkpoint.

        Returns:
            False if there was nothing to learn.
        """
        self._update_policy()
        self._take_offer()
        learned = self._training.microbatch()
        if learned:
            self._count(StatusWord.STEPS)
            self._publish()
            self._save()
        self._report(learned)
        return learned

    def _resume(self) -> None:
        if self._checkpoints is None:
            return
        try:
            state = self._checkpoints.load()
            if state:
                self._training.resume(state)
        except ValueError as error:
            # Continue from the last publication.
            self._status.checkpoint_error = str(error)

    def _update_policy(self) -> None:
        policy = self._memory.policy.newest(self._policy)
        if policy is not None:
            self._policy, self._version = policy.number, policy.version
            self._training.set_policy(policy.tensors, policy.version)

    def _take_offer(self) -> None:
        offered = self._memory.offered.newest(self._offered)
        if offered is not None:
            self._offered = offered.number
            self._training.begin(offered.tensors)

    def _publish(self) -> None:
        better = self._training.to_publish()
        if better is None:
            return
        if all_finite(better):
            self._memory.drafter.publish(better, self._version)
            self._count(StatusWord.PUBLISHED)
        else:
            self._count(StatusWord.REFUSED)

    def _save(self) -> None:
        if self._checkpoints is None:
            return
        now_s = time.process_time()
        is_due = now_s - self._saved_at_s >= self._memory.plan.checkpoint_every_s
        if is_due and self._checkpoints.save(self._training.state()):
            self._saved_at_s = now_s
        self._status.words[StatusWord.CHECKPOINTS] = self._checkpoints.written
        self._status.words[StatusWord.CHECKPOINTS_FAILED] = self._checkpoints.failed
        if self._checkpoints.failed:
            self._status.checkpoint_error = self._checkpoints.error

    def _report(self, learned: bool) -> None:
        words = self._status.words
        state = TrainerState.TRAINING if learned else TrainerState.NOTHING_TO_LEARN
        if learned or words[StatusWord.STATE] != state:
            self._status.set_metrics(self._training.metrics())
        words[StatusWord.STATE] = state
        words[StatusWord.CPU_US] = round(1e6 * (time.process_time() - self._cpu_start_s))
        self._count(StatusWord.HEARTBEATS)

    def _count(self, word: StatusWord) -> None:
        self._status.words[word] += 1


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
