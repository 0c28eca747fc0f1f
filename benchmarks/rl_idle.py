"""Measure where the nodes of a reinforcement learning run wait, by role and mode.

    python -m benchmarks.rl_idle [--steps 120] [--only NAME] [--keep DIRECTORY] [--quick]
    python -m benchmarks.rl_idle --roles [--seconds 80] [--quick]

Each row is one node of a short `aedit run configs/tiny-rl.toml`, changed in the ways that `MODES` says. The
times are those that the node has written to its metrics, from the end of the supervised warm-up on.

With `--roles`: three nodes that wait for no other one, at speeds 4:2:1, with a rollout worker each, and in
half of the ways a rollout server. Processes, connections, admission and windows are those of a run; engines
and training steps have a fixed pace, so that all fit on two cores.
"""

import argparse
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
from rich.console import Console

from aedit.edit import Shards
from aedit.launch.config import RLConfig
from aedit.launch.data import SampleOrder
from aedit.launch.node.rl_groups import GroupPipeline, GroupStream
from aedit.launch.records import NodeRecords, RLMetric
from aedit.spec_rollout import WorkerConfig, WorkerSource
from aedit.spec_rollout.remote import Servers as Connections
from aedit.spec_rollout.rl import Group, Problem, RewardReport
from aedit.spec_rollout.sampling import Sampling
from benchmarks.kit.rl_runs import CONFIG, RLRun, run_rl
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Report, main
from benchmarks.programs.rollout_server import RUN, STOP, VOCABULARY, make_policy, policy_layout
from benchmarks.rl_servers import MAKE, PROMPT_TOKENS, SILENT_S, Plan, Servers, engine_of

ABOUT = "Where the nodes of a reinforcement learning run wait: seconds per step by cause, role and mode."
CAUSES = ("hub", "round", "longest sample", "rollouts", "rank", "rewards")
STEPS = "--edit.schedule=steps"
"""Rounds by steps: all nodes wait for the slowest."""
THIRD = ("--local.slowdown", "1", "3", "--drafter.kind=off")
"""The second node's steps take three times as long; without a drafter, which would train in waits."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to run."""

    name: str
    nodes: int = 2
    flags: tuple[str, ...] = ()
    hub: bool = True


MODES = (
    Mode("hub, quorum 1"),
    Mode("hub, quorum all", flags=("--hub.quorum=all", STEPS)),
    Mode("one world, no hub", hub=False),
    Mode("hub, quorum 1, 2 ranks", 1, ("--local.ranks=2", "--local.slowdown=1")),
    Mode("hub, quorum 1, 1 worker", flags=("--rl.workers=1",)),
    Mode("one world 1:3, no pool", flags=THIRD, hub=False),
    Mode("one world 1:3", flags=(*THIRD, "--rl.pool=true"), hub=False),
)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Seconds per step of one node."""

    mode: str
    node: int
    slowdown: float
    steps: int
    step_s: float
    rollout_s: float
    train_s: float
    idle_s: dict[str, float]
    used_s: float
    """Processor time of idle work."""


def waiting(mode: str, node: NodeRecords, slowdown: float) -> Waiting:
    """Return what the lines of a node's metrics say, from the first batch of rollouts on."""
    lines = [(line, line.rl) for line in node.metrics if line.rl is not None and line.rl.rollouts > 0]
    if len(lines) < 2:
        raise RuntimeError(f"{mode}: node {node.index} has {len(lines)} lines of rollouts; run it for longer")
    (before, first), (after, last) = lines[0], lines[-1]
    steps = after.step - before.step

    def per_step(value: Callable[[RLMetric], float]) -> float:
        return (value(last) - value(first)) / steps

    idle_s = {c: (last.idle_s.get(c, 0.0) - first.idle_s.get(c, 0.0)) / steps for c in CAUSES}
    return Waiting(
        mode,
        node.index,
        slowdown,
        steps,
        (after.t - before.t) / steps,
        per_step(lambda rl: rl.rollout_s),
        per_step(lambda rl: rl.train_s),
        idle_s,
        per_step(lambda rl: rl.idle_used_s),
    )


def without_hub(directory: Path) -> Path:
    """Write the preset without its hub, and return the file."""
    tables = tomllib.loads(CONFIG.read_text())
    del tables["hub"]
    tables["edit"] |= {"schedule": "steps", "landing": "forward"}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "without-hub.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def measure(modes: Sequence[Mode], flags: Sequence[str], keep: Path, say: Callable[[str], None]) -> Report:
    """Run all modes, in directories below `keep`."""
    found: list[Waiting] = []
    for mode in modes:
        place = keep / mode.name.replace(",", "").replace(" ", "-")
        config = CONFIG if mode.hub else without_hub(place)
        run = run_rl(RLRun(nodes=mode.nodes, flags=(*flags, *mode.flags), config=config), place)
        slowdown = run.config["local"]["slowdown"]
        found += [waiting(mode.name, node, slowdown[node.index]) for node in run.nodes]
        say(f"{mode.name}: {len(run.nodes)} nodes")
    return report(found)


