"""Measure what few bytes cost in held-out loss: sparse rounds beside dense ones at equal tokens.

    python -m benchmarks.sparse [--params N] [--rounds N] [--interval N] [--nodes N] [--seeds N] [--plot FILE]

Nodes are simulated in one process with real gradients, text, sync units, codecs, error feedback, outer
optimizers and the hub's own step; all train at one pace and wait for each other. Bars: at most 0.03 bytes per
parameter, round and direction, and held-out loss within 0.5 % of uncompressed DiLoCo.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import nn

from aedit.async_sgd.rules import OuterConfig, Vector, make_outer
from aedit.edit import find_units
from aedit.edit.units import fragment
from aedit.proto.codecs import Feedback, codec
from benchmarks.kit.paced import layout_of
from benchmarks.kit.processes import in_parallel
from benchmarks.kit.small_llama import llama
from benchmarks.kit.statistics import mean_and_half_width, percent, plus_minus
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.kit.two_domains import held_out_loss
from benchmarks.kit.virtual_hub import Setting, start_model, train_step, warm_up

NUM_LAYERS = 6
MOST_BYTES, CLOSE = 0.03, 0.005
POINTS = 10
"""Evaluations of a run; those on the way see an eighth of the samples."""


# -- what travels


CHUNK, KEPT = 4096, 64
PUBLISHED = "published"
"""SparseLoCo's compression (arXiv:2508.15706): the 64 largest of each 4096, in 2 bits."""


def published(x: Vector) -> Vector:
    """Return what a receiver has of x: the largest as one of two means, split at the mean of all kept."""
    x_CW = np.pad(x, (0, -x.size % CHUNK)).reshape(-1, CHUNK)
    place_Ck = np.argpartition(-np.abs(x_CW), KEPT, axis=1)[:, :KEPT]
    value_Ck = np.take_along_axis(x_CW, place_Ck, 1)
    size_Ck = np.abs(value_Ck)
    high_Ck = size_Ck > size_Ck.mean(1, keepdims=True)
    level_Ck = np.zeros_like(size_Ck)
    for side_Ck in (high_Ck, ~high_Ck):
        num_C1 = np.maximum(side_Ck.sum(1, keepdims=True), 1)
        level_Ck += side_Ck * ((size_Ck * side_Ck).sum(1, keepdims=True) / num_C1)
    out_CW = np.zeros_like(x_CW)
    np.put_along_axis(out_CW, place_Ck, level_Ck * np.sign(value_Ck), axis=1)
    return out_CW.reshape(-1)[: x.size]


def bytes_of(name: str, numel: int) -> float:
    """Return the payload bytes of `numel` numbers; of `published` those of an ideal coding of the places.

    A choice of 64 of 4096 is one of 2^472; then come 2 bits for each and two means in bf16.
    """
    if name == PUBLISHED:
        return numel / CHUNK * (472 + 2 * KEPT + 32) / 8
    return codec(name).num_bytes(numel)


class Wire:
    """One direction of one unit: encodes with error feedback, and decodes.

    decay: the share of the error that is kept for the next round.
    """

    def __init__(self, name: str, numel: int, decay: float) -> None:
        self.name, self.decay = name, decay
        self.residual = np.zeros(numel, np.float32)

    def __call__(self, x: Vector) -> Vector:
        """Return what arrives."""
        self.residual *= np.float32(self.decay)
        if self.name == PUBLISHED:
            self.residual += x
            arrived = published(self.residual)
            self.residual -= arrived
            return arrived
        how = codec(self.name)
        if not how.feedback:
            return how.decode(how.encode(x), x.size, 0, x.size)
        feedback = Feedback(how, self.residual)
        payload = feedback.encode(x)
        feedback.taken(x, payload)
        return how.decode(payload, x.size, 0, x.size)


# -- one run


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A row of the table."""

    name: str
    up: str = "fp32"
    down: str = "fp32"
    parts: int = 1
    """Each round moves one of so many fragments."""
    outer: OuterConfig
    decay: float = 1.0
    """Of the nodes' error feedback."""
    senders: bool = False
    """An element is averaged over the nodes that sent it, as SparseLoCo's code does, not over all."""


