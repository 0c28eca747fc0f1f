"""`MeanExchange`: nodes that all take part in every round compute the next anchors together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from aedit.async_sgd.rules import (
    Array,
    Average,
    Nesterov,
    OuterOptimizer,
    OuterState,
    PenaltyConfig,
    UnitRules,
    effective_nodes,
    make_outer,
    penalty_weights,
    raw_weights,
)
from aedit.edit.agreement import compare, described, described_layout
from aedit.edit.anchor_store import (
    DeviceStore,
    Kept,
    PinnedStore,
    history,
    kept_state,
    named_history,
    named_store,
)
from aedit.edit.detector import NormHistory, judge, replace_units
from aedit.edit.exchange import Immediate, RoundOutcome
from aedit.edit.schedule import Notes
from aedit.edit.shards import Shards
from aedit.edit.tensors import digest, halves
from aedit.edit.units import SyncUnit, UnitSteps
from aedit.proto.transports import Mean, Pending, Rows, Transport, then
from aedit.types import Round, checked


@dataclass(slots=True)
class _OpenRound:
    """The round under way, as the exchange sees it."""

    outcome: RoundOutcome
    history_before: NormHistory
    added_L: Tensor
    """Training steps that the round has added to each unit's."""
    weight: dict[int, float] = field(default_factory=dict)
    without_weight: frozenset[int] = frozenset()
    """Units whose weights are all 0."""


