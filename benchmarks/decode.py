"""Measure plain decoding beside other systems, and what our engine adds to its steps.

    python -m benchmarks.decode [--only PART] [--dtypes fp32,bf16] [--quick]
        [--install-rivals DIR | --rival-python vllm=PYTHON ctranslate2=PYTHON]

A Llama of 124 M parameters with random weights and a vocabulary of 50 k, on one core. Systems: our engine,
`transformers.generate`, and rivals in virtual environments of their own. Parts, in decode_parts/: decode and
prefill (race.py), update, noise and auto (steps.py), memory (memory.py),
hand-over (hand_over.py).
`--rival-python earlier=PYTHON` takes part with the version of this package that is installed there.
"""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import PreTrainedModel

from benchmarks.decode_parts import steps
from benchmarks.decode_parts import tables as decode_tables
from benchmarks.decode_parts.hand_over import SHAPE as HANDED
from benchmarks.decode_parts.hand_over import hand_over
from benchmarks.decode_parts.memory import Batch, long_tail, wide
from benchmarks.decode_parts.policy import DTYPES, PolicyShape, random_policy, saved_policy
from benchmarks.decode_parts.race import Race, Shape, Turns, race
from benchmarks.decode_parts.systems import (
    EARLIER,
    GENERATE,
    OURS,
    REQUIREMENTS,
    Generate,
    Ours,
    System,
    install,
    rivals,
)
from benchmarks.kit import tables
from benchmarks.kit.tables import Report
from benchmarks.rollout import whole_numbers

