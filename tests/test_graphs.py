"""Tests the memory that recorded graphs share and the eviction of graphs, recorded here without a GPU."""

import pytest
import torch
from kit.rollouts import KINDS, Insider, engine_of, samples, tiny_policy, tokens_of
from test_draft_layer import layer_for

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import LayerDrafter
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import GraphCache, Target
from aedit.spec_rollout.model.graphs import ReusedBuffers

CPU = torch.device("cpu")


class Replayed:
    """Stand-in for `CapturedGraph`: inputs and outputs lie where a graph's would.

    Intermediate results of a replay are overwritten before the next.
    """

    num_recorded = 0

    def __init__(self, function, inputs, shared):
        type(self).num_recorded += 1
        self.function, self.inputs = function, shared.inputs.buffers_like(inputs)
        self.results = shared.results.buffers_like(function(*[x.clone() for x in inputs]))

    def __call__(self, *inputs):
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        for mine, made in zip(self.results, self.function(*self.inputs), strict=True):
            mine.copy_(made)
        return self.results


def test_a_shelf_gives_every_tensor_of_one_place_the_same_memory():
    shelf = ReusedBuffers()
    large, other = shelf.buffers_like([torch.empty(4, 300), torch.empty(3, dtype=torch.bool)])
    small, _ = shelf.buffers_like([torch.empty(7, dtype=torch.int64), torch.empty(2, 1)])
    assert (large.shape, large.dtype, small.shape, small.dtype) == (
        (4, 300),
        torch.float32,
        (7,),
        torch.int64,
    )
    assert small.data_ptr() == large.data_ptr() != other.data_ptr()
    assert shelf.num_bytes == 8192 + 512


def test_who_has_a_place_keeps_it_when_the_shelf_grows():
    shelf = ReusedBuffers()
    (first,) = shelf.buffers_like([torch.empty(100)])
    first.fill_(3.0)
    (second,) = shelf.buffers_like([torch.empty(1000)])
    second.fill_(5.0)
    assert first.eq(3.0).all()
    grown = [shelf.buffers_like([torch.empty(n)])[0] for n in range(1001, 1024)]
    assert {x.data_ptr() for x in grown} == {second.data_ptr()}, "it grows by doubling"


def test_of_too_many_recordings_the_one_least_used_is_forgotten():
    graphs, x = GraphCache(CPU, max_graphs=2, record=Replayed), torch.arange(3.0)
    before = Replayed.num_recorded
    for key, expected in (("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4)):
        assert graphs.run(key, lambda x: (x * 2,), x)[0].tolist() == [0, 2, 4]
        assert (Replayed.num_recorded - before, len(graphs)) == (expected, min(2, expected))


def test_what_there_is_no_memory_to_record_is_run_as_it_is_and_not_tried_again():
    tried = []

    def record(function, inputs, shared):
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = GraphCache(CPU, record=record)
    for _ in range(3):
        assert graphs.run("large", lambda x: (x + 1,), torch.ones(2))[0].tolist() == [2, 2]
    assert (len(tried), len(graphs), graphs.too_large) == (1, 0, {"large"})


def test_other_errors_of_a_recording_are_errors():
    def record(function, inputs, shared):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        GraphCache(CPU, record=record).run("step", lambda x: (x,), torch.ones(2))


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def recorded_engine(policy, arm):
    """Return target and drafter as on a GPU, each with its own pool and more slots than most graphs use."""
    target = Target.of(policy, rows=7, max_tokens=400, nodes=8)
    drafter = LayerDrafter.of(layer_for(policy), target)
    target.graphs, drafter.graphs = (GraphCache(CPU, record=Replayed) for _ in range(2))
    return Engine(target, drafters={"layer": drafter}, chooser=Fixed.of(arm))


@pytest.mark.parametrize("arm", ["off", "layer:4", "layer:3x2x6"])
def test_an_engine_of_graphs_that_share_their_memory_says_the_same(policy, arm):
    asked = samples(KINDS)
    engine = recorded_engine(policy, arm)
    assert tokens_of(engine, asked) == tokens_of(engine_of(policy, 7, Insider([]), "off"), asked)
    assert len(engine.target.graphs) > 3
    assert arm == "off" or len(engine.drafters["layer"].graphs) > 3


def test_hidden_states_outlive_the_next_step_and_logits_do_not(policy):
    target = recorded_engine(policy, "off").target
    logits, hidden = target.step(torch.tensor([[3], [5]]), [0, 0])
    kept = logits.clone(), hidden.clone()
    target.step(torch.tensor([[7], [9]]), [0, 0])
    assert torch.equal(hidden, kept[1])
    assert not torch.equal(logits, kept[0])


def test_rejection_of_drafts_out_of_shared_memory_is_the_same(policy):
    asked, layer, engines = samples(KINDS), layer_for(policy), []
    for graphs in (None, GraphCache(CPU, record=Replayed)):
        target = Target.of(policy, rows=7, max_tokens=400, nodes=8)
        drafter = LayerDrafter.of(layer, target, mode="rejection")
        drafter.graphs = graphs
        drafters, chooser = {"layer": drafter}, Fixed.of("layer:4")
        engines.append(Engine(target, drafters=drafters, chooser=chooser, mode="rejection"))
    assert tokens_of(engines[0], asked) == tokens_of(engines[1], asked)
