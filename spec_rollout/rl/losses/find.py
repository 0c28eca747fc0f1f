"""Policy losses by name or import path."""

from collections.abc import Mapping
from functools import wraps
from types import MappingProxyType

import torch

from aedit.spec_rollout.rl.losses.cispo import cispo
from aedit.spec_rollout.rl.losses.dapo import dapo
from aedit.spec_rollout.rl.losses.dppo_tv import dppo_tv
from aedit.spec_rollout.rl.losses.dr_grpo import dr_grpo
from aedit.spec_rollout.rl.losses.grpo import grpo
from aedit.spec_rollout.rl.losses.gspo import gspo
from aedit.spec_rollout.rl.losses.inputs import LossInputs, LossOutput, LossSettings, PolicyLoss
from aedit.types import check, imported, is_import_path, suggest

LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {"dppo-tv": dppo_tv, "grpo": grpo, "dapo": dapo, "dr-grpo": dr_grpo, "gspo": gspo, "cispo": cispo}
)


def find_loss(name: str) -> PolicyLoss:
    """Return the policy loss of that name, or the function at the import path `package.module:name`.

    Raises ValueError if there is none, or, when it is called, if a function of one's own returns something
    else than a LossOutput with a scalar loss and a bool tensor of the shape of the log-probabilities.
    """
    rule = f"must be one of {', '.join(LOSSES)}, or module:Name"
    check(name in LOSSES or is_import_path(name), "rl.loss", rule, f"{name}{suggest(name, LOSSES)}")
    return LOSSES[name] if name in LOSSES else _checked(imported(name, "rl.loss"), name)


def try_loss(name: str, settings: LossSettings) -> None:
    """Compute value and gradient of the loss `name` for two short sequences, before a run relies on it.

    Raises ValueError if they are of another type or shape, or not finite. Errors of its own pass.
    """
    logp_BT = torch.tensor([[-1.0, -2.0, -0.5], [-0.1, -3.0, 0.0]], requires_grad=True)
    inputs = LossInputs(
        logp_BT=logp_BT,
        behaviour_BT=logp_BT.detach() - 0.25,
        mask_BT=torch.tensor([[True, True, True], [True, True, False]]),
        advantages_B=torch.tensor([1.0, -1.0]),
        reference_BT=logp_BT.detach() + 0.125 if settings.kl else None,
        num_tokens=5,
        num_sequences=2,
        max_tokens=3,
    )
    found = find_loss(name)(inputs, settings)
    if found.kept_BT.dtype != torch.bool:
        raise ValueError(f"kept_BT is of {found.kept_BT.dtype}, expected bool")
    (gradient_BT,) = torch.autograd.grad(found.loss, logp_BT, allow_unused=True)
    if gradient_BT is None or not (found.loss.isfinite() and gradient_BT.isfinite().all()):
        raise ValueError("expected a finite loss with a finite gradient with respect to logp_BT")


def _checked(loss: PolicyLoss, path: str) -> PolicyLoss:
    @wraps(loss)
    def checked(inputs: LossInputs, settings: LossSettings) -> LossOutput:
        found = loss(inputs, settings)
        if not isinstance(found, LossOutput):
            raise ValueError(f"rl.loss: {path} returned {type(found).__name__}, expected a LossOutput")
        shapes = tuple(found.loss.shape), tuple(found.kept_BT.shape)
        if shapes != ((), tuple(inputs.logp_BT.shape)):
            raise ValueError(
                f"rl.loss: {path} returned loss and kept_BT of shapes {shapes[0]} and {shapes[1]}, "
                f"expected () and {tuple(inputs.logp_BT.shape)}"
            )
        return found

    return checked
