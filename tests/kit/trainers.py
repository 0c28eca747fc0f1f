"""A drafter trainer that tests start and stop, and ways to observe it from outside."""

import time
from pathlib import Path

from benchmarks.programs import trainees

from aedit.child import Restarts
from aedit.spec_rollout.training import DrafterTraining, IdleConfig

PATIENCE_S = 90.0
AT_ONCE = Restarts(limit=100, pause_s=0.0)


def training(make=None, *, restarts=AT_ONCE, niceness=0, **config):
    """Return a drafter training, at a priority that lets tests end on a busy machine."""
    return DrafterTraining.of(
        make or trainees.busy(),
        drafter=trainees.weights(),
        policy=trainees.policy(),
        config=IdleConfig(restarts=restarts, niceness=niceness, **config),
    )


def until(is_so, work=None):
    """Wait until `is_so()` is true."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_s, work.status() if work else "it never came"
        time.sleep(0.005)


def learn(work, steps=5, cause="test"):
    """Open a window until the trainer has made `steps` more steps."""
    wanted = work.status()["steps"] + steps
    with work.window(cause):
        until(lambda: work.status()["steps"] >= wanted, work)


def threads(pid):
    """Return the states of all threads of a process as the kernel reports them: R, S, T (stopped), Z..."""
    stats = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def is_stopped(work):
    """Return whether the trainer's process is there and suspended; on a busy machine it starts late."""
    pid = work.status()["pid"]
    return pid is not None and threads(pid) == {"T"}
