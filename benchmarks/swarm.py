"""Compare a swarm with hivemind's averaging: the same model, data, peers and time, in real processes.

Four unequal peers on this machine train by real computation. `swarm`: parts with owners. `averages`: the
same training, the peers average by hivemind (`swarm.exchange = "hivemind"`), and train on meanwhile or wait.
`Optimizer`: `hivemind.Optimizer` with local updates and no delayed averaging; a round after as many samples
as the swarm takes in an interval. `OpenDiLoCo`: the same with an outer Nesterov step on each average.
Bars: the swarm's trainers wait at most 1 % of the time, and its loss is at most 1 % above the best of the
others at equal tokens and at equal time.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.kit.processes import run_jobs
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.swarm_parts import traffic
from benchmarks.swarm_parts.optimizer_peer import Job
from benchmarks.swarm_parts.outcome import Outcome, PeerOutcome
from benchmarks.swarm_parts.runs import AVERAGES, PARTS, Race, run, toml

FULL = Race()
QUICK = Race(seconds=40.0, every_s=10.0, slowdown=(1.0, 2.0), hidden_size=32, layers=2, eval_samples=8)
OURS, OVERLAPPED, WAITING = "swarm", "averages, overlapped", "averages, waiting"
OPTIMIZER, OPENDILOCO = "Optimizer", "OpenDiLoCo"
STALL_BAR, LOSS_BAR = 0.01, 0.01


def measure(quick: bool) -> Report | str:
    if reason := traffic.why_not():
        return reason
    race = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as directory:
        outcomes = run_all(race, Path(directory))
    return Report(
        f"{len(race.slowdown)} unequal peers",
        _method_lines(race),
        (
            "method",
            "tokens",
            "waiting",
            "worst peer",
            "sent per peer",
            "loss, equal tokens",
            "loss, equal time",
            "rounds",
            "failed",
            "averages differ",
        ),
        tuple(_row(name, outcome, outcomes, race) for name, outcome in outcomes.items()),
        bars(outcomes, race, quick),
        {name: asdict(outcome) for name, outcome in outcomes.items()},
    )


def run_all(race: Race, directory: Path) -> dict[str, Outcome]:
    """Train in every way, one after the other."""
    ours = run(race, directory, "swarm", PARTS)
    return {
        OURS: ours,
        OVERLAPPED: run(race, directory, "averages", AVERAGES),
        WAITING: run(race, directory, "waiting", AVERAGES, landing="forward"),
        OPTIMIZER: optimizer(race, directory, ours, "optimizer", steps_outside=False),
        OPENDILOCO: optimizer(race, directory, ours, "opendiloco", steps_outside=True),
    }


def optimizer(race: Race, directory: Path, ours: Outcome, name: str, *, steps_outside: bool) -> Outcome:
    """Train with `hivemind.Optimizer`; an epoch has the samples of one of our intervals."""
    samples = ours.tokens / race.seq_len / race.seconds * race.every_s
    config = toml(race, directory, name, "")
    jobs = [
        Job(
            name=f"local-{i}",
            toml=str(config),
            data=str(directory / "swarm" / "data"),
            introduction=str(directory / f"{name}_introduction"),
            peers=len(race.slowdown),
            slowdown=slowdown,
            target_batch_size=max(1, round(samples)),
            steps_outside=steps_outside,
        )
        for i, slowdown in enumerate(race.slowdown)
    ]
    with traffic.Traffic() as counted:
        told = run_jobs("benchmarks.swarm_parts.optimizer_peer", jobs)
    return Outcome(tuple(PeerOutcome(**one) for one in told), tuple(counted.per_peer(len(jobs))))


def equal_tokens(outcomes: Mapping[str, Outcome]) -> float:
    """Return the tokens up to which every way was evaluated."""
    return min(outcome.curve[-1][1] for outcome in outcomes.values())


def bars(outcomes: Mapping[str, Outcome], race: Race, quick: bool) -> tuple[Bar, ...]:
    """Return the bars of the swarm's waiting and of its loss to the best of the others."""
    ours, others = outcomes[OURS], [outcome for name, outcome in outcomes.items() if name != OURS]
    tokens = equal_tokens(outcomes)
    text = f"swarm: trainers wait {percent(ours.stall, 2)} of the time, bar {percent(STALL_BAR, 0)}"
    found = [Bar(text, None if quick else ours.stall <= STALL_BAR)]
    pairs = {
        "equal tokens": (ours.loss_at_tokens(tokens), min(each.loss_at_tokens(tokens) for each in others)),
        "equal time": (
            ours.loss_at_time(race.seconds),
            min(each.loss_at_time(race.seconds) for each in others),
        ),
    }
    for name, (mine, best) in pairs.items():
        over = mine / best - 1
        text = f"swarm: loss at {name} {100 * over:+.1f} % to the best other, bar {100 * LOSS_BAR:+.0f} %"
        found.append(Bar(text, None if quick else over <= LOSS_BAR))
    return tuple(found)


def _method_lines(race: Race) -> tuple[str, str]:
    return (
        f"Llama of {race.hidden_size} x {race.layers}, bytes of the stdlib, steps slowed down by"
        f" {json.dumps(list(race.slowdown))}, {race.seconds:g} s, rounds of {race.every_s:g} s, lr"
        f" {race.lr:g} constant, Nesterov outside but for Optimizer, which averages only.",
        "Waiting: of the trainer, up to half an interval before the end. Sent: TCP bytes to other peers;"
        " the swarm sends bf16 and journals to followers, hivemind fp32. Held-out loss of peer 0.",
    )


def _row(name: str, outcome: Outcome, outcomes: Mapping[str, Outcome], race: Race) -> tuple[str, ...]:
    megabytes = sum(outcome.sent) / len(outcome.sent) / 1e6
    return (
        name,
        f"{outcome.tokens / 1e6:.3f} M",
        percent(outcome.stall, 2),
        percent(outcome.worst_stall, 2),
        f"{megabytes:.1f} MB",
        f"{outcome.loss_at_tokens(equal_tokens(outcomes)):.4f}",
        f"{outcome.loss_at_time(race.seconds):.4f}",
        str(sum(peer.rounds for peer in outcome.peers)),
        str(sum(peer.failed for peer in outcome.peers)),
        "-" if outcome.differing is None else str(outcome.differing),
    )


if __name__ == "__main__":
    main("swarm", "A swarm, and peers that average by hivemind: waiting, bytes and held-out loss.", measure)
