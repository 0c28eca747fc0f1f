"""`python -m aedit.spec_rollout.idle.trainer_process PARENT`: the process in which a drafter trains.

Its node starts it, stopped, and lets it run only while the node waits. It reads features and the policy's
head from the memory it shares with the node, publishes there what it has learned, and writes its own
checkpoints; nobody waits for it.
"""

import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aedit.spec_rollout.idle.suspended_process import read_work

if TYPE_CHECKING:  # torch takes seconds to load, and this process first of all stops
    from aedit.spec_rollout.idle.trainer_memory import TrainerMemory, TrainerPlan


@dataclass(frozen=True, slots=True)
class TrainerArguments:
    """Where a trainer finds its desk."""

    fd: int
    plan: "TrainerPlan"


def main(arguments: list[str]) -> int:
    trainer_arguments: TrainerArguments = read_work(arguments)
    cpu_start_s = time.process_time()
    from aedit.spec_rollout.idle.trainer_memory import TrainerMemory

    memory = TrainerMemory(trainer_arguments.plan, trainer_arguments.fd)
    try:
        _train(memory, parent=int(arguments[0]), cpu_start_s=cpu_start_s)
    except BaseException as error:
        memory.trainer_status.fail(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    return 0


def _train(memory: "TrainerMemory", parent: int, cpu_start_s: float) -> None:
    """Until the node has gone."""
    import torch

    from aedit.spec_rollout.idle.trainer_loop import NOTHING_TO_LEARN_S, TrainerLoop

    torch.set_num_threads(memory.plan.threads)
    _limit_memory(memory.plan.memory_bytes)
    loop = TrainerLoop(memory, memory.plan.make(memory), cpu_start_s)
    loop.begin()
    while os.getppid() == parent:
        if not loop.run_once():
            time.sleep(NOTHING_TO_LEARN_S)


def _limit_memory(more_bytes: int | None) -> None:
    """Let the process have so much beyond what it has now."""
    if more_bytes is None:
        return
    import resource

    import psutil

    limit = psutil.Process().memory_info().vms + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that still write shall not hold it up.
    os._exit(code)
