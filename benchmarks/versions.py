"""Measure policy versions: their bytes, their way over a thin wire, and the pauses of an engine.

    python -m benchmarks.versions [--only bytes wire pauses] [--steps 33] [--size 10m] [--minutes M] [--quick]
        [--reward arithmetic|letters] [--max-tokens N]

Three parts: the bytes of a transfer at three learning rates, to a receiver
that is 1 to 32 versions behind; the time until an engine behind 20 Mbit/s and 80 ms uses a new version; and
the pauses of an engine whose weights change while it generates. The versions are those of GRPO steps on
scratchpad arithmetic, as in `benchmarks.rl_speed`; the policy is trained first if it does not exist. One
that has trained for minutes only solves nothing: `--reward letters` counts a letter, which each text has.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from aedit.proto.versions import Patterns, patch, patterns
from aedit.spec_rollout.engine import Engine, EngineLimits
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling
from aedit.spec_rollout.server import EngineHost
from benchmarks.drift import Mover, policy_gradient
from benchmarks.drift import reward as letters
from benchmarks.kit import tun_link
from benchmarks.kit.statistics import median, percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.policies import ROOT, Policy, load, new_model
from benchmarks.policies import Size as PolicySize
from benchmarks.programs import version_wire
from benchmarks.programs.version_wire import Arrival
from benchmarks.rl_speed import FULL, QUICK, Node, Size, Spent, deal, rewarded

# -- versions of a policy that learns by reinforcement, as bit patterns


Reward = Callable[[Rollout], float]
MOST_BATCHES = 8
"""Batches per version, beyond which a policy that learns nothing is an error."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Consecutive versions of a run with one learning rate, each with all parameters in one row."""

    lr: float
    versions: Sequence[Patterns]


def train(size: Size, lr: float, steps: int, root: Path, reward: Reward = rewarded) -> Trained:
    """Take steps of reinforcement learning and return the versions before and after each, in bf16."""
    model = load(size.policy, root)
    node, mover, number = Node(model, size, None), Mover(model, lr), 0
    versions = [weights(model)]
    while len(versions) <= steps:
        lessons = policy_gradient(node.generate(deal(size, 0, number, 0), Spent()), reward)
        number += 1
        if number > MOST_BATCHES * steps:
            raise RuntimeError(f"{number} batches gave {len(versions) - 1} of {steps} policy versions")
        if not lessons:
            continue  # all groups were without signal: no step, and no version
        mover.learn(lessons)
        node.follow(number, Spent())
        versions.append(weights(model))
    return Trained(lr, versions)


def weights(model: torch.nn.Module) -> Patterns:
    """Return all parameters in one row, in bf16; tied ones once."""
    return patterns(np.concatenate([p.detach().reshape(-1).numpy() for p in model.parameters()]), "bf16")


# -- bytes of a policy version, by how many versions the receiver is behind


BEHIND = (1, 4, 16, 32)
"""Versions between the receiver's and the one that is sent."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Transfers of one run. By the number of versions behind: one figure for each pair of versions."""

    lr: float
    changed: Mapping[int, tuple[float, ...]]
    """Shares of elements that differ."""
    sent: Mapping[int, tuple[float, ...]]
    """Bytes sent, as a share of the values in bf16."""
    whole: float
    """The same without a base."""
    encode_s: float
    """Seconds to encode 100 million elements, one version apart."""
    decode_s: float


def measure_bytes(trained: Trained, most_pairs: int = 8) -> Sizes:
    """Encode and decode transfers between versions, at most so many pairs for each distance."""
    changed, sent = {}, {}
    encode_s: list[float] = []
    decode_s: list[float] = []
    for apart in BEHIND:
        pairs = list(zip(trained.versions, trained.versions[apart:], strict=False))[-most_pairs:]
        if not pairs:
            continue
        made = [_transfer(base, head) for base, head in pairs]
        changed[apart] = tuple(float(np.mean(base != head)) for base, head in pairs)
        sent[apart] = tuple(each.share for each in made)
        if apart == BEHIND[0]:
            encode_s, decode_s = [each.encode_s for each in made], [each.decode_s for each in made]
    last = trained.versions[-1]
    whole = len(patch.encode_transfer(last)[0]) / last.nbytes
    return Sizes(trained.lr, changed, sent, whole, median(encode_s), median(decode_s))


@dataclass(frozen=True, slots=True)
class _Made:
    share: float
    encode_s: float
    decode_s: float


