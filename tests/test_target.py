"""Tests the forward pass of the policy against the model's own, in float64.

Rows, chains, trees, new weights.
"""

import pytest
import torch
from kit.exact_norms import normalize_exactly
from kit.rollouts import prefilled
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from aedit.spec_rollout.model import Segment, Target, ancestors, cache
from aedit.spec_rollout.model.attention_mask import relative_positions

V = 61
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES = {
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**SIZES | more)),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama 3 rope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "llama without groups": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 4})),
    "qwen2 tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3 wide heads": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=12)),
}


def made(name="llama", dtype=torch.float64, **more):
    """Return a model whose weights are large enough that omitting any parameter is detected."""
    torch.manual_seed(3)
    model = FAMILIES[name](**more).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            shift = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(torch.randn_like(parameter) * 0.15 + shift)
    return normalize_exactly(model)


def drawn(*shape, seed=0):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def own(model, tokens):
    """Return the model's own logits and last hidden states for one text."""
    out = model(torch.as_tensor(tokens)[None], output_hidden_states=True, use_cache=False)
    return out.logits[0], out.hidden_states[-1][0]


@pytest.fixture(params=["together", "apart", "blocks"])
def looks(request, monkeypatch):
    """Select whether rows of unequal length are read apart, and the layout of keys and values."""
    if request.param == "blocks":
        monkeypatch.setattr(cache, "default_layout", lambda device: "blocks")
    if request.param == "apart":
        monkeypatch.setattr(cache, "MIN_SAVED_BYTES", 0)


def close(ours, theirs, tolerance=1e-10):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_and_ragged_rows_are_as_the_models_own(name):
    model = made(name)
    target = Target.of(model, rows=3, max_tokens=40)
    texts = [drawn(5, seed=1), drawn(13, seed=2), drawn(9, seed=3)]
    for row, text in enumerate(texts):
        hidden = prefilled(target, text[:-3], row)
        logits, theirs = own(model, text[:-3])
        close(hidden, theirs)
        close(target.logits(hidden), logits)
    for back in (3, 2, 1):
        lengths = [len(text) - back for text in texts]
        tokens = torch.stack([text[n : n + 1] for text, n in zip(texts, lengths, strict=True)])
        logits, hidden = target.step(tokens, torch.tensor(lengths))
        for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
            theirs = own(model, text[: n + 1])
            close(logits[row, 0], theirs[0][-1])
            close(hidden[row, 0], theirs[1][-1])


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("name", ["llama", "qwen3 wide heads"])
def test_a_chain_in_ragged_rows_gives_the_logits_of_the_whole_text(name):
    model = made(name)
    target = Target.of(model, rows=4, max_tokens=40)
    texts = [drawn(11, seed=1), drawn(23, seed=2), drawn(17, seed=3)]
    q = 5
    lengths = [len(text) - q for text in texts]
    for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        prefilled(target, text[:n], row)
    logits, hidden = target.step(torch.stack([text[-q:] for text in texts]), lengths)
    for row, text in enumerate(texts):
        theirs = own(model, text)
        close(logits[row], theirs[0][-q:])
        close(hidden[row], theirs[1][-q:])


@pytest.mark.usefixtures("looks")
def test_tokens_of_a_draft_that_was_wrong_leave_no_trace():
    model = made()
    target = Target.of(model, rows=1, max_tokens=40)
    text = drawn(20, seed=4)
    prefilled(target, text[:10], 0)
    target.step(torch.cat([text[10:12], drawn(4, seed=5)])[None], [10])
    close(target.step(text[12:16][None], [12])[0][0], own(model, text[:16])[0][-4:])


TREES = torch.tensor([[-1, -1, 0, 0, 1, 4, 2], [-1, 0, 1, 2, 3, 4, 5], [-1, -1, -1, -1, -1, -1, 5]])


def path_to(parents, node):
    """Return the verified tokens from the root to drafted node `node`, root first, without a matrix."""
    return [0] if node < 0 else [*path_to(parents, int(parents[node])), node + 1]


