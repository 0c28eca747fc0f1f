"""Growing answers of a request's samples: text, tokens and log-probabilities since the last look.

The text has complete characters only and is cut before a stop string. Log-probabilities are shown in the
forms of OpenAI's interfaces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aedit.spec_rollout.http.service import SampleFeed
from aedit.spec_rollout.http.text_codec import TextCodec
from aedit.spec_rollout.sampling import (
    MAX_INCOMPLETE_TOKENS,
    NUM_CONTEXT_TOKENS,
    REPLACEMENT,
    Sampling,
    TopLogprobs,
)

LOWEST = -9999.0
"""Written for minus infinity, which JSON has not; vLLM writes the same."""


class AnswerText:
    """Incremental decoding of one answer.

    The text of a token may depend on those before it: only the last few tokens are decoded each time, after
    some tokens of the prompt at first. Bytes that are no complete character (yet) wait for the next token.
    """

    def __init__(
        self,
        codec: TextCodec,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        *,
        kept: Sequence[str] = (),
        skip_special: bool = True,
    ) -> None:
        """Begin after a prompt.

        Args:
            codec: The tokenizer.
            prompt: Tokens before the answer.
            stops: Stop strings: what may be the beginning of one is held back.
            kept: Those of them that belong to the text, which ends after them.
            skip_special: Leave special tokens out of the text.
        """
        self._codec, self._stops, self._skip_special = codec, tuple(stops), skip_special
        self._kept = frozenset(kept)
        self.text = ""
        """Text of the tokens so far, without incomplete characters."""
        self.offsets: list[int] = []
        """Number of characters of the text before each token that `add` got alone."""
        self._num_taken = 0
        self._num_before_last = 0
        self._begin_window(list(prompt[-NUM_CONTEXT_TOKENS:]))
        self._num_chars = len(self._decode().rstrip(REPLACEMENT))  # the answer may complete a character

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens, decoded together."""
        if not tokens:
            return
        self.offsets.append(len(self.text))
        self._num_before_last = len(self.text)
        self._window += tokens
        decoded = self._decode()
        is_stuck = len(self._window) - self._num_old >= MAX_INCOMPLETE_TOKENS
        whole = decoded if is_stuck else decoded.rstrip(REPLACEMENT)
        self.text += whole[self._num_chars :]
        self._num_chars = max(self._num_chars, len(whole))
        if whole == decoded:
            self._begin_window(self._window[-NUM_CONTEXT_TOKENS:])

    def take(self) -> str:
        """Return the text that is new since the last call and belongs to the answer whatever follows.

        It ends before what may be the beginning of a stop string, and at one that the last token has
        completed: whether the answer ends there is known when `finish` is called or the next token comes.
        """
        held = max((_overlap(self.text, stop) for stop in self._stops), default=0)
        end = min(len(self.text) - held, self._first_stop())
        new = self.text[self._num_taken : end]
        self._num_taken = max(self._num_taken, end)
        return new

    def finish(self, *, by_stop: bool) -> None:
        """Take note that no token follows.

        Args:
            by_stop: The last token may complete a stop string. The text then ends before that.
        """
        whole = self._decode()
        self.text += whole[self._num_chars :]
        if by_stop:
            self.text = self.text[: self._first_stop()]
        self._stops = ()

    def _first_stop(self) -> int:
        """Return the end of the text if the last token has completed a stop string; if not, its length."""
        ends = []
        for stop in self._stops:
            place = self.text.find(stop, max(0, self._num_before_last - len(stop) + 1))
            if place >= 0:
                ends.append(place + (len(stop) if stop in self._kept else 0))
        return min(ends, default=len(self.text))

    def _begin_window(self, tokens: list[int]) -> None:
        self._window, self._num_old = tokens, len(tokens)
        self._num_chars = len(self._decode())

    def _decode(self) -> str:
        return self._codec.decode(self._window, skip_special=self._skip_special)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text with which the stop string begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPart:
    """News of one answer. Log-probabilities cover the tokens; the text may lag behind them."""

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[TopLogprobs]
    offsets: Sequence[int]
    """Place of each token in the text of the answer, empty unless asked for."""
    finish_reason: str | None


NO_NEWS = AnswerPart(text="", tokens=(), logprobs=(), tops=(), offsets=(), finish_reason=None)


class GrowingAnswer:
    """One growing answer."""

    def __init__(
        self,
        codec: TextCodec,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        skip_special: bool = True,
        offsets: bool = False,
        kept_stops: tuple[str, ...] = (),
    ) -> None:
        """Begin after a prompt.

        Args:
            codec: The tokenizer.
            prompt: Tokens before the answer.
            sampling: Settings of the sample.
            skip_special: Leave special tokens out of the text.
            offsets: Find the place of each token in the text.
            kept_stops: Stop strings that belong to the text.
        """
        self._sampling, self._offsets = sampling, offsets
        self.text = AnswerText(
            codec, prompt, sampling.stop_strings, kept=kept_stops, skip_special=skip_special
        )
        self._num_read = 0
        self.is_over = False

    def read(self, sample: SampleFeed) -> AnswerPart:
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
        return AnswerPart(
            text=self.text.take(),
            tokens=tokens,
            logprobs=rollout.logprobs[start:count],
            tops=rollout.top_logprobs[start:count],
            offsets=self.text.offsets[offset:] if self._offsets else (),
            finish_reason=(rollout.finish_reason or "abort") if ends else None,
        )

    def _add(self, tokens: Sequence[int]) -> None:
        if not (self._offsets or self._sampling.stop_strings):
            self.text.add(tokens)
            return
        for token in tokens:  # alone: its place is asked for, or a stop string may end in it
            self.text.add([token])


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, LOWEST)


def completion_logprobs(
    codec: TextCodec,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[TopLogprobs],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """Return the object `logprobs` of /v1/completions.

    The alternatives of a place include the token that is there. Tokens with the same text are one entry, the
    most likely one.
    """
    alternatives: list[dict[str, float] | None] = []
    for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        if logprob is None:
            alternatives.append(None)
            continue
        found: dict[str, float] = {}
        for other, value in (*(tops[i] if i < len(tops) else ()), (token, logprob)):
            text = codec.token_text(other)
            found[text] = max(found.get(text, LOWEST), finite(value))
        alternatives.append(found)
    return {
        "tokens": [codec.token_text(token) for token in tokens],
        "token_logprobs": [None if value is None else finite(value) for value in logprobs],
        "top_logprobs": alternatives,
        "text_offset": list(offsets),
    }


def chat_logprobs(
    codec: TextCodec, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs]
) -> dict[str, Any]:
    """Return the object `logprobs` of /v1/chat/completions."""
    content = []
    for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        top = [_entry(codec, *pair) for pair in (tops[i] if i < len(tops) else ())]
        content.append({**_entry(codec, token, logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(codec: TextCodec, token: int, logprob: float) -> dict[str, Any]:
    text = codec.token_text(token)
    return {"token": text, "logprob": finite(logprob), "bytes": codec.token_bytes(token)}
