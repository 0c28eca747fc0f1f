"""Worker processes for tests of torch.distributed: spawned once, used by many tests.

A job is a function in a file of tests/dist_jobs. Every worker of the job calls it as `function(rank, size, **args)` inside a
Gloo process group of its own, and what it returns comes back by rank.
"""

import importlib.util
import multiprocessing as mp
import time
import traceback
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_SIZE = 6
START_LIMIT_S = 60.0


class JobFailed(AssertionError):
    """A worker raised; the message holds its traceback."""


class World:
    """Up to six processes that live as long as the test session."""

    def __init__(self):
        self._workers = []
        self._jobs = 0
        self._store = None

    def run(self, file, function, size, args=None, timeout_s=60.0):
        """Results of `function` by rank. Raises JobFailed; kills all workers if one hangs or dies."""
        assert 1 <= size <= MAX_SIZE
        self._start(size)
        self._jobs += 1
        job = (str(ROOT / file), function, self._jobs, size, self._port(), args or {}, timeout_s)
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            pipe.send((rank, *job))
        answers = self._collect(size, time.monotonic() + timeout_s, f"{file}:{function}")
        failed = [f"rank {rank}:\n{answer}" for rank, (ok, answer) in enumerate(answers) if not ok]
        if failed:
            raise JobFailed("\n".join(failed))
        return [answer for _, answer in answers]

    def close(self):
        """End every worker, by its own process handle."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join(10)
        self._workers = []
        self._store = None

    def _start(self, size):
        context = mp.get_context("spawn")
        while len(self._workers) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        for _, pipe in self._workers[:size]:
            pipe.send(None)
        for _, pipe in self._workers[:size]:
            assert pipe.poll(START_LIMIT_S), "a worker did not start"
            assert pipe.recv() == "ready"

    def _port(self):
        """One store for all jobs, served here: no worker has to guess a free port."""
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def _collect(self, size, deadline, name):
        answers = [None] * size
        while any(answer is None for answer in answers):
            for rank, (process, pipe) in enumerate(self._workers[:size]):
                if answers[rank] is None and pipe.poll(0.01):
                    try:
                        answers[rank] = pipe.recv()
                    except EOFError:
                        answers[rank] = (False, f"the worker died with exit code {process.exitcode}")
            failed = [a for a in answers if a is not None and not a[0]]
            if failed and None in answers:
                deadline = min(deadline, time.monotonic() + 5)  # the others may be waiting for it
            if time.monotonic() > deadline and None in answers:
                self.close()
                missing = [rank for rank, answer in enumerate(answers) if answer is None]
                known = "\n".join(str(answer[1]) for answer in failed)
                raise JobFailed(f"{name}: ranks {missing} did not answer in time\n{known}")
        if any(not ok and "worker died" in str(text) for ok, text in answers):
            self.close()
        return answers


def _work(pipe):
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send("ready" if job is None else _do(job))


def _do(job):
    rank, file, function, number, size, port, args, timeout_s = job
    import torch.distributed as dist

    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"job{number}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        try:
            return True, _function(file, function)(rank, size, **args)
        finally:
            dist.destroy_process_group()
    except BaseException:
        return False, traceback.format_exc()


def _function(file, function):
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)
