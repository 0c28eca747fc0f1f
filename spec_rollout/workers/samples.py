"""The samples that a rank has requested from its workers: their text so far, and who has them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aedit.spec_rollout.migration import SampleKey, UnfinishedSample
from aedit.spec_rollout.sampling import Prompt, Rollout
from aedit.spec_rollout.workers.channel import Message


@dataclass(slots=True)
class Sample:
    """A requested sample."""

    rollout: Rollout
    worker: int | None = None
    """Index of the worker that has it; None: it waits for one."""
    unreported: int = 0
    """Tokens that its worker has drawn and not reported yet, as far as is known."""
    deaths: int = 0
    """Workers that have died with it since its last token."""
    left: set[int] = field(default_factory=set)
    """Indices of servers that did not advance it in time: it is not given to them again."""


class Samples:
    """Unfinished samples by key, in the order of their requests."""

    def __init__(self) -> None:
        self._samples: dict[SampleKey, Sample] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def __contains__(self, key: SampleKey) -> bool:
        return key in self._samples

    def __getitem__(self, key: SampleKey) -> Sample:
        return self._samples[key]

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Add samples without a worker."""
        for prompt in prompts:
            self._samples[prompt.key] = Sample(prompt.to_rollout())

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()

    def waiting(self) -> list[SampleKey]:
        """Return the keys of samples that no worker has."""
        return [key for key, sample in self._samples.items() if sample.worker is None]

    def prompt(self, key: SampleKey) -> Prompt:
        """Return a prompt that continues the sample after its tokens so far. It shares nothing with it."""
        rollout = self._samples[key].rollout
        if not rollout.tokens:
            return rollout.prompt
        return replace(rollout.prompt, partial=rollout.to_prompt().to_rollout())

    def prompts(self) -> list[Prompt]:
        """Return prompts that continue all samples."""
        return [self.prompt(key) for key in self._samples]

    def lengths(self) -> list[int]:
        """Return the lengths of the samples that have tokens."""
        found = (len(each.rollout.tokens) + each.unreported for each in self._samples.values())
        return [length for length in found if length]

    def unfinished(self, key: SampleKey) -> UnfinishedSample:
        """Return the sample as the plan of migrations sees it."""
        sample = self._samples[key]
        prompt, emitted = sample.rollout.prompt, len(sample.rollout.tokens) + sample.unreported
        most = prompt.sampling.max_new_tokens
        return UnfinishedSample(key, len(prompt.tokens) + emitted, emitted, most, prompt.group)

    def extend(
        self, worker: int, message: Message, cancelled: Collection[SampleKey], server: str = ""
    ) -> list[Rollout]:
        """Append the tokens that `worker` reports and return the samples that have finished.

        Reports on samples that are no longer the worker's are left out: another one continues them. So are
        those of `cancelled` keys, which may have been added again since. server: name of a worker that is
        one.
        """
        for rollout, number, tokens, logprobs, versions, top, passes in message["tokens"]:
            sample = self._samples.get((rollout, number))
            if sample is None or sample.worker != worker or (rollout, number) in cancelled:
                continue
            text = sample.rollout
            text.note_server(server)
            text.tokens += tokens
            text.logprobs += logprobs
            text.versions += versions
            text.top_logprobs += [tuple((token, value) for token, value in place) for place in top]
            text.passes = passes
            sample.deaths = sample.unreported = 0
        finished = []
        for rollout, number, reason, passes in message["ended"]:
            key = rollout, number
            if key in self._samples and self._samples[key].worker == worker and key not in cancelled:
                sample = self._samples.pop(key)
                sample.rollout.finish_reason, sample.rollout.passes = reason, passes
                finished.append(sample.rollout)
        return finished

    def note_progress(self, worker: int, progress: Iterable[tuple[int, int, int]]) -> None:
        """Note (rollout, sample, tokens) that `worker` has drawn and will report later."""
        for rollout, number, tokens in progress:
            sample = self._samples.get((rollout, number))
            if sample is not None and sample.worker == worker:
                sample.unreported = tokens

    def release(self, key: SampleKey) -> None:
        """Note that no worker has the sample."""
        self._samples[key].worker, self._samples[key].unreported = None, 0

    def take_back(self, keys: Sequence[SampleKey], reason: str, limit: int | None) -> None:
        """Take samples back from a worker that has died.

        Args:
            keys: Samples of the worker.
            reason: Of its death.
            limit: Workers that may die with a sample, without a token in between. None: this one had not
                begun with them.

        Raises:
            RuntimeError: More than `limit` have.
        """
        for key in keys:
            self.release(key)
            self._samples[key].deaths += limit is not None
        worst = max((self._samples[key] for key in keys), key=lambda each: each.deaths, default=None)
        if worst is not None and limit is not None and worst.deaths > limit:
            raise RuntimeError(
                f"sample {worst.rollout.prompt.name}: {worst.deaths} rollout workers have ended with it "
                f"without a further token; the last one: {reason}"
            )


def total(figures: Iterable[Mapping[str, float | Mapping[str, int]]]) -> dict[str, object]:
    """Return the sums of the workers' figures, by name."""
    sums: dict[str, float] = {}
    arms: dict[str, int] = {}
    for each in figures:
        for name, value in each.items():
            if isinstance(value, Mapping):
                for arm, count in value.items():
                    arms[arm] = arms.get(arm, 0) + count
            else:
                sums[name] = sums.get(name, 0) + value
    return {**sums, "arms": arms}