def _transfer(base: Patterns, head: Patterns) -> _Made:
    """Encode, decode and compare. Seconds are processor time for 100 million elements."""
    began_s = time.process_time()
    data, needs_base = patch.encode_transfer(head, base)
    encoded_s = time.process_time()
    out = np.empty_like(head)
    patch.decode_transfer(memoryview(data), base if needs_base else None, out)
    decoded_s = time.process_time()
    if not np.array_equal(out, head):
        raise RuntimeError("a transfer has not restored its version")
    scale = 1e8 / head.size
    return _Made(len(data) / head.nbytes, scale * (encoded_s - began_s), scale * (decoded_s - encoded_s))


# -- pauses of an engine whose weights change while it generates, beside its usual steps


Way = Literal["no new weights", "at once", "recompute", "finish"]
WAYS: tuple[Way, ...] = get_args(Way)
LINE = "policy"
LIMIT_S = 600.0
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Settings: samples at a time, tokens of prompt and answer, steps between versions, versions."""

    rows: int = 4
    prompt: int = 64
    answer: int = 400
    steps: int = 110
    versions: int = 4
    prefill_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between the beginnings of two steps, while versions change in one way."""

    way: Way
    gaps_s: tuple[float, ...]
    starts_s: tuple[float, ...]
    """Those of the steps in which a new sample started: a step and the computation of a prompt."""
    silent_s: float
    """Longest time without a token of any sample."""

    @property
    def start_s(self) -> float:
        """Return the median of the steps that start a sample."""
        return float(np.median(self.starts_s))

    def of(self, quantile: float) -> float:
        """Return a quantile."""
        return float(np.quantile(self.gaps_s, quantile))


class Counter:
    """Receiver that notes when tokens come, and starts a new sample after the end so that rows stay busy."""

    def __init__(self, steps: "Steps", again: Callable[["Counter"], object]) -> None:
        self._steps, self._again = steps, again

    def tokens(self, rollout: Rollout, start: int) -> None:
        """Note the time, and the step if these are the first tokens of the sample."""
        self._steps.tokens_s.append(time.monotonic())
        if start == 0:
            self._steps.starts.append(len(self._steps.times_s) - 1)

    def ended(self, rollout: Rollout) -> None:
        """Start again."""
        if rollout.finish_reason != "abort":
            self._again(self)

    def failed(self, error: Exception) -> None:
        """Ignore the end of the host."""


class Steps:
    """Times of the steps of a line; lets the benchmark wait for a number of them."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.tokens_s: list[float] = []
        """Times at which tokens of a sample came."""
        self.starts: list[int] = []
        """Number of the step in which each sample got its first token."""
        self._todo: list[Callable[[], object]] = []
        self._changed = threading.Condition()

    def __call__(self) -> None:
        """Note that a step begins."""
        with self._changed:
            todo, self._todo = self._todo, []
            self.times_s.append(time.monotonic())
            self._changed.notify_all()
        for call in todo:
            call()

    def then(self, call: Callable[[], object]) -> None:
        """Let the engine's thread call this before the next step."""
        with self._changed:
            self._todo.append(call)

    def wait(self, more: int) -> None:
        """Wait until so many further steps have begun."""
        with self._changed:
            wanted = len(self.times_s) + more
            if not self._changed.wait_for(lambda: len(self.times_s) >= wanted, LIMIT_S):
                raise TimeoutError(f"{more} steps took more than {LIMIT_S:g} s")


