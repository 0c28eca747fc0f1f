"""One node of a run: composition, training loop, checkpoints.

`__main__` is the process that `torchrun` starts; `build` (begin there) makes the node and lets it join a
world, a hub (`build_hub`) or hivemind peers (`build_averaging`). `train` is the loop over `objective` (text)
with the drafter of `text_learner`, or `rl_objective` (rewards), with `budget`, `stop`, `world`, `model` and
`checkpoint` (its files: `checkpoint_files`). `rl_build` makes the objective of RL from `rl_groups` (prompts
to rewarded groups), `rl_policy` (advantages and loss), `rl_engine` (with the learned drafter), `rl_audit` (of
servers) and `rl_records`. `launch.processes` starts it; exports and serving use its model.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.node.build import facts_of, load_data, make_shared
    from aedit.launch.node.build_hub import agent_plan
    from aedit.launch.node.checkpoint import Mark, NodeCheckpoints
    from aedit.launch.node.model import (
        blocks,
        build_model,
        check_shapes,
        held_out_loss,
        loss,
        num_parameters,
        outline,
        stop_tokens,
    )
    from aedit.launch.node.objective import lr_at, make_inner, make_inners, set_lr
    from aedit.launch.node.rl_build import run_sampling, vllm_settings
    from aedit.launch.node.rl_engine import (
        DTYPES,
        FILE,
        MAX_DRAFTED_TOKENS,
        StopDecoder,
        TrainerWatch,
        choose_among,
        draft_form,
        online_config,
        save_drafter,
        saved_layer,
        taps_of,
    )
    from aedit.launch.node.text_learner import check_text_drafter
    from aedit.launch.node.world import chosen_device

__all__ = [
    "DTYPES",
    "FILE",
    "MAX_DRAFTED_TOKENS",
    "Mark",
    "NodeCheckpoints",
    "StopDecoder",
    "TrainerWatch",
    "agent_plan",
    "blocks",
    "build_model",
    "check_shapes",
    "check_text_drafter",
    "choose_among",
    "chosen_device",
    "draft_form",
    "facts_of",
    "held_out_loss",
    "load_data",
    "loss",
    "lr_at",
    "make_inner",
    "make_inners",
    "make_shared",
    "num_parameters",
    "online_config",
    "outline",
    "run_sampling",
    "save_drafter",
    "saved_layer",
    "set_lr",
    "stop_tokens",
    "taps_of",
    "vllm_settings",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
