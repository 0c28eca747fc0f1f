"""Parameters of a `transformers` model of a known family, by reference, and refusal of what differs from it.

A family is one class of `transformers`: no subclass, and no class that was changed. What the class's own
forward pass does is described once per family; a configuration that asks for more is refused by name.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module

from aedit.spec_rollout.model.layers import (
    QKV,
    Attention,
    AttentionSpec,
    Experts,
    Function,
    JoinedLinear,
    Layer,
    LayerShape,
    Linear,
    RMSNorm,
    Rotary,
    fused_gated_mlp,
    fused_qkv,
    gated_mlp,
    separate_qkv,
)

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
    kind=partial(RMSNorm.of, adds_one=True),
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


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model's own parameters, sizes and constants."""

    embedding: Tensor
    """(V, d)."""
    layers: tuple[Layer, ...]
    norm: Function
    head: Tensor
    """(V, d). The same tensor as `embedding` where the two are tied."""
    shape: LayerShape
    attention: tuple[AttentionSpec, ...]
    """One for each layer."""
    embedding_scale: float | None = None
    """Factor of the embedding, of Gemma."""
    position_embedding: Tensor | None = None
    """(P, d), added to the embedding: learned positions, of GPT-2."""
    logit_cap: float | None = None
    """Upper limit c of the logits' absolute values: c * tanh(logits / c), of Gemma 2."""
    max_positions: int | None = None
    """Number of positions that the model has; None where the number has no limit."""
    is_static: bool = True
    """Whether the calls do not depend on values, so that a CUDA graph can capture them."""
    projections: tuple[Linear | JoinedLinear, ...] = ()
    """Those of the layers."""
    to_logits: Linear = field(init=False)
    """The head."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "to_logits", Linear(self.head))

    def pack(self, most_bytes: int) -> None:
        """Pack the weights of the products, if the copies take at most `most_bytes`; see `Linear.pack`."""
        found = [each for each in (*self.projections, self.to_logits) if each.can_be_packed]
        if sum(each.nbytes for each in found) <= most_bytes:
            for each in found:
                each.pack()

    def moves_to_huge_pages(self) -> Iterator[None]:
        """Move packed copies to memory in which they are read faster, a part at a time."""
        for each in (*self.projections, self.to_logits):
            yield from each.moves_to_huge_pages()

    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return the input of the first layer, (T, d)."""
        x_Td = F.embedding(tokens_T, self.embedding)
        if self.embedding_scale is not None:
            x_Td = x_Td * self.embedding_scale
        if self.position_embedding is not None:
            # Only drafted tokens after the last token of a text lie beyond; they are never kept.
            known = positions_T.clamp(max=len(self.position_embedding) - 1)
            x_Td = x_Td + F.embedding(known, self.position_embedding)
        return x_Td

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits (..., V) of features (..., f)."""
        logits = self.to_logits(features[..., : self.embedding.shape[1]])
        if self.logit_cap is None:
            return logits
        return logits.div_(self.logit_cap).tanh_().mul_(self.logit_cap)


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
    return ModelReader.of(model, family, activation).weights()


@dataclass(frozen=True, slots=True)
class ModelReader:
    """Reads a model that has the module names of Llama."""

    config: Any
    inner: Any
    head: Tensor
    family: Family
    activation: Function
    shape: LayerShape
    rotary: Rotary
    projections: list[Linear | JoinedLinear] = field(default_factory=list)

    @classmethod
    def of(cls, model: Any, family: Family, activation: Function) -> "ModelReader":
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
            projections=tuple(self.projections),
        )

    def _linear(self, module: Any) -> Linear:
        linear = Linear(module.weight, module.bias)
        self.projections.append(linear)
        return linear

    def _joined(self, *modules: Any) -> JoinedLinear:
        joined = JoinedLinear(tuple(Linear(module.weight, module.bias) for module in modules))
        self.projections.append(joined)
        return joined

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
                self._linear(attention.o_proj),
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

    def _qkv(self, module: Any) -> QKV:
        head_dim = self.shape.head_dim
        sizes = self.shape.num_heads + self.shape.num_kv_heads, self.shape.num_kv_heads
        if hasattr(module, "qkv_proj"):
            return fused_qkv(self._linear(module.qkv_proj), head_dim, sizes)
        to_qkv = self._joined(module.q_proj, module.k_proj, module.v_proj)
        if not hasattr(module, "q_norm"):
            return separate_qkv(to_qkv, head_dim, sizes)
        norms = self.family.norms.read(module.q_norm), self.family.norms.read(module.k_norm)
        return separate_qkv(to_qkv, head_dim, sizes, norms, norms_heads=not self.family.has_whole_qk_norm)

    def _mlp(self, module: Any) -> Function:
        if hasattr(module, "experts"):
            router, experts = module.gate, module.experts
            is_normalized = getattr(router, "norm_topk_prob", True)  # Mixtral always normalizes
            weights = router.weight, experts.gate_up_proj, experts.down_proj
            return Experts(*weights, router.top_k, is_normalized, self.activation)
        if hasattr(module, "gate_up_proj"):
            return fused_gated_mlp(
                self._linear(module.gate_up_proj), self._linear(module.down_proj), self.activation
            )
        gate_up = self._joined(module.gate_proj, module.up_proj)
        return gated_mlp(gate_up, self._linear(module.down_proj), self.activation)


def _gpt2(model: Any, activation: Function) -> ModelWeights:
    """Return the parameters of GPT-2."""
    config, inner = model.config, model.transformer
    shape = LayerShape(config.n_head, config.n_head, config.n_embd // config.n_head)

    def norm(module: nn.LayerNorm) -> Function:
        weight, bias, eps = module.weight, module.bias, module.eps
        return lambda x: F.layer_norm(x, weight.shape, weight, bias, eps)

    projections: list[Linear] = []

    def projection(module: Any) -> Linear:
        projections.append(Linear(module.weight, module.bias, is_transposed=True))
        return projections[-1]

    def layer(module: Any) -> Layer:
        qkv = fused_qkv(projection(module.attn.c_attn), shape.head_dim, (2 * config.n_head, config.n_head))
        sizes = config.n_head, config.n_head
        attention = Attention(qkv, None, 0, sizes, projection(module.attn.c_proj))
        up, down = projection(module.mlp.c_fc), projection(module.mlp.c_proj)
        return Layer(
            attention,
            lambda x: down(activation(up(x))),
            before_attention=norm(module.ln_1),
            before_mlp=norm(module.ln_2),
        )

    return ModelWeights(
        embedding=inner.wte.weight,
        layers=tuple(layer(module) for module in inner.h[: config.n_layer]),
        norm=norm(inner.ln_f),
        head=model.lm_head.weight,
        shape=shape,
        attention=tuple(AttentionSpec(module.attn.scaling) for module in inner.h[: config.n_layer]),
        position_embedding=inner.wpe.weight,
        max_positions=inner.wpe.weight.shape[0],
        projections=tuple(projections),
    )


def check_parameters(model: nn.Module) -> None:
    """Check that the parameters are plain tensors in one dtype.

    Raises:
        ValueError: Parameters are sharded, quantized, or in several or unknown dtypes.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                "the model's parameters are sharded (DTensor): pass a model with full parameters"
            )
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            kind = type(parameter.data).__name__
            raise ValueError(f"{name} is a {kind}: only plain tensors are supported, no quantized ones")
    kinds = {parameter.dtype for parameter in model.parameters()}
    if len(kinds) > 1 or not (kinds <= {torch.float64, torch.float32, torch.bfloat16}):
        raise ValueError(
            f"parameters in {', '.join(sorted(map(str, kinds)))}: all must be in one of fp64, fp32, bf16"
        )