def report(found: Sequence[Waiting]) -> Report:
    return Report(
        name="Milliseconds per step of each node, after the warm-up",
        method=(
            "`aedit run configs/tiny-rl.toml` on this machine, changed as the first column says; a node with"
            " a slowdown of 2 takes twice as long for each step.",
            "Waits by cause; rollouts include the wait for the longest sample. Used: processor time of the"
            " drafter's training.",
        ),
        columns=("mode", "node", "slowdown", "step", "rollouts", "training", *CAUSES, "all waits", "used"),
        rows=tuple(_row(one) for one in found),
        bars=(),
        figures={"nodes": [asdict(one) for one in found]},
    )


def _row(one: Waiting) -> tuple[str, ...]:
    waits_s = sum(one.idle_s.values())
    times = (one.step_s, one.rollout_s, one.train_s, *one.idle_s.values())
    return (
        one.mode,
        str(one.node),
        f"{one.slowdown:g}",
        *(f"{1e3 * seconds:.0f}" for seconds in times),
        percent(waits_s / one.step_s),
        f"{1e3 * one.used_s:.0f}",
    )


# -- roles of asynchronous runs, at a fixed pace

SLOWER = (1, 2, 4)
PACE = Plan(batches=0, groups=4, group_size=8, rows=32, max_new_tokens=200, step_s=0.015, train_s=1.0)
"""Of the fastest node. The policy ends its answers by chance, so that few are long."""
WARM = 2
"""Batches of each node before the measurement."""
ROLES = {
    "longest sample": ("trainer: longest sample", "drafter"),
    "rollouts": ("trainer: rollouts", "drafter"),
    "ahead": ("worker: ahead of max_staleness", "nothing: its trainer computes"),
    "no requests": ("server: no requests", "drafter"),
}
"""Name of each kind of window, and what a run does in it."""


@dataclass(slots=True)
class AtOnce:
    """`RewardPool` whose rewards take no time."""

    _made: list[tuple[Group, RewardReport]] = field(default_factory=list)

    def submit(self, group: Group, texts: Sequence[str]) -> None:
        rewards = tuple(float(len(rollout.tokens)) for rollout in group.rollouts)
        self._made.append((replace(group, rewards=rewards), RewardReport(values={}, seconds=0.0)))

    def ready(self) -> list[tuple[Group, RewardReport]]:
        made, self._made = self._made, []
        return made

    def wait(self, timeout_s: float) -> list[tuple[Group, RewardReport]]:
        return self.ready()


