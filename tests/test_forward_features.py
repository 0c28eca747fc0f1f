"""Tests features of the training forward: values of a plain forward pass, no extra pass, bounded memory."""

import pytest
import torch
from kit.gpu import DEVICES
from kit.tiny_policies import policy
from torch.nn.functional import cross_entropy

from aedit.spec_rollout import Engine, Prompt, Sampling, make_target
from aedit.spec_rollout.training import (
    FeatureReader,
    FeatureRing,
    ForwardFeatures,
    RingShape,
    RowFeatures,
    TrainedText,
)

TEXTS = [TrainedText([5, 7, 9, 11, 13], 2), TrainedText([3, 1, 4, 1, 5, 9, 2, 6], 3), TrainedText([8, 2], 1)]
VERSION = 4


def sink_of(model, num_bytes=2**20, page_tokens=32):
    shape = RingShape.within(num_bytes, model.config.hidden_size, torch.float64, page_tokens)
    memory = bytearray(shape.num_bytes)
    return RowFeatures(FeatureRing(memory, shape)), FeatureReader(memory)


def samples(reader):
    return [reader.read(entry) for entry in reader.entries()]


def padded(texts):
    longest = max(len(text.tokens) for text in texts)
    return torch.tensor([[*text.tokens, *[0] * (longest - len(text.tokens))] for text in texts])


def train(model, texts, features=None):
    """Run the forward and backward pass of a training step, and return the gradients."""
    model.zero_grad()
    tokens = padded(texts).to(model.device)

    def loss():
        return cross_entropy(model(input_ids=tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    if features is None:
        loss().backward()
    else:
        with features.collecting(model, texts, VERSION):
            found = loss()
        found.backward()
        features.write()
    return [p.grad.clone() for p in model.parameters()]


@torch.no_grad()
def plain(model, text):
    """Return the features of all tokens but the last, from a forward pass of this text alone."""
    return model.model(input_ids=torch.tensor([text.tokens], device=model.device)).last_hidden_state[0, :-1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_features_of_the_training_forward_are_those_of_a_plain_forward(kind, device):
    model = policy(kind).to(device)
    sink, reader = sink_of(model)
    train(model, TEXTS, ForwardFeatures(sink))
    assert len(samples(reader)) == len(TEXTS)
    for sample, text in zip(samples(reader), TEXTS, strict=True):
        assert sample.tokens_N.tolist() == list(text.tokens)
        assert (sample.num_prompt, sample.version, sample.finished) == (text.num_prompt, VERSION, True)
        torch.testing.assert_close(sample.features_MF, plain(model, text).cpu(), rtol=0, atol=1e-12)


def test_a_drafter_gets_the_same_samples_as_from_the_verify_pass():
    model = policy()
    verified, reader = sink_of(model)
    target = make_target(model, rows=3, max_tokens=32)
    target.update_weights(None, VERSION)
    engine = Engine(target)
    engine.sink = verified
    sampling = Sampling(max_new_tokens=9)
    asked = [Prompt(tokens=tuple(range(i + 2)), rollout=i, sampling=sampling) for i in range(3)]
    rollouts = list(engine.generate(asked))
    texts = [TrainedText((*r.prompt.tokens, *r.tokens), len(r.prompt.tokens)) for r in rollouts]
    trained, trained_reader = sink_of(model)
    train(model, texts, ForwardFeatures(trained))
    ours = {tuple(each.tokens_N.tolist()): each for each in samples(trained_reader)}
    theirs = {tuple(each.tokens_N.tolist()): each for each in samples(reader)}
    assert ours.keys() == theirs.keys()
    for key, sample in theirs.items():
        other = ours[key]
        assert (sample.num_prompt, sample.version) == (other.num_prompt, other.version)
        assert (sample.finished, sample.step) == (other.finished, other.step)
        # transformers computes rotary positions in float32
        torch.testing.assert_close(sample.features_MF, other.features_MF, rtol=0, atol=1e-5)


def test_collecting_runs_no_module_and_changes_no_gradient():
    model = policy()
    calls = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    expected = train(model, TEXTS)
    once = list(calls)
    calls.clear()
    sink, _ = sink_of(model)
    found = train(model, TEXTS, ForwardFeatures(sink))
    assert calls == once
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_sink_that_does_not_collect_gets_no_hook_and_no_sample():
    model = policy()
    sink, reader = sink_of(model)
    sink.collects = False
    features = ForwardFeatures(sink)
    with features.collecting(model, TEXTS, VERSION):
        assert not model.model._forward_hooks
        model(input_ids=padded(TEXTS))
    features.write()
    assert samples(reader) == []
    assert sink.status()["begun"] == 0


def test_no_more_is_copied_than_the_ring_holds():
    model = policy()
    texts = [TrainedText([i % 40 for i in range(9)], 2)] * 50
    shape = RingShape(model.config.hidden_size, torch.float64, num_pages=6, page_tokens=4)
    sink, reader = sink_of(model, shape.num_bytes, 4)
    features = ForwardFeatures(sink)
    with features.collecting(model, texts, VERSION):
        model(input_ids=padded(texts))
    assert features.num_waiting_bytes <= shape.num_bytes
    features.write()
    assert features.num_waiting_bytes == 0
    assert len(samples(reader)) == 3
    assert sink.status()["evicted"] == 0


def test_a_model_that_was_not_called_or_on_other_rows_is_refused():
    model = policy()
    features = ForwardFeatures(sink_of(model)[0])
    refused = "did not call its own layers"
    with pytest.raises(ValueError, match=refused), features.collecting(model, TEXTS, 1):
        pass
    refused = r"3 texts of up to 8 tokens.*\(2, 8, 32\)"
    with pytest.raises(ValueError, match=refused), features.collecting(model, TEXTS, 1):
        model(input_ids=padded(TEXTS)[:2])
