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

from aedit.spec_rollout.idle.suspended_process import born

if TYPE_CHECKING:  # torch takes seconds to load, and this process first of all stops
    from aedit.spec_rollout.idle.trainer_memory import Desk, TrainerPlan


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trainer finds its desk."""

    fd: int
    plan: "TrainerPlan"


def main(words: list[str]) -> int:
    place: Place = born(words)
    let_at_s = time.process_time()
    from aedit.spec_rollout.idle.trainer_memory import Desk

    desk = Desk(place.plan, place.fd)
    try:
        _train(desk, parent=int(words[0]), let_at_s=let_at_s)
    except BaseException as error:
        desk.board.fail(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    return 0


def _train(desk: "Desk", parent: int, let_at_s: float) -> None:
    """Until the node has gone."""
    import torch

    from aedit.spec_rollout.idle.trainer_loop import NOTHING_TO_LEARN_S, TrainerLoop

    torch.set_num_threads(desk.plan.threads)
    _limit_memory(desk.plan.memory_bytes)
    loop = TrainerLoop(desk, desk.plan.make(desk), let_at_s)
    loop.begin()
    while os.getppid() == parent:
        if not loop.turn():
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
