"""Requests of trainers as prompts: nothing of a message is believed before it is checked."""

import math
from dataclasses import replace

from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.audit import versions_of
from aedit.spec_rollout.engine import Engine, check_prompt
from aedit.spec_rollout.migration import decode_sampling
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling

MAX_STOPS = 256
"""Most stop tokens, and most stop strings, of a sample from a trainer: each one costs time at each token."""
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 64


def read_prompt(add: pb.Add, engine: Engine) -> Prompt:
    """Return the sample that a trainer asks for.

    Raises:
        ValueError: This engine, and every other one of the same model, cannot serve it.
    """
    _check_size(add, engine.target.max_tokens)
    prompt = Prompt(
        tokens=tuple(add.prompt),
        rollout=add.rollout,
        sample=add.sample,
        group=add.group,
        sampling=_sampling(add.sampling),
    )
    if add.tokens:
        prompt = replace(prompt, partial=_begun(add, prompt))
    check_prompt(prompt, engine.target.vocabulary, engine.target.max_tokens, engine.tokenizer is not None)
    return prompt


def _check_size(add: pb.Add, max_tokens: int) -> None:
    num_tokens = len(add.prompt) + len(add.tokens)
    if num_tokens >= max_tokens:
        raise ValueError(f"{num_tokens} tokens are given, where {max_tokens} are the limit with the answer")


def _sampling(text: bytes) -> Sampling:
    try:
        sampling = decode_sampling(text)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"sampling settings: {type(error).__name__}: {str(error)[:200]}") from None
    if len(sampling.stop_tokens) > MAX_STOPS or len(sampling.stop_strings) > MAX_STOPS:
        raise ValueError(f"sampling settings: more than {MAX_STOPS} stop tokens or stop strings")
    if any(len(text) > MAX_STOP_CHARS for text in sampling.stop_strings if isinstance(text, str)):
        raise ValueError(f"sampling settings: a stop string is longer than {MAX_STOP_CHARS} characters")
    if sampling.top_logprobs > MAX_TOP_LOGPROBS:
        raise ValueError(f"sampling settings: top_logprobs is above {MAX_TOP_LOGPROBS}")
    return sampling


def _begun(add: pb.Add, prompt: Prompt) -> Rollout:
    """Return the first part of the answer, which another server or engine has generated."""
    versions = versions_of([(span.version, span.start, span.end) for span in add.spans])
    if not len(add.tokens) == len(add.logprobs) == len(versions):
        raise ValueError(
            f"{len(add.tokens)} tokens are given, with {len(add.logprobs)} log-probabilities and the versions"
            f" of {len(versions)}"
        )
    if not all(map(math.isfinite, add.logprobs)):
        raise ValueError("a given log-probability is not finite")
    top = [()] * len(add.tokens) if prompt.sampling.top_logprobs else []
    return Rollout(prompt, list(add.tokens), list(add.logprobs), versions, list(top))
