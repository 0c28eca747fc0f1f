"""Growing answers of a request's samples: text, tokens and log-probabilities since the last look."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aedit.spec_rollout.http.answer_text import AnswerText
from aedit.spec_rollout.http.feeds import SampleFeed
from aedit.spec_rollout.http.text_codec import TextCodec
from aedit.spec_rollout.sampling import Sampling, TopLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """News of one answer. Log-probabilities cover the tokens; the text may lag behind them."""

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[TopLogprobs]
    offsets: Sequence[int]
    """Place of each token in the text of the answer, empty unless asked for."""
    finish_reason: str | None


NO_NEWS = Part(text="", tokens=(), logprobs=(), tops=(), offsets=(), finish_reason=None)


class Answer:
    """One growing answer."""

    def __init__(
        self, codec: TextCodec, prompt: Sequence[int], sampling: Sampling, options: "AnswerOptions"
    ) -> None:
        self._sampling, self._options = sampling, options
        self.text = AnswerText(
            codec, prompt, sampling.stop_strings, kept=options.kept_stops, skip_special=options.skip_special
        )
        self._num_read = 0
        self.is_over = False

    def read(self, sample: SampleFeed) -> Part:
        """Return what is new of a sample."""
        ends = sample.is_over  # before its state, as the engine writes in this order
        rollout, count = sample.state
        start, self._num_read = self._num_read, count
        if rollout is None:
            return NO_NEWS
        tokens, offset = rollout.tokens[start:count], len(self.text.offsets)
        is_stopped = ends and rollout.finish_reason == "stop"
        is_stop_token = is_stopped and rollout.tokens[-1] in self._sampling.stop_tokens
        self._add(tokens[:-1] if is_stop_token else tokens)
        if is_stop_token:
            self.text.offsets.append(len(self.text.text))
        if ends:
            self.text.finish(by_stop=is_stopped and not is_stop_token)
            self.is_over = True
        return Part(
            text=self.text.take(),
            tokens=tokens,
            logprobs=rollout.logprobs[start:count],
            tops=rollout.top_logprobs[start:count],
            offsets=self.text.offsets[offset:] if self._options.offsets else (),
            finish_reason=(rollout.finish_reason or "abort") if ends else None,
        )

    def _add(self, tokens: Sequence[int]) -> None:
        if not (self._options.offsets or self._sampling.stop_strings):
            self.text.add(tokens)
            return
        for token in tokens:  # alone: its place is asked for, or a stop string may end in it
            self.text.add([token])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Settings of the shown text."""

    skip_special: bool = True
    """Leave special tokens out of the text."""
    offsets: bool = False
    """Find the place of each token in the text."""
    kept_stops: tuple[str, ...] = ()
    """Stop strings that belong to the text."""


def usage(num_prompt: int, num_new: int) -> dict[str, Any]:
    """Return the object `usage`."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }
