"""Limits of an engine, and validation of prompts before anything begins."""

from dataclasses import dataclass

import torch

from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.types import NonNegativeInt, PositiveInt, checked


def check_prompt(prompt: Prompt, vocabulary: int, max_tokens: int, has_tokenizer: bool) -> None:
    """Check that an engine can serve the prompt.

    Raises:
        ValueError: It cannot; one line names the sample and the reason.
    """
    error = (
        _id_error(prompt)
        or _token_error(prompt, vocabulary, max_tokens)
        or _stop_error(prompt.sampling, vocabulary, has_tokenizer)
        or _mask_error(prompt.sampling, vocabulary)
        or _partial_error(prompt)
    )
    if error:
        raise ValueError(f"prompt {prompt.name}: {error}")


def _outside(tokens: tuple[int, ...], vocabulary: int) -> int | None:
    return next((token for token in tokens if not 0 <= token < vocabulary), None)


def _token_error(prompt: Prompt, vocabulary: int, max_tokens: int) -> str:
    begun = prompt.partial.tokens if prompt.partial else []
    kinds = {type(token) for tokens in (prompt.tokens, begun) for token in tokens}
    if kinds - {int}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds - {int}))
        return f"tokens must be int, got {found}: convert them, for example with tolist()"
    if not prompt.tokens:
        return "the prompt is empty"
    bad = _outside((*prompt.tokens, *begun), vocabulary)
    if bad is not None:
        return f"token {bad} is outside the vocabulary of {vocabulary}"
    num_prompt, num_new = len(prompt.tokens), prompt.sampling.max_new_tokens
    if num_prompt + num_new > max_tokens:
        return f"{num_prompt} tokens and max_new_tokens {num_new} exceed max_tokens {max_tokens}"
    return ""


def _id_error(prompt: Prompt) -> str:
    for name in ("rollout", "sample", "group"):
        value = getattr(prompt, name)
        if not isinstance(value, int) or isinstance(value, bool):
            return f"{name} must be an int, got {value!r}"
        if not -(1 << 63) <= value < 1 << 63 and (name == "group" or prompt.has_key):
            return f"{name} must fit into 64 bits"
    return ""


def _stop_error(sampling: Sampling, vocabulary: int, has_tokenizer: bool) -> str:
    if any(type(token) is not int for token in sampling.stop_tokens):
        return f"stop tokens must be int, got {sampling.stop_tokens}"
    if any(type(text) is not str for text in sampling.stop_strings):
        return f"stop strings must be str, got {sampling.stop_strings}"
    bad = _outside(tuple(sampling.logit_bias), vocabulary)
    if bad is not None:
        return f"token {bad} of logit_bias is outside the vocabulary of {vocabulary}"
    bad = _outside(sampling.stop_tokens, vocabulary)
    if bad is not None:
        return f"stop token {bad} is outside the vocabulary of {vocabulary}"
    if sampling.stop_strings and not has_tokenizer:
        return "stop strings need an engine with a tokenizer"
    if "" in sampling.stop_strings:
        return "a stop string is empty"
    return ""


def _mask_error(sampling: Sampling, vocabulary: int) -> str:
    allowed, stops = sampling.allowed, set(sampling.stop_tokens)
    if sampling.constraint is not None and not callable(getattr(sampling.constraint, "allowed", None)):
        return f"constraint must have a method allowed, got {type(sampling.constraint).__name__}"
    if allowed is not None:
        if not isinstance(allowed, torch.Tensor):
            return f"allowed must be a bool tensor, ({vocabulary},), got {type(allowed).__name__}"
        if allowed.dtype != torch.bool or allowed.shape != (vocabulary,):
            return f"allowed must be bool, ({vocabulary},), got {allowed.dtype}, {tuple(allowed.shape)}"
        if not allowed.any():
            return "no token is allowed"
        num_left = int(allowed.sum()) - sum(bool(allowed[token]) for token in stops)
    else:
        num_left = vocabulary - len(stops)
    if sampling.min_new_tokens and not num_left:
        return "only stop tokens are allowed, and min_new_tokens forbids them"
    return ""


def _partial_error(prompt: Prompt) -> str:
    partial = prompt.partial
    if partial is None:
        return ""
    if partial.finish_reason or len(partial.tokens) >= prompt.sampling.max_new_tokens:
        return "the partial rollout has ended already"
    if not len(partial.tokens) == len(partial.logprobs) == len(partial.versions):
        return "the partial rollout has another number of tokens than of logprobs or versions"
    if len(partial.top_logprobs) != (len(partial.tokens) if prompt.sampling.top_logprobs else 0):
        return "the partial rollout has another number of tokens than of top_logprobs"
    return ""


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of an engine's prefill and of its memory."""

    prefill_tokens: PositiveInt = 512
    """Upper limit of tokens of waiting samples that are computed between two passes over running samples.
    While no sample is running there is no limit."""
    prefix_cache_bytes: NonNegativeInt = 256 << 20
    """Upper limit of the prefix cache, which grows with its contents; 0 turns it off."""
    packed_bytes: NonNegativeInt = 1 << 30
    """Upper limit of a copy of the policy's weights that makes passes over several tokens faster on a CPU;
    see `TargetModel.pack`. Weights that would take more are not copied; 0: none are."""
