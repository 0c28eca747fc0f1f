"""The inner optimizers of a training loop, and their state of each parameter.

Landing moves a parameter. State in the space of gradients (moments) stays as it is; state in the space of
weights has to move too, or the optimizer's next step undoes the landing:

- a *master* is a copy of the parameter in a wider type, from which the optimizer writes the parameter. It is
  the parameter's exact value: pseudo-gradients are measured from it, and the anchor is written to it;
- a *companion* is another point, such as the `z` of schedule-free optimizers, the slow weights of Lookahead
  or the average of ASGD. It is shifted by as much as the parameter moves, and stays on its node.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import is_
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from aedit.edit.shards import Shards, local, reshard

Optimizer = torch.optim.Optimizer

Inner = Optimizer | Sequence[Optimizer]

CLOSE = 0.5
"""State at most this far from its parameter, relative to the parameter's norm, is a weight."""

FAR = 0.9
"""State at least this far away is not. Moments are near 1 (small ones) or above."""

LOOKS = 3
"""Times that state is compared with its parameter. A first gradient can resemble its parameter by chance;
its moments then move away within a few steps."""

_REMEDY = "Leave the `with` block before the change, and make a new exchange, schedule and LayerSync after it"

_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


class InnerOptimizers:
    """Hold all optimizers of a loop, recognise their state that holds weights, and reset their state.

    Args:
        inner: One optimizer or several; wrappers of accelerate and Lightning are taken off.
        model: The model that they train.
        shards: The ranks of this node.
        weight_states: Keys of optimizer state that hold weights; None: recognise them by their values.

    Raises:
        ValueError: Something is not an optimizer, or optimizers and model have different parameters.
    """

    def __init__(
        self,
        inner: Inner,
        model: nn.Module,
        shards: Shards,
        weight_states: Sequence[str] | None = None,
    ) -> None:
        self._given = list(inner) if isinstance(inner, list | tuple) else [inner]
        self.outermost = _listed(self._given)
        """The optimizers that the loop steps."""
        self._shards, self._weight_states = shards, weight_states
        self._chains = [list(_chain(optimizer)) for optimizer in self.outermost]
        self._all = [optimizer for chain in self._chains for optimizer in chain]
        self._is_weight: dict[tuple[int, str], bool] = {}  # (place in _all, key)
        self._masters: set[tuple[int, str]] = set()
        self._looks: Counter[tuple[int, str]] = Counter()
        self._steps_seen = 0
        _check_parameters(self.outermost, model)
        self._model = model
        self._params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._trained = {id(p): name for name, p in self._params}
        self._resting: list[tuple[str, nn.Parameter]] = []
        """Parameters that do not require gradients, neither at the last step nor in a pass since."""
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._note_objects()
        self._depth = 0
        """Number of optimizers of the loop that are in their `step`, one inside the other."""
        self._foreign: str | None = None
        """Class of an optimizer that steps parameters of the loop, and is not one of it."""
        self._before_step: Callable[[], None] = _nothing
        self._after_step: Callable[[], None] = _nothing

    def single(self) -> torch.optim.Optimizer:
        """Return the optimizer.

        Raises:
            ValueError: There are several.
        """
        if len(self.outermost) > 1:
            raise ValueError(
                f"LayerSync.inner: there are {len(self.outermost)} inner optimizers, not one: take them from "
                "sync.optimizers.outermost"
            )
        return self.outermost[0]

    @property
    def idle(self) -> bool:
        """Return whether wrappers of accelerate have just skipped the step.

        They do so while gradients are accumulated, and when a GradScaler has found inf.
        """
        return any(
            not getattr(getattr(wrapper, "gradient_state", None), "sync_gradients", True)
            or getattr(wrapper, "step_was_skipped", False)
            for wrapper in self._given
        )

    @property
    def modes(self) -> tuple[Any, ...]:
        """Return the mode of each parameter group, for optimizers with a `train()` and an `eval()`."""
        return tuple(
            group.get("train_mode") for chain in self._chains for o in chain for group in o.param_groups
        )

    @property
    def stepping(self) -> list[Optimizer]:
        """Return, for each optimizer, the inner one that changes parameters: step hooks belong there."""
        return [
            next(o for o in reversed(chain) if hasattr(o, "_optimizer_step_pre_hooks"))
            for chain in self._chains
        ]

    def check_modes(self, before: tuple[Any, ...], round_id: int) -> None:
        """Raise ValueError if `train()` or `eval()` was called since the round was opened."""
        if before != self.modes:
            raise ValueError(
                f"round {round_id} was opened before the optimizer's eval() or train() replaced the "
                "parameters, and lands after it: call sync.finish() before either"
            )

    def watch(self, before_step: Callable[[], None], after_step: Callable[[], None]) -> None:
        """Call these around the steps of the loop, and notice those of other optimizers, until `unwatch`."""
        self._depth, self._foreign = 0, None
        self._before_step, self._after_step = before_step, after_step
        _watch(add=self)

    def unwatch(self) -> None:
        """Notice no steps any more."""
        _watch(remove=self)

    def begins(self, optimizer: Optimizer) -> None:
        """Note that `optimizer`, any one of this process, begins a step."""
        if any(optimizer is each for each in self._all):
            self._depth += 1
            if self._depth == 1:
                self._before_step()
        elif any(id(p) in self._trained for group in optimizer.param_groups for p in group["params"]):
            if self._depth:  # an optimizer of the loop keeps it inside itself
                self._all.append(optimizer)
                self._depth += 1
            else:
                self._foreign = type(optimizer).__qualname__

    def ends(self, optimizer: Optimizer) -> None:
        """Note that `optimizer` ends a step."""
        if self._depth and any(optimizer is each for each in self._all):
            self._depth -= 1
            if not self._depth:
                self._after_step()

    def check_forms(self) -> None:
        """Raise ValueError if something cannot land: cast or moved parameters, adapters that are merged."""
        for (name, p), before in zip(self._params, self._forms, strict=True):
            if (now := _form(p)) != before:
                raise ValueError(
                    f"parameter {name} was {_described(before)} at LayerSync.of and is {_described(now)} now:"
                    f" the anchors are of the first. {_REMEDY}"
                )
        for name, module in self._adapted:
            if module.merged is True and any(p.requires_grad for p in module.parameters()):
                raise ValueError(
                    f"{name} has adapters that are merged into its weights, and what lands in the adapters"
                    " would be missing there when they are taken out again: unmerge them (PEFT:"
                    " model.unmerge_adapter(), loralib: model.train()) before sync.step(), finish(), land(),"
                    " update_engine() and the end of the block"
                )

    def check_unchanged(self) -> None:
        """Raise ValueError if other parameters are trained than those of the units, or by other optimizers.

        Compares objects: about 0.1 ms for some hundred parameters.
        """
        self._depth = 0  # an error may have ended a step
        self.check_forms()
        thawed = [name for name, p in self._frozen if p.requires_grad]
        if thawed:
            raise ValueError(_in_no_unit(thawed, "has become trainable"))
        if not self._same_objects():
            reshard(self._model.modules())  # FSDP2 puts other objects in place of what it has gathered
            self._check_objects()
            self._note_objects()
        if self._foreign is not None:
            raise ValueError(
                f"an optimizer of class {self._foreign} that LayerSync.of was not given has stepped"
                " parameters of the model: what lands would not reach its state. Give LayerSync.of all"
                f" optimizers of the loop, as a list. {_REMEDY}"
            )

    def check_frozen(self) -> None:
        """Raise ValueError if a parameter has been frozen for the whole of the last step.

        A loop may freeze parameters for a part of each step, as that of a GAN does.
        """
        frozen = [(name, p) for name, p in self._params if not p.requires_grad]
        resting, self._resting = self._resting, frozen
        if still := [name for name, p in resting if not p.requires_grad]:
            raise ValueError(
                f"parameter {_some(still)} has been frozen since LayerSync.of and is still exchanged: the"
                f" outer optimizer would go on moving it. {_REMEDY}"
            )

    def note_pass(self) -> None:
        """Note which parameters require gradients in a forward pass."""
        if self._resting:
            self._resting = [(name, p) for name, p in self._resting if not p.requires_grad]

    def _note_objects(self) -> None:
        """Remember modules and parameters of the model, and parameters of the optimizers."""
        held = [each for module in self._model.modules() for each in (module._parameters, module._modules)]
        self._held = [(each, tuple(each.values())) for each in held]
        self._stepped = self._now_stepped()
        self._forms = [_form(p) for _, p in self._params]
        self._adapted: list[tuple[str, Any]] = [(n, m) for n, m in self._model.named_modules() if _merges(m)]

    def _same_objects(self) -> bool:
        """Return whether all are the same objects as before."""
        return all(_same(each.values(), before) for each, before in self._held) and _same(
            self._now_stepped(), self._stepped
        )

    def _now_stepped(self) -> list[nn.Parameter]:
        return [p for o in self.outermost for group in o.param_groups for p in group["params"]]

    def _check_objects(self) -> None:
        now = {id(p): name for name, p in self._model.named_parameters()}
        if gone := [name for each, name in self._trained.items() if each not in now]:
            raise ValueError(
                f"parameter {_some(gone)} was replaced or removed since LayerSync.of: what the model has"
                f" instead would not be exchanged. {_REMEDY}"
            )
        known = self._trained.keys() | {id(p) for _, p in self._frozen}
        added = [n for n, p in self._model.named_parameters() if p.requires_grad and id(p) not in known]
        if added:
            raise ValueError(_in_no_unit(added, "was added"))
        _check_parameters(self.outermost, self._model)

    # -- state that is a weight

    def look_early(self, params: Sequence[nn.Parameter]) -> None:
        """Call `look` after each of the first steps, when weights are nearest to their parameters."""
        if self._steps_seen < LOOKS:
            self._steps_seen += 1
            self.look(params)

    def look(self, params: Sequence[nn.Parameter]) -> None:
        """Find out which states of `params` are weights. All ranks of the node call it together.

        Raises:
            ValueError: The values are ambiguous; the message names the key.
        """
        keys = {str(key) for o in self._all for p in params for key in o.state.get(p, {})}
        if not self._shards.all([bool(keys)])[0]:
            return
        if unknown := sorted(set(self._weight_states or ()) - keys):
            raise ValueError(
                f"weight_states names {unknown[0]!r}, but the optimizers keep {', '.join(sorted(keys))}"
            )
        for place, optimizer in enumerate(self._all):
            if not _is_builtin(optimizer) or self._weight_states is not None:
                self._look_at(place, optimizer, params)

    def exact(self, p: nn.Parameter) -> Tensor:
        """Return the most exact value of `p`: its master, or `p` itself."""
        for place, key, state in self._weights(p):
            if (place, key) in self._masters:
                return state
        return p

    def shift(self, p: nn.Parameter, to: Tensor) -> None:
        """Move the companions of `p` by the distance from `p` to `to`, this rank's part as a vector."""
        for place, key, state in self._weights(p):
            if (place, key) not in self._masters:
                by = to - local(self.exact(p)).reshape(-1)
                local(state).add_(by.view_as(local(state)))

    @torch.no_grad()
    def replaced(self, params: Sequence[nn.Parameter]) -> None:
        """Reset states that are weights to `params`, which have been given another node's values."""
        for p in params:
            for _, _, state in self._weights(p):
                local(state).copy_(local(p).view_as(local(state)))

    def _weights(self, p: nn.Parameter) -> Iterator[tuple[int, str, Tensor]]:
        for place, optimizer in enumerate(self._all):
            for key, state in optimizer.state.get(p, {}).items():
                known = self._is_weight.get((place, key), False) and _could_be_weight(p, state)
                if known or (key == "ax" and _is_builtin(optimizer)):  # of ASGD
                    yield place, key, state

    def _look_at(self, place: int, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        kept: dict[str, list[tuple[nn.Parameter, Any]]] = {}
        for p in params:
            for key, state in optimizer.state.get(p, {}).items():
                kept.setdefault(str(key), []).append((p, state))
        for key, pairs in sorted(kept.items()):
            if not all(_could_be_weight(p, state) for p, state in pairs):
                continue  # such as a step counter, which is like a parameter with one element
            if self._is_weight.get((place, key), True) and self._looks[place, key] < LOOKS:
                self._classify(place, key, pairs, type(optimizer).__name__)
            if self._is_weight.get((place, key)):
                self._masters.discard((place, key))
                if self._shards.all([all(_rounds_to(p, state) for p, state in pairs)])[0]:
                    self._masters.add((place, key))

    def _classify(
        self, place: int, key: str, pairs: Sequence[tuple[nn.Parameter, Tensor]], kind: str
    ) -> None:
        if self._weight_states is not None:
            self._is_weight[place, key] = key in self._weight_states
            return
        device = local(pairs[0][0]).device
        sums = torch.stack([_squares(p, state).to(device) for p, state in pairs]).sum(0)
        apart, weight, size = self._shards.sum(sums).sqrt().tolist()
        distance = apart / weight if weight > 0 and size > 0 else float("nan")
        if not distance < float("inf"):  # nothing to compare yet
            return
        self._looks[place, key] += 1
        if CLOSE < distance < FAR:
            raise ValueError(
                f"state {key!r} of {kind} is {distance:.2f} of the parameters' norm away from them: too near "
                f"for a moment (>= {FAR}), too far for a copy of the weights (<= {CLOSE}). Say what it is: "
                f"LayerSync.of(..., weight_states=({key!r},)) if landing has to move it with the parameters, "
                "weight_states=() if no state is a weight"
            )
        self._is_weight[place, key] = distance <= CLOSE

    # -- after a landing

    def restart(self, params: Sequence[nn.Parameter]) -> None:
        """Reset the curvature of L-BFGS: differences of gradients across a landing are not curvature."""
        here = set(params)
        for optimizer in self._all:
            if isinstance(optimizer, torch.optim.LBFGS) and here & set(optimizer.param_groups[0]["params"]):
                renew(optimizer, optimizer.param_groups[0]["params"][0])

    def renew(self, params: Sequence[nn.Parameter]) -> None:
        """Reset the state of `params` to that of new optimizers."""
        for optimizer in self._all:
            for p in params:
                renew(optimizer, p)


_watching: tuple["ref[InnerOptimizers]", ...] = ()
"""Those that the steps of all optimizers of this process are reported to."""
_lock = Lock()
_hooked = False


def _watch(*, add: InnerOptimizers | None = None, remove: InnerOptimizers | None = None) -> None:
    """Report steps to `add` from now on, and to `remove` no more; PyTorch reports them to global hooks."""
    global _watching, _hooked
    with _lock:
        kept = [each for each in _watching if each() not in (None, remove)]
        _watching = (*kept, *([] if add is None else [ref(add)]))
        if not _hooked:
            register_optimizer_step_pre_hook(_step_begins)
            register_optimizer_step_post_hook(_step_ends)
            _hooked = True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _step_begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for each in _watching:
        if (found := each()) is not None:
            found.begins(optimizer)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _step_ends(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for each in _watching:
        if (found := each()) is not None:
            found.ends(optimizer)


def _listed(given: Sequence[Any]) -> list[Optimizer]:
    found = [_unwrapped(each) for each in given]
    for each in found:
        if not isinstance(each, Optimizer):
            raise ValueError(
                f"inner is a {type(each).__module__}.{type(each).__qualname__}: LayerSync.of takes a "
                "torch.optim.Optimizer or a list of them"
            )
        if not any(hasattr(o, "_optimizer_step_pre_hooks") for o in _chain(each)):
            raise ValueError(
                f"{type(each).__qualname__} has no step hooks: its __init__ must call "
                "torch.optim.Optimizer.__init__; if it wraps another optimizer, give LayerSync.of that one"
            )
    if not found:
        raise ValueError("inner is an empty list: LayerSync.of takes at least one optimizer")
    return found


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside wrappers that only forward to it."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _chain(optimizer: Any) -> Iterator[Optimizer]:
    """Yield `optimizer` and those it is made of, such as Lookahead's or SAM's base optimizer."""
    seen = set()
    while isinstance(optimizer, Optimizer) and id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        optimizer = optimizer.__dict__.get("base_optimizer") or optimizer.__dict__.get("optimizer")


def _check_parameters(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    names = {id(p): name for name, p in model.named_parameters()}
    given = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    strange = [tuple(p.shape) for p in given if id(p) not in names and p.requires_grad]
    if strange:
        raise ValueError(
            f"the optimizer has {len(strange)} parameters that are not in the model, the first of shape "
            f"{strange[0]}: they would never be exchanged. Make the optimizer after fully_shard and .to(), "
            "and put everything it trains into one module, such as an nn.ModuleDict"
        )
    held = {id(p) for p in given}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ValueError(
            f"parameter {_some(missing)} of the model is in no optimizer: give LayerSync.of all optimizers "
            "of the loop, as a list, and freeze what none of them trains (requires_grad_(False))"
        )


def _in_no_unit(names: Sequence[str], what: str) -> str:
    return (
        f"parameter {_some(names)} {what} since LayerSync.of: it is in no unit and would not be exchanged."
        f" {_REMEDY}"
    )


def _form(p: Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return p.dtype, p.shape, p.device


def _described(form: tuple[torch.dtype, torch.Size, torch.device]) -> str:
    dtype, shape, device = form
    return f"{dtype} of shape {tuple(shape)} on {device}"


def _merges(module: nn.Module) -> bool:
    """Return whether a layer can merge its adapters into its weights, as those of PEFT and loralib do."""
    keys = (*module._parameters, *module._modules)
    return hasattr(module, "merged") and any(key.startswith("lora_") or key == "base_layer" for key in keys)


def _same(now: Collection[object], before: Collection[object]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _nothing() -> None:
    """Do nothing."""


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _is_builtin(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def _could_be_weight(p: nn.Parameter, state: Any) -> bool:
    if not isinstance(state, Tensor) or not state.is_floating_point() or state.layout != torch.strided:
        return False
    return p.numel() > 0 and state.numel() == p.numel() and local(state).numel() == local(p).numel()


@torch.no_grad()
def _squares(p: nn.Parameter, state: Tensor) -> Tensor:
    """Return |state - p|^2, |p|^2 and |state|^2 of this rank's part."""
    here = local(p).reshape(-1).float()
    there = local(state).reshape(-1).to(here)
    return torch.stack([v.square().sum() for v in (there - here, here, there)])


@torch.no_grad()
def _rounds_to(p: nn.Parameter, state: Tensor) -> bool:
    """Return whether `p` is `state` in a narrower type, rounded in any direction."""
    if torch.finfo(state.dtype).eps >= torch.finfo(p.dtype).eps:
        return False
    here = local(p).reshape(-1).to(state.dtype)
    there = local(state).reshape(-1)
    info = torch.finfo(p.dtype)
    return bool(((there - here).abs() <= info.eps * there.abs() + info.smallest_normal).all())


@torch.no_grad()
def renew(optimizer: Optimizer, p: nn.Parameter) -> None:
    """Make what `optimizer` remembers of `p` what a new optimizer of its class and options would.

    Tensors of the classes in `torch.optim` are overwritten in place, so that a checkpoint finds all it
    expects. State of another class is what its constructor makes, or is dropped, so that the next step
    makes it. What an optimizer keeps per group stays.
    """
    if not optimizer.state.get(p):
        return
    group = next((g for g in optimizer.param_groups if any(q is p for q in g["params"])), None)
    if group is None:
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.state[p].clear()
        optimizer.state[p].update(func_evals=0, n_iter=0)  # this may be inside a step that counts on them
    elif type(optimizer).__module__.startswith("torch.optim"):
        _overwrite(optimizer, optimizer.state[p], group)
    else:
        _drop(optimizer, p, group)


def _overwrite(optimizer: Optimizer, state: dict[str, Any], group: dict[str, Any]) -> None:
    if isinstance(optimizer, torch.optim.SGD) and group["dampening"]:
        state.pop("momentum_buffer", None)  # the first gradient is not damped
    for key, value in state.items():
        first = float(_first(optimizer, key, group))
        if isinstance(value, Tensor):
            local(value).fill_(first)
        elif isinstance(value, int | float):
            state[key] = type(value)(first)


def _first(optimizer: Optimizer, key: str, group: dict[str, Any]) -> Any:
    """Return what state `key` starts from, as the classes of torch.optim initialise it."""
    match optimizer, key:
        case torch.optim.Adagrad(), "sum":
            return group["initial_accumulator_value"]
        case (torch.optim.NAdam(), "mu_product") | (torch.optim.ASGD(), "mu"):
            return 1.0
        case (torch.optim.Rprop(), "step_size") | (torch.optim.ASGD(), "eta"):
            return group["lr"]
    return 0.0


def _drop(optimizer: Optimizer, p: nn.Parameter, group: dict[str, Any]) -> None:
    options = {key: value for key, value in group.items() if key != "params"}
    known = inspect.signature(type(optimizer)).parameters
    arguments = {key: value for key, value in options.items() if key in known}
    try:
        twin = nn.Parameter(p.detach().clone())
        made = type(optimizer)([{**options, "params": [twin]}], **arguments).state.get(twin)
    except Exception:  # a constructor that wants more: it may raise anything
        made = None
    if made:
        optimizer.state[p] = made
    else:
        del optimizer.state[p]
