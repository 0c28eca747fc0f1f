"""Read the parameters of a `transformers` model of a known family, by reference.

A family is one class of `transformers`: no subclass, and no class that was changed. What the class's own
forward pass does is described once per family; a configuration that asks for more is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from aedit.spec_rollout.model.experts import Experts
from aedit.spec_rollout.model.family_checks import check_parameters, check_value
from aedit.spec_rollout.model.layers import (
    Attention,
    AttentionSpec,
    Function,
    FusedGatedMLP,
    FusedQKV,
    GatedMLP,
    HeadNormQKV,
    Layer,
    LayerNorm,
    LayerShape,
    Linear,
    OffsetRMSNorm,
    PlainMLP,
    RMSNorm,
    SeparateQKV,
    TransposedLinear,
)
from aedit.spec_rollout.model.model_weights import ModelWeights
from aedit.spec_rollout.model.rotary import Rotary
from aedit.spec_rollout.model.supported import unsupported_reason

ACTIVATIONS: Mapping[str, Function] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_new": partial(F.gelu, approximate="tanh"),
        "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
    }
)

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Norms:
    """Names of a layer's norms in `transformers`, and their kind."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    kind: Callable[[Tensor, float], Function] = RMSNorm.of
    eps: str = "variance_epsilon"
    """Name of a norm's epsilon."""

    def read(self, module: Any) -> Function:
        """Return the norm that `module` computes."""
        return self.kind(module.weight, getattr(module, self.eps))


GEMMA_NORMS = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    kind=OffsetRMSNorm.of,
    eps="eps",
)
OLMO_NORMS = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of one class from Llama, in its forward pass."""

    norms: Norms = Norms()
    windows: Literal["none", "all", "typed"] = "none"
    """Layers with a sliding window: those of `config.layer_types` where "typed"."""
    activation: str = "hidden_act"
    """Key of the activation in the configuration."""
    has_whole_qk_norm: bool = False
    """Whether queries and keys are normalized over all heads together."""
    has_attention_cap: bool = False
    implemented: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Keys of the configuration, each with the only values that this forward pass implements."""


_CAUSAL = ("use_bidirectional_attention", (None, False))
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(implemented=(("pretraining_tp", (None, 1)),)),
        "Qwen2ForCausalLM": Family(windows="typed"),
        "Qwen3ForCausalLM": Family(windows="typed"),
        "MistralForCausalLM": Family(windows="all"),
        "Gemma2ForCausalLM": Family(
            GEMMA_NORMS,
            "typed",
            "hidden_activation",
            has_attention_cap=True,
            implemented=(_CAUSAL,),
        ),
        # Gemma 3 has a key for the cap of attention that its forward pass does not use.
        "Gemma3ForCausalLM": Family(
            GEMMA_NORMS,
            "typed",
            "hidden_activation",
            implemented=(_CAUSAL, ("attn_logit_softcapping", (None,))),
        ),
        "Phi3ForCausalLM": Family(windows="all"),
        "Olmo2ForCausalLM": Family(OLMO_NORMS, has_whole_qk_norm=True),
        "SmolLM3ForCausalLM": Family(windows="typed"),
        "MixtralForCausalLM": Family(windows="all"),
        "Qwen3MoeForCausalLM": Family(windows="all"),
        "GPT2LMHeadModel": Family(
            activation="activation_function",
            implemented=(("add_cross_attention", (False,)), ("reorder_and_upcast_attn", (False,))),
        ),
    }
)


