"""Exchange of the model's buffers, such as the running statistics of BatchNorm, in rounds without a hub.

A buffer that is equal on all nodes is left alone. A buffer that differs becomes the mean over the nodes if it
holds floating-point numbers, and that of the first node if it holds anything else, such as a counter.
Statistics do not add up like progress: the mean itself lands, even if the node has trained on meanwhile.

Nodes are left out of the mean if they have not stepped since the last round, hold a NaN or Inf, or are not
trusted by the round. On a node of several ranks the mean over its ranks counts as its value.
"""

import warnings
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from aedit.edit.peers import Peers
from aedit.edit.shards import Shards
from aedit.edit.tensors import (
    digest_of,
    from_floats,
    from_mean,
    hash_of,
    is_averaged,
    named_buffers,
    shape_of,
    to_floats,
    to_mean,
)
from aedit.proto.transports.transport import Pending, Rows

T = TypeVar("T")


class Wait(Protocol):
    """Function with which a node waits for an answer."""

    def __call__(self, pending: Pending[T], /) -> T:
        """Return the answer once it is here."""


class Buffers:
    """Exchange the buffers of `model` with `peers`; vectors travel from `device`."""

    def __init__(self, model: nn.Module, peers: Peers, shards: Shards, device: torch.device) -> None:
        self._model, self._peers, self._shards, self._device = model, peers, shards, device
        self._names = [name for name, _, _ in named_buffers(model)]
        self._began: dict[str, tuple[float, float]] | None = None

    def __bool__(self) -> bool:
        return bool(self._names)

    @property
    def holders(self) -> list[nn.Module]:
        """Return the modules that hold buffers themselves."""
        return [m for m in self._model.modules() if any(True for _ in m.buffers(recurse=False))]

    @torch.no_grad()
    def open(self, key: str, *, stepped: bool) -> "OpenBuffers":
        """Send a digest of the buffers to the other nodes and return at once.

        All ranks of the node call it together.

        Args:
            key: Name of the round.
            stepped: This node has made an inner step since the last round.
        """
        now = {name: buffer for name, buffer, _ in named_buffers(self._model)}
        values = [self._value(now.get(name)) for name in self._names]
        row = [float(stepped)]
        for name, value in zip(self._names, values, strict=True):
            shape = shape_of(now[name]) if name in now else None
            row += [hash_of((name, shape)), *digest_of(value), float(value.isfinite().all())]
        rows = self._peers.rows(f"{key}/buffers", torch.tensor(row, dtype=torch.float64))
        return OpenBuffers(key, [now.get(name) for name in self._names], values, self._peers, rows)

    def exchange(self, key: str, wait: Wait) -> None:
        """Exchange the buffers now, without a round."""
        if not self:
            return
        opened = self.open(key, stepped=True)
        opened.send(wait(opened.rows), trusted=True)
        opened.land(wait)

    def warn_if_changed(self) -> None:
        """Warn once, with their names, of floating-point buffers that have changed since the first call.

        For an exchange with a hub, which does not exchange buffers.
        """
        if self._began == {}:
            return
        now = {
            name: digest_of(to_floats(buffer))
            for name, buffer, _ in named_buffers(self._model)
            if buffer.is_floating_point()
        }
        if self._began is None:
            self._began = now
            return
        changed = [name for name, value in now.items() if self._began.get(name, value) != value]
        if changed:
            self._began = {}
            warnings.warn(
                f"buffers of this model change while it trains ({_few(changed)}), and a hub exchanges "
                "parameters only: they describe this node's own data. Before you evaluate or export, "
                "recompute them with torch.optim.swa_utils.update_bn, or use a normalisation without "
                "running statistics",
                stacklevel=2,
            )

    def _value(self, buffer: Tensor | None) -> Tensor:
        """Return the node's value as an fp32 vector on the device that sends, the same on all its ranks."""
        if buffer is None:
            return torch.zeros(0, device=self._device)
        value = (to_mean(buffer) if is_averaged(buffer) else to_floats(buffer)).to(self._device)
        if self._shards.size == 1:
            return value
        if is_averaged(buffer):
            return self._shards.sum(value) / self._shards.size
        return self._shards.sum(value * float(self._shards.leads))


@dataclass(slots=True)
class OpenBuffers:
    """The buffers of one node in a round under way."""

    key: str
    buffers: list[Tensor | None]
    values: list[Tensor]
    peers: Peers
    rows: Pending[Rows]
    _sent: list[tuple[list[int], Pending[Tensor]]] = field(default_factory=list)
    landed: bool = False
    """True once the buffers have their new values."""

    def send(self, rows: Rows, *, trusted: bool) -> None:
        """Send the buffers that differ, given the rows of all nodes; `trusted`.

        The round trusts this node.
        """
        told_NB4 = rows.rows[:, 1:].view(len(rows.rows), -1, 4)
        same_B4 = (told_NB4 == told_NB4[0]).all(0).tolist()
        differing = [i for i, (shape, *value, _) in enumerate(same_B4) if shape and not all(value)]
        finite_N = told_NB4[:, differing, 3].bool().all(1)
        stepped_N = finite_N & (rows.rows[:, 0] > 0)
        chosen_N = stepped_N if stepped_N.any() else finite_N
        if not chosen_N.any():
            return
        mine = rows.mine is not None and bool(chosen_N[rows.mine]) and trusted
        first = rows.mine == int(chosen_N.int().argmax())
        averaged = [i for i in differing if _mean_of(self.buffers[i])]
        self._ask("mean", averaged, float(mine))
        self._ask("first", [i for i in differing if i not in averaged], float(first))

    def _ask(self, kind: str, which: list[int], weight: float) -> None:
        if not which:
            return
        parts = [self.values[i] for i in which]
        packed = torch.cat([*parts, parts[0].new_ones(1)])  # stays 1 if any node has weight
        asked = self.peers.average(f"{self.key}/buffers/{kind}", packed, packed.new_tensor(weight))
        self._sent.append((which, asked))

    def done(self) -> bool:
        """Return whether `land` would not wait. Never waits."""
        return all(asked.done() for _, asked in self._sent)

    @torch.inference_mode(False)
    @torch.no_grad()
    def land(self, wait: Wait) -> None:
        """Wait for the new values and write them into the buffers. Does nothing the second time."""
        if self.landed:
            return
        for which, asked in self._sent:
            packed = wait(asked)
            sizes = [self.values[i].numel() for i in which]
            new, anybody = packed[:-1], packed[-1] > 0
            for i, part in zip(which, torch.split(new, sizes), strict=True):
                buffer = self.buffers[i]
                assert buffer is not None
                write = from_mean if is_averaged(buffer) else from_floats
                write(torch.where(anybody, part, self.values[i]).to(buffer.device), buffer)
        self.landed = True


def _mean_of(buffer: Tensor | None) -> bool:
    return buffer is not None and is_averaged(buffer)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