NESTEROV = OuterConfig(kind="nesterov", lr=0.7, momentum=0.9)
LESS_MOMENTUM = OuterConfig(kind="nesterov", lr=0.7, momentum=0.8)
FRAGMENTED = OuterConfig(kind="nesterov", lr=1.2, momentum=0.8)
AVERAGE = OuterConfig(kind="average", lr=1.0)
RECIPES = (
    Recipe(name="DiLoCo", outer=NESTEROV),
    Recipe(name="DiLoCo", outer=LESS_MOMENTUM),
    Recipe(name="averaging", outer=AVERAGE),
    Recipe(name="SparseLoCo, every node gets all pushes", up=PUBLISHED, outer=AVERAGE, decay=0.95),
    Recipe(name="SparseLoCo, mean over senders", up=PUBLISHED, outer=AVERAGE, decay=0.95, senders=True),
    Recipe(name="SparseLoCo both ways", up=PUBLISHED, down=PUBLISHED, outer=AVERAGE, decay=0.95),
    Recipe(name="top-k", up="topk", down="topk", outer=AVERAGE),
    Recipe(name="4 bits, 7 fragments", up="e3m0", down="e3m0", parts=7, outer=FRAGMENTED),
    Recipe(name="ternary, 7 fragments", up="ternary", down="ternary", parts=7, outer=FRAGMENTED),
)
REFERENCES = RECIPES[:2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """loss: of what nodes hold at the end, held-out, nats per byte. curve: (round, loss) on the way."""

    loss: float
    curve: list[tuple[int, float]]


class Exchange:
    """A hub and its wires, without network: one round of some units at a time."""

    def __init__(self, recipe: Recipe, numels: Sequence[int], nodes: int, first: Vector) -> None:
        self._recipe, self._outer = recipe, make_outer(recipe.outer)
        stops = np.cumsum(numels)
        self._places = [
            slice(int(stop) - numel, int(stop)) for stop, numel in zip(stops, numels, strict=True)
        ]
        self._up = [[Wire(recipe.up, numel, recipe.decay) for numel in numels] for _ in range(nodes)]
        self._down = [Wire(recipe.down, numel, 0.0) for numel in numels]
        self._state = [self._outer.init(first[at]) for at in self._places]
        self._values = first.copy()
        self.held = first.copy()
        """What every node has."""

    def round(self, local_N: Sequence[Vector], units: Sequence[int]) -> None:
        """Move `units`; each node then goes on from what it has received."""
        for i in units:
            at = self._places[i]
            arrived_ND = np.stack(
                [wires[i](self.held[at] - local[at]) for wires, local in zip(self._up, local_N, strict=True)]
            )
            num = np.maximum((arrived_ND != 0).sum(0), 1) if self._recipe.senders else len(local_N)
            mean_D = (arrived_ND.sum(0) / num).astype(np.float32)
            step_D, self._state[i] = self._outer.update(mean_D, self._state[i])
            self._values[at] -= step_D
            # The distance from what nodes hold has the error of all steps before in it: see `handed_out`.
            self.held[at] += self._down[i](self._values[at] - self.held[at])
            for local in local_N:
                local[at] = self.held[at]


def train(recipe: Recipe, setting: Setting) -> Outcome:
    """Train all nodes with `recipe`; after the last round the other fragments move once more."""
    torch.set_num_threads(1)
    start = warm_up(setting)
    nodes = [start_model(setting, start) for _ in range(setting.nodes)]
    shards = [setting.shard(node) for node in range(setting.nodes)]
    numels = [unit.numel for unit in layout_of(nodes[0][0]).units]
    params_N = [_in_order(model) for model, _ in nodes]
    exchange = Exchange(recipe, numels, setting.nodes, _flat(params_N[0]))
    rounds = setting.steps // setting.every
    curve = []
    for number in range(1, rounds + recipe.parts):
        if number <= rounds:
            for (model, inners), shard in zip(nodes, shards, strict=True):
                for step in range((number - 1) * setting.every, number * setting.every):
                    lr = setting.lr_after(step * setting.nodes)
                    train_step(model, inners, lr, shard.take(setting.batch_size))
        local_N = [_flat(params) for params in params_N]
        exchange.round(local_N, fragment(number, recipe.parts, len(numels)))
        for params, local in zip(params_N, local_N, strict=True):
            _write(params, local)
        if number * POINTS % rounds < POINTS and number < rounds:
            curve.append((number, _loss_of(exchange.held, nodes[0][0], setting, setting.held_out // 8)))
    loss = _loss_of(exchange.held, nodes[0][0], setting, setting.held_out)
    return Outcome(loss, [*curve, (rounds, loss)])


def _in_order(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in the order of the sync units."""
    named = dict(model.named_parameters())
    return [named[name] for unit in find_units(model) for name in unit.names]


def _flat(params: Sequence[nn.Parameter]) -> Vector:
    vector: Vector = torch.cat([p.detach().reshape(-1) for p in params]).numpy()
    return vector


def _write(params: Sequence[nn.Parameter], values: Vector) -> None:
    with torch.no_grad():
        parts = torch.split(torch.from_numpy(values), [p.numel() for p in params])
        for p, part in zip(params, parts, strict=True):
            p.copy_(part.view_as(p))


def _loss_of(held: Vector, model: nn.Module, setting: Setting, samples: int) -> float:
    """Return the held-out loss of what nodes hold; the model is as before afterwards."""
    params = _in_order(model)
    before = _flat(params)
    _write(params, held)
    loss = held_out_loss(model, setting.seq_len, samples)
    _write(params, before)
    return loss


# -- the benchmark


def width_for(params: int) -> int:
    """Return the least width, a multiple of 32, with which a model has at least so many parameters."""
    width = 32
    while sum(p.numel() for p in llama(width, NUM_LAYERS, 8).parameters()) < params:
        width += 32
    return width


def payload_bytes(recipe: Recipe, numels: Sequence[int]) -> tuple[float, float]:
    """Return the bytes per parameter and round, up and down."""
    up, down = (
        sum(bytes_of(name, numel) for numel in numels) / sum(numels) / recipe.parts
        for name in (recipe.up, recipe.down)
    )
    return up, down


def measure(args: argparse.Namespace) -> Report:
    """Train every recipe with every seed; return the table."""
    if args.quick:
        args.params, args.rounds, args.interval, args.nodes, args.seeds = 1, 8, 1, 2, 1
    steps = args.rounds * args.interval
    setting = Setting(
        step_s=(1.0,) * args.nodes,
        warmup_steps=max(1, steps // 8),
        steps=steps,
        every=args.interval,
        hidden_size=width_for(args.params),
        num_layers=NUM_LAYERS,
        held_out=16 if args.quick else 512,
    )
    chosen = [RECIPES[i] for i in args.recipes] if args.recipes else list(RECIPES)
    jobs = list(product(chosen, [replace(setting, seed=seed) for seed in range(args.seeds)]))
    found = in_parallel(train, jobs) if args.parallel else [_shown(*job) for job in jobs]
    rows = {recipe: found[i * args.seeds : (i + 1) * args.seeds] for i, recipe in enumerate(chosen)}
    numels = [unit.numel for unit in layout_of(llama(setting.hidden_size, NUM_LAYERS, 8)).units]
    sizes = {recipe: payload_bytes(recipe, numels) for recipe in chosen}
    best = min(
        (recipe for recipe in chosen if recipe in REFERENCES),
        key=lambda recipe: fmean(one.loss for one in rows[recipe]),
    )
    if args.plot:
        draw(rows, args.plot)
    return Report(
        "few bytes: held-out loss at equal tokens",
        (
            f"{args.nodes} nodes in one process, a Llama of {setting.hidden_size} x {NUM_LAYERS},"
            f" {sum(numels):,} parameters, {args.rounds} rounds of {args.interval} steps after"
            f" {setting.warmup_steps} steps together, {args.seeds} seeds.",
            "Bytes: of payloads, per parameter, round and direction. Loss: nats per byte; beside it what it"
            " is above the better DiLoCo, seed by seed, with half of the 95 % interval.",
        ),
        ("recipe", "outer", "bytes up", "bytes down", "loss", "above DiLoCo, %"),
        tuple(_cells(recipe, rows, sizes[recipe], best) for recipe in chosen),
        () if args.quick else tuple(_bars(rows, sizes, best)),
        {f"{i}": {"recipe": asdict(r), "runs": [asdict(o) for o in rows[r]]} for i, r in enumerate(chosen)},
    )


def _shown(recipe: Recipe, setting: Setting) -> Outcome:
    """Train, and print the result at once: a run may take hours."""
    outcome = train(recipe, setting)
    way = ", ".join(f"{number}: {loss:.4f}" for number, loss in outcome.curve)
    print(f"{recipe.name} ({_named(recipe.outer)}), seed {setting.seed}, loss by round: {way}", flush=True)
    return outcome


Rows = dict[Recipe, list[Outcome]]


def above(rows: Rows, recipe: Recipe, reference: Recipe) -> list[float]:
    """Return by how much `recipe` ends above `reference`, as a share, seed by seed."""
    pairs = zip(rows[recipe], rows[reference], strict=True)
    return [one.loss / other.loss - 1 for one, other in pairs]


def _cells(recipe: Recipe, rows: Rows, sizes: tuple[float, float], best: Recipe) -> tuple[str, ...]:
    losses = [one.loss for one in rows[recipe]]
    return (
        recipe.name,
        _named(recipe.outer),
        *(f"{size:.4f}" for size in sizes),
        plus_minus(losses),
        plus_minus(above(rows, recipe, best), 100, 2, "+"),
    )


def _named(outer: OuterConfig) -> str:
    return f"{outer.kind} {outer.lr:g}" + (f", {outer.momentum:g}" if outer.kind == "nesterov" else "")


def _bars(rows: Rows, sizes: dict[Recipe, tuple[float, float]], best: Recipe) -> list[Bar]:
    bars = []
    for recipe in rows:
        if max(sizes[recipe]) < 0.1:
            cost, _ = mean_and_half_width(above(rows, recipe, best))
            text = (
                f"{recipe.name}: {max(sizes[recipe]):.4f} bytes, bar {MOST_BYTES}; {100 * cost:+.2f} %, bar"
            )
            passed = max(sizes[recipe]) <= MOST_BYTES and cost <= CLOSE
            bars.append(Bar(f"{text} {percent(CLOSE)}", passed))
    return bars


def draw(rows: Rows, path: Path) -> None:
    """Draw the held-out loss on the way, mean over seeds, and what it is above the first recipe's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    first = next(iter(rows))
    for recipe, outcomes in rows.items():
        numbers = [number for number, _ in outcomes[0].curve]
        losses = np.array([[loss for _, loss in one.curve] for one in outcomes]).mean(0)
        base = np.array([[loss for _, loss in one.curve] for one in rows[first]]).mean(0)
        label = f"{recipe.name}, momentum {recipe.outer.momentum:g}" if recipe in REFERENCES else recipe.name
        left.plot(numbers, losses, label=label)
        right.plot(numbers, 100 * (losses / base - 1), label=label)
    left.set(xlabel="round", ylabel="held-out loss, nats per byte")
    right.set(xlabel="round", ylabel="above the first, %")
    left.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", type=int, default=300_000, help="least number of parameters")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--interval", type=int, default=30, help="inner steps of a round")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--recipes", type=int, nargs="*", help="only these rows, counted from 0, in this order"
    )
    parser.add_argument("--parallel", action="store_true", help="one run per core instead of one at a time")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the losses on the way")


if __name__ == "__main__":
    main("sparse", "Held-out loss of rounds of few bytes beside DiLoCo.", measure, options=_options)
