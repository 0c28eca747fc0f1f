"""Measure what coarse codecs cost in held-out loss at equal tokens, in virtual time with a real hub.

A network changes no bits, so only the codecs' losses count: of pushes, with error feedback, and of the steps
that the hub's anchors take. The same setting gives the same bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Literal

import numpy as np

from aedit.async_sgd.inprocess import Tamper
from aedit.async_sgd.rules import ArrayValues, HubConfig, OuterConfig, PenaltyConfig, Push, Vector
from aedit.proto.codecs import Feedback, codec
from benchmarks.kit.processes import in_parallel
from benchmarks.kit.virtual_hub import Method, Setting, train_apart, warm_up

FULL = Setting(steps=256, warmup_steps=128)
QUICK = Setting(steps=8, warmup_steps=2, every=2, hidden_size=32, num_layers=1, held_out=16)
OUTER = OuterConfig(kind="delayed-nesterov", lr=0.7, momentum=0.9)


Name = Literal["fp32", "bf16", "int8", "e3m0"]


@dataclass(slots=True)
class CoarsePushes:
    """Encode and decode the pushes of a node; what the codec leaves out is kept for the next push."""

    name: str
    residuals: dict[int, Vector] = field(default_factory=dict)

    def __call__(self, push: Push) -> Push:
        coder = codec(self.name)
        assert isinstance(push.values, ArrayValues)
        exact = push.values.array
        if coder.feedback:
            feedback = Feedback(coder, self.residuals.setdefault(push.unit, np.zeros_like(exact)))
            payload = feedback.encode(exact)
            feedback.taken(exact, payload)
        else:
            payload = coder.encode(exact)
        return replace(push, values=ArrayValues(coder.decode(payload, exact.size, 0, exact.size)))


def coarse(nodes: int, name: str) -> Mapping[int, Tamper]:
    """Return for every node a `CoarsePushes` with its own residuals."""
    return {} if name == "fp32" else {node: CoarsePushes(name) for node in range(nodes)}


def losses(names: Sequence[Name], setting: Setting, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Return the held-out loss after equal tokens by codec, up and down, for each seed."""
    found = in_parallel(loss_of, list(product(names, [replace(setting, seed=seed) for seed in seeds])))
    return {name: found[i * len(seeds) : (i + 1) * len(seeds)] for i, name in enumerate(names)}


def loss_of(name: Name, setting: Setting) -> float:
    """Train nodes of unequal pace with a hub that merges every arrival; return the held-out loss."""
    hub = HubConfig(grace=0.0, weights="uniform", codec=name, codec_down=name)
    plain = PenaltyConfig(clip=None)
    method = Method(hub=hub, outer=OUTER, penalty=plain, tamper=coarse(setting.nodes, name))
    return train_apart(setting, warm_up(setting), method).loss


def cost(losses_: Mapping[str, Sequence[float]], name: str) -> float:
    """Return the mean loss above that of fp32, as a share of it."""
    return fmean(losses_[name]) / fmean(losses_["fp32"]) - 1
