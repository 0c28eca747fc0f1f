"""Tests drafters in the format of `speculators`: names, offsets, layouts, refusals, and drafts of vLLM."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from kit.eagle3 import SIZES, SOME, layer_for, policy
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import DraftLayer, Eagle3Layer, LayerDrafter, read_speculator
from aedit.spec_rollout.drafters.speculators import VERSION, write_speculator
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import (
    DraftTrainer,
    DraftTrainingConfig,
    FeatureReader,
    FeatureRing,
    LossConfig,
    PolicyEmbeddings,
    RingShape,
    RowFeatures,
)

VLLM = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"


@pytest.fixture
def written(tmp_path):
    model = policy(dtype=torch.float32)
    layer = layer_for(model, SOME)
    write_speculator(layer, model.config, tmp_path, verifier="/models/policy")
    return tmp_path, layer, model


def test_names_offsets_and_configuration_are_those_of_the_format(written):
    folder, layer, _ = written
    tensors = load_file(folder / "model.safetensors")
    expected = {
        "fc.weight": (32, 96),
        "layers.0.input_layernorm.weight": (32,),
        "layers.0.hidden_norm.weight": (32,),
        "layers.0.post_attention_layernorm.weight": (32,),
        "layers.0.self_attn.q_proj.weight": (32, 64),
        "layers.0.self_attn.k_proj.weight": (16, 64),
        "layers.0.self_attn.v_proj.weight": (16, 64),
        "layers.0.self_attn.o_proj.weight": (32, 32),
        "layers.0.mlp.gate_proj.weight": (64, 32),
        "layers.0.mlp.up_proj.weight": (64, 32),
        "layers.0.mlp.down_proj.weight": (32, 64),
        "norm.weight": (32,),
        "lm_head.weight": (12, 32),
        "d2t": (12,),
        "t2d": (48,),
    }
    assert {name: tuple(value.shape) for name, value in tensors.items()} == expected
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["d2t"].tolist() == [token - i for i, token in enumerate(SOME)]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == [*SOME]
    assert torch.equal(tensors["lm_head.weight"], layer.output.weight)
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_version"] == VERSION == "0.9.0"
    assert config["draft_vocab_size"] == 12
    assert config["norm_before_residual"] is True
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "/models/policy"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert LlamaConfig(**config["transformer_layer_config"]).num_hidden_layers == 1


def test_the_order_of_rows_is_that_of_a_transformers_attention(written):
    """Attention of transformers with the tensors of the file gives what the layer gives."""
    folder, layer, _ = written
    tensors = load_file(folder / "model.safetensors")
    config = LlamaConfig(**json.loads((folder / "config.json").read_text())["transformer_layer_config"])
    config._attn_implementation = "sdpa"
    attention = LlamaAttention(config, 0)
    for name in "qkvo":
        linear = torch.nn.Linear(*tensors[f"layers.0.self_attn.{name}_proj.weight"].shape[::-1], bias=False)
        linear.weight.data = tensors[f"layers.0.self_attn.{name}_proj.weight"]
        setattr(attention, f"{name}_proj", linear)
    inputs, at = torch.randn(1, 7, 64), torch.arange(7)[None]
    rope = LlamaRotaryEmbedding(config)(inputs, at)
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    wanted, _ = attention(inputs, position_embeddings=rope, attention_mask=mask)
    queries, kv = layer.queries_kv(torch.cat([inputs, inputs[..., :32]], -1), at)
    keys, values = kv.view(1, 7, 2, 2, -1).permute(2, 0, 3, 1, 4)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True
    )
    found = layer.attended(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("draft_tokens", [SOME, ()])
@pytest.mark.parametrize("after", [True, False])
def test_what_is_read_is_what_was_written_bit_by_bit(tmp_path, draft_tokens, after):
    model = policy(dtype=torch.float32)
    layer = layer_for(model, draft_tokens, after=after)
    write_speculator(layer, model.config, tmp_path, verifier="policy")
    found = read_speculator(tmp_path, model)
    assert found.shape == layer.shape
    assert found.state_dict().keys() == layer.state_dict().keys()
    assert all(torch.equal(found.state_dict()[n], value) for n, value in layer.state_dict().items())
    assert ("d2t" in load_file(tmp_path / "model.safetensors")) is bool(draft_tokens)
    again = tmp_path / "again"
    again.mkdir()
    write_speculator(found, model.config, again, verifier="policy")
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (tmp_path / name).read_bytes()


def with_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        outer, _, inner = key.partition("__")
        place = config[outer] if inner else config
        place[inner or outer] = value
    (folder / "config.json").write_text(json.dumps(config))


def with_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def swapped(tensors):
    tensors["d2t"] = tensors["d2t"].flip(0).contiguous()


WRONG = {
    "tensor 'more.weight' is unknown": lambda f: with_tensors(
        f, lambda t: t.update({"more.weight": torch.ones(2)})
    ),
    "tensor 'fc.weight' is missing": lambda f: with_tensors(f, lambda t: t.pop("fc.weight")),
    "tensor 't2d' is missing": lambda f: with_tensors(f, lambda t: t.pop("t2d")),
    "'norm.weight' must be of shape (32,), got (16,)": lambda f: with_tensors(
        f, lambda t: t.update({"norm.weight": torch.ones(16)})
    ),
    "d2t must hold the offset of each token": lambda f: with_tensors(f, swapped),
    "is not the policy's embedding": lambda f: with_tensors(
        f, lambda t: t.update({"embed_tokens.weight": torch.ones(48, 32)})
    ),
    "key 'color' is unknown": lambda f: with_config(f, color="red"),
    "fc_norm must be false, got true": lambda f: with_config(f, fc_norm=True),
    'speculators_model_type must be "eagle3", got "dflash"': lambda f: with_config(
        f, speculators_model_type="dflash"
    ),
    "num_hidden_layers must be 1, got 2": lambda f: with_config(
        f, transformer_layer_config__num_hidden_layers=2
    ),
    "hidden_size must be 32, got 16": lambda f: with_config(f, transformer_layer_config__hidden_size=16),
    "three ascending numbers from 1 to 4, got [0, 2, 4]": lambda f: with_config(
        f, eagle_aux_hidden_state_layer_ids=[0, 2, 4]
    ),
    "transformer_layer_config must be an object, got null": lambda f: with_config(
        f, transformer_layer_config=None
    ),
    "Field 'num_attention_heads' expected int, got str": lambda f: with_config(
        f, transformer_layer_config__num_attention_heads="4"
    ),
    "transformer_layer_config must have intermediate_size of 1 or more, got 0": lambda f: with_config(
        f, transformer_layer_config__intermediate_size=0
    ),
    "must be of shape (32, 1099511627776), got (32, 64)": lambda f: with_config(
        f, transformer_layer_config__intermediate_size=2**40
    ),
    "transformer_layer_config: empty(): argument 'size'": lambda f: with_config(
        f, transformer_layer_config__intermediate_size=2**62
    ),
    "must be of shape (8796093022208, 64), got (16, 64)": lambda f: with_config(
        f, transformer_layer_config__num_key_value_heads=2**40
    ),
    "has 4 heads of 1099511627776, and layers.0.self_attn.o_proj.weight is of shape (32, 32)": lambda f: (
        with_config(f, transformer_layer_config__head_dim=2**40)
    ),
    "shapes (1099511627776,) and (48,), got (12,) and (48,)": lambda f: with_config(
        f, draft_vocab_size=2**40
    ),
    "draft_vocab_size must be an integer, got [12]": lambda f: with_config(f, draft_vocab_size=[12]),
    "ascending numbers from 1 to 4, got ['1', 2, 4]": lambda f: with_config(
        f, eagle_aux_hidden_state_layer_ids=["1", 2, 4]
    ),
    "tensor 'fc.weight' must be in floating point, got torch.int32": lambda f: with_tensors(
        f, lambda t: t.update({"fc.weight": t["fc.weight"].int()})
    ),
    "tensor 'norm.weight' must have finite values": lambda f: with_tensors(
        f, lambda t: t["norm.weight"][:1].fill_(torch.nan)
    ),
    "d2t must hold integers, got torch.float32": lambda f: with_tensors(
        f, lambda t: t.update({"d2t": t["d2t"].float()})
    ),
    "not a safetensors file": lambda f: (f / "model.safetensors").write_bytes(b"no"),
}


def test_what_does_not_belong_there_is_refused_by_name(written):
    folder, _, model = written
    for number, (message, change) in enumerate(WRONG.items()):
        copy = folder.parent / f"wrong_{number}"
        shutil.copytree(folder, copy)
        change(copy)
        with pytest.raises(ValueError) as error:  # noqa: PT011
            read_speculator(copy, model)
        assert message in str(error.value)


def test_a_saved_layer_with_sizes_beyond_its_tensors_is_refused_before_memory_is_taken(written, tmp_path):
    _, layer, model = written
    layer.save(path := tmp_path / "layer.safetensors")
    with safe_open(path, "pt") as file:
        sizes = json.loads(file.metadata()["aedit.draft_shape"])
    for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_size"):
        about = {"aedit.draft_shape": json.dumps(sizes | {name: 2**40})}
        save_file(load_file(path), tmp_path / "huge.safetensors", about)
        with pytest.raises(
            ValueError, match=r"must be of shape \(.*\d{13,}.*\), got|frequencies must be \d{12}"
        ):
            DraftLayer.load(tmp_path / "huge.safetensors", model)


def test_published_files_have_older_names_half_precision_and_the_policys_embedding(written):
    folder, layer, model = written

    def older(tensors):
        for name in [n for n in tensors if n.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)
        for name in [n for n, value in tensors.items() if value.is_floating_point()]:
            tensors[name] = tensors[name].bfloat16()
        tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.clone()

    with_tensors(folder, older)
    found = read_speculator(folder, model)
    for name, value in layer.state_dict().items():
        assert torch.equal(found.state_dict()[name], value.bfloat16().float())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM.exists(), reason="no .venv-vllm")
def test_vllm_starts_policy_and_drafter_from_the_folder_and_drafts_as_well(tmp_path):
    """Greedy texts are equal, and so are the tokens per verification but for those beyond the last token."""
    torch.manual_seed(3)
    sizes = SIZES | {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2}
    config = LlamaConfig(
        **sizes | {"num_key_value_heads": 1}, initializer_range=0.1, tie_word_embeddings=False
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(3)
    shape = RingShape.within(2**24, 4 * 64, torch.float32)
    memory = bytearray(shape.num_bytes)
    starts = [(5 + i, 9, 2 * i) for i in range(8)]

    def generated(arm, layer=None, sink=None):
        target = Target.of(model, rows=8, max_tokens=128, nodes=16, taps=(1, 3, 4))
        drafters = {} if layer is None else {"layer": LayerDrafter.of(layer, target)}
        engine = Engine(target, drafters=drafters, chooser=Fixed.of(arm))
        engine.sink = sink
        sampling = Sampling(max_new_tokens=64, temperature=0.0)
        prompts = [Prompt(tokens=t, rollout=1, sample=i, sampling=sampling) for i, t in enumerate(starts)]
        texts = {rollout.prompt.sample: rollout.tokens for rollout in engine.generate(prompts)}
        return [texts[i] for i in range(8)], engine.meters.status()["accepted_length"]

    plain, _ = generated("off", sink=RowFeatures(FeatureRing(memory, shape)))
    reader = FeatureReader(memory)
    samples = [reader.read(entry) for entry in reader.entries()]
    used = sorted({token for text in plain for token in text})
    generator = torch.Generator().manual_seed(0)
    layer = Eagle3Layer.for_policy(model, draft_tokens=used[: 3 * len(used) // 4], generator=generator)
    ends = PolicyEmbeddings(model.get_input_embeddings().weight, model.lm_head.weight, 0)
    trainer = DraftTrainer(layer, DraftTrainingConfig(lr=3e-3, loss=LossConfig(num_passes=2)))
    for _ in range(60):
        trainer.step(samples, ends)
    texts, per_pass = generated("layer:4", layer.requires_grad_(False))
    assert texts == plain
    assert per_pass > 1.5
    model.save_pretrained(tmp_path / "policy")
    folder = tmp_path / "drafter"
    folder.mkdir()
    write_speculator(layer, config, folder, verifier=str(tmp_path / "policy"))
    program = Path(__file__).parent / "kit" / "vllm_greedy.py"
    done = subprocess.run(
        [VLLM, program, folder, json.dumps(starts), "64"], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["texts"] == plain
    assert abs((1 + found["accepted"] / found["drafts"]) / per_pass - 1) < 0.02
