"""A rollout worker: the engine host of a server for one rank, with weights from shared memory."""

import math
import mmap
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.choose import ArmChooser, Fixed, Goodput
from aedit.spec_rollout.drafters import (
    Drafter,
    DrafterKind,
    DraftLayer,
    LayerDrafter,
    SuffixDrafter,
    layer_of,
    parse_arm,
    shape_from,
)
from aedit.spec_rollout.engine import Engine, try_engine
from aedit.spec_rollout.model import make_target
from aedit.spec_rollout.server.channel import FLUSH_S, WORKER_LANE, Channel, Message
from aedit.spec_rollout.server.host import EngineHost
from aedit.spec_rollout.server.host_figures import IdleTime
from aedit.spec_rollout.server.tickets import HostLimits
from aedit.spec_rollout.server.trainer_lines import StreamLimits, TrainerLine
from aedit.spec_rollout.server.trainer_stream import TrainerStream
from aedit.spec_rollout.training import SharedSlots, SlotLayout, TensorSpec
from aedit.types import imported

SWITCH_S = 60.0
"""Limit of the time until a policy version that was announced is in the shared memory, and is valid."""
ALIVE_S = 0.2
"""Interval of looks whether the engine's thread has died."""
UNLIMITED = 1 << 30


class Worker:
    """A rollout server of one engine for the rank at the other end of `channel`."""

    def __init__(self, begin: Message, channel: Channel) -> None:
        """Make the engine. begin: the rank's first message."""
        make = imported(begin["make"], "WorkerConfig: make")
        spec = EngineSpec(**{**begin["engine"], "arms": tuple(begin["engine"]["arms"])})
        engine: Engine = make(spec)
        if not begin["make"].startswith("aedit."):
            try:
                try_engine(engine, rows=spec.rows, max_tokens=spec.max_tokens)
            except ValueError as error:
                raise ValueError(
                    f"WorkerConfig: make: {begin['make']}, called with EngineSpec: {error}"
                ) from None
        self._channel = channel
        self._made = SharedWeightsEngine(
            engine, _slots(begin["weights"]), _slots(begin["drafter"]) if begin["drafter"] else None
        )
        self._host = EngineHost(HostLimits(max_waiting_run=UNLIMITED, max_waiting_tokens=UNLIMITED))
        self._idle, self._idle_before_s = IdleTime(), math.nan
        self._host.idle = self._idle.measured
        line = TrainerLine("", self._made, secret="", more_figures=self._figures)
        self._host.open(line.name, lambda: engine, between_steps=line.before_step)
        limits = StreamLimits(waiting=UNLIMITED, unsent_bytes=UNLIMITED)
        self._stream = TrainerStream(None, self._host, line, limits)
        self._sender = threading.Thread(target=self._send, name="send", daemon=True)
        self._wanted = 0
        self._adopting: Future[None] | None = None
        self._sender.start()

    def serve(self, frames: Sequence[tuple[int, bytes]]) -> None:
        """Generate until the rank has closed the connection. frames: those that have come already.

        An error of the engine is raised, after what was drawn before it has been sent.
        """
        try:
            while not self._channel.closed:
                for _, data in frames:
                    self._handle(pb.ToServer.FromString(data))
                if self._adopting is not None and self._adopting.done():
                    self._adopting.result()
                if self._host.error is not None:
                    raise self._host.error
                Channel.wait([self._channel], ALIVE_S)
                frames = self._channel.receive()
        finally:
            self._stream.close()
            self._sender.join(FLUSH_S)

    def _handle(self, message: pb.ToServer) -> None:
        if message.HasField("add") and math.isnan(self._idle_before_s):
            self._idle_before_s = self._idle.so_far_s
        if message.add.min_version > self._wanted:
            # Samples that need a version wait, and no step would adopt it.
            self._wanted = message.add.min_version
            self._adopting = self._host.call("", partial(self._made.adopt, self._wanted))
        self._stream.handle(message)

    def _figures(self) -> dict[str, float]:
        """Return the seconds without a sample since the first one."""
        idle_s = self._idle.so_far_s - self._idle_before_s
        return {"without_samples_s": idle_s} if math.isfinite(idle_s) else {}

    def _send(self) -> None:
        self._channel.send_all(WORKER_LANE, self._stream.opened())
        for data in self._stream.messages():
            self._channel.send_all(WORKER_LANE, data)


