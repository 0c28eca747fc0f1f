"""Drafters propose tokens that the engine verifies, as chains and trees.

Begin with `drafts` (arms, drafts, the interface of a drafter). `suffix` continues from earlier text of the
group; `layer_drafter` follows the rows with the learned `draft_layer`, through `drafting`, `draft_pass` and
`tree`. Called by the engine; `training` trains the draft layer.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.drafters.draft_layer import (
        DraftForm,
        DraftLayer,
        DraftShape,
        Eagle3Layer,
        Eagle3Shape,
        layer_of,
        shape_from,
        tapped,
        trained_steps,
    )
    from aedit.spec_rollout.drafters.drafts import (
        OFF,
        Arm,
        Draft,
        Drafter,
        DrafterKind,
        FeatureSink,
        Noise,
        PolicyReader,
        RowStart,
        StepUpdate,
        parse_arm,
    )
    from aedit.spec_rollout.drafters.layer_drafter import LayerDrafter
    from aedit.spec_rollout.drafters.speculators import (
        exported_tensors,
        load_drafter,
        read_speculator,
        write_drafter,
    )
    from aedit.spec_rollout.drafters.suffix import SuffixDrafter

__all__ = [
    "OFF",
    "Arm",
    "Draft",
    "DraftForm",
    "DraftLayer",
    "DraftShape",
    "Drafter",
    "DrafterKind",
    "Eagle3Layer",
    "Eagle3Shape",
    "FeatureSink",
    "LayerDrafter",
    "Noise",
    "PolicyReader",
    "RowStart",
    "StepUpdate",
    "SuffixDrafter",
    "exported_tensors",
    "layer_of",
    "load_drafter",
    "parse_arm",
    "read_speculator",
    "shape_from",
    "tapped",
    "trained_steps",
    "write_drafter",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
