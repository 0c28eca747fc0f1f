"""Tests the loop of the trainer's process turn by turn, in this process."""

import os

import pytest
import torch
from benchmarks.programs import trainees

from aedit.spec_rollout.training import SlotLayout, TrainerMemory
from aedit.spec_rollout.training.trainer_loop import AsyncCheckpoint, TrainerLoop
from aedit.spec_rollout.training.trainer_memory import StatusWord, TrainerPlan, TrainerState, TrainerStatus
from aedit.system import anonymous_memory


@pytest.fixture
def memory():
    """Yield a function that makes both ends of a trainer's shared memory."""
    made = []

    def make(**plan):
        plan = TrainerPlan(
            make=trainees.busy(),
            drafter=SlotLayout.of(trainees.weights()),
            policy=SlotLayout.of(trainees.policy()),
            feature_bytes=100,
            **plan,
        )
        fd = anonymous_memory("aedit-drafter", sum(plan.regions.values()))
        made.append(fd)
        node, trainer = TrainerMemory(plan, fd), TrainerMemory(plan, fd)
        node.drafter.publish(trainees.weights(), 0)
        node.policy.publish(trainees.policy(), 0)
        return node, trainer

    yield make
    for fd in made:
        os.close(fd)


def begun(memory, kind=trainees.Regression):
    training = kind(memory)
    loop = TrainerLoop(memory, training)
    loop.begin()
    return loop, training


def test_both_ends_share_all_of_the_desk(memory):
    node, trainer = memory()
    node.features[:5] = b"hello"
    assert bytes(trainer.features[:5]) == b"hello"
    assert len(node.features) == 100
    loop, _ = begun(trainer)
    for turn in range(1, 6):
        assert loop.run_once()
        assert (
            node.trainer_status.get(StatusWord.STEPS)
            == node.trainer_status.get(StatusWord.HEARTBEATS)
            == turn
        )
        assert node.trainer_status.metrics["num_steps"] == turn
    assert node.drafter.newest(after=1).number == 2
    assert node.trainer_status.state == TrainerState.TRAINING


def test_training_continues_from_an_offered_drafter(memory):
    node, trainer = memory()
    loop, training = begun(trainer)
    loop.run_once()
    begun_with = []
    training.begin = begun_with.append
    offered = trainees.weights(seed=7)
    node.offered.publish(offered, node.drafter.newest_number)
    loop.run_once()
    loop.run_once()
    (found,) = begun_with
    assert found["fc.weight"].equal(offered["fc.weight"])


@pytest.mark.parametrize("published_later", [False, True])
def test_a_new_process_begins_with_the_later_of_offer_and_publication(memory, published_later):
    node, trainer = memory()
    published, offered = trainees.weights(seed=6), trainees.weights(seed=7)
    if not published_later:
        trainer.drafter.publish(published, 0)
    node.offered.publish(offered, node.drafter.newest_number)
    if published_later:
        trainer.drafter.publish(published, 0)
    _, training = begun(trainer)
    expected = published if published_later else offered
    assert training._layer.weight.equal(expected["fc.weight"])


def test_a_turn_begins_with_the_newest_policy(memory):
    node, trainer = memory()
    loop, training = begun(trainer)
    assert training.followed == (1.0, 0)
    node.policy.publish(trainees.policy(2.0), 1)
    node.policy.publish(trainees.policy(3.0), 2)
    loop.run_once()
    assert training.followed == (3.0, 2)


def test_it_begins_with_what_was_published_before_when_the_newest_is_corrupt(memory):
    node, trainer = memory()
    better = {"fc.weight": torch.eye(trainees.WIDTH)}
    node.drafter.publish(better, 0)
    trainees.spoil_newest(trainer)
    _, training = begun(trainer)
    assert torch.equal(training.state()["fc.weight"], better["fc.weight"])


def test_without_anything_whole_it_does_not_begin(memory):
    node, trainer = memory()
    trainees.spoil_newest(node)
    node.drafter._slot(1).random_()
    with pytest.raises(RuntimeError, match="no valid drafter or no valid policy"):
        begun(trainer)


def test_it_goes_on_where_its_checkpoint_was_taken(memory, tmp_path):
    _, trainer = memory(checkpoint=tmp_path / "drafter.safetensors", checkpoint_every_s=0.0)
    loop, training = begun(trainer)
    loop.run_once()
    at = training.state()["fc.weight"].clone()
    loop._checkpoints.wait(30)
    loop2, resumed = begun(trainer)
    assert resumed.num_steps == 1
    assert torch.equal(resumed.state()["fc.weight"], at)
    loop2.run_once()
    loop2._checkpoints.wait(30)
    assert AsyncCheckpoint(tmp_path / "drafter.safetensors").load()["num_steps"] == 2


def test_with_a_damaged_checkpoint_it_begins_with_what_was_published(memory, tmp_path):
    path = tmp_path / "drafter.safetensors"
    path.write_bytes(b"rubbish")
    node, trainer = memory(checkpoint=path)
    _, training = begun(trainer)
    assert torch.equal(training.state()["fc.weight"], trainees.weights()["fc.weight"])
    assert "not a checkpoint of a drafter's training" in node.trainer_status.checkpoint_error


def test_numbers_that_are_not_finite_are_not_published(memory):
    node, trainer = memory()
    loop, training = begun(trainer)
    training.to_publish = lambda: {"fc.weight": torch.full((trainees.WIDTH, trainees.WIDTH), torch.nan)}
    loop.run_once()
    assert (node.trainer_status.get(StatusWord.REFUSED), node.trainer_status.get(StatusWord.PUBLISHED)) == (
        1,
        0,
    )
    assert node.drafter.newest(after=1) is None


def test_one_that_has_nothing_to_learn_from_says_so_and_lives(memory):
    node, trainer = memory()
    loop, _ = begun(trainer, trainees.Idler)
    assert not loop.run_once()
    assert node.trainer_status.state == TrainerState.NOTHING_TO_LEARN
    assert (node.trainer_status.get(StatusWord.STEPS), node.trainer_status.get(StatusWord.HEARTBEATS)) == (
        0,
        1,
    )


def test_the_board_keeps_the_end_of_an_error_and_whole_figures():
    memory = memoryview(bytearray(TrainerStatus.NUM_BYTES))
    writer, reader = TrainerStatus(memory), TrainerStatus(memory)
    assert reader.metrics == {}
    for n in range(5):
        writer.set_metrics({"loss": float(n)})
        assert reader.metrics == {"loss": float(n)}
    writer.fail("x" * 5000 + "the end")
    assert reader.state == TrainerState.FAILED
    assert reader.error.endswith("the end")
    assert len(reader.error) == 4096
    writer.begin()
    assert (reader.state, reader.error, reader.metrics) == (TrainerState.STARTING, "", {})


def test_a_writer_that_is_stopped_in_the_middle_of_its_figures_hides_none(monkeypatch):
    memory = memoryview(bytearray(TrainerStatus.NUM_BYTES))
    writer, reader = TrainerStatus(memory), TrainerStatus(memory)
    writer.set_metrics({"loss": 1.0})
    monkeypatch.setattr("aedit.spec_rollout.training.trainer_memory.memory_fence", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.set_metrics({"loss": 2.0})
    monkeypatch.undo()
    assert reader.metrics == {"loss": 1.0}


def test_the_shared_memory_of_a_trainer_is_in_no_folder():
    fd = anonymous_memory("aedit-drafter", 10)
    try:
        assert os.fstat(fd).st_size == 10
        assert os.fstat(fd).st_nlink == 0
    finally:
        os.close(fd)
