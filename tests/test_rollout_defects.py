"""Tests for the eighteen defects of the code that TLT released (mit-han-lab/fastrl at bce3df7).

 1  the step of the RL loop never advances       test_features: a new policy begins a step by itself
 2  nothing is trained on by default             here
 3  features are silently not collected          here
 4  training ends before the long wait begins    test_idle: resumed by the first window, suspended by the last
 5  the rollout waits for the trainer            test_idle: windows wait for no trainer; benchmarks.idle
 6  features are deleted with every session      here; test_batches: one step off
 7  a feature with its own token, not the next   test_packing, test_features_engine, test_layer_drafter
 8  left padding shifts features                 test_features_engine: ragged prompts, recomputed offline
 9  packed samples attend to each other          test_packing: in their own sample only; gradients
10  features by request, not by accepted token   test_engine: features are those of the text
11  features sent as lists of Python numbers     here
12  the drafter's head is an old policy's        test_engine_drafters: new weights are at once the drafter's
13  loading a drafter overwrites the policy      test_engine_drafters: checksum; test_draft_layer: refused
14  rewards of the bandit are not used           test_bandit: algorithm 1, and one choice for all ranks
15  once on, speculation stays on                test_engine_equality: a switch costs no computation
16  "accept length" counts the policy's token    here: tokens per pass, and acceptance by position apart
17  one family, one engine, one version          test_families: twelve classes of transformers
18  thresholds that make verification lossy      test_verify_mutants: lenient verification is detected
"""

from collections import Counter

import pytest
import torch
from kit.rollouts import Stubborn, engine_of, prompts_of, tiny_policy
from kit.tiny_policies import drafter, ends, policy, said

from aedit.spec_rollout.drafters import RowStart, StepUpdate
from aedit.spec_rollout.training import (
    FeatureReader,
    FeatureRing,
    LayerTraining,
    LearningConfig,
    RingShape,
    RowFeatures,
    policy_tensors,
)


def ring_for(model, num_bytes=2**20):
    shape = RingShape.within(num_bytes, model.config.hidden_size, model.dtype)
    memory = bytearray(shape.num_bytes)
    return FeatureRing(memory, shape), memory


def test_d02_with_nothing_configured_what_an_engine_says_is_learned_from():
    model = tiny_policy(dtype=torch.float32)
    ring, memory = ring_for(model)
    learning = LayerTraining(drafter(model), memory, LearningConfig())
    learning.set_policy(policy_tensors(ends(model)), 0)
    learning.begin(drafter(model).state_dict())
    engine = engine_of(model, 4)
    engine.sink = RowFeatures(ring)
    list(engine.generate(prompts_of(16, max_new_tokens=24)))
    assert all(learning.microbatch() for _ in range(8))
    assert learning.metrics()["steps"] >= 1


class Broken(RowFeatures):
    def update(self, taken, version):
        raise RuntimeError("no features today")


def test_d03_who_cannot_keep_features_says_so_and_the_engine_does_not_go_on_without():
    model = tiny_policy()
    engine = engine_of(model, 2)
    engine.sink = Broken(ring_for(model)[0])
    engine.add(prompts_of(1)[0])
    with pytest.raises(RuntimeError, match="no features today"):
        engine.step()


def test_d06_what_was_said_before_a_window_is_still_there_after_it_and_in_the_next_step():
    model = policy(dtype=torch.float32)
    ring, memory = ring_for(model)
    learning = LayerTraining(drafter(model), memory, LearningConfig())
    learning.set_policy(policy_tensors(ends(model)), 1)
    learning.begin(drafter(model).state_dict())
    for step in range(2):
        if step:
            ring.begin_step()
        for sample in said(model, [[step, 1, 2]] * 4, 12):
            growing = ring.begin(int(sample.tokens_N[0]), sample.num_prompt, 1)
            ring.append(growing, sample.tokens_N[1:], sample.features_MF)
            ring.end(growing, True)
        for _ in range(5):  # a window
            learning.microbatch()
        assert [entry.step for entry in FeatureReader(memory).entries()] == [0] * 4 + [1] * 4 * step


def test_d11_features_become_no_python_numbers_on_their_way(monkeypatch):
    model = tiny_policy(dtype=torch.float32)
    ring, memory = ring_for(model)
    sink, width = RowFeatures(ring, flush_steps=1), model.config.hidden_size
    to_list = torch.Tensor.tolist

    def refuse(self):
        assert not self.is_floating_point() or self.numel() < width
        return to_list(self)

    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    sink.begin([RowStart(0, -1, [3, 4, 5], torch.randn(2, width), 3)], 1)
    sink.update(StepUpdate([[6, 7]], torch.randn(1, 2, width)), 1)
    sink.end(0, True)
    reader = FeatureReader(memory)
    (entry,) = reader.entries()
    assert reader.read(entry).features_MF.shape == (4, width)


def test_d16_a_pass_without_drafts_makes_one_token_and_acceptance_is_told_apart():
    model = tiny_policy()
    plain = engine_of(model, 2)
    said = [token for rollout in plain.generate(prompts_of(3)) for token in rollout.tokens]
    assert (plain.status()["accepted_length"], plain.status()["accepted_by_position"]) == (1.0, [])
    stubborn = engine_of(model, 2, Stubborn(Counter(said).most_common(1)[0][0]), "layer:2")
    list(stubborn.generate(prompts_of(3)))
    first, second = stubborn.status()["accepted_by_position"]
    assert 0 < first < 1
    assert 1 < stubborn.status()["accepted_length"] <= 1 + first + second
