"""Outer optimizers: from an averaged pseudo-gradient and a state to the step to subtract, and the next state.

Pure functions of arrays: NumPy's in a hub, torch's on a node, whole units or equal slices of anchor, gradient
and state. They own no parameters and use no network, so one instance serves every unit, and a state can be
checkpointed, offloaded or sent to a joining node as it is.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, Protocol, TypeVar

import numpy as np

from aedit.async_sgd.rules.config import OuterConfig
from aedit.async_sgd.rules.records import Vector
from aedit.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Share,
    TensorLayout,
    checked,
    imported,
)

SETTINGS = ("lr", "momentum", "delay", "activation")
"""Values of `[outer]` that the constructor of an outer optimizer may ask for by name."""

Momentum = Annotated[float, Range(least=0, below=1)]

A = TypeVar("A", bound=Any)
"""An array with operators: a NumPy vector or a torch tensor."""


@checked()
@dataclass(frozen=True, slots=True)
class OuterState(Generic[A]):
    """State of the outer optimizer for one unit."""

    momentum: A
    """Same shape as the unit's anchor; empty for an optimizer without memory."""

    pending: A | None = None
    """Sum of the pseudo-gradients that the momentum has not taken in yet (Delta); None unless delayed."""

    count: NonNegativeInt = 0
    """Number of these pseudo-gradients."""

    def map(self, change: Callable[[A], A]) -> "OuterState[A]":
        """Return the same state with every array changed by `change`, to move, copy or slice it."""
        pending = None if self.pending is None else change(self.pending)
        return OuterState(change(self.momentum), pending, self.count)

    @property
    def arrays(self) -> tuple[A, ...]:
        """Return the arrays of the state: momentum first, then the pending sum, if there is one."""
        return (self.momentum,) if self.pending is None else (self.momentum, self.pending)

    def with_arrays(self, *arrays: A) -> "OuterState[A]":
        """Return the same state with other arrays, in the order of `arrays`."""
        momentum, *pending = arrays
        return replace(self, momentum=momentum, pending=pending[0] if pending else None)


class OuterOptimizer(Protocol):
    """Interface of an outer optimizer: pure functions, unit by unit."""

    def init(self, anchor: A) -> OuterState[A]:
        """Return the state before the first step. anchor: the unit's values; its shape and dtype count."""

    def update(self, gradient: A, state: OuterState[A]) -> tuple[A, OuterState[A]]:
        """Return the step to subtract from the anchor, and the next state.

        gradient: the averaged pseudo-gradient (anchor minus local), of the anchor's shape. The arguments are
        not changed.
        """

    def look_ahead(self, anchor: A, state: OuterState[A]) -> A:
        """Return where the momentum will carry the anchor next.

        The point from which late pushes are measured.

        The arguments are not changed. Without momentum it is `anchor` itself.
        """


@checked()
class Average:
    """x <- x - lr * g: plain parameter averaging when lr is 1."""

    def __init__(self, lr: PositiveFloat = 1.0) -> None:
        self.lr = lr

    def init(self, anchor: A) -> OuterState[A]:
        """Return an empty state: plain averaging keeps none."""
        return OuterState(abs(anchor[:0]))

    def update(self, gradient: A, state: OuterState[A]) -> tuple[A, OuterState[A]]:
        """Return `lr * gradient` and the same state."""
        return gradient * self.lr, state

    def look_ahead(self, anchor: A, state: OuterState[A]) -> A:
        """Return `anchor`: there is no momentum."""
        return anchor


@checked()
class Nesterov:
    """SGD with Nesterov momentum as `torch.optim.SGD(nesterov=True)`: u <- mu u + g; x <- x - lr (g + mu u).

    The paper's outer optimizer (EDiT, arXiv:2412.07210, section 3.1; DiLoCo, arXiv:2311.08105, algorithm 1).
    """

    def __init__(self, lr: PositiveFloat = 0.8, momentum: Momentum = 0.85) -> None:
        self.lr, self.mu = lr, momentum
        self._decay = self._ahead = momentum

    def for_share(self, share: float) -> "Nesterov":
        """Return the optimizer of updates that are this share of a round.

        With a share s, g is s times a mean: u <- mu^s u + g; x <- x - lr (g + a u), a = mu (1 - mu^s) / (1 -
        mu). So the momentum decays by mu in a round, and g moves the anchor by lr g / (1 - mu) in the end,
        however many updates make up the round. With mu in each of them, it would be forgotten as many times
        sooner.
        """
        made = Nesterov(self.lr, self.mu)
        made._decay = self.mu**share
        made._ahead = self.mu * ((1 - made._decay) / (1 - self.mu))
        return made

    def init(self, anchor: A) -> OuterState[A]:
        """Return zero momentum."""
        return OuterState(zeros_like(anchor))

    def update(self, gradient: A, state: OuterState[A]) -> tuple[A, OuterState[A]]:
        """Return lr (g + mu u) and the state with u <- mu u + g."""
        u = _plus(state.momentum * self._decay, gradient)
        return _times(_plus(u * self._ahead, gradient), self.lr), OuterState(u)

    def look_ahead(self, anchor: A, state: OuterState[A]) -> A:
        """Return x - lr mu u."""
        ahead: A = anchor - state.momentum * (self.lr * self.mu)
        return ahead


