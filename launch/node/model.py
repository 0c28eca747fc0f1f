"""Build any `transformers` causal language model, new or pretrained, shard it, and compute its loss."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aedit.edit import Shards
from aedit.launch.config import ModelConfig, RunConfig, check_memory
from aedit.launch.data import Corpus, CorpusTokenizer, batch, evaluation_indices
from aedit.launch.node.world import World
from aedit.system import check_folder, read_index
from aedit.types import UserError, first_line

_auto: Any = AutoModelForCausalLM  # its methods carry no types
_FROM_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def build_model(
    config: ModelConfig, vocab_size: int, seq_len: int, seed: int, eos_id: int
) -> PreTrainedModel:
    """Return the model on CPU in fp32 and training mode, with the same bits for the same seed.

    The random generators of the process are not changed. `config.dtype` is applied by `loss`,
    `config.compile` by `compile_blocks`. Raises UserError for an unknown family or size, inconsistent sizes,
    missing weights, and a tokenizer or sample length too large for a pretrained model.
    """
    # Only the CPU generator: models are built on CPU, and reading all GPUs' states would initialize them.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if config.pretrained:
            model = _pretrained(config.pretrained, vocab_size, seq_len)
        else:
            model = _new(config, vocab_size, seq_len, eos_id)
    model.config.use_cache = False
    if config.activation_checkpointing:
        _checkpoint_activations(model)
    model.train()
    return model


def outline(config: RunConfig, tokenizer: CorpusTokenizer) -> nn.Module:
    """Return the model without memory for its parameters, on the meta device.

    Of a pretrained model only the configuration is read. Raises UserError as `build_model` does.
    """
    with torch.device("meta"):
        if not config.model.pretrained:
            seq_len = config.data.seq_len
            return build_model(config.model, tokenizer.vocab_size, seq_len, config.seed, tokenizer.eos_id)
        name = config.model.pretrained
        try:
            shape = AutoConfig.from_pretrained(name, trust_remote_code=False)
            if Path(name).is_dir():
                check_shapes(Path(name))
            model: nn.Module = _auto.from_config(shape)
        except Exception as error:  # `transformers` has an error of its own for many a key
            raise UserError(f"model.pretrained = {name!r}: no model there ({first_line(error)})") from None
        return model


def loss(model: nn.Module, batch: Tensor, dtype: Literal["fp32", "bf16"]) -> Tensor:
    """Return the mean cross entropy of all next tokens, in nats per token. batch: (k, seq_len + 1) ids.

    With `bf16` the model computes under autocast; the loss is always fp32.
    """
    with torch.autocast(batch.device.type, dtype=torch.bfloat16, enabled=dtype == "bf16"):
        logits = model(input_ids=batch[:, :-1]).logits
    return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return names and modules of the transformer blocks in execution order.

    [] if the model does not list them.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = bool(found) and name.startswith(found[-1][0] + ".")
        names = {kind.__name__ for kind in type(module).__mro__}  # `fully_shard` makes a subclass of its own
        if names & classes and not inside:
            found.append((name, module))
    return found


def stop_tokens(model: nn.Module, eos_id: int | None) -> tuple[int, ...]:
    """Return the tokens that end an answer: that of the tokenizer and those of the generation config.

    A chat model often ends its turn with another token than a text.
    """
    settings: Any = getattr(model, "generation_config", None)
    found = getattr(settings, "eos_token_id", None)
    ends = {eos_id, *(found if isinstance(found, list) else [found])} - {None}
    # A default of the configuration may be beyond the vocabulary; a token that cannot be drawn ends nothing.
    own: Any = model.config
    return tuple(sorted(end for end in ends if end < own.get_text_config().vocab_size))


def compile_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """Compile the forward function of each block; the hooks around it stay ordinary Python.

    `block.compile()` would also trace the hooks, and landing a round must not happen in a compiled graph.
    """
    for _, block in blocks(model):
        compiled: Any = torch.compile(block.forward, backend=backend)
        block.forward = compiled


def num_parameters(model: nn.Module) -> int:
    """Return the number of parameters; tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _new(config: ModelConfig, vocab_size: int, seq_len: int, eos_id: int) -> PreTrainedModel:
    families = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.family not in families:
        close = _close(config.family, list(families))
        raise UserError(f"model.family = {config.family!r} is no causal language model{close}")
    defaults = AutoConfig.for_model(config.family)
    _check_sizes(config, defaults)
    # The family's default ids belong to another tokenizer: its padding id would freeze a token's row.
    own = dict(zip(_FROM_TOKENIZER, (vocab_size, eos_id, eos_id, None), strict=True))
    sizes: dict[str, Any] = dict(config.own_sizes)
    sizes |= {key: value for key, value in own.items() if hasattr(defaults, key)}
    if hasattr(defaults, "is_decoder"):
        sizes["is_decoder"] = True  # else BERT models attend to the token that they predict
    if hasattr(defaults, "max_position_embeddings"):
        name = defaults.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        given = sizes.pop("max_position_embeddings", sizes.pop(name, seq_len))
        if given < seq_len:
            raise UserError(f"model.sizes.{name} = {given} is below data.seq_len = {seq_len}")
        sizes[name] = given
    try:
        shape = AutoConfig.for_model(config.family, **sizes)
        _check_heads(shape)
        model: PreTrainedModel = _auto.from_config(shape, dtype=torch.float32)
        with torch.no_grad():  # some inconsistent sizes raise only in the forward pass
            model(input_ids=torch.tensor([[0, eos_id]]))
    except UserError:
        raise
    except Exception as error:  # the exception type depends on the family; only the sizes can cause it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(f"model.sizes: not valid for a {config.family} model: {reason}") from error
    return model


