"""Servers of one model directory: ours and the rivals, each in processes of its own on the same cores."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil

from aedit.system import end_with_parent
from benchmarks.kit.processes import ROOT

OURS, TRANSFORMERS, VLLM = "aedit serve", "transformers serve", "vLLM"
STARTS_WITHIN_S, ENDS_WITHIN_S = 600.0, 60.0
"""vLLM compiles the model before it serves."""


class ServerError(Exception):
    """A server does not run here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What every server is given."""

    directory: Path
    """Of the model; the server's log is written beside it."""
    cores: tuple[int, ...]
    rows: int
    """Samples that are decoded at the same time."""
    max_tokens: int
    """Of prompt and answer."""


@dataclass(slots=True, eq=False)
class Server:
    """A server that answers."""

    name: str
    model: str
    """Name of the model in requests."""
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def rss_bytes(self) -> int:
        """Return the resident memory of its processes."""
        return sum(each.memory_info().rss for each in self._processes())

    def cpu_s(self) -> float:
        """Return the processor time of its processes."""
        return sum(sum(each.cpu_times()[:2]) for each in self._processes())

    def stop(self) -> None:
        """Stop its processes, so that it uses no core during the turns of others."""
        for each in self._processes():
            each.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let its processes go on."""
        for each in self._processes():
            each.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End its processes."""
        all_of_it = self._processes()
        for each in all_of_it:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(all_of_it, ENDS_WITHIN_S)
        self.process.wait(ENDS_WITHIN_S)

    def _processes(self) -> list[psutil.Process]:
        if self.process.poll() is not None:
            return []
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def command(name: str, python: Path, place: Place, port: int) -> list[str]:
    """Return the command line of a server."""
    directory, rows, most = str(place.directory), str(place.rows), str(place.max_tokens)
    if name == OURS:
        module = [str(python), "-m", "aedit.launch.cli", "serve", directory]
        return [*module, "--host=127.0.0.1", f"--port={port}", f"--rows={rows}", f"--max-tokens={most}"]
    if name == TRANSFORMERS:
        module = [str(python), "-m", "transformers.cli.transformers", "serve", directory]
        return [*module, "--device=cpu", "--dtype=float32", f"--port={port}", "--continuous-batching"]
    module = [str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={directory}"]
    sizes = [f"--max-num-seqs={rows}", f"--max-model-len={most}"]
    return [
        *module,
        "--dtype=float32",
        f"--port={port}",
        "--host=127.0.0.1",
        "--no-enable-prefix-caching",
        *sizes,
    ]


def environment(cores: Sequence[int]) -> dict[str, str]:
    """Return the environment of a server: one thread per core, nothing from a network."""
    return os.environ | {
        "OMP_NUM_THREADS": str(len(cores)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def _begin(parent: int, cores: Sequence[int]) -> None:
    end_with_parent(parent, signal.SIGTERM)
    os.sched_setaffinity(0, cores)


@contextmanager
def serving(
    name: str, place: Place, python: Path | None = None, extra: Sequence[str] = ()
) -> Iterator[Server]:
    """Start a server and wait until it answers; it has ended afterwards.

    Args:
        name: OURS, TRANSFORMERS or VLLM.
        place: Model, cores and sizes.
        python: Python of the virtual environment of a rival.
        extra: More words of its command line.

    Raises:
        ServerError: It has ended, or does not answer in time.
    """
    port, log = free_port(), place.directory.parent / f"{name.replace(' ', '-')}.log"
    words = [*command(name, python or Path(sys.executable), place, port), *extra]
    with log.open("wb") as out:
        process = subprocess.Popen(
            words,
            cwd=ROOT if name == OURS else place.directory.parent,
            env=environment(place.cores),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=partial(_begin, os.getpid(), place.cores),
        )
    server = Server(name, str(place.directory), f"http://127.0.0.1:{port}", process, log)
    try:
        server.model = _wait_until_it_answers(server)
        yield server
    finally:
        server.end()


def _wait_until_it_answers(server: Server) -> str:
    """Return the name of its model once it has answered a request for one token."""
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerError(f"{server.name} has ended: {_last_line(server.log)}")
        with suppress(httpx.TransportError, KeyError, IndexError, ValueError):
            if server.name == OURS:  # others list models of a cache, too
                server.model = httpx.get(f"{server.url}/v1/models", timeout=5).json()["data"][0]["id"]
            body = {"model": server.model, "prompt": "t1 t2", "max_tokens": 1}
            if httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200:
                return server.model
        time.sleep(0.2)
    raise ServerError(f"{server.name} does not answer within {STARTS_WITHIN_S:g} s: {_last_line(server.log)}")


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else "its log is empty"
