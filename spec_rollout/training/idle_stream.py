"""Drafter training in a thread on a low-priority stream of the node's own GPU.

A running kernel cannot be interrupted, so the training is split into short microbatches with a check of a
flag between them, and at most one is queued. CUDA has no priority below the default: work that must go first
runs on a stream of priority -1, as captured graphs do (graphs.py).
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aedit.spec_rollout.training.publishing import Publication, all_finite
from aedit.spec_rollout.training.trainer_memory import Training
from aedit.spec_rollout.training.windows import Windows

NOTHING_TO_LEARN_S = 0.02
CLOSE_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """Tensors that the node hands to the thread."""

    tensors: Mapping[str, Tensor]
    number: int
    """Version of a policy; for a drafter, number of the newest publication before it."""
    copied: "torch.cuda.Event | None" = None
    """Reached when the copies are complete."""


class StreamTraining:
    """`IdleWork` by a thread of this process. Also a context manager: leaving it ends the thread.

    For CUDA. On a CPU use `DrafterTraining`: a thread of the node's process would slow down the node's steps
    while a microbatch runs.
    """

    def __init__(
        self,
        training: Training,
        device: torch.device,
        *,
        drafter: Mapping[str, Tensor],
        policy: Mapping[str, Tensor],
        version: int = 0,
    ) -> None:
        """Start the thread.

        Args:
            training: What is trained.
            device: Device of the training.
            drafter: Tensors to be trained.
            policy: The policy's embedding and head, which are read in place until `update_policy`.
            version: Version of the policy.
        """
        self._training, self._device, self._drafter = training, device, dict(drafter)
        self._policy, self._current_policy = _Given(policy, version), _Given(policy, -1)
        self._offered = self._current_offer = _Given({}, 0)
        self._lock = threading.Lock()
        self.windows = Windows()
        self._published: tuple[Publication, torch.cuda.Event | None] | None = None
        self._steps, self._refused, self._error = 0, 0, ""
        self._used_s = 0.0
        self._paused = self._closing = False
        self._open = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drafter-stream", daemon=True)
        self._thread.start()

    @contextmanager
    def window(self, cause: str) -> Iterator[None]:
        """Let microbatches start inside the context. Leaving it waits for none."""
        with self._lock:
            began_s = time.monotonic()
            self.windows.enter(began_s)
            self._update()
        try:
            yield
        finally:
            with self._lock:
                self.windows.leave(cause, began_s, time.monotonic(), self.used_s)
                self._update()

    def newest(self, after: int = 1) -> Publication | None:
        """Return the newest drafter if its number is above `after`, else None.

        On CUDA the caller's current stream waits for the copy, the host does not.
        """
        found = self._published
        if found is None or found[0].number <= after:
            return None
        if found[1] is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(found[1])
            for tensor in found[0].tensors.values():
                tensor.record_stream(stream)
        return found[0]

    def update_policy(self, policy: Mapping[str, Tensor], version: int) -> None:
        """Use copies of this embedding and head of the policy from now on; see `DrafterTraining`."""
        self._policy = self._copied(policy, version)

    def offer(self, drafter: Mapping[str, Tensor]) -> int:
        """Continue from copies of these tensors; return the number of the newest publication so far."""
        number = self._published[0].number if self._published else 1
        self._offered = self._copied(drafter, number)
        return number

    @property
    def used_s(self) -> float:
        """Return the seconds of the finished microbatches.

        Processor time of the thread on a CPU; elapsed time on a GPU, where each microbatch is synchronized.
        """
        return self._used_s

    def pause(self) -> None:
        """Start no microbatches until `unpause`."""
        with self._lock:
            self._paused = True
            self._update()

    def unpause(self) -> None:
        """Start microbatches in windows again."""
        with self._lock:
            self._paused = False
            self._update()

    def status(self) -> dict[str, Any]:
        """Return the state by name; see `DrafterTraining.status`."""
        with self._lock:
            idle_s, by_cause = self.windows.idle_s(time.monotonic()), dict(self.windows.by_cause)
            used = dict(self.windows.used_by_cause)
        return {
            "state": "failed" if self._error else "training" if self._open.is_set() else "stopped",
            "error": self._error,
            "windows": self.windows.count,
            "idle_s": idle_s,
            "idle_by_cause_s": by_cause,
            "used_by_cause_s": used,
            "cpu_s": self.used_s,
            "steps": self._steps,
            "refused": self._refused,
            "published": self._published[0].number - 1 if self._published else 0,
            "training": dict(self._training.metrics()),
        }

    def close(self) -> None:
        """End the thread.

        Raises:
            TimeoutError: A microbatch does not end.
        """
        with self._lock:
            self._closing = True
            self._open.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"a microbatch of the drafter's training did not end within {CLOSE_S:g} s")

    def __enter__(self) -> "StreamTraining":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _copied(self, tensors: Mapping[str, Tensor], number: int) -> "_Given":
        copies = {name: tensor.detach().to(self._device, copy=True) for name, tensor in tensors.items()}
        if self._device.type != "cuda":
            return _Given(copies, number)
        return _Given(copies, number, torch.cuda.current_stream(self._device).record_event())

    def _update(self) -> None:
        """Set the flag that the thread checks. Called under the lock."""
        if (self.windows.num_open and not self._paused) or self._closing:
            self._open.set()
        else:
            self._open.clear()

    # --- in the thread

    def _run(self) -> None:
        try:
            with self._on_stream():
                self._open.wait()
                if not self._closing:
                    self._update_policy()
                    self._training.begin(self._drafter)
                while self._open.wait() and not self._closing:
                    if not self._run_once():
                        time.sleep(NOTHING_TO_LEARN_S)
        except Exception as error:
            # The node continues without training; `status` shows the error.
            self._error = f"{type(error).__name__}: {error}"

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._device.type != "cuda":
            return nullcontext()
        # 0 is the lowest priority and the default of every stream.
        return torch.cuda.stream(torch.cuda.Stream(self._device, priority=0))  # type: ignore[no-untyped-call]

    def _run_once(self) -> bool:
        began_s = self._processor_s()
        self._update_policy()
        self._take_offer()
        learned = self._training.microbatch()
        if learned:
            self._steps += 1
            self._publish()
        if self._device.type == "cuda":
            # Releases the GIL; at most this microbatch is queued when a window is left.
            torch.cuda.current_stream(self._device).synchronize()
        self._used_s += self._processor_s() - began_s
        return learned

    def _processor_s(self) -> float:
        return time.monotonic() if self._device.type == "cuda" else time.thread_time()

    def _update_policy(self) -> None:
        policy = self._policy
        if policy is not self._current_policy:
            self._wait_for(policy)
            self._training.set_policy(policy.tensors, policy.number)
            self._current_policy = policy

    def _take_offer(self) -> None:
        offered = self._offered
        if offered is not self._current_offer:
            self._wait_for(offered)
            self._training.begin(offered.tensors)
            self._current_offer = offered

    def _wait_for(self, given: "_Given") -> None:
        if given.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(given.copied)

    def _publish(self) -> None:
        better = self._training.to_publish()
        if better is None:
            return
        if not all_finite(better):
            self._refused += 1
            return
        number = self._published[0].number + 1 if self._published else 2
        copies = {name: tensor.detach().clone() for name, tensor in better.items()}
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._published = Publication(number, self._current_policy.number, copies), event