@checked()
class DelayedNesterov:
    """Nesterov momentum that takes in N updates at once, for updates that come one by one and late.

    Delta <- Delta + g. In between, x <- x - lr (c mu u + g / N); every Nth time u <- mu u + Delta / N,
    Delta <- 0, x <- x - lr ((1 - cN + c) mu u + g / N) (arXiv:2401.09135, algorithm 3). `lr` is that
    paper's, not the N times larger one of HALoS: N updates together move the anchor as one mean of N
    pseudo-gradients would, so `lr` means what it means for nodes that are averaged, and N = 1 is Nesterov.
    """

    def __init__(
        self,
        lr: PositiveFloat = 0.8,
        momentum: Momentum = 0.85,
        delay: PositiveInt = 4,
        activation: Share = 0.0,
    ) -> None:
        self.lr, self.mu, self.delay, self.c = lr, momentum, delay, activation

    def init(self, anchor: A) -> OuterState[A]:
        """Return zero momentum and a zero pending sum."""
        return OuterState(zeros_like(anchor), zeros_like(anchor))

    def update(self, gradient: A, state: OuterState[A]) -> tuple[A, OuterState[A]]:
        """Return the step of algorithm 3 and the next state; every `delay`-th call updates the momentum."""
        pending, u, n = gradient + state.pending, state.momentum, self.delay
        if state.count + 1 < n:
            step, share = gradient * (self.lr / n), self.c
            after = OuterState(u, pending, state.count + 1)
        else:
            u = _plus(u * self.mu, _times(pending, 1 / n))
            step, share = gradient * (self.lr / n), 1 - self.c * n + self.c
            after = OuterState(u, zeros_like(pending))
        return (_plus(step, u * (self.lr * self.mu * share)) if share else step), after

    def look_ahead(self, anchor: A, state: OuterState[A]) -> A:
        """Return x - lr mu u."""
        ahead: A = anchor - state.momentum * (self.lr * self.mu)
        return ahead


@checked()
class HeLoCo:
    """Nesterov with an averaged momentum after a correction: m <- mu m + (1 - mu) g; x <- x - lr (g + mu m).

    arXiv:2606.00271. The correction is `correct_by_momentum`; it needs whole tensors, which a hub has.
    """

    def __init__(
        self, lr: PositiveFloat = 0.8, momentum: Momentum = 0.85, correction: NonNegativeFloat = 1.0
    ) -> None:
        self.lr, self.mu, self.strength = lr, momentum, correction
        self._step = Nesterov(lr, momentum)

    def for_share(self, share: float) -> "HeLoCo":
        """Return the optimizer of updates that are this share of a round; see `Nesterov.for_share`."""
        made = HeLoCo(self.lr, self.mu, self.strength)
        made._step = self._step.for_share(share)
        return made

    def correct(self, gradient: Vector, state: OuterState[Vector], tensors: Sequence[TensorLayout]) -> None:
        """Replace the mean pseudo-gradient of a unit by the corrected one, in place; before `update`."""
        correct_by_momentum(gradient, state.momentum, tensors, self.strength)

    def init(self, anchor: A) -> OuterState[A]:
        """Return zero momentum."""
        return self._step.init(anchor)

    def update(self, gradient: A, state: OuterState[A]) -> tuple[A, OuterState[A]]:
        """Return lr (g + mu m) and the state with m <- mu m + (1 - mu) g."""
        step, after = self._step.update(gradient * (1 - self.mu), state)
        return _plus(step, gradient * (self.lr * self.mu)), after

    def look_ahead(self, anchor: A, state: OuterState[A]) -> A:
        """Return x - lr mu m."""
        return self._step.look_ahead(anchor, state)


def make_outer(config: OuterConfig) -> OuterOptimizer:
    """Return the optimizer that `[outer]` names: one of ours, or a class by import path.

    Of lr, momentum, delay and activation, such a class gets those that its constructor has by name. Raises
    ValueError if it cannot be imported or is no outer optimizer.
    """
    match config.kind:
        case "average":
            return Average(config.lr)
        case "nesterov":
            return Nesterov(config.lr, config.momentum)
        case "delayed-nesterov":
            return DelayedNesterov(config.lr, config.momentum, config.delay, config.activation)
        case "heloco":
            return HeLoCo(config.lr, config.momentum, config.correction)
        case path:
            kind = imported(path, "outer.kind", ("init", "update"))
            wanted = inspect.signature(kind).parameters
            given = {name: getattr(config, name) for name in SETTINGS if name in wanted}
            made: OuterOptimizer = kind(**given)
            return made


def zeros_like(array: A) -> A:
    """Return a new array of zeros, of NumPy or torch as `array` is, with its shape and dtype."""
    zeros: A = abs(array)  # what is in it may be anything, also NaN
    zeros[...] = 0
    return zeros


