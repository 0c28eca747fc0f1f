"""Measure a run of reinforcement learning with its drafter trained in waits, beside the same run without.

    python -m benchmarks.heart [--arms off,waits,...] [--seeds 0] [--lr 1e-5] [--steps N] [--root runs/heart]
        [--quick]

The runs are `aedit run configs/heart.toml --local 2` after its warm-up: two nodes of speeds 1 and 1/2 in one
world. All of a seed train the same rollouts, so they reach the same rewards after the same steps, and only
their time differs; the digest of the rollouts shows it. Instead of the warm-up they begin with one policy,
which `aedit run` has trained on text, and the arms `once` with drafters that were trained on its rollouts.
Policy and drafters are kept in the root, and a run that has ended there is not run again.

Arms: off (plain decoding), pool (plain decoding, and the node that waits generates for the slow one), suffix,
waits (a new drafter learns in the nodes' waits), once-ce and once-tv (trained before the run with
cross-entropy or total variation, then fixed), waits-tv (trained before, and in the waits).
"""

import argparse
import json
import random
import subprocess
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from math import nan
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

from aedit.launch.data import ByteTokenizer
from aedit.launch.records import Run
from aedit.launch.views import after_warm_up, rl_lines_of, rl_totals
from aedit.spec_rollout.rl.tasks.scratchpad import draw_task
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import DraftTrainingConfig, LossConfig
from benchmarks.kit.policy_drafter import PROMPTS_AT, collect, train_drafter
from benchmarks.kit.processes import start
from benchmarks.kit.rl_runs import RLRun, run_rl, states
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main

ABOUT = "Reinforcement learning with a drafter trained in waits, beside the same run without."
CONFIG = Path(__file__).parents[1] / "configs" / "heart.toml"
LONGEST = 480
"""Characters of a problem and its answer."""
NUM_TEXTS = 30_000
"""Problems from which the policy learns."""
DRAFTER_TOKENS = 32_768
"""Tokens of the policy's rollouts from which a drafter of the arms `once` learns."""
DRAFTER_MINUTES = 5.0
"""Processor time of its training."""
POLICY_STEPS = 2700
POLICY_TRAINING = {
    "batch_size": 1,
    "lr": 1e-3,
    "betas": [0.9, 0.98],
    "lr_warmup": 0.03,
    "lr_final": 0.05,
    "eval_every": 25,
}
PREPARED_WITHIN_S = 4 * 3600.0
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


ARMS = (
    Arm("off", ("--drafter.kind=off",)),
    Arm("pool", ("--drafter.kind=off", "--rl.pool=true")),
    Arm("suffix", ("--drafter.kind=suffix",)),
    Arm("waits", ()),
    Arm("once-ce", ("--drafter.idle-training=false",), "ce"),
    Arm("once-tv", ("--drafter.idle-training=false",), "tv"),
    Arm("waits-tv", (), "tv"),
)


# -- what a run needs


def policy_ready(root: Path, steps: int, say: Console) -> Path:
    """Return the directory of the policy; train and export it if it is not there."""
    out = root / "policy"
    if (out / "config.json").exists():
        return out
    root.mkdir(parents=True, exist_ok=True)
    text, rng = root / "text.jsonl", random.Random("text")
    tasks = (draw_task(rng, LONGEST) for _ in range(NUM_TEXTS))
    text.write_text("".join(json.dumps({"text": task.prompt + task.answer}) + "\n" for task in tasks))
    tables = tomllib.loads(CONFIG.read_text())
    for name in ("prompts", "reward", "rl", "drafter", "local"):
        del tables[name]
    tables |= {"name": "policy-run", "train": POLICY_TRAINING | {"steps": steps}, "checkpoint": {"every": 10}}
    tables["data"]["source"], tables["edit"]["every"] = str(text.absolute()), 8
    say.print(f"{out}: training the policy; it is kept for later starts")
    _command("run", str(_written(root, tables)), "--local=2", f"--dir={root}")
    _command("export", str(root / "policy-run"), str(out))
    return out


def config_ready(root: Path) -> Path:
    """Return the configuration of the runs: the shipped one after its warm-up."""
    tables = tomllib.loads(CONFIG.read_text())
    warm_up = tables["rl"].pop("supervised_steps")
    del tables["rl"]["supervised_batch"], tables["model"]["family"], tables["model"]["sizes"]
    tables["train"]["steps"] -= warm_up
    tables["model"]["pretrained"] = str((root / "policy").absolute())
    return _written(root, tables)


