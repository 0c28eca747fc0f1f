"""Small trainings that keep the trainer's process busy, and fail when a file says so."""

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from aedit.spec_rollout.training import CHECKSUM, NEWEST, NUMBER, TrainerMemory

WIDTH = 64
LR = 0.5
FAULTS = ("killed", "hung", "out of memory", "disk full", "corrupt publish")
MENDED_BY = {"disk full": "disk empty", "corrupt publish": "publish"}
"""Orders after which all is well again; the other faults end the process."""
SMALL_BYTES = 4096
"""Largest size of a file when the disk is full."""


def weights(seed: int = 0, width: int = WIDTH) -> dict[str, Tensor]:
    """Return the initial weights of a drafter."""
    rng = torch.Generator().manual_seed(seed)
    return {"fc.weight": torch.randn(width, width, generator=rng) / width**0.5}


def policy(value: float = 1.0) -> dict[str, Tensor]:
    """Return an embedding and a head whose elements are all `value`."""
    return {"embedding": torch.full((8, 4), value), "head": torch.full((8, 4), value)}


class Regression:
    """Learns a fixed matrix; every microbatch improves it, and it publishes at an interval."""

    def __init__(
        self, memory: TrainerMemory, width: int = WIDTH, rows: int = 64, publish_every: int = 5
    ) -> None:
        self._layer = nn.Linear(width, width, bias=False)
        self._rows, self._publish_every = rows, publish_every
        self._wanted = torch.eye(width)
        self.num_steps, self.loss, self.followed = 0, 0.0, (0.0, -1)

    def set_policy(self, policy: Mapping[str, Tensor], version: int) -> None:
        self.followed = (float(policy["head"][0, 0]), version)

    def begin(self, drafter: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self._layer.weight.copy_(drafter["fc.weight"])

    def microbatch(self) -> bool:
        x = torch.randn(self._rows, len(self._wanted))
        loss = (self._layer(x) - x @ self._wanted.T).square().mean()
        loss.backward()
        with torch.no_grad():
            # No torch.optim: to import it takes a second, and faults begin many processes.
            weight = self._layer.weight
            weight -= LR * (weight.grad if weight.grad is not None else 0.0)
            weight.grad = None
        self.num_steps, self.loss = self.num_steps + 1, loss.item()
        return True

    def to_publish(self) -> Mapping[str, Tensor] | None:
        return {"fc.weight": self._layer.weight} if self.num_steps % self._publish_every == 0 else None

    def state(self) -> Mapping[str, Tensor]:
        return {"fc.weight": self._layer.weight, "num_steps": torch.tensor(self.num_steps)}

    def resume(self, state: Mapping[str, Tensor]) -> None:
        self.begin(state)
        self.num_steps = int(state["num_steps"])

    def metrics(self) -> Mapping[str, float]:
        value, version = self.followed
        return {"num_steps": self.num_steps, "loss": self.loss, "head": value, "version": version}


class Faulty(Regression):
    """The same training, with the faults that the file `orders` names, each once."""

    def __init__(self, memory: TrainerMemory, orders: Path, width: int = WIDTH) -> None:
        super().__init__(memory, width)
        self._memory, self._orders, self._holds_back = memory, orders, False

    def microbatch(self) -> bool:
        if self._orders.exists():
            order = self._orders.read_text()
            self._orders.unlink()
            self._happen(order)
        return super().microbatch()

    def to_publish(self) -> Mapping[str, Tensor] | None:
        return None if self._holds_back else super().to_publish()

    def _happen(self, order: str) -> None:
        if order == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif order == "hung":
            time.sleep(3600)
        elif order == "out of memory":
            self._hoard = [torch.empty(2**24) for _ in range(4096)]
        elif order == "disk full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, resource.RLIM_INFINITY))
        elif order == "disk empty":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        elif order == "corrupt publish":
            spoil_newest(self._memory)
            # Otherwise it could be overwritten before it is read.
            self._holds_back = True
        elif order == "publish":
            self._holds_back = False


def spoil_newest(memory: TrainerMemory) -> None:
    """Publish noise under a wrong checksum."""
    slots = memory.drafter
    number = slots.newest_number + 1
    slots._slot(number).random_()
    slots._slot_header(number)[CHECKSUM] = 1
    slots._slot_header(number)[NUMBER] = number
    slots._head[NEWEST] = number


def busy(width: int = WIDTH, rows: int = 64) -> Callable[[TrainerMemory], Regression]:
    """Return a training whose microbatches take longer the wider it is."""
    return partial(Regression, width=width, rows=rows)


def give(orders: Path, order: str) -> None:
    """Write `order` atomically; the trainer reads it before its next microbatch."""
    part = orders.with_name("order.part")
    part.write_text(order)
    part.rename(orders)


def faulty(orders: Path, width: int = WIDTH) -> Callable[[TrainerMemory], Faulty]:
    return partial(Faulty, orders=orders, width=width)


class Idler(Regression):
    """Training without data."""

    def microbatch(self) -> bool:
        return False


class Broken(Regression):
    """Training that fails at its start."""

    def begin(self, drafter: Mapping[str, Tensor]) -> None:
        raise ValueError("this drafter cannot be trained")
