"""Forward pass of the policy for the engine: layers, KV cache, attention masks, CUDA graphs.

Begin with `target_model`, the interface. `target` is the fast path: `families` reads a known model's
parameters, `layers` computes with them, `prefill` computes prompts, `graphs` captures CUDA graphs. `generic`
runs any `transformers` model, and chooses between the two: `model_forward`, `row_passes`, `slot_store`. KV
cache: `cache` over `kv_storage`; `attention_mask` has the masks of both paths. `weight_update` changes
weights between two steps. `model_support` has what both paths check. Called by `engine`, and by drafters for
their shapes.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.model.attention_mask import ancestors
    from aedit.spec_rollout.model.cache import KVMemory
    from aedit.spec_rollout.model.generic import Path, make_target
    from aedit.spec_rollout.model.graphs import GraphCache, batch_bucket, context_bucket
    from aedit.spec_rollout.model.kv_storage import KVMemoryError, PagedTensor
    from aedit.spec_rollout.model.layers import linear
    from aedit.spec_rollout.model.model_forward import HiddenStates, cache_argument, tapped_layers
    from aedit.spec_rollout.model.model_support import generating, to_device, unwrapped, whole
    from aedit.spec_rollout.model.prefill import Segment
    from aedit.spec_rollout.model.target import Target
    from aedit.spec_rollout.model.target_model import TargetModel
    from aedit.spec_rollout.model.weight_update import SpareWeights

__all__ = [
    "GraphCache",
    "HiddenStates",
    "KVMemory",
    "KVMemoryError",
    "PagedTensor",
    "Path",
    "Segment",
    "SpareWeights",
    "Target",
    "TargetModel",
    "ancestors",
    "batch_bucket",
    "cache_argument",
    "context_bucket",
    "generating",
    "linear",
    "make_target",
    "tapped_layers",
    "to_device",
    "unwrapped",
    "whole",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
