"""Process in which a drafter trains: `python -m aedit.spec_rollout.training.trainer_process PARENT`.

Its node starts it suspended and lets it run only while the node waits. It reads features and the policy's
embedding and head from shared memory, publishes trained drafters there, and writes its own checkpoints. No
process waits for it.
"""

import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aedit.spec_rollout.training.suspended_process import read_work

if TYPE_CHECKING:  # torch takes seconds to load, and this process must suspend itself first
    from aedit.spec_rollout.training.trainer_memory import TrainerMemory, TrainerPlan


@dataclass(frozen=True, slots=True)
class TrainerArguments:
    """Shared memory and plan of a trainer."""

    fd: int
    plan: "TrainerPlan"


def main(arguments: list[str]) -> int:
    """Run the trainer until the node has ended; return the exit code."""
    work, cpu_start_s = read_work(arguments)
    trainer_arguments: TrainerArguments = work
    from aedit.spec_rollout.training.trainer_memory import TrainerMemory

    memory = TrainerMemory(trainer_arguments.plan, trainer_arguments.fd)
    try:
        _train(memory, parent=int(arguments[0]), cpu_start_s=cpu_start_s)
    except BaseException as error:
        memory.trainer_status.fail(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    return 0


def _train(memory: "TrainerMemory", parent: int, cpu_start_s: float) -> None:
    """Train until the node has ended."""
    import torch

    from aedit.spec_rollout.training.trainer_loop import NOTHING_TO_LEARN_S, TrainerLoop

    torch.set_num_threads(memory.plan.threads)
    _limit_memory(memory.plan.memory_bytes)
    loop = TrainerLoop(memory, memory.plan.make(memory), cpu_start_s)
    loop.begin()
    while os.getppid() == parent:
        if not loop.run_once():
            time.sleep(NOTHING_TO_LEARN_S)


def _limit_memory(more_bytes: int | None) -> None:
    """Limit the process to this much memory beyond what it has now."""
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
    # Do not wait for threads that still write.
    os._exit(code)