def try_outer(outer: OuterOptimizer, anchor: A, *, look_ahead: bool) -> None:
    """Take two steps with `outer` from `anchor`, an fp32 vector, before a run relies on it.

    Raises ValueError if it returns arrays of another kind, shape or dtype, or changes its arguments. Errors
    of its own pass.
    """
    gradient, state = anchor * 0.25, outer.init(anchor)
    if not isinstance(state, OuterState):
        raise ValueError(f"init returned {type(state).__name__}, expected OuterState")
    for array in state.arrays:
        _same_kind("init", array, anchor if len(array) else anchor[:0])
    for _ in range(2):
        given, before = gradient * 1, state.map(lambda array: array * 1)
        step, after = outer.update(gradient, state)
        _same_kind("update", step, anchor)
        if not isinstance(after, OuterState) or len(after.arrays) != len(state.arrays):
            raise ValueError(
                "update returned another state than init, expected an OuterState of as many arrays"
            )
        pairs = ((gradient, given), *zip(state.arrays, before.arrays, strict=True))
        if not all(bool((now == then).all()) for now, then in pairs):
            raise ValueError("update changed its arguments, expected new arrays")
        for array, old in zip(after.arrays, state.arrays, strict=True):
            _same_kind("the state of update", array, old)
        state = after
    if look_ahead:
        _same_kind("look_ahead", outer.look_ahead(anchor, state), anchor)


def _same_kind(what: str, found: object, wanted: Any) -> None:
    """Raise ValueError unless `found` is a finite array of the library, dtype and shape of `wanted`."""

    def kind(array: Any) -> str:
        library, dtype = type(array).__module__.partition(".")[0], getattr(array, "dtype", "no dtype")
        shape = tuple(getattr(array, "shape", ()))
        return f"{library} {type(array).__name__} of {str(dtype).rpartition('.')[2]} and shape {shape}"

    if kind(found) != kind(wanted):
        raise ValueError(f"{what} returned a {kind(found)}, expected a {kind(wanted)}")
    if not bool((wanted * 0 + found - found == 0).all()):
        raise ValueError(f"{what} returned numbers that are not finite")


def _plus(own: A, other: A) -> A:
    """Return own + other, in own's memory."""
    own += other
    return own


def _times(own: A, factor: float) -> A:
    """Return own * factor, in own's memory."""
    own *= factor
    return own


# --- HeLoCo: late pseudo-gradients are turned towards the outer momentum (arXiv:2606.00271)
#
# Per block, a tensor of the unit: D is the pseudo-gradient, m the momentum, u = D / |D|, v = m / |m|,
# c = u v. A D that agrees with m is kept, one that contradicts it loses a part of what contradicts it, and
# one in between is turned towards m at its own length. Every case is a D + b m, with coefficients from three
# inner products. The paper's constants were not at hand: those below are a choice.

AGREES = 0.5
"""Cosine from which on a pseudo-gradient is kept as it is (c_ok)."""

MOST_TAKEN = 1.0
"""Share of the contradicting part that is taken away at most (beta_max); 1 leaves none of it."""

CONFIDENCE = 1.0
"""Weight of the momentum's length against that of the pseudo-gradient (kappa)."""


def heloco_coefficients(DD: float, mm: float, Dm: float, strength: float) -> tuple[float, float]:
    """Return (a, b): the corrected pseudo-gradient of a block is a D + b m.

    DD, mm, Dm: inner products. strength: k_s and k_d of the paper. Without a direction of either: (1, 0).
    """
    if not (DD > 0 and mm > 0 and math.isfinite(DD) and math.isfinite(mm)):
        return 1.0, 0.0
    d, n = math.sqrt(DD), math.sqrt(mm)
    c = max(-1.0, min(1.0, Dm / (d * n)))
    confidence = d / (d + CONFIDENCE * n)
    if c >= AGREES:
        return 1.0, 0.0
    if c < 0:
        beta = min(strength * -c * confidence, MOST_TAKEN)
        return 1.0, -beta * c * d / n
    l = min(strength * (1 - c) * confidence, 1.0)  # noqa: E741 - the paper's letter
    length = math.sqrt((1 - l) ** 2 + l**2 + 2 * l * (1 - l) * c)
    return (1 - l) / length, d * l / (n * length)


def correct_by_momentum(
    gradient: Vector, momentum: Vector, tensors: Sequence[TensorLayout], strength: float
) -> None:
    """Replace the pseudo-gradient of a unit by the corrected one, in place."""
    start = 0
    for tensor in tensors:
        D, m = gradient[start : start + tensor.numel], momentum[start : start + tensor.numel]
        start += tensor.numel
        DD, mm, Dm = (float((x.astype(np.float64) * y).sum()) for x, y in ((D, D), (m, m), (D, m)))
        a, b = heloco_coefficients(DD, mm, Dm, strength)
        if b:
            D *= np.float32(a)
            D += np.float32(b) * m
