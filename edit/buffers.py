"""Exchange of the model's buffers, such as the running statistics of BatchNorm, in rounds without a hub.

A buffer that is equal on all nodes is left alone. A buffer that differs becomes the mean over the nodes if it
holds floating-point numbers, and that of the first node if it holds anything else, such as a counter.
Statistics do not add up like progress: the mean itself lands, even if the node has trained on meanwhile.

Nodes are left out of the mean if they have not stepped since the last round, hold a NaN or Inf, or are not
trusted by the round. On a node of several ranks the mean over its ranks counts as its value.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aedit.edit.exchange import Exchange
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
from aedit.proto.transports import Pending, Rows

_MISSING = -1.0


Wait = Callable[[Pending[Any]], Any]
"""Returns the answer once it is here."""


class BufferLayout(NamedTuple):
    """Type and whole shape of a buffer, and whether the state dict has it."""

    dtype: str
    shape: tuple[int, ...]
    persistent: bool


class ModelBuffers:
    """Exchange the buffers of `model` with `peers`; vectors travel from `device`.

    A model may make buffers while it runs. Each round carries whether a node has the same ones as before; if
    not, the nodes compare names and shapes, and a node makes those that only others have.
    """

    def __init__(self, model: nn.Module, peers: Exchange, shards: Shards, device: torch.device) -> None:
        self.model, self.peers, self.device = model, peers, device
        self._shards = shards
        self.names: list[str] = []
        """Names of the buffers that any node has, equal on all of them."""
        self.compared: list[str] = []
        """Names of this node's buffers when the nodes have last compared them."""
        self._began: dict[str, tuple[float, float]] = {}
        self._warns = True

    @property
    def holders(self) -> list[nn.Module]:
        """Return the modules that hold buffers themselves."""
        return [m for m in self.model.modules() if any(True for _ in m.buffers(recurse=False))]

    def begin(self) -> None:
        """Take the buffers of the state dict as those of all nodes, which have just been compared."""
        self.names = sorted(name for name, _, persistent in named_buffers(self.model) if persistent)
        self.compared = list(self.names)

    @torch.no_grad()
    def open(self, key: str, *, stepped: bool) -> "OpenBuffers":
        """Send a digest of the buffers to the other nodes and return at once.

        All ranks of the node call it together.

        Args:
            key: Name of the round.
            stepped: This node has made an inner step since the last round.
        """
        now = {name: (buffer, persistent) for name, buffer, persistent in named_buffers(self.model)}
        layout = {name: BufferLayout(*shape_of(buffer), kept) for name, (buffer, kept) in sorted(now.items())}
        values = {name: self._value(now[name][0]) for name in layout}
        head = [float(stepped), float(list(layout) != self.compared), float(len(_text_of(layout)))]
        row = torch.tensor(head + digests(self.names, layout, values), dtype=torch.float64)
        rows = self.peers.rows(f"{key}/buffers", row)
        return OpenBuffers(self, key, layout, values, self.names, rows)

    def current(self) -> dict[str, Tensor]:
        """Return the buffers by name."""
        return {name: buffer for name, buffer, _ in named_buffers(self.model)}

    def exchange(self, key: str, wait: Wait) -> None:
        """Exchange the buffers now, without a round."""
        opened = self.open(key, stepped=True)
        opened.send(wait(opened.rows), wait, trusted=True)
        opened.land(wait)

    def warn_if_changed(self) -> None:
        """Warn once, with their names, of floating-point buffers that have changed since the first call.

        For an exchange with a hub, which does not exchange buffers.
        """
        now = {
            name: digest_of(to_floats(buffer))
            for name, buffer, _ in (named_buffers(self.model) if self._warns else ())
            if buffer.is_floating_point()
        }
        self._began = {**now, **self._began}
        changed = [name for name, value in now.items() if self._began[name] != value]
        if changed:
            self._warns = False
            warnings.warn(
                f"buffers of this model change while it trains ({_few(changed)}), and a hub exchanges "
                "parameters only: they describe this node's own data. Before you evaluate or export, "
                "recompute them with torch.optim.swa_utils.update_bn, or use a normalisation without "
                "running statistics",
                stacklevel=2,
            )

    def _value(self, buffer: Tensor) -> Tensor:
        """Return the node's value as an fp32 vector on the device that sends, the same on all its ranks."""
        value = floats_of(buffer).to(self.device)
        if self._shards.size == 1:
            return value
        if is_averaged(buffer):
            return self._shards.sum(value) / self._shards.size
        return self._shards.sum(value * float(self._shards.leads))


