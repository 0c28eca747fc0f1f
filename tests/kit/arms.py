"""A simulated engine with known step times and acceptance rates of arms, on its own clock."""

import math

import numpy as np
import torch
from scipy.special import betaincinv

from aedit.spec_rollout.choose import EngineView, SkippedSteps, StepObservation, real_nodes
from aedit.spec_rollout.drafters import OFF, Draft

# Measured on two CPU cores: by rows, milliseconds of a plain step, then its multiples for 2, 4, 8, 16 and 32
# verified tokens of a row.
SMALL = {
    1: (3.2, 1.13, 1.28, 1.33, 1.57, 2.03),
    4: (4.9, 1.05, 1.21, 1.53, 2.04, 3.12),
    16: (7.4, 1.35, 1.80, 2.45, 3.67, 6.07),
    32: (11.4, 1.43, 1.95, 2.72, 4.32, 7.6),
    64: (19.0, 1.5, 2.1, 3.1, 5.2, 9.3),
}
VERIFIED = (1, 2, 4, 8, 16, 32)
MOST = 8
"""Largest number of nodes of a draft."""


def verify_s(rows, nodes, context):
    """Return the seconds of a verification step, interpolated linearly between the measured places."""
    at = np.array(list(SMALL))
    by_rows = [
        np.interp(1 + nodes, VERIFIED, [times[0], *(times[0] * more for more in times[1:])])
        for times in SMALL.values()
    ]
    return 1e-3 * float(np.interp(rows, at, by_rows)) * (1 + 2e-4 * (context / rows - 256))


def draft_s(arm, rows, behind):
    """Return the seconds of a draft: that of one layer of a small model, or of a look-up."""
    if arm.is_off:
        return 0.0
    if arm.drafter == "suffix":
        return 2e-5 * rows
    return 1e-3 * (0.1 + 0.3 * (1 + 0.05 * rows) * arm.depth + 0.004 * behind)


class World:
    """Simulated engine whose step times and acceptance rates are known.

    agree: by drafter, how often the policy samples what it drafts, at each step. Rows and nodes differ;
    scores carry some information about it. noise: of the times, with an occasional step ten times as long.
    Worlds of the same seed draw the same random numbers for a step, whatever is chosen. lame: how much longer
    a plain step takes after a drafted one; five plain steps later it is a third of that. pace: factor of all
    times at each step. once_s: what the first pass over drafts of each size takes in addition. `plain_s` is
    what plain decoding would have taken for the same tokens.
    """

    def __init__(
        self, agree, *, seed=0, noise=0.08, versions=None, lame=0.0, pace=lambda step: 1.0, once_s=0.0
    ):
        self.pace, self.plain_s = pace, 0.0
        self.once_s, self.sizes = once_s, set()
        self.agree, self.noise = agree, noise
        self.versions = versions or (lambda step: dict.fromkeys(agree, 0))
        self.seed = seed
        self.lame, self.plain_run = lame, 99
        self.step = 0
        self.now_s = 0.0
        self.tokens = 0
        self.pending = 1 << 30
        self.skipped, self.num_resting = SkippedSteps(), 0

    def draft(self, arm, rows):
        """Return the draft and, hidden from it, which of its nodes the policy would sample."""
        mean = self.agree[arm.drafter](self.step)
        rng = np.random.default_rng([self.seed, self.step, len(arm.drafter)])
        chance, surely, blur = (
            rng.random((rows, MOST)),
            rng.random((rows, MOST)),
            rng.normal(size=(rows, MOST)),
        )
        chance, surely, blur = (x[:, : arm.nodes] for x in (chance, surely, blur))
        chance = betaincinv(4 * mean + 1e-3, 4 * (1 - mean) + 1e-3, chance)
        says = surely < chance
        claimed = np.clip(chance**0.7 * np.exp(0.2 * blur), 1e-6, 1)
        scores = torch.tensor(np.log(claimed).cumsum(1), dtype=torch.float32)
        tokens = torch.zeros(chance.shape, dtype=torch.int64)
        return Draft(tokens, None, None, scores), np.cumprod(says, axis=1).astype(bool)

    def play(self, chooser, rows, context):
        """Run one step of an engine; return its observation, None if the chooser was not asked."""
        view = EngineView(rows, context, self.versions(self.step))
        is_resting = self.skipped.num_steps < self.num_resting and self.skipped.rows == rows
        arm = self.skipped.arm if is_resting else chooser.choose(view)
        draft, nodes, kept, accepted, drafting_s = None, 0, [], np.zeros(rows, dtype=int), 0.0
        if not arm.is_off:
            drafting_s = draft_s(arm, rows, min(self.pending, context) if arm.drafter == "layer" else 0)
            draft, says = self.draft(arm, rows)
            kept = real_nodes(draft) if is_resting else chooser.trim(view, arm, draft)
            kept = np.broadcast_to(kept, rows).tolist()
            nodes = -(-sum(kept) // rows)
            accepted = np.minimum(says.sum(1), kept)
        rng = np.random.default_rng([self.seed, self.step])
        slow = math.exp(self.noise * rng.normal()) * (10 if rng.random() < 0.1 * self.noise else 1)
        slow *= self.pace(self.step)
        drafting_s *= slow
        self.plain_run = self.plain_run + 1 if arm.is_off else -1
        if arm.is_off:
            slow *= 1 + self.lame * 3 ** (-self.plain_run / 5)
        total_s = drafting_s + verify_s(rows, nodes, context) * slow
        if not arm.is_off and (rows, nodes) not in self.sizes:
            self.sizes.add((rows, nodes))
            total_s += self.once_s
        emitted = int(rows + accepted.sum())
        self.plain_s += emitted / rows * verify_s(rows, 0, context) * self.pace(self.step)
        self.pending = 0 if arm.drafter == "layer" else self.pending + emitted
        self.now_s, self.tokens, self.step = self.now_s + total_s, self.tokens + emitted, self.step + 1
        if is_resting:
            self.skipped.add(emitted, total_s)
            return None
        accepted_B = accepted.tolist()
        seen = StepObservation(
            view, arm, emitted, total_s, drafting_s, nodes, kept, draft, accepted_B, skipped=self.skipped
        )
        chooser.learn(seen)
        arm, self.num_resting = chooser.rest(view) if hasattr(chooser, "rest") else (OFF, 0)
        self.skipped = SkippedSteps(rows, arm)
        return seen

    def run(self, chooser, rows, steps):
        """Return the tokens per second over `steps` steps with `rows` rows."""
        began_s, began = self.now_s, self.tokens
        for i in range(steps):
            self.play(chooser, rows, rows * (64 + (2 * i) % 448))
        return (self.tokens - began) / (self.now_s - began_s)
