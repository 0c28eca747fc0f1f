"""A hub as a real process on this machine, for tests that need one."""

import os
import subprocess
import time
from contextlib import contextmanager

from kit.commands import PROGRAM, Command

CONFIG = """
name = "test"
[train]
steps = 1000000
[edit]
every = 3
landing = "arrival"
penalty = { clip = "none" }
[outer]
kind = "average"
lr = 1.0
[hub]
address = "127.0.0.1:0"
weights = "uniform"
codec = "fp32"
heartbeat_s = 0.05
expire_s = 5.0
lease_samples = 64
staleness = { rule = "constant" }
push_filter = { threshold = 1e9, cosine = false, clip = 1e9 }
"""
"""Every push moves the anchor by exactly its values."""


class HubProcess:
    """Hub process started in `folder`; after `kill` it can be started again at the same address."""

    def __init__(self, folder, config=CONFIG, flags=(), prefix=()):
        self.folder, self.address, self.process = folder, "127.0.0.1:0", None
        self.flags, self.prefix = flags, prefix
        (folder / "run.toml").write_text(config)

    def start(self, limit_s=60.0):
        told = self.folder / "hub" / "address"
        told.unlink(missing_ok=True)
        words = ["hub", "run.toml", "--address", self.address, "--directory", "hub", *self.flags]
        env, log = os.environ | {"OMP_NUM_THREADS": "1"}, self.folder / "log"
        if self.prefix:
            with log.open("a") as out:
                command = [*self.prefix, *PROGRAM, *words]
                self.process = subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=out, env=env)
        else:
            self.process = Command(words, log, cwd=self.folder, env=env)
        deadline = time.monotonic() + limit_s
        while not told.exists():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, f"no hub within {limit_s} s"
            time.sleep(0.01)
        self.address = told.read_text().strip()

    def kill(self):
        self.process.kill()
        self.process.wait(10)


@contextmanager
def real_hub(folder, config=CONFIG, flags=(), prefix=()):
    """Yield a hub process. prefix: words before its command, such as `prlimit`."""
    hub = HubProcess(folder, config, flags, prefix)
    hub.start()
    try:
        yield hub
    finally:
        hub.kill()
