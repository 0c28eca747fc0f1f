"""Train a tiny policy on rollouts of 0 to 8 policy versions ago, with each policy loss.

    python -m benchmarks.off_policy [--quick] [--steps 500] [--seeds 5] [--json FILE]

The task is to sort four digits; an answer is right or wrong. The policy, a network of 28 thousand parameters,
starts from a short supervised warm-up, and everything is computed: rollouts, losses, steps. With staleness s,
each batch was drawn by the weights of s inner steps ago.
"""

import argparse
import copy
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, gelu, one_hot

from aedit.spec_rollout import (
    LossInputs,
    LossOutput,
    LossSettings,
    PolicyLoss,
    advantages,
    find_loss,
    loss_metrics,
    mean_metrics,
)
from benchmarks.kit.statistics import mean_and_half_width
from benchmarks.kit.tables import Bar, Report, main

ABOUT = "Policy losses on rollouts of 0 to 8 policy versions ago."
METHOD = (
    "Sorting of four digits by a network of 28 thousand parameters, Adam at 1e-3, 16 groups of 8 rollouts per"
    " step, one step per batch; advantages: reward minus group mean.",
    "Solved share of 4096 samples of prompts never trained on, after the last step, in percent: mean"
    " over seeds +- half of its 95 % interval. At staleness 0 all losses have the same gradient.",
)
DIGITS, VALUES, HIDDEN = 4, 10, 128
GROUPS, GROUP_SIZE = 16, 8
WARM_UP_STEPS, WARM_UP_BATCH, WARM_UP_LR, LR = 60, 128, 2e-3, 1e-3
HELD_OUT = 4096
STALENESS = (0, 1, 2, 4, 8)
CLOSE, APART = 3.0, 10.0
"""Points by which `dppo-tv` may, and the uncorrected loss must, stay behind at the largest staleness."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A loss with its settings."""

    name: str
    loss: PolicyLoss
    settings: LossSettings