class SharedWeightsEngine:
    """`LineEngine` whose weights, and those of its drafter, are read from memory shared with the rank."""

    drafter_version = 0

    def __init__(self, engine: Engine, weights: SharedSlots, drafter: SharedSlots | None) -> None:
        self.engine = engine
        self._weights, self._drafter = weights, drafter
        self._number = 0

    def adopt(self, wanted: int, engine: Engine) -> None:
        """Take over the newest weights; wait for a version of at least `wanted`.

        Raises:
            TimeoutError: It is not there in time.
        """
        deadline = time.monotonic() + SWITCH_S
        while True:
            newest = self._weights.newest(after=self._number)
            if newest is not None:
                engine.update_weights(newest.tensors, newest.version)
                self._number = newest.number
            if engine.version >= wanted:
                return
            if time.monotonic() > deadline:
                found = f"{self._weights.corrupt} with a wrong checksum"
                raise TimeoutError(f"version {wanted} of the policy did not arrive; {found}")
            time.sleep(0.001)

    def between_steps(self) -> None:
        """Take over newer weights of policy and drafter."""
        self.adopt(0, self.engine)
        newest = self._drafter.newest(after=self.drafter_version) if self._drafter else None
        if newest is not None:
            drafter: Any = self.engine.drafters["layer"]  # `LayerDrafter`, or vLLM's `SwappedLayer`
            layer = layer_of(drafter.shape)
            layer.load_state_dict(newest.tensors)
            drafter.replace(layer, newest.version)
            self.drafter_version = newest.number

    def close(self) -> None:
        """Do nothing: the process ends with its engine."""


def _slots(memory: Message) -> SharedSlots:
    specs = (TensorSpec(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in memory["specs"])
    layout = SlotLayout(tuple(specs))
    return SharedSlots(layout, memoryview(mmap.mmap(memory["fd"], layout.num_bytes)))


_transformers: Any = (AutoConfig, AutoModelForCausalLM, AutoTokenizer)  # their methods carry no types


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Description of an engine, as values that JSON can hold."""

    model: Mapping[str, Any]
    """Configuration of the `transformers` model, as `PretrainedConfig.to_dict` gives it."""
    dtype: str
    """Name of the dtype in torch, such as `float32`."""
    device: str
    rows: int
    max_tokens: int
    arms: tuple[str, ...]
    tokenizer: str = ""
    """Directory of a saved tokenizer; empty: none."""
    taps: int = 0
    """Number of layers whose outputs the layer drafter reads besides the last one."""
    drafter: Mapping[str, Any] | None = None
    """Fields of the shape of the layer drafter; None: of a new one without taps."""
    options: Mapping[str, Any]
    """`WorkerConfig.options`."""


def make_engine(spec: EngineSpec) -> Engine:
    """Return an engine whose policy has the right shapes and random weights."""
    configs, models, tokenizers = _transformers
    sizes = dict(spec.model)
    config = configs.for_model(sizes.pop("model_type"), **sizes)
    model = models.from_config(config, dtype=torch.float32)
    model = model.to(spec.device, getattr(torch, spec.dtype)).eval().requires_grad_(False)
    arms = [parse_arm(arm) for arm in spec.arms]
    nodes = max(16, *(arm.nodes for arm in arms))
    shape = shape_from(spec.drafter) if spec.drafter else None
    taps = shape.tapped(config.get_text_config().num_hidden_layers) if shape is not None else ()
    target = make_target(model, rows=spec.rows, max_tokens=spec.max_tokens, nodes=nodes, taps=taps)
    tokenizer = (
        tokenizers.from_pretrained(spec.tokenizer, trust_remote_code=False) if spec.tokenizer else None
    )
    kinds = {arm.drafter for arm in arms}
    drafters: dict[DrafterKind, Drafter] = {}
    if "suffix" in kinds:
        drafters["suffix"] = SuffixDrafter(device=str(target.device))
    if "layer" in kinds:
        new = DraftLayer.of(model) if shape is None else layer_of(shape)
        layer = drafters["layer"] = LayerDrafter.of(new, target)
        layer.version = -1  # random until one comes from the trainer
    fitting = [arm for arm in arms if arm.is_chain or target.supports_trees]
    chooser: ArmChooser = Goodput(fitting) if len(fitting) > 1 else Fixed(*fitting)
    return Engine(target, drafters=drafters, chooser=chooser, tokenizer=tokenizer)
