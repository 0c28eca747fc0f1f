"""Weight transfer engine `aedit`: a version is taken whole or not at all.

`update_weights` checks hash, names, shapes, dtypes and finiteness and changes nothing; `finish_weight_update`
loads. So a refused version leaves the model as it was, which vLLM's own engines do not promise:
`reload_weights` loses the engine, and `apply_model(load_weights)` mixes two versions. The caller resets the
prefix cache with each version, whose keys and values are those of other weights.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.config.load import LoadConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import DefaultModelLoader, DummyModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

Table = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each tensor by its name; dtypes as safetensors writes them."""
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass
class CheckedInit(WeightTransferInitInfo):
    """Tensors that each version must have: those of a safetensors file, or like tensors of this process."""

    base: str = ""
    draft_base: str = ""
    """The same for the draft model."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Their values are not read."""
    draft_tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class CheckedUpdate(WeightTransferUpdateInfo):
    """A version: a safetensors file, or tensors of this process."""

    path: str = ""
    sha256: str = ""
    """Expected hash of the file; empty: not compared."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class CheckedWeights(WeightTransferEngine[CheckedInit, CheckedUpdate]):
    """Weight engine `aedit`; see `weight_transfer_config`."""

    init_info_cls, update_info_cls = CheckedInit, CheckedUpdate

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._base: Table = {}
        self._draft_base: Table = {}
        self._ready: Callable[[str], Tensor] | None = None
        """Returns a tensor of the version that was checked."""
        self._names: list[str] = []

    def init_transfer_engine(self, init_info: CheckedInit) -> None:
        """Read what each version must have."""
        own, draft = init_info.base, init_info.draft_base
        self._base = file_table(own) if own else tensor_table(init_info.tensors)
        self._draft_base = file_table(draft) if draft else tensor_table(init_info.draft_tensors)

    def start_weight_update(self) -> None:
        """Forget a version that was not finished."""
        self._ready = None

    def receive_weights(self, update_info: CheckedUpdate) -> None:
        """Check a version; nothing is loaded yet.

        Raises:
            ValueError: It is not what was announced, or does not fit the model.
        """
        base = self._base if self.model is self._default_model else self._draft_base
        get, table, name = _opened(update_info)
        if base and table != base:
            wrong = sorted({*base} ^ {*table}) or [each for each in base if base[each] != table[each]]
            found, wanted = table.get(wrong[0], "missing"), base.get(wrong[0], "no such tensor")
            raise ValueError(f"{name}: {wrong[0]} is {found}, expected {wanted}; {len(wrong)} tensors differ")
        for each in table:
            tensor = get(each)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name}: {each} has values that are not finite")
        self._ready, self._names = get, list(table)

    def finish_weight_update(self) -> None:
        """Load the version that was checked.

        Raises:
            RuntimeError: None was.
        """
        if self._ready is None:
            raise RuntimeError("finish_weight_update: no version was received: call update_weights first")
        get, self._ready = self._ready, None
        initialize_layerwise_reload(self.model)
        self.model.load_weights((name, get(name)) for name in self._names)
        finalize_layerwise_reload(self.model, self.model_config)
        self._pack_tied_heads()

    def shutdown(self) -> None:
        """Forget a version that was not finished."""
        self._ready = None

    def _pack_tied_heads(self) -> None:
        """Pack heads anew that share the embedding's weights.

        On a CPU vLLM computes with a packed copy of the head. A reload packs the embedding anew but not a
        head that is tied to it, which would go on with the old version.
        """
        modules = list(self.model.modules())
        embeddings = {
            id(each.weight)
            for each in modules
            if isinstance(each, VocabParallelEmbedding) and not isinstance(each, ParallelLMHead)
        }
        heads = [each for each in modules if isinstance(each, ParallelLMHead) and hasattr(each, "cpu_linear")]
        for each in heads:
            if id(each.weight) in embeddings:
                each.quant_method.process_weights_after_loading(each)


class DraftLoader(DummyModelLoader):
    """Load format `aedit`: a drafter is read from its files; a policy stays random until a version comes.

    vLLM loads a draft model in the policy's format, so that one beside a policy of format `dummy` would stay
    random.
    """

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Read a drafter; give a policy random weights."""
        if model_config.runner == "draft":
            DefaultModelLoader(LoadConfig()).load_weights(model, model_config)
        else:
            super().load_weights(model, model_config)


def file_table(path: str) -> Table:
    """Return names, shapes and dtypes of a safetensors file."""
    with open(path, "rb") as file:
        head = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: (tuple(each["shape"]), each["dtype"]) for name, each in head.items() if "dtype" in each}


def tensor_table(tensors: Mapping[str, Tensor]) -> Table:
    """Return names, shapes and dtypes of tensors."""
    dtypes = {name: DTYPES.get(each.dtype, str(each.dtype)) for name, each in tensors.items()}
    return {name: (tuple(each.shape), dtypes[name]) for name, each in tensors.items()}


def _opened(info: CheckedUpdate) -> tuple[Callable[[str], Tensor], Table, str]:
    """Return a function that reads a tensor, the table of all, and the version's name in messages."""
    if not info.path:
        return info.tensors.__getitem__, tensor_table(info.tensors), "weights"
    if info.sha256:
        with open(info.path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != info.sha256:
            raise ValueError(f"{info.path}: its hash is {sha256}, expected {info.sha256}: send it again")
    return safe_open(info.path, "pt").get_tensor, file_table(info.path), info.path
