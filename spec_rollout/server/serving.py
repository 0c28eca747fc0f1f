"""The loop of a rollout worker: its engine, messages, weights, one step of the engine, report."""

import mmap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from aedit.spec_rollout.choose import ArmChooser, Fixed, Goodput
from aedit.spec_rollout.drafters import (
    Arm,
    Drafter,
    DrafterKind,
    DraftLayer,
    LayerDrafter,
    SuffixDrafter,
    parse_arm,
    tapped,
)
from aedit.spec_rollout.engine import Engine, SpeedMeter, Step, try_engine
from aedit.spec_rollout.model import TargetModel, make_target
from aedit.spec_rollout.sampling import Rollout, decode_prompt
from aedit.spec_rollout.server.channel import Channel, Message
from aedit.spec_rollout.training import SharedSlots, SlotLayout, TensorSpec
from aedit.types import imported

REPORT_S = 0.02
"""Longest time for which new tokens are held back, so that a step costs no message of its own."""
SWITCH_S = 60.0
"""Limit of the time until a policy version that was announced is in the shared memory, and is valid."""


class Worker:
    """An engine that serves the rank at the other end of `channel`."""

    def __init__(self, begin: Message, channel: Channel) -> None:
        """Make the engine. begin: the rank's first message; see `begin_message`."""
        self._channel = channel
        make = imported(begin["make"], "WorkerConfig: make")
        spec = EngineSpec(**{**begin["engine"], "arms": tuple(begin["engine"]["arms"])})
        self._engine: Engine = make(spec)
        if make is not make_engine:
            try:
                try_engine(self._engine, rows=spec.rows, max_tokens=spec.max_tokens)
            except ValueError as error:
                raise ValueError(
                    f"WorkerConfig: make: {begin['make']}, called with EngineSpec: {error}"
                ) from None
        self._meter = SpeedMeter()
        self._weights = _slots(begin["weights"])
        self._drafter = _slots(begin["drafter"]) if begin["drafter"] else None
        self._number, self._drafter_number, self._wanted = 0, 0, 0
        self._sent: dict[tuple[int, int], int] = {}
        self._plain_s, self._plain_tokens = 0.0, 0
        self._ended: list[Rollout] = []
        self._reported_s = 0.0
        channel.send("ready")

    def advance(self, beat_s: float) -> None:
        """Read messages, take over new weights, run one step. Without work, wait for `beat_s` at most."""
        for message in self._channel.receive():
            self.handle(message)
        if self._engine.running or self._engine.waiting:
            self._switch()
            self._count(self._engine.step())
        else:
            self._report()
            Channel.wait([self._channel], beat_s)
            return
        if self._ended or time.monotonic() - self._reported_s >= REPORT_S:
            self._report()

    def handle(self, message: Message) -> None:
        """Do what the rank asks for."""
        if message["kind"] == "add":
            prompt = decode_prompt(message["prompt"].encode())
            self._wanted = max(self._wanted, message["version"])
            self._engine.add(prompt)
            self._sent[prompt.key] = len(prompt.partial.tokens) if prompt.partial else 0
        elif message["kind"] == "remove":
            self._remove(tuple(message["key"]))
        else:
            raise ValueError(f"message of unknown kind {message['kind']!r}")

    def _remove(self, key: tuple[int, int]) -> None:
        self._report()  # the rank then has all tokens of the sample
        here = [*self._engine.running, *self._engine.waiting]
        rollout = next((each for each in here if each.prompt.key == key), None)
        if rollout is not None:
            self._engine.remove(rollout)
        self._sent.pop(key, None)
        self._channel.send("removed", key=key, found=rollout is not None)

    def _switch(self) -> None:
        """Take over the newest weights. No sample starts with weights older than it was added for."""
        deadline = time.monotonic() + SWITCH_S
        while True:
            newest = self._weights.newest(after=self._number)
            if newest is not None:
                self._engine.update_weights(newest.tensors, newest.version)
                self._number = newest.number
            if self._engine.version >= self._wanted:
                break
            if time.monotonic() > deadline:
                found = f"{self._weights.corrupt} with a wrong checksum"
                raise TimeoutError(f"version {self._wanted} of the policy did not arrive; {found}")
            time.sleep(0.001)
        self._switch_drafter()

    def _switch_drafter(self) -> None:
        newest = self._drafter.newest(after=self._drafter_number) if self._drafter else None
        if newest is None:
            return
        drafter = self._engine.drafters["layer"]
        assert isinstance(drafter, LayerDrafter)
        layer = DraftLayer(drafter.shape)
        layer.load_state_dict(newest.tensors)
        drafter.replace(layer, newest.version)
        self._drafter_number = newest.number

    def _count(self, step: Step) -> None:
        if step.counts:
            num_live = len(step.counts)
            self._meter.add(num_live, step.total_s * num_live / sum(step.counts))
        if step.arm.is_off:
            self._plain_s += step.total_s
            self._plain_tokens += sum(step.counts)
        self._ended += step.finished

    def _report(self) -> None:
        """Send what is new: tokens, ends, speed and figures."""
        self._reported_s = time.monotonic()
        speed = self._meter.speed()
        self._channel.send(
            "report",
            tokens=[entry for each in [*self._engine.running, *self._ended] if (entry := self._new(each))],
            ended=[[*each.prompt.key, each.finish_reason, each.passes] for each in self._ended],
            version=self._engine.version,
            drafter=self._drafter_number,
            speed=None if speed is None else [speed.fixed_s, speed.row_s, speed.prefill_s],
            figures=self._figures(),
        )
        for each in self._ended:
            self._sent.pop(each.prompt.key, None)
        self._ended.clear()

    def _new(self, rollout: Rollout) -> list[Any] | None:
        """Return key and new tokens of a rollout, with their log-probabilities and versions."""
        begin, end = self._sent[rollout.prompt.key], len(rollout.tokens)
        if begin == end:
            return None
        self._sent[rollout.prompt.key] = end
        part = slice(begin, end)
        lists = rollout.tokens[part], rollout.logprobs[part], rollout.versions[part]
        return [*rollout.prompt.key, *lists, rollout.top_logprobs[part], rollout.passes]

    def _figures(self) -> dict[str, Any]:
        meters = self._engine.meters
        return {
            **meters.speed_up.figures(),
            "rollout_tokens": meters.num_tokens,
            "rollout_s": meters.total_s,
            "passes": meters.num_passes,
            "draft_s": meters.draft_s,
            "plain_s": self._plain_s,
            "plain_tokens": self._plain_tokens,
            "arms": dict(meters.arms),
        }


