"""Tests the layer of EAGLE-3's form: against its definition, in drafts, in its training and in files."""

import json

import pytest
import torch
import torch.nn.functional as F
from kit.eagle3 import SIZES, SOME, layer_for, policy
from kit.tiny_policies import ends
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import (
    DraftForm,
    DraftLayer,
    Eagle3Layer,
    Eagle3Shape,
    LayerDrafter,
)
from aedit.spec_rollout.drafters.draft_layer import eagle3_taps
from aedit.spec_rollout.drafters.draft_pass import runner_of
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import (
    DraftTrainer,
    DraftTrainingConfig,
    FeatureReader,
    FeatureRing,
    ForwardFeatures,
    LossConfig,
    RingShape,
    RowFeatures,
    TrainedText,
    held_out_match,
    pack_samples,
)
from aedit.spec_rollout.training.losses import draft_losses, predict_features


def halves(rows, heads):
    """Reorder rows of neighbouring pairs as transformers does: the first of each pair, then the second."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def by_definition(model, layer, features, tokens, at):
    """Return predicted features and logits of a causal sequence, (P, d) and (P, D), in plain torch.

    features: of the taps after `fc`, or fed back, (P, d).
    """
    shape, epsilon = layer.shape, model.config.rms_norm_eps

    def normed(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight

    embedded = normed(model.get_input_embeddings().weight[tokens], layer.gain)
    feature = normed(features, layer.feature_norm)
    residual = feature if shape.residual_after_norm else features
    q, k = shape.split
    queries, keys, values = layer.qkv.weight.split([q, k, k])
    inputs = torch.cat([embedded, feature], -1)
    heads = [
        (inputs @ halves(w, n).T if rotated else inputs @ w.T).view(len(at), n, -1).transpose(0, 1)[None]
        for w, n, rotated in (
            (queries, shape.num_heads, True),
            (keys, shape.num_kv_heads, True),
            (values, shape.num_kv_heads, False),
        )
    ]
    cos, sin = LlamaRotaryEmbedding(model.config)(inputs, at[None])
    queries, keys = apply_rotary_pos_emb(heads[0], heads[1], cos.double(), sin.double())
    mixed = F.scaled_dot_product_attention(queries, keys, heads[2], is_causal=True, enable_gqa=True)
    x = residual + layer.attended(mixed[0].transpose(0, 1).flatten(1))
    gate, up = layer.gate_up(normed(x, layer.middle_norm)).chunk(2, -1)
    x = x + layer.down(F.silu(gate) * up)
    return x, normed(x, layer.final_norm) @ layer.output.weight.T


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("draft_tokens", [(), SOME])
def test_layer_and_inference_compute_eagle_3(after, draft_tokens):
    model = policy()
    layer = layer_for(model, draft_tokens, after=after).requires_grad_(False)
    features = torch.randn(9, 4 * 32, dtype=torch.float64)
    tokens, at = torch.randint(48, (9,)), torch.arange(9)
    wanted, logits = by_definition(model, layer, layer.reduce(features[:, 32:]), tokens, at)
    causal = torch.ones(9, 9).tril().bool()[None]
    embedding, head = ends(model).embedding_Vd, ends(model).head_Vd
    found, _ = layer(features[None], embedding[tokens][None], at[None], causal)
    torch.testing.assert_close(found[0], wanted, rtol=1e-6, atol=1e-6)  # cos and sin are of float32
    exact = found[0]
    torch.testing.assert_close(layer.logits(exact, head), logits, rtol=1e-6, atol=1e-6)
    runner = runner_of(layer, embedding, head, rows=1, slots=16)
    pairs = runner.write_pairs(tokens, features, at, at)
    mask = torch.zeros(1, 9, 9, dtype=torch.float64).masked_fill_(~causal, -torch.inf)
    guessed = runner.predict(pairs, *runner.kv_views(1, 9), mask)
    torch.testing.assert_close(guessed, exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(runner.logits(guessed), layer.logits(exact, head), rtol=1e-10, atol=1e-10)
    fed_back, _ = by_definition(model, layer, exact, tokens, at)
    found, _ = layer(exact[None], embedding[tokens][None], at[None], causal)
    torch.testing.assert_close(found[0], fed_back, rtol=1e-6, atol=1e-6)


def prompts(count=6, most=14):
    return [
        Prompt(tokens=(1 + i, 2, 3), rollout=5, sample=i, group=0, sampling=Sampling(max_new_tokens=most))
        for i in range(count)
    ]


def engine_of(model, arm, layer=None, sink=None, mode="coupled"):
    taps = eagle3_taps(4)
    target = Target.of(model, rows=4, max_tokens=48, nodes=16, taps=taps)
    drafters = {} if layer is None else {"layer": LayerDrafter.of(layer, target, mode=mode)}
    engine = Engine(target, drafters=drafters, chooser=Fixed.of(arm))
    engine.sink = sink
    return engine


def texts(engine):
    return {rollout.prompt.sample: rollout.tokens for rollout in engine.generate(prompts())}


def collected(model):
    shape = RingShape.within(2**20, 4 * 32, torch.float64)
    memory = bytearray(shape.num_bytes)
    plain = texts(engine_of(model, "off", sink=RowFeatures(FeatureRing(memory, shape))))
    reader = FeatureReader(memory)
    return plain, [reader.read(entry) for entry in reader.entries()]


@pytest.mark.parametrize(("kind", "draft_tokens", "gain"), [("ce", (), 0.3), ("coupled", (*range(40),), 0.1)])
def test_it_learns_from_an_engines_features_and_its_drafts_change_no_token(kind, draft_tokens, gain):
    model = policy(loudness=12.0)
    plain, samples = collected(model)
    layer = Eagle3Layer.for_policy(
        model, draft_tokens=draft_tokens, generator=torch.Generator().manual_seed(0)
    )
    rows = pack_samples(samples, 64)
    before = held_out_match(layer, rows, ends(model, version=0), 3).rate
    lengths = []
    for steps in (0, 30):
        settings = DraftTrainingConfig(lr=1e-2, warmup_steps=5, loss=LossConfig(tokens=kind))
        trainer = DraftTrainer(layer, settings)
        for _ in range(steps):
            trainer.step(samples, ends(model, version=0))
        for arm in ("layer:4", "layer:3x2x6"):
            engine = engine_of(model, arm, layer)
            assert texts(engine) == plain
        lengths.append(engine.status()["accepted_length"])
    assert lengths[1] > lengths[0] + gain
    assert held_out_match(layer, rows, ends(model, version=0), 3).rate > before + gain / 5


def test_a_draft_of_a_part_of_the_vocabulary_is_of_its_tokens_and_their_probabilities():
    model = policy()
    layer = layer_for(model, SOME)
    engine = engine_of(model, "layer:3", layer, mode="rejection")
    drafts = []
    drafter = engine.drafters["layer"]
    propose = drafter.propose
    drafter.propose = lambda *args: drafts.append(propose(*args)) or drafts[-1]
    list(engine.generate(prompts(2)))
    for draft in drafts:
        assert set(draft.tokens_BN.flatten().tolist()) <= {*SOME}
        q = draft.logq_BNV.exp()
        assert q.shape[-1] == 48
        torch.testing.assert_close(q[..., list(SOME)].sum(-1), torch.ones(q.shape[:2]))


def test_tokens_outside_of_the_draft_vocabulary_cannot_be_accepted():
    model = policy()
    _, samples = collected(model)
    (row,) = pack_samples(samples[:2], 64)
    layer = layer_for(model, SOME)
    for kind in ("tv", "coupled"):
        settings = LossConfig(tokens=kind, num_passes=1)
        losses = draft_losses(layer, row, ends(model, version=0), settings)
        (made,) = predict_features(layer, row, ends(model).embedding_Vd, 1)
        features = row.features_Pw[made.at_C + 1, :32]
        p = (features @ ends(model).head_Vd.T).softmax(-1)
        q = torch.zeros_like(p)
        q[:, list(SOME)] = layer.logits(made.predicted_Cd, ends(model).head_Vd).softmax(-1)
        if kind == "tv":
            m = torch.minimum(p, q).sum(-1)
        else:
            worst = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None])
            m = (1 / worst.sum(-1))[:, list(SOME)].sum(-1)
        torch.testing.assert_close(losses.total, (1 - m).sum(), rtol=1e-9, atol=1e-9)


def test_features_of_a_training_forward_are_those_of_the_engine():
    model = policy()
    _, samples = collected(model)
    shape = RingShape.within(2**20, 4 * 32, torch.float64)
    memory = bytearray(shape.num_bytes)
    forward = ForwardFeatures(RowFeatures(FeatureRing(memory, shape)), eagle3_taps(4))
    all_tokens = [tuple(sample.tokens_N.tolist()) for sample in samples]
    ids = torch.tensor(all_tokens)
    with forward.collecting(model, [TrainedText(tokens, 3) for tokens in all_tokens], 0):
        model(input_ids=ids)
    forward.write()
    reader = FeatureReader(memory)
    for sample, entry in zip(samples, reader.entries(), strict=True):
        torch.testing.assert_close(reader.read(entry).features_MF, sample.features_MF, rtol=0, atol=1e-5)


def test_a_file_keeps_form_and_values_and_is_not_of_another_policy(tmp_path):
    model = policy()
    layer = layer_for(model, SOME)
    layer.save(tmp_path / "drafter.safetensors")
    found = DraftLayer.load(tmp_path / "drafter.safetensors", model)
    assert isinstance(found, Eagle3Layer)
    assert found.shape == layer.shape
    assert all(torch.equal(found.state_dict()[name], value) for name, value in layer.state_dict().items())
    narrow = LlamaConfig(**SIZES | {"hidden_size": 16})
    with pytest.raises(ValueError, match="other sizes: hidden_size 32, not 16"):
        DraftLayer.load(tmp_path / "drafter.safetensors", narrow)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tap_layers", [0, 1, 9]), ("tap_layers", [1, 0, 2]), ("tap_layers", [0, 1]),
        ("tap_layers", [0, 1, "2"]),
        ("draft_tokens", [3, 3, 5]), ("draft_tokens", [-1]), ("draft_tokens", [0, 48]), ("draft_tokens", 7),
        ("frequencies", [1.0]), ("frequencies", [1.0, 0.1, 0.01, float("nan")]), ("frequencies", None),
        ("norm_epsilon", -1e-6), ("norm_epsilon", "small"),
        ("rope_scale", float("inf")), ("rope_scale", None),
        ("num_heads", 0), ("head_size", 8.5), ("residual_after_norm", "no"),
    ],
)  # fmt: skip
def test_a_file_with_a_damaged_shape_is_refused_by_the_field(tmp_path, name, value):
    """Such a layer would draft in vain, or fail in a pass."""
    model, path = policy(), tmp_path / "drafter.safetensors"
    layer_for(model, SOME).save(path)
    with safe_open(path, "pt") as file:
        sizes = json.loads(file.metadata()["aedit.draft_shape"])
    assert len(sizes["frequencies"]) == 4
    save_file(load_file(path), path, {"aedit.draft_shape": json.dumps(sizes | {name: value})})
    with pytest.raises(
        ValueError, match=rf"its metadata is damaged: (.*\b{name}\b|.*'(int|NoneType)' object|.*has no len)"
    ):
        DraftLayer.load(path, model)


def test_the_layers_it_reads_and_the_tokens_it_drafts():
    assert [eagle3_taps(layers) for layers in (3, 4, 7, 12, 32)] == [
        (0, 1, 2), (0, 1, 3), (1, 2, 3), (1, 5, 8), (1, 15, 28),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="must be 3 or more, got 2"):
        eagle3_taps(2)
    config = LlamaConfig(**SIZES, eos_token_id=[45, 3])
    assert DraftForm("eagle3", 8).shape(config).draft_tokens == (0, 1, 2, 3, 4, 5, 6, 45)
    assert DraftForm("eagle3").shape(config).draft_tokens == ()
    with pytest.raises(ValueError, match=r"draft tokens must be 0 to 47, got \(48,\)"):
        Eagle3Shape.for_policy(config, [3, 48])
    model = policy()
    new = DraftForm("eagle3", 8).new(model)
    assert torch.equal(new.output.weight, model.lm_head.weight[new.draft_tokens])