@dataclass(slots=True)
class OpenBuffers:
    """The buffers of one node in a round under way."""

    of: ModelBuffers
    key: str
    layout: dict[str, BufferLayout]
    values: dict[str, Tensor]
    names: list[str]
    """Buffers that are exchanged."""
    rows: Pending[Rows]
    _sent: list[tuple[list[str], Pending[Tensor]]] = field(default_factory=list)
    landed: bool = False
    """True once the buffers have their new values."""

    def send(self, rows: Rows, wait: Wait, *, trusted: bool) -> None:
        """Send the buffers that differ.

        Args:
            rows: The rows of all nodes.
            wait: Waits for messages that nodes exchange if they have new buffers.
            trusted: The round trusts this node.
        """
        found_NW = rows.rows[:, 3:]
        if rows.rows[:, 1].any():
            found_NW = self._agree(rows, wait)
        found_NB4 = found_NW.view(len(rows.rows), -1, 4)
        same_B4 = (found_NB4 == found_NB4[0]).all(0).tolist()
        differing = [i for i, (shape, *value, _) in enumerate(same_B4) if shape and not all(value)]
        finite_N = found_NB4[:, differing, 3].bool().all(1)
        stepped_N = finite_N & (rows.rows[:, 0] > 0)
        chosen_N = stepped_N if stepped_N.any() else finite_N
        if not chosen_N.any():
            return
        mine = rows.mine is not None and bool(chosen_N[rows.mine]) and trusted
        first = rows.mine == int(chosen_N.int().argmax())
        averaged = [self.names[i] for i in differing if is_averaged(self._like(self.names[i]))]
        self._ask("mean", averaged, float(mine))
        self._ask("first", [n for i in differing if (n := self.names[i]) not in averaged], float(first))

    def _agree(self, rows: Rows, wait: Wait) -> Tensor:
        """Find the buffers that any node has, and return their digests on all nodes.

        A node without one of them reports that it is not finite, which leaves it out of this round's means.
        """
        padded = torch.zeros(int(rows.rows[:, 2].max()), dtype=torch.float64)
        text = _text_of(self.layout)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).double()
        texts = wait(self.of.peers.rows(f"{self.key}/buffers/names", padded))
        found: dict[str, set[BufferLayout]] = {}
        for row in texts.rows:
            for name, each in json.loads(bytes(row.to(torch.uint8).tolist()).rstrip(b"\0")).items():
                found.setdefault(name, set()).add(BufferLayout(each[0], tuple(each[1]), each[2]))
        self.names = self.of.names = sorted(found)
        self.of.compared = [] if texts.mine is None else list(self.layout)
        for name in set(found).difference(self.layout):
            self.layout[name] = min(found[name])
        row = torch.tensor(digests(self.names, self.layout, self.values), dtype=torch.float64)
        self.values |= {
            name: floats_of(self._like(name)).to(self.of.device)
            for name in set(found).difference(self.values)
        }
        found_rows: Rows = wait(self.of.peers.rows(f"{self.key}/buffers/digests", row))
        return found_rows.rows

    def _like(self, name: str) -> Tensor:
        """Return a new buffer of the type and shape of `name`."""
        dtype, shape, _ = self.layout[name]
        return torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))

    def _ask(self, kind: str, which: list[str], weight: float) -> None:
        if not which:
            return
        parts = [self.values[name] for name in which]
        packed = torch.cat([*parts, parts[0].new_ones(1)])  # stays 1 if any node has weight
        asked = self.of.peers.average(f"{self.key}/buffers/{kind}", packed, packed.new_tensor(weight))
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
            sizes = [self.values[name].numel() for name in which]
            for name, part in zip(which, torch.split(packed[:-1], sizes), strict=True):
                self._write(name, torch.where(packed[-1] > 0, part, self.values[name]))
        self.landed = True

    def _write(self, name: str, part: Tensor) -> None:
        """Write a new value into the buffer of this name, which is made if only other nodes have it."""
        buffer = self.of.current().get(name)
        if buffer is None:
            buffer = self._made(name)
        if buffer is None or shape_of(buffer) != self.layout[name][:2]:
            return
        write = from_mean if is_averaged(buffer) else from_floats
        write(part.to(buffer.device), buffer)

    def _made(self, name: str) -> Tensor | None:
        """Return a new buffer in its module, or None if there is no place for it."""
        path, _, key = name.rpartition(".")
        module = dict(self.of.model.named_modules()).get(path)
        if module is None or (hasattr(module, key) and key not in module._buffers):
            return None
        buffer = self._like(name).to(self.of.device)
        module.register_buffer(key, buffer, persistent=self.layout[name].persistent)
        return buffer


def floats_of(buffer: Tensor) -> Tensor:
    """Return the fp32 vector that travels for `buffer`."""
    return to_mean(buffer) if is_averaged(buffer) else to_floats(buffer)


def digests(names: list[str], layout: dict[str, BufferLayout], values: dict[str, Tensor]) -> list[float]:
    """Return four numbers for each of `names`: hash of its shape, digest in two parts, whether it is finite.

    Of a buffer that this node does not have, a digest that no value has.
    """
    row: list[float] = []
    for name in names:
        row.append(hash_of(layout[name][:2]) if name in layout else _MISSING)
        if name in values:
            row += [*digest_of(values[name]), float(values[name].isfinite().all())]
        else:
            row += [_MISSING, _MISSING, 0.0]
    return row


def _text_of(layout: dict[str, BufferLayout]) -> bytes:
    return json.dumps(layout).encode()


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
