"""Rules that a sample of a server must keep, whatever the policy is. They need no weights."""

import math
from itertools import pairwise

from aedit.spec_rollout.audit.hook import HeldRollout
from aedit.spec_rollout.sampling import Sampling, StopStrings, TokenDecoder

LOGPROB_SLACK = 1e-3
"""Rounding may give a log-probability slightly above 0."""


def form_error(
    held: HeldRollout, sampling: Sampling, vocabulary: int, tokenizer: TokenDecoder | None = None
) -> str:
    """Return which rule a sample breaks; empty if none.

    Args:
        held: The sample.
        sampling: Its settings.
        vocabulary: V.
        tokenizer: Without it, ends by stop strings are not checked.
    """
    return _lists_error(held, vocabulary) or _versions_error(held) or _end_error(held, sampling, tokenizer)


def _lists_error(held: HeldRollout, vocabulary: int) -> str:
    num_tokens = len(held.tokens)
    if not num_tokens == len(held.logprobs) == len(held.versions):
        return f"{num_tokens} tokens with {len(held.logprobs)} logprobs and {len(held.versions)} versions"
    if not 0 <= held.start <= num_tokens or not held.prompt:
        return f"it starts at {held.start} of {num_tokens} tokens, after a prompt of {len(held.prompt)}"
    bad = next((each for each in (*held.prompt, *held.tokens) if not 0 <= each < vocabulary), None)
    if bad is not None:
        return f"token {bad} is outside the vocabulary of {vocabulary}"
    wrong = next((each for each in held.logprobs if not -math.inf < each <= LOGPROB_SLACK), None)
    return "" if wrong is None else f"a log-probability is {wrong}"


def _versions_error(held: HeldRollout) -> str:
    own = held.versions[held.start :]
    falls = any(after < before for before, after in pairwise(own))
    return f"its versions fall: {own}" if falls else ""


def _end_error(held: HeldRollout, sampling: Sampling, tokenizer: TokenDecoder | None) -> str:
    """Return the fault of the end: too early, too late, or with another reason than the tokens show."""
    num_tokens, most = len(held.tokens), sampling.max_new_tokens
    if num_tokens > most:
        return f"{num_tokens} tokens, more than max_new_tokens = {most}"
    end = _first_end(held, sampling, tokenizer)
    if end is not None and end < num_tokens - 1:
        return f"it goes on after its end at place {end}"
    expected = "stop" if end is not None else "length" if num_tokens == most else ""
    is_unknown = bool(sampling.stop_strings and num_tokens) and tokenizer is None
    if held.finish_reason == expected or (is_unknown and held.finish_reason == "stop"):
        return ""
    return f"finish reason {held.finish_reason or 'none'!r} after {num_tokens} tokens, expected {expected!r}"


def _first_end(held: HeldRollout, sampling: Sampling, tokenizer: TokenDecoder | None) -> int | None:
    """Return the place of the first token that ends the answer, except by its length."""
    stops = None
    if sampling.stop_strings and tokenizer is not None:
        stops = StopStrings(sampling.stop_strings, tokenizer, held.prompt)
    for place, token in enumerate(held.tokens):
        is_completed = stops is not None and stops.completes(token)
        if token in sampling.stop_tokens or (is_completed and place + 1 >= sampling.min_new_tokens):
            return place
    return None
