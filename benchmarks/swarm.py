"""Compare a swarm with hivemind's averaging: the same model, data, peers and time, in real processes.

Four unequal peers on this machine train by real computation. `swarm`: parts with owners. `averages`: the
same training, the peers average by hivemind (`swarm.exchange = "hivemind"`), and train on meanwhile or wait.
`Optimizer`: `hivemind.Optimizer` with local updates and no delayed averaging; a round after as many samples
as the swarm takes in an interval. `OpenDiLoCo`: the same with an outer Nesterov step on each average.
Bars: the swarm's trainers wait at most 1 % of the time, and its loss is at most 1 % above the best of the
others at equal tokens and at equal time.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from aedit.launch.records import NodeRecords, read_run
from benchmarks.kit.processes import end, run_jobs, start
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.programs.optimizer_peer import Job, PeerOutcome

# -- outcome of one way of training, equal for all of them


@dataclass(frozen=True, slots=True)
class Outcome:
    """Work and waits of all peers of a run."""

    peers: tuple[PeerOutcome, ...]
    sent: tuple[int, ...]
    """Bytes that each peer sent to others."""
    differing: int | None = None
    """Averages found to differ from those of others; None if nobody looked."""

    @property
    def tokens(self) -> float:
        """Return the tokens of all peers."""
        return sum(peer.progress[-1][1] for peer in self.peers)

    @property
    def stall(self) -> float:
        """Return the share of the peers' time in which their trainers waited."""
        return sum(peer.waited_s for peer in self.peers) / sum(peer.wall_s for peer in self.peers)

    @property
    def worst_stall(self) -> float:
        """Return the largest share of any peer."""
        return max(peer.waited_s / peer.wall_s for peer in self.peers)

    @property
    def curve(self) -> list[tuple[float, float, float]]:
        """Return seconds, tokens of all peers until then, and held-out loss, in order."""
        times = [(t, loss) for peer in self.peers for t, loss in peer.losses]
        return [(t, self.tokens_at(t), loss) for t, loss in sorted(times)]

    def tokens_at(self, t: float) -> float:
        """Return the tokens of all peers after `t` seconds."""
        return sum(_at(t, peer.progress) for peer in self.peers)

    def loss_at_tokens(self, tokens: float) -> float:
        """Return the held-out loss after so many tokens, interpolated."""
        return _at(tokens, [(n, loss) for _, n, loss in self.curve])

    def loss_at_time(self, t: float) -> float:
        """Return the held-out loss after `t` seconds, interpolated."""
        return _at(t, [(t, loss) for t, _, loss in self.curve])


def _at(x: float, points: Sequence[tuple[float, float]]) -> float:
    return float(np.interp(x, [at for at, _ in points], [loss for _, loss in points]))


# -- bytes between the peers of a run on this machine, by the kernel's counters of their TCP connections


_PEER = re.compile(r"\blocal-(\d+)\b")
"""Mark of a peer's number in the command line of its processes, or of one that has started them."""
_ROW = re.compile(r"^\S+\s+\d+\s+\d+\s+(?P<local>\S+)\s+(?P<remote>\S+).*?pid=(?P<pid>\d+)")
_SENT, _AGAIN = re.compile(r"\bbytes_sent:(\d+)"), re.compile(r"\bbytes_retrans:(\d+)")
_LOOK_S = 0.5
_COMMAND = ("ss", "-tinpHO")


