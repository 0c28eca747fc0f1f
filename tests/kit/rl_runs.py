"""Run directories of reinforcement learning written by the program's own recorder, with known figures.

Each step lasts 2 s: generation 1 s, of which 0.1 s waits for the longest sample, rewards 0.1 s, training
0.4 s, 0.3 s of waiting for the hub; 0.2 s are left. Of the 0.4 s of waiting, idle work uses 0.3 s.
"""

import contextlib
from typing import ClassVar

from aedit.launch.records import Clock, Recorder

SECONDS_PER_STEP = 2.0


class RLNode:
    """Writes the files of one node.

    speed: of generation, in units of 640 tokens per second. plain: whether steps without drafts were timed.
    """

    opened: ClassVar[list] = []

    def __init__(self, run_dir, index, *, speed=1.0, plain=True):
        self.now, self.index, self.speed, self.plain = 0.0, index, speed, plain
        self.clock = Clock(lambda: self.now)
        self.clock.start(0.0)
        self.out = Recorder(run_dir / "nodes" / str(index), self.clock, writes=True)
        RLNode.opened.append(self.out)

    def start(self, **fields):
        told = {"attempt": 0, "step": 0, "device": "cpu", "ranks": 1, "params": 4000, "units": ["rest"]}
        self.out.event("start", **{**told, **fields})

    def step(self, n, **changes):
        """Write the line of step `n`, 2 s after that of the step before."""
        self.now = n * SECONDS_PER_STEP
        rl = self.state(n) | changes
        times = {"busy_s": 1.7 * n, "wait_s": 0.3 * n, "idle_used_s": 0.3 * n, "other_s": 0.0}
        counts = {"step": n, "round": n // 4, "tokens": 1000 * n, "progress": n / 100}
        self.out.metrics(**counts, loss=0.01, lr=1e-3, grad_norm=0.5, **times, rl=rl)

    def state(self, n):
        """Return `rl` after `n` steps of 4 groups of 8 rollouts of 20 tokens."""
        tokens = 640.0 * n * self.speed
        newest = {"reward": min(1.0, 0.3 + 0.01 * n), "solved": min(1.0, 0.2 + 0.01 * n)}
        newest |= {"mismatch_kl": 2e-4, "mismatch_kl_masked": 1e-4, "clip_share": 0.01, "entropy": 1.5}
        newest |= {"length": 20.0, "length_max": 64, "staleness": 0.5, "staleness_max": 2}
        totals = {"groups": 4 * n, "rollouts": 32 * n, "no_signal": n, "retried": 1, "excluded": 2}
        totals |= {"rollout_tokens": tokens, "rollout_s": 1.0 * n, "reward_s": 0.1 * n, "train_s": 0.4 * n}
        compared_s = 0.5 * n if self.plain else 0.0
        totals |= {"supervised_steps": 0, "compared_s": compared_s, "as_plain_s": 1.6 * compared_s}
        arms = {"off": n, "layer:4": 3 * n, "layer:6x2x12": 2 * n, "suffix:8": 4 * n}
        drafter = {"steps": 5 * n, "published": n // 10, "adopted": n // 10, "refused": n // 20}
        drafter |= {"accepted_length": 1.5 + 0.01 * n, "version": n // 10}
        idle = {"hub": 0.3 * n, "longest sample": 0.1 * n, "rewards": 0.1 * n}
        return {**newest, **totals, "passes": tokens / 2.5, "arms": arms, "idle_s": idle} | {
            "idle_used_s": 0.3 * n,
            "drafter": drafter,
        }

    def evaluate(self, n, solved):
        self.out.event(
            "rl_eval", step=n, round=n // 4, solved=solved, reward=solved, length=18.0, problems=64
        )

    def stop(self, n):
        self.out.event("stop", reason="done", step=n, tokens=1000 * n)
        self.out.close()


@contextlib.contextmanager
def closing():
    """Close the files of all nodes at the end of the block."""
    try:
        yield
    finally:
        while RLNode.opened:
            RLNode.opened.pop().close()


def rl_run(tmp_path, num_steps=50, *, plain=True):
    """Write a run of two nodes, the second half as fast, and return its directory."""
    run_dir = tmp_path / "tiny-rl"
    run_dir.mkdir()
    (run_dir / "run.toml").write_text('name = "tiny-rl"\n[prompts]\nsource = "kit.rl_runs:rows"\n')
    for index, speed in ((0, 1.0), (1, 0.5)):
        node = RLNode(run_dir, index, speed=speed, plain=plain)
        node.start()
        for n in range(1, num_steps + 1):
            node.step(n)
            if index == 0 and n in (1, num_steps // 2, num_steps):
                node.evaluate(n, 0.25 + 0.5 * n / num_steps)
        node.stop(num_steps)
    return run_dir
