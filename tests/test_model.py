"""Tests models of several families: their sizes, their loss, and error messages."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aedit.launch.config import ModelConfig
from aedit.launch.node import blocks, build_model, loss, num_parameters
from aedit.launch.node.model import compile_blocks, outline
from aedit.types import UserError

LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
SHAPES = {
    "llama": ("llama", LLAMA),
    "llama-tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4} | NO_DROPOUT),
    "qwen2": ("qwen2", LLAMA),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)
BATCH = torch.randint(0, 257, (4, 17), generator=torch.Generator().manual_seed(1))


def build(shape="llama", seed=0, seq_len=16, vocab_size=257, **changes):
    family, sizes = SHAPES[shape]
    config = ModelConfig(**({"family": family, "sizes": sizes} | changes))
    return build_model(config, vocab_size, seq_len, seed, eos_id=256)


@EVERY_SHAPE
def test_a_fresh_model_knows_nothing(shape):
    assert loss(build(shape), BATCH, "fp32").item() == pytest.approx(math.log(257), abs=0.1)


@EVERY_SHAPE
def test_the_loss_is_the_mean_of_minus_log_p_of_the_next_token(shape):
    model = build(shape)
    with torch.no_grad():
        logits = model(input_ids=BATCH[:, :-1]).logits.double().numpy()
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(p, BATCH[:, 1:, None].numpy(), -1)).mean()
    assert loss(model, BATCH, "fp32").item() == pytest.approx(expected, rel=1e-5)


@EVERY_SHAPE
def test_no_token_sees_what_comes_after_it(shape):
    assert _is_causal(build(shape))


def test_a_family_that_looks_both_ways_by_default_does_not_here():
    assert _is_causal(build(family="bert", sizes={k: v for k, v in LLAMA.items() if "key" not in k}))


@EVERY_SHAPE
def test_a_model_learns(shape):
    model = build(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss(model, BATCH, "fp32").backward()
        optimizer.step()
    assert loss(model, BATCH, "fp32").item() < 4


def test_the_sizes_asked_for_are_the_sizes_made():
    d, heads, shared, inner, vocabulary, layers = 32, 4, 2, 48, 257, 2
    attention = 2 * d * d + 2 * d * d * shared // heads
    body = layers * (attention + 3 * d * inner + 2 * d) + d
    assert num_parameters(build("llama")) == body + 2 * vocabulary * d
    assert num_parameters(build("llama-tied")) == body + vocabulary * d


@EVERY_SHAPE
def test_one_seed_gives_the_same_bits_and_leaves_the_generator_alone(shape):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, again, other = build(shape, 3), build(shape, 3), build(shape, 4)
    assert torch.equal(torch.rand(3), expected)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    assert not all(map(torch.equal, first.parameters(), other.parameters()))


@EVERY_SHAPE
def test_parameters_are_fp32_in_training_mode_on_fast_attention(shape):
    model = build(shape)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.training
    assert not model.config.use_cache
    assert model.config._attn_implementation == "sdpa"


@EVERY_SHAPE
def test_the_config_of_a_new_model_fits_the_data(shape):
    config = build(shape).config
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id) == (257, 256, None)
    assert config.max_position_embeddings == 16


def test_more_positions_than_a_sample_may_be_asked_for():
    for key in ("n_positions", "max_position_embeddings"):
        sizes = SHAPES["gpt2"][1] | {key: 64}
        assert build("gpt2", sizes=sizes).config.n_positions == 64


def test_sizes_reach_the_model_under_either_of_their_names():
    assert build("gpt2", sizes={"hidden_size": 32, "num_hidden_layers": 1, "n_head": 4}).config.n_embd == 32
    assert build(sizes=LLAMA | {"rope_theta": 123.0}).config.to_json_string().count("123.0") == 1


@EVERY_SHAPE
def test_activation_checkpointing_changes_no_gradient(shape):
    plain, checkpointed = build(shape), build(shape, activation_checkpointing=True)
    for model in (plain, checkpointed):
        loss(model, BATCH, "fp32").backward()
    for mine, theirs in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)
    assert _forward_runs(checkpointed) == 2 * _forward_runs(plain)


def test_bf16_computes_in_bf16_and_keeps_fp32_gradients():
    model, seen = build(), []
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    value = loss(model, BATCH, "bf16")
    value.backward()
    assert seen == [torch.bfloat16]
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(loss(build(), BATCH, "fp32").item(), abs=0.05)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@EVERY_SHAPE
def test_blocks_are_found_in_the_order_they_run(shape):
    model, ran = build(shape), []
    for name, block in blocks(model):
        block.register_forward_hook(lambda *_, name=name: ran.append(name))
    loss(model, BATCH, "fp32")
    assert ran == [name for name, _ in blocks(model)]
    assert len(ran) == 2


def test_blocks_do_not_lie_inside_each_other():
    names = [
        name for name, _ in blocks(build(family="mamba", sizes={"hidden_size": 32, "num_hidden_layers": 2}))
    ]
    assert names == ["backbone.layers.0", "backbone.layers.1"]


def test_compiled_blocks_compute_the_same_and_keep_their_hooks_outside():
    torch._dynamo.reset()  # of many compilations of one function in a process the last ones are left out
    model, graphs, hooks = build(), [], []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    expected = loss(model, BATCH, "fp32")
    compile_blocks(model, backend=backend)
    for _, block in blocks(model):
        block.register_forward_pre_hook(lambda *_: hooks.append(torch.compiler.is_compiling()))
    torch.testing.assert_close(loss(model, BATCH, "fp32"), expected)
    assert graphs
    assert hooks == [False, False]


def test_pretrained_weights_come_back_as_they_were_saved(tmp_path):
    build(seed=9).to(torch.bfloat16).save_pretrained(tmp_path)
    model = build(pretrained=str(tmp_path), seed=1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.training
    for mine, saved in zip(model.parameters(), build(seed=9).parameters(), strict=True):
        assert torch.equal(mine, saved.bfloat16().float())


def test_a_pretrained_model_with_weights_elsewhere_is_refused(tmp_path):
    build().save_pretrained(tmp_path / "outside")
    build().config.save_pretrained(tmp_path / "model")
    names = dict.fromkeys(build().state_dict(), "../outside/model.safetensors")
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(UserError, match=r"weight_map names '\.\./outside/model\.safetensors'"):
        build(pretrained=str(tmp_path / "model"))


def test_a_pretrained_model_with_sizes_beyond_its_files_is_refused_before_memory_is_taken(tmp_path):
    build().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    sizes = json.loads(path.read_text())
    for name in ("intermediate_size", "num_hidden_layers"):
        path.write_text(json.dumps(sizes | {name: 2**40}))
        with pytest.raises(UserError, match=r"no usable model there \(.*1099511627776"):
            build(pretrained=str(tmp_path))
        run = SimpleNamespace(model=ModelConfig(pretrained=str(tmp_path)))
        with pytest.raises(UserError, match=r"no model there \(.*1099511627776"):
            outline(run, None)  # `aedit run --dry-run` took minutes for each million layers


def test_a_pretrained_model_that_is_too_small_for_the_data_is_refused(tmp_path):
    build().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"data\.tokenizer: has 300 tokens, model\.pretrained only 257"):
        build(pretrained=str(tmp_path), vocab_size=300)
    with pytest.raises(UserError, match=r"data\.seq_len = 17: model\.pretrained has only 16 positions"):
        build(pretrained=str(tmp_path), seq_len=17)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "lama"}, r"model\.family = 'lama' .* did you mean 'llama'"),
        ({"family": "clip"}, r"model\.family = 'clip' is no causal language model"),
        ({"sizes": {"hiden_size": 32}}, r"model\.sizes\.hiden_size .* did you mean 'hidden_size'"),
        ({"sizes": {"vocab_size": 32}}, r"model\.sizes\.vocab_size comes from data\.tokenizer"),
        ({"sizes": {"pad_token_id": 0}}, r"model\.sizes\.pad_token_id comes from data\.tokenizer"),
        ({"sizes": LLAMA | {"hidden_size": "big"}}, r"model\.sizes: not valid for a llama model: .*str"),
        ({"family": "gpt2", "sizes": {"n_embd": 33, "n_head": 4}}, r"not valid for a gpt2 model: .*33"),
        ({"sizes": LLAMA | {"num_key_value_heads": 3}}, r"num_key_value_heads = 3: must divide .* = 4"),
        ({"sizes": LLAMA | {"max_position_embeddings": 8}}, r"= 8 is below data\.seq_len = 16"),
        ({"pretrained": "/none/there"}, r"model\.pretrained = '/none/there': no usable model there"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(changes, message):
    with pytest.raises(UserError, match=message) as error:
        build(**changes)
    assert "\n" not in str(error.value)


def _is_causal(model):
    model.eval()
    tokens = BATCH[:, :16]
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 257
    with torch.no_grad():
        difference = model(input_ids=tokens).logits - model(input_ids=changed).logits
    return not difference[:, :10].any() and difference[:, 10:].any().item()


def _forward_runs(model):
    runs = []
    for _, block in blocks(model):
        next(block.children()).register_forward_hook(lambda *_: runs.append(1))
    loss(model, BATCH, "fp32").backward()
    return len(runs)
