"""Keys of the samples of one engine: unique among those that run or wait."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from aedit.spec_rollout.sampling import Prompt


class SampleKeys:
    """Assigns keys to prompts without ids, and refuses a key that is in use.

    Two samples with the same key have the same noise. Of one prompt they would be the same text, and count
    twice without a notice.
    """

    def __init__(self) -> None:
        self._used: set[tuple[int, int]] = set()
        self._last = 0

    def assign(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts with keys, all different from each other and from those in use.

        All are in use until `release`.

        Raises:
            ValueError: Two samples have the same key. Nothing has changed.
        """
        given: set[tuple[int, int]] = set()
        for prompt in prompts:
            if prompt.has_key and (prompt.key in self._used or prompt.key in given):
                raise ValueError(
                    f"prompt {prompt.name}: another sample that runs or waits has these ids, "
                    "and both would get the same noise: give each sample ids of its own, or none"
                )
            given.add(prompt.key)
        named = [prompt if prompt.has_key else self._named(prompt, given) for prompt in prompts]
        self._used.update(prompt.key for prompt in named)
        return named

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Let the keys of samples that have left the engine be used again."""
        self._used.difference_update(prompt.key for prompt in prompts)

    def _named(self, prompt: Prompt, given: set[tuple[int, int]]) -> Prompt:
        self._last -= 1
        while (self._last, 0) in self._used or (self._last, 0) in given:
            self._last -= 1
        return replace(prompt, rollout=self._last, sample=0)
