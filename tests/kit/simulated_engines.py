"""Engines in virtual time: samples of known lengths, steps that take a given time, moves that cost time."""

from collections import deque

from aedit.spec_rollout.engine import EngineSpeed
from aedit.spec_rollout.remote import Reallocator
from aedit.spec_rollout.remote.reallocate import EngineLoad, UnfinishedSample
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling

PACE = EngineSpeed(fixed_s=0.010, row_s=0.001, prefill_s=0.0002)
MOST = 2000
PROMPT = (1,) * 20


def prompts(lengths, rollout=0, group=-1):
    sampling = Sampling(max_new_tokens=MOST)
    return {
        Prompt(tokens=PROMPT, rollout=rollout, sample=i, group=group, sampling=sampling): length
        for i, length in enumerate(lengths)
    }


class Simulated:
    """`Movable` engine that knows how long its samples will be and does not reveal it."""

    def __init__(self, rows=16, speed=PACE):
        self.rows, self.speed = rows, speed
        self.running, self.waiting = [], deque()
        self.free_at = 0.0
        self.world = None
        self.idle_after_giving = False

    @property
    def samples(self):
        return [*self.running, *self.waiting]

    def load(self):
        told = tuple(map(UnfinishedSample.of, self.samples))
        return EngineLoad(told, self.rows, self.speed)

    def remove(self, key):
        for place in (self.running, self.waiting):
            for rollout in place:
                if (rollout.prompt.rollout, rollout.prompt.sample) == key:
                    place.remove(rollout)
                    self.idle_after_giving |= not self.samples
                    return rollout.to_prompt()
        return None

    def add(self, prompt):
        self.waiting.append(prompt.partial or Rollout(prompt))
        if prompt.partial:
            redone = len(prompt.tokens) + len(prompt.partial.tokens)
            self.free_at = max(self.free_at, self.world.now) + redone * self.speed.prefill_s

    def step(self):
        """Add one token to each live sample; those that have ended leave."""
        while self.waiting and len(self.running) < self.rows:
            self.running.append(self.waiting.popleft())
        self.free_at = max(self.free_at, self.world.now) + self.speed.token_s(len(self.running))
        for rollout in self.running:
            rollout.tokens.append(0)
        ended = [r for r in self.running if len(r.tokens) == self.world.length_of(r)]
        self.running = [r for r in self.running if r not in ended]
        return ended


class World:
    """Simulation that steps the first free engine and asks for moves every `every_s` of virtual time."""

    def __init__(self, engines, work, rule=None, every_s=0.2):
        """Set up the engines; `work` has for each a dict of prompt -> length.

        A rule of None never moves anything.
        """
        self.now, self.engines, self.every_s = 0.0, engines, every_s
        self.lengths, self.moves, self.ended, self.busy_to_idle = {}, [], [], 0
        for engine, mine in zip(engines, work, strict=True):
            engine.world = self
            for prompt, length in mine.items():
                self.lengths[prompt.rollout, prompt.sample] = length
                engine.add(prompt)
        self.reallocator = (
            Reallocator(dict(enumerate(engines)), rule, clock=lambda: self.now) if rule else None
        )

    def length_of(self, rollout):
        return self.lengths[rollout.prompt.rollout, rollout.prompt.sample]

    def run(self):
        """Return the seconds until all samples have ended."""
        look_at = self.every_s
        while any(engine.samples for engine in self.engines):
            engine = min((e for e in self.engines if e.samples), key=lambda e: e.free_at)
            self.now = max(self.now, engine.free_at)
            if self.reallocator and self.now >= look_at:
                self.moves += self.reallocator.rebalance()
                look_at = self.now + self.every_s
                continue
            for rollout in engine.step():
                rollout.finish_reason = "stop"
                self.ended.append(rollout)
                if self.reallocator:
                    self.reallocator.record_finished(rollout)
        return max(engine.free_at for engine in self.engines)
