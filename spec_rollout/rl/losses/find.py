"""Policy losses by name or import path."""

from collections.abc import Mapping
from functools import wraps
from types import MappingProxyType

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
