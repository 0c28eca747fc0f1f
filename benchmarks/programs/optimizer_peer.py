"""One peer of `hivemind.Optimizer` with local updates."""

import json
import logging
import os
import signal
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aedit.edit import Shards
from aedit.launch.config import RunConfig, load
from aedit.launch.data import Corpus, SampleOrder, batch, load_corpus, load_tokenizer
from aedit.launch.node import build_model, held_out_loss, loss, lr_at, make_inner, set_lr
from aedit.proto.dht import bind_children, remove_socket
from aedit.system import end_with_parent
from benchmarks.kit.processes import until

MATCHMAKING_S, AVERAGING_S = 5.0, 30.0
LONG_S = 0.25
"""So much above the median, a call of `Optimizer.step` has waited: it did not only take the inner step."""
LATE_S = 60.0
"""A peer that has not ended so long after its time hangs, and tells what it has done."""


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """Work and waits of one peer."""

    steps: int
    waited_s: float
    """Time in which its trainer waited for others, without the good-bye."""
    wall_s: float
    progress: tuple[tuple[float, float], ...]
    """Seconds since the beginning and tokens of this peer, in order."""
    losses: tuple[tuple[float, float], ...] = ()
    """Seconds and held-out loss, of a peer that evaluates."""
    rounds: int = 0
    failed: int = 0
    """Rounds in which something of this peer did not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One peer. `name` ends in its number; `introduction`: file to which the first one writes its address."""

    name: str
    toml: str
    data: str
    introduction: str
    peers: int
    slowdown: float
    target_batch_size: int
    steps_outside: bool
    """Take the outer Nesterov step of the configuration on each average, as OpenDiLoCo does."""

    @property
    def index(self) -> int:
        return int(self.name.rpartition("-")[2])


@dataclass(slots=True)
class Story:
    """Progress of a peer. Another thread may read it."""

    began_s: float = 0.0
    steps: int = 0
    spans_s: list[float] = field(default_factory=list)
    """Seconds in each call of `Optimizer.step`."""
    entered_s: float | None = None
    """When the call under way began."""
    progress: list[tuple[float, float]] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    rounds: int = 0
    failed: int = 0

    def outcome(self) -> PeerOutcome:
        """Return it. What long calls of `Optimizer.step` took above the median is time spent waiting."""
        now = time.monotonic()
        local_s = statistics.median(self.spans_s) if self.spans_s else 0.0
        waited_s = sum(span - local_s for span in self.spans_s if span > local_s + LONG_S)
        waited_s += now - self.entered_s if self.entered_s is not None else 0.0
        return PeerOutcome(
            steps=self.steps,
            waited_s=waited_s,
            wall_s=now - self.began_s,
            progress=tuple(self.progress),
            losses=tuple(self.losses),
            rounds=self.rounds,
            failed=self.failed,
        )


class Counter(logging.Handler):
    """Counts rounds by what hivemind logs: there is no other account of them."""

    def __init__(self, story: Story) -> None:
        super().__init__()
        self.story = story

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Averaged parameters with"):
            self.story.rounds += 1
        elif text.startswith(("Averaging failed", "Aborted", "Peer is out of sync")):
            self.story.rounds += 1
            self.story.failed += 1


def optimizer(job: Job, config: RunConfig, inner: torch.optim.Optimizer) -> Any:
    """Return the optimizer, once the first peer's address is known.

    As in OpenDiLoCo, averaging is not delayed into the background.
    """
    import hivemind

    introduction, initial = Path(job.introduction), []
    if job.index:
        until(introduction.exists, "the address of the first peer", limit_s=90.0)
        initial = introduction.read_text().split()
    dht = hivemind.DHT(
        initial_peers=initial,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        nat_port_map=False,
        check_if_identity_free=False,
        start=True,
    )
    if not job.index:
        told = introduction.with_suffix(".new")
        told.write_text("\n".join(str(maddr) for maddr in dht.get_visible_maddrs()))
        told.rename(introduction)
    return hivemind.Optimizer(
        dht=dht,
        run_id="race",
        target_batch_size=job.target_batch_size,
        batch_size_per_step=config.train.batch_size,
        optimizer=inner,
        use_local_updates=True,
        delay_state_averaging=False,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=AVERAGING_S,
        next_chunk_timeout=5.0,
        load_state_timeout=30.0,
        verbose=True,
    )