def read_weights(model: nn.Module) -> ModelWeights:
    """Return the parameters, sizes and constants that `Target` computes with.

    Raises:
        ValueError: The class, a part of it, a value of its configuration, sharding or a dtype is not
            supported. The message names it.
    """
    check_parameters(model)
    family = FAMILIES.get(type(model).__name__)
    if family is None:
        raise ValueError(f"{type(model).__name__} is not supported: use one of {', '.join(FAMILIES)}")
    config: Any = model.config
    check_value(config, family.activation, tuple(ACTIVATIONS))
    for key, values in family.implemented:
        check_value(config, key, values)
    if reason := unsupported_reason(model):
        raise ValueError(f"not supported: {reason}")
    activation = ACTIVATIONS[getattr(config, family.activation)]
    if type(model).__name__ == "GPT2LMHeadModel":
        return _gpt2(model, activation)
    return Reader.of(model, family, activation).weights()


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads a model that has the module names of Llama."""

    config: Any
    inner: Any
    head: Tensor
    family: Family
    activation: Function
    shape: LayerShape
    rotary: Rotary

    @classmethod
    def of(cls, model: Any, family: Family, activation: Function) -> "Reader":
        """Return a reader of this model."""
        config, attention = model.config, model.model.layers[0].self_attn
        shape = LayerShape(config.num_attention_heads, config.num_key_value_heads, attention.head_dim)
        rotary = Rotary.of(model)
        assert rotary is not None
        return cls(config, model.model, model.lm_head.weight, family, activation, shape, rotary)

    def weights(self) -> ModelWeights:
        """Return the model's parameters."""
        embedding, layers = self.inner.embed_tokens, self.inner.layers[: self.config.num_hidden_layers]
        scale = getattr(embedding, "embed_scale", None)
        return ModelWeights(
            embedding=embedding.weight,
            layers=tuple(self._layer(index, layer) for index, layer in enumerate(layers)),
            norm=self.family.norms.read(self.inner.norm),
            head=self.head,
            shape=self.shape,
            attention=tuple(self._spec(index, layer.self_attn) for index, layer in enumerate(layers)),
            embedding_scale=None if scale is None else scale.to(embedding.weight.dtype).item(),
            logit_cap=getattr(self.config, "final_logit_softcapping", None),
            max_positions=self.rotary.max_positions,
            is_static=not any(hasattr(layer.mlp, "experts") for layer in layers),
        )

    def _layer(self, index: int, module: Any) -> Layer:
        attention, norms = module.self_attn, self.family.norms
        rotate, table = self.rotary.of_layer(self._layer_type(index), self.shape.head_dim)
        has_rope = getattr(attention, "use_rope", True)
        names = norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp
        return Layer(
            Attention(
                self._qkv(attention),
                rotate if has_rope else None,
                table,
                (self.shape.num_heads, self.shape.num_kv_heads),
                _linear(attention.o_proj),
            ),
            self._mlp(module.mlp),
            *(None if name is None else norms.read(getattr(module, name)) for name in names),
        )

    def _layer_type(self, index: int) -> str | None:
        if self.family.windows != "typed":
            return None
        kind: str = self.config.layer_types[index]
        if kind not in LAYER_TYPES:
            raise ValueError(f"layer_types {kind!r} is not supported: it must be {' or '.join(LAYER_TYPES)}")
        return kind

    def _spec(self, index: int, module: Any) -> AttentionSpec:
        cap = self.config.attn_logit_softcapping if self.family.has_attention_cap else None
        kind = "sliding_attention" if self.family.windows == "all" else self._layer_type(index)
        window = self.config.sliding_window if kind == "sliding_attention" else None
        return AttentionSpec(module.scaling, window, cap)

    def _qkv(self, module: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        head_dim = self.shape.head_dim
        if hasattr(module, "qkv_proj"):
            sizes = self.shape.num_heads + self.shape.num_kv_heads, self.shape.num_kv_heads
            return FusedQKV(_linear(module.qkv_proj), head_dim, sizes)
        projections = _linear(module.q_proj), _linear(module.k_proj), _linear(module.v_proj)
        if not hasattr(module, "q_norm"):
            return SeparateQKV(*projections, head_dim)
        norms = self.family.norms.read(module.q_norm), self.family.norms.read(module.k_norm)
        kind = SeparateQKV if self.family.has_whole_qk_norm else HeadNormQKV
        return kind(*projections, head_dim, *norms)

    def _mlp(self, module: Any) -> Function:
        if hasattr(module, "experts"):
            router, experts = module.gate, module.experts
            is_normalized = getattr(router, "norm_topk_prob", True)  # Mixtral always normalizes
            weights = router.weight, experts.gate_up_proj, experts.down_proj
            return Experts(*weights, router.top_k, is_normalized, self.activation)
        if hasattr(module, "gate_up_proj"):
            return FusedGatedMLP(_linear(module.gate_up_proj), _linear(module.down_proj), self.activation)
        gate, up, down = (_linear(one) for one in (module.gate_proj, module.up_proj, module.down_proj))
        return GatedMLP(gate, up, down, self.activation)


def _linear(module: Any) -> Function:
    return Linear(module.weight, module.bias)


def _gpt2(model: Any, activation: Function) -> ModelWeights:
    """Return the parameters of GPT-2."""
    config, inner = model.config, model.transformer
    shape = LayerShape(config.n_head, config.n_head, config.n_embd // config.n_head)

    def norm(module: nn.LayerNorm) -> LayerNorm:
        return LayerNorm(module.weight, module.bias, module.eps)

    def linear(module: Any) -> TransposedLinear:
        return TransposedLinear(module.weight, module.bias)

    def layer(module: Any) -> Layer:
        qkv = FusedQKV(linear(module.attn.c_attn), shape.head_dim, (2 * config.n_head, config.n_head))
        sizes = config.n_head, config.n_head
        attention = Attention(qkv, None, 0, sizes, linear(module.attn.c_proj))
        mlp = PlainMLP(linear(module.mlp.c_fc), linear(module.mlp.c_proj), activation)
        return Layer(attention, mlp, before_attention=norm(module.ln_1), before_mlp=norm(module.ln_2))

    return ModelWeights(
        embedding=inner.wte.weight,
        layers=tuple(layer(module) for module in inner.h[: config.n_layer]),
        norm=norm(inner.ln_f),
        head=model.lm_head.weight,
        shape=shape,
        attention=tuple(AttentionSpec(module.attn.scaling) for module in inner.h[: config.n_layer]),
        position_embedding=inner.wpe.weight,
        max_positions=inner.wpe.weight.shape[0],
    )
