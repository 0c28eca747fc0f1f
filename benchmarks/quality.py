"""Measure what infrequent synchronization costs in held-out loss at equal tokens, and what bad data costs.

Bars: EDiT and A-EDiT within 1 % of `ddp` when the data is clean, and better than DiLoCo when one node's data
is random for the middle fifth of the run. Also draws docs/img/quality.png.
"""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from aedit.async_sgd.rules import Nesterov
from aedit.clock import Turns
from aedit.edit import EditConfig, EverySeconds, LayerSync, MeanExchange, PenaltyConfig, RoundOutcome
from aedit.launch.config import TrainConfig
from aedit.launch.data import Corpus, SampleOrder, batch, evaluation_indices
from aedit.launch.node import loss, lr_at, make_inner, set_lr
from aedit.proto import VirtualTransport
from aedit.proto.transports import MemoryWorld
from benchmarks.kit.processes import ROOT, in_parallel
from benchmarks.kit.small_llama import corpus, inner_step, llama
from benchmarks.kit.statistics import percent, plus_minus
from benchmarks.kit.tables import Bar, Report, main

# -- one training run of four nodes in virtual time: real gradients, the same bits for the same setting


STEP_S = (1.0, 1.0, 1.0, 2.0)
NODES = len(STEP_S)
BAD_NODE = 1
BAD_FROM, BAD_TO = 0.4, 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings common to all methods."""

    seed: int = 0
    bad: bool = False
    steps: int = 1024
    """Per node on average."""
    warmup_steps: int = 256
    """A quarter of the run, as DiLoCo had it (arXiv:2311.08105). With a tenth, local methods end about 3 %
    above `ddp`: so short a run would spend its local phases where the loss still falls steeply."""
    every: int = 16
    """Inner steps between rounds of `edit`; the others' intervals are in the presets' proportion to it."""
    lr: float = 3e-3
    hidden_size: int = 64
    num_layers: int = 2
    seq_len: int = 64
    batch_size: int = 8
    held_out: int = 1852
    """Samples of the last evaluation; those on the way see an eighth."""
    points: int = 20
    """Evaluations on the way, at most."""


@dataclass(frozen=True, slots=True)
class Method:
    """Preset at the size of this benchmark."""

    config: Callable[[Setting], EditConfig]
    outer: Nesterov


def _diloco(s: Setting) -> EditConfig:
    plain = PenaltyConfig(weights="uniform", detector="off", clip=None)
    return EditConfig(every=4 * s.every, units="model", warmup_steps=s.warmup_steps, penalty=plain)


def _a_edit(s: Setting) -> EditConfig:
    steps_per_s = sum(1 / step_s for step_s in STEP_S)
    penalty = PenaltyConfig(step_weight=0.5)
    every_s = NODES * s.every / steps_per_s
    return EditConfig(schedule="seconds", every=every_s, warmup_steps=s.warmup_steps, penalty=penalty)


METHODS = {
    "ddp": Method(lambda s: EditConfig(warmup_steps="all"), Nesterov()),
    "diloco": Method(_diloco, Nesterov(0.7, 0.9)),
    "edit": Method(lambda s: EditConfig(every=s.every, warmup_steps=s.warmup_steps), Nesterov(0.8, 0.85)),
    "a-edit": Method(_a_edit, Nesterov(0.8, 0.85)),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run.

    loss: held-out, nats per byte, at the end. tokens: of all nodes. curve: (tokens, loss on a part of the
    held-out text) during the run. waiting: share of virtual time.
    """

    loss: float
    tokens: int
    curve: list[tuple[int, float]]
    waiting: float
    rounds: int
    distrusted: list[tuple[int, int]]
    """(round, node) of every unit that a node distrusted of itself."""


@dataclass(slots=True)
class _Run:
    """State that the nodes of one run share; only the node whose turn it is uses it."""

    setting: Setting
    method: Method
    turns: Turns = field(default_factory=lambda: Turns(NODES))
    world: MemoryWorld = field(default_factory=lambda: MemoryWorld(NODES, timeout_s=60.0))
    steps: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    distrusted: list[tuple[int, int]] = field(default_factory=list)
    waited_s: float = 0.0
    rounds: int = 0

    def note_round(self, node: int, outcome: RoundOutcome) -> None:
        self.rounds = max(self.rounds, outcome.round.id)
        self.distrusted.extend((outcome.round.id, node) for _ in outcome.distrusted)

    @property
    def data(self) -> Corpus:
        return corpus(self.setting.seq_len)

    @property
    def tokens(self) -> int:
        return self.steps * self.setting.batch_size * self.setting.seq_len


