"""Worker processes for tests of torch.distributed, forked from one process that has imported what jobs need.

A test writes its job as a plain function in `tests/dist_jobs/some_file.py` and calls

    results = world.run("tests/dist_jobs/some_file.py", "job", size=4, args={"rounds": 3})

Every worker calls `job(rank, size, rounds=3)` inside a Gloo process group of its own; what the calls return
comes back as a list by rank.
"""

import contextlib
import faulthandler
import gc
import importlib.util
import multiprocessing
import multiprocessing.connection as mpc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
# A fork has what these have imported: seconds of processor time less for each worker.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "aedit.launch.node.build"]
)
START_S = 120.0
GRACE_S = 5.0


class Job(NamedTuple):
    file: str
    function: str
    rank: int
    size: int
    args: dict
    timeout_s: float
    prefix: str
    port: int


class Outcome(NamedTuple):
    value: object
    error: Exception | None
    failed_at_s: float = 0.0


class Worker:
    """One process and the pipe to it.

    It ends by itself when the pipe closes, so it cannot outlive the tests.
    """

    def __init__(self):
        self.log = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self.pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=serve, args=(theirs, self.log.name), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, job):
        # Not `pipe.send`: torch teaches that one to pass tensors as shared memory, which dies with us.
        self.pipe.send_bytes(pickle.dumps(job))

    def receive(self):
        return pickle.loads(self.pipe.recv_bytes())

    def abort(self):
        """Write the stacks of all its threads to the log, then end the process."""
        if self.process.exitcode is None:
            os.kill(self.process.pid, signal.SIGABRT)
            self.process.join(2)
        self.kill()

    def kill(self):
        self.process.kill()
        self.process.join(10)
        self.pipe.close()

    def told(self):
        """Return the end of its output, and after a crash all stacks, of which the first one is the cause's.

        The long line of modules that faulthandler adds to stacks is left out.
        """
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines(keepends=True)
        text = "".join(line for line in lines if not line.startswith("Extension modules: "))
        crash = text.rfind("Fatal Python error: ")
        return text[-4000:] if crash < 0 else text[max(0, crash - 2000) :][:40000]


class World:
    """Up to `most` workers, kept between jobs and replaced after a hang or a death."""

    def __init__(self, most=6):
        self.most = most
        self.workers = []
        self.store = None
        self.jobs = 0

    def run(self, file, function, size, args=None, timeout_s=180.0):
        """Return what `function(rank, size, **args)` returned, by rank.

        Arguments and results travel by pickle. The first error of a worker is raised here with that worker's
        traceback as a note. A hang or a death fails the test and ends all the workers; the next job gets new
        ones.
        """
        assert 1 <= size <= self.most, f"{size} workers asked for; this world has 1 to {self.most}"
        self._start(size)
        self.jobs += 1
        try:
            for rank in range(size):
                where = (f"job{self.jobs}", self.store.port)
                self.workers[rank].send(Job(str(file), function, rank, size, args or {}, timeout_s, *where))
            outcomes = self._outcomes(size, timeout_s, f"{Path(file).name}:{function}")
        except BaseException:
            self.close()
            raise
        failed = [outcome for outcome in outcomes.values() if outcome.error]
        if failed:
            raise min(failed, key=lambda outcome: outcome.failed_at_s).error
        return [outcomes[rank].value for rank in range(size)]

    def close(self):
        for worker in self.workers:
            worker.kill()
        self.workers = []

    def _start(self, size):
        from torch.distributed import TCPStore

        if any(worker.process.exitcode is not None for worker in self.workers):
            self.close()
        if self.store is None:
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        new = [Worker() for _ in range(size - len(self.workers))]
        self.workers += new
        for worker in new:
            if not worker.pipe.poll(START_S):
                self.close()
                raise RuntimeError(f"a worker did not start within {START_S:g} s: {worker.told()}")
            worker.receive()

    def _outcomes(self, size, timeout_s, name):
        """Return the outcomes by rank; after an error the other ranks get a short time to report theirs."""
        # A collective that hangs should say so itself, so its deadline, `timeout_s`, is the earlier one.
        deadline = time.monotonic() + timeout_s + 1
        outcomes = {}
        while len(outcomes) < size:
            waiting = {self.workers[rank].pipe: rank for rank in range(size) if rank not in outcomes}
            ready = mpc.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                if any(outcome.error for outcome in outcomes.values()):
                    self.close()
                    return outcomes
                self._fail(list(waiting.values()), f"{name} did not end within {timeout_s:g} s")
            for pipe in ready:
                outcome = self._outcome(waiting[pipe], name)
                outcomes[waiting[pipe]] = outcome
                if outcome.error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return outcomes

    def _outcome(self, rank, name):
        try:
            return self.workers[rank].receive()
        except (EOFError, OSError):
            self.workers[rank].process.join(10)
            code = self.workers[rank].process.exitcode
            self._fail([rank], f"{name}: a worker died with exit code {code}")

    def _fail(self, ranks, what):
        for rank in ranks:
            self.workers[rank].abort()
        logs = "\n".join(f"--- rank {rank}\n{self.workers[rank].told()}" for rank in ranks)
        self.close()
        raise RuntimeError(f"{what} (rank {', '.join(map(str, ranks))})\n{logs}")


def _load(file):
    path = ROOT / file
    spec = importlib.util.spec_from_file_location(f"job_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _perform(job):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    timeout = timedelta(seconds=job.timeout_s)
    store = dist.PrefixStore(job.prefix, dist.TCPStore("127.0.0.1", job.port, timeout=timeout))
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size, timeout=timeout)
    dist.barrier()  # a rank that ended before another has connected to it would fail the other
    return getattr(_load(job.file), job.function)(job.rank, job.size, **job.args)


def _answer(job):
    """Return the outcome of a job, as bytes that the test process can always unpickle."""
    import torch.distributed as dist

    try:
        return pickle.dumps(Outcome(_perform(job), None))
    except BaseException as error:
        # Read before our sockets close: what the others say then is later, and only an echo.
        failed_at_s = time.monotonic()
        note = f"rank {job.rank} of {job.size}:\n{traceback.format_exc()}"
        return _readable(error, note, failed_at_s)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _readable(error, note, failed_at_s):
    # A class of the job's own file exists only in this process; SystemExit would end the test's.
    if isinstance(error, Exception) and not type(error).__module__.startswith("job_"):
        with contextlib.suppress(Exception):
            error.add_note(note)
            told = pickle.dumps(Outcome(None, error, failed_at_s))
            pickle.loads(told)
            return told
    return pickle.dumps(Outcome(None, RuntimeError(note), failed_at_s))


def serve(pipe, log):
    """Perform one job after the other until the pipe closes."""
    gc.freeze()  # do not look through what the fork server has imported: its pages would be copied
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    faulthandler.enable()
    pipe.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        # If the test process dies in the middle of a job, nothing else would end a hung worker.
        faulthandler.dump_traceback_later(job.timeout_s + 30, exit=True)
        answer = _answer(job)
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(answer)
