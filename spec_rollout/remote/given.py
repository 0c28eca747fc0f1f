"""A sample that a server generates, as the connection to it keeps it. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aedit.spec_rollout.sampling import StopStrings, TokenDecoder

Key = tuple[int, int]


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

    key: Key
    group: int
    prompt: tuple[int, ...]
    sampling: bytes
    limits: SampleLimits
    min_version: int
    start: int
    """Number of tokens that were given."""
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    passes: int
    """Passes for the tokens that were given, then for all."""
    top: list[Any] = field(default_factory=list)
    """The most likely tokens at the place of each token of the server, if the settings ask for them."""
    finish_reason: str = ""
    stopped: bool = False
    """The last token ends the answer."""
    strings: StopStrings | None = None
    still_s: float = 0.0
    """Seconds since the request, or since the last token of this sample."""

    @classmethod
    def of(cls, text: str, min_version: int, decoder: TokenDecoder | None) -> "GivenSample":
        """Return the sample of a prompt as `encode_prompt` writes it.

        Raises:
            ValueError: It has stop strings, and there is no tokenizer.
        """
        data = json.loads(text)
        settings, begun = data["sampling"], data["partial"] or {}
        limits = SampleLimits.of(settings)
        if limits.stop_strings and decoder is None:
            raise ValueError(
                f"sample {data['rollout']}/{data['sample']} has stop strings, which need a tokenizer"
            )
        sample = cls(
            key=(data["rollout"], data["sample"]),
            group=data["group"],
            prompt=tuple(data["tokens"]),
            sampling=json.dumps(settings).encode(),
            limits=limits,
            min_version=min_version,
            start=len(begun.get("tokens", ())),
            tokens=list(begun.get("tokens", ())),
            logprobs=list(begun.get("logprobs", ())),
            versions=list(begun.get("versions", ())),
            passes=begun.get("passes", 0),
        )
        if decoder is not None and limits.stop_strings:
            sample.strings = StopStrings(limits.stop_strings, decoder, sample.prompt)
            for token in sample.tokens:
                sample.strings.completes(token)
        return sample

    @property
    def num_drawn(self) -> int:
        """Return the number of tokens that the server has drawn."""
        return len(self.tokens) - self.start

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """Return (version, start, end) of each run of tokens of one version, half-open."""
        found: list[tuple[int, int, int]] = []
        for i, version in enumerate(self.versions):
            if found and found[-1][0] == version:
                found[-1] = (version, found[-1][1], i + 1)
            else:
                found.append((version, i, i + 1))
        return found

    def as_rollout(self) -> "GivenRollout":
        """Return the whole answer, as it is signed."""
        return GivenRollout(
            GivenPrompt(*self.key, self.prompt),
            self.tokens,
            self.logprobs,
            self.versions,
            self.finish_reason,
        )


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """Parts of a `Prompt` that a statement names."""

    rollout: int
    sample: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GivenRollout:
    """Parts of a `Rollout` that a statement names."""

    prompt: GivenPrompt
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
