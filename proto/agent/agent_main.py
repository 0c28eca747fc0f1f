"""Run a node agent as a process: `python -m aedit.proto.agent.agent_main PARENT FD BOUND`.

The trainer starts it. FD is the mailbox. Standard input carries first the plan, as one line of JSON, then a
byte whenever there is something to do; its end means that the trainer is gone. Imports no torch.
"""

import logging
import os
import signal
import sys

from aedit import traces
from aedit.child import begin_child, from_json
from aedit.proto.agent import mailbox
from aedit.proto.agent.agent import Agent
from aedit.proto.agent.connections import Connections
from aedit.proto.agent.mailbox import AgentState, WakeReceiver
from aedit.proto.agent.plan import AgentPlan
from aedit.types import UserError


def main(arguments: list[str]) -> int:
    """Run the agent; return its exit code."""
    parent, fd, bound = (int(argument) for argument in arguments)
    # Ctrl-C and the SIGTERM of a launcher are for the trainer, which leaves through this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    begin_child(arguments, bound=bool(bound))
    logging.basicConfig(level=logging.WARNING, format="node agent: %(message)s")
    line = bytearray()  # and not a byte more: what follows belongs to the wakeups
    while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"\n", b""):
        line += byte
    plan = from_json(AgentPlan, line.decode())
    box = mailbox.attach_mailbox(fd)
    try:
        traces.begin(plan.traces, "agent", run=plan.run, node=plan.name)
        connections = Connections(plan)
    except UserError as error:
        box.end(AgentState.REFUSED, str(error))
        return 2
    agent = Agent(plan, box, WakeReceiver(sys.stdin.fileno()), connections)
    return 0 if agent.run(lambda: os.getppid() == parent) else 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    traces.end_traces()
    sys.stderr.flush()
    # Do not wait for threads of calls whose results are no longer needed.
    os._exit(code)
