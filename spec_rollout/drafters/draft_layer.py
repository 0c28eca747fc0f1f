"""Weights of the learned drafters: one decoder layer over pairs of feature and next token.

EAGLE (arXiv:2401.15077): the pair at position t is the policy's last hidden state at t, after its final norm
(the feature), and the token at t + 1. The output predicts the feature at t + 1, from which the policy's own
head predicts the token at t + 2. A predicted feature can take the place of a feature, so that chains grow.

Three choices differ from EAGLE's, so that predictions have the distribution of features: the layer keeps its
input norm; its output passes a norm that starts as a copy of the policy's final norm; and embeddings are
scaled to the size of features before the two are concatenated.

Embedding and head belong to the policy. They are arguments without gradient and never part of the module: not
saved, not sent, not loaded.

`Eagle3Layer` is the form that other engines load (EAGLE-3, arXiv:2503.01840): features are the outputs of
three layers of the policy, and a head of its own predicts tokens, of a part of the vocabulary or of all.

Shapes: N sequences, P pairs, S positions that can be attended to, d hidden size, w feature size, H heads, K
key/value heads, e head size, V vocabulary, D draft vocabulary.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from aedit.spec_rollout.model import whole
from aedit.types import check, first_line
from aedit.weights import refuse_meta_default, save_tensors

SHARED = ("embed", "lm_head", "head", "wte")
"""Substrings of the names of tensors that belong to the policy."""
_SHAPE, _STEPS = "aedit.draft_shape", "aedit.draft_steps"


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of a draft layer and the frequencies of its rotary positions."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary: int
    norm_epsilon: float
    has_qk_norm: bool
    has_qkv_bias: bool
    frequencies: tuple[float, ...]
    """Radians per position of each pair of head dimensions."""
    rope_scale: float
    taps: int
    """Number of policy layers whose outputs follow the last hidden state in a feature (EAGLE-3's fusion)."""

    @classmethod
    def of(cls, config: Any, *, taps: int = 0) -> Self:
        """Return the shape for a transformers configuration.

        Raises:
            ValueError: There is no draft layer for this type of model: logits with a cap, angles that differ
                between layers, learned positions. The rotary positions depend on the length, or `taps` is
                negative.
        """
        check(taps >= 0, "taps", "must be 0 or more", taps)
        rule = f"must be one of {', '.join(_POLICIES)} for a draft layer"
        check(config.model_type in _POLICIES, "the policy's model_type", rule, config.model_type)
        frequencies, scale = _rotary(config)
        heads = config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            norm_epsilon=config.rms_norm_eps,
            has_qk_norm=config.model_type == "qwen3",
            has_qkv_bias=config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False)),
            frequencies=frequencies,
            rope_scale=scale,
            taps=taps,
        )

    @property
    def feature_size(self) -> int:
        """Return w, the size of the feature of one token."""
        return self.hidden_size * (1 + self.taps)

    @property
    def kv_size(self) -> int:
        """Return the number of values that one position takes in a cache, keys and values together."""
        return 2 * self.num_kv_heads * self.head_size

    def tapped(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a policy with `num_layers` whose outputs are in its features."""
        return tapped(self.taps, num_layers)

    @property
    def split(self) -> tuple[int, int]:
        """Return the widths of queries and of keys in the joint projection; values are as wide as keys."""
        return self.num_heads * self.head_size, self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class Eagle3Shape(DraftShape):
    """Sizes of an EAGLE-3 layer."""

    tap_layers: tuple[int, ...]
    """Layers of the policy whose outputs are in a feature, ascending."""
    draft_tokens: tuple[int, ...]
    """Tokens that the layer can draft, ascending; empty: all."""
    residual_after_norm: bool
    """The residual path begins with the norm's output, not with its input."""

    @classmethod
    def for_policy(cls, config: Any, draft_tokens: Iterable[int] = ()) -> Self:
        """Return the shape for a transformers configuration; draft_tokens: as those of the shape.

        Raises:
            ValueError: There is no draft layer for this type of model, it has fewer than three layers, or a
                token is not of its vocabulary.
        """
        sizes = asdict(DraftShape.of(config, taps=3)) | {"has_qk_norm": False, "has_qkv_bias": False}
        tokens = tuple(sorted(set(draft_tokens)))
        rule = f"must be 0 to {config.vocab_size - 1}"
        known = not tokens or 0 <= tokens[0] <= tokens[-1] < config.vocab_size
        check(known, "draft tokens", rule, tokens[-1:])
        layers = eagle3_taps(config.num_hidden_layers)
        return cls(**sizes, tap_layers=layers, draft_tokens=tokens, residual_after_norm=True)

    def validate(self, num_layers: int) -> None:
        """Raise ValueError if a field cannot be that of a layer for a policy with `num_layers`.

        A layer of EAGLE-3 need not have the sizes of its policy, so that they cannot be compared.
        """
        for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_size"):
            value = getattr(self, name)
            check(type(value) is int and value > 0, name, "must be an integer above 0", value)
        pairs, given = self.head_size // 2, len(self.frequencies)
        check(given == pairs, "frequencies", f"must be {pairs} numbers", given)
        numbers = [("norm_epsilon", self.norm_epsilon), ("rope_scale", self.rope_scale)]
        for name, value in numbers + [("frequencies", each) for each in self.frequencies]:
            fits = type(value) in (int, float) and 0 < value < math.inf
            check(fits, name, "must be finite and above 0", value)
        is_known = len(self.tap_layers) == self.taps and _ascend(self.tap_layers, num_layers)
        rule = f"must be {self.taps} ascending layers of {num_layers}"
        check(is_known, "tap_layers", rule, self.tap_layers)
        rule = f"must be ascending tokens from 0 to {self.vocabulary - 1}"
        check(_ascend(self.draft_tokens, self.vocabulary), "draft_tokens", rule, self.draft_tokens[:8])
        is_bool = type(self.residual_after_norm) is bool
        check(is_bool, "residual_after_norm", "must be true or false", self.residual_after_norm)

    @property
    def num_draft_tokens(self) -> int:
        """Return D."""
        return len(self.draft_tokens) or self.vocabulary

    def tapped(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a policy with `num_layers` whose outputs are in its features."""
        return self.tap_layers


class DraftLayer(nn.Module):
    """The trainable part of a learned drafter. Its state dict is all that is saved, sent and loaded."""

    predicts_features = True
    """What it predicts is comparable with the policy's next feature."""

    def __init__(self, shape: DraftShape, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.gain = nn.Parameter(_ones(shape.hidden_size))
        """Scale of the embedding, so that tokens have the size of features."""
        self._add_inputs()
        m, d, (q, _) = shape.intermediate_size, shape.hidden_size, shape.split
        self.qk_norm = nn.Parameter(_ones(2, shape.head_size)) if shape.has_qk_norm else None
        self.attended = _linear(q, d, bias=False)
        self.middle_norm = nn.Parameter(_ones(d))
        self.gate_up = _linear(d, 2 * m, bias=False)
        self.down = _linear(m, d, bias=False)
        self.final_norm = nn.Parameter(_ones(d))
        self._draw(generator)

    def _add_inputs(self) -> None:
        d, (q, k) = self.shape.hidden_size, self.shape.split
        self.reduce = _linear(self.shape.feature_size, d, bias=False) if self.shape.taps else None
        self.fuse = _linear(2 * d, d, bias=False)
        self.input_norm = nn.Parameter(_ones(d))
        self.qkv = _linear(d, q + 2 * k, bias=self.shape.has_qkv_bias)

    @classmethod
    def outline(cls, shape: DraftShape) -> Self:
        """Return a layer without memory for its weights, to which those of a file are assigned.

        The sizes may be those of a damaged file: its tensors are compared with them before memory is taken.
        """
        with torch.device("meta"):
            return cls(shape)

    @classmethod
    def of(cls, model: Any, *, taps: int = 0, generator: torch.Generator | None = None) -> Self:
        """Return a new layer for a transformers model, on the model's device.

        Args:
            model: Model, or only its configuration.
            taps: Number of tapped layers in a feature, 0 or 3.
            generator: Source of the initial weights.

        All ranks of a node call it together if the model is sharded.

        Returns:
            A layer in float32, or float64 for a float64 model.
        """
        refuse_meta_default()
        config = getattr(model, "config", model)
        layer = cls(DraftShape.of(config, taps=taps), generator=generator)
        if config is model:
            nn.init.constant_(layer.gain, 1 / getattr(config, "initializer_range", 0.02))
            return layer
        embedding = whole(model.get_input_embeddings().weight.detach())
        layer.to(embedding.device, torch.promote_types(embedding.dtype, torch.float32))
        with torch.no_grad():
            layer.gain.fill_(1 / embedding.float().pow(2).mean().sqrt().clamp(min=1e-6).item())
            layer.final_norm.copy_(whole(model.base_model.norm.weight))
        return layer

    def forward(
        self,
        features_NPw: Tensor,
        embedded_NPd: Tensor,
        positions_NP: Tensor,
        visible_NPS: Tensor,
        past_NSkv: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return predicted features (N, P, d), and keys and values (N, P, kv_size), of pairs.

        Args:
            features_NPw: Features; w is the feature size, or d for predictions that are fed back.
            embedded_NPd: Rows of the policy's embedding for the tokens after the features.
            positions_NP: Positions of the features.
            visible_NPS: Bool, what each pair attends to: first `past_NSkv`, then the pairs of this call.
            past_NSkv: Keys and values of earlier calls, concatenated along their second dimension.
        """
        fused = self.fused(features_NPw, embedded_NPd)
        queries, kv = self.queries_kv(fused, positions_NP)
        seen = kv if past_NSkv is None else torch.cat([past_NSkv, kv], 1)
        keys, values = seen.view(*seen.shape[:2], 2, self.shape.num_kv_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, visible_NPS[:, None], enable_gqa=True
        )
        return self.predict(fused, mixed.transpose(1, 2).flatten(2)), kv

    def fused(self, features_NPw: Tensor, embedded_NPd: Tensor) -> Tensor:
        """Return the layer's input, (N, P, d): the projection of embedding and feature."""
        if self.reduce is not None and features_NPw.shape[-1] != self.shape.hidden_size:
            features_NPw = self.reduce(features_NPw)
        fused: Tensor = self.fuse(torch.cat([embedded_NPd.detach() * self.gain, features_NPw], -1))
        return fused

    def queries_kv(self, fused_NPd: Tensor, positions_NP: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries (N, P, H, e), and keys and values (N, P, kv_size)."""
        q, k = self.shape.split
        queries, keys, values = self.qkv(self._attention_inputs(fused_NPd)).split([q, k, k], -1)
        queries, keys = (x.reshape(*x.shape[:-1], -1, self.shape.head_size) for x in (queries, keys))
        if self.qk_norm is not None:
            queries, keys = self._norm(queries, self.qk_norm[0]), self._norm(keys, self.qk_norm[1])
        rotation = rotations(self.shape, positions_NP).unsqueeze(-2)
        return rotate_pairs(queries, rotation), torch.cat(
            [rotate_pairs(keys, rotation).flatten(-2), values], -1
        )

    def predict(self, fused_NPd: Tensor, mixed_NPq: Tensor) -> Tensor:
        """Return predicted features, (N, P, d), from the layer's input and the attention output."""
        return self._norm(self._after(fused_NPd, mixed_NPq), self.final_norm)

    def logits(self, predicted: Tensor, head_Vd: Tensor) -> Tensor:
        """Return logits of the tokens that can be drafted, (..., D), from predicted features (..., d)."""
        return F.linear(predicted, head_Vd.detach().to(predicted.dtype))

    @property
    def draft_tokens(self) -> Tensor | None:
        """Return the tokens that can be drafted, int64, (D,), ascending; None: all."""
        return None

    def _attention_inputs(self, fused_NPd: Tensor) -> Tensor:
        return self._norm(fused_NPd, self.input_norm)

    def _after(self, residual: Tensor, mixed_NPq: Tensor) -> Tensor:
        """Return the sum of the residual path, (N, P, d), after attention and feed-forward part."""
        x = residual + self.attended(mixed_NPq)
        gate, up = self.gate_up(self._norm(x, self.middle_norm)).chunk(2, -1)
        total: Tensor = x + self.down(F.silu(gate) * up)
        return total

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load all tensors or none.

        Raises:
            ValueError: A tensor belongs to the policy, is missing, unknown, or of another shape. Nothing has
                changed.
        """
        own = self.state_dict()
        for name in sorted(own.keys() | state.keys()):
            if wrong := _wrong(name, own.get(name), state.get(name)):
                raise ValueError(f"weights of a draft layer: {name!r} {wrong}")
        return super().load_state_dict(state, strict, assign)

    def save(self, path: Path, *, steps: int = 0) -> None:
        """Write the trainable tensors to a safetensors file, atomically.

        Args:
            path: File.
            steps: Training steps so far, for `trained_steps`; 0: unknown.

        Raises:
            OSError: The file cannot be written. An older one is as it was.
        """
        part = path.with_name(f"{path.name}.part")
        about = {_SHAPE: json.dumps(asdict(self.shape))} | ({_STEPS: str(steps)} if steps else {})
        save_tensors(self.state_dict(), part, about)
        part.replace(path)

    @classmethod
    def load(cls, path: Path, model: Any) -> "DraftLayer":
        """Return a saved layer for this transformers model, on its device.

        Args:
            path: File that `save` wrote.
            model: The policy, or only its configuration.

        Raises:
            ValueError: The file is not a draft layer, was saved for a policy of other sizes, or holds values
                that are no finite numbers.
        """
        config, damaged = getattr(model, "config", model), f"{path}: its metadata is damaged"
        try:
            with safe_open(path, "pt") as file:
                saved = json.loads((file.metadata() or {}).get(_SHAPE, "{}"))
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path}: not a safetensors file: {error}") from error
        except ValueError as error:
            raise ValueError(f"{damaged}: {first_line(error)}") from error
        if not isinstance(saved, dict) or "taps" not in saved:
            raise ValueError(f"{path}: not a draft layer: its metadata lacks the sizes of a policy")
        if "tap_layers" in saved:
            wanted = {"hidden_size": config.hidden_size, "vocabulary": config.vocab_size}
        else:
            check(type(saved["taps"]) is int, f"{path}: taps", "must be an integer", saved["taps"])
            shape = DraftShape.of(config, taps=saved["taps"])
            wanted = json.loads(json.dumps(asdict(shape)))
        if others := [f"{k} {saved.get(k)}, not {wanted[k]}" for k in wanted if saved.get(k) != wanted[k]]:
            raise ValueError(f"{path}: saved for a policy of other sizes: {'; '.join(others)}")
        try:
            shape = shape_from(saved)
            if isinstance(shape, Eagle3Shape):
                shape.validate(config.num_hidden_layers)
            layer = (Eagle3Layer if isinstance(shape, Eagle3Shape) else DraftLayer).outline(shape)
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise ValueError(f"{damaged}: {first_line(error)}") from error
        layer.load_state_dict(checked_weights(state, path), assign=True)
        return layer if isinstance(model, PretrainedConfig) else layer.to(model.device)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.shape.norm_epsilon)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator | None) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, module.in_features**-0.5, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        # Initially the output is close to the fused input: untrained heads add little noise.
        self.attended.weight.mul_(0.1)
        self.down.weight.mul_(0.1)


class Eagle3Layer(DraftLayer):
    """A draft layer of EAGLE-3's form.

    Attention reads the normalized embedding beside the normalized feature. The predicted feature is the sum
    of the residual path, and logits are those of the layer's own head for its norm. The head begins as the
    policy's, `final_norm` as the policy's last one.
    """

    predicts_features = False
    shape: Eagle3Shape
    reduce: nn.Linear

    @classmethod
    def for_policy(
        cls, model: Any, *, draft_tokens: Iterable[int] = (), generator: torch.Generator | None = None
    ) -> Self:
        """Return a new layer for a transformers model, on the model's device; see `DraftLayer.of`."""
        layer = cls(Eagle3Shape.for_policy(model.config, draft_tokens), generator=generator)
        head = whole(model.get_output_embeddings().weight.detach())
        layer.to(head.device, torch.promote_types(head.dtype, torch.float32))
        with torch.no_grad():
            layer.final_norm.copy_(whole(model.base_model.norm.weight))
            tokens = layer.draft_tokens
            layer.output.weight.copy_(head if tokens is None else head[tokens])
        return layer

    def fused(self, features_NPw: Tensor, embedded_NPd: Tensor) -> Tensor:
        """Return the layer's input, (N, P, 3 d): embedding, feature, and begin of the residual path."""
        d = self.shape.hidden_size
        if features_NPw.shape[-1] != d:
            features_NPw = self.reduce(features_NPw[..., d:])
        embedded = self._norm(embedded_NPd.detach(), self.gain)
        normed = self._norm(features_NPw, self.feature_norm)
        residual = normed if self.shape.residual_after_norm else features_NPw
        return torch.cat([embedded, normed, residual], -1)

    def predict(self, fused_NPd: Tensor, mixed_NPq: Tensor) -> Tensor:
        """Return predicted features, (N, P, d), from the layer's input and the attention output."""
        return self._after(fused_NPd[..., 2 * self.shape.hidden_size :], mixed_NPq)

    def logits(self, predicted: Tensor, head_Vd: Tensor) -> Tensor:
        """Return logits of the tokens that can be drafted, (..., D); the policy's head is not used."""
        logits: Tensor = self.output(self._norm(predicted, self.final_norm))
        return logits

    @property
    def draft_tokens(self) -> Tensor | None:
        """Return the tokens that can be drafted, int64, (D,), ascending; None: all."""
        return self._draft_tokens

    def _add_inputs(self) -> None:
        d, (q, k) = self.shape.hidden_size, self.shape.split
        self.reduce = _linear(3 * d, d, bias=False)
        self.feature_norm = nn.Parameter(_ones(d))
        self.qkv = _linear(2 * d, q + 2 * k, bias=False)
        self.output = _linear(d, self.shape.num_draft_tokens, bias=False)
        tokens = self.shape.draft_tokens
        self._draft_tokens: Tensor | None
        made = torch.tensor(tokens, device="cpu") if tokens else None  # also in `outline`
        self.register_buffer("_draft_tokens", made, persistent=False)

    def _attention_inputs(self, fused_NPd: Tensor) -> Tensor:
        return fused_NPd[..., : 2 * self.shape.hidden_size]


@dataclass(frozen=True, slots=True)
class DraftForm:
    """Form of the draft layer of a policy."""

    kind: Literal["own", "eagle3"] = "own"
    vocabulary: int = 0
    """Number of tokens that a layer of EAGLE-3's form can draft; 0: all. They are those of the lowest
    numbers, the most frequent ones in a BPE vocabulary, and the end of text."""

    def taps(self, config: Any) -> tuple[int, ...]:
        """Return the layers of the policy whose outputs are in the features.

        Raises:
            ValueError: The policy has fewer than the three layers of EAGLE-3.
        """
        return eagle3_taps(config.num_hidden_layers) if self.kind == "eagle3" else ()

    def shape(self, config: Any, *, taps: int = 0) -> DraftShape:
        """Return the shape for a transformers configuration; `taps`: of the own kind.

        Raises:
            ValueError: There is no such layer for this type of model.
        """
        if self.kind == "own":
            return DraftShape.of(config, taps=taps)
        return Eagle3Shape.for_policy(config, self._draft_tokens(config))

    def new(self, model: Any, *, taps: int = 0, generator: torch.Generator | None = None) -> DraftLayer:
        """Return a new layer for a transformers model; see `DraftLayer.of`."""
        if self.kind == "own":
            return DraftLayer.of(model, taps=taps, generator=generator)
        tokens = self._draft_tokens(model.config)
        return Eagle3Layer.for_policy(model, draft_tokens=tokens, generator=generator)

    def _draft_tokens(self, config: Any) -> Iterable[int]:
        if not 0 < self.vocabulary < config.vocab_size:
            return ()
        ends = getattr(config, "eos_token_id", None)
        ends = [ends] if isinstance(ends, int) else ends or []
        ends = [end for end in ends if self.vocabulary <= end < config.vocab_size][: self.vocabulary]
        return (*range(self.vocabulary - len(ends)), *ends)


def _ascend(values: Iterable[Any], end: int) -> bool:
    """Return whether these are integers from 0 to end - 1, each above the one before."""
    last = -1
    for value in values:
        if type(value) is not int or not last < value < end:
            return False
        last = value
    return True


def _ones(*sizes: int) -> Tensor:
    return torch.ones(sizes, dtype=torch.float32)  # whatever dtype the program has set as its default


def _linear(num_in: int, num_out: int, *, bias: bool) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=bias, dtype=torch.float32)


def trained_steps(path: Path) -> int:
    """Return the training steps of the layer in a file of `DraftLayer.save`; 0 if they are unknown."""
    try:
        with safe_open(path, "pt") as file:
            return int((file.metadata() or {}).get(_STEPS, 0))
    except (OSError, ValueError, SafetensorError):
        return 0


def layer_of(shape: DraftShape) -> DraftLayer:
    """Return a layer of this shape with random weights."""
    return Eagle3Layer(shape) if isinstance(shape, Eagle3Shape) else DraftLayer(shape)


def shape_from(fields: Mapping[str, Any]) -> DraftShape:
    """Return the shape of which `dataclasses.asdict` made these values, possibly through JSON."""
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return Eagle3Shape(**values) if "tap_layers" in values else DraftShape(**values)


def checked_weights(tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Return the weights of a drafter's file in fp32, or wider: they may be trained further.

    Raises:
        ValueError: One holds no floating-point numbers, or NaN or infinity: no draft would ever be accepted.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{where}: tensor {name!r} must be in floating point, got {tensor.dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{where}: tensor {name!r} must have finite values, got NaN or infinity")
    return {
        name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in tensors.items()
    }


def _wrong(name: str, own: Tensor | None, given: Tensor | None) -> str:
    """Return why a tensor cannot be loaded, as the end of a sentence; empty if it can."""
    if own is None:
        is_shared = any(word in name for word in SHARED)
        return "belongs to the policy and is never loaded" if is_shared else "is unknown"
    if given is None:
        return "is missing"
    shapes = tuple(own.shape), tuple(given.shape)
    return "" if shapes[0] == shapes[1] else f"must be of shape {shapes[0]}, got {shapes[1]}"


_STEADY_ROPE = ("default", "linear", "llama3", "yarn")
_POLICIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "smollm3", "mixtral", "qwen3_moe")
"""Model types whose logits are a linear function of the feature, and whose layers rotate alike."""


def tapped(taps: int, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs are part of a feature with this many taps, for `Target.of`.

    Three taps are the low, middle and high layer of EAGLE-3 (arXiv:2503.01840).

    Raises:
        ValueError: `taps` is neither 0 nor 3.
    """
    check(taps in (0, 3), "taps", "must be 0 or 3", taps)
    eagle_3 = min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)
    return tuple(sorted(eagle_3)) if taps else ()


def eagle3_taps(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs an EAGLE-3 drafter reads: three different ones.

    From 7 layers on they are those of published drafters: after 2, L / 2 and L - 3 layers.

    Raises:
        ValueError: The policy has fewer than three layers.
    """
    check(num_layers >= 3, "layers of a policy for EAGLE-3", "must be 3 or more", num_layers)
    if num_layers >= 7:
        return 1, num_layers // 2 - 1, num_layers - 4
    return 0, (num_layers - 1) // 2, num_layers - 1


def rotations(shape: DraftShape, positions: Tensor) -> Tensor:
    """Return the rotation of each pair of head dimensions, complex, (*positions.shape, e / 2)."""
    frequencies = torch.tensor(shape.frequencies, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    return torch.polar(torch.full_like(angles, shape.rope_scale), angles)


def rotate_pairs(x: Tensor, rotations: Tensor) -> Tensor:
    """Return x (..., e) with rotary positions, as one product of complex numbers.

    The dimensions 2i and 2i + 1 rotate together. (Policies pair i with i + e / 2, which is the same up to the
    order of a projection's rows.)
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    pairs = torch.view_as_complex(x.to(exact).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations.to(pairs.dtype)).flatten(-2).to(x.dtype)


def _rotary(config: Any) -> tuple[tuple[float, ...], float]:
    """Return frequencies and scale as transformers computes them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = LlamaRotaryEmbedding(config)
    rule = f"must be one of {', '.join(_STEADY_ROPE)}"
    check(rope.rope_type in _STEADY_ROPE, "kind of rotary positions", rule, rope.rope_type)
    return tuple(rope.inv_freq.double().tolist()), float(rope.attention_scaling)