class OuterStep:
    """The step that every peer takes by itself from its last anchor towards the average of all."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self._params = list(model.parameters())
        self._anchors = [nn.Parameter(p.detach().clone()) for p in self._params]
        outer = config.outer
        self._optimizer = torch.optim.SGD(
            self._anchors, lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0
        )

    @torch.no_grad()
    def take(self) -> None:
        """Replace the average, which the parameters are, by the next anchor."""
        for anchor, p in zip(self._anchors, self._params, strict=True):
            anchor.grad = anchor - p
        self._optimizer.step()
        for anchor, p in zip(self._anchors, self._params, strict=True):
            p.copy_(anchor)


def train(
    job: Job, config: RunConfig, story: Story, model: nn.Module, corpus: Corpus, inner: torch.optim.Optimizer
) -> None:
    """Train until the time is up, evaluating after each epoch and at the end if this is the first peer."""
    logging.getLogger("hivemind.optim").addHandler(Counter(story))
    shared = optimizer(job, config, inner)
    seconds = config.train.seconds or 0.0
    order = SampleOrder(len(corpus.train), config.seed, job.index, job.peers)
    print("ready", flush=True)
    sys.stdin.readline()
    story.began_s = time.monotonic()
    threading.Thread(target=finish_late, args=(job, story, seconds + LATE_S), daemon=True).start()

    def evaluate() -> None:
        if not job.index:
            story.losses.append(
                (time.monotonic() - story.began_s, held_out_loss(model, corpus, config, Shards()))
            )

    evaluate()
    outer = OuterStep(model, config) if job.steps_outside else None
    epoch = shared.local_epoch
    while (elapsed_s := time.monotonic() - story.began_s) < seconds:
        began_s = time.monotonic()
        samples = batch(corpus.train, order.take(config.train.batch_size))
        loss(model, samples, config.model.dtype).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip)
        set_lr(inner, lr_at(elapsed_s / seconds, config.train))
        story.entered_s = time.monotonic()
        shared.step()
        span_s = time.monotonic() - story.entered_s
        story.entered_s = None
        story.spans_s.append(span_s)
        model.zero_grad()
        busy_s = time.monotonic() - began_s - max(0.0, span_s - statistics.median(story.spans_s))
        time.sleep(busy_s * (job.slowdown - 1))
        story.steps += 1
        tokens = story.steps * config.train.batch_size * config.data.seq_len
        story.progress.append((time.monotonic() - story.began_s, float(tokens)))
        if shared.local_epoch != epoch:
            epoch = shared.local_epoch
            if outer is not None:
                outer.take()
            evaluate()
    evaluate()


def finish_late(job: Job, story: Story, after_s: float) -> None:
    """Finish a peer that hangs: hivemind tries some things again for ever."""
    time.sleep(after_s)
    story.failed += 1
    finish(job, story)


def finish(job: Job, story: Story) -> None:
    """Tell what has happened, and end this process; what hivemind has started ends with it."""
    print(json.dumps(asdict(story.outcome())), flush=True)
    remove_socket(_socket_file(job).read_text())
    os._exit(0)


def _socket_file(job: Job) -> Path:
    return Path(f"{job.introduction}-socket-{job.index}")


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    end_with_parent(os.getppid(), signal.SIGKILL)

    def note(**message: str) -> None:
        _socket_file(job).write_text(message["socket"])

    bind_children(note)
    torch.set_num_threads(1)
    config = load(Path(job.toml), []).config
    tokenizer = load_tokenizer(config.data)
    corpus = load_corpus(config.data, tokenizer, Path(job.data))
    sizes = (tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id)
    model = build_model(config.model, *sizes)
    story = Story()
    train(job, config, story, model, corpus, make_inner(model, config.train))
    finish(job, story)


if __name__ == "__main__":
    main()