def train(method: str, setting: Setting) -> Outcome:
    """Run one training. Every method takes the same number of steps over all nodes."""
    return train_method(METHODS[method], setting)


def train_method(method: Method, setting: Setting) -> Outcome:
    run = _Run(setting, method)
    model = llama(setting.hidden_size, setting.num_layers, setting.seq_len, setting.seed)
    models = [copy.deepcopy(model) for _ in range(NODES)]
    with ThreadPoolExecutor(NODES) as threads:
        list(threads.map(_node, [run] * NODES, range(NODES), models))
    final = held_out_loss(models[0], run.data, setting.held_out)
    waiting = run.waited_s / sum(clock() for clock in run.turns.clocks)
    return Outcome(final, run.tokens, run.curve, waiting, run.rounds, run.distrusted)


def held_out_loss(model: nn.Module, data: Corpus, num_samples: int) -> float:
    """Return the mean over the first tokens of `num_samples` samples spread over all held-out documents."""
    indices = evaluation_indices(len(data.held_out), num_samples)
    parts = [indices[i : i + 64] for i in range(0, len(indices), 64)]
    with torch.no_grad():
        sums = [float(loss(model, batch(data.held_out, part), "fp32")) * len(part) for part in parts]
    return sum(sums) / len(indices)


def _node(run: _Run, node: int, model: nn.Module) -> None:
    transport = VirtualTransport(run.world.node(node), run.turns)
    run.turns.begin(node)
    try:
        sync = _sync(run, node, model, transport)
        with sync:
            _train(run, node, sync)
        run.waited_s += sync.waited_s
    finally:
        transport.close()
        run.turns.leave(node)


def _sync(run: _Run, node: int, model: nn.Module, transport: VirtualTransport) -> LayerSync:
    config = run.method.config(run.setting)
    exchange = MeanExchange(transport, outer=run.method.outer, penalty=config.penalty)
    timed = config.schedule == "seconds"
    schedule = EverySeconds(config.every, run.turns.clocks[node]) if timed else None
    inner = make_inner(model, _train_config(run.setting))
    sync = LayerSync.of(model, inner, exchange=exchange, schedule=schedule, config=config)
    sync.clock = run.turns.clocks[node]
    sync.on_round = lambda outcome, _: run.note_round(node, outcome)
    return sync


def _train(run: _Run, node: int, sync: LayerSync) -> None:
    setting = run.setting
    order = SampleOrder(len(run.data.train), setting.seed, node, NODES)
    noise = torch.Generator().manual_seed(1000 + setting.seed)
    while _goes_on(run, sync):
        progress = _progress(run, sync)
        set_lr(sync.inner, lr_at(progress, _train_config(setting)))
        samples = batch(run.data.train, order.take(setting.batch_size))
        if setting.bad and node == BAD_NODE and BAD_FROM <= progress < BAD_TO:
            samples = torch.randint(0, 256, samples.shape, generator=noise)
        _step(sync, samples)
        run.steps += 1
        run.turns.step(node, STEP_S[node])
        sync.step()
        if node == 0:
            _evaluate(run, sync)


def _step(sync: LayerSync, samples: Tensor) -> None:
    inner_step(sync.model, sync.inner, samples, before_clip=sync.average_gradients)


def _goes_on(run: _Run, sync: LayerSync) -> bool:
    if isinstance(sync.schedule, EverySeconds):
        return run.steps < NODES * run.setting.steps
    return sync.steps < run.setting.steps


def _progress(run: _Run, sync: LayerSync) -> float:
    """Return the share of the run that is done; equal on all nodes wherever they step together."""
    if isinstance(sync.schedule, EverySeconds) and not sync.warming_up:
        return run.steps / (NODES * run.setting.steps)
    return sync.steps / run.setting.steps