def _slots(memory: Message) -> SharedSlots:
    specs = (TensorSpec(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in memory["specs"])
    layout = SlotLayout(tuple(specs))
    return SharedSlots(layout, memoryview(mmap.mmap(memory["fd"], layout.num_bytes)))


_transformers: Any = (AutoConfig, AutoModelForCausalLM, AutoTokenizer)  # their methods carry no types


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Description of an engine in words that JSON can hold."""

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
    taps = tapped(spec.taps, config.get_text_config().num_hidden_layers)
    target = make_target(model, rows=spec.rows, max_tokens=spec.max_tokens, nodes=nodes, taps=taps)
    tokenizer = (
        tokenizers.from_pretrained(spec.tokenizer, trust_remote_code=False) if spec.tokenizer else None
    )
    drafters = _drafters({arm.drafter for arm in arms}, model, target, spec.taps)
    return Engine(target, drafters=drafters, chooser=_chooser(arms, target), tokenizer=tokenizer)


def _drafters(
    kinds: set[DrafterKind], model: Any, target: TargetModel, taps: int
) -> dict[DrafterKind, Drafter]:
    drafters: dict[DrafterKind, Drafter] = {}
    if "suffix" in kinds:
        drafters["suffix"] = SuffixDrafter(device=str(target.device))
    if "layer" in kinds:
        drafters["layer"] = LayerDrafter.of(DraftLayer.of(model, taps=taps), target)
    return drafters


def _chooser(arms: list[Arm], target: TargetModel) -> ArmChooser:
    fitting = [arm for arm in arms if arm.is_chain or target.supports_trees]
    return Goodput(fitting) if len(fitting) > 1 else Fixed(*fitting)
