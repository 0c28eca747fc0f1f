"""Nodes of a fixed pace: threads whose steps end at a deadline, so that eight of them fit on two cores.

A step computes a small amount for real and then sleeps until its duration is over; time spent waiting for
other nodes is added.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from aedit.edit import LayerSync, find_units, layout
from aedit.types import Layout

LATE_S = 0.002


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations of the steps of one node."""

    step_s: float
    chance: float = 0.0
    """Probability that a step is a slow one."""
    factor: float = 1.0
    """Factor by which a slow step lasts longer."""

    def durations_s(self, seed: int, num_steps: int) -> list[float]:
        """Return the same durations for the same seed, whatever the method."""
        slow = np.random.default_rng(seed).random(num_steps) < self.chance
        return [self.step_s * (self.factor if is_slow else 1.0) for is_slow in slow]


@dataclass(frozen=True, slots=True)
class Walk:
    """Results of one node."""

    wall_s: float
    """From the first step until the node has left."""
    waited_s: float
    """Until its last step ended."""
    ends_s: tuple[float, ...]
    """When each step ended, from the beginning of the first."""
    late: int
    """Steps that took longer than they should without waiting: too slow a machine for the pace."""

    @property
    def steps(self) -> int:
        return len(self.ends_s)

    def speed(self, steps: int) -> float:
        """Return the steps per second over the first `steps`."""
        steps = min(steps, self.steps)
        return steps / self.ends_s[steps - 1]


def tower(width: int = 32, num_layers: int = 4) -> nn.Module:
    """Return a model of layers that are exchanged one by one, with little to compute."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers)))


def layout_of(model: nn.Module) -> Layout:
    """Return what a hub must know of `model`, one unit per layer."""
    return layout(find_units(model, "auto"))


def walk(
    sync: LayerSync,
    durations_s: list[float],
    goes_on: Callable[[LayerSync], bool],
    begin: Callable[[], object],
) -> Walk:
    """Train `sync.model` at the given pace while `goes_on`. begin: waits for all nodes."""
    width = next(sync.model.parameters()).shape[1]
    samples = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
    _gradients(sync, samples)  # the first pass of a thread is slow
    late, ends_s = 0, []
    with sync:
        begin()
        began = time.monotonic()
        while goes_on(sync):
            deadline = time.monotonic() + durations_s[sync.steps]
            waited_before_s = sync.waited_s
            _gradients(sync, samples)
            sync.inner.step()
            sync.step()
            left_s = deadline + (sync.waited_s - waited_before_s) - time.monotonic()
            late += left_s < -LATE_S
            time.sleep(max(0.0, left_s))
            ends_s.append(time.monotonic() - began)
        waited_s = sync.waited_s
    return Walk(time.monotonic() - began, waited_s, tuple(ends_s), late)


def _gradients(sync: LayerSync, samples: torch.Tensor) -> None:
    sync.inner.zero_grad()
    sync.model(samples).square().mean().backward()


def together(nodes: int, act: Callable[[int], Walk]) -> list[Walk]:
    """Run `act(node)` for all nodes at once, one thread each; return the results."""
    with ThreadPoolExecutor(nodes) as threads:
        return list(threads.map(act, range(nodes)))
