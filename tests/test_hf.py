"""Tests EditCallback under real Trainers of a tiny llama: one Trainer per process, or a single one."""

import copy
from types import SimpleNamespace

import pytest
import torch
from dist_jobs.trainer_jobs import arguments, callback, parameters, samples, tiny_llama, trainer
from kit.local_sgd import furthest, local_sgd
from kit.nodes import in_threads
from transformers import TrainerCallback

from aedit.edit import EditCallback, EditConfig, EverySteps
from aedit.edit.hf import _check
from aedit.proto.transports import MemoryWorld

JOBS = "tests/dist_jobs/trainer_jobs.py"
USUAL = {
    "fp16": False,
    "n_gpu": 1, "world_size": 1, "auto_find_batch_size": False, "max_grad_norm": 0.0,
    "load_best_model_at_end": False,
}  # fmt: skip


def run(world, function="train_together", size=2, **args):
    return world.run(JOBS, function, size=size, args=args, timeout_s=90)


def hf_loss(model, batch):
    return model(input_ids=batch, labels=batch).loss


def expected_of(data, every):
    """Return the tiny llama's parameters after plain local SGD; data: per node a list of batches."""
    return local_sgd(tiny_llama(), data, hf_loss, every, lr=0.1)


def batches_of(node, count, rows=2):
    return [torch.stack(samples(node)[n * rows : (n + 1) * rows]) for n in range(count)]


def test_trainers_become_nodes_that_agree_after_every_round(world, tmp_path):
    results = run(world, out=str(tmp_path), every=3, max_steps=8)
    expected = expected_of([batches_of(node, 8) for node in range(2)], every=3)
    for result in results:
        assert result["rounds"] == [3, 3, 2]  # the last, shorter interval lands at the end
        assert result["hooks"] == 0
        assert furthest(result["parameters"], expected) < 1e-6
    assert all(
        torch.equal(value, results[1]["parameters"][name]) for name, value in results[0]["parameters"].items()
    )


def test_a_step_is_an_optimizer_step_not_a_micro_batch(world, tmp_path):
    results = run(world, out=str(tmp_path), every=2, max_steps=4, accumulate=2, rows=1)
    expected = expected_of([batches_of(node, 4) for node in range(2)], every=2)
    assert [result["rounds"][:2] for result in results] == [[2, 2], [2, 2]]  # F19
    assert furthest(results[0]["parameters"], expected) < 1e-5


def test_nodes_with_unequal_numbers_of_steps_end_together(world, tmp_path):
    results = run(world, out=str(tmp_path), every=2, max_steps=[3, 7])
    expected = expected_of([batches_of(0, 3), batches_of(1, 7)], every=2)
    for result in results:
        assert furthest(result["parameters"], expected) < 1e-6


STEPWISE = {"save_strategy": "steps", "save_steps": 2}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (STEPWISE, {2, 4, 5}),
        (STEPWISE | EVALUATING, {2, 4, 5}),
        ({"save_strategy": "epoch"}, {4, 5}),
    ],
)
def test_what_is_evaluated_or_saved_has_landed(world, tmp_path, options, steps):
    results = run(world, "evaluate_and_save", out=str(tmp_path), max_steps=5, options=options, count=8)
    (saved, losses), (others, other_losses) = results
    assert saved.keys() == others.keys() == steps
    assert losses == other_losses
    assert len(losses) == (3 if "eval_steps" in options else 0)
    for step in steps:
        assert all(torch.equal(value, others[step][name]) for name, value in saved[step].items())


def test_stopping_early_leaves_before_the_best_of_all_nodes_models_is_loaded(world, tmp_path):
    results = run(world, "stop_early", out=str(tmp_path))
    metrics = [metric for *_, metric in results]
    assert metrics[0] > metrics[1]
    best = results[metrics.index(min(metrics))][3]
    others = results[metrics.index(max(metrics))][3]
    assert any(not torch.equal(value, others[name]) for name, value in best.items()), "there is a choice"
    for stopped_at, rounds, found, _, _ in results:
        assert (stopped_at, rounds) == (4, 2)
        assert all(torch.equal(value, best[name]) for name, value in found.items())