def test_ancestors_and_depths_are_those_of_walking_up():
    sees = ancestors(TREES)
    for row, parents in enumerate(TREES):
        for node in range(-1, 7):
            path = path_to(parents, node)
            assert sees[row, node + 1].nonzero()[:, 0].tolist() == path
            assert relative_positions(sees)[row, node + 1] == len(path) - 1


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("name", ["llama", "qwen2 tied"])
def test_every_node_of_a_tree_is_as_if_its_path_were_the_text(name):
    model = made(name)
    target = Target.of(model, rows=3, max_tokens=40)
    pasts = [drawn(7, seed=1), drawn(12, seed=2), drawn(1, seed=3)]
    tokens = drawn(3, 8, seed=5)
    for row, past in enumerate(pasts):
        prefilled(target, past, row)
    logits, hidden = target.step(tokens, [len(past) for past in pasts], TREES)
    for row, past in enumerate(pasts):
        for node in range(-1, 7):
            theirs = own(model, torch.cat([past, tokens[row, path_to(TREES[row], node)]]))
            close(logits[row, node + 1], theirs[0][-1])
            close(hidden[row, node + 1], theirs[1][-1])


@pytest.mark.usefixtures("looks")
def test_after_a_tree_the_rows_go_on_from_the_accepted_path():
    model = made()
    target = Target.of(model, rows=3, max_tokens=40)
    pasts = [drawn(7, seed=1), drawn(12, seed=2), drawn(3, seed=3)]
    lengths, tokens, next_token = [len(past) for past in pasts], drawn(3, 8, seed=5), drawn(3, 1, seed=6)
    for row, past in enumerate(pasts):
        prefilled(target, past, row)
    target.step(tokens, lengths, TREES)
    path = torch.tensor([[0, 2, 5, 6], [0, 1, 0, 0], [0, 6, 7, 0]])
    counts = torch.tensor([3, 1, 2])
    target.keep_path(lengths, path, counts)
    logits, _ = target.step(
        next_token, [n + 1 + int(count) for n, count in zip(lengths, counts, strict=True)]
    )
    for row, past in enumerate(pasts):
        kept = tokens[row, path[row, : counts[row] + 1]]
        close(logits[row, 0], own(model, torch.cat([past, kept, next_token[row]]))[0][-1])


@pytest.mark.usefixtures("looks")
def test_a_copied_row_goes_on_like_its_source():
    model = made()
    target = Target.of(model, rows=3, max_tokens=40)
    text = drawn(12, seed=8)
    prefilled(target, text[:-1], 0)
    prefilled(target, drawn(20, seed=9), 2)
    target.copy_row(0, 2, 8)
    prefilled(target, text[8:-1], 2, start=8)
    target.move_row(2, 1, 11)
    logits, _ = target.step(text[-1:].repeat(2, 1), [11, 11])
    for row in range(2):
        close(logits[row, 0], own(model, text)[0][-1])


@pytest.mark.usefixtures("looks")
def test_keys_and_values_move_between_two_engines():
    model = made()
    source, other = Target.of(model, rows=2, max_tokens=20), Target.of(model, rows=3, max_tokens=40)
    text = drawn(12, seed=8)
    prefilled(source, text[:-1], 1)
    moved = source.read_kv(1, 11)
    prefilled(source, drawn(20, seed=1), 1)
    other.write_kv(0, moved)
    close(other.step(text[None, -1:], [11])[0][0], own(model, text)[0][-1:])


@pytest.mark.usefixtures("looks")
def test_keys_and_values_that_do_not_fit_are_refused():
    model = made()
    target = Target.of(model, rows=1, max_tokens=10, nodes=0)
    for kv, words in (
        (torch.zeros(3, 2, 2, 12, 8, dtype=torch.float64), "12 tokens exceed the 11 slots"),
        (torch.zeros(3, 2, 2, 4, 8), "this cache's torch.float64, got torch.float32"),
        (torch.zeros(2, 2, 2, 4, 8, dtype=torch.float64), "another model"),
        (torch.zeros(3), "another model"),
    ):
        with pytest.raises(ValueError, match=words):
            target.write_kv(0, kv)


