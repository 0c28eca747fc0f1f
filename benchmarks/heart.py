"""Measure a run of reinforcement learning with its drafter trained in waits, beside the same run without.

    python -m benchmarks.heart [--arms off,waits,...] [--seeds 0] [--lrs 1e-5,...] [--steps N]
        [--slow SLOW] [--root runs/heart] [--vllm .venv-vllm/bin/python] [--quick]

The runs are `aedit run configs/heart.toml --local 2`: two nodes in one world, the second SLOW times as slow
as the first. All of a seed and a learning rate train the same rollouts, so they reach the same rewards
after the same steps, and only their time differs; the digest of the rollouts shows it. They begin with the
policy in `ROOT/policy`, which is trained now if it is not there, and the arms `once` with drafters that
were trained on its rollouts. Policy and drafters are kept, and a run that has ended is not run again.

Arms: off (plain decoding), pool (plain decoding, and the node that waits generates for the slow one), suffix,
waits (a new drafter learns in the nodes' waits), once-ce and once-tv (trained before the run with
cross-entropy or total variation, then fixed), waits-ce and waits-tv (trained before, and in the waits with
total variation), pool-waits-ce and pool-waits-tv (and the node that waits generates for the slow one first).
The arms of `--vllm` generate with vLLM: vllm-off,
vllm-suffix, vllm-waits (a new EAGLE-3 drafter learns in the waits).
"""

import argparse
import json
import random
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, count, product
from math import nan
from operator import mul
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import tomli_w
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

from aedit.launch.cli.export import drafter_of_run, load_run_model
from aedit.launch.cli.train_drafter import collect_rollouts
from aedit.launch.data import ByteTokenizer
from aedit.launch.records import Metric, NodeRecords, RLMetric, Run
from aedit.launch.views import rl_lines_of, rl_totals, splits
from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter, parse_arm
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.rl.tasks.scratchpad import draw_task
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import (
    DraftTrainingConfig,
    LossConfig,
    held_out_match,
    pack_samples,
    policy_ends,
    train_drafter,
)
from benchmarks.kit.policy_drafter import PROMPTS_AT
from benchmarks.kit.rl_runs import RLRun, run_rl, states
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.policies import Policy, ready
from benchmarks.tail import Times, measured

ABOUT = "Reinforcement learning with a drafter trained in waits, beside the same run without."
CONFIG = Path(__file__).parents[1] / "configs" / "heart.toml"
LONGEST = 480
"""Characters of a problem and its answer."""
POLICY = Policy(size="25m", minutes=15.0, longest=LONGEST)
DRAFTER_TOKENS = 65_536
"""Tokens of the policy's rollouts from which a drafter of the arms `once` learns."""
DRAFTER_MINUTES = 10.0
"""Processor time of its training."""
BATCHES = 12
"""Batches of a node whose rows are counted for the bound."""
QUICK = ("--train.steps=4", "--rl.sampling.max-new-tokens=24", "--rl.eval-problems=4")
SLOW = 2.0
"""How much slower the second node is, as in the configuration."""
WANTED = 1.5
WANTED_USE = 0.8
_auto: Any = AutoModelForCausalLM  # its methods carry no types


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to make the rollouts."""

    name: str
    flags: tuple[str, ...]
    once: Literal["ce", "tv", ""] = ""
    """Loss with which a drafter is trained before the run."""
    speculative: str = ""
    """vLLM's method of speculative decoding."""

    @property
    def uses_vllm(self) -> bool:
        return "--rl.engine=vllm" in self.flags


GENTLE = "--drafter.lr=1.5e-4"
"""The usual rate first harms a drafter that is trained already."""
ARMS = (
    Arm("off", ("--drafter.kind=off",)),
    Arm("pool", ("--drafter.kind=off", "--rl.pool=true")),
    Arm("suffix", ("--drafter.kind=suffix",)),
    Arm("waits", ()),
    Arm("once-ce", ("--drafter.idle-training=false",), "ce"),
    Arm("once-tv", ("--drafter.idle-training=false",), "tv"),
    Arm("waits-ce", (GENTLE,), "ce"),
    Arm("waits-tv", (GENTLE,), "tv"),
    Arm("pool-waits-ce", (GENTLE, "--rl.pool=true"), "ce"),
    Arm("pool-waits-tv", (GENTLE, "--rl.pool=true"), "tv"),
    Arm("vllm-off", ("--rl.engine=vllm",)),
    Arm("vllm-suffix", ("--rl.engine=vllm",), speculative="suffix"),
    Arm("vllm-waits", ("--rl.engine=vllm", "--drafter.form=eagle3"), speculative="eagle3"),
)