def why_not() -> str | None:
    """Return why bytes cannot be counted here; None if they can."""
    return None if shutil.which("ss") else "needs the command `ss` (iproute2)"


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of a TCP connection."""

    local: str
    remote: str
    pid: int
    sent: int
    """Bytes that this end has sent, without those that were sent again."""


def parsed(text: str) -> list[Connection]:
    """Return the connections in the output of `ss -tinpHO`. Those that have sent nothing have no counter."""
    found = []
    for line in text.splitlines():
        if row := _ROW.match(line):
            sent = _number(_SENT, line) - _number(_AGAIN, line)
            found.append(Connection(row["local"], row["remote"], int(row["pid"]), sent))
    return found


def _number(pattern: re.Pattern[str], line: str) -> int:
    found = pattern.search(line)
    return int(found[1]) if found else 0


class Traffic:
    """Counts bytes between peers until the block ends. What is sent within one peer does not count."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, str], tuple[int, int]] = {}
        """Peer that has sent, and bytes so far, by connection."""
        self._peers: dict[int, int | None] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def take(self, connections: Iterable[Connection]) -> None:
        """Note the connections that are open now."""
        known = [(one, peer) for one in connections if (peer := self._peer(one.pid)) is not None]
        ends = {one.local: peer for one, peer in known}
        for one, peer in known:
            other = ends.get(one.remote)
            if other is not None and other != peer:
                self._sent[one.local, one.remote] = (peer, one.sent)

    def per_peer(self, peers: int) -> list[int]:
        """Return the bytes that each peer has sent to others."""
        return [sum(sent for peer, sent in self._sent.values() if peer == i) for i in range(peers)]

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            with suppress(subprocess.TimeoutExpired):  # the next look has what this one would have seen
                self.take(parsed(subprocess.run(_COMMAND, capture_output=True, text=True, timeout=30).stdout))

    def _peer(self, pid: int) -> int | None:
        if pid not in self._peers:
            self._peers[pid] = peer_of(pid)
        return self._peers[pid]


def peer_of(pid: int) -> int | None:
    """Return the number of the peer to which a process belongs.

    None if to none, or to one that others have started: their runs have peers of the same names.
    """
    found: re.Match[str] | None = None
    try:
        process: psutil.Process | None = psutil.Process(pid)
        while process is not None and process.pid != os.getpid():
            found = found or _PEER.search(" ".join(process.cmdline()))
            process = process.parent()
    except psutil.Error:
        return None
    return int(found[1]) if found and process is not None else None


# -- runs of `aedit run --local`: the swarm, and its peers averaging by hivemind


ENDS_WITHIN_S = 240.0
"""After the time of training: start, last round, evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Sizes that all ways of training share."""

    seconds: float = 90.0
    every_s: float = 10.0
    slowdown: tuple[float, ...] = (4.0, 4.0, 8.0, 12.0)
    """Of the peers' steps, one per peer: so they leave cores free, as machines of their own would have."""
    hidden_size: int = 64
    layers: int = 4
    batch_size: int = 4
    seq_len: int = 128
    lr: float = 3e-3
    eval_samples: int = 64


COMMON = """
name = "{name}"
dir = "{directory}"
device = "cpu"
[model]
sizes = {{ hidden_size = {hidden}, intermediate_size = {wide}, num_hidden_layers = {layers}, \
num_attention_heads = 4, num_key_value_heads = 4, tie_word_embeddings = true }}
[data]
source = "stdlib"
tokenizer = "byte"
seq_len = {seq_len}
[train]
steps = 10000000
seconds = {seconds}
batch_size = {batch_size}
lr = {lr}
lr_final = 1.0
eval_samples = {eval_samples}
[edit]
schedule = "seconds"
every = {every}
landing = "{landing}"
[checkpoint]
every = 0
[local]
slowdown = {slowdown}
"""
PARTS = """
[edit.penalty]
step_weight = 0.5
[hub]
quorum = "all"
weights = "penalty"
expire_s = 6.0
[swarm]
discovery = "file"
parts = 2
"""
AVERAGES = """
[swarm]
discovery = "hivemind"
exchange = "hivemind"
averaging_s = 30.0
"""


