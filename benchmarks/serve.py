"""Measure `aedit serve` beside `transformers serve` and vLLM, under overload, and beside bad clients.

    python -m benchmarks.serve [--only race|overload|memory|attacks] [--cores 0] [--quick]
        [--rival-python transformers=PYTHON vllm=PYTHON]

A Llama of 27 M parameters with random weights in fp32; one word of its tokenizer is one token, and no token
ends an answer. Clients sample at temperature 1, where no drafter can guess anything. All servers have the
same cores and take turns (a server is stopped while it is not its turn); the load comes from a process on
the other cores. Parts: a race, and overload, memory and attacks of ours alone.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any

import httpx
import psutil
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from aedit.system import end_with_parent
from benchmarks.kit.cluster import free_port
from benchmarks.kit.processes import ROOT, Dialogue, last_line
from benchmarks.kit.random_policy import PolicyShape, random_policy
from benchmarks.kit.statistics import Interval, percent, quantile
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.programs.serve_attackers import KINDS, Attack, Kind
from benchmarks.programs.serve_load import Load, Seen, prompt_of
from benchmarks.rollout import whole_numbers

# -- model of the serving benchmark: a random Llama and a tokenizer of one word per token id


SHAPE = PolicyShape(
    vocab_size=8192,
    hidden_size=384,
    intermediate_size=1152,
    num_hidden_layers=14,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=1024,
)
"""27 M parameters."""
QUICK_MODEL = PolicyShape(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=512,
)
_fast: Any = PreTrainedTokenizerFast  # its methods carry no types


def saved_model(shape: PolicyShape, directory: Path) -> Path:
    """Write model and tokenizer in fp32 for `from_pretrained`, and return the directory.

    The words t0, t1, ... are the tokens 0, 1, .... No token ends an answer, so each has all its tokens.
    """
    shutil.rmtree(directory, ignore_errors=True)
    random_policy(shape, "fp32").save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(shape.vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    _fast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False).save_pretrained(directory)
    return directory


# -- servers of one model directory: ours and the rivals, each in processes of its own on the same cores


OURS, TRANSFORMERS, VLLM = "aedit serve", "transformers serve", "vLLM"
STARTS_WITHIN_S, ENDS_WITHIN_S = 600.0, 60.0
"""vLLM compiles the model before it serves."""


class ServerError(Exception):
    """A server does not run here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What every server is given."""

    directory: Path
    """Of the model; the server's log is written beside it."""
    cores: tuple[int, ...]
    rows: int
    """Samples that are decoded at the same time."""
    max_tokens: int
    """Of prompt and answer."""


@dataclass(slots=True, eq=False)
class Server:
    """A server that answers."""

    name: str
    model: str
    """Name of the model in requests."""
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def rss_bytes(self) -> int:
        """Return the resident memory of its processes."""
        return sum(each.memory_info().rss for each in self._processes())

    def cpu_s(self) -> float:
        """Return the processor time of its processes."""
        return sum(sum(each.cpu_times()[:2]) for each in self._processes())

    def stop(self) -> None:
        """Stop its processes, so that it uses no core during the turns of others."""
        for each in self._processes():
            each.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let its processes go on."""
        for each in self._processes():
            each.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End its processes."""
        all_of_it = self._processes()
        for each in all_of_it:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(all_of_it, ENDS_WITHIN_S)
        self.process.wait(ENDS_WITHIN_S)

    def _processes(self) -> list[psutil.Process]:
        if self.process.poll() is not None:
            return []
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]