# -- what a run needs


def policy_ready(root: Path, policy: Policy, say: Console) -> Path:
    """Return the directory of the policy; train it if it is not there."""
    out = root / "policy"
    if not (out / "config.json").exists():
        root.mkdir(parents=True, exist_ok=True)
        say.print(f"{out}: training the policy for {policy.minutes:g} min; it is kept for later starts")
        out.unlink(missing_ok=True)
        out.symlink_to(ready(policy, root).name)
    return out


def config_ready(root: Path, arm: Arm, vllm: Path) -> Path:
    """Return the configuration of an arm's runs: the shipped one with the policy and the arm's engine."""
    tables = tomllib.loads(CONFIG.read_text())
    tables["model"]["pretrained"] = str((root / "policy").absolute())
    if arm.uses_vllm:
        if arm.speculative != "eagle3":
            del tables["drafter"]
        tables["rollout"] = {"vllm": {"python": str(vllm.absolute())}}
        if arm.speculative:
            settings = {"method": arm.speculative, "num_speculative_tokens": 4}
            tables["rollout"]["vllm"]["speculative"] = settings
    path = root / f"{arm.name}.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def drafter_ready(root: Path, loss: Literal["ce", "tv"], minutes: float, say: Console) -> Path:
    """Return the file of a drafter that was trained once on rollouts of the policy; train it if need be."""
    out = root / f"drafter-{loss}.safetensors"
    if out.exists():
        return out
    model: PreTrainedModel = _auto.from_pretrained(root / "policy", dtype=torch.float32)
    say.print(f"{out}: training a drafter for {minutes:g} min of processor time")
    samples = collect_rollouts(model, _prompts(), DRAFTER_TOKENS if minutes >= 1 else 4096)
    training = DraftTrainingConfig(lr=3e-3, loss=LossConfig(tokens=loss))
    layer, match = train_drafter(model, samples, training, minutes, clock=time.process_time)
    out.with_suffix(".json").write_text(json.dumps(asdict(match), indent=1) + "\n")
    layer.save(out)
    return out


def _prompts(seed: int = PROMPTS_AT) -> Iterator[Prompt]:
    """Return endless prompts that no run trains on, by their seed."""
    rng, tokenizer = random.Random(seed), ByteTokenizer()
    for number in count():
        tokens = tuple(map(int, tokenizer.encode(draw_task(rng, LONGEST).prompt)))
        sampling = Sampling(max_new_tokens=400, stop_tokens=(tokenizer.eos_id,))
        yield Prompt(tokens=tokens, rollout=PROMPTS_AT, sample=number, sampling=sampling)


# -- the runs


Spent = Mapping[str, float]
"""Seconds per step of a node by use: `rollouts`, `rewards`, `training`, `waiting`, `used` of it, `other`."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run's records say, with its evaluations; times but `seconds` are means over the nodes."""

    arm: str
    seed: int
    lr: str
    steps: float
    seconds: float
    """From the first step of the last node to the last step."""
    spent: tuple[Spent, ...]
    """By node, over the same steps."""
    used: float
    """Share of the waits that the drafter's training used, in processor time."""
    accepted: float
    """Tokens per pass."""
    speed_up: float
    """Of the rollouts, as the run's report says it."""
    rewards: tuple[float, float]
    """Mean over the first and the last quarter of the steps."""
    digest: int
    by_time: tuple[float, ...]
    """Tokens per pass in each quarter of the run."""


def run_arm(arm: Arm, seed: int, lr: str, args: argparse.Namespace) -> Result:
    """Run an arm in a directory of its own; one that has ended there is not run again."""
    drafter = (args.root / f"drafter-{arm.once}.safetensors").absolute()
    flags = [*arm.flags, f"--seed={seed}", f"--train.lr={lr}"]
    flags += [f"--drafter.pretrained={drafter}"] if arm.once else []
    flags += [f"--train.steps={args.steps}"] if args.steps else []
    flags += ["--local.slowdown", "1", f"{args.slow:g}"]
    flags += QUICK if args.quick else ()
    config = config_ready(args.root, arm, args.vllm)
    wanted = RLRun(nodes=2, flags=tuple(flags), config=config)
    return result(arm.name, seed, lr, run_rl(wanted, _place(arm.name, seed, lr, args)))