@pytest.mark.parametrize("stop_at", [4, 3])  # at a round, and between two
def test_a_resumed_training_goes_on_with_the_same_bits(world, tmp_path, stop_at):
    results = run(world, "stop_and_resume", out=str(tmp_path), every=2, max_steps=8, stop_at=stop_at)
    for whole, resumed in results:
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize("clip", [0.05, None])
def test_in_the_warm_up_the_mean_gradient_counts_and_is_clipped_as_one_large_batch_would_be(
    world, tmp_path, clip
):
    results = run(world, "warm_up", out=str(tmp_path), max_steps=3, max_grad_norm=clip)
    model = tiny_llama()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for batches in zip(*(batches_of(node, 3) for node in range(2)), strict=True):
        hf_loss(model, torch.cat(batches)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        assert norm > 0.1  # there is something to clip
        inner.step()
        inner.zero_grad()
    for found in results:
        assert furthest(found, parameters(model)) < 1e-6


def test_one_trainer_with_the_callback_trains_as_without_it(tmp_path):
    plain, edited = tiny_llama(), tiny_llama()
    shared = {
        "max_steps": 7,
        "optim": "adamw_torch",
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 1.0,
        "learning_rate": 1e-3,
    }
    trainer(plain, samples(0), arguments(tmp_path / "plain", **shared)).train()
    added = callback(MemoryWorld(1).node(0), every=2)
    trainer(edited, samples(0), arguments(tmp_path / "edited", **shared), added).train()
    assert added.sync.round_id == 4
    assert furthest(parameters(edited), parameters(plain)) < 1e-6
    assert furthest(parameters(edited), parameters(tiny_llama())) > 1e-3


class Failing(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise ZeroDivisionError


def test_after_a_training_that_failed_the_hooks_can_be_taken_off(tmp_path):
    model, added = tiny_llama(), callback(MemoryWorld(1).node(0), every=5)
    failing = trainer(model, samples(0), arguments(tmp_path, max_steps=4), added, Failing())
    with pytest.raises(ZeroDivisionError):
        failing.train()
    assert any(module._forward_pre_hooks for module in model.modules())
    added.detach()
    added.detach()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_step_that_a_gradient_scaler_skipped_does_not_count():
    model = tiny_llama()
    added, inner = callback(MemoryWorld(1).node(0), every=5), torch.optim.SGD(model.parameters(), lr=0.1)
    args = SimpleNamespace(**USUAL, output_dir="nowhere")
    added.on_train_begin(args, SimpleNamespace(global_step=0), None, model=model, optimizer=inner)
    for skipped, steps in ((False, 1), (True, 1), (False, 2)):
        wrapper = SimpleNamespace(step_was_skipped=skipped)
        added.on_optimizer_step(args, None, None, optimizer=wrapper)
        assert added.sync.steps == steps


def test_a_second_training_with_the_same_callback_is_refused(tmp_path):
    added = callback(MemoryWorld(1).node(0), every=5)
    twice = trainer(tiny_llama(), samples(0), arguments(tmp_path, max_steps=1), added)
    twice.train()
    with pytest.raises(ValueError, match="has served another train"):
        twice.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_gpu": 2}, "sees 2 GPUs"),
        ({"world_size": 2}, "over 2 processes"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"max_grad_norm": 1.0}, "given twice"),
        ({"fp16": True}, "fp16 has scaled"),
    ],
)
def test_a_trainer_that_would_train_something_else_is_refused(options, message, tmp_path):
    args = SimpleNamespace(**(USUAL | options), output_dir=str(tmp_path))
    model = tiny_llama()
    added = EditCallback(exchange=callback(MemoryWorld(1).node(0)).exchange, max_grad_norm=1.0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        added.on_train_begin(args, SimpleNamespace(global_step=0), None, model=model, optimizer=inner)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_clipping_before_the_warm_ups_average_is_said(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("aedit.edit.hf._log.warning", said.append)
    exchange = callback(MemoryWorld(1).node(0)).exchange
    added = EditCallback(exchange=exchange, schedule=EverySteps(2), config=EditConfig(warmup_steps=2))
    args = arguments(tmp_path, max_steps=2, max_grad_norm=1.0)
    trainer(copy.deepcopy(tiny_llama()), samples(0), args, added).train()
    assert len(said) == 1
    assert "max_grad_norm=0" in said[0]


def test_the_best_model_of_one_node_of_a_hub_is_refused():
    args = SimpleNamespace(**(USUAL | {"load_best_model_at_end": True}))
    with pytest.raises(ValueError, match="load_best_model_at_end would end every node of a hub"):
        _check(args, SimpleNamespace(free=True), None)


def test_nodes_that_disagree_about_loading_the_best_model_are_refused():
    def job(transport, n):
        args = SimpleNamespace(**(USUAL | {"load_best_model_at_end": n == 0}))
        with pytest.raises(ValueError, match="load_best_model_at_end differs between the nodes"):
            _check(args, SimpleNamespace(free=False, exchange=callback(transport).exchange), None)

    in_threads(2, job)


def trained(out, transport, node, *, begin, stop, warmup_steps, begin_from=None):
    """Train a node from step `begin` to `stop` as a Trainer drives the callback; save where it stops.

    Returns parameters, steps and the round landed last.
    """
    model = tiny_llama()
    if begin:
        model.load_state_dict(torch.load(f"{out}/{node}/model-{begin}.pt"))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    args = SimpleNamespace(
        **USUAL, output_dir=f"{out}/{begin_from or node}", should_save=False, save_only_model=False
    )
    state = SimpleNamespace(global_step=begin)
    control = SimpleNamespace(should_training_stop=False, should_evaluate=True, should_save=True)
    added = callback(transport, every=2, config=EditConfig(warmup_steps=warmup_steps))
    added.on_train_begin(args, state, control, model=model, optimizer=inner)
    for batch in batches_of(node, 8)[begin:stop]:
        hf_loss(model, batch).backward()
        inner.step()
        inner.zero_grad()
        state.global_step += 1
        added.on_optimizer_step(args, state, control, optimizer=inner)
    added.on_step_end(args, state, control)
    added.on_save(args, state, control)
    torch.save(model.state_dict(), f"{out}/{node}/model-{stop}.pt")
    added.detach()
    return parameters(model), added.sync.steps, added.sync.round_id


@pytest.mark.parametrize("warmup_steps", [0, 7])
@pytest.mark.parametrize("begins", [(4, 6), (4, 4)])
def test_trainers_that_resume_apart_or_without_a_snapshot_begin_anew_from_the_first_ones_weights(
    begins, warmup_steps, tmp_path, monkeypatch
):
    """The nodes resume from different steps, or from the same one where one node has lost its `edit/`."""
    said = []
    monkeypatch.setattr("aedit.edit.hf._log.warning", said.append)
    for stop in (4, 6):
        for node in range(2):
            (tmp_path / str(node)).mkdir(exist_ok=True)
        in_threads(
            2,
            lambda t, n, stop=stop: trained(tmp_path, t, n, begin=0, stop=stop, warmup_steps=warmup_steps),
        )
    assert said == []
    first = torch.load(f"{tmp_path}/0/model-{begins[0]}.pt")
    lost = "nowhere" if begins[0] == begins[1] else None

    def resume(transport, node):
        begin = begins[node]
        return trained(
            tmp_path,
            transport,
            node,
            begin=begin,
            stop=begin + 1,
            warmup_steps=warmup_steps,
            begin_from=lost if node else None,
        )

    (ours, steps, round_id), (theirs, other_steps, other_round) = in_threads(2, resume)
    assert len(said) == 2
    assert "share no round" in said[0]
    assert steps == other_steps == begins[0] + 1
    assert round_id == other_round == 0
    gap = furthest(ours, theirs)
    assert (gap == 0) == (warmup_steps > 0), "one local step each from the same weights, or one together"
    assert furthest(ours, {name: first[name] for name in ours}) > 0
    assert gap < 0.5
