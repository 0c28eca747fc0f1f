"""A very small run whose nodes are real processes, for the fault tests."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp
from faults import saboteur
from kit.distributed import FORKS
from torch.distributed import TCPStore
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from aedit.launch.node.checkpoint_files import SafetensorsReader

LIMIT_S = 120.0
SABOTEUR = Path(__file__).parent / "saboteur.py"

RUN_TOML = """
name = "x"
dir = "{dir}"
device = "cpu"
restarts = 2
[model]
sizes = {{ hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 2 }}
[data]
source = "{dir}/text.txt"
seq_len = 32
held_out = 0.3
{data}
[train]
steps = {steps}
batch_size = 2
eval_samples = 4
[edit]
every = 4
warmup_steps = 4
timeout_s = 60
{more}
"""


class Server:
    """Process that forks nodes."""

    def __init__(self):
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=saboteur.serve, args=(theirs,))
        self.process.start()
        theirs.close()
        assert self.answer() == "ready"

    def ask(self, **request):
        self.pipe.send(request)
        return self.answer()

    def answer(self):
        assert self.pipe.poll(2 * LIMIT_S), "the server of nodes does not answer"
        return self.pipe.recv()

    def close(self):
        self.pipe.close()
        self.process.join(LIMIT_S)


class Nodes:
    """Processes of one attempt, by global rank."""

    def __init__(self, server, run_dir, nodes, ranks, deeds):
        self.server, self.run_dir = server, run_dir
        # As torchrun does: the store lives outside the nodes, which are all its clients.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
        shared |= {"WORLD_SIZE": str(nodes * ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        words = [str(run_dir / "run.toml"), json.dumps({"ranks": ranks, "attempt": 1, "local": True})]
        envs = [shared | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(nodes * ranks)]
        self.pids = [server.ask(env=env, deeds=deeds, words=words) for env in envs]
        self.codes = {}

    def wait(self, rank):
        """Return the exit code of a rank once it has ended."""
        if rank not in self.codes:
            code = self.server.ask(pid=self.pids[rank], timeout_s=LIMIT_S)
            assert code is not None, f"process {rank} did not end; {self.stacks()}"
            self.codes[rank] = code
        return self.codes[rank]

    def end_well(self):
        codes = [self.wait(rank) for rank in range(len(self.pids))]
        assert set(codes) == {0}, f"exit codes {codes}; {self.log()}"

    def send(self, number, *ranks):
        for rank in ranks or range(len(self.pids)):
            os.kill(self.pids[rank], number)

    def wait_until_stopped(self, rank):
        """Wait until SIGSTOP has taken effect."""
        process = psutil.Process(self.pids[rank])
        until(lambda: process.status() == psutil.STATUS_STOPPED, f"process {rank} to stop")

    def stacks(self):
        """Return the logs after every remaining process has written its stack traces."""
        left = [rank for rank in range(len(self.pids)) if rank not in self.codes]
        with contextlib.suppress(OSError):
            self.send(signal.SIGUSR1, *left)
        time.sleep(0.5)
        return self.log()

    def log(self):
        return "\n".join(f"{log}:\n{log.read_text()[-6000:]}" for log in self.run_dir.glob("**/*.log"))

    def kill(self):
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                os.kill(pid, signal.SIGKILL)
                self.wait(rank)


class Run:
    """One run directory, with methods that start, stop and inspect its processes."""

    def __init__(self, server, base, steps=20, more=""):
        self.server, self.dir = server, base / "x"
        self.started, self.wrappers = [], []
        self.dir.mkdir(parents=True, exist_ok=True)
        write_text(base / "text.txt")
        self.toml = base / "run.toml"
        self.configure(steps, more)

    def configure(self, steps, more="", data=""):
        text = RUN_TOML.format(dir=self.toml.parent, steps=steps, more=more, data=data)
        for path in (self.toml, self.dir / "run.toml"):
            path.write_text(text)

    def start(self, nodes=2, ranks=1, deeds=()):
        self.started.append(Nodes(self.server, self.dir, nodes, ranks, list(deeds)))
        return self.started[-1]

    def train(self, nodes=2, ranks=1, deeds=()):
        """Start the run and wait until it ends successfully."""
        self.start(nodes, ranks, deeds).end_well()

    def aedit(self, nodes=2, deeds=()):
        """Run `aedit run --local` on the directory: the wrapper, torchrun and the nodes."""
        (self.dir / "plan.json").write_text(json.dumps(list(deeds)))
        words = [sys.executable, str(SABOTEUR), "--aedit", "run", str(self.toml), f"--local={nodes}"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(words, text=True, env=env, **pipes)
        self.wrappers.append(process)
        return process

    def end(self):
        """End every process of this run."""
        for nodes in self.started:
            nodes.kill()
        for process in self.wrappers:
            process.kill()
            process.communicate()
        for process in self.processes():
            process.kill()

    def processes(self):
        """Return the processes whose command line names this run."""
        return [p for p in psutil.process_iter() if _mentions(p, str(self.toml.parent))]

    def until_done(self, act):
        """Wait until a node has applied the act to itself."""
        deeds = self.dir / "deeds.jsonl"
        until(lambda: deeds.exists() and act in deeds.read_text(), act)

    def checkpoints(self, node=0):
        return sorted(self.dir.glob(f"nodes/{node}/checkpoints/round_*"), key=lambda path: path.name)

    def newest(self, node=0):
        return contents(self.checkpoints(node)[-1])

    def events(self, kind, node=0):
        path = self.dir / f"nodes/{node}/events.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["event"] == kind]

    def draws(self, node, rank=0):
        """Return the sample indices of each inner step that was kept.

        Of repeated steps, those of the last.
        """
        steps = {}
        for line in (self.dir / f"draws_{node}_{rank}.jsonl").read_text().splitlines():
            step, indices = json.loads(line)
            steps = {known: drawn for known, drawn in steps.items() if known < step} | {step: indices}
        return steps


def deed(node, moment, step, act):
    """Return one entry of a plan (saboteur.py)."""
    return {"node": node, "moment": moment, "step": step, "act": act}


def write_text(path):
    if not path.exists():
        chance = random.Random(0)
        letters = "eeee tttt aaa ooo iii nnn sss hhh rrr ddd lll uu"
        path.write_text("".join(chance.choice(letters) for _ in range(50000)))


def contents(checkpoint):
    """Return every tensor and number of a checkpoint that training depends on, by name, without times."""
    reader = SafetensorsReader(checkpoint)
    known = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        if isinstance(about, TensorStorageMetadata)
        else None
        for name, about in known.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    meta = json.loads((checkpoint / "meta.json").read_text())
    return state | {name: meta[name] for name in ("sync", "order", "tokens")}


def differing(one, other):
    """Return the names whose bits differ."""
    assert one.keys() == other.keys()
    return [name for name in one if not _same(one[name], other[name])]


def _same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
    return a == b


def _bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # so that nan equals nan


def until(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:g} s for {what}"
        time.sleep(0.02)


def _mentions(process, text):
    try:
        return process.pid != os.getpid() and text in " ".join(process.cmdline())
    except psutil.Error:
        return False
