"""Training of the draft layer in the waits of its node, on features of the policy.

Begin with `online_drafter` (all of it joined). Features: `features` writes them into the `feature_ring`,
`batches` selects and packs them. Training: `learning` (steps, evaluation), `losses`, `gate` (publication,
pauses). Where it runs: `trainer_supervisor` starts `trainer_process`, a `suspended_process` with
`trainer_loop`; `trainer_memory`, `publishing` and `slot_memory` are its shared memory; on CUDA `idle_stream`
instead. `windows` records the waits. Called by training loops, rollout workers and servers.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.child import Restarts
    from aedit.spec_rollout.training.batches import pack_samples
    from aedit.spec_rollout.training.feature_ring import FeatureReader, FeatureRing, FeatureSample, RingShape
    from aedit.spec_rollout.training.features import ForwardFeatures, RowFeatures, TrainedText
    from aedit.spec_rollout.training.gate import GateConfig, Match, held_out_match
    from aedit.spec_rollout.training.learning import (
        DraftTrainer,
        DraftTrainingConfig,
        LayerTraining,
        LearningConfig,
        policy_tensors,
        train_when_idle,
    )
    from aedit.spec_rollout.training.losses import LossConfig, PolicyEmbeddings
    from aedit.spec_rollout.training.online_drafter import (
        CAUSES,
        OnlineConfig,
        OnlineDrafter,
        PolicySource,
        TrainedPolicy,
    )
    from aedit.spec_rollout.training.pretraining import JUDGED_EVERY, policy_ends, train_drafter
    from aedit.spec_rollout.training.publishing import Publication, SharedSlots, SlotLayout, TensorSpec
    from aedit.spec_rollout.training.slot_memory import CHECKSUM, NEWEST, NUMBER, ArrayReader
    from aedit.spec_rollout.training.trainer_memory import TrainerMemory
    from aedit.spec_rollout.training.trainer_supervisor import DrafterTraining, IdleConfig

__all__ = [
    "CAUSES",
    "CHECKSUM",
    "JUDGED_EVERY",
    "NEWEST",
    "NUMBER",
    "ArrayReader",
    "DraftTrainer",
    "DraftTrainingConfig",
    "DrafterTraining",
    "FeatureReader",
    "FeatureRing",
    "FeatureSample",
    "ForwardFeatures",
    "GateConfig",
    "IdleConfig",
    "LayerTraining",
    "LearningConfig",
    "LossConfig",
    "Match",
    "OnlineConfig",
    "OnlineDrafter",
    "PolicyEmbeddings",
    "PolicySource",
    "Publication",
    "Restarts",
    "RingShape",
    "RowFeatures",
    "SharedSlots",
    "SlotLayout",
    "TensorSpec",
    "TrainedPolicy",
    "TrainedText",
    "TrainerMemory",
    "held_out_match",
    "pack_samples",
    "policy_ends",
    "policy_tensors",
    "train_drafter",
    "train_when_idle",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