def _place(arm: str, seed: int, lr: str, args: argparse.Namespace) -> Path:
    """Return the directory of a run."""
    return Path(args.root, f"{arm}-{seed}-{lr}" + (f"-{args.slow:g}" if args.slow != SLOW else ""))


def result(arm: str, seed: int, lr: str, run: Run) -> Result:
    """Return what the records of a run say."""
    nodes = [[each for each in rl_lines_of(node) if each[1].rollouts > 0] for node in run.nodes]
    if any(len(lines) < 2 for lines in nodes):
        raise RuntimeError(f"{arm}: the run is too short")
    newest, num = states(run), len(nodes)
    waited_s = sum(sum(rl.idle_s.values()) for rl in newest)
    return Result(
        arm=arm,
        seed=seed,
        lr=lr,
        steps=sum(lines[-1][0].step for lines in nodes) / num,
        seconds=max(lines[-1][0].t for lines in nodes) - max(lines[0][0].t for lines in nodes),
        spent=tuple(map(_spent, run.nodes)),
        used=sum(rl.idle_used_s for rl in newest) / waited_s if waited_s else 0.0,
        accepted=rl_totals(newest).accepted,
        speed_up=rl_totals(newest).speed_up,
        rewards=(_reward(nodes, 0.0, 0.25), _reward(nodes, 0.75, 1.0)),
        digest=int(sum(rl.digest for rl in newest)),
        by_time=tuple(_accepted(nodes, quarter / 4, (quarter + 1) / 4) for quarter in range(4)),
    )


def _spent(node: NodeRecords) -> Spent:
    """Return the mean over the steps of a node."""
    total, steps = Counter[str](), 0.0
    for _, num, by_use in splits(node):
        total.update({use: num * seconds for use, seconds in by_use.items()})
        steps += num
    return {use: seconds / steps for use, seconds in total.items()}


Lines = Sequence[tuple[Metric, RLMetric]]


def _between(lines: Lines, first: float, last: float) -> Lines:
    """Return the lines of the steps between two shares of the run."""
    end = lines[-1][0].step
    return [each for each in lines if first * end < each[0].step <= last * end]


def _reward(nodes: Sequence[Lines], first: float, last: float) -> float:
    return fmean(rl.reward for lines in nodes for _, rl in _between(lines, first, last))


def _accepted(nodes: Sequence[Lines], first: float, last: float) -> float:
    """Return the tokens per pass between two shares of the run."""
    tokens = passes = 0.0
    for lines in nodes:
        before, there = _between(lines, 0.0, first), _between(lines, 0.0, last)
        for sign, part in ((1, there), (-1, before)):
            tokens += sign * part[-1][1].rollout_tokens if part else 0.0
            passes += sign * part[-1][1].passes if part else 0.0
    return tokens / passes if passes else nan


# -- the tables


def report(found: Sequence[Result], slow: float = SLOW) -> Report:
    """Return the table, each run beside the one without drafts of the same seed, rate and engine."""
    off = {_world(each): each for each in found if each.arm in ("off", "vllm-off")}
    beside = [(each, off.get(_world(each))) for each in found]
    in_waits = [(each, base) for each, base in beside if "waits" in each.arm and base is not None]
    best = [base.seconds / each.seconds for each, base in in_waits]
    use = [each.used for each, _ in in_waits]
    equal = all(each.digest == base.digest for each, base in beside if base is not None)
    return Report(
        name=f"Time of a run, two nodes in one world, of which one is {slow:g} times as slow",
        method=(
            "`aedit run configs/heart.toml --local 2`: 25.9 M parameters, 2 x 4 rollouts per node and step.",
            "Seconds: after the first step, to the last one. Used: share of the waits. Per pass: by row.",
        ),
        columns=(
            *("arm", "seed", "rate", "steps", "seconds", "of off", "used", "per pass", "by quarter"),
            *("speed-up", "reward", "digest"),
        ),
        rows=tuple(_row(each, base) for each, base in beside),
        bars=(
            Bar(
                f"the best arm whose drafter trains in waits is {max(best, default=nan):.2f} times as fast as"
                f" off (wanted {WANTED})",
                max(best) >= WANTED if best else None,
            ),
            Bar(
                f"the drafter's training uses {percent(max(use, default=nan))} of the waits"
                f" (wanted {percent(WANTED_USE)})",
                max(use) >= WANTED_USE if use else None,
            ),
            Bar("all runs of a seed and a rate trained the same rollouts", equal if off else None),
        ),
        figures={"runs": [asdict(each) for each in found]},
    )


