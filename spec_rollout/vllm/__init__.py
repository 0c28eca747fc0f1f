"""Plug-in of vLLM: coupled sampling, also under speculation, and weight updates that are checked before use.

A package of its own: it imports torch, numpy and vLLM, and no other module of aedit. Rollout workers that
run vLLM load it from here; for a vLLM server install it beside vLLM: `pip install ./spec_rollout/vllm`. vLLM
calls `register` in each of its processes.

- `noise.py`: counter-based noise, the same bits as the own engine's.
- `coupled.py`: the logits processor, and its hooks in vLLM's samplers and drafters.
- `weights.py`: the weight transfer engine `aedit`.
"""

import os

KNOWN = ("0.32.0",)
"""Versions of vLLM whose internals the hooks fit."""
EXTRA = "aedit"
"""Name in `SamplingParams.extra_args` of [rollout, sample, temperature]; `temperature` itself must be 0."""


def register() -> None:
    """Install the hooks and the weight engine. vLLM calls it; a second call does nothing.

    Raises:
        RuntimeError: This version of vLLM, or its model runner V2, is unknown to the plug-in.
    """
    import vllm
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import register_model_loader

    from . import coupled, weights

    if vllm.__version__.split("+")[0] not in KNOWN:
        raise RuntimeError(
            f"aedit-vllm: vLLM {vllm.__version__} is unknown: install one of {', '.join(KNOWN)}, or set"
            " VLLM_PLUGINS= to run vLLM without the plug-in"
        )
    # V2 draws in kernels of its own, without logits processors: keyed requests would be greedy there.
    if os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
        raise RuntimeError("aedit-vllm: coupled sampling needs runner V1: set VLLM_USE_V2_MODEL_RUNNER=0")
    if "aedit" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("aedit", f"{__name__}.weights", "CheckedWeights")
        register_model_loader("aedit")(weights.DraftLoader)
    coupled.install()