def check_value(config: Any, key: str, implemented: tuple[Any, ...]) -> None:
    """Check one value of a configuration. A key that it lacks is not checked.

    Raises:
        ValueError: The value is none of `implemented`.
    """
    value = getattr(config, key, implemented[0])
    if value not in implemented:
        rule = " or ".join(map(str, implemented))
        raise ValueError(f"{key} {value!r} is not supported: it must be {rule}")


HARMLESS_HOOKS = ("aedit.edit.", "transformers.modeling_utils", "transformers.utils.output_capturing")
"""Modules whose forward hooks change no output: landing of anchors, gradients of inputs, recorded outputs."""
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention implementations of `transformers`, all of which compute the same function."""


def unsupported_reason(model: nn.Module) -> str:
    """Return why the model's own forward pass differs from what its configuration says; "" if it does not.

    One line that names the module, what was found and what was expected.
    """
    config: Any = getattr(model, "config", None)
    if not type(model).__module__.startswith("transformers.") or config is None:
        return f"{type(model).__name__} of {type(model).__module__} is not a class of transformers"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "a forward hook for all modules is registered: remove it"
    attention = getattr(config, "_attn_implementation", None)
    if attention is not None and attention not in ATTENTION:
        return f"attention implementation {attention!r} is not one of {', '.join(ATTENTION)}"
    reference = _as_configured(type(model), config)
    found = dict(model.named_modules())
    for name, expected in reference.named_modules():
        if name not in found:
            return f"{name} is missing: its configuration has a {type(expected).__name__} there"
        reason = _difference(found[name], expected)
        if reason:
            return f"{name or type(model).__name__} {reason}"
    return ""


def _as_configured(family: type[nn.Module], config: Any) -> nn.Module:
    """Return the model that `transformers` builds from the configuration, without memory; not to be changed.

    The last one is kept: engines are often made of one configuration, and building takes 20 ms and more.
    """
    key = family, repr({**config.to_dict(), "attention": getattr(config, "_attn_implementation", None)})
    if key not in _newest_reference:
        with torch.device("meta"), torch.random.fork_rng(devices=()):
            built = family(copy.deepcopy(config))
        _newest_reference.clear()
        _newest_reference[key] = built
    return _newest_reference[key]


_newest_reference: dict[tuple[type[nn.Module], str], nn.Module] = {}


def _difference(module: nn.Module, expected: nn.Module) -> str:
    """Return the first difference of a module from the expected one, without their children; "" if none."""
    kind, wanted = type(module), type(expected)
    if kind is not wanted:
        return f"is a {kind.__name__} of {kind.__module__}: only {wanted.__name__} is supported"
    if _has_other_forward(module):
        return f"has another forward method than {kind.__name__} of {kind.__module__}"
    hook = next(_changing_hooks(module), None)
    if hook is not None:
        return f"has a forward hook, {getattr(hook, '__qualname__', type(hook).__name__)}: remove it"
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) != len(expected):  # type: ignore[arg-type]
        return f"has {len(module)} members: its configuration has {len(expected)}"  # type: ignore[arg-type]
    return _parameter_difference(module, expected) or _setting_difference(module, expected)


def _has_other_forward(module: nn.Module) -> bool:
    """Return true if forward was replaced, on the instance or in the class."""
    if "forward" in vars(module):
        return True
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return getattr(vars(owner)["forward"], "__module__", None) != owner.__module__


def _changing_hooks(module: nn.Module) -> Iterator[Any]:
    hooks: list[Mapping[int, Any]] = [module._forward_pre_hooks, module._forward_hooks]
    for hook in (hook for each in hooks for hook in each.values()):
        function = hook.func if isinstance(hook, functools.partial) else hook
        if not str(getattr(function, "__module__", "")).startswith(HARMLESS_HOOKS):
            yield hook


def _parameter_difference(module: nn.Module, expected: nn.Module) -> str:
    found, wanted = (
        {name: tuple(each.shape) for name, each in one._parameters.items() if each is not None}
        for one in (module, expected)
    )
    for name in sorted(found.keys() ^ wanted.keys()):
        where = "unlike" if name in found else "which is there in"
        return (
            f"has {'a' if name in found else 'no'} parameter {name}, {where} the model of its configuration"
        )
    for name, shape in found.items():
        if shape != wanted[name]:
            return f"has the parameter {name} of shape {shape}: its configuration says {wanted[name]}"
    return ""


def _setting_difference(module: nn.Module, expected: nn.Module) -> str:
    """Compare numbers, texts and flags that the module's forward may read."""
    if hasattr(expected, "post_init") or isinstance(expected, nn.Dropout):
        return ""  # whole models have settings of training; dropout is off when text is generated
    for name, wanted in vars(expected).items():
        plain = wanted is None or isinstance(wanted, bool | int | float | str)
        if not plain or name.startswith("_") or name in ("training", "gradient_checkpointing"):
            continue
        found = vars(module).get(name)
        if "dropout" not in name and not _is_same(found, wanted):
            return f"has {name} {found!r}: its configuration says {wanted!r}"
    return ""


def _is_same(found: object, wanted: object) -> bool:
    if isinstance(found, float) and isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=1e-12)
    return found is wanted or (isinstance(found, bool | int | float | str) and found == wanted)
