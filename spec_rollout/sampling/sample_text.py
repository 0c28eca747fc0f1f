"""Samples and their settings as text for other processes: prompt, settings, and the tokens so far."""

import json
from dataclasses import fields, replace
from typing import Any

import torch

from aedit.spec_rollout.sampling.samples import Prompt, Rollout, Sampling


def encode_sampling(sampling: Sampling, name: str = "the sample") -> bytes:
    """Return the settings as one line of JSON. name: of the sample in errors.

    Raises:
        ValueError: They have a constraint, which is an object of this process.
    """
    return json.dumps(_settings(sampling, name)).encode()


def decode_sampling(text: bytes) -> Sampling:
    """Return the settings that `encode_sampling` wrote."""
    return _sampling(json.loads(text))


def encode_prompt(prompt: Prompt) -> bytes:
    """Return the prompt as one line of JSON, without keys and values.

    Raises:
        ValueError: The sample has a constraint, which is an object of this process.
    """
    partial = prompt.partial
    data: dict[str, Any] = {
        "tokens": prompt.tokens,
        "rollout": prompt.rollout,
        "sample": prompt.sample,
        "group": prompt.group,
        "sampling": _settings(prompt.sampling, f"sample {prompt.name}"),
        "partial": None,
    }
    if partial is not None:
        names = ("tokens", "logprobs", "versions", "top_logprobs", "passes")
        data["partial"] = {name: getattr(partial, name) for name in names}
    return json.dumps(data).encode()


def decode_prompt(text: bytes) -> Prompt:
    """Return the prompt that `encode_prompt` wrote."""
    data = json.loads(text)
    sampling = _sampling(data.pop("sampling"))
    partial, tokens = data.pop("partial"), tuple(data.pop("tokens"))
    prompt = Prompt(tokens=tokens, sampling=sampling, **data)
    if partial is not None:
        partial["top_logprobs"] = [tuple(map(tuple, each)) for each in partial["top_logprobs"]]
    return prompt if partial is None else replace(prompt, partial=Rollout(prompt, **partial))


def _settings(sampling: Sampling, name: str) -> dict[str, Any]:
    if sampling.constraint is not None:
        raise ValueError(
            f"{name} has a constraint, an object of this process, and cannot be sent: continue it on an"
            " engine of this process"
        )
    settings = {each.name: getattr(sampling, each.name) for each in fields(sampling)}
    if sampling.allowed is not None:
        settings["allowed"] = sampling.allowed.int().tolist()
    return settings


def _sampling(settings: dict[str, Any]) -> Sampling:
    settings["logit_bias"] = {int(token): bias for token, bias in settings["logit_bias"].items()}
    for name in ("stop_tokens", "stop_strings"):
        settings[name] = tuple(settings[name])
    if settings["allowed"] is not None:
        settings["allowed"] = torch.tensor(settings["allowed"], dtype=torch.bool)
    return Sampling(**settings)
