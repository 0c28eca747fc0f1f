"""Tests the trainer as a real process.

It runs in windows only, learns, publishes, and ends with its parent.
"""

import os
import signal
import subprocess
import sys
import threading
from copy import deepcopy
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks.programs import trainees
from kit import trainers
from kit.deferred import node
from kit.nodes import in_threads, tower

from aedit.spec_rollout.training import suspended_process as held_process
from aedit.spec_rollout.training.suspended_process import ProcessSpec, SuspendedProcess, pickled
from aedit.types import Round

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process states are read from /proc")


@pytest.fixture(scope="module")
def work():
    with trainers.training() as made:
        yield made


def test_it_is_born_stopped_at_the_lowest_priority():
    with trainers.training(niceness=19) as work:
        trainers.until(lambda: work.status()["pid"], work)
        trainer = psutil.Process(work.status()["pid"])
        assert trainers.is_stopped(work)
        assert trainer.nice() == 19
        assert os.sched_getscheduler(trainer.pid) == os.SCHED_IDLE
        assert work.newest() is None


def test_it_is_the_least_of_all_processes_before_it_has_done_anything():
    """Loading Python is work too, and on a desktop each session has a share, which is lowered as well."""
    child = SuspendedProcess(ProcessSpec("aedit.spec_rollout.training.trainer_process", pickled(None)))
    try:
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == 19
        assert os.sched_getscheduler(child.pid) == os.SCHED_IDLE
        assert os.getsid(child.pid) == child.pid != os.getsid(0), "else ours would be lowered"
        sessions = [Path(f"/proc/{pid}/autogroup") for pid in (child.pid, "self")]
        # Empty where a control group says what a process gets: there sessions have no shares. Ours alone is
        # empty where it is as old as the machine, as in many a container.
        theirs, ours = (session.read_text().split() if session.exists() else [] for session in sessions)
        if theirs:
            assert theirs[:1] != ours[:1]
            assert theirs[1:] == ["nice", "19"]
    finally:
        child.kill()


@pytest.mark.parametrize(("refusals", "written"), [(3, "19"), (10**6, None)])
def test_a_kernel_that_is_asked_too_often_is_asked_again_but_not_for_ever(refusals, written, monkeypatch):
    class Session:
        text, asked = None, 0

        def write_text(self, text):
            self.asked += 1
            if self.asked <= refusals:
                raise BlockingIOError
            self.text = text

    session = Session()
    monkeypatch.setattr(held_process.time, "sleep", lambda pause_s: None)
    held_process._lower_session(session, 19)
    assert session.text == written


def test_it_runs_in_a_window_and_is_stopped_outside(work):
    trainers.learn(work)
    trainers.until(lambda: trainers.is_stopped(work), work)
    trainer = psutil.Process(work.status()["pid"])
    before = work.status()["steps"], trainer.cpu_times()
    torch.randn(300, 300) @ torch.randn(300, 300)
    assert (work.status()["steps"], trainer.cpu_times()) == before
    assert trainers.is_stopped(work)
    trainers.learn(work)
    assert work.status()["steps"] > before[0]


def test_what_it_learns_is_published_and_gets_better(work):
    def distance(tensors):
        return (tensors["fc.weight"] - torch.eye(trainees.WIDTH)).square().sum().item()

    trainers.learn(work, 40)
    first = work.newest()
    trainers.learn(work, 100)
    later = work.newest(after=first.number)
    assert distance(later.tensors) < distance(first.tensors) < distance(trainees.weights())
    assert work.status()["published"] == later.number - 1
    assert work.newest(after=later.number) is None


def test_it_follows_the_policy_that_it_is_given(work):
    work.update_policy(trainees.policy(2.5), version=7)
    trainers.learn(work, 20)
    figures = work.status()["training"]
    assert (figures["head"], figures["version"]) == (2.5, 7)
    assert work.newest().version == 7
    with pytest.raises(ValueError, match=r"head must be torch.float32 \(8, 4\), got"):
        work.update_policy({"embedding": torch.zeros(8, 4), "head": torch.zeros(9, 4)}, version=8)


def test_its_time_and_the_nodes_are_in_the_status(work):
    trainers.learn(work, 50, cause="tail")
    status = work.status()
    assert set(status["idle_by_cause_s"]) == {"test", "tail"}
    assert 0 < status["cpu_s"] < status["idle_s"]
    assert status["utilization"] == pytest.approx(status["cpu_s"] / status["idle_s"])
    assert (status["deaths"], status["error"], status["state"]) == (0, "", "stopped")


def test_it_trains_while_layer_sync_waits_for_another_node(work):
    """Node 0 arrives at the exchange first; node 1 arrives after the trainer was seen to learn."""
    learned = threading.Event()
    trainers.until(lambda: trainers.is_stopped(work), work)
    wanted = work.status()["steps"] + 10
    windows, model = work.status()["windows"], tower()

    def watch():
        trainers.until(lambda: work.status()["steps"] >= wanted, work)
        learned.set()

    def job(transport, n):
        own = deepcopy(model)
        sync, _ = node(own, transport)
        if n == 0:
            sync.idle = work
        with sync:
            if n == 1:
                assert learned.wait(trainers.PATIENCE_S)
            sync.begin(Round(1, 1))
            own(torch.ones(1, 5))
            sync.schedule.last_id = 1
        return sync.waited_s, sync.idle_used_s

    watching = threading.Thread(target=watch)
    watching.start()
    (waited_s, idle_used_s), _ = in_threads(2, job, timeout_s=2 * trainers.PATIENCE_S)
    watching.join(trainers.PATIENCE_S)
    assert waited_s > 0
    assert 0 < idle_used_s <= work.used_s == work.status()["cpu_s"]
    assert work.status()["windows"] > windows
    assert work.status()["idle_by_cause_s"]["round"] > 0
    trainers.until(lambda: trainers.is_stopped(work), work)
    steps = work.status()["steps"]
    tower()(torch.ones(64, 5)).sum().backward()
    assert work.status()["steps"] == steps


def test_it_ends_with_its_node_even_while_it_is_stopped():
    program = (
        "import os, signal, sys, time\n"
        "from aedit.spec_rollout.training.suspended_process import ProcessSpec, SuspendedProcess, pickled\n"
        "spec = ProcessSpec('aedit.spec_rollout.training.trainer_process', pickled(None))\n"
        "child = SuspendedProcess(spec)\n"
        "while not child.is_ready: time.sleep(0.005)\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pid = int(ended.stdout)
    trainers.until(lambda: not psutil.pid_exists(pid) or threads_are_gone(pid))


def threads_are_gone(pid):
    try:
        return trainers.threads(pid) <= {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_closing_ends_it_whether_it_runs_or_not():
    for is_open in (False, True):
        work = trainers.training()
        trainers.until(lambda work=work: work.status()["pid"], work)
        pid = work.status()["pid"]
        if is_open:
            with work.window("test"):
                work.close()  # in the middle of its start
        else:
            work.close()
        assert not psutil.pid_exists(pid)
        work.close()
        with work.window("after the end"):
            pass