def command(name: str, python: Path, place: Place, port: int) -> list[str]:
    """Return the command line of a server."""
    directory, rows, most = str(place.directory), str(place.rows), str(place.max_tokens)
    if name == OURS:
        module = [str(python), "-m", "aedit.launch.cli", "serve", directory]
        return [*module, "--host=127.0.0.1", f"--port={port}", f"--rows={rows}", f"--max-tokens={most}"]
    if name == TRANSFORMERS:
        module = [str(python), "-m", "transformers.cli.transformers", "serve", directory]
        return [*module, "--device=cpu", "--dtype=float32", f"--port={port}", "--continuous-batching"]
    module = [str(python), "-m", "vllm.entrypoints.openai.api_server", f"--model={directory}"]
    sizes = [f"--max-num-seqs={rows}", f"--max-model-len={most}"]
    return [
        *module,
        "--dtype=float32",
        f"--port={port}",
        "--host=127.0.0.1",
        "--no-enable-prefix-caching",
        *sizes,
    ]


def environment(cores: Sequence[int]) -> dict[str, str]:
    """Return the environment of a server: one thread per core, nothing from a network."""
    return os.environ | {
        "OMP_NUM_THREADS": str(len(cores)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def _begin(parent: int, cores: Sequence[int]) -> None:
    end_with_parent(parent, signal.SIGTERM)
    os.sched_setaffinity(0, cores)


@contextmanager
def serving(
    name: str, place: Place, python: Path | None = None, extra: Sequence[str] = ()
) -> Iterator[Server]:
    """Start a server and wait until it answers; it has ended afterwards.

    Args:
        name: OURS, TRANSFORMERS or VLLM.
        place: Model, cores and sizes.
        python: Python of the virtual environment of a rival.
        extra: More words of its command line.

    Raises:
        ServerError: It has ended, or does not answer in time.
    """
    port, log = free_port(), place.directory.parent / f"{name.replace(' ', '-')}.log"
    words = [*command(name, python or Path(sys.executable), place, port), *extra]
    with log.open("wb") as out:
        process = subprocess.Popen(
            words,
            cwd=ROOT if name == OURS else place.directory.parent,
            env=environment(place.cores),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=partial(_begin, os.getpid(), place.cores),
        )
    server = Server(name, str(place.directory), f"http://127.0.0.1:{port}", process, log)
    try:
        server.model = _wait_until_it_answers(server)
        yield server
    finally:
        server.end()


def _wait_until_it_answers(server: Server) -> str:
    """Return the name of its model once it has answered a request for one token."""
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerError(f"{server.name} has ended: {last_line(server.log)}")
        with suppress(httpx.TransportError, KeyError, IndexError, ValueError):
            if server.name == OURS:  # others list models of a cache, too
                server.model = httpx.get(f"{server.url}/v1/models", timeout=5).json()["data"][0]["id"]
            body = {"model": server.model, "prompt": "t1 t2", "max_tokens": 1}
            if httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200:
                return server.model
        time.sleep(0.2)
    raise ServerError(f"{server.name} does not answer within {STARTS_WITHIN_S:g} s: {last_line(server.log)}")


# -- processes that generate load (serve_load, serve_attackers): asked and answered by lines of JSON


class Generator:
    """A process that does one job after the other."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue

    def begin(self, job: dict[str, Any]) -> None:
        """Begin a job."""
        self._dialogue.say(json.dumps(job))

    def end(self) -> dict[str, Any]:
        """Wait for the end of the job and return its answer. Raises RuntimeError if the process ended."""
        told: dict[str, Any] = json.loads(self._dialogue.read())
        return told

    def load(self, load: Load) -> Seen:
        """Put load on a server and return what its clients saw."""
        self.begin(asdict(load))
        return Seen(**self.end())


@contextmanager
def generator(cores: Sequence[int], module: str = "serve_load") -> Iterator[Generator]:
    """Start the program `module` on these cores; it has ended afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.programs.{module}"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=partial(_begin, os.getpid(), cores),
    )
    try:
        yield Generator(Dialogue(process, module))
    finally:
        process.kill()
        process.communicate()


# -- race of servers of one model: all take turns at the same load on the same cores


COMPARED_TOKENS = 16
"""Tokens of each greedy answer that is compared."""
Say = Callable[[str], None]
_auto: Any = AutoModelForCausalLM  # its methods carry no types


@dataclass(slots=True)
class Turns:
    """What the clients saw of one server at one number of clients, by turn."""

    seen: list[Seen] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Return the tokens per second of each turn."""
        return [each.tokens / each.seconds for each in self.seen]

    def all_of(self, name: str) -> list[float]:
        """Return `first_s` or `gaps_s` of all turns."""
        return [value for each in self.seen for value in getattr(each, name)]


@contextmanager
def only(server: Server, servers: Sequence[Server]) -> Iterator[None]:
    """Stop all servers but one."""
    for each in servers:
        (each.go_on if each is server else each.stop)()
    try:
        yield
    finally:
        for each in servers:
            each.go_on()


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Plan of a race."""

    clients: tuple[int, ...]
    repeats: int
    load: Load
    warm_up_s: float


def race(servers: Sequence[Server], clients: Generator, plan: Race, say: Say) -> dict[tuple[str, int], Turns]:
    """Return the turns by name of the server and number of clients. Each turn begins with another server."""
    found: dict[tuple[str, int], Turns] = {}
    for count in plan.clients:
        for repeat in range(-1, plan.repeats):  # the first turn warms up, and is not counted
            order = [*servers[repeat % len(servers) :], *servers[: repeat % len(servers)]]
            for server in order:
                load = replace(
                    plan.load, url=server.url, model=server.model, clients=count, seed=1000 * count + repeat
                )
                load = replace(load, leaves=True)
                if repeat < 0:
                    load = replace(load, seconds=plan.warm_up_s)
                with only(server, servers):
                    seen = clients.load(load)
                    greedy_of(server, [prompt_of(load, 0, 0)], 1)  # answers that were left have ended then
                if repeat >= 0:
                    found.setdefault((server.name, count), Turns()).seen.append(seen)
                    say(f"{count} clients, {server.name}: {seen.tokens / seen.seconds:.1f} tokens/s")
    return found


# --- the same tokens


def greedy_of(server: Server, prompts: Sequence[str], num_tokens: int) -> list[str]:
    """Return the server's greedy answers."""
    answers = []
    for prompt in prompts:
        body = {"model": server.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        told = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
        answers.append(" ".join(told["choices"][0]["text"].split()))
    return answers


def greedy_of_transformers(directory: str, prompts: Sequence[str], num_tokens: int) -> list[str]:
    """Return the greedy answers of `transformers.generate`."""
    torch.set_num_threads(1)  # threads that wait for each other take very long on a busy machine
    model = _auto.from_pretrained(directory, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([[int(word.removeprefix("t")) for word in prompt.split()]])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(" ".join(f"t{token}" for token in made[0, ids.shape[1] :].tolist()))
    return answers


def same_answers(
    servers: Sequence[Server], load: Load, directory: str, num_prompts: int
) -> Mapping[str, tuple[int, int]]:
    """Return for each server how many of its greedy answers equal those of `generate`, and of how many."""
    prompts = [prompt_of(load, 0, number) for number in range(num_prompts)]
    num_tokens = min(load.max_tokens, COMPARED_TOKENS)
    wanted = greedy_of_transformers(directory, prompts, num_tokens)
    found = {}
    for server in servers:
        with only(server, servers):
            got = greedy_of(server, prompts, num_tokens)
        found[server.name] = sum(a == b for a, b in zip(got, wanted, strict=True)), len(wanted)
    return found


# -- phases of one server of ours: overload, ten thousand requests, attackers


# --- overload


@dataclass(frozen=True, slots=True)
class Overload:
    """Load that the server can bear, more than it can, and the first one again."""

    before: Seen
    during: Seen
    after: Seen


def overload(server: Server, clients: Generator, bearable: Load, too_much: int, say: Say) -> Overload:
    """Return what clients see of a server before, during and after an overload.

    Args:
        server: The server.
        clients: Generates the load.
        bearable: Load with as many clients as the server has rows.
        too_much: Number of clients of the overload, who try again after Retry-After.
        say: Told the progress.
    """
    phases = []
    for name, count in (("before", bearable.clients), ("during", too_much), ("after", bearable.clients)):
        seen = clients.load(replace(bearable, url=server.url, model=server.model, clients=count))
        say(f"{name}: {count} clients, {seen.tokens / seen.seconds:.1f} tokens/s, {seen.refused} answers 429")
        phases.append(seen)
    return Overload(*phases)


# --- memory


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory while requests are answered."""

    finished: int
    refused: int
    failures: tuple[str, ...]
    at: tuple[int, ...]
    """Requests that were answered at each reading."""
    rss_bytes: tuple[int, ...]

    def slope_bytes(self) -> float:
        """Return the growth per request: a line through the readings of the second half."""
        half = [(n, rss) for n, rss in zip(self.at, self.rss_bytes, strict=True) if n >= self.at[-1] / 2]
        return linear_regression(*zip(*half, strict=True)).slope


def memory(server: Server, clients: Generator, load: Load, parts: int, say: Say) -> Memory:
    """Return the server's memory after each of `parts` loads, which together are all requests."""
    at, rss, finished, refused = [0], [server.rss_bytes()], 0, 0
    failures: list[str] = []
    for part in range(parts):
        seen = clients.load(replace(load, url=server.url, model=server.model, seed=part))
        finished, refused = finished + seen.finished, refused + seen.refused
        failures += seen.failures
        at.append(finished)
        rss.append(server.rss_bytes())
        say(f"{finished} requests: {rss[-1] / 2**20:.1f} MiB")
    return Memory(finished, refused, tuple(failures), tuple(at), tuple(rss))


# --- attackers


@dataclass(slots=True)
class Attacked:
    """What well-behaved clients saw with and without attackers of one kind, by turns."""

    calm: list[Seen] = field(default_factory=list)
    attacked: list[Seen] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    begun: int = 0

    def wrong(self) -> int:
        """Return the number of answers that differ from the calm ones to equal requests."""
        right = {key: text for seen in self.calm for key, text in seen.texts.items()}
        return sum(
            text != right[key] for seen in self.attacked for key, text in seen.texts.items() if key in right
        )

    def compared(self) -> int:
        """Return the number of answers that have a calm one."""
        right = {key for seen in self.calm for key in seen.texts}
        return sum(key in right for seen in self.attacked for key in seen.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attacks:
    """Plan of the attacks."""

    kinds: Sequence[Kind] = KINDS
    rates_hz: dict[Kind, float] = field(
        default_factory=lambda: {
            "abandoned": 2.0,
            "malformed": 20.0,
            "oversized": 1.0,
            "unauthenticated": 20.0,
            "slow": 20.0,
        }
    )
    repeats: int = 3


def attacked(
    server: Server, control_url: str, load: Load, pair: tuple[Generator, Generator], plan: Attacks
) -> Iterator[tuple[Kind, Attacked]]:
    """Yield for each kind what well-behaved clients saw, with and without the attackers by turns.

    pair: the clients and the attackers.
    """
    clients, attackers = pair
    load = replace(load, url=server.url, model=server.model, sends_seed=True)
    for kind in plan.kinds:
        result = Attacked()
        for repeat in range(plan.repeats):
            result.calm.append(clients.load(load))
            attack = Attack(
                url=server.url,
                control_url=control_url,
                model=server.model,
                kind=kind,
                seconds=load.seconds,
                rate_hz=plan.rates_hz[kind],
                seed=repeat,
            )
            with _attack(attackers, asdict(attack), result):
                result.attacked.append(clients.load(load))
        yield kind, result


@contextmanager
def _attack(attackers: Generator, attack: dict[str, Any], result: Attacked) -> Iterator[None]:
    attackers.begin(attack)
    try:
        yield
    finally:
        told = attackers.end()
        result.begun += told["begun"]
        for status, count in told["statuses"].items():
            result.statuses[status] = result.statuses.get(status, 0) + count


# -- tables and bars of the serving benchmark


GOODPUT = 0.9
"""Of the goodput before an overload that must remain during it and after it."""
GROWTH_BYTES = 1024.0
"""Most that the memory may grow per request: 10 MiB in ten thousand."""
HARM = 1.5
"""Most by which attackers, at the rates of `Attacks`, may lengthen the median times of other clients."""


def judged(bars: Iterator[Bar], quick: bool) -> tuple[Bar, ...]:
    """Return the bars; a quick run decides nothing about times and memory."""
    sure = ("equal", "failed", "Retry-After")
    return tuple(
        replace(bar, passed=None) if quick and not any(word in bar.text for word in sure) else bar
        for bar in bars
    )


def milliseconds(values: Sequence[float]) -> tuple[str, str]:
    """Return the median and the 99th percentile."""
    if not values:
        return "-", "-"
    return f"{1000 * quantile(values, 0.5):.0f}", f"{1000 * quantile(values, 0.99):.0f}"


def _figures(seen: Seen) -> dict[str, Any]:
    told = asdict(seen)
    del told["texts"]
    return told


# --- race


def race_report(
    found: Mapping[tuple[str, int], Turns],
    same: Mapping[str, tuple[int, int]],
    method: tuple[str, ...],
    quick: bool,
) -> Report:
    """Return the table of the race."""
    rows = []
    for (name, clients), turns in found.items():
        ours = found[OURS, clients].speeds
        ratio = str(Interval.of([a / b for a, b in zip(ours, turns.speeds, strict=True)]))
        rows.append(
            (
                name,
                str(clients),
                str(Interval.of(turns.speeds)),
                "" if name == OURS else ratio,
                *milliseconds(turns.all_of("first_s")),
                *milliseconds(turns.all_of("gaps_s")),
                percent(sum(each.cpu_s for each in turns.seen) / sum(each.seconds for each in turns.seen), 0),
            )
        )
    columns = (
        "server",
        "clients",
        "tokens/s",
        "ours / it",
        "first ms p50",
        "p99",
        "between ms p50",
        "p99",
        "load's core",
    )
    figures = {
        f"{name}, {clients}": [_figures(one) for one in turns.seen]
        for (name, clients), turns in found.items()
    }
    return Report(
        name="Concurrent streaming clients",
        method=method,
        columns=columns,
        rows=tuple(rows),
        bars=judged(_race_bars(found, same), quick),
        figures=figures,
    )


def _race_bars(found: Mapping[tuple[str, int], Turns], same: Mapping[str, tuple[int, int]]) -> Iterator[Bar]:
    for name, (equal, num) in same.items():
        text = f"{name}: {equal} of {num} greedy answers equal those of generate"
        yield Bar(text, equal == num if name == OURS else None)
    failures = [
        text
        for (name, _), turns in found.items()
        if name == OURS
        for one in turns.seen
        for text in one.failures
    ]
    yield Bar(f"our requests that failed: {len(failures)}, bar 0 {failures[:1]}", not failures)
    for (name, clients), turns in found.items():
        if name == TRANSFORMERS:
            ours = found[OURS, clients].speeds
            ratio = Interval.of([a / b for a, b in zip(ours, turns.speeds, strict=True)])
            yield Bar(f"{clients} clients: {ratio} x the tokens/s of {name}, bar 1", ratio.middle >= 1)


# --- overload


def overload_report(seen: Overload, method: tuple[str, ...], quick: bool) -> Report:
    """Return the table of the overload."""
    rows = []
    for name in ("before", "during", "after"):
        one: Seen = getattr(seen, name)
        rows.append(
            (
                name,
                f"{one.tokens / one.seconds:.1f}",
                str(one.finished),
                str(one.refused),
                str(len(one.failures)),
                *milliseconds(one.first_s),
                *milliseconds(one.gaps_s),
            )
        )
    columns = (
        "phase",
        "tokens/s",
        "answered",
        "429",
        "failed",
        "first ms p50",
        "p99",
        "between ms p50",
        "p99",
    )
    return Report(
        name="Overload",
        method=method,
        columns=columns,
        rows=tuple(rows),
        bars=judged(_overload_bars(seen), quick),
        figures={name: _figures(getattr(seen, name)) for name in ("before", "during", "after")},
    )


def _overload_bars(seen: Overload) -> Iterator[Bar]:
    during = seen.during
    with_wait = len(during.waits_s)
    text = f"{with_wait} of {during.refused} answers 429 have Retry-After"
    yield Bar(text, 0 < during.refused == with_wait and min(during.waits_s) > 0)
    failed = sum(len(one.failures) for one in (seen.before, during, seen.after))
    yield Bar(f"requests that failed otherwise: {failed}, bar 0", not failed)
    before = seen.before.tokens / seen.before.seconds
    for name in ("during", "after"):
        one: Seen = getattr(seen, name)
        share = one.tokens / one.seconds / before
        yield Bar(f"goodput {name}: {share:.2f} of before, bar {GOODPUT}", share >= GOODPUT)


# --- memory


def memory_report(seen: Memory, method: tuple[str, ...], quick: bool) -> Report:
    """Return the table of the memory."""
    rows = tuple((str(n), f"{rss / 2**20:.1f}") for n, rss in zip(seen.at, seen.rss_bytes, strict=True))
    slope = seen.slope_bytes()
    bars = (
        Bar(f"requests that failed: {len(seen.failures)}, bar 0 {seen.failures[:1]}", not seen.failures),
        Bar(f"second half: {slope:.0f} bytes per request, bar {GROWTH_BYTES:.0f}", slope <= GROWTH_BYTES),
    )
    return Report(
        name="Resident memory",
        method=method,
        columns=("requests", "MiB"),
        rows=rows,
        bars=judged(iter(bars), quick),
        figures=asdict(seen),
    )


# --- attackers


def attacks_report(found: Mapping[str, Attacked], method: tuple[str, ...], quick: bool) -> Report:
    """Return the table of the attacks."""
    rows = []
    for kind, result in found.items():
        calm, attacked = (
            [value for one in seen for value in one.first_s] for seen in (result.calm, result.attacked)
        )
        statuses = ", ".join(f"{status} {count}" for status, count in sorted(result.statuses.items()))
        rows.append(
            (
                kind,
                f"{result.begun}: {statuses}",
                *(str(Interval.of(_speeds(seen))) for seen in (result.calm, result.attacked)),
                " / ".join(milliseconds(calm)),
                " / ".join(milliseconds(attacked)),
                f"{result.compared() - result.wrong()} of {result.compared()}",
            )
        )
    columns = (
        "attackers",
        "their requests",
        "tokens/s calm",
        "attacked",
        "first ms calm",
        "attacked",
        "equal answers",
    )
    return Report(
        name="Well-behaved clients beside others",
        method=method,
        columns=columns,
        rows=tuple(rows),
        bars=judged(_attack_bars(found), quick),
        figures={
            kind: {
                "begun": result.begun,
                "statuses": result.statuses,
                "calm": [_figures(one) for one in result.calm],
                "attacked": [_figures(one) for one in result.attacked],
            }
            for kind, result in found.items()
        },
    )


def _speeds(seen: Sequence[Seen]) -> list[float]:
    return [one.tokens / one.seconds for one in seen]


def _attack_bars(found: Mapping[str, Attacked]) -> Iterator[Bar]:
    for kind, result in found.items():
        failed = [text for one in (*result.calm, *result.attacked) for text in one.failures]
        wrong, compared = result.wrong(), result.compared()
        text = f"{kind}: {compared - wrong} of {compared} answers equal, {len(failed)} failed {failed[:1]}"
        yield Bar(text, bool(compared) and not wrong and not failed)
        errors = sum(count for status, count in result.statuses.items() if status.startswith("5"))
        yield Bar(f"{kind}: requests of attackers that failed with a 5xx: {errors}, bar 0", not errors)
        calm, attacked = (
            quantile([value for one in seen for value in one.first_s] or [0.0], 0.5)
            for seen in (result.calm, result.attacked)
        )
        ratio = attacked / max(calm, 1e-9)
        yield Bar(f"{kind}: median time to the first token {ratio:.2f} x, bar {HARM}", ratio <= HARM)


# -- the benchmark


ABOUT = "Measure aedit serve beside transformers serve and vLLM, under overload, and beside bad clients."
PARTS = ("race", "overload", "memory", "attacks")
RIVALS = {"transformers": TRANSFORMERS, "vllm": VLLM}
"""Each is installed in a virtual environment of its own: `transformers[serving] torch`, and `vllm-cpu`."""
PROMPTS_COMPARED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement."""

    shape: PolicyShape = SHAPE
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
    shape=QUICK_MODEL,
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
        directory = saved_model(plan.shape, Path(folder) / "model")
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
    reasons: list[str] = []
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
    report = race_report(found, same, method, plan.quick)
    missing = [name for name in RIVALS if name not in dict(plan.pythons)]
    reasons += [f"{RIVALS[name]}: not asked for with --rival-python" for name in missing]
    return replace(report, bars=(*report.bars, *(Bar(text, None) for text in reasons)))


def _overload(plan: Plan, place: Place, say: Callable[[str], None]) -> Report:
    words = ("--max-waiting=16",)
    with serving(OURS, replace(place, rows=8), extra=words) as server, generator(plan.others) as clients:
        seen = overload(server, clients, replace(plan.load, clients=8), plan.too_much, say)
    more = f"8 rows, 16 places for waiting samples; 8 clients, then {plan.too_much}, then 8; "
    more += f"{plan.seconds:g} s each."
    return overload_report(seen, _method(plan, more), plan.quick)


def _memory(plan: Plan, place: Place, say: Callable[[str], None]) -> Report:
    each = plan.requests // plan.memory_parts
    load = replace(plan.load, clients=16, max_tokens=4, most_requests=each, seconds=3600.0)
    with serving(OURS, place) as server, generator(plan.others) as clients:
        seen = memory(server, clients, load, plan.memory_parts, say)
    more = f"{plan.requests} requests of 4 tokens by 16 clients; memory of the server after each {each}."
    return memory_report(seen, _method(plan, more), plan.quick)


def _attacks(plan: Plan, place: Place, say: Callable[[str], None]) -> Report:
    found = {}
    with ExitStack() as stack:
        control, keys = f"127.0.0.1:{free_port()}", place.directory.parent / "keys"
        keys.write_text(secrets.token_hex() + "\n")
        words = (f"--control={control}", f"--control-key-file={keys}")
        server = stack.enter_context(serving(OURS, place, extra=words))
        clients = stack.enter_context(generator(plan.others))
        attackers = stack.enter_context(generator(plan.others, "serve_attackers"))
        pair = clients, attackers
        for kind, result in attacked(server, f"http://{control}", plan.load, pair, plan.attacks):
            say(f"{kind}: {result.begun} requests, {result.statuses}")
            found[str(kind)] = result
    rates = ", ".join(f"{kind} {rate:g}" for kind, rate in plan.attacks.rates_hz.items())
    more = (
        f"4 clients, with and without attackers by turns of {plan.seconds:g} s; requests per second: {rates}."
    )
    return attacks_report(found, _method(plan, more), plan.quick)


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
    given: dict[str, Any] = {
        name: getattr(args, name) for name in ("clients", "repeats", "seconds") if getattr(args, name)
    }
    pythons, parts = tuple(args.rival_python), tuple(args.only or PARTS)
    plan = replace(plan, cores=args.cores, pythons=pythons, parts=parts, **given)
    return measure(plan, Console(stderr=True).print)


if __name__ == "__main__":
    main("serve", ABOUT, _asked, options=_options)
