"""Tests a trainer that dies, hangs or publishes bad weights: the node keeps the last good drafter.

A new trainer continues from the old one's state.
"""

import sys

import pytest
import torch
from benchmarks.programs import trainees
from kit import trainers

from aedit.child import Restarts
from aedit.spec_rollout.training.trainer_loop import AsyncCheckpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and states are Linux's")


class Node:
    """Node whose drafter's trainer has a fault whenever the test orders one."""

    def __init__(self, folder):
        self.orders, self.checkpoint = folder / "orders", folder / "drafter.safetensors"
        self.work = trainers.training(
            trainees.faulty(self.orders),
            checkpoint=self.checkpoint,
            checkpoint_every_s=0.0,
            hung_after_s=4.0,
            memory_bytes=2**30,
        )
        self.drafter = None
        self.foreground = torch.full((32, 32), 1.0)

    def look(self):
        """Take the newest drafter as the engine does at a step's end, and check that it is whole."""
        found = self.work.newest(self.drafter.number if self.drafter else 1)
        if found is not None:
            assert found.tensors["fc.weight"].isfinite().all()
            assert found.tensors["fc.weight"].abs().max() < 10
            self.drafter = found

    def learn(self, steps=10):
        trainers.learn(self.work, steps)
        self.look()

    def suffer(self, fault, is_over):
        """Order `fault` and run the trainer until it is over, reading the drafter all the time."""
        trainees.give(self.orders, fault)

        def looked():
            self.look()
            return is_over()

        with self.work.window("test"):
            trainers.until(looked, self.work)

    def status(self, name):
        return self.work.status()[name]


@pytest.fixture(scope="module")
def suffering(tmp_path_factory):
    made = Node(tmp_path_factory.mktemp("trainer"))
    made.learn()
    yield made
    made.work.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("killed", "ended with -9"),
        ("hung", "gave no sign of life for"),
        ("out of memory", "allocate"),
    ],
)
def test_a_trainer_that_is_gone_is_started_again_and_goes_on(suffering, fault, message):
    saved = suffering.status("checkpoints")
    with suffering.work.window("test"):
        trainers.until(lambda: suffering.status("checkpoints") > saved, suffering.work)
    steps = AsyncCheckpoint(suffering.checkpoint).load()["num_steps"].item()
    deaths, last_good = suffering.status("deaths"), suffering.work.newest()
    suffering.suffer(fault, lambda: suffering.status("deaths") == deaths + 1)
    assert message in suffering.status("error")
    assert torch.equal(suffering.work.newest().tensors["fc.weight"], suffering.drafter.tensors["fc.weight"])
    assert suffering.drafter.number >= last_good.number
    suffering.learn()
    assert suffering.status("deaths") == deaths + 1
    assert suffering.status("training")["num_steps"] >= steps, "it resumes"
    assert suffering.work.newest(suffering.drafter.number - 1).number >= suffering.drafter.number


def test_a_full_disk_leaves_the_last_checkpoint_and_the_training_alone(suffering):
    failed, deaths = suffering.status("checkpoints_failed"), suffering.status("deaths")
    suffering.suffer("disk full", lambda: suffering.status("checkpoints_failed") >= failed + 2)
    assert "File too large" in suffering.status("checkpoint_error")
    before = AsyncCheckpoint(suffering.checkpoint).load()
    assert before["fc.weight"].isfinite().all()
    # It may have been stopped while it wrote one; that one goes, too, when it finds the disk full.
    suffering.suffer("disk full", lambda: not list(suffering.checkpoint.parent.glob("*.partial")))
    suffering.learn()
    written = suffering.status("checkpoints")
    suffering.suffer("disk empty", lambda: suffering.status("checkpoints") > written)
    assert AsyncCheckpoint(suffering.checkpoint).load()["num_steps"] > before["num_steps"]
    # On a busy machine a trainer of the lowest priority may seem to hang.
    assert suffering.status("deaths") == deaths or "no sign of life" in suffering.status("error")


def test_a_corrupt_publication_is_not_taken_and_the_next_one_is(suffering):
    corrupt = suffering.status("corrupt")
    suffering.suffer("corrupt publish", lambda: suffering.status("corrupt") > corrupt)
    last_good = suffering.drafter
    for _ in range(3):
        suffering.learn()
        assert suffering.drafter is last_good
    assert suffering.status("corrupt") == corrupt + 1
    suffering.suffer("publish", lambda: suffering.drafter is not last_good)
    assert suffering.drafter.number > last_good.number + 1


def test_a_trainer_that_cannot_even_begin_is_given_up():
    with trainers.training(trainees.Broken, restarts=Restarts(limit=0)) as work:
        with work.window("test"):
            trainers.until(lambda: work.status()["state"] == "given up", work)
        assert work.status()["deaths"] == 1
        assert work.status()["error"] == "ValueError: this drafter cannot be trained"
        with work.window("test"):
            assert work.status()["pid"] is None
        assert work.newest() is None


# -- checkpoints


def test_a_checkpoint_is_a_copy_of_the_moment_it_was_asked_for(tmp_path):
    checkpoints, tensors = AsyncCheckpoint(tmp_path / "new" / "drafter.safetensors"), {"w": torch.ones(1000)}
    assert checkpoints.load() == {}
    assert checkpoints.save(tensors)
    tensors["w"].zero_()
    checkpoints.wait(30)
    assert (checkpoints.written, checkpoints.failed) == (1, 0)
    assert checkpoints.load()["w"].eq(1).all()
    assert [path.name for path in checkpoints.path.parent.iterdir()] == ["drafter.safetensors"]


def test_a_checkpoint_that_cannot_be_written_keeps_the_one_before(tmp_path, monkeypatch):
    checkpoints = AsyncCheckpoint(tmp_path / "drafter.safetensors")
    checkpoints.save({"w": torch.ones(2)})
    checkpoints.wait(30)

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    checkpoints.save({"w": torch.zeros(2)})
    checkpoints.wait(30)
    assert (checkpoints.written, checkpoints.failed) == (1, 1)
    assert "No space left" in checkpoints.error
    assert checkpoints.load()["w"].eq(1).all()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"rubbish", b"\xff" * 100])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    path = tmp_path / "drafter.safetensors"
    path.write_bytes(damage)
    with pytest.raises(ValueError, match="is not a checkpoint of a drafter's training"):
        AsyncCheckpoint(path).load()
