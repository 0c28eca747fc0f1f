"""Engine hosts with tiny policies, receivers that keep what they are told, and steps that a test releases."""

import threading

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.server import EngineHost
from kit.rollouts import tiny_policy

LIMIT_S = 60.0


class Kept:
    """Receiver that keeps what it is told, and checks that the calls come in order."""

    def __init__(self):
        self.texts, self.rollout, self.error = [], None, None
        self.begun, self.over = threading.Event(), threading.Event()

    def tokens(self, rollout, start):
        assert not self.over.is_set()
        assert start <= len(self.texts)
        assert rollout.tokens[: len(self.texts)] == self.texts
        assert len(rollout.tokens) == len(rollout.logprobs) == len(rollout.versions)
        self.texts = list(rollout.tokens)
        self.begun.set()

    def ended(self, rollout):
        assert not self.over.is_set()
        assert rollout.tokens[: len(self.texts)] == self.texts
        self.rollout = rollout
        self.over.set()

    def failed(self, error):
        assert not self.over.is_set()
        self.error = error
        self.over.set()

    def result(self):
        """Return the rollout, or raise the error."""
        assert self.over.wait(LIMIT_S), "the sample was not over in time"
        if self.error is not None:
            raise self.error
        return self.rollout


class Steps:
    """Steps of a line that wait until the test releases them."""

    def __init__(self):
        self._lock = threading.Condition()
        self._released = self.num_begun = 0

    def __call__(self):
        with self._lock:
            self.num_begun += 1
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: self._released >= self.num_begun, LIMIT_S), "step not released"

    def release(self, count=1):
        """Let the host make so many further steps, and wait until it asks for the next one."""
        with self._lock:
            self._released += count
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: self.num_begun > self._released, LIMIT_S), "no further step"

    def open(self):
        """Let all steps pass."""
        with self._lock:
            self._released = 1 << 60
            self._lock.notify_all()

    def wait(self):
        """Wait until a step waits."""
        with self._lock:
            assert self._lock.wait_for(lambda: self.num_begun > self._released, LIMIT_S), "no step"


def host_of(*, rows=2, limits=None, model=None, steps=None, **options):
    """Return a host with the line `a`."""
    host = EngineHost(limits, **{k: options.pop(k) for k in ("clock",) if k in options})
    engine = Engine.of(model if model is not None else tiny_policy(), rows=rows, max_tokens=64, **options)
    host.open("a", lambda: engine, **({} if steps is None else {"between_steps": steps}))
    return host


def submit(host, prompts, **options):
    """Submit samples to line `a`; return their receivers and tickets."""
    kept = [Kept() for _ in prompts]
    tickets = [host.submit("a", p, k, **options) for p, k in zip(prompts, kept, strict=True)]
    return kept, tickets