ABOUT = (
    "Plain decoding and prefill beside generate, CTranslate2 and vLLM; updates, noise, and a choice in vain."
)
PARTS = ("decode", "prefill", "update", "noise", "auto", "memory", "hand-over")
FULL_SHAPE = PolicyShape()
TAIL, WIDE = Batch(), Batch(max_tokens=32_768, samples=16, median=60.0, spread=0.8)
TINY = PolicyShape(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement."""

    shape: PolicyShape = FULL_SHAPE
    parts: tuple[str, ...] = PARTS
    dtypes: tuple[str, ...] = tuple(DTYPES)
    batches: tuple[int, ...] = (1, 16)
    prompt: int = 8
    """Tokens of a prompt of the decoding races: few, as the time of the prompts is subtracted."""
    new: int = 24
    """Plain steps of a turn."""
    prefills: tuple[Shape, ...] = (Shape(64, 16), Shape(16, 32), Shape(1, 4000))
    update_tokens: int = 260
    choice_batches: tuple[int, ...] = (1, 4, 16)
    handed: PolicyShape = HANDED
    """Sharded policy that is handed over."""
    tail: Batch = TAIL
    wide: Batch = WIDE
    repeats: int = 5
    root: Path = Path("runs/decode")
    """Where the policy is saved for the rivals."""
    begin: Callable[[], object] = lambda: None
    """Called before the turns of each race, when all systems are warm."""
    pythons: tuple[tuple[str, Path], ...] = ()
    """Rivals and their Pythons."""

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of a text in the races."""
        return 1 + max([self.prompt + self.new, *(shape.prompt for shape in self.prefills)])


QUICK = Plan(
    shape=TINY,
    dtypes=("fp32",),
    batches=(1, 2),
    prompt=4,
    new=3,
    prefills=(Shape(3, 4), Shape(1, 40)),
    update_tokens=12,
    choice_batches=(1, 2),
    handed=TINY,
    tail=Batch(rows=3, max_tokens=64, samples=6, prompt=4, median=9.0),
    wide=Batch(rows=2, max_tokens=128, samples=2, prompt=4, median=3.0),
    repeats=2,
)


def measure(plan: Plan, say: Callable[[str], None], *, quick: bool = False) -> list[Report]:
    """Measure all parts, one dtype after the other, and return their tables."""
    found = decode_tables.Found()
    for dtype in plan.dtypes:
        model = random_policy(plan.shape, dtype)
        for one in _races(plan, model, dtype, found.rivals):
            say(decode_tables.line(one))
            (found.decodes if one.shape.new else found.prefills).append(one)
        for make in _of_steps(plan, model, dtype, found):
            say(make())
            gc.collect()
    if "memory" in plan.parts:
        found.memories = [long_tail(plan.tail), wide(plan.wide)]
    if "hand-over" in plan.parts:
        found.hand_over = hand_over(plan.handed)
    return found.reports(quick)


def _races(plan: Plan, model: PreTrainedModel, dtype: str, said: list[str]) -> Iterator[Race]:
    shapes = [Shape(rows, plan.prompt, plan.new) for rows in plan.batches if "decode" in plan.parts]
    if "prefill" in plan.parts:
        known = {
            (shape.rows, shape.prompt) for shape in shapes
        }  # decoding tells the time of its prompts, too
        shapes += [shape for shape in plan.prefills if (shape.rows, shape.prompt) not in known]
    if not shapes:
        return
    systems: dict[str, System] = {OURS: Ours(model), GENERATE: Generate(model)}
    plan.root.mkdir(parents=True, exist_ok=True)
    saved = saved_policy(model, plan.root / dtype) if plan.pythons else plan.root
    rows = max(shape.rows for shape in shapes)
    with rivals(dict(plan.pythons), saved, dtype, plan.max_tokens, rows) as (others, reasons):
        said += [f"{reason}; skipped" for reason in reasons]
        said += [f"{dtype}: {name} {rival.version}" for name, rival in others.items()]
        turns = Turns(repeats=plan.repeats, vocabulary=plan.shape.vocab_size, begin=plan.begin)
        for shape in shapes:
            yield race({**systems, **others}, dtype, shape, turns)


def _of_steps(
    plan: Plan, model: PreTrainedModel, dtype: str, found: decode_tables.Found
) -> Iterator[Callable[[], str]]:
    """Yield functions that measure one row each, add it to `found` and return a line about it."""
    rows, repeats, turn = max(plan.batches), plan.repeats, plan.new

    def update() -> str:
        found.updates.append(steps.update(model, dtype, rows, plan.update_tokens, repeats))
        return f"{dtype}: an update takes {found.updates[-1].in_steps} plain steps"

    def noise() -> str:
        found.noises.append(steps.noise(model, dtype, rows, turn, repeats))
        return f"{dtype}: noise adds {found.noises[-1].extra} of a step"

    def choice(batch: int) -> str:
        # As many steps in a turn at each batch size.
        found.choices.append(steps.choice(model, dtype, batch, batch * turn, 2 * repeats))
        return f"{dtype}, batch {batch}: auto {found.choices[-1].over_plain(steps.AUTO)} of plain"

    if "update" in plan.parts:
        yield update
    if "noise" in plan.parts:
        yield noise
    if "auto" in plan.parts:
        for batch in plan.choice_batches:
            yield lambda batch=batch: choice(batch)  # type: ignore[misc]


@contextmanager
def one_core(core: int) -> Iterator[None]:
    """Run this process and those that it starts on one core with one thread each."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    if core not in cores:
        raise SystemExit(f"--core {core}: this process may use {', '.join(map(str, sorted(cores)))}")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)


def _python(text: str) -> tuple[str, Path]:
    name, _, python = text.partition("=")
    if name not in (*REQUIREMENTS, EARLIER) or not python:
        raise ValueError(text)
    return name, Path(python)


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(DTYPES):
        raise ValueError(text)
    return names


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", choices=PARTS, action="append", help="one part; may be given more than once")
    add("--dtypes", type=_dtypes, metavar="D,D", help="usually fp32,bf16")
    add(
        "--batches", type=whole_numbers, metavar="B,B,...", help="of decode and auto; usually 1,16 and 1,4,16"
    )
    add("--seeds", type=int, metavar="N", help="repeats, after the one that is left out")
    add("--wait", action="store_true", help="wait for a line on stdin before the turns of each race")
    add("--core", type=int, default=0, help="the core that everything runs on")
    add("--root", type=Path, help="where the policy is saved for rivals, usually runs/decode")
    add(
        "--rival-python",
        type=_python,
        nargs="*",
        default=[],
        metavar="NAME=PYTHON",
        help="rivals that are installed",
    )
    add("--install-rivals", type=Path, metavar="DIR", help="make their virtual environments there")


def _plan(args: argparse.Namespace) -> tuple[Plan, list[str]]:
    """Return the plan, and why rivals are missing."""
    usual = QUICK if args.quick else Plan()
    installed, reasons = install(REQUIREMENTS, args.install_rivals) if args.install_rivals else ({}, [])
    pythons = installed | dict(args.rival_python)
    missing = [name for name in REQUIREMENTS if name not in pythons]
    reasons += [
        f"{name}: not asked for with --rival-python or --install-rivals" for name in missing if not reasons
    ]
    return replace(
        usual,
        parts=tuple(args.only or usual.parts),
        dtypes=args.dtypes or usual.dtypes,
        batches=args.batches or usual.batches,
        choice_batches=args.batches or usual.choice_batches,
        repeats=usual.repeats if args.seeds is None else args.seeds,
        root=args.root or usual.root,
        pythons=tuple(pythons.items()),
        begin=_wait if args.wait else usual.begin,
    ), reasons


def _wait() -> None:
    print("ready", file=sys.stderr, flush=True)
    sys.stdin.readline()


def _asked(args: argparse.Namespace) -> list[Report]:
    logging: Any = transformers.logging  # it carries no types
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    plan, reasons = _plan(args)
    console = Console(stderr=True)
    for reason in reasons:
        console.print(f"skipped {reason}", highlight=False)
    with one_core(args.core):
        return measure(plan, console.print, quick=args.quick)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    tables.main("decode", ABOUT, _asked, options=_options, words=words)


if __name__ == "__main__":
    main()
