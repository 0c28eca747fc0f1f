"""Tests the hand-over of a sharded trainer's weights to engines of the node's ranks."""

import pytest
import torch

SLACK = 12 << 20
"""Bytes that a process takes besides: memory that its threads have freed and kept."""
JOBS = "tests/dist_jobs/hand_over_jobs.py"


@pytest.mark.parametrize(
    ("engines", "dtype", "tied"),
    [((0,), torch.float32, False), ((1,), torch.bfloat16, True), ((0, 1), torch.float64, False)],
)
def test_engines_generate_with_the_weights_of_each_step_of_two_sharded_ranks(world, engines, dtype, tied):
    args = {"engines": engines, "dtype": dtype, "tied": tied}
    results = world.run(JOBS, "train_and_generate", size=2, args=args)
    for rank, (versions, correct) in enumerate(results):
        assert versions == [1, 1, 2, 2, 3, 3, 4, 4]
        assert correct == [True] * (12 if rank in engines else 0)


def test_a_sharded_trainer_of_one_rank_hands_over_too(world):
    args = {"engines": (0,), "dtype": torch.float32, "tied": True}
    ((versions, correct),) = world.run(JOBS, "train_and_generate", size=1, args=args)
    assert (versions, correct) == ([1, 1, 2, 2, 3, 3, 4, 4], [True] * 12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("other model", r"weights: model.embed_tokens.weight must be of shape (67, 32), got (67, 40)"),
        ("missing", "weights: model.norm.weight is missing"),
        ("old version", "version -1 is below version 0"),
        ("other ranks", "weights: the ranks of the node pass different names or shapes"),
    ],
)
def test_weights_that_do_not_fit_one_engine_are_refused_on_all_ranks_before_anything_changes(
    world, change, words
):
    (first, unchanged), (second, _) = world.run(JOBS, "refuse", size=2, args={"change": change})
    assert first.startswith(words)
    assert "\n" not in first
    assert second.startswith(
        words if change == "other ranks" else "weights: another rank of the node refuses"
    )
    assert unchanged


def test_an_engine_whose_hand_over_lost_a_rank_generates_after_a_complete_update_only(world):
    (errors, right, version), _ = world.run(JOBS, "lose_a_rank", size=2)
    assert len(errors) == 3
    assert "could not be gathered from the node's ranks" in errors[0]
    assert all("update to version 1 of the weights failed on the way" in error for error in errors[1:])
    assert right
    assert version == 1


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_whose_model_is_sharded_afterwards_refuses_by_name(world, size):
    for errors in world.run(JOBS, "shard_after_the_engine", size=size):
        assert errors[0].startswith("RuntimeError: model.embed_tokens.weight has changed")
        for error in errors[1:]:
            assert error.startswith(
                "ValueError: model.embed_tokens.weight of the engine's model has been sharded"
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rank_holds_a_second_copy_of_the_weights_at_any_time(world, dtype):
    for peak, wasteful, predicted, fp32_bytes in world.run(JOBS, "measure", size=2, args={"dtype": dtype}):
        assert peak <= predicted + 2 * SLACK < fp32_bytes / 2
        assert wasteful >= fp32_bytes - SLACK
