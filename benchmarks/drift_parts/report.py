"""Report what a policy's drift cost each drafter, as tables and bars."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

from benchmarks.drift_parts.judge import ARM, DEPTH, Checkpoint
from benchmarks.drift_parts.run import HARVEST, IDLE_SHARE, Size
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report

SMALL_KL, LARGE_KL, FAR_KL = 0.1, 0.3, 1.0
NO_HARM, OVER_STATIC, OVER_CONTROL, RECOVERY = 0.98, 1.2, 1.1, 0.75
NAMES = ("static", "idle-trained", "control", "oracle", "suffix")


def report(seen: Sequence[Checkpoint], size: Size) -> Report:
    """Return a row for each checkpoint, and the bars over all of them."""
    shown = f"{size.groups} x {size.samples} rollouts of {size.most_new} tokens"
    return Report(
        name=f"Tokens per step at {ARM}, T = 1, as the policy moves",
        method=(
            f"Steps of {shown}; idle {percent(IDLE_SHARE, 0)} of a step, {HARVEST} of it used.",
            "Same prompts and noise for all. Recovery: (idle-trained - static) / (oracle - static).",
        ),
        columns=(
            "step",
            "KL",
            "entropy",
            *NAMES,
            "/ static",
            "/ control",
            "recovery",
            "published",
            "refused",
            "trainer s",
        ),
        rows=tuple(_row(one) for one in seen),
        bars=tuple(_bars(seen)),
        figures={"checkpoints": [asdict(one) for one in seen]},
    )


def depths(seen: Sequence[Checkpoint]) -> Report:
    """Return the acceptance by depth, for the drafters with drafts of one depth."""
    rows = [
        (f"{one.step} {name}", *_by_depth(standing.accepted_D, standing.overlap_D))
        for one in seen
        for name, standing in one.drafters.items()
        if standing.accepted_D
    ]
    numbers = range(1, DEPTH + 1)
    return Report(
        name="By depth, of the drafts that were right up to there",
        method=(
            "accepted: as the engine saw it. overlap: mean sum over tokens of min(p, q), without chance.",
            f"{sum(one.unlike for one in seen)} rollouts were not the same with every drafter.",
        ),
        columns=(
            "step",
            *(f"accepted {d}" for d in numbers),
            f"{DEPTH} / 1",
            *(f"overlap {d}" for d in numbers),
        ),
        rows=tuple(rows),
        bars=(),
        figures={},
    )


def over_static(seen: Checkpoint) -> float:
    return _tokens(seen, "idle-trained") / _tokens(seen, "static")


def over_control(seen: Checkpoint) -> float:
    return _tokens(seen, "idle-trained") / _tokens(seen, "control")


def recovery(seen: Checkpoint) -> float:
    """Return the recovered share of the loss; NaN where the oracle is no better than the static drafter."""
    lost = _tokens(seen, "oracle") - _tokens(seen, "static")
    return (_tokens(seen, "idle-trained") - _tokens(seen, "static")) / lost if lost > 0 else math.nan


def _tokens(seen: Checkpoint, name: str) -> float:
    return seen.drafters[name].tokens_per_step


def _row(one: Checkpoint) -> tuple[str, ...]:
    return (
        str(one.step),
        f"{one.kl_nats:.3f}",
        f"{one.entropy_nats:.3f}",
        *(f"{_tokens(one, name):.2f}" for name in NAMES),
        f"{over_static(one):.2f}",
        f"{over_control(one):.2f}",
        f"{recovery(one):.2f}",
        str(one.gate.published),
        str(one.gate.refused),
        f"{one.trainer_s:.1f}",
    )


def _by_depth(accepted_D: Sequence[float], overlap_D: Sequence[float]) -> list[str]:
    ratio = accepted_D[-1] / accepted_D[0] if accepted_D[0] else math.nan
    return [f"{x:.2f}" for x in (*accepted_D, ratio, *overlap_D)]


def _bars(seen: Sequence[Checkpoint]) -> list[Bar]:
    near = [one for one in seen if one.kl_nats <= SMALL_KL and one.step]
    far = [one for one in seen if one.kl_nats >= LARGE_KL]
    reach = max(one.kl_nats for one in seen)
    return [
        Bar(f"the policy moved {reach:.2f} nats per token, wanted {FAR_KL}", reach >= FAR_KL),
        _bar(near, over_static, NO_HARM, f"KL <= {SMALL_KL}: idle-trained / static"),
        _bar(far, over_static, OVER_STATIC, f"KL >= {LARGE_KL}: idle-trained / static"),
        _bar(far, over_control, OVER_CONTROL, f"KL >= {LARGE_KL}: idle-trained / control"),
        _bar(far, recovery, RECOVERY, f"KL >= {LARGE_KL}: recovery"),
    ]


def _bar(seen: Sequence[Checkpoint], of: Callable[[Checkpoint], float], least: float, text: str) -> Bar:
    """Return a bar that all checkpoints must reach; its text has the lowest value."""
    if not seen:
        return Bar(f"{text}: no checkpoint there, wanted {least}", None)
    worst = min(seen, key=of)
    value = of(worst)
    where = f"at KL {worst.kl_nats:.2f}, the least of {len(seen)}"
    return Bar(f"{text} {value:.2f}, wanted {least} ({where})", value >= least)
