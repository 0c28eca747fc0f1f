"""Call of a `transformers` model's own forward: logits and features, without a trace in the user's model.

Hooks, adapters and every peculiarity of the architecture take effect. Dropout does not: modules that are in
training mode are in evaluation mode during the call. Shapes: B rows, q tokens per row, V vocabulary, d hidden
size, f feature size.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aedit.spec_rollout.model.model_support import check_taps

MASKLESS = ("flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Attention implementations that compute the same as "sdpa" and accept no mask of queries and keys."""


class ModelForward:
    """Logits and features of a causal language model."""

    def __init__(self, model: Any, taps: Sequence[int]) -> None:
        """Make the call.

        Args:
            model: `transformers` causal language model.
            taps: Layers whose outputs are appended to the last hidden state.

        Raises:
            ValueError: Taps are given, and the layers of the model cannot be found.
        """
        self.model = model
        self.config: Any = model.config.get_text_config()
        self.num_layers = _num_layers(self.config)
        self.taps = tuple(taps)
        check_taps(taps, self.num_layers)
        self._tapped = tapped_layers(model, taps)
        self._configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        self.parameters = set(inspect.signature(self.model.forward).parameters)
        self.takes_positions = "position_ids" in self.parameters
        self.cache_argument = cache_argument(model)
        self._bodies = bodies_of(model)

    @property
    def attention(self) -> str:
        """Return the attention implementation of the call."""
        own = str(self.config._attn_implementation)
        if own in MASKLESS:
            return "sdpa" if getattr(self.model, "_supports_sdpa", False) else "eager"
        return own

    def __call__(self, tokens_Bq: Tensor, *, last: int, **arguments: Any) -> tuple[Tensor, Tensor]:
        """Run the model.

        Args:
            tokens_Bq: int64, the tokens.
            last: Number of last tokens of each row whose logits are needed.
            **arguments: Further arguments of the model's forward.

        Returns:
            Logits (B, last, V) and features (B, q, f).
        """
        if "logits_to_keep" in self.parameters and self._bodies:
            arguments["logits_to_keep"] = max(last, 1)
        # Buffers that a forward replaces must stay usable by a later training step: no inference tensors.
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
            stack.enter_context(torch.autocast(tokens_Bq.device.type, enabled=False))  # see `generating`
            stack.enter_context(_evaluating(self.model))
            stack.enter_context(_attention(self._configs.values(), self.attention))
            captured = HiddenStates()
            stack.enter_context(captured.hooks(self.model, self._tapped))
            arguments = {name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}
            output = self.model(input_ids=tokens_Bq.clone(), return_dict=True, **arguments)
            logits: Tensor = output.logits
            features = captured.features(self._tapped).to(logits.device)
            if features.shape[:2] != tokens_Bq.shape:
                raise ValueError(f"{type(self.model).__name__} has no hidden state for each token")
            return logits[:, logits.shape[1] - last :], features


def cache_argument(model: Any) -> str:
    """Return the name of the argument for keys and values of a model's forward; "" if it takes none.

    It is `cache` from transformers 5.24 on, where the older name warns.
    """
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), "")


def bodies_of(model: Any) -> list[nn.Module]:
    """Return the modules of which a `transformers` model calls one; its output is the last hidden state."""
    return [body for body in {model.base_model, model.get_decoder()} if body is not model]


class HiddenStates:
    """Hidden states of a model during one call."""

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    @contextmanager
    def hooks(self, model: Any, tapped: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Capture last hidden state and taps of a call of `model` inside the context."""
        handles = [body.register_forward_hook(self._body_output) for body in bodies_of(model)]
        if not handles:  # features are what the head receives
            handles.append(model.get_output_embeddings().register_forward_pre_hook(self._head_input))
        handles += [layer.register_forward_hook(self._layer_output) for layer in tapped]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def features(self, tapped: Sequence[nn.Module] = ()) -> Tensor:
        """Return the captured hidden states, (B, q, f)."""
        if self._last is None:
            raise ValueError("the model did not call its own layers")
        taps = [self._outputs[id(layer)].to(self._last) for layer in tapped]
        return torch.cat([self._last, *taps], -1) if taps else self._last

    def _body_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._last = _hidden(output)

    def _head_input(self, module: nn.Module, inputs: Any) -> None:
        self._last = inputs[0]

    def _layer_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs[id(module)] = _hidden(output)


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


def _num_layers(config: Any) -> int:
    # Some decoders of encoder-decoder families have a number of their own.
    return int(getattr(config, "decoder_layers", 0) or config.num_hidden_layers)


def tapped_layers(model: Any, taps: Sequence[int]) -> list[nn.Module]:
    """Return the decoder layers with these numbers of a `transformers` model.

    Raises:
        ValueError: The layers of the model cannot be found.
    """
    if not taps:
        return []
    num_layers = _num_layers(model.config.get_text_config())
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return [module[tap] for tap in taps]
    raise ValueError(f"taps: {type(model).__name__} has no list of its {num_layers} layers")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set modules to evaluation mode, without `eval()`: some adapters merge their weights in it."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _attention(configs: Any, name: str) -> Iterator[None]:
    """Set the attention implementation where the model's own does not accept masks."""
    changed = [(c, c._attn_implementation) for c in configs if c._attn_implementation in MASKLESS]
    for config, _ in changed:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, own in changed:
            config._attn_implementation_internal = own
