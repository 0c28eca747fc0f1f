"""Validation of prompts before anything begins."""

import torch

from aedit.spec_rollout.sampling.samples import Prompt, Sampling


def check_prompt(prompt: Prompt, vocabulary: int, max_tokens: int, has_tokenizer: bool) -> None:
    """Check that an engine can serve the prompt.

    Raises:
        ValueError: It cannot; one line names the sample and the reason.
    """
    error = (
        _token_error(prompt, vocabulary, max_tokens)
        or _stop_error(prompt.sampling, vocabulary, has_tokenizer)
        or _mask_error(prompt.sampling, vocabulary)
        or _partial_error(prompt)
    )
    if error:
        raise ValueError(f"prompt {prompt.rollout}/{prompt.sample}: {error}")


def _outside(tokens: tuple[int, ...], vocabulary: int) -> int | None:
    return next((token for token in tokens if not 0 <= token < vocabulary), None)


def _token_error(prompt: Prompt, vocabulary: int, max_tokens: int) -> str:
    if not prompt.tokens:
        return "the prompt is empty"
    partial = prompt.partial.tokens if prompt.partial else []
    bad = _outside((*prompt.tokens, *partial), vocabulary)
    if bad is not None:
        return f"token {bad} is outside the vocabulary of {vocabulary}"
    num_prompt, num_new = len(prompt.tokens), prompt.sampling.max_new_tokens
    if num_prompt + num_new > max_tokens:
        return f"{num_prompt} tokens and max_new_tokens {num_new} exceed max_tokens {max_tokens}"
    for name, value in (("rollout", prompt.rollout), ("sample", prompt.sample)):
        if not -(1 << 63) <= value < 1 << 63:
            return f"{name} must fit into 64 bits"
    return ""


def _stop_error(sampling: Sampling, vocabulary: int, has_tokenizer: bool) -> str:
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
    if allowed is not None:
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
    return ""