def _written(root: Path, tables: dict[str, Any]) -> Path:
    path = root / f"{tables['name']}.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def drafter_ready(root: Path, loss: Literal["ce", "tv"], minutes: float, say: Console) -> Path:
    """Return the file of a drafter that was trained once on rollouts of the policy; train it if need be."""
    out = root / f"drafter-{loss}.safetensors"
    if out.exists():
        return out
    model: PreTrainedModel = _auto.from_pretrained(root / "policy", dtype=torch.float32)
    say.print(f"{out}: training a drafter for {minutes:g} min of processor time")
    samples = collect(model, _prompts(), DRAFTER_TOKENS if minutes >= 1 else 4096)
    training = DraftTrainingConfig(lr=3e-3, loss=LossConfig(tokens=loss))
    layer, match = train_drafter(model, samples, training, minutes, clock=time.process_time)
    out.with_suffix(".json").write_text(json.dumps(asdict(match), indent=1) + "\n")
    layer.save(out)
    return out


def _prompts() -> Iterator[Prompt]:
    """Return endless prompts that no run trains on, by their seed."""
    rng, tokenizer = random.Random(PROMPTS_AT), ByteTokenizer()
    for number in count():
        tokens = tuple(map(int, tokenizer.encode(draw_task(rng, LONGEST).prompt)))
        sampling = Sampling(max_new_tokens=400, stop_tokens=(tokenizer.eos_id,))
        yield Prompt(tokens=tokens, rollout=PROMPTS_AT, sample=number, sampling=sampling)


def _command(*words: str) -> None:
    """Run a command of `aedit`, with its output. Raises RuntimeError if it fails."""
    process = start("aedit.launch.cli", *words, stdin=subprocess.DEVNULL)
    try:
        code = process.wait(PREPARED_WITHIN_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    if code:
        raise RuntimeError(f"`aedit {' '.join(words)}` failed with exit code {code}")


# -- the runs


@dataclass(frozen=True, slots=True)
class Result:
    """What a run's records say, with its evaluations; times but `seconds` are means over the nodes."""

    arm: str
    seed: int
    steps: float
    seconds: float
    """From the first batch to the last step."""
    rollout_s: float
    train_s: float
    waited_s: float
    used_s: float
    """Processor time of the drafter's training in the waits."""
    accepted: float
    """Tokens per pass."""
    speed_up: float
    """Of the rollouts, as the run's report says it."""
    solved: tuple[float, float]
    """Held-out problems solved at the start and at the end."""
    digest: int
    by_time: tuple[tuple[float, float], ...]
    """Tokens per pass over the run, at shares of its steps."""


def run_arm(arm: Arm, seed: int, root: Path, flags: Sequence[str]) -> Result:
    """Run an arm in a directory of its own; one that has ended there is not run again."""
    drafter = (root / f"drafter-{arm.once}.safetensors").absolute()
    begins = (f"--drafter.pretrained={drafter}",) if arm.once else ()
    wanted = RLRun(nodes=2, flags=(*arm.flags, *begins, f"--seed={seed}", *flags), config=config_ready(root))
    place = root / "-".join((arm.name, str(seed), *(flag.strip("-").replace("/", "_") for flag in flags)))
    return result(arm.name, seed, run_rl(wanted, place))


def result(arm: str, seed: int, run: Run) -> Result:
    """Return what the records of a run say."""
    nodes = [[each for each in rl_lines_of(node) if each[1].rollouts > 0] for node in run.nodes]
    if any(len(lines) < 2 for lines in nodes):
        raise RuntimeError(f"{arm}: the run is too short")
    newest, num = states(run), len(nodes)
    totals = rl_totals(newest)
    solved = [each.solved for each in after_warm_up(run)]
    curve = []
    for share in (0.25, 0.5, 0.75, 1.0):
        tokens = passes = 0.0
        for lines in nodes:
            step = share * lines[-1][0].step
            done = [rl for line, rl in lines if line.step <= step]
            if done:
                tokens, passes = tokens + done[-1].rollout_tokens, passes + done[-1].passes
        curve.append((share, tokens / passes if passes else nan))
    return Result(
        arm=arm,
        seed=seed,
        steps=sum(lines[-1][0].step for lines in nodes) / num,
        seconds=max(lines[-1][0].t for lines in nodes) - min(lines[0][0].t for lines in nodes),
        rollout_s=sum(rl.rollout_s for rl in newest) / num,
        train_s=sum(rl.train_s for rl in newest) / num,
        waited_s=sum(sum(rl.idle_s.values()) for rl in newest) / num,
        used_s=sum(rl.idle_used_s for rl in newest) / num,
        accepted=totals.accepted,
        speed_up=totals.speed_up,
        solved=(solved[0], solved[-1]) if solved else (nan, nan),
        digest=int(sum(rl.digest for rl in newest)),
        by_time=tuple(curve),
    )


# -- the table


def report(found: Sequence[Result]) -> Report:
    """Return the table, each run beside the one without drafts of the same seed."""
    off = {each.seed: each for each in found if each.arm == "off"}
    in_waits = [each for each in found if each.arm.startswith("waits")]
    best = [off[each.seed].seconds / each.seconds for each in in_waits if each.seed in off]
    use = [each.used_s / each.waited_s for each in in_waits if each.waited_s]
    equal = all(len({each.digest for each in found if each.seed == seed}) == 1 for seed in off)
    return Report(
        name="Time of a run, two nodes of speeds 1 and 1/2 in one world",
        method=(
            "`aedit run configs/heart.toml --local 2`: 25.9 M parameters, 2 x 4 rollouts per node and step.",
            "Seconds from the first batch to the last step; other times are of the whole run with its two"
            " evaluations, means over the nodes.",
        ),
        columns=(
            *("arm", "seed", "steps", "seconds", "of off", "rollouts s", "training s", "waits s"),
            *("used s", "per pass", "over time", "speed-up", "solved, %", "digest"),
        ),
        rows=tuple(_row(each, off.get(each.seed)) for each in found),
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
            Bar("all runs of a seed trained the same rollouts", equal if off else None),
        ),
        figures={"runs": [asdict(each) for each in found]},
    )


