"""Hubs and peers in processes that are forked from one that has imported what they need.

The imports take most of the processor time of a command that lives for some seconds. A process made here
differs from one of `python -m aedit.launch.cli` in its command line only; other tests start that one.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

TESTS, ROOT = map(str, Path(__file__).resolve().parents[1:3])
LOOK_S = 0.01
PROGRAM = (sys.executable, "-m", "aedit.launch.cli")
MODULES = ("aedit.launch.cli.main", "aedit.launch.hub.main", "aedit.launch.swarm.run_peer")
_servers = []


class ForkServer:
    """Process that has imported the modules and forks commands; it ends with this process, or by `close`."""

    def __init__(self):
        code = f"import sys; sys.path.insert(0, {TESTS!r}); from kit.commands import serve; sys.exit(serve())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._lock = threading.Lock()
        assert self._answer() == "ready"

    def ask(self, **request):
        with self._lock:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            return self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        assert line, "the fork server has ended"
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


class Command:
    """Process of one command, with the methods of `subprocess.Popen`. Its output is appended to `log`.

    args: the words that start the same command as a program.
    """

    def __init__(self, words, log, *, cwd=".", env=None):
        if not _servers:
            _servers.append(ForkServer())
        self._server, self.args, self.returncode = _servers[0], [*PROGRAM, *words], None
        env = dict(env or os.environ)
        place = {"cwd": os.path.abspath(cwd), "log": os.path.abspath(log), "env": env}
        self.pid = self._server.ask(words=[str(word) for word in words], **place)

    def poll(self):
        if self.returncode is None:
            self.returncode = self._server.ask(pid=self.pid)
        return self.returncode

    def wait(self, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(LOOK_S)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def close():
    """End the fork server of this process, if there is one."""
    while _servers:
        _servers.pop().close()


def serve():
    """Fork a command for each request; answer with its process id, or its exit code once it has ended."""
    sys.path.remove(TESTS)
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()  # no fork looks through what all have imported, nor copies its pages for that
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            done, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        elif not (answer := os.fork()):
            return _command(**request)
        print(json.dumps(answer), flush=True)
    return 0


def _command(words, cwd, log, env):
    """Be a command, in the process that was forked for it; return its exit code."""
    from aedit.launch.cli.main import main

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = ["aedit", *words]
    return main(words)