def _world(each: Result) -> tuple[int, str, bool]:
    """Return what runs that are compared have in common."""
    return each.seed, each.lr, each.arm.startswith("vllm")


def _row(each: Result, off: Result | None) -> tuple[str, ...]:
    return (
        each.arm,
        str(each.seed),
        each.lr,
        f"{each.steps:g}",
        f"{each.seconds:.0f}",
        f"{each.seconds / off.seconds:.2f}" if off else "",
        percent(each.used),
        f"{each.accepted:.2f}",
        " ".join(f"{value:.2f}" for value in each.by_time),
        f"{each.speed_up:.2f}",
        " to ".join(f"{reward:.2f}" for reward in each.rewards),
        f"{each.digest:x}",
    )


USES = ("rollouts", "rewards", "training", "waiting", "used", "other")


def steps_report(found: Sequence[Result]) -> Report:
    """Return how the nodes of each run spend a step."""
    rows = tuple(
        (each.arm, str(each.seed), each.lr, str(node), *(f"{spent[use]:.2f}" for use in USES))
        for each in found
        for node, spent in enumerate(each.spent)
    )
    columns = ("arm", "seed", "rate", "node", *USES)
    return Report("Seconds of a step by use", (), columns, rows, (), {})


def bound_report(root: Path, off: Result, once: str) -> Report:
    """Return what drafting could gain at most on this machine, and with the drafter that was trained once.

    A node's steps of the engine are counted by rows; their costs are measured on one thread, with and without
    drafts. The run gains by the share of rollouts in a step of the node that sets the pace.
    """
    model: PreTrainedModel = _auto.from_pretrained(root / "policy", dtype=torch.float32)
    layer = DraftLayer.load(root / f"drafter-{once}.safetensors", model)
    overlaps = json.loads((root / f"drafter-{once}.json").read_text())["overlap_D"]
    torch.set_num_threads(1)
    target = Target.of(model, rows=8, max_tokens=2 * LONGEST, nodes=8)
    times = measured(target, {"layer": LayerDrafter.of(layer, target)})
    steps = rows_of_steps(target)
    plain_s = sum(num * times.step(rows, 0) for rows, num in steps.items())
    ways = [1.0] * len(overlaps), overlaps
    gains = [plain_s / sum(num * _drafted_s(times, rows, way) for rows, num in steps.items()) for way in ways]
    spent = off.spent[0]  # the slow node's steps are slowed down by rests, which count as `other`
    share = spent["rollouts"] / sum(spent[use] for use in ("rollouts", "rewards", "training", "other"))
    whole = [1 / (1 - share + share / gain) for gain in gains]
    table = []
    for rows, num in sorted(steps.items()):
        step_s = times.step(rows, 0)
        shares = percent(num / steps.total()), percent(num * step_s / plain_s)
        table.append((str(rows), *shares, *(f"{step_s / _drafted_s(times, rows, way):.2f}" for way in ways)))
    return Report(
        name="Bound of the gain",
        method=(
            f"Rollouts are {percent(share)} of a step without waits. With each draft accepted they would be"
            f" {gains[0]:.2f} times as fast, and the run {whole[0]:.2f};",
            f"with the drafter of once-{once}, chosen without error: {gains[1]:.2f} and {whole[1]:.2f}.",
        ),
        columns=("rows", "of the passes", "of their time", "all accepted", f"once-{once}"),
        rows=tuple(table),
        bars=(),
        figures={"share": share, "gains": gains, "whole": whole, "steps": dict(steps)},
    )


MATCH_TOKENS = 8192
"""Tokens of rollouts on which drafters are compared."""
CHAIN = 4


def drafters_report(found: Sequence[Result], arms: Mapping[str, Arm], args: argparse.Namespace) -> Report:
    """Return how the drafter of the end of each run matches the policy of its end, beside the one before.

    Both draft for new rollouts of that policy, with the same noise.
    """
    rows, figures = [], []
    for each in found:
        arm, run_dir = arms[each.arm], _place(each.arm, each.seed, each.lr, args) / "run"
        trained = drafter_of_run(run_dir)
        if not arm.once or "waits" not in arm.name or trained is None:
            continue
        model = load_run_model(run_dir)[0].train(False).requires_grad_(False)
        held_out = pack_samples(collect_rollouts(model, _prompts(PROMPTS_AT + 1), MATCH_TOKENS), 512)
        ends = policy_ends(model)
        files = (args.root / f"drafter-{arm.once}.safetensors", trained)
        fixed, learned = (
            held_out_match(DraftLayer.load(file, model), held_out, ends, CHAIN).coupled_D for file in files
        )
        figures.append(asdict(each) | {"fixed": fixed, "learned": learned})
        lengths = _expected(fixed), _expected(learned)
        rows.append((each.arm, str(each.seed), each.lr, *(f"{length:.2f}" for length in lengths)))
    return Report(
        name=f"Expected tokens of a pass with chains of {CHAIN}, policy of the end of the run",
        method=(),
        columns=("arm", "seed", "rate", "drafter before the run", "trained in waits"),
        rows=tuple(rows),
        bars=(),
        figures={"runs": figures},
    )


