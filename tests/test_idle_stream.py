"""Tests drafter training in a thread of the node, for nodes whose foreground work is on a GPU."""

import threading

import pytest
import torch
from benchmarks.programs import trainees
from kit import trainers

from aedit.spec_rollout.training.idle_stream import StreamTraining


class Gated(trainees.Regression):
    """Training whose every microbatch waits until the test lets it continue."""

    def __init__(self):
        super().__init__(None, publish_every=1)
        self.began, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def microbatch(self):
        self.began.release()
        assert self.may_end.acquire(timeout=trainers.PATIENCE_S)
        return super().microbatch()


def streamed(training, device="cpu", drafter=None):
    drafter = drafter or trainees.weights()
    policy = {name: tensor.to(device) for name, tensor in trainees.policy().items()}
    return StreamTraining(training, torch.device(device), drafter=drafter, policy=policy)


def test_microbatches_begin_in_windows_only_and_leaving_waits_for_none():
    training = Gated()
    with streamed(training) as work:
        assert work.status()["state"] == "stopped"
        with work.window("tail"):
            assert training.began.acquire(timeout=trainers.PATIENCE_S)
        assert work.status()["state"] == "stopped", "left, with the microbatch still under way"
        assert training.num_steps == 0
        training.may_end.release()
        trainers.until(lambda: work.status()["steps"] == 1, work)
        assert not training.began.acquire(timeout=0.05), "no other one begins"
        with work.window("tail"):
            assert training.began.acquire(timeout=trainers.PATIENCE_S)
            training.may_end.release()
            trainers.until(lambda: work.status()["steps"] == 2, work)
            training.may_end.release()
        training.may_end.release(2)
    assert work.status()["idle_by_cause_s"].keys() == {"tail"}


def test_what_it_learns_is_published_as_by_a_process():
    training = trainees.Regression(None)
    with streamed(training) as work:
        assert work.newest() is None
        work.update_policy(trainees.policy(3.0), version=4)
        with work.window("round"):
            trainers.until(lambda: work.newest() is not None, work)
        found = work.newest()
        assert (found.number >= 2, found.version) == (True, 4)
        trainers.until(lambda: work.used_s > 0, work)
        assert training.followed == (3.0, 4)
        assert work.newest(after=work.newest().number) is None
        kept = found.tensors["fc.weight"].clone()
        with work.window("round"):
            trainers.until(lambda: work.newest(after=found.number) is not None, work)
        assert torch.equal(found.tensors["fc.weight"], kept), "it is a copy"


def test_it_rests_and_wakes():
    training = Gated()
    with streamed(training) as work:
        work.pause()
        with work.window("round"):
            assert not training.began.acquire(timeout=0.05)
            work.unpause()
            assert training.began.acquire(timeout=trainers.PATIENCE_S)
            training.may_end.release(2)


def test_an_error_ends_the_training_and_not_the_node():
    with streamed(trainees.Broken(None)) as work:
        with work.window("round"):
            trainers.until(lambda: work.status()["state"] == "failed", work)
        assert work.status()["error"] == "ValueError: this drafter cannot be trained"
        with work.window("round"):
            pass
        assert work.newest() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_learns_in_windows_and_the_result_is_ready_on_the_callers_stream():
    class OnGpu(trainees.Regression):
        def __init__(self):
            super().__init__(None)
            self._layer.to("cuda")
            self._wanted = self._wanted.to("cuda")

        def microbatch(self):
            with torch.device("cuda"):
                return super().microbatch()

    goal = torch.eye(trainees.WIDTH, device="cuda")
    with streamed(OnGpu(), "cuda") as work:
        with work.window("round"):
            trainers.until(lambda: work.status()["steps"] > 50, work)
        steps = work.status()["steps"]
        x = torch.randn(512, 512, device="cuda")
        (x @ x).sum().item()
        assert work.status()["steps"] <= steps + 1
        found = work.newest()
        before = (trainees.weights()["fc.weight"].cuda() - goal).square().sum()
        assert (found.tensors["fc.weight"] - goal).square().sum() < before