def toml(race: Race, directory: Path, name: str, more: str, landing: str = "arrival") -> Path:
    """Write a configuration, and return its path."""
    path = directory / f"{name}.toml"
    text = COMMON.format(
        name=name,
        directory=directory,
        hidden=race.hidden_size,
        wide=race.hidden_size * 8 // 3 // 8 * 8,
        layers=race.layers,
        seq_len=race.seq_len,
        seconds=race.seconds,
        batch_size=race.batch_size,
        lr=race.lr,
        eval_samples=race.eval_samples,
        every=race.every_s,
        landing=landing,
        slowdown=list(race.slowdown),
    )
    path.write_text(text + more)
    return path


def run(race: Race, directory: Path, name: str, more: str, landing: str = "arrival") -> Outcome:
    """Train with all peers on this machine, and return what they did."""
    config = toml(race, directory, name, more, landing)
    with (directory / f"{name}.log").open("w") as log, Traffic() as traffic:
        words = ("run", str(config), "--local", str(len(race.slowdown)))
        process = start("aedit.launch.cli", *words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            code = process.wait(race.seconds + ENDS_WITHIN_S)
        finally:
            _end(process)
    if code:
        raise RuntimeError(f"{name} failed:\n{Path(log.name).read_text()[-4000:]}")
    found = read_run(directory / name)
    peers = tuple(_outcome(node, race) for node in found.nodes)
    differing = sum(each.event == "averages_differ" for node in found.nodes for each in node.notices)
    return Outcome(peers, tuple(traffic.per_peer(len(peers))), differing if found.averages else None)


def _end(process: "subprocess.Popen[str]") -> None:
    """Let `aedit run` end its nodes, then make sure that it has."""
    deadline_s = time.monotonic() + 30.0
    if process.poll() is None:
        process.terminate()
    while process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.1)
    end([process])


def _outcome(node: NodeRecords, race: Race) -> PeerOutcome:
    last = node.metrics[-1]
    good_bye_s = race.seconds - race.every_s / 2
    during = [m for m in node.metrics if m.t <= good_bye_s] or [last]
    return PeerOutcome(
        steps=last.step,
        waited_s=during[-1].wait_s,
        wall_s=during[-1].t,
        progress=tuple((m.t, m.tokens) for m in node.metrics),
        losses=tuple((e.t, e.loss) for e in node.evaluations),
        rounds=len(node.rounds),
        failed=sum(len(row.refused) > 0 for row in node.rounds),
    )


# -- measurements, tables and bars


FULL = Race()
QUICK = Race(seconds=40.0, every_s=10.0, slowdown=(1.0, 2.0), hidden_size=32, layers=2, eval_samples=8)
OURS, OVERLAPPED, WAITING = "swarm", "averages, overlapped", "averages, waiting"
OPTIMIZER, OPENDILOCO = "Optimizer", "OpenDiLoCo"
STALL_BAR, LOSS_BAR = 0.01, 0.01


def measure(quick: bool) -> Report | str:
    if reason := why_not():
        return reason
    race = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as directory:
        outcomes = run_all(race, Path(directory))
    return Report(
        f"{len(race.slowdown)} unequal peers",
        _method_lines(race),
        (
            "method",
            "tokens",
            "waiting",
            "worst peer",
            "sent per peer",
            "loss, equal tokens",
            "loss, equal time",
            "rounds",
            "failed",
            "averages differ",
        ),
        tuple(_row(name, outcome, outcomes, race) for name, outcome in outcomes.items()),
        bars(outcomes, race, quick),
        {name: asdict(outcome) for name, outcome in outcomes.items()},
    )


def run_all(race: Race, directory: Path) -> dict[str, Outcome]:
    """Train in every way, one after the other."""
    ours = run(race, directory, "swarm", PARTS)
    return {
        OURS: ours,
        OVERLAPPED: run(race, directory, "averages", AVERAGES),
        WAITING: run(race, directory, "waiting", AVERAGES, landing="forward"),
        OPTIMIZER: optimizer(race, directory, ours, "optimizer", steps_outside=False),
        OPENDILOCO: optimizer(race, directory, ours, "opendiloco", steps_outside=True),
    }


