"""A directory with a configuration, and the `aedit` commands that are started there as from a shell."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from kit.waiting import until

LIMIT_S = 230


class Place:
    """Directory with a configuration, and the commands started there."""

    def __init__(self, directory):
        self.directory, self.started = directory, []
        self.temporary = Path(tempfile.mkdtemp())
        """Temporary files of the commands; not in `directory`, as the name of a socket must be short."""
        self.toml = directory / "run.toml"
        (directory / "text.txt").write_text("one two three four five six seven " * 2000)

    def configure(self, text, **values):
        """Write the configuration: `text` with these values and the directory in their places."""
        self.toml.write_text(text.format(directory=self.directory, **values))

    def aedit(self, *words):
        command = [sys.executable, "-m", "aedit.launch.cli", *map(str, words)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(self.temporary)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=env, **pipes)
        self.started.append(process)
        return process

    def processes(self, *marks):
        """Return the processes that have all of `marks` in their command line."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(self.directory) in line and all(mark in line for mark in marks):
                found.append(process)
        return found

    def node(self, name):
        """Return the process of the node of this name: the newest, as torchrun has the name too."""
        return max(self.processes("aedit.launch.node", named(name)), key=lambda found: found.create_time())

    def events(self, node, run_dir=None):
        path = (run_dir or self.directory / "runs" / "x") / "nodes" / str(node) / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def shown(self):
        """Return the processes, and the end of each log, with the stacks of all threads."""
        for process in self.processes():
            # Without its handler, as before it is set, the signal ends a process; the test has failed anyway.
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)
        time.sleep(2)
        lines = [" ".join(process.info["cmdline"]) for process in self.processes()]
        for log in sorted(self.directory.glob("runs/*/*.log")):
            lines += [f"--- {log.name}", log.read_text(errors="replace")[-9000:]]
        return "\n".join(lines)

    def hold_until_the_others_are_done(self, name, others):
        """Stop a node from its start until the others have ended, and then as long as a hub might wait."""
        until(lambda: self.processes("aedit.launch.node", named(name)), f"the launcher of {name}", LIMIT_S)
        held = self.processes("aedit.launch.node", named(name))
        for process in held:
            process.suspend()
        try:
            until(lambda: all(map(self.is_done, others)), "the end of the other nodes", LIMIT_S)
            time.sleep(5)  # a hub that ended with the run would wait 3 s
        finally:
            for process in held:
                process.resume()

    def is_done(self, node):
        """Return whether a node of a local run has ended as the run was done."""
        ended = [event for event in self.events(node) if event["event"] == "stop"]
        return bool(ended) and not self.processes("aedit.launch.node", named(f"local-{node}"))

    def end(self):
        for process in self.started:
            process.kill()
            process.communicate()
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


def named(name):
    """Return the part of a command line that has the name of a node or peer."""
    return f'"name": "{name}"'


def ends_well(process, place=None):
    """Return the output of a command that must succeed. place: whose state is shown if it does not end."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not ended within {LIMIT_S} s\n{place.shown() if place else ''}") from None
    assert process.returncode == 0, out[-3000:] + err[-3000:]
    return out


def steps_in(events, kind):
    return [event["step"] for event in events if event["event"] == kind]
