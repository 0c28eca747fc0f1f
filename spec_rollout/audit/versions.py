"""Logits of the verifier: one model, and the weights of the latest policy versions.

With `recompute` a server computes the whole text again when it takes over new weights, so that each token is
drawn from its own version over the whole text before it. Each version of a sample costs one forward pass.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from aedit.spec_rollout.audit.calibration import OwnNoise
from aedit.spec_rollout.audit.token_margins import ClaimedTokens, Margins, margins
from aedit.spec_rollout.sampling import Sampling
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
    def num_parameters(self) -> int:
        """Return the number of numbers of one version."""
        return sum(math.prod(shape) for shape in self._shapes.values())

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
    def logits(self, version: int, tokens: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return the logits after each token of a text under a version that is here, (T, V).

        Args:
            version: Version of the weights.
            tokens: The text.
            dtype: Dtype to compute in; None: that of the weights. Another one needs a copy of the weights.
        """
        tokens_1T = torch.tensor([tokens], device=self.device)
        inputs = {"input_ids": tokens_1T, "use_cache": False}
        weights = self._weights[version]
        if dtype is not None:
            weights = {name: x.to(dtype) if x.is_floating_point() else x for name, x in weights.items()}
        output: Any = functional_call(self._model, weights, (), inputs)
        logits_TV: Tensor = output.logits[0]
        return logits_TV

    def _cast(self, value: Tensor) -> Tensor:
        dtype = self.dtype if value.is_floating_point() else value.dtype
        return value.detach().to(self.device, dtype)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of an answer, all of one version."""

    version: int
    text: Sequence[int]
    """Prompt and answer."""
    sampling: Sampling
    key: tuple[int, int]
    num_prompt: int
    places: range
    """Of the tokens in the answer."""

    def claimed(self, tokens: Sequence[int] | None = None) -> ClaimedTokens:
        """Return these tokens, or others at their places."""
        first, last = self.num_prompt + self.places.start, self.num_prompt + self.places.stop
        return ClaimedTokens(
            self.key, self.sampling, first, self.places.start, tokens or self.text[first:last]
        )


def margins_of(policy: PolicyVersions, part: Part, noise: OwnNoise | None = None) -> Margins:
    """Return the margins of answer tokens under their version; measure `noise` on them."""
    claimed = part.claimed()
    first, text = claimed.position - 1, part.text[: part.num_prompt + part.places.stop - 1]
    logits_TV = policy.logits(part.version, text)[first:]
    found = margins(logits_TV, claimed)
    if noise is not None and policy.num_parameters <= MOST_PARAMETERS and noise.wants():
        own = part.claimed(found.right_T.tolist())
        exact_TV = policy.logits(part.version, text, torch.float32)[first:]
        noise.add(margins(exact_TV, own), margins(logits_TV, own).logprobs_T)
    return found


MOST_PARAMETERS = 1 << 30
"""Larger policies are not computed in a higher precision: the copy of the weights would not fit."""


def _config(model: Any) -> Any:
    return model.config