@dataclass(slots=True)
class RoleNode:
    """A trainer with a worker, for which all seconds are multiplied by `slower`."""

    slower: int
    staleness: int
    addresses: Sequence[str]
    waited_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def window(self, cause: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self.waited_s[cause] = self.waited_s.get(cause, 0.0) + time.monotonic() - began_s

    def run(self, begun: threading.Barrier, seconds: float) -> dict[str, float]:
        """Return the share of the time by kind of window, and the number of steps."""
        model: Any = make_policy()
        config = WorkerConfig(
            rows=PACE.rows,
            max_tokens=PACE.max_tokens,
            dtype=torch.float64,
            make=MAKE,
            options={"step_s": PACE.step_s * self.slower},
        )
        servers = None
        if self.addresses:
            settings = {"run": RUN, "layout": policy_layout(), "silent_s": SILENT_S}
            servers = Connections.at(*self.addresses, trainer=f"node {self.slower}", **settings)
        with ExitStack() as stack:
            source = WorkerSource(model, config, servers=servers, window=self.window)
            stack.callback(source.close)
            stream, version = self._stream(source), 1
            for _ in range(WARM):
                version = self._step(model, source, stream, version)
            begun.wait()
            version = self._step(model, source, stream, version)  # brings the worker's wait for the others
            before, began_s, steps = self._so_far(source), time.monotonic(), 0
            while time.monotonic() < began_s + seconds:
                version, steps = self._step(model, source, stream, version), steps + 1
            elapsed_s, after = time.monotonic() - began_s, self._so_far(source)
        return {name: (after[name] - before[name]) / elapsed_s for name in after} | {"steps": steps}

    def _so_far(self, source: WorkerSource) -> dict[str, float]:
        names = ("longest sample", "rollouts")
        return {name: self.waited_s.get(name, 0.0) for name in names} | {
            "ahead": float(source.status()["worker_idle_s"])
        }

    def _step(self, model: Any, source: WorkerSource, stream: GroupStream, version: int) -> int:
        """Take a step; return the version of the weights after it."""
        source.update_weights(dict(model.state_dict(keep_vars=True)), version)
        groups = stream.next_batch()
        with torch.no_grad():
            model.lm_head.weight.mul_(1.0001)
        time.sleep(PACE.train_s * self.slower)
        stream.trained(len(groups))
        return version + 1

    def _stream(self, source: WorkerSource) -> GroupStream:
        rewards: Any = AtOnce()
        return GroupStream(
            config=RLConfig(
                groups=PACE.groups, group_size=PACE.group_size, max_staleness=self.staleness, workers=1
            ),
            order=SampleOrder(10_000, seed=self.slower),
            choose=lambda position, index: _problem(index),
            pipeline=GroupPipeline(
                source=source, rewards=rewards, decode=str, window=self.window, report=lambda *each: None
            ),
            shards=Shards(),
            sampling=Sampling(max_new_tokens=PACE.max_new_tokens, stop_tokens=(STOP,)),
            check_stop=lambda: None,
        )


def _problem(index: int) -> Problem:
    drawn = torch.randint(1, VOCABULARY, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(index))
    return Problem(index=index, prompt="", tokens=tuple(map(int, drawn)), columns={})


@dataclass(frozen=True, slots=True)
class Offered:
    """Shares of the time of each node, and of the server."""

    staleness: int
    server: bool
    nodes: tuple[Mapping[str, float], ...]
    no_requests: float | None


def offered(staleness: int, server: bool, seconds: float) -> Offered:
    """Run the nodes, with a server or without."""
    engines = {"server": engine_of(PACE)} if server else {}
    with Servers(engines) as servers, ThreadPoolExecutor(len(SLOWER)) as threads:
        shares: list[float] = []
        running = [each.running for each in servers.servers.values()]

        def idle_s() -> float:
            return sum(float(each.ask("idle")) for each in running if each is not None)

        begun = threading.Barrier(len(SLOWER) + 1)
        nodes = [RoleNode(slower, staleness, servers.addresses) for slower in SLOWER]
        futures = [threads.submit(_run_or_break, node, begun, seconds) for node in nodes]
        try:
            begun.wait()
            before_s, began_s = idle_s(), time.monotonic()
            time.sleep(seconds)
            shares.append((idle_s() - before_s) / (time.monotonic() - began_s))
        except threading.BrokenBarrierError:
            pass  # the node's error comes from its future
        found = tuple(future.result() for future in futures)
    return Offered(staleness, server, found, shares[0] if server else None)


def _run_or_break(node: RoleNode, begun: threading.Barrier, seconds: float) -> dict[str, float]:
    try:
        return node.run(begun, seconds)
    except BaseException:
        begun.abort()  # the others would wait for ever
        raise


def roles_report(found: Sequence[Offered]) -> Report:
    """Return the table of what each kind of window offers."""
    rows: list[tuple[str, ...]] = []
    for one in found:
        setting = (str(one.staleness), "1" if one.server else "0")
        for kind, (name, used_by) in ROLES.items():
            if kind != "no requests":
                rows.append((name, *setting, *(percent(node[kind]) for node in one.nodes), used_by))
            elif one.no_requests is not None:
                rows.append((name, *setting, percent(one.no_requests), "", "", used_by))
    return Report(
        name="Share of the time of each role that is a window, by the node's time per step",
        method=(
            "Three nodes that wait for no other one, with a worker each. A decode step of the fastest lasts"
            f" {1e3 * PACE.step_s:.0f} ms, a training step {1e3 * PACE.train_s:.0f} ms; of the others twice"
            " and four times as long.",
            f"A batch has {PACE.groups * PACE.group_size} samples of at most {PACE.max_new_tokens} tokens."
            " The server is shared, and as fast as the fastest node.",
        ),
        columns=("window", "max_staleness", "servers", *(f"{slower}x" for slower in SLOWER), "used by"),
        rows=tuple(rows),
        bars=(),
        figures={"offered": [asdict(one) for one in found]},
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=120, help="of each run, per node on average")
    parser.add_argument("--roles", action="store_true", help="the table of roles, at a fixed pace")
    parser.add_argument("--seconds", type=float, default=80.0, help="with --roles: of each of its four ways")
    parser.add_argument("--only", choices=[mode.name for mode in MODES])
    parser.add_argument(
        "--keep", type=Path, help="keep the runs here; those that have ended are not run again"
    )


def _asked(args: argparse.Namespace) -> Report:
    say: Callable[[str], Any] = Console(stderr=True).print
    if args.roles:
        torch.set_num_threads(1)
        ways = [(0, True)] if args.quick else [(0, False), (2, False), (0, True), (2, True)]
        seconds = 5.0 if args.quick else args.seconds
        return roles_report([offered(staleness, server, seconds) for staleness, server in ways])
    modes = [mode for mode in MODES if args.only in (None, mode.name)]
    flags = [f"--train.steps={args.steps}", "--rl.supervised_steps=20", "--rl.eval_every=0"]
    if args.quick:
        modes = modes[:1]
        flags = ["--train.steps=8", "--rl.supervised_steps=2", "--rl.eval_every=0", "--rl.groups=2"]
    with tempfile.TemporaryDirectory() as made:
        return measure(modes, flags, args.keep or Path(made), say)


if __name__ == "__main__":
    main("rl_idle", ABOUT, _asked, options=_options)
