"""Tests drafts as recorded CUDA graphs and, without a GPU, the padding that recording adds."""

import copy
from dataclasses import replace

import pytest
import torch
from test_draft_layer import layer_for, policy
from test_layer_drafter import World, world

from aedit.spec_rollout.drafters import Draft, LayerDrafter

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Unrecorded:
    """Stand-in for `GraphCache` that runs what would be recorded."""

    def __init__(self):
        self.keys = []

    def run(self, key, function, *inputs):
        self.keys.append((str(key[0]), *key[1:]))
        return function(*inputs)


class OnGpu:
    """Drafter on a GPU for rows whose tensors are on the CPU."""

    def __init__(self, layer, ends, **sizes):
        layer = copy.deepcopy(layer).cuda()
        self.drafter = LayerDrafter(layer, tuple(end.detach().cuda() for end in ends), **sizes)

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def begin(self, rows):
        self.drafter.begin([replace(row, features_Td=row.features_Td.cuda()) for row in rows])

    def update(self, taken):
        self.drafter.update(replace(taken, features=taken.features.cuda()))

    def propose(self, arm, rows, noise, temperature_B):
        self.noise = noise
        made = self.drafter.propose(arm, rows, self, temperature_B.cuda())
        parents = made.parents_BN if made.parents_BN is None else made.parents_BN.cpu()
        return Draft(made.tokens_BN.cpu(), parents, None, made.scores_BN.cpu())

    def at(self, rows, first, count):
        return self.noise.at(rows, first, count).cuda()


def check_a_few_steps(rows):
    """Check chains and trees of five rows, then of four, of which one has begun late."""
    rows.begin(9, 1, 17, 12, temperatures=(1.0, 0.0, 0.7))
    rows.update(1, 2, 1, 3)
    rows.begin(6)
    for arm in ("layer:4", "layer:3x2x5", "layer:4"):
        rows.check(arm)
        rows.update(1, 2, 1, 3, 1)
    rows.end(0)
    rows.check("layer:4")
    rows.update(1, 1, 1, 2)
    rows.check("layer:3x2x5")


def test_rows_and_slots_that_a_recording_adds_change_nothing():
    rows = world("qwen3")
    rows.drafter.graphs = Unrecorded()
    check_a_few_steps(rows)
    # Five rows are computed as 6, four as 4; less than 256 slots are not worth a graph of their own.
    chain, tree = ("layer:4", 6, 256), ("layer:3x2x5", 6, 256)
    assert rows.drafter.graphs.keys == [chain, tree, chain, ("layer:4", 4, 256), ("layer:3x2x5", 4, 256)]


@pytest.mark.parametrize("family", [pytest.param(name, marks=gpu) for name in ("llama", "qwen2", "qwen3")])
def test_recorded_drafts_are_those_of_a_plain_recomputation(family):
    model = policy(family)
    rows = World(layer_for(model), model)
    rows.drafter = OnGpu(rows.layer, rows.ends, rows=6, max_tokens=100)
    check_a_few_steps(rows)
    assert len(rows.drafter.graphs) == 4