def _expected(accepted: Sequence[float]) -> float:
    """Return the tokens of a pass whose drafts are accepted with these probabilities, each after the last."""
    return sum(accumulate(accepted, mul), start=1.0)


def rows_of_steps(target: Target) -> Counter[int]:
    """Return how many plain steps of the engine had how many rows, over batches as a node makes them."""
    engine, asked, found = Engine(target), _prompts(), Counter[int]()
    for _ in range(BATCHES):
        for _ in range(target.rows):
            engine.add(next(asked))
        while engine.running or engine.waiting:
            found[len(engine.step().rollouts)] += 1
    engine.close()
    return found


def _drafted_s(times: Times, rows: int, overlaps: Sequence[float]) -> float:
    """Return the seconds per token of each row in steps with the best depth, off included.

    overlaps: share of drafts that are accepted, by position, if those before are.
    """
    tokens, reached, best = 1.0, 1.0, times.step(rows, 0)
    for depth, overlap in enumerate(overlaps, 1):
        reached *= overlap
        tokens += reached
        seconds = times.step(rows, depth) + times.draft(parse_arm(f"layer:{depth}"), rows)
        best = min(best, seconds / tokens)
    return best


def measure(args: argparse.Namespace) -> list[Report] | str:
    """Prepare what is missing, run the arms, and return their tables."""
    say = Console(stderr=True, highlight=False)
    names = {arm.name: arm for arm in ARMS}
    if unknown := [name for name in args.arms if name not in names]:
        return f"--arms: {', '.join(unknown)}: must be of {', '.join(names)}"
    chosen = [names[name] for name in args.arms]
    if any(arm.uses_vllm for arm in chosen) and not args.vllm.exists():
        return f"--vllm: {args.vllm} does not exist; `make vllm` builds it"
    if args.quick:
        args.root = args.root / "quick"
    policy_ready(args.root, replace(POLICY, minutes=0.5) if args.quick else POLICY, say)
    for loss in sorted({arm.once for arm in chosen if arm.once}):
        drafter_ready(args.root, loss, 0.1 if args.quick else DRAFTER_MINUTES, say)
    found = []
    for seed, lr, arm in product(args.seeds, args.lrs, chosen):
        found.append(run_arm(arm, seed, lr, args))
        last = found[-1]
        say.print(f"{arm.name}, seed {seed}, {lr}: {last.seconds:.0f} s, {last.accepted:.2f} tokens per pass")
    reports = [report(found, args.slow), steps_report(found)]
    compared = drafters_report(found, names, args)
    if compared.rows:
        reports.append(compared)
    off = next((each for each in found if each.arm == "off"), None)
    trained = [loss for loss in ("ce", "tv") if (args.root / f"drafter-{loss}.safetensors").exists()]
    if off is not None and trained:
        reports.append(bound_report(args.root, off, trained[0]))
    return reports


def _options(parser: argparse.ArgumentParser) -> None:
    listed = partial(str.split, sep=",")
    usual = ["off", "once-ce", "once-tv", "waits-ce", "pool-waits-ce"]
    parser.add_argument("--arms", type=listed, default=usual, metavar="ARM,...")
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[0])
    parser.add_argument("--lrs", type=listed, default=["1e-5"], metavar="RATE,...", help="learning rates")
    parser.add_argument("--slow", type=float, default=SLOW, help="how much slower the second node is")
    parser.add_argument("--steps", type=int, default=0, help="instead of the configured number")
    parser.add_argument("--root", type=Path, default=Path("runs/heart"), help="policy, drafters and runs")
    parser.add_argument(
        "--vllm", type=Path, default=Path(".venv-vllm/bin/python"), help="Python of the arms of vLLM"
    )


if __name__ == "__main__":
    main("heart", ABOUT, measure, options=_options)