def test_an_optimizer_step_is_seen_at_once_and_nothing_is_a_copy():
    model = made()
    target = Target.of(model, rows=1, max_tokens=20)
    assert target.embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    text = drawn(6)
    before = prefilled(target, text, 0)
    model(text[None], labels=text[None]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = prefilled(target, text, 0)
    assert (after - before).abs().max() > 1e-3
    close(after, own(model, text)[1])


@pytest.mark.parametrize("name", ["llama", "qwen2 tied"])
def test_adopted_weights_are_the_new_policy(name):
    model, other = made(name), made(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    target = Target.of(model, rows=1, max_tokens=20)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    target.update_weights(other.state_dict(), version=7)
    assert target.version == 7
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    close(prefilled(target, drawn(6), 0), own(other, drawn(6))[1])


def test_weights_that_are_the_models_own_are_not_copied():
    model = made("qwen2 tied")
    target = Target.of(model, rows=1, max_tokens=20)
    changes = [parameter._version for parameter in model.parameters()]
    target.update_weights(model.state_dict(), version=1)
    assert changes == [parameter._version for parameter in model.parameters()]


def test_one_name_of_tied_weights_is_enough_and_two_that_differ_are_refused():
    model = made("qwen2 tied")
    target = Target.of(model, rows=1, max_tokens=20)
    weights = {name: tensor * 1.1 for name, tensor in model.state_dict().items()}
    head = weights.pop("lm_head.weight")
    target.update_weights(weights, version=1)
    torch.testing.assert_close(target.head, head, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"lm_head.weight is tied .* differs"):
        target.update_weights(weights | {"lm_head.weight": head * 2}, version=2)
    assert target.version == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda w: w.update(more=torch.ones(1)), "more is not in this model's state_dict"),
        (lambda w: w.update({"lm_head.weight": torch.ones(3, 3)}), r"lm_head.weight must .* got \(3, 3\)"),
        (lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), "got torch.int8"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change, words):
    model = made()
    target = Target.of(model, rows=1, max_tokens=20)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = {name: tensor + 1 for name, tensor in before.items()}
    change(weights)
    with pytest.raises(ValueError, match=words):
        target.update_weights(weights, version=5)
    assert target.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_tapped_layers_follow_the_last_hidden_state():
    model = made()
    target = Target.of(model, rows=1, max_tokens=20, taps=(1, 0))
    text = drawn(6)
    with torch.no_grad():
        states = model(text[None], output_hidden_states=True, use_cache=False).hidden_states
    hidden = prefilled(target, text[:-1], 0)
    logits, stepped = target.step(text[None, -1:], [5])
    close(torch.cat([hidden, stepped[0]]), torch.cat([states[-1][0], states[2][0], states[1][0]], -1))
    close(logits[0], own(model, text)[0][-1:])
    assert (target.hidden_size, target.feature_size) == (32, 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_are_near_the_models_own(dtype):
    model = made("qwen3 wide heads", dtype)
    target = Target.of(model, rows=1, max_tokens=40)
    text = drawn(15)
    prefilled(target, text[:10], 0)
    logits, _ = target.step(text[10:][None], [10])
    close(logits[0], own(model, text)[0][-5:], 1e-4 if dtype is torch.float32 else 0.1)
    assert logits.dtype is dtype


def test_what_is_not_supported_is_named():
    bloom = BloomForCausalLM(BloomConfig(vocab_size=V, hidden_size=32, n_layer=1, n_head=4))
    dynamic = made(rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0})
    mixed = made()
    mixed.lm_head.to(torch.bfloat16)
    adapted = made()
    adapted.model.layers[1].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[1].mlp.up_proj)
    for model, words in (
        (bloom, "BloomForCausalLM is not supported"),
        (dynamic, "rope_type 'dynamic' is not supported"),
        (made(hidden_act="mish"), "hidden_act 'mish' is not supported"),
        (mixed, "torch.bfloat16, torch.float64: all must be in one of"),
        (adapted, "layers.1.mlp.up_proj is a Sequential"),
    ):
        with pytest.raises(ValueError, match=words):
            Target.of(model, rows=1, max_tokens=20)


def test_rows_and_tokens_beyond_the_cache_are_refused():
    target = Target.of(made(), rows=2, max_tokens=20, nodes=3)
    for call, words in (
        (lambda: prefilled(target, drawn(25), 0), "25 tokens in a row exceed max_tokens 20 and a draft"),
        (lambda: prefilled(target, drawn(5), 2), r"different rows in 0 .. 1, got \[2\]"),
        (lambda: target.prefill([Segment(0, 0, [1]), Segment(0, 1, [1])]), r"different rows .* got \[0, 0\]"),
        (lambda: target.step(drawn(1, 4), [21]), "25 tokens in a row"),
        (lambda: target.step(drawn(3, 1), [1, 1, 1]), "3 rows of tokens and 3 lengths: must .* at most 2"),
        (lambda: target.step(drawn(1, 1), [1, 1]), "1 rows of tokens and 2 lengths"),
        (lambda: Target.of(made(), rows=0, max_tokens=20), "got 0, 20, 16"),
        (
            lambda: Target.of(made(), rows=1, max_tokens=20, taps=(3,)),
            r"taps \[3\] do not exist: .* layers 0 to 2",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            call()
