"""Measure codec x held-out loss x bytes at equal tokens, in virtual time with a real hub.

Long enough for error feedback to send every element several times: with `topk` a round moves 4.7 % of them.
One anchor per round, so that as many bytes come down as go up.
"""

from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, stdev

from aedit.async_sgd.rules import Codec, HubConfig, OuterConfig, PenaltyConfig
from aedit.proto.codecs import codec
from benchmarks.bandwidth_parts.coarse import coarse
from benchmarks.kit.hubs import layout_of
from benchmarks.kit.processes import in_parallel
from benchmarks.kit.small_llama import llama
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report
from benchmarks.kit.virtual_hub import Method, Setting, train_apart, warm_up

FULL = Setting(steps=1024, warmup_steps=128)
QUICK = Setting(steps=8, warmup_steps=2, every=2, hidden_size=32, num_layers=1, held_out=16)
NESTEROV = OuterConfig(kind="nesterov", lr=0.7, momentum=0.9)
AVERAGE = OuterConfig(kind="average", lr=1.0)
"""Outer optimizer of SparseLoCo (arXiv:2508.15706): error feedback takes the place of its momentum."""
CLOSE, MOST_BYTES = 0.005, 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table."""

    up: Codec
    down: Codec
    outer: OuterConfig = AVERAGE


EXACT = Case("fp32", "fp32")
BOTH = Case("topk", "topk")
CASES = (
    Case("fp32", "fp32", NESTEROV),
    Case("topk", "topk", NESTEROV),
    EXACT,
    Case("int8", "int8"),
    Case("e3m0", "e3m0"),
    Case("topk", "fp32"),
    BOTH,
)


@dataclass(frozen=True, slots=True)
class Found:
    """Result of one run."""

    loss: float
    refused: int
    """Pushes that the hub did not take or did not count."""


def report(quick: bool, seeds: int) -> Report:
    """Train every case with every seed; return the table."""
    setting = QUICK if quick else FULL
    jobs = list(product(CASES, [replace(setting, seed=seed) for seed in range(seeds)]))
    found = in_parallel(train, jobs)
    rows = {case: found[i * seeds : (i + 1) * seeds] for i, case in enumerate(CASES)}
    sizes = {case: _bytes(case, setting) for case in CASES}
    bars = _bars(rows, sizes, quick)
    return Report(
        "codec, held-out loss and bytes at equal tokens",
        (
            f"{setting.nodes} unequal nodes in virtual time, a real hub, quorum of all, a Llama of width"
            f" {setting.hidden_size}, {setting.steps} steps per node, a round every {setting.every},"
            f" {seeds} seeds.",
            "Bytes: of the payloads, per parameter and round. Loss: nats per byte; beside it what it is above"
            " fp32's with the same outer optimizer, seed by seed, and the standard deviation of that.",
        ),
        ("outer", "up", "down", "bytes up", "bytes down", "loss", "above fp32", "+-", "refused"),
        tuple(_cells(case, rows, sizes[case]) for case in CASES),
        bars,
        {f"{case.outer.kind}/{case.up}/{case.down}": [one.loss for one in rows[case]] for case in CASES},
    )


def train(case: Case, setting: Setting) -> Found:
    """Train nodes of unequal pace with a hub that waits for all of them."""
    hub = HubConfig(weights="uniform", quorum="all", codec=case.up, codec_down=case.down)
    tamper = coarse(setting.nodes, case.up)
    method = Method(hub=hub, outer=case.outer, penalty=PenaltyConfig(clip=None), tamper=tamper)
    outcome = train_apart(setting, warm_up(setting), method)
    return Found(outcome.loss, len(outcome.tally.refused) + len(outcome.tally.ignored))


def costs(rows: dict[Case, list[Found]], case: Case) -> list[float]:
    """Return the loss above fp32's under the same outer optimizer, as a share of it, for each seed."""
    exact = rows[replace(EXACT, outer=case.outer)]
    return [one.loss / other.loss - 1 for one, other in zip(rows[case], exact, strict=True)]


def _bytes(case: Case, setting: Setting) -> tuple[float, float]:
    """Return the bytes per parameter of one push and of one anchor."""
    model = llama(setting.hidden_size, setting.num_layers, setting.seq_len)
    numels = [unit.numel for unit in layout_of(model).units]
    up, down = (sum(map(codec(name).num_bytes, numels)) / sum(numels) for name in (case.up, case.down))
    return up, down


def _cells(case: Case, rows: dict[Case, list[Found]], sizes: tuple[float, float]) -> tuple[str, ...]:
    above = costs(rows, case)
    spread = f"{100 * stdev(above):.2f} %" if len(above) > 1 else ""
    return (
        case.outer.kind,
        case.up,
        case.down,
        f"{sizes[0]:.4f}",
        f"{sizes[1]:.4f}",
        f"{fmean(one.loss for one in rows[case]):.4f}",
        f"{100 * fmean(above):+.2f} %",
        spread,
        str(sum(one.refused for one in rows[case])),
    )


def _bars(
    rows: dict[Case, list[Found]], sizes: dict[Case, tuple[float, float]], quick: bool
) -> tuple[Bar, ...]:
    most, cost = max(sizes[BOTH]), fmean(costs(rows, BOTH))
    return (
        Bar(f"topk sends {most:.4f} bytes per parameter and direction, bar {MOST_BYTES}", most <= MOST_BYTES),
        Bar(
            f"held-out loss with topk both ways is {100 * cost:+.2f} % of fp32's under the same outer"
            f" optimizer, bar {percent(CLOSE)}",
            None if quick else cost <= CLOSE,
        ),
    )
