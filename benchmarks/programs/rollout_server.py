"""A rollout server of a fixed pace: `python -m benchmarks.programs.rollout_server JSON`, a `ServerPlan`.

It draws real tokens, and each decode step lasts a fixed time: so several fit on two cores, and what a run
takes says nothing about this machine. The services, streams and versions are those of `aedit serve`; only
the engine is another one, and there is no hub: its trainer is told its address. Prints "ready" when it could
serve, waits for a line with its address, serves, and prints the address. It answers each further line with
its seconds without a request.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.proto.rpc import Server, SigningKey
from aedit.proto.versions import VersionLayout
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.server import (
    EngineHost,
    EngineSpec,
    HostLimits,
    IdleTime,
    RolloutService,
    ServerIdentity,
    StreamLimits,
    TrainerLines,
    make_engine,
)
from aedit.types import Layout
from benchmarks.kit.paced import layout_of

RUN = "rl-servers"
RING = 4
VOCABULARY, STOP = 64, 0
LOUDNESS = 4.0
NODES = 1
"""Nothing is drafted."""


def make_policy() -> LlamaForCausalLM:
    """Return the policy, always the same one, with unequal probabilities."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=256,
                initializer_range=0.15,
                tie_word_embeddings=False,
            )
        )
    with torch.no_grad():
        model.lm_head.weight.mul_(LOUDNESS)
    untyped: Any = model.double()
    found: LlamaForCausalLM = untyped.eval()
    return found


class PacedTarget(Target):
    """Target whose decode steps last `step_s` each, as long as the machine is fast enough.

    A step begins where the last one should have ended, so that the engine's own work is part of the time; one
    that was late makes the next one shorter, by a step at most.
    """

    def __init__(self, model: nn.Module, *, rows: int, max_tokens: int, step_s: float) -> None:
        super().__init__(model, rows, max_tokens, NODES, ())
        self.step_s = step_s
        self._ended_s = 0.0

    @property
    def has_logits(self) -> bool:
        """Return false: each token takes a step."""
        return False

    def step(
        self,
        tokens_Bq: Tensor,
        lengths_B: Sequence[int] | Tensor,
        parents_BN: Tensor | None = None,
        counts_B: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        began_s = time.monotonic()
        follows = began_s - self._ended_s < self.step_s
        due_s = (self._ended_s if follows else began_s) + self.step_s
        made = super().step(tokens_Bq, lengths_B, parents_BN, counts_B)
        time.sleep(max(0.0, due_s - time.monotonic()))
        self._ended_s = max(due_s, time.monotonic() - self.step_s)
        return made


def make_paced(spec: EngineSpec) -> Engine:
    """Return an engine with random weights whose decode steps last `spec.options["step_s"]`.

    0 is as fast as it can. The trainer's own worker makes its engine with it, as the servers do.
    """
    plain = make_engine(spec)
    step_s = float(spec.options["step_s"])
    if not step_s:
        return plain
    target = PacedTarget(plain.target.model, rows=spec.rows, max_tokens=spec.max_tokens, step_s=step_s)
    return Engine(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """A server."""

    name: str
    engine: Mapping[str, Any]
    """Fields of `EngineSpec`."""


@dataclass(frozen=True, slots=True)
class PacedLine:
    """Engine of a line, which drafts nothing."""

    engine: Engine
    drafter_version: int = 0

    def between_steps(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def policy_layout() -> Layout:
    """Return the sync units of the policy, as a hub of a real run would tell them."""
    model: Any = make_policy()
    return layout_of(model.float())  # a hub's anchors are no float64


def serve(plan: ServerPlan, address: str, ending: threading.Event) -> None:
    """Serve at HOST:PORT until `ending` is set."""
    spec = EngineSpec(**{**plan.engine, "arms": tuple(plan.engine["arms"])})
    limits = StreamLimits()
    host, idle = EngineHost(HostLimits(max_lines=limits.lines + 1)), IdleTime()
    host.idle = idle.measured
    layout = VersionLayout(policy_layout(), "fp64")
    lines = TrainerLines(
        host,
        lambda name: PacedLine(make_paced(spec)),
        layout,
        limits,
        ring=RING,
        max_lines=limits.lines + 1,
    )
    identity = ServerIdentity(RUN, plan.name, SigningKey())
    service = RolloutService(identity, host, lines, limits)
    server = Server([service.service(), lines.service()], address)
    print(server.address, flush=True)

    def answer() -> None:
        for _ in sys.stdin:
            print(json.dumps(idle.so_far_s), flush=True)

    threading.Thread(target=answer, daemon=True).start()
    ending.wait()
    service.close()
    server.stop(0.0)
    host.close()


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ending.set())
    print("ready", flush=True)
    if address := sys.stdin.readline().strip():
        serve(ServerPlan(**json.loads(words[0])), address, ending)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # do not wait for threads of streams
