"""Server processes, and what happens to them by the clock: killed, stopped for a while, gone."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from benchmarks.kit.processes import end, start

MODULE = "benchmarks.rl_servers_parts.server"


@dataclass(slots=True)
class ServerProcess:
    """A server that can be killed and stopped. The next one, already loaded, takes its address at once."""

    name: str
    engine: Mapping[str, Any]
    """Fields of `EngineSpec`."""
    address: str = "127.0.0.1:0"
    process: "subprocess.Popen[str] | None" = None
    _next: "subprocess.Popen[str] | None" = None

    def prepare(self) -> None:
        """Start the next process without waiting."""
        plan = json.dumps({"name": self.name, "engine": dict(self.engine)})
        self._next = start(MODULE, plan, stdout=subprocess.PIPE, stdin=subprocess.PIPE)

    def serve(self) -> None:
        """Let the prepared process serve. Raises RuntimeError if it does not."""
        self.process, self._next = self._next, None
        self._line()
        assert self.process is not None
        assert self.process.stdin is not None
        print(self.address, file=self.process.stdin, flush=True)
        self.address = self._line()

    def kill(self) -> None:
        """Kill it and wait for its end."""
        _end(self.process)
        self.process = None

    def close(self) -> None:
        """Kill it, and the prepared one."""
        self.kill()
        _end(self._next)
        self._next = None

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.process is not None:
            os.kill(self.process.pid, number)

    def _line(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        found = self.process.stdout.readline().strip()
        if not found:
            raise RuntimeError(f"server {self.name} has not started: its error is above")
        return found


def _end(process: "subprocess.Popen[str] | None") -> None:
    if process is not None:
        end([process])
        process.communicate()


class Servers:
    """Servers of one run. A context manager: leaving it ends them."""

    def __init__(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """Set up servers by name, with the fields of their `EngineSpec`."""
        self.servers = {name: ServerProcess(name, engine) for name, engine in engines.items()}

    def __enter__(self) -> "Servers":
        try:
            for server in self.servers.values():
                server.prepare()
            for server in self.servers.values():
                server.serve()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(server.address for server in self.servers.values())

    def kill(self) -> None:
        """Kill all servers."""
        for server in self.servers.values():
            server.kill()

    def _close(self) -> None:
        for server in self.servers.values():
            server.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """What happens to two servers while a trainer trains."""

    kill_every_s: float = 20.0
    """The first server is killed so often, and started again at once."""
    stop_after_s: float = 10.0
    """The second one is stopped (SIGSTOP) for the first time after this."""
    stop_s: float = 20.0
    """For so long, and again after it has run for as long."""


@dataclass(slots=True)
class Done:
    """What has happened."""

    kills: int = 0
    stops: int = 0
    stopped_s: float = 0.0


class Harming:
    """Thread that does harm to two servers. A context manager: leaving it ends the harm, not the servers."""

    def __init__(self, servers: Servers, harm: Harm) -> None:
        self._killed, self._stopped = list(servers.servers.values())[:2]
        self._harm, self._ended = harm, threading.Event()
        self.done = Done()
        self.error: BaseException | None = None
        # A process is told to end when the thread that started it ends: both last until the end of the block.
        self._threads = [
            threading.Thread(target=self._run, args=(each,), daemon=True) for each in (self._kill, self._stop)
        ]

    def __enter__(self) -> "Harming":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60.0)
        if self.error is not None and error is None:
            raise self.error

    def _run(self, harm: Any) -> None:
        try:
            harm()
        except BaseException as error:
            self.error = error

    def _kill(self) -> None:
        self._killed.prepare()
        while not self._ended.wait(self._harm.kill_every_s):
            self._killed.kill()
            self.done.kills += 1
            self._killed.serve()
            self._killed.prepare()

    def _stop(self) -> None:
        pause_s = self._harm.stop_after_s
        while not self._ended.wait(pause_s):
            began_s = time.monotonic()
            self._stopped.signal(signal.SIGSTOP)
            self.done.stops += 1
            try:
                self._ended.wait(self._harm.stop_s)
            finally:
                self._stopped.signal(signal.SIGCONT)
                self.done.stopped_s += time.monotonic() - began_s
            pause_s = self._harm.stop_s