def _check_sizes(config: ModelConfig, defaults: PretrainedConfig) -> None:
    # transformers stores an unknown key as an unused attribute.
    known = {*defaults.to_dict(), *defaults.attribute_map}
    if "rope_parameters" in known:
        known.add("rope_theta")
    for key in config.own_sizes:
        if key in _FROM_TOKENIZER:
            raise UserError(f"model.sizes.{key} comes from data.tokenizer: leave it out")
        if key not in known:
            raise UserError(f"model.sizes.{key} is unknown to {config.family}{_close(key, sorted(known))}")


def _check_heads(shape: PretrainedConfig) -> None:
    heads = getattr(shape, "num_attention_heads", None)
    shared = getattr(shape, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        raise UserError(
            f"model.sizes.num_key_value_heads = {shared}: must divide num_attention_heads = {heads}"
        )


def _pretrained(name: str, vocab_size: int, seq_len: int) -> PreTrainedModel:
    try:
        if Path(name).is_dir():
            check_folder(Path(name))
            check_shapes(Path(name))
        model: PreTrainedModel = _auto.from_pretrained(name, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # files are read by several libraries, each with exceptions of its own
        raise UserError(
            f"model.pretrained = {name!r}: no usable model there ({first_line(error)})"
        ) from error
    embeddings: Any = model.get_input_embeddings()
    rows = len(embeddings.weight)
    if vocab_size > rows:
        raise UserError(
            f"data.tokenizer: has {vocab_size} tokens, model.pretrained only {rows}; use its tokenizer"
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and seq_len > positions:
        raise UserError(
            f"data.seq_len = {seq_len}: model.pretrained has only {positions} positions; lower data.seq_len"
        )
    return model


def check_shapes(folder: Path) -> None:
    """Check that the configuration in a folder asks for no larger tensors than its files have.

    A loader takes memory for all tensors of the configuration before it reads a file. Files of PyTorch's own
    format have no list of shapes, and quantized weights have others: neither is compared.

    Raises:
        ValueError: It does; the message has key or tensor, and both sizes.
        Exception: `transformers` cannot make the model, by an error of any class.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if not (whole.exists() or index.exists()) or getattr(config, "quantization_config", None) is not None:
        return
    shapes: dict[str, tuple[int, ...]] = {}
    for path in [whole] if whole.exists() else read_index(index):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and not 1 <= layers <= max(1, len(shapes)):
        raise ValueError(
            f"config.json has num_hidden_layers = {layers}, and its files have {len(shapes)} tensors"
        )
    with torch.device("meta"):
        model: PreTrainedModel = _auto.from_config(config)
    for name, tensor in model.state_dict().items():
        given = shapes.get(name, shapes.get(name.removeprefix(f"{model.base_model_prefix}.")))
        if given is not None and tensor.numel() > prod(given):
            raise ValueError(f"its files have {name} with shape {given}, expected {tuple(tensor.shape)}")


def _checkpoint_activations(model: PreTrainedModel) -> None:
    # Renamed in transformers 5; the old name warns there and will be removed in 6.
    new_name = hasattr(model, "activation_checkpointing_enable")
    name = "activation_checkpointing_enable" if new_name else "gradient_checkpointing_enable"
    try:
        getattr(model, name)({"use_reentrant": False})
    except ValueError as error:
        raise UserError(f"model.activation_checkpointing: {first_line(error)}") from error


def _close(word: str, known: list[str]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def make_model(config: RunConfig, tokenizer: CorpusTokenizer, world: World) -> nn.Module:
    """Return the model on its device, sharded over the ranks of the node.

    Raises UserError if it cannot fit.
    """
    num_params = num_parameters(outline(config, tokenizer))
    if world.device.type == "cuda":
        have = world.ranks * torch.cuda.get_device_properties(world.device).total_memory
        check_memory(config, num_params, have=have)
    else:
        check_memory(config, num_params)
    model: nn.Module = build_model(
        config.model, tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id
    )
    model.to(world.device)
    if config.model.compile:
        compile_blocks(model)
    if world.ranks > 1:
        _shard(model, config.model, world)
    return model


def _shard(model: nn.Module, config: ModelConfig, world: World) -> None:
    """Shard the model over the node's ranks with FSDP2: each block, then the remaining parameters."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == "bf16" else None, reduce_dtype=torch.float32
    )
    for _, block in blocks(model):
        fully_shard(block, mesh=world.mesh["shard"], mp_policy=policy)
    fully_shard(model, mesh=world.mesh["shard"], mp_policy=policy)


def held_out_loss(model: nn.Module, corpus: Corpus, config: RunConfig, shards: Shards) -> float:
    """Return the mean loss over `train.eval_samples` held-out samples, in nats per token.

    All ranks of the node together.
    """
    model.eval()
    found = mean_loss(list(held_out_sums(model, corpus, config, shards)), shards)
    model.train()
    return found


@torch.no_grad()
def held_out_sums(model: nn.Module, corpus: Corpus, config: RunConfig, shards: Shards) -> Iterator[Tensor]:
    """Yield for one batch of held-out samples after the other the sum of this rank's losses and their number.

    All ranks of the node together.
    """
    indices = evaluation_indices(len(corpus.held_out), config.train.eval_samples)
    size, device = config.train.batch_size, next(model.parameters()).device
    for start in range(0, len(indices), size):
        # FSDP2 needs all ranks in each forward pass: in a short last batch some get a sample of weight 0.
        mine = indices[start : start + size][shards.rank :: shards.size]
        shown = mine if len(mine) else indices[start : start + 1]
        mean = loss(model, batch(corpus.held_out, shown).to(device), config.model.dtype)
        yield torch.tensor([float(mean) * len(mine), len(mine)], dtype=torch.float64)


def mean_loss(sums: Sequence[Tensor], shards: Shards) -> float:
    """Return the mean of what `held_out_sums` has yielded, over all ranks."""
    total, count = shards.sum(sum(sums, torch.zeros(2, dtype=torch.float64))).tolist()
    return float(total / count)
