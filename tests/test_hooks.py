"""Tests the hooks on a model that is compiled, saved, copied, or run in parts."""

import copy
import io
import pickle

import pytest
import torch
from dist_jobs.library_jobs import Tower, batches, loss
from kit.deferred import add_one, alone, node
from kit.local_sgd import furthest, local_sgd, trainable
from test_library import assert_same_bits, replicas, together

from aedit.async_sgd.rules import Average
from aedit.types import Round

JOBS = "tests/dist_jobs/library_jobs.py"


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_has_run_compiled_before_the_block_lands_in_its_next_forward(in_place):
    model = Tower()
    runs = model if in_place else torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    x = torch.ones(2, 5)
    runs(x)
    sync, _ = node(model, alone(), outer=Average(0.5), prefetch=0)
    with sync:
        add_one(model)
        expected = copy.deepcopy(model)
        with torch.no_grad():
            for p in expected.parameters():
                p.sub_(0.5)
        sync.begin(Round(1, 1))
        torch.testing.assert_close(runs(x), expected.forward(x))
        sync.schedule.last_id = 1


def test_training_a_model_compiled_before_the_block_is_local_sgd():
    models, data = replicas(Tower(), 2), [batches(i, 4) for i in range(2)]
    compiled = {id(model): torch.compile(model, backend="eager") for model in models}
    for each in compiled.values():
        each(torch.ones(2, 5))
    results = together(models, data, every=2, loss=lambda model, x: loss(compiled[id(model)], x))
    assert_same_bits(results)
    assert furthest(results[0][0], local_sgd(Tower(), data, loss, every=2)) < 1e-6


def test_a_wrapper_of_torch_compile_can_be_the_model():
    wrapped = [torch.compile(model, backend="eager") for model in replicas(Tower(), 2)]
    data = [batches(i, 4) for i in range(2)]
    results = together(wrapped, data, every=2)
    expected = local_sgd(Tower(), data, loss, every=2)
    assert furthest(results[0][0], {f"_orig_mod.{name}": p for name, p in expected.items()}) < 1e-6


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [saved_and_loaded, copy.deepcopy])
def test_a_copy_of_an_attached_model_is_a_plain_model(copied):
    model, x = Tower(), torch.ones(2, 5)
    held = alone()
    sync, _ = node(model, held, outer=Average(0.5))
    with sync:
        add_one(model)
        other = copied(model)
        before = {name: p.clone() for name, p in trainable(other)}
        sync.begin(Round(1, 1))
        other(x)
        assert held.asked == [], "a copy lands nothing"
        assert furthest(dict(trainable(other)), before) == 0
        model(x)
        assert not sync.in_flight
        sync.schedule.last_id = 1


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_has_connections_is_not_copied_and_says_what_to_copy(copied):
    sync, _ = node(Tower(), alone())
    with pytest.raises(TypeError, match="copy the model, and save state_dict"):
        copied(sync)


class Skips(Tower):
    """Model that runs its head, and uses a block's parameters without running the block."""

    def hidden(self, x):
        return self.head(x) * self.blocks[1].up.weight.sum()


def test_a_unit_whose_module_never_runs_lands_when_the_others_do(recwarn):
    data = [batches(i, 7) for i in range(2)]

    def squares(model, x):
        return model.hidden(x).square().mean()

    results = together(replicas(Skips(), 2), data, every=3, loss=squares)
    assert_same_bits(results)
    assert furthest(results[0][0], local_sgd(Skips(), data, squares, every=3)) < 1e-6
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == []


def test_on_arrival_a_unit_whose_module_never_runs_lands_at_the_next_step():
    model = Skips()
    sync, inner = node(model, alone(), landing="arrival", every=3)
    with sync:
        for batch in batches(0, 5):
            model.hidden(batch).sum().backward()
            inner.step()
            inner.zero_grad()
            sync.step()
        assert sync.round_id == 1
        assert not sync.in_flight


@pytest.mark.parametrize("units", ["model", "auto"])
@pytest.mark.parametrize("sharded", ["blocks", "root"])
def test_an_evaluation_before_a_round_leaves_nothing_gathered_that_is_old(world, units, sharded):
    args = {"units": units, "sharded": sharded}
    for said, expected in world.run(JOBS, "train_after_an_evaluation", size=2, args=args):
        assert (said - expected).abs().max() < 1e-6


def test_nodes_that_have_gathered_their_models_before_they_meet_start_from_one(world):
    for found in world.run(JOBS, "start_gathered", size=2):
        assert furthest(found, {name: p.detach() + 1 for name, p in trainable(Tower())}) == 0