def _evaluate(run: _Run, sync: LayerSync) -> None:
    """Evaluate right after a landing, when the nodes' parameters are closest."""
    due = len(run.curve) * NODES * run.setting.steps <= run.steps * run.setting.points
    if due and not sync.in_flight:
        num_samples = max(1, run.setting.held_out // 8)
        run.curve.append((run.tokens, held_out_loss(sync.model, run.data, num_samples)))


def _train_config(setting: Setting) -> TrainConfig:
    return TrainConfig(lr=setting.lr)


# -- measurements, tables and bars


PLOT = ROOT / "docs" / "img" / "quality.png"
FULL, SEEDS = Setting(), 3
QUICK = Setting(steps=8, warmup_steps=2, every=2, hidden_size=32, num_layers=1, held_out=16)
CLOSE = 0.01

Results = dict[tuple[str, bool], list[Outcome]]


def measure(quick: bool) -> Report:
    setting, seeds = (QUICK, range(2)) if quick else (FULL, range(SEEDS))
    results = run_all(setting, seeds)
    if not quick:
        draw(results, PLOT)
    return Report(
        "held-out loss at equal tokens, 4 nodes",
        _method_lines(setting, len(seeds)),
        ("method", "clean", "to ddp", "one node bad", "to diloco", "to clean", "waiting"),
        tuple(_row(method, results) for method in METHODS),
        _bars(results, quick),
        {
            f"{method}{'/bad' if bad else ''}": [asdict(o) for o in outcomes]
            for (method, bad), outcomes in results.items()
        },
    )


def run_all(setting: Setting, seeds: Sequence[int], methods: Sequence[str] = tuple(METHODS)) -> Results:
    """Run every method, clean and with bad data, for every seed."""
    cases = list(product(methods, (False, True)))
    jobs = [(method, replace(setting, bad=bad, seed=seed)) for (method, bad), seed in product(cases, seeds)]
    outcomes, n = in_parallel(train, jobs), len(seeds)
    return {case: outcomes[i * n : (i + 1) * n] for i, case in enumerate(cases)}


def excess(results: Results, method: str, other: str, bad: bool) -> list[float]:
    """Return by how much `method` ends above `other`, as a share, seed by seed."""
    return _excess(results[method, bad], results[other, bad])


def harm(results: Results, method: str) -> list[float]:
    """Return by how much `method` ends above its clean run when one node's data is bad for a while."""
    return _excess(results[method, True], results[method, False])


def _excess(mine: Sequence[Outcome], others: Sequence[Outcome]) -> list[float]:
    return [m.loss / o.loss - 1 for m, o in zip(mine, others, strict=True)]


def draw(results: Results, path: Path) -> None:
    """Draw loss against tokens, mean over seeds, one panel per kind of data."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, bad in zip(panels, (False, True), strict=True):
        for method in METHODS:
            curves = [outcome.curve for outcome in results[method, bad]]
            tokens = [fmean(point[0] for point in points) / 1e6 for points in zip(*curves, strict=False)]
            losses = [fmean(point[1] for point in points) for points in zip(*curves, strict=False)]
            panel.plot(tokens, losses, label=method)
        panel.set(title="one node's data random in the shaded part" if bad else "clean data")
        panel.set(xlabel="tokens of all nodes, millions", ylim=(losses[-1] * 0.95, losses[-1] * 1.5))
        if bad:
            panel.axvspan(0.4 * tokens[-1], 0.6 * tokens[-1], alpha=0.1, color="black")
    panels[0].set(ylabel="held-out loss, nats per byte")
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _method_lines(setting: Setting, seeds: int) -> tuple[str, str]:
    tokens = 4 * setting.steps * setting.batch_size * setting.seq_len
    return (
        f"Llama of {setting.hidden_size} x {setting.num_layers}, bytes of the stdlib, {tokens / 1e6:.2f} M"
        f" tokens, inner lr {setting.lr:g}, {setting.warmup_steps} warm-up steps, {seeds} seeds.",
        f"Rounds: edit {setting.every}, diloco {4 * setting.every} steps; a-edit {setting.every} on average"
        " at speeds 1, 1, 1, 0.5 (virtual clock). 95 % intervals.",
    )


def _row(method: str, results: Results) -> tuple[str, ...]:
    clean, bad = results[method, False], results[method, True]
    waiting = fmean(outcome.waiting for outcome in clean)
    return (
        method,
        plus_minus([outcome.loss for outcome in clean]),
        plus_minus(excess(results, method, "ddp", False), 100, 2, "+") + " %",
        plus_minus([outcome.loss for outcome in bad]),
        plus_minus(excess(results, method, "diloco", True), 100, 2, "+") + " %",
        plus_minus(harm(results, method), 100, 2, "+") + " %",
        percent(waiting),
    )


def _bars(results: Results, quick: bool) -> tuple[Bar, ...]:
    bars = []
    for method in ("edit", "a-edit"):
        off, better = (
            fmean(excess(results, method, "ddp", False)),
            fmean(excess(results, method, "diloco", True)),
        )
        text = f"{method}: clean {100 * off:+.2f} % to ddp, bar {100 * CLOSE:+.0f} %"
        bars.append(Bar(text, None if quick else off <= CLOSE))
        text = f"{method}: with bad data {100 * better:+.2f} % to diloco, bar below 0 %"
        bars.append(Bar(text, None if quick else better < 0))
    return tuple(bars)


if __name__ == "__main__":
    main("quality", "Held-out loss at equal tokens, clean and with one node's data bad for a while.", measure)