@checked()
class MeanExchange:
    """Exchange of EDiT between nodes that all take part (arXiv:2412.07210, algorithm 2).

    Each node averages the penalised pseudo-gradients of all nodes and takes the same outer step.

    Args:
        transport: Carries vectors and rows between the nodes, such as `TorchTransport()`. Several exchanges
            may share it: each sends through a channel of its own, so all nodes make them in one order.
        outer: The outer optimizer; None: `Nesterov()`.
        penalty: Detector, weights and clipping of pseudo-gradients; None: `PenaltyConfig()`.
        offload: Keep anchors and outer state in pinned host memory instead of on the device.
        rules: Rules of units that are trained apart from the model, by name; equal on all nodes.
        name: Name of the channel, which begins the keys in error messages; None: a number.
    """

    asynchronous = False
    max_steps_ahead = 0

    def __init__(
        self,
        transport: Transport,
        *,
        outer: OuterOptimizer | None = None,
        penalty: PenaltyConfig | None = None,
        offload: bool = False,
        rules: UnitRules | None = None,
        name: str | None = None,
    ) -> None:
        self.transport = transport
        self.channel = transport.channel(name)
        self.outer = outer or Nesterov()
        self.penalty = penalty or PenaltyConfig()
        self.offload = offload
        self.rules = dict(rules or {})
        self.unit_steps = UnitSteps()
        """Steps of units that are trained apart from the model: register their count before training."""
        self._outer = {name: make_outer(rule.outer) for name, rule in self.rules.items()}
        self.units: Sequence[SyncUnit] = ()
        self.apart: Sequence[SyncUnit] = ()
        self.shards = Shards()
        self.store = DeviceStore([])
        self.history = NormHistory.empty(0, self.penalty.window)
        self.steps_L = torch.zeros(0, dtype=torch.float64)  # inner steps since each unit's last round
        self.own_steps = 0
        self._open: _OpenRound | None = None
        self._digests: list[Tensor] = []

    @property
    def notes(self) -> Notes:
        """Return the channel, through which nodes leave notes for each other."""
        return self.channel

    @property
    def bytes_sent(self) -> int:
        """Return the payload bytes that the channel has sent."""
        return self.channel.bytes_sent

    def bind(self, units: Sequence[SyncUnit], shards: Shards) -> None:
        """Store the units and ranks of the node. Called once, before anything else."""
        self.units, self.shards = units, shards
        self.history = NormHistory.empty(len(units), self.penalty.window)
        self.steps_L = torch.zeros(len(units), dtype=torch.float64)

    def compare(self, settings: Mapping[str, str]) -> None:
        """Compare settings, units, outer optimizer and penalty with those of the other nodes.

        Raises:
            ValueError: Something differs; the message names the first difference.
        """
        own = described("outer", self.outer) | described("penalty", self.penalty)
        own |= {f"rule of unit {name}": repr(rule) for name, rule in self.rules.items()}
        compare(self.channel, "settings", {**settings, **own, **described_layout(self.units, self.shards)})

    def anchor(self) -> None:
        """Take the parameters as anchors. Nodes that differ adopt those of the first node, bit for bit."""
        self.allocate()
        mine = torch.tensor(self._digest(range(len(self.units))), dtype=torch.float64)
        rows = self.channel.gather("anchor", mine).result()
        if not (rows.rows == rows.rows[0]).all():
            self.adopt_anchors_of(0, rows, key="anchor")
            for i, unit in enumerate(self.units):
                unit.adopt(self.store.read(i)[0])

    def allocate(self) -> None:
        """Take the parameters as anchors of this node, with new outer state."""
        flats = ((unit.flat(), self._outer_of(i)) for i, unit in enumerate(self.units))
        self.keep((flat, outer.init(flat)) for flat, outer in flats)

    def keep(self, kept: Iterable[Kept]) -> None:
        """Store anchors and outer states, be they the first ones or a checkpoint's.

        Takes one unit after the other, so that with offload only one is on the device at a time.
        """
        digests = []

        def noted() -> Iterator[Kept]:
            for anchor, state in kept:
                digests.append(digest(anchor))
                yield anchor, state

        self.store = PinnedStore(noted()) if self.offload else DeviceStore(noted())
        self._digests = digests

    def average(self, name: str, value: Tensor, weight: Tensor) -> Pending[Tensor]:
        """Return the weighted mean over nodes of an fp32 vector."""
        return then(self.channel.weighted_mean(name, value, weight), lambda mean: mean.value)

    def rows(self, key: str, row: Tensor) -> Pending[Rows]:
        """Return one small float64 row per node."""
        return self.channel.gather(key, row)

    @torch.no_grad()
    def open(self, round: Round, units: Sequence[int], *, leaving: bool = False) -> Pending[RoundOutcome]:
        """Measure the norms of `units`, exchange them with the other nodes, and return the outcome."""
        G_L = self._norms(units)
        at = list(units)
        all_L = torch.zeros(len(self.units), dtype=torch.float64)
        all_L[at] = G_L
        believed_L, history = judge(all_L, self.history, self.penalty)
        apart = [i for i, unit in enumerate(self.units) if unit.name in self.rules]
        believed_L[apart] = torch.where(all_L[apart].isfinite(), all_L[apart], torch.inf)
        added_L = self.unit_steps.new(self.units, round.steps, self.shards)
        self.steps_L += added_L
        self.own_steps += round.steps
        outcome = RoundOutcome(
            round,
            tuple(units),
            norms=tuple(G_L.tolist()),
            distrusted=tuple(i for i in units if not believed_L[i].isfinite()),
        )
        self._open = _OpenRound(outcome, self.history, added_L)
        self.history = replace_units(self.history, history, [i for i in at if i not in apart])
        head = [self.own_steps, leaving, *self._digest(units)]
        row = torch.cat([torch.tensor(head, dtype=torch.float64), believed_L[at], self.steps_L[at]])
        return then(self.channel.gather(f"{round.id}/open", row), self._weigh)

    def _weigh(self, rows: Rows) -> RoundOutcome:
        assert self._open is not None
        outcome, units = self._open.outcome, self._open.outcome.units
        digests_N2, believed_NL, steps_NL = rows.rows[:, 2:4], *rows.rows[:, 4:].chunk(2, dim=1)
        same_N, healed_from = self._heal(digests_N2, rows)
        believed_NL = believed_NL.masked_fill(~same_N.unsqueeze(1), torch.inf)  # measured from another anchor
        w_NL = torch.from_numpy(self._weights(units, believed_NL.numpy(), steps_NL.numpy()))
        w_L = torch.zeros(len(units), dtype=w_NL.dtype) if rows.mine is None else w_NL[rows.mine]
        zero_L = w_NL.sum(0) == 0
        rolled_L = zero_L & (steps_NL.sum(0) > 0)
        self._open.weight = dict(zip(units, w_L.tolist(), strict=True))
        self._open.without_weight = frozenset(
            i for i, zero in zip(units, zero_L.tolist(), strict=True) if zero
        )
        self.steps_L[list(units)] = 0
        self._open.outcome = replace(
            outcome,
            weights=tuple(w_L.tolist()),
            effective_nodes=tuple(effective_nodes(w_NL.numpy()).tolist()),
            rolled_back=tuple(i for i, rolled in zip(units, rolled_L.tolist(), strict=True) if rolled),
            nodes=len(rows.rows),
            total_steps=int(rows.rows[:, 0].sum()),
            all_leaving=bool(rows.rows[:, 1].all()),
            healed_from=healed_from,
        )
        return self._open.outcome

    def _weights(self, units: Sequence[int], G_NL: Array, g_NL: Array) -> Array:
        """Return w_NL: EDiT's weights, or those of a unit's own rule; they sum to 1 or are all 0."""
        w_NL = penalty_weights(G_NL, g_NL, self.penalty)
        for column, i in enumerate(units):
            rule = self.rules.get(self.units[i].name)
            if rule is not None:
                G_N, g_N = G_NL[:, column], g_NL[:, column]
                g_N = g_N * np.isfinite(G_N)
                w_N = raw_weights(G_N, g_N, 0 * g_N, rule.weights, self.penalty)
                w_NL[:, column] = w_N / max(w_N.sum(), 1e-30)
        return w_NL

    def _outer_of(self, i: int) -> OuterOptimizer:
        return self._outer.get(self.units[i].name, self.outer)

    @torch.no_grad()
    def start(self, i: int) -> Pending[Tensor]:
        """Send the pseudo-gradient of unit `i`; the answer is the next anchor, after the outer step.

        Where all nodes have weight 0, as in a drafter that none has trained, nothing is sent, and the anchor
        stays.
        """
        assert self._open is not None
        outcome, weight = self._open.outcome, self._open.weight[i]
        if i in self._open.without_weight:
            return Immediate(lambda: self.store.read(i)[0].clone())
        for ahead in outcome.units:
            if ahead > i:
                self.store.ahead(ahead)
                break
        anchor = self.store.read(i)[0]
        value = self._pseudo_gradient(i, anchor) if weight > 0 else torch.zeros_like(anchor)
        mean = self.channel.weighted_mean(f"{outcome.round.id}/{self.units[i].name}", value, weight)
        # The last round takes the mean as it is: no inner step follows to correct an overshoot.
        outer = Average() if outcome.all_leaving else self._outer_of(i)
        return then(mean, lambda mean: self._step(i, mean, outer))

    @torch.no_grad()
    def _step(self, i: int, mean: Mean, outer: OuterOptimizer) -> Tensor:
        anchor, state = self.store.read(i)
        norm = self.shards.sum(torch.linalg.vector_norm(mean.value).square()).sqrt()
        clip = None if self.units[i].name in self.rules else self.penalty.clip
        step, stepped = outer.update(mean.value.mul_(clip_scale(norm, clip)), state)
        trusted = mean.total_weight > 0  # stays on the device, to avoid a synchronisation with the host
        next_anchor = torch.where(trusted, anchor - step, anchor)
        pairs = zip(stepped.arrays, state.arrays, strict=True)
        kept = stepped.with_arrays(*(torch.where(trusted, new, old) for new, old in pairs))
        self.store.write(i, next_anchor, kept)
        return next_anchor

    def conclude(self, i: int, outcome: RoundOutcome) -> RoundOutcome:
        """Return `outcome` as it is: it is complete when the round is opened."""
        return outcome

    def leave(self) -> None:
        """Do nothing: all nodes have opened the last round as leaving."""

    def withdraw(self) -> None:
        """Do nothing: the other nodes notice a lost peer through the transport."""

    def defaults(self) -> None:
        """Return None: the caller decides."""

    def note_step(self, steps: int, waited_s: float) -> None:
        """Do nothing: rounds carry step counts."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return anchors and outer state by parameter, history of norms, and step counts."""
        own_steps = torch.tensor(self.own_steps)
        state = named_history("history", self.history)
        state |= {"history/steps_L": self.steps_L, "own_steps": own_steps}
        state |= named_store(self.units, self.store) if self._digests else {}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, after `bind`."""
        self.history = history("history", state)
        self.steps_L, self.own_steps = state["history/steps_L"], int(state["own_steps"])
        if f"anchor/{self.units[0].names[0]}" in state:
            self.keep(kept_state(unit, state) for unit in self.units)

    def abandon(self) -> None:
        """Forget the newest round: its steps and norms count in the next one."""
        assert self._open is not None
        self.history = self._open.history_before
        self.steps_L -= self._open.added_L
        self.own_steps -= self._open.outcome.round.steps
        self._open = None

    def _pseudo_gradient(self, i: int, anchor: Tensor) -> Tensor:
        """Return D = anchor - local, measured from the value that the parameters started from."""
        unit, value = self.units[i], self.units[i].value()
        into = value if unit.sent is None else None  # a new vector may be overwritten, a snapshot not
        return torch.sub(unit.representable(anchor), value, out=into)

    def _norms(self, units: Sequence[int]) -> Tensor:
        """Return the norms G_L of `units`, with one reduction over the node's ranks and one copy to the host.

        Computes the digests of the anchors anew in the same pass, to detect memory that has failed since.
        """
        squares = []
        for n, i in enumerate(units):
            if n + 1 < len(units):
                self.store.ahead(units[n + 1])
            anchor = self.store.read(i)[0]
            self._digests[i] = digest(anchor)
            squares.append(torch.linalg.vector_norm(self._pseudo_gradient(i, anchor)).square())
        return self.shards.sum(torch.stack(squares)).double().sqrt().cpu()

    def _digest(self, units: Sequence[int]) -> tuple[float, float]:
        return halves(int(torch.stack([self._digests[i] * (2 * i + 1) for i in units]).sum()))

    def _heal(self, digests_N2: Tensor, rows: Rows) -> tuple[Tensor, int | None]:
        """Give all nodes the anchors that most nodes have if they differ (those of the first node on a tie).

        Returns which nodes had them already, and the node they came from, or None if this node had them.
        """
        same_NN = (digests_N2.unsqueeze(0) == digests_N2.unsqueeze(1)).all(-1)
        source = int(same_NN.sum(1).argmax())
        if not same_NN.all():
            assert self._open is not None
            self.adopt_anchors_of(source, rows, key=f"{self._open.outcome.round.id}/heal")
        kept = rows.mine is not None and bool(same_NN[source, rows.mine])
        return same_NN[source], None if kept else source

    def adopt_anchors_of(self, source: int, rows: Rows, *, key: str) -> None:
        """Replace the anchors and outer state of all nodes by those of node `source`, bit for bit.

        All other nodes have weight 0 in a weighted mean, and x * 1 / 1 is x.
        """
        weight, old, device = float(rows.mine == source), self.store, self._digests[0].device

        def fetch(name: str, tensor: Tensor) -> Tensor:
            return self.channel.weighted_mean(f"{key}/{name}", tensor.to(device), weight).result().value

        def fetched_state(name: str, state: OuterState[Tensor]) -> OuterState[Tensor]:
            momentum = fetch(f"{name}/momentum", state.momentum)
            if state.pending is None:
                return OuterState(momentum)
            count = fetch(f"{name}/count", torch.tensor([state.count], dtype=torch.float32))
            return OuterState(momentum, fetch(f"{name}/pending", state.pending), int(count))

        def fetched() -> Iterator[Kept]:
            for i, unit in enumerate(self.units):
                anchor, state = old.peek(i)
                outer = fetched_state(unit.name, state)
                yield fetch(f"{unit.name}/anchor", anchor), outer

        self.keep(fetched())


def clip_scale(norm: Tensor, clip: float | None) -> Tensor:
    """Return beta = min(1, phi / ||mean||) (EDiT, arXiv:2412.07210, eq. 4), 0-dim like `norm`."""
    if clip is None:
        return torch.ones_like(norm)
    return (clip / norm.clamp(min=1e-30)).clamp(max=1.0)
