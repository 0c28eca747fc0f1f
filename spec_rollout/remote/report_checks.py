"""Samples that a server generates, and the checks of its reports against the request. Imports no torch."""

import json
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.audit import versions_of
from aedit.spec_rollout.sampling import SampleKey, StopStrings, TokenDecoder

SLACK = 1e-6
"""Amount by which a log-probability may exceed 0 through rounding."""


@dataclass(frozen=True, slots=True)
class SampleLimits:
    """Parts of the sampling settings that every answer can be checked against."""

    max_new_tokens: int
    min_new_tokens: int
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...]
    allowed: frozenset[int] | None
    """Tokens that may be drawn; None: all."""
    top_logprobs: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "SampleLimits":
        """Return those of settings as `sample_text.py` writes them."""
        mask = settings["allowed"]
        return cls(
            settings["max_new_tokens"],
            settings["min_new_tokens"],
            frozenset(settings["stop_tokens"]),
            tuple(settings["stop_strings"]),
            None if mask is None else frozenset(i for i, allowed in enumerate(mask) if allowed),
            settings["top_logprobs"],
        )


@dataclass(slots=True, kw_only=True)
class GivenSample:
    """Prompt, settings, and the answer so far: tokens that were given with it, then those of the server."""

    request: pb.Add
    limits: SampleLimits
    start: int
    """Number of tokens that were given."""
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    passes: int = 0
    """Passes of the server, known at the end."""
    top: list[Any] = field(default_factory=list)
    """The most likely tokens at the place of each token of the server, if the settings ask for them."""
    finish_reason: str = ""
    stopped: bool = False
    """The last token ends the answer."""
    strings: StopStrings | None = None
    still_s: float = 0.0
    """Seconds since the request, or since the last token of this sample."""

    @classmethod
    def of(cls, request: pb.Add, decoder: Callable[[], TokenDecoder | None]) -> "GivenSample":
        """Return the sample of a request. decoder: returns the tokenizer, which only stop strings need.

        Raises:
            ValueError: It has stop strings, and there is no tokenizer.
        """
        sample = cls(
            request=request,
            limits=SampleLimits.of(json.loads(request.sampling)),
            start=len(request.tokens),
            tokens=list(request.tokens),
            logprobs=list(request.logprobs),
            versions=versions_of([(each.version, each.start, each.end) for each in request.spans]),
        )
        if strings := sample.limits.stop_strings:
            if (tokenizer := decoder()) is None:
                raise ValueError(
                    f"sample {request.rollout}/{request.sample} has stop strings, which need a tokenizer"
                )
            sample.strings = StopStrings(strings, tokenizer, tuple(request.prompt))
            for token in sample.tokens:
                sample.strings.completes(token)
        return sample

    @property
    def key(self) -> SampleKey:
        """Return the key of its noise."""
        return self.request.rollout, self.request.sample

    @property
    def num_drawn(self) -> int:
        """Return the number of tokens that the server has drawn."""
        return len(self.tokens) - self.start


class Violation(Exception):
    """A server has sent what no honest one sends."""


def add_tokens(sample: GivenSample, found: pb.Tokens, vocabulary: int, offered: Container[int]) -> None:
    """Append the tokens of a message to the sample.

    Args:
        sample: As it was requested, with all tokens so far.
        found: The message.
        vocabulary: Number of token ids.
        offered: Policy versions that the server was given.

    Raises:
        Violation: They are not what was requested. The sample is as it was, or must not be used.
    """
    count = len(found.tokens)
    versions = list(found.versions) * (count if len(found.versions) == 1 else 1)
    if found.start != len(sample.tokens):
        raise Violation(f"tokens from place {found.start} on, where {len(sample.tokens)} is next")
    if not count or not len(found.logprobs) == len(versions) == count:
        raise Violation(
            f"{count} tokens with {len(found.logprobs)} log-probabilities and {len(found.versions)} versions"
        )
    if len(sample.tokens) + count > sample.limits.max_new_tokens:
        raise Violation(f"{len(sample.tokens) + count} tokens of at most {sample.limits.max_new_tokens}")
    _check_versions(sample, versions, offered)
    for place, value in enumerate(found.logprobs, found.start):
        if not math.isfinite(value) or value > SLACK:
            raise Violation(f"a log-probability of {value:g} at place {place}")
    top = _top_logprobs(sample, found.top_logprobs, count, vocabulary)
    for token in found.tokens:
        _add_token(sample, token, vocabulary)
    sample.logprobs += found.logprobs
    sample.versions += versions
    sample.top += top


def check_end(sample: GivenSample, found: pb.Ended) -> None:
    """End the sample.

    Raises:
        Violation: The reason does not fit its tokens.
    """
    count, most = len(sample.tokens), sample.limits.max_new_tokens
    if found.finish_reason not in ("stop", "length"):
        raise Violation(f"an end for the reason {found.finish_reason[:20]!r}")
    if not sample.num_drawn:
        raise Violation("an end without a token")
    if found.finish_reason == "stop" and not sample.stopped:
        raise Violation("an end by a stop token or string, and there is none")
    if found.finish_reason == "length" and (sample.stopped or count != most):
        raise Violation(f"an end by length after {count} tokens of {most}")
    sample.finish_reason = found.finish_reason
    sample.passes = min(max(1, found.passes), sample.num_drawn)  # a figure, not part of the answer


def _check_versions(sample: GivenSample, versions: list[int], offered: Container[int]) -> None:
    before = max(sample.request.min_version, sample.versions[-1] if sample.versions else 0)
    for version in versions:
        if version < before:
            raise Violation(f"a token of version {version} after, or below, version {before}")
        if version not in offered:
            raise Violation(f"a token of version {version}, which it was not given")
        before = version


def _add_token(sample: GivenSample, token: int, vocabulary: int) -> None:
    limits, place = sample.limits, len(sample.tokens)
    if sample.stopped:
        raise Violation(f"a token at place {place}, after the end of the answer")
    if token >= vocabulary:
        raise Violation(f"token {token} at place {place}, with a vocabulary of {vocabulary}")
    if limits.allowed is not None and token not in limits.allowed:
        raise Violation(f"token {token} at place {place}, which is not allowed")
    is_late = place + 1 > limits.min_new_tokens
    is_stop = token in limits.stop_tokens
    if is_stop and not is_late:
        raise Violation(
            f"stop token {token} at place {place}, before min_new_tokens = {limits.min_new_tokens}"
        )
    sample.tokens.append(token)
    completed = sample.strings is not None and sample.strings.completes(token)
    sample.stopped = is_stop or (completed and place + 1 >= limits.min_new_tokens)


def _top_logprobs(sample: GivenSample, text: bytes, count: int, vocabulary: int) -> list[Any]:
    """Return the most likely tokens of each place. Raises Violation if they are not what was asked for."""
    most = sample.limits.top_logprobs
    if not most:
        if text:
            raise Violation("most likely tokens that were not asked for")
        return []
    try:
        found = [[(int(t), float(value)) for t, value in place] for place in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise Violation(f"most likely tokens that cannot be read: {str(error)[:80]}") from None
    if len(found) != count or any(len(place) > most for place in found):
        raise Violation(f"most likely tokens of {len(found)} places, for {count} tokens")
    for place in found:
        if any(not 0 <= t < vocabulary or math.isnan(v) or v > SLACK for t, v in place):
            raise Violation("most likely tokens outside the vocabulary, or with impossible log-probabilities")
    return found
