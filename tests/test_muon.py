"""Tests Muon as the inner optimizer, whole and sharded."""

from pathlib import Path

import pytest
import torch
from benchmarks.kit.small_llama import llama
from dist_jobs.muon_jobs import MUON, step

from aedit.launch.config import TrainConfig
from aedit.launch.node import make_inners, set_lr
from aedit.types import UserError

JOBS = Path(__file__).parent / "dist_jobs" / "muon_jobs.py"


def model():
    return llama(32, 1, 16, seed=3)


def gradients(count):
    generator = torch.Generator().manual_seed(1)
    shapes = {name: p.shape for name, p in model().named_parameters()}
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for _ in range(count)
    ]


def is_hidden(name, p):
    return ".layers." in name and p.ndim == 2


def test_matrices_of_the_blocks_are_muons_and_all_others_adamws():
    trained = model()
    names = {id(p): name for name, p in trained.named_parameters()}
    muon, adamw = make_inners(trained, TrainConfig(optimizer="muon"))
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    by_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    by_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert by_muon == {name for name, p in trained.named_parameters() if is_hidden(name, p)}
    assert len(by_muon) == 7  # query, key, value, output; gate, up, down
    assert by_muon | by_adamw == set(names.values())
    assert not by_muon & by_adamw


def test_a_step_is_the_orthogonal_matrix_next_to_the_gradient():
    trained, (g,) = model(), gradients(1)
    before = {name: p.detach().clone() for name, p in trained.named_parameters()}
    inners = make_inners(trained, MUON)
    for inner in inners:
        set_lr(inner, 0.02)
    step(trained, inners, g)
    after = {name: p.detach() for name, p in trained.named_parameters()}
    for name, p in before.items():
        if is_hidden(name, p):
            u, _, v = torch.linalg.svd(g[name].double(), full_matrices=False)
            moved = (p - after[name]).double() / (0.02 * 0.2 * max(p.shape) ** 0.5)
            values = torch.linalg.svdvals(moved)  # five iterations leave them between 0.6 and 1.3
            assert values.max() < 1.4, name
            assert 0.6 < values.median() < 1.3, name
            cosine = (moved * (u @ v)).sum() / (moved.norm() * (u @ v).norm())
            assert cosine > 0.9, name


def test_shards_step_as_the_whole_does(world):
    """A Newton-Schulz iteration of each shard alone would be another step: a shard has other directions."""
    given = gradients(3)
    before = {name: p.detach().clone() for name, p in model().named_parameters()}
    whole = model()
    inners = make_inners(whole, MUON)
    for each in given:
        step(whole, inners, each)
    expected = {name: p.detach() for name, p in whole.named_parameters()}
    for size in (2, 3):
        found = world.run(JOBS, "steps", size=size, args={"gradients": given})
        for parameters in found:
            for name, value in expected.items():
                moved = (value - before[name]).norm()
                off = (parameters[name] - value).norm() / moved
                assert off < (0.1 if is_hidden(name, value) else 1e-5), (name, size)  # bf16 sums


def test_a_checkpoint_restores_both_optimizers_to_the_bit(world):
    for same, moments in world.run(JOBS, "resumed", size=2, args={"gradients": gradients(3)}):
        assert same
        assert moments == [7, 4]


def test_a_matrix_with_fewer_rows_than_ranks_is_refused_by_name(world):
    for error in world.run(JOBS, "refusal", size=3):
        assert error == (
            'train.optimizer = "muon": 0.weight has 2 rows, fewer than the node has ranks (3); use fewer '
            'ranks or "adamw"'
        )


def test_a_model_without_matrices_in_blocks_is_refused():
    with pytest.raises(UserError, match="no blocks with matrices"):
        make_inners(torch.nn.Linear(4, 4), MUON)