def uncorrected(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Return REINFORCE as if every rollout were on policy: sum of -A log p over the tokens of the batch."""
    terms_BT = -inputs.advantages_B[:, None] * inputs.logp_BT
    return LossOutput(terms_BT.where(inputs.mask_BT, 0.0).sum() / inputs.num_tokens, inputs.mask_BT)


UNCORRECTED = Arm("uncorrected", uncorrected, LossSettings())
DPPO = Arm("dppo-tv", find_loss("dppo-tv"), LossSettings())
ARMS = (
    UNCORRECTED,
    Arm("token weights <= 2", find_loss("dapo"), LossSettings(importance="token")),
    Arm("sequence weights <= 2", find_loss("dapo"), LossSettings(importance="sequence")),
    Arm("cispo, cap 5", find_loss("cispo"), LossSettings(clip_high=4.0)),
    Arm("gspo", find_loss("gspo"), LossSettings()),
    Arm("grpo", find_loss("grpo"), LossSettings()),
    DPPO,
)


class Sorter(nn.Module):
    """Policy: digits of the prompt and the answer so far, one-hot, to logits of the next digit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * DIGITS * VALUES, HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.outer = nn.Linear(HIDDEN, VALUES)

    def forward(self, prompts_BD: Tensor, answers_BD: Tensor) -> Tensor:
        """Return logits (B, DIGITS, VALUES) of each digit of the answers, given the earlier ones."""
        before = torch.ones(DIGITS, DIGITS).tril(-1)
        asked_BDX = one_hot(prompts_BD, VALUES).float().flatten(1)[:, None].expand(-1, DIGITS, -1)
        answers_BDV = one_hot(answers_BD, VALUES).float()
        given_BDX = (answers_BDV[:, None] * before[:, :, None]).flatten(2)
        return self.next(torch.cat([asked_BDX, given_BDX], -1))

    def next(self, x: Tensor) -> Tensor:
        """Return logits of the next digit from the one-hot inputs."""
        found: Tensor = self.outer(gelu(self.middle(gelu(self.inner(x)))))
        return found


def problems(count: int, generator: Generator, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Return random prompts and their right answers; one in ten prompts is held out of all training."""
    ids_P = torch.randperm(VALUES**DIGITS, generator=Generator().manual_seed(0))
    split = len(ids_P) // 10
    among_P = ids_P[:split] if held_out else ids_P[split:]
    chosen_B = among_P[torch.randint(len(among_P), (count,), generator=generator)]
    prompts_BD = chosen_B[:, None] // VALUES ** torch.arange(DIGITS) % VALUES
    return prompts_BD, prompts_BD.sort(1).values


@torch.no_grad()
def sample(policy: Sorter, prompts_BD: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Return sampled answers and the log-probability of each of their digits."""
    asked = one_hot(prompts_BD, VALUES).float().flatten(1)
    given = torch.zeros(len(prompts_BD), DIGITS * VALUES)
    digits, logprobs = [], []
    for place in range(DIGITS):
        logp_BV = policy.next(torch.cat([asked, given], 1)).log_softmax(-1)
        digits.append(torch.multinomial(logp_BV.exp(), 1, generator=generator))
        logprobs.append(logp_BV.gather(1, digits[-1]))
        given.scatter_(1, digits[-1] + place * VALUES, 1.0)
    return torch.cat(digits, 1), torch.cat(logprobs, 1)


def solved(policy: Sorter) -> float:
    """Return the solved share of held-out samples, in percent."""
    generator = Generator().manual_seed(2**32)
    prompts_BD, right_BD = problems(HELD_OUT, generator, held_out=True)
    answers_BD, _ = sample(policy, prompts_BD, generator)
    return 100 * float((answers_BD == right_BD).all(1).float().mean())


def warmed_up(seed: int) -> Sorter:
    """Return a policy after the supervised warm-up, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        policy = Sorter()
    generator, inner = Generator().manual_seed(seed), torch.optim.Adam(policy.parameters(), WARM_UP_LR)
    for _ in range(WARM_UP_STEPS):
        prompts_BD, right_BD = problems(WARM_UP_BATCH, generator)
        loss = cross_entropy(policy(prompts_BD, right_BD).flatten(0, 1), right_BD.flatten())
        inner.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        inner.step()
    return policy


@dataclass(frozen=True, slots=True)
class Batch:
    """Rollouts with their behaviour log-probabilities and advantages."""

    prompts_BD: Tensor
    answers_BD: Tensor
    logprobs_BD: Tensor
    advantages_B: Tensor

    def inputs(self, policy: Sorter) -> LossInputs:
        """Return what a loss reads."""
        logits = policy(self.prompts_BD, self.answers_BD)
        mask_BD = torch.ones_like(self.answers_BD, dtype=torch.bool)
        return LossInputs(
            logp_BT=logits.log_softmax(-1).gather(2, self.answers_BD[:, :, None])[:, :, 0],
            behaviour_BT=self.logprobs_BD,
            mask_BT=mask_BD,
            advantages_B=self.advantages_B,
            num_tokens=mask_BD.numel(),
            num_sequences=len(mask_BD),
            max_tokens=DIGITS,
        )


def batches(policy: Sorter, seed: int, groups: int = GROUPS) -> Iterator[Batch]:
    """Yield batches, each drawn from the policy as it is at that moment."""
    generator = Generator().manual_seed(2**31 + seed)
    while True:
        prompts_BD, right_BD = (x.repeat_interleave(GROUP_SIZE, 0) for x in problems(groups, generator))
        answers_BD, logprobs_BD = sample(policy, prompts_BD, generator)
        rewards = (answers_BD == right_BD).all(1).float().view(groups, GROUP_SIZE)
        A = torch.tensor(advantages(rewards.tolist(), "mean")).flatten()
        yield Batch(prompts_BD, answers_BD, logprobs_BD, A)


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of training one policy."""

    solved: float
    """Percent."""
    metrics: dict[str, float]
    """Means over the second half of the training."""


def trained(start: Sorter, arm: Arm, staleness: int, steps: int, seed: int) -> Trained:
    """Train a copy of `start` and return what became of it."""
    policy, totals = copy.deepcopy(start), Counter[str]()
    inner = torch.optim.Adam(policy.parameters(), LR)
    drawn, waiting = batches(policy, seed), deque[Batch]()
    for step in range(steps):
        while len(waiting) <= staleness:
            waiting.append(next(drawn))
        inputs = waiting.popleft().inputs(policy)
        out = arm.loss(inputs, arm.settings)
        inner.zero_grad()
        out.loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        inner.step()
        if 2 * step >= steps:
            totals.update(loss_metrics(inputs, out))
    return Trained(solved(policy), mean_metrics(totals))


Grid = dict[tuple[str, int], list[Trained]]
"""Results by arm and staleness, one per seed."""


def train_all(arms: tuple[Arm, ...], staleness: tuple[int, ...], steps: int, seeds: int) -> Grid:
    """Return all trainings. On policy they are one: answers have equal lengths, ratios are 1."""
    starts, grid = [warmed_up(seed) for seed in range(seeds)], Grid()
    console = Console(stderr=True)
    for s in staleness:
        for arm in arms:
            if s == 0 and arm is not arms[0]:
                grid[arm.name, 0] = grid[arms[0].name, 0]
                continue
            grid[arm.name, s] = [trained(start, arm, s, steps, seed) for seed, start in enumerate(starts)]
            console.print(f"{arm.name}, staleness {s}: {[round(t.solved, 1) for t in grid[arm.name, s]]}")
    return grid


def report(grid: Grid, arms: tuple[Arm, ...], staleness: tuple[int, ...], decided: bool) -> Report:
    """Return the table and its bars."""
    worst = staleness[-1]
    rows = []
    for arm in arms:
        cells = [_cell([one.solved for one in grid[arm.name, s]]) for s in staleness]
        metrics = [one.metrics for one in grid[arm.name, worst]]
        means = {name: _mean([m.get(name, 0.0) for m in metrics]) for name in ("mismatch_kl", "clip_share")}
        rows.append((arm.name, *cells, f"{means['mismatch_kl']:.3g}", f"{100 * means['clip_share']:.1f} %"))
    behind = {arm.name: _behind(grid, arm, worst) for arm in (UNCORRECTED, DPPO)}
    power, close = behind[UNCORRECTED.name], behind[DPPO.name]
    say = f"at staleness {worst}, behind on-policy by"
    bars = (
        Bar(f"uncorrected {say} {power:.1f} points, at least {APART:g}", power >= APART if decided else None),
        Bar(f"dppo-tv {say} {close:.1f} points, at most {CLOSE:g}", close <= CLOSE if decided else None),
    )
    figures = {
        f"{name}, {s}": [{"solved": one.solved} | one.metrics for one in found]
        for (name, s), found in grid.items()
    }
    columns = ("loss", *map(str, staleness), f"mismatch KL at {worst}", f"clip share at {worst}")
    return Report("Solved share by staleness", METHOD, columns, tuple(rows), bars, figures)


def _mean(values: list[float]) -> float:
    return mean_and_half_width(values)[0]


def _cell(values: list[float]) -> str:
    mean, half = mean_and_half_width(values)
    return f"{mean:.1f} +- {half:.1f}"


def _behind(grid: Grid, arm: Arm, staleness: int) -> float:
    """Return the points by which an arm is behind the same arm on policy, mean over seeds."""
    pairs = zip(grid[arm.name, 0], grid[arm.name, staleness], strict=True)
    return _mean([fresh.solved - stale.solved for fresh, stale in pairs])


def measure(args: argparse.Namespace) -> Report:
    """Train and report."""
    torch.set_num_threads(1)
    arms = (UNCORRECTED, DPPO) if args.quick else ARMS
    staleness = (0, STALENESS[-1]) if args.quick else STALENESS
    steps, seeds = (60, 2) if args.quick else (args.steps, args.seeds)
    return report(train_all(arms, staleness, steps, seeds), arms, staleness, not args.quick)


def options(parser: argparse.ArgumentParser) -> Any:
    """Add the options of this benchmark."""
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)


if __name__ == "__main__":
    main("off_policy", ABOUT, measure, options=options)
