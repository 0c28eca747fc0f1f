"""Run the services of a compose file as processes on loopback, with their commands as the file has them."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml

PLACES = ("hub:7000", "standby:7000", "server:7001")


def services_of(path):
    """Return the services by name."""
    return yaml.safe_load(Path(path).read_text())["services"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Compose:
    """Services as processes: each in a folder of its own for its volume, all with one folder of keys.

    Those that wait for `keys` start when it has ended; a service with `restart: on-failure` starts again.
    """

    def __init__(self, path, directory, run_toml):
        """run_toml: text of deploy/run.toml, with the addresses of the file's network."""
        self.services, self.directory = services_of(path), directory
        self.addresses = {place: f"127.0.0.1:{free_port()}" for place in PLACES}
        self.processes, self.restarts = {}, {}
        for name in self.services:
            folder = directory / name / "deploy"
            folder.mkdir(parents=True)
            (folder / "run.toml").write_text(self._here(run_toml))

    def _here(self, text):
        for place, address in self.addresses.items():
            text = text.replace(place, address)
        return text

    def _word(self, word):
        word = self._here(str(word)).replace("/keys", str(self.directory / "keys"))
        host, _, name = word.partition("=")
        hosts = {place.partition(":")[0] for place in PLACES}
        if name in hosts:
            return f"{host}=127.0.0.1"
        return word

    def command(self, name):
        """Return the words of a service after `aedit`, for this machine."""
        words = [self._word(word) for word in self.services[name]["command"]]
        at = [i for i, word in enumerate(words) if word == "--host"]
        return [("127.0.0.1" if i - 1 in at else word) for i, word in enumerate(words)]

    def start(self, name):
        words = [sys.executable, "-m", "aedit.launch.cli", *self.command(name)]
        folder = self.directory / name
        with (folder / "log").open("a") as log:
            env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            self.processes[name] = subprocess.Popen(
                words, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )

    def up(self, limit_s, stays=()):
        """Start all services and return when all but those that stay have ended with exit code 0."""
        self.start("keys")
        assert self.processes["keys"].wait(limit_s) == 0, self.log("keys")
        others = [name for name in self.services if name != "keys"]
        for name in others:
            assert self.services[name]["depends_on"]["keys"]["condition"] == "service_completed_successfully"
            self.start(name)
        deadline, left = time.monotonic() + limit_s, set(others) - set(stays)
        while left:
            assert time.monotonic() < deadline, f"{sorted(left)} run still:\n{self.logs()}"
            for name in others:
                code = self.processes[name].poll()
                if code == 0:
                    left.discard(name)
                elif code is not None and (name in left or name in stays):
                    assert self.services[name]["restart"] == "on-failure"
                    self.restarts[name] = self.restarts.get(name, 0) + 1
                    assert self.restarts[name] < 20, self.log(name)
                    self.start(name)
            time.sleep(0.2)

    def down(self):
        """End what is left."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def log(self, name):
        return (self.directory / name / "log").read_text(errors="replace")[-2000:]

    def logs(self):
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in self.processes)
