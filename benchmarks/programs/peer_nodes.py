"""Several paced nodes in one process, one thread each.

    python -m benchmarks.programs.peer_nodes '[{"name": "a", ...}, ...]'     fields of PacedNode

Answers each line that it reads with a line of JSON; the first one when all nodes have joined.
"""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from aedit.proto.agent import start_agent
from aedit.proto.rpc import raise_descriptor_limit
from benchmarks.kit.paced_node import PacedNode, Walker, agent_plan

LEAVES_S = 60.0
JOINING = 4
"""Nodes that join at a time."""


@dataclass(slots=True)
class Count:
    """Events of all nodes here."""

    merged: int = 0
    refused: int = 0
    late: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, event: str, **facts: Any) -> None:
        """Count an event of a node."""
        with self.lock:
            self.late += event == "late"
            if event == "answered":
                self.merged += facts["verdict"] == "MERGED"
                self.refused += facts["verdict"] != "MERGED"


def main(words: list[str]) -> int:
    plans = [PacedNode(**fields) for fields in json.loads(words[0])]
    raise_descriptor_limit()
    count, ending, joining = Count(), threading.Event(), threading.Semaphore(JOINING)

    def joined(plan: PacedNode) -> Walker:
        with joining:
            return Walker(plan, start_agent(agent_plan(plan), ranks=1, mode="thread"), count.note, ending)

    def walk(walker: Walker) -> None:
        walker.walk()
        walker.leave(LEAVES_S)

    with ThreadPoolExecutor(len(plans)) as threads:
        walks = [threads.submit(walk, walker) for walker in threads.map(joined, plans)]
        for _ in sys.stdin:
            told = {"merged": count.merged, "refused": count.refused, "late": count.late}
            failed = sum(walk.done() for walk in walks)
            print(json.dumps(told | {"cpu_s": time.process_time(), "failed": failed}), flush=True)
        ending.set()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
