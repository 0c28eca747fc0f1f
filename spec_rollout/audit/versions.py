"""Logits of the verifier: one model, and the weights of the latest policy versions.

With `recompute` a server computes the whole text again when it takes over new weights, so that each token is
drawn from its own version over the whole text before it. Each version of a sample costs one forward pass.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from aedit.spec_rollout.audit.margins import ClaimedTokens, Margins, margins
from aedit.spec_rollout.sampling.samples import Sampling
from aedit.types import check


class PolicyVersions:
    """Weights of up to `kept` policy versions for a `transformers` model, whose own weights are released.

    Used by one thread.
    """

    def __init__(self, model: nn.Module, *, kept: int) -> None:
        """Use `model` for its forward pass only; its parameters are empty afterwards."""
        check(kept >= 1, "kept", "must be at least 1", kept)
        self._model = model.eval().requires_grad_(False)
        self._names = {name for name, _ in model.named_parameters()}
        self._buffers = {*model.state_dict()} & {name for name, _ in model.named_buffers()}
        self._names |= self._buffers
        self._shapes = {name: tuple(model.state_dict()[name].shape) for name in self._names}
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.vocabulary = int(_config(model).get_text_config().vocab_size)
        self._kept = kept
        self._weights: dict[int, dict[str, Tensor]] = {}
        for each in model.parameters():
            each.data = each.data.new_empty(0)

    @property
    def versions(self) -> tuple[int, ...]:
        """Return the versions that are here, oldest first."""
        return tuple(self._weights)

    def add(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Keep a version, and drop the oldest one if there are too many.

        Args:
            version: Above all others.
            weights: Tensors by the names of `model.state_dict()`, tied ones once; buffers that are missing
                are those of the model. They are not copied if they
                have the verifier's dtype and device, and must not change afterwards.

        Raises:
            ValueError: The version is not above the others, or a tensor is missing or has another shape.
        """
        newest = max(self._weights, default=-1)
        check(version > newest, "version", f"must be above {newest}", version)
        found = {name: weights[name] for name in self._names if name in weights}
        for name, shape in self._shapes.items():
            if name not in found and name in self._buffers:
                continue
            if name not in found or tuple(found[name].shape) != shape:
                other = tuple(found[name].shape) if name in found else "missing"
                raise ValueError(f"weights of version {version}: {name} is {other}, expected {shape}")
        while len(self._weights) >= self._kept:
            del self._weights[min(self._weights)]
        self._weights[version] = {name: self._cast(value) for name, value in found.items()}

    @torch.no_grad()
    def logits(self, version: int, tokens: Sequence[int]) -> Tensor:
        """Return the logits after each token of a text under a version that is here, (T, V)."""
        tokens_1T = torch.tensor([tokens], device=self.device)
        inputs = {"input_ids": tokens_1T, "use_cache": False}
        output: Any = functional_call(self._model, self._weights[version], (), inputs)
        logits_TV: Tensor = output.logits[0]
        return logits_TV

    def _cast(self, value: Tensor) -> Tensor:
        dtype = self.dtype if value.is_floating_point() else value.dtype
        return value.detach().to(self.device, dtype)


def margins_of(
    policy: PolicyVersions,
    version: int,
    text: Sequence[int],
    sampling: Sampling,
    part: tuple[tuple[int, int], int, range],
) -> Margins:
    """Return the margins of answer tokens under one version.

    Args:
        policy: Has the version.
        version: Version of these tokens.
        text: Prompt and answer.
        sampling: Of the sample.
        part: Key of the sample, number of prompt tokens, places of the tokens in the answer.
    """
    key, num_prompt, places = part
    first, last = num_prompt + places.start, num_prompt + places.stop
    logits_TV = policy.logits(version, text[: last - 1])[first - 1 :]
    return margins(logits_TV, ClaimedTokens(key, sampling, first, places.start, text[first:last]))


def _config(model: Any) -> Any:
    return model.config
