"""Node program that injects a fault into itself at a chosen point of its training, free of races.

    python saboteur.py --aedit run CONFIG ...     the command line, with this file as the node program
    python saboteur.py run.toml OPTIONS           the node program, with the plan beside run.toml

The plan is a list of deeds {"node": 1, "moment": "stepped", "step": 7, "act": "SIGKILL"}, each done once, in
the first attempt of a start. Steps count from 0, over all attempts.
"""

import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

import psutil

PLAN = "plan.json"


def moments():
    """Return, by the name of each moment, the class and the method before whose call the moment lies."""
    from aedit.launch.node import NodeCheckpoints
    from aedit.launch.node.stop import Stop
    from aedit.launch.node.train import TrainingNode

    return {
        "drawing": (TrainingNode, "accumulate_gradients"),
        "drawn": (TrainingNode, "inner_step"),
        "stepped": (TrainingNode, "record_step"),
        "landing": (TrainingNode, "record_round"),  # a push was accepted, and no report says so
        "waiting": (Stop, "while_waiting"),
        "renaming": (NodeCheckpoints, "_complete"),
        "done": (TrainingNode, "finish"),
    }


class Saboteur:
    """Carries out the deeds of one process and records which samples its node draws, and groups it trains."""

    def __init__(self, deeds, directory, process):
        self.deeds, self.directory, self.step = list(deeds), directory, 0
        self.draws = directory / f"draws_{process}.jsonl"
        self.groups = directory / f"groups_{process}.jsonl"
        for moment, (owner, method) in moments().items():
            self._precede(owner, method, moment)
        self._follow_draws()

    def _precede(self, owner, method, moment):
        original = getattr(owner, method)

        def preceded(it, *args):
            if moment == "drawing":
                self.step = it.sync.steps
            self._act(moment)
            return original(it, *args)

        setattr(owner, method, preceded)

    def _act(self, moment):
        for deed in [d for d in self.deeds if d["moment"] == moment and d["step"] <= self.step]:
            self.deeds.remove(deed)
            with (self.directory / "deeds.jsonl").open("a") as file:
                print(json.dumps(deed), file=file)
            perform(deed["act"])

    def _follow_draws(self):
        from aedit.launch.data import LeasedOrder, SampleOrder
        from aedit.launch.node.objective import TextObjective

        accumulate = TextObjective.accumulate_gradients
        samples = {order: order.samples for order in (SampleOrder, LeasedOrder)}

        def taken(order, positions):
            indices = samples[type(order)](order, positions)
            with self.draws.open("a") as file:
                print(json.dumps([self.step, indices.tolist()]), file=file)
            return indices

        def followed(objective, add_loss):
            SampleOrder.samples = LeasedOrder.samples = taken
            try:
                accumulate(objective, add_loss)
            finally:
                for order, method in samples.items():
                    order.samples = method

        TextObjective.accumulate_gradients = followed
        self._follow_groups()

    def _follow_groups(self):
        from aedit.launch.node.rl_groups import GroupStream

        trained = GroupStream.trained

        def kept(stream, count):
            groups = trained(stream, count)
            with self.groups.open("a") as file:
                for group in groups:
                    texts = [[rollout.tokens, rollout.finish_reason] for rollout in group.rollouts]
                    print(json.dumps([group.position, group.problem.index, group.rewards, texts]), file=file)
            with self.draws.open("a") as file:
                drawn = [[group.position, group.problem.index] for group in groups]
                print(json.dumps([self.step, drawn]), file=file)
            return groups

        GroupStream.trained = kept


def perform(act):
    """Apply the act to this process."""
    if act == "no room":  # every file that grows beyond this is refused, as by a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    elif act == "room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif act == "Ctrl-C":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        psutil.Process().parent().parent().send_signal(signal.SIGINT)  # torchrun's parent: aedit run
        assert signal.sigtimedwait({signal.SIGTERM}, 60), "the wrapper passed nothing on"
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.Signals[act])
        time.sleep(0.2)  # after SIGCONT: what was sent meanwhile may have gone to another thread first


def run_node(deeds, words):
    """Run the node program with its deeds; return the exit code."""
    from aedit.launch.node import __main__ as node

    run_toml = Path(words[0])
    ranks = json.loads(words[1])["ranks"]
    index, rank = divmod(int(os.environ["RANK"]), ranks)
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    mine = [deed for deed in deeds if deed["node"] == index and first]
    Saboteur(mine, run_toml.parent, os.environ.get("SABOTEUR_NAME", f"{index}_{rank}"))
    faulthandler.register(signal.SIGUSR1)  # write the stack traces of a hang into its log
    sys.argv = ["node", *words]
    return node.main()


def serve(pipe):
    """Fork one node per request; answer with its process id, or with its exit code once it has ended."""
    import torch

    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    gc.freeze()  # no fork looks through what all have imported, nor copies its pages for that
    pipe.send("ready")
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        pipe.send(_exit_code(**request) if "pid" in request else _fork(**request))


def _fork(env, deeds, words):
    if pid := os.fork():
        return pid
    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(os.open(Path(words[0]).parent / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        os.environ.update(env)
        code = run_node(deeds, words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _exit_code(pid, timeout_s):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def run_aedit(words):
    """Run `aedit` with this file as the node program."""
    import functools

    import aedit.launch.processes.run_local as wrapper
    from aedit.launch.cli import main

    wrapper.run = functools.partial(wrapper.run, program=("--", __file__))
    return main(words)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--aedit"]:
        sys.exit(run_aedit(sys.argv[2:]))
    else:
        plan = Path(sys.argv[1]).parent / PLAN
        sys.exit(run_node(json.loads(plan.read_text()) if plan.exists() else [], sys.argv[1:]))
