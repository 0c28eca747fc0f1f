"""Tests that a drafter trains on exactly what the engine computes, and as it later drafts."""

import torch
from kit.tiny_policies import drafter, ends, policy

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import LayerDrafter, RowStart, parse_arm
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import (
    FeatureReader,
    FeatureRing,
    FeatureSample,
    RingShape,
    RowFeatures,
    pack_samples,
)
from aedit.spec_rollout.training.losses import predict_features

CLOSE = 1e-5
"""transformers computes norms and rotary positions in float32, whatever the dtype of the model."""


class Silence:
    """No noise: everything is greedy."""

    def at(self, rows, first, count):
        return torch.zeros(len(rows), count, 48)


def engine_of(model, arm, rows=3):
    """Return an engine that drafts with a layer and writes into a ring, and the reader of that ring."""
    target = Target.of(model, rows=rows, max_tokens=64)
    layer = LayerDrafter.of(drafter(model), target)
    engine = Engine(target, drafters={"layer": layer}, chooser=Fixed(parse_arm(arm)))
    shape = RingShape.within(400_000, 32, torch.float64, 4)
    memory = bytearray(shape.num_bytes)
    engine.sink = RowFeatures(FeatureRing(memory, shape), flush_steps=3)
    return engine, FeatureReader(memory)


def prompts():
    """Return prompts of unequal lengths: two groups with one prompt each, and some single ones."""
    made = [((1, 2, 3, 4), 0)] * 3 + [((5, 6), 1)] * 2 + [((7,), -1), ((8, 9, 10), -1)]
    return [
        Prompt(tokens=t, rollout=i, group=g, sampling=Sampling(max_new_tokens=5 + 4 * i))
        for i, (t, g) in enumerate(made)
    ]


def test_pairs_are_those_of_an_offline_recomputation_whatever_was_drafted():
    model = policy()
    for arm in ("off", "layer:3", "layer:3x2x5"):
        engine, reader = engine_of(model, arm)
        rollouts = list(engine.generate(prompts()))
        samples = [reader.read(entry) for entry in reader.entries()]
        said = sorted([*rollout.prompt.tokens, *rollout.tokens] for rollout in rollouts)
        assert sorted(sample.tokens_N.tolist() for sample in samples) == said
        assert all(sample.finished for sample in samples)
        for sample in samples:
            (row,) = pack_samples([sample], 64, response_only=False)
            hidden = model.model(input_ids=sample.tokens_N[None]).last_hidden_state[0]
            for t in range(len(sample.tokens_N) - 1):
                torch.testing.assert_close(row.features_Pw[t], hidden[t], rtol=0, atol=CLOSE)
                assert row.tokens_P[t] == sample.tokens_N[t + 1]


def test_new_weights_begin_samples_of_the_new_version():
    model = policy()
    engine, reader = engine_of(model, "layer:2")
    for prompt in prompts()[:2]:
        engine.add(prompt)
    engine.step()
    weights = {name: value * 1.01 for name, value in model.state_dict().items()}
    engine.update_weights(weights, 5)
    while engine.running:
        engine.step()
    by_version = {0: [], 5: []}
    for entry in reader.entries():
        by_version[entry.version].append(reader.read(entry))
    assert [sample.finished for sample in by_version[0]] == [False, False]
    assert [sample.finished for sample in by_version[5]] == [True, True]
    for sample in by_version[5]:
        hidden = model.model(input_ids=sample.tokens_N[None]).last_hidden_state[0]
        torch.testing.assert_close(sample.features_MF, hidden[:-1], rtol=0, atol=CLOSE)


def test_the_bytes_of_keys_values_and_features_are_in_the_status_and_do_not_grow():
    engine, _ = engine_of(policy(), "layer:2")
    seen = []
    for prompt in prompts():
        engine.add(prompt)
    while engine.running or engine.waiting:
        engine.step()
        seen.append(engine.status())
    assert {status["kv_bytes_reserved"] for status in seen} == {engine.target.kv_bytes_reserved}
    assert all(status["kv_bytes"] <= engine.target.kv_bytes_reserved for status in seen)
    assert engine.target.kv_bytes == 0
    features = [status["features"] for status in seen]
    assert {each["bytes"] for each in features} == {engine.sink.ring.shape.num_bytes}
    assert max(each["bytes_used"] for each in features) <= features[0]["bytes"] <= 400_000
    # Three rows of three steps of up to three tokens, and the prompts that began with them.
    assert 0 < max(each["bytes_waiting"] for each in features) <= 8 * 32 * 3 * (3 * 3 + 4)
    assert features[-1]["bytes_waiting"] == 0


def test_a_sample_that_leaves_stays_to_be_learned_from():
    model = policy()
    engine, reader = engine_of(model, "off")
    engine.add(prompts()[6])
    for _ in range(5):
        engine.step()
    engine.remove(engine.running[0])
    (entry,) = reader.entries()
    assert (entry.num_tokens, entry.finished) == (3 + 5, False)


def test_training_asks_what_the_drafter_computes_when_it_drafts():
    """Pass s over a drafted chain, taken as text, must give its s-th probability."""
    model = policy()
    layer = drafter(model)
    drafts = LayerDrafter(layer, (ends(model).embedding_Vd, ends(model).head_Vd), rows=2, max_tokens=64)
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2]]
    with torch.no_grad():
        hidden = [model.model(input_ids=torch.tensor([text])).last_hidden_state[0] for text in texts]
    drafts.begin([RowStart(i, -1, texts[i], hidden[i][:-1], 2) for i in range(2)])
    drafted = drafts.propose(parse_arm("layer:4"), 2, Silence(), torch.zeros(2))
    for i, text in enumerate(texts):
        root = len(text) - 2
        tokens = drafted.tokens_BN[i].tolist()
        with torch.no_grad():
            found = passes_along(layer, text + tokens, hidden[i], ends(model))
        logq = torch.stack([found[s][root + s] for s in range(4)])
        assert logq.argmax(-1).tolist() == tokens
        scores = logq.gather(1, drafted.tokens_BN[i][:, None])[:, 0].cumsum(0)
        torch.testing.assert_close(scores.float(), drafted.scores_BN[i].float(), rtol=1e-5, atol=1e-5)


def passes_along(layer, text, hidden_Td, policy_ends):
    """Return log q of each pass at each pair of a text; the features beyond the given ones are never read."""
    unknown = torch.full((len(text) - 1 - (len(hidden_Td) - 1), hidden_Td.shape[1]), 7.0, dtype=torch.float64)
    features = torch.cat((hidden_Td[:-1], unknown))
    (row,) = pack_samples([FeatureSample(torch.tensor(text), features, 2, 1, 0, 0, True)], 64)
    passes = predict_features(layer, row, policy_ends.embedding_Vd, 4)
    logq = [(made.predicted_Cd @ policy_ends.head_Vd.T).log_softmax(-1) for made in passes]
    return [dict(zip(made.at_C.tolist(), each, strict=True)) for made, each in zip(passes, logq, strict=True)]
