"""Tests the harness of the torch.distributed tests: a harness that hides errors makes every test pass."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

JOBS = "tests/dist_jobs/harness.py"
ROOT = Path(__file__).resolve().parent.parent


def is_alive(pid):
    # A process that has ended keeps its id until it is waited for.
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_workers_compute_together_and_answer_by_rank(world):
    assert [value.item() for value in world.run(JOBS, "sum_of_ranks", size=3, args={"scale": 2.0})] == [
        12
    ] * 3
    assert world.run(JOBS, "threads_and_groups", size=2) == [(1, 2, 0), (1, 2, 1)]


def test_the_workers_are_kept_between_jobs(world):
    before = world.run(JOBS, "process_id", size=2)
    assert len({*before, os.getpid()}) == 3
    assert world.run(JOBS, "process_id", size=2) == before


def test_a_sharded_model_works_in_one_job_after_another(world):
    for size in (2, 1, 2):
        for grad in world.run(JOBS, "sharded_step", size=size):
            assert torch.equal(grad, torch.ones(4, 4))


def test_the_first_error_of_a_worker_is_raised_with_its_traceback(world):
    with pytest.raises(ValueError, match="rank 1 refuses") as caught:
        world.run(JOBS, "fail_on", size=2, args={"culprit": 1}, timeout_s=20)
    assert "rank 1 of 2" in caught.value.__notes__[0]
    assert "in fail_on" in caught.value.__notes__[0]
    assert len(world.run(JOBS, "sum_of_ranks", size=2, args={"scale": 1.0})) == 2


def test_an_error_of_a_class_only_the_job_knows_is_still_told(world):
    with pytest.raises(RuntimeError, match="OnlyHereError: unheard of"):
        world.run(JOBS, "fail_in_own_words", size=1)


def test_a_hang_ends_at_the_deadline_shows_where_and_the_next_job_works(world):
    before = world.run(JOBS, "process_id", size=2)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)did not end within 6 s \(rank 1\).*in hang_on"):
        world.run(JOBS, "hang_on", size=2, args={"culprit": 1}, timeout_s=6)
    assert time.monotonic() - began < 60
    assert not any(is_alive(pid) for pid in before)
    assert not set(world.run(JOBS, "process_id", size=2)) & set(before)


def test_a_worker_that_dies_fails_the_test_and_the_next_job_works(world):
    with pytest.raises(RuntimeError, match="died with exit code 7"):
        world.run(JOBS, "die_on", size=2, args={"culprit": 0}, timeout_s=20)
    assert len(world.run(JOBS, "sum_of_ranks", size=2, args={"scale": 1.0})) == 2


@pytest.mark.parametrize("left", [True, False])
def test_a_process_left_behind_fails_the_session_and_is_ended(tmp_path, left):
    (tmp_path / "kit").mkdir()
    for name in ("conftest.py", "kit/__init__.py", "kit/commands.py", "kit/distributed.py"):
        text = (ROOT / "tests" / name).read_text()
        (tmp_path / name).write_text(text.replace("END_S = 5.0", "END_S = 0.5") if left else text)
    # The shell goes at once, so what it started has lost its parent by the end of the session.
    # While a process replaces its program, its environment cannot be read.
    until_it_runs = "until grep -qx sleep /proc/$!/comm; do :; done"
    command = f"sleep 60 & {until_it_runs}; echo $!" if left else "true & echo $!"
    (tmp_path / "test_it.py").write_text(
        "import subprocess\n\ndef test_it():\n"
        f"    subprocess.run({command!r}, shell=True, check=True, stdout=open('out', 'wb'))\n"
    )
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "pythonpath=.", "."]
    done = subprocess.run(pytest_here, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert ("left behind by the tests" in done.stdout) is left
    assert done.returncode == int(left), done.stdout + done.stderr
    assert not is_alive(int((tmp_path / "out").read_text()))
