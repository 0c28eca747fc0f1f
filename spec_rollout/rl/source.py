"""Interface of the sources of rollouts (an engine here, processes, servers), and how far they run ahead."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from aedit.spec_rollout.sampling import Prompt, Rollout


class RolloutSource(Protocol):
    """Source of the rollouts of one rank. Used by one thread.

    A prompt's (rollout, sample) is the key of its noise: a source may generate it again anywhere, after a
    failure, and the tokens are the same for the same policy versions.
    """

    @property
    def version(self) -> int:
        """Return the newest policy version that the source was given."""

    @property
    def running(self) -> int:
        """Return the number of samples that were added and have not been returned."""

    def update_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Generate with these weights from now on; see `Engine.update_weights`."""

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Request one sample per prompt."""

    def step(self) -> list[Rollout]:
        """Advance by one step, or wait for a short time at most; return the samples that have finished."""

    def pending(self) -> list[Prompt]:
        """Return the requested samples that are not finished, as prompts that continue them."""

    def cancel(self) -> None:
        """End all samples that were added and have not been returned, and forget them."""

    def status(self) -> Mapping[str, Any]:
        """Return counts and times, for metrics."""

    def close(self) -> None:
        """End everything that was started."""


def capacity(
    *, max_running: int, running: int, accepted: int, version: int, staleness: int, batch: int
) -> int:
    """Return the number of samples that may start now, 0 or more.

    min(max_running - running, (eta + v + 1) B - (accepted + running)), AReaL, arXiv:2505.24298, section 5.1.
    If batches are made in the order in which samples start, each sample is trained at most eta versions after
    it started, and none is dropped for its age: at most (eta + v + 1) B samples start up to version v, so
    each of them is in one of the batches up to number eta + v. In the order of finishing there is no such
    bound: a long sample can be overtaken any number of times.

    Args:
        max_running: Samples that can run at a time.
        running: Samples that have started and have not finished.
        accepted: Samples that have finished since the start of the run, trained ones included.
        version: Policy versions so far (v): batches that have been trained.
        staleness: Versions by which a sample may be older than the weights that it trains (eta).
        batch: Samples of a batch (B).
    """
    return max(0, min(max_running - running, (staleness + version + 1) * batch - (accepted + running)))