def _row(each: Result, off: Result | None) -> tuple[str, ...]:
    seconds = (each.rollout_s, each.train_s, each.waited_s, each.used_s)
    return (
        each.arm,
        str(each.seed),
        f"{each.steps:g}",
        f"{each.seconds:.0f}",
        f"{each.seconds / off.seconds:.2f}" if off else "",
        *(f"{value:.0f}" for value in seconds),
        f"{each.accepted:.2f}",
        " ".join(f"{value:.2f}" for _, value in each.by_time),
        f"{each.speed_up:.2f}",
        " to ".join(f"{100 * share:.0f}" for share in each.solved),
        f"{each.digest:x}",
    )


def measure(args: argparse.Namespace) -> Report | str:
    """Prepare what is missing, run the arms, and return their table."""
    say = Console(stderr=True, highlight=False)
    names = {arm.name: arm for arm in ARMS}
    if unknown := [name for name in args.arms if name not in names]:
        return f"--arms: {', '.join(unknown)}: must be of {', '.join(names)}"
    quick = ("--train.steps=4", "--rl.sampling.max-new-tokens=24", "--rl.eval-problems=4")
    root = args.root / "quick" if args.quick else args.root
    policy_ready(root, 8 if args.quick else POLICY_STEPS, say)
    chosen = [names[name] for name in args.arms]
    for loss in sorted({arm.once for arm in chosen if arm.once}):
        drafter_ready(root, loss, 0.1 if args.quick else DRAFTER_MINUTES, say)
    flags = [f"--train.lr={args.lr}"] if args.lr else []
    flags += [f"--train.steps={args.steps}"] if args.steps else []
    found = []
    for seed in args.seeds:
        for arm in chosen:
            found.append(run_arm(arm, seed, root, (*(quick if args.quick else ()), *flags)))
            last = found[-1]
            say.print(f"{last.arm}, seed {seed}: {last.seconds:.0f} s, {last.accepted:.2f} tokens per pass")
    return report(found)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arms", type=partial(str.split, sep=","), default=["off", "once-tv", "waits-tv"], metavar="ARM,..."
    )
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[0])
    parser.add_argument("--lr", default="", help="instead of the configured learning rate")
    parser.add_argument("--steps", type=int, default=0, help="instead of the configured number")
    parser.add_argument("--root", type=Path, default=Path("runs/heart"), help="policy, drafters and runs")


if __name__ == "__main__":
    main("heart", ABOUT, measure, options=_options)