def optimizer(race: Race, directory: Path, ours: Outcome, name: str, *, steps_outside: bool) -> Outcome:
    """Train with `hivemind.Optimizer`; an epoch has the samples of one of our intervals."""
    samples = ours.tokens / race.seq_len / race.seconds * race.every_s
    config = toml(race, directory, name, "")
    jobs = [
        Job(
            name=f"local-{i}",
            toml=str(config),
            data=str(directory / "swarm" / "data"),
            introduction=str(directory / f"{name}_introduction"),
            peers=len(race.slowdown),
            slowdown=slowdown,
            target_batch_size=max(1, round(samples)),
            steps_outside=steps_outside,
        )
        for i, slowdown in enumerate(race.slowdown)
    ]
    with Traffic() as counted:
        told = run_jobs("benchmarks.programs.optimizer_peer", jobs)
    return Outcome(tuple(PeerOutcome(**one) for one in told), tuple(counted.per_peer(len(jobs))))


def equal_tokens(outcomes: Mapping[str, Outcome]) -> float:
    """Return the tokens up to which every way was evaluated."""
    return min(outcome.curve[-1][1] for outcome in outcomes.values())


def bars(outcomes: Mapping[str, Outcome], race: Race, quick: bool) -> tuple[Bar, ...]:
    """Return the bars of the swarm's waiting and of its loss to the best of the others."""
    ours, others = outcomes[OURS], [outcome for name, outcome in outcomes.items() if name != OURS]
    tokens = equal_tokens(outcomes)
    text = f"swarm: trainers wait {percent(ours.stall, 2)} of the time, bar {percent(STALL_BAR, 0)}"
    found = [Bar(text, None if quick else ours.stall <= STALL_BAR)]
    pairs = {
        "equal tokens": (ours.loss_at_tokens(tokens), min(each.loss_at_tokens(tokens) for each in others)),
        "equal time": (
            ours.loss_at_time(race.seconds),
            min(each.loss_at_time(race.seconds) for each in others),
        ),
    }
    for name, (mine, best) in pairs.items():
        over = mine / best - 1
        text = f"swarm: loss at {name} {100 * over:+.1f} % to the best other, bar {100 * LOSS_BAR:+.0f} %"
        found.append(Bar(text, None if quick else over <= LOSS_BAR))
    return tuple(found)


def _method_lines(race: Race) -> tuple[str, str]:
    return (
        f"Llama of {race.hidden_size} x {race.layers}, bytes of the stdlib, steps slowed down by"
        f" {json.dumps(list(race.slowdown))}, {race.seconds:g} s, rounds of {race.every_s:g} s, lr"
        f" {race.lr:g} constant, Nesterov outside but for Optimizer, which averages only.",
        "Waiting: of the trainer, up to half an interval before the end. Sent: TCP bytes to other peers;"
        " the swarm sends bf16 and journals to followers, hivemind fp32. Held-out loss of peer 0.",
    )


def _row(name: str, outcome: Outcome, outcomes: Mapping[str, Outcome], race: Race) -> tuple[str, ...]:
    megabytes = sum(outcome.sent) / len(outcome.sent) / 1e6
    return (
        name,
        f"{outcome.tokens / 1e6:.3f} M",
        percent(outcome.stall, 2),
        percent(outcome.worst_stall, 2),
        f"{megabytes:.1f} MB",
        f"{outcome.loss_at_tokens(equal_tokens(outcomes)):.4f}",
        f"{outcome.loss_at_time(race.seconds):.4f}",
        str(sum(peer.rounds for peer in outcome.peers)),
        str(sum(peer.failed for peer in outcome.peers)),
        "-" if outcome.differing is None else str(outcome.differing),
    )


if __name__ == "__main__":
    main("swarm", "A swarm, and peers that average by hivemind: waiting, bytes and held-out loss.", measure)