def measure_pauses(model: PreTrainedModel, way: Way, amount: Amount) -> Pauses:
    """Generate all the time while the weights change every so many steps."""
    model.train(False)
    steps, host = Steps(), EngineHost()
    limits = EngineLimits(prefill_tokens=amount.prefill_tokens, prefix_cache_bytes=0)
    engine = Engine.of(model, rows=amount.rows, max_tokens=amount.prompt + amount.answer, limits=limits)
    try:
        host.open(LINE, lambda: engine, between_steps=steps)
        _submit_all(host, steps, amount, model.config.vocab_size)
        steps.wait(amount.prompt * amount.rows // amount.prefill_tokens + 20)
        first = len(steps.times_s)
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for version in range(1, amount.versions + 1):
            if way != "no new weights":
                _change(host, steps, way, own, version)
            steps.wait(amount.steps)
        return _pauses(way, steps, first)
    finally:
        host.close(LIMIT_S)


def _pauses(way: Way, steps: Steps, first: int) -> Pauses:
    """Return the pauses from a step on."""
    last = len(steps.times_s) - 1
    gaps_s = np.diff(steps.times_s[first : last + 1]).tolist()
    began_s, ended_s = steps.times_s[first], steps.times_s[last]
    tokens_s = [time_s for time_s in list(steps.tokens_s) if began_s <= time_s <= ended_s]
    return Pauses(
        way,
        tuple(gaps_s),
        tuple(gaps_s[i - first] for i in list(steps.starts) if first <= i < last),
        float(np.max(np.diff([began_s, *tokens_s, ended_s]))),
    )


def _change(host: EngineHost, steps: Steps, way: Way, own: Weights, version: int) -> None:
    def prepare() -> Weights:
        return {name: _moved(tensor, version) for name, tensor in own.items()}

    if way == "recompute" or way == "finish":
        host.swap(LINE, prepare, version, way).result(LIMIT_S)
        return
    new = prepare()
    steps.then(lambda: host.engine(LINE).update_weights(new, version))
    steps.wait(2)


def _moved(tensor: Tensor, version: int) -> Tensor:
    return tensor * (1 + 1e-4 * version) if tensor.is_floating_point() else tensor


def _submit_all(host: EngineHost, steps: Steps, amount: Amount, vocabulary: int) -> None:
    """Submit a sample for each row. The first ones are of unequal length, so that they end one by one."""
    generator = torch.Generator().manual_seed(0)

    def submit(counter: Counter, answer: int = amount.answer) -> None:
        tokens = torch.randint(vocabulary, (amount.prompt,), generator=generator).tolist()
        sampling = Sampling(max_new_tokens=answer)
        host.submit(LINE, Prompt(tokens=tuple(tokens), sampling=sampling), counter)

    for row in range(amount.rows):
        submit(Counter(steps, submit), amount.answer * (row + 1) // amount.rows)


# -- the benchmark


ABOUT = "Bytes of a policy version, its way over a thin wire, and pauses of an engine that takes it over."
RATES = (1e-6, 1e-5, 1e-4)
REWARDS: dict[str, Reward] = {"arithmetic": rewarded, "letters": letters}
RATE_MBIT = 20.0
SENT_OVER_WIRE = 4
"""Versions of a run that travel over the wire, each as a patch and with all values."""
LONGEST_STEPS = 1.5
"""Wanted: the longest pause, in steps that start a sample: a step, a chunk, and half for the machine."""
Part = Literal["bytes", "wire", "pauses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement."""

    size: Size
    steps: int
    rates: tuple[float, ...]
    reward: Reward
    paused: Policy
    amount: Amount
    root: Path = ROOT
    only: tuple[Part, ...] = get_args(Part)


SHORT = Plan(
    size=QUICK.size,
    steps=4,
    rates=RATES[-1:],
    reward=letters,
    paused=QUICK.size.policy,
    amount=Amount(rows=2, prompt=8, answer=24, steps=6, versions=2, prefill_tokens=8),
)


def measure(plan: Plan, say: Callable[[str], object]) -> Iterator[Report]:
    """Yield the reports of the parts that are asked for."""
    parts, runs = plan.only, []
    for lr in plan.rates if set(parts) != {"pauses"} else ():
        runs.append(train(plan.size, lr, plan.steps, plan.root, plan.reward))
        say(f"lr {lr:g}: {len(runs[-1].versions)} versions")
    if "bytes" in parts:
        yield bytes_report([measure_bytes(run) for run in runs], plan)
    if "wire" in parts:
        yield over_wire(runs, plan)
    if "pauses" in parts:
        found = []
        for way in WAYS:
            found.append(measure_pauses(new_model(plan.paused), way, plan.amount))
            say(f"{way}: longest pause {found[-1].of(1.0):.3f} s")
        yield pauses_report(found, plan)


def bytes_report(found: Sequence[Sizes], plan: Plan) -> Report:
    """Return the table of bytes."""
    behind = [apart for apart in BEHIND if apart in found[0].sent]
    num_values = sum(p.numel() for p in new_model(plan.size.policy).parameters())
    return Report(
        name=f"Bytes of a version, as a share of {2 * num_values / 1e6:.1f} MB of bf16 values",
        method=(
            f"GRPO with AdamW, {plan.size.groups} prompts x {plan.size.samples} samples per step, policy"
            f" {plan.size.policy.size}, {plan.steps} steps per learning rate; fp32 weights, cast to bf16.",
            "Medians over up to 8 pairs of versions; in brackets the share of weights that differ. Every"
            " transfer is decoded and compared. Seconds are processor time for 1e8 weights, 1 behind.",
        ),
        columns=("learning rate", *(f"{n} behind" for n in behind), "no base", "encode s", "decode s"),
        rows=tuple(
            (
                f"{one.lr:g}",
                *(
                    f"{percent(median(one.sent[n]), 2)} [{percent(median(one.changed[n]), 1)}]"
                    for n in behind
                ),
                percent(one.whole),
                f"{one.encode_s:.1f}",
                f"{one.decode_s:.1f}",
            )
            for one in found
        ),
        bars=(),
        figures={f"{one.lr:g}": asdict(one) for one in found},
    )


def over_wire(runs: Sequence[Trained], plan: Plan) -> Report:
    """Return the table of times over the wire, or a report that says why there is none."""
    name = (
        f"Seconds from publication to use over {RATE_MBIT:g} Mbit/s and {2e3 * version_wire.DELAY_S:.0f} ms"
    )
    if why := tun_link.why_not():
        return Report(name, (why,), (), (), (), {})
    rows, figures = [], {}
    for run in runs:
        some = run.versions[: SENT_OVER_WIRE + 1]
        for way in ("dense", "patch"):
            found = version_wire.measure(some, plan.size.policy, RATE_MBIT, way == "dense")
            figures[f"{run.lr:g} {way}"] = [asdict(each) for each in found]
            rows.append((f"{run.lr:g}", way, *_arrival_cells(found)))
    return Report(
        name=name,
        method=(
            "Two processes; one publishes a version, the other waits for it (`Newest`), fetches, checks and"
            " gives it to its engine.",
            f"Medians over {SENT_OVER_WIRE} versions; `dense` has no base. The hash of the new version and"
            " the making of the transfer are part of the time.",
        ),
        columns=("learning rate", "sent as", "fetched s", "in use s", "MB on the wire"),
        rows=tuple(rows),
        bars=(),
        figures=figures,
    )


def _arrival_cells(arrivals: Sequence[Arrival]) -> tuple[str, str, str]:
    fetched, used = median([a.fetched_s for a in arrivals]), median([a.used_s for a in arrivals])
    return f"{fetched:.2f}", f"{used:.2f}", f"{median([a.num_bytes for a in arrivals]) / 1e6:.2f}"


def pauses_report(found: Sequence[Pauses], plan: Plan) -> Report:
    """Return the table of pauses."""
    amount, usual = plan.amount, found[0]
    step_s = usual.of(0.5)
    by_way = {one.way: one for one in found}
    longest_s = by_way["recompute"].of(1.0)
    limit_s = LONGEST_STEPS * usual.start_s
    return Report(
        name="Milliseconds between two steps of an engine whose weights change",
        method=(
            f"Policy {plan.paused.size} in fp32 on one thread, {amount.rows} samples of {amount.prompt} and"
            f" {amount.answer} tokens, {amount.versions} versions, one every {amount.steps} steps;"
            f" at most {amount.prefill_tokens} tokens are computed between two steps.",
            "`at once` is `Engine.update_weights` between two steps, as before; `recompute` and `finish` are"
            f" those of `EngineHost.swap`. A step that starts a sample, and computes its prompt, takes"
            f" {1e3 * usual.start_s:.1f} ms without new weights (median of {len(usual.starts_s)}).",
        ),
        columns=("new weights", "steps", "median", "p99", "longest", "to the median without", "no token"),
        rows=tuple(
            (
                one.way,
                str(len(one.gaps_s)),
                *(f"{1e3 * one.of(q):.1f}" for q in (0.5, 0.99, 1.0)),
                f"{one.of(1.0) / step_s:.1f}",
                f"{1e3 * one.silent_s:.1f}",
            )
            for one in found
        ),
        bars=(
            Bar(
                f"recompute: longest pause {1e3 * longest_s:.0f} ms, wanted <= {LONGEST_STEPS:g} x a step"
                f" that starts a sample, {1e3 * limit_s:.0f} ms",
                longest_s <= limit_s,
            ),
        ),
        figures={one.way: asdict(one) for one in found},
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=get_args(Part), default=get_args(Part), help="parts")
    parser.add_argument("--steps", type=int, default=33, help="versions after the first")
    parser.add_argument("--size", choices=get_args(PolicySize), default=FULL.size.policy.size)
    parser.add_argument(
        "--minutes", type=float, default=FULL.size.policy.minutes, help="of the policy's training"
    )
    parser.add_argument("--reward", choices=tuple(REWARDS), default="arithmetic")
    parser.add_argument("--max-tokens", type=int, default=FULL.size.max_tokens, help="of prompt and answer")
    parser.add_argument("--root", type=Path, default=ROOT, help="where policies are kept")


def plan_of(args: argparse.Namespace) -> Plan:
    """Return the settings of a command line."""
    if args.quick:
        return replace(SHORT, root=args.root, only=tuple(args.only))
    policy = Policy(size=args.size, minutes=args.minutes)
    return Plan(
        size=replace(FULL.size, policy=policy, max_tokens=args.max_tokens),
        steps=args.steps,
        rates=RATES,
        reward=REWARDS[args.reward],
        paused=Policy(size="100m"),
        amount=Amount(),
        root=args.root,
        only=tuple(args.only),
    )


def _asked(args: argparse.Namespace) -> list[Report]:
    torch.set_num_threads(1)
    return list(measure(plan_of(args), lambda text: print(text, file=sys.stderr)))


if __name__ == "__main__":
    main("versions", ABOUT, _asked, options=_options)
