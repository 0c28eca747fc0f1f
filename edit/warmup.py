"""Synchronous data parallelism before the first local phase: gradients are averaged at every inner step.

All nodes must give the same gradients to their optimizers, whichever parameters their own backward passes
have reached, so nodes first exchange which parameters have a gradient. A parameter with a gradient on
some nodes gets the mean over all nodes, as in DistributedDataParallel; a parameter without a gradient on any
node is left alone.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from aedit.edit.exchange import Exchange
from aedit.edit.shards import Shards, local
from aedit.edit.units import SyncUnit
from aedit.proto.transports import Pending

if TYPE_CHECKING:
    from aedit.edit.sync import LayerSync

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class GradientMean:
    """Replace the gradients of `units` by their mean over nodes.

    Args:
        units: The units of the model.
        shards: The ranks of this node.
        peers: The exchange that averages between the nodes.
        node: The node that counts steps and waits.
    """

    def __init__(self, units: Sequence[SyncUnit], shards: Shards, peers: Exchange, node: "LayerSync") -> None:
        self._units, self._shards, self._peers, self._node = units, shards, peers, node
        self._hooks: list[RemovableHandle] = []
        self._averaged = False
        """True if gradients have been averaged since the last step was counted."""
        self._fresh = False
        """True if a backward pass has added to the gradients since they were averaged."""
        self._stepped = True
        """True if an optimizer has stepped since gradients were averaged."""

    # -- hooks

    def attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Register hooks that notice backward passes and that average the gradients before each step."""
        for p in (p for unit in self._units for p in unit.params):
            hook: RemovableHandle = p.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def detach(self) -> None:
        """Remove the hooks that `attach` has registered."""
        while self._hooks:
            self._hooks.pop().remove()

    def _note_gradient(self, p: Tensor) -> None:
        self._fresh = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs]:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.average()
            return args, kwargs
        averaging = self._averaging(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": averaging}
        return (args[0], averaging, *args[2:]), kwargs

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Args, kwargs: Kwargs) -> None:
        self._stepped = True

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that averages gradients and loss over the nodes.

        An optimizer decides by both, and must decide the same on all nodes.
        """

        def call() -> Any:
            loss = closure()
            self._fresh = True
            self.average()
            if loss is None:
                return None
            device = local(self._units[0].params[0]).device
            value = torch.as_tensor(loss, dtype=torch.float32).detach().reshape(1).to(device)
            value = self._shards.sum(value) / self._shards.size
            mean = self._wait_for(
                self._peers.average(f"warmup/{self._node.steps}/loss", value, torch.ones_like(value[0]))
            )
            return mean.reshape(loss.shape).to(loss) if isinstance(loss, Tensor) else float(mean)

        return call

    def _wait_for(self, pending: Pending[Tensor]) -> Tensor:
        return self._node.wait(pending, needed=self._node.position + 1)

    # -- what the loop calls

    @torch.no_grad()
    def average(self) -> None:
        """Average the gradients, unless nothing was added to them since they were averaged.

        Raises:
            RuntimeError: Optimizers have stepped on some nodes only.
        """
        if self._averaged and not self._fresh:
            return
        with self._node.whole_step():
            self._average()

    def _average(self) -> None:
        name = f"warmup/{self._node.steps}"
        gradients = [unit.gradient() for unit in self._units]
        finite = torch.stack([self._shards.sum((~g.isfinite()).sum()) == 0 for g in gradients]).float()
        params = [p for unit in self._units for p in unit.params]
        has_gradient = finite.new_tensor([p.grad is not None for p in params])
        flags = self._send_flags(torch.cat([has_gradient, finite]))
        asked = [
            self._peers.average(f"{name}/{unit.name}", gradient, weight)
            for unit, gradient, weight in zip(self._units, gradients, finite, strict=True)
        ]
        shares = self._shares(flags)
        for p, share in zip(params, shares, strict=False):
            if share > 0 and p.grad is None:
                p.grad = torch.zeros_like(p)
        for unit, pending, share in zip(self._units, asked, shares[len(params) :], strict=True):
            mean = self._wait_for(pending)
            # If no node has a finite gradient, show NaN to a GradScaler or the user, on all nodes.
            unit.set_gradient(mean if share > 0 else mean.fill_(torch.nan))
        self._averaged, self._fresh, self._stepped = True, False, False

    def leave(self) -> None:
        """Announce during the warm-up that this node takes no further steps.

        Raises ValueError, on all nodes, if others go on.
        """
        flags = self._units[0].gradient().new_zeros(sum(len(unit.params) + 1 for unit in self._units))
        self._shares(self._send_flags(flags, leaving=True))

    def _send_flags(self, flags: Tensor, *, leaving: bool = False) -> Pending[Tensor]:
        flags = torch.cat([flags.new_tensor([leaving, self._stepped]), flags])
        return self._peers.average(f"warmup/{self._node.steps}/which", flags, torch.ones_like(flags[0]))

    def _shares(self, flags: Pending[Tensor]) -> list[float]:
        """Return the share of nodes that have set each flag, once all have decided to go on or to end."""
        leaving, stepped, *shares = self._wait_for(flags).tolist()
        if 0 < leaving < 1:
            raise ValueError(_LEFT_APART.format(share=leaving, steps=self._node.steps))
        if 0.01 < stepped < 0.99:
            raise RuntimeError(_STEPPED_APART.format(step=self._node.steps))
        return shares

    def end_step(self) -> None:
        """Note that an inner step is complete.

        Raises:
            RuntimeError: The gradients of the step were not averaged.
        """
        if not self._averaged:
            raise RuntimeError(_NOT_AVERAGED.format(step=self._node.steps + 1))
        self._averaged = False


_NOT_AVERAGED = (
    "step {step} of the warm-up was not averaged over the nodes: since the last sync.step(), none of the "
    "optimizers given to LayerSync.of has stepped, and sync.average_gradients() was not called. If a "
    "GradScaler skipped the step, do not call sync.step() for it; if another optimizer trains this model, "
    "give it to LayerSync.of; otherwise call sync.step() after the optimizer's step"
)

_LEFT_APART = (
    "{share:.0%} of the nodes end after {steps} steps, in the warm-up, and the others go on: until it is "
    "over all nodes step together, so give each at least as many batches as EditConfig(warmup_steps=...)"
)

_STEPPED_APART = (
    "the optimizer made step {step} of the warm-up on some nodes and not on others, so their weights are no "
    "longer equal. A GradScaler that finds inf skips the step on its own node: call sync.average_gradients() "
    "before scaler.unscale_(), so that all nodes find the same"
)
