"""Interface of the sources of rollouts: an engine in this process, or processes and servers elsewhere."""

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
