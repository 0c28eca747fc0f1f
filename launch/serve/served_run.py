"""The run as its rollout server serves it: configuration, model, engines of its lines, and learned drafter.

The drafter is trained while no request is there, and used by the engines of all lines. It learns from one
line at a time, as its trainer follows one policy: from a trainer's line if there is one.
"""

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from aedit.edit import find_units, flat_layout
from aedit.launch.config import RunConfig
from aedit.launch.data import CorpusTokenizer, load_tokenizer
from aedit.launch.node import (
    DTYPES,
    FILE,
    MAX_DRAFTED_TOKENS,
    StopDecoder,
    TrainerWatch,
    build_model,
    choose_among,
    chosen_device,
    draft_form,
    online_config,
    save_drafter,
    saved_layer,
    taps_of,
    vllm_settings,
)
from aedit.proto.versions import VersionLayout
from aedit.spec_rollout.drafters import (
    Drafter,
    DrafterKind,
    DraftLayer,
    FeatureSink,
    LayerDrafter,
    RowStart,
    StepUpdate,
    SuffixDrafter,
    layer_of,
)
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import TargetModel, make_target
from aedit.spec_rollout.remote import EngineProcess, WorkerConfig
from aedit.spec_rollout.server import IdleTime, arm_of, check_supported
from aedit.spec_rollout.training import OnlineDrafter
from aedit.types import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """Configuration, tokenizer and model of a run."""

    config: RunConfig
    tokenizer: CorpusTokenizer
    device: torch.device
    model: nn.Module
    """As at the start of the run, on the CPU; engines get copies."""
    layout: VersionLayout

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Build the model. Raises UserError if it cannot be built here."""
        tokenizer = load_tokenizer(config.data)
        model = build_model(
            config.model, tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id
        )
        model.train(False)
        try:
            units = find_units(model, config.edit.units)
        except ValueError as error:
            raise UserError(str(error)) from None
        return cls(
            config=config,
            tokenizer=tokenizer,
            device=chosen_device(config.device),
            model=model,
            layout=VersionLayout(flat_layout.layout(units), config.rl.version_dtype),
        )

    @property
    def max_tokens(self) -> int:
        """Return the limit of prompt and answer of one sample."""
        return self.config.serve.max_tokens or self.config.data.seq_len

    def target(self) -> TargetModel:
        """Return a policy for a new engine, with weights of its own that are those of the start of the run.

        Raises UserError if there is no engine for this model.
        """
        dtype = DTYPES.get(self.config.rl.engine_dtype, torch.float32)
        own = copy.deepcopy(self.model).to(device=self.device, dtype=dtype).requires_grad_(False)
        try:
            return make_target(
                own,
                rows=self.config.serve.rows,
                max_tokens=self.max_tokens,
                nodes=MAX_DRAFTED_TOKENS,
                taps=taps_of(self.config.drafter, own),
            )
        except ValueError as error:
            raise UserError(f"the rollout engine does not support this model: {error}") from None


@dataclass(slots=True, eq=False)
class ServedLine:
    """Engine of one line; a `LineEngine`."""

    engine: Engine
    is_trainers: bool
    """Its requests come from a trainer."""
    layer: LayerDrafter | None
    """A copy of the server's layer; its version is the number of replacements up to this copy."""
    drafter: "ServerDrafter"
    is_closed: bool = False

    @property
    def drafter_version(self) -> int:
        """Return the number of the learned drafter in use; 0 before the first trained one."""
        return 0 if self.layer is None else max(0, self.layer.version)

    def between_steps(self) -> None:
        """Let the drafter learn from this line, and adopt the newest one."""
        self.drafter.before_step(self)

    def close(self) -> None:
        """Take note that the line is closed."""
        self.is_closed = True


def _vllm_engine(run: ServedRun, folder: Path, line: str) -> Any:
    """Return vLLM in a process of its own, which starts with the first version."""
    config, tokenizer = run.config, folder / "tokenizer"
    tokenizer.mkdir(exist_ok=True)
    run.tokenizer.save(tokenizer)
    dtype = DTYPES.get(config.rl.engine_dtype, torch.float32)
    return EngineProcess(
        copy.deepcopy(run.model).to(dtype),
        WorkerConfig(
            **vllm_settings(config.rollout.vllm),
            rows=config.serve.rows,
            max_tokens=run.max_tokens,
            dtype=dtype,
            device=str(run.device),
            threads=torch.get_num_threads(),
            tokenizer=tokenizer,
            logs=folder / "workers" / line,
        ),
        tokenizer=StopDecoder(run.tokenizer),
        arm=arm_of(config.rollout.vllm.speculative),
        check_sample=check_supported,
    )


class _Policy:
    """A target as the policy of a drafter that another object drafts with."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target

    @property
    def model(self) -> Any:
        return self._target.model

    @property
    def version(self) -> int:
        return self._target.version

    @property
    def embedding(self) -> Tensor:
        return self._target.embedding

    @property
    def head(self) -> Tensor:
        return self._target.head

    @property
    def feature_size(self) -> int:
        return self._target.feature_size

    @property
    def dtype(self) -> torch.dtype:
        return self._target.dtype

    @property
    def device(self) -> torch.device:
        return self._target.device


def _copied(layer: DraftLayer) -> DraftLayer:
    copy = layer_of(layer.shape).to(layer.gain)
    copy.load_state_dict(layer.state_dict())
    return copy.requires_grad_(False)


class GuardedSink:
    """A `FeatureSink` that passes everything to another one until that raises, and nothing afterwards."""

    def __init__(self, sink: FeatureSink, failed: Callable[[Exception], None]) -> None:
        """Pass to `sink`; failed: takes its error."""
        self._sink, self._failed, self._is_over = sink, failed, False

    @property
    def collects(self) -> bool:
        """Return true if samples that start now are to be collected."""
        return not self._is_over and getattr(self._sink, "collects", True)

    @property
    def max_share(self) -> float:
        """Return the largest share of the cost of steps that collecting may take."""
        return getattr(self._sink, "max_share", 1.0)

    def begin(self, rows: Sequence[RowStart], version: int) -> None:
        """Add samples that start in these rows."""
        self._try(lambda: self._sink.begin(rows, version))

    def update(self, update: StepUpdate, version: int) -> None:
        """Receive the tokens and features of one step."""
        self._try(lambda: self._sink.update(update, version))

    def move(self, source: int, target: int) -> None:
        """Rename row `source` to `target`, whose sample has ended."""
        self._try(lambda: self._sink.move(source, target))

    def end(self, row: int, finished: bool) -> None:
        """Remove the sample of `row`."""
        self._try(lambda: self._sink.end(row, finished))

    def status(self) -> dict[str, object]:
        """Return contents and memory use."""
        return self._sink.status()

    def _try(self, call: Callable[[], None]) -> None:
        if self._is_over:
            return
        try:
            call()
        except Exception as error:
            self._is_over = True
            self._failed(error)


class ServerDrafter:
    """Draft layer of a server with its training. `before_step` is called by the engines' thread only."""

    def __init__(self, config: RunConfig, directory: Path, event: Callable[..., None]) -> None:
        """Make it; nothing starts before the first step of an engine. event: records an event by name."""
        self._config, self._directory, self._event = config, directory, event
        self._layer: DraftLayer | None = None
        self._is_trained = False
        """The layer is of an earlier attempt."""
        self._number = 0
        self._online: OnlineDrafter | None = None
        self._deaths: TrainerWatch | None = None
        self._source: ServedLine | None = None
        self._version = 0
        self._error = ""
        self._lock = threading.Lock()
        self._used_before_s = 0.0
        self.idle = IdleTime()

    def copy_for(self, target: TargetModel) -> LayerDrafter | None:
        """Return a drafter for a new engine; None if the run has none, or this model can have none.

        Raises UserError if the configuration asks for a layer that is impossible.
        """
        kind = self._config.drafter.kind
        if kind not in ("layer", "auto"):
            return None
        with self._lock:
            try:
                if self._layer is None:
                    saved = saved_layer(self._directory / FILE, target)
                    self._is_trained, self._layer = saved is not None, saved or self._new(target)
                drafter = LayerDrafter.of(_copied(self._layer), target)
                # Engines do not try one of a negative version: it has not passed the gate.
                drafter.version = self._number if self._is_trained or self._number else -1
                return drafter
            except ValueError as error:
                if kind == "auto":
                    return None
                raise UserError(f'drafter.kind = "layer": {error}; use "suffix" or "auto"') from None

    def before_step(self, line: ServedLine) -> None:
        """Adopt a newer drafter, and choose the line to learn from. An error ends the training only."""
        layer = self._layer
        if line.layer is None or layer is None:
            return
        try:
            if not self._error and self._is_better_source(line):
                self._learn_from(line)
            if self._online is not None:
                self._follow(self._online)
            if line.drafter_version != self._number:
                with self._lock:
                    line.layer.replace(_copied(layer), self._number)
        except Exception as error:
            self._fail(error)

    @contextmanager
    def window(self, cause: str) -> Iterator[None]:
        """Train inside the context; `EngineHost.idle`."""
        training = ExitStack()
        with self.idle.measured(cause):
            if (online := self._online) is not None:
                self._try(lambda: training.enter_context(online.window(cause)))
            try:
                yield
            finally:
                self._try(training.close)

    @property
    def used_s(self) -> float:
        """Return the processor time of the training so far."""
        with self._lock:
            return self._used_before_s + (0.0 if self._online is None else self._online.used_s)

    def status(self) -> dict[str, Any]:
        """Return the state by name; empty before it has begun."""
        if self._error:
            return {"state": "failed", "error": self._error}
        online = self._online
        return {} if online is None else online.status()

    def report_deaths(self) -> None:
        """Record an event if the trainer's process has died since the last call."""
        deaths = self._deaths
        if deaths is not None:
            deaths.report()

    def close(self) -> None:
        """Save the layer and end the trainer. Call it after the host has ended."""
        if self._online is not None:
            save_drafter(self._online, self._directory)
            self._end_training()

    def _new(self, target: TargetModel) -> DraftLayer:
        taps = target.feature_size // target.embedding.shape[1] - 1
        generator = torch.Generator(target.device).manual_seed(self._config.seed)
        form = draft_form(self._config.drafter)
        return form.new(target.model, taps=taps, generator=generator)

    def _is_better_source(self, line: ServedLine) -> bool:
        """Return whether to learn from `line` from now on, whose rows are free and which has weights."""
        engine, source = line.engine, self._source
        if source is line or engine.running or not engine.version:
            return False
        if source is None or source.is_closed:
            return True
        return line.is_trainers and not source.is_trainers and not source.engine.running

    def _learn_from(self, line: ServedLine) -> None:
        """Start the trainer anew, for another policy."""
        if self._source is not None and not self._source.is_closed:
            self._source.engine.sink = None
        self._end_training()
        self._source = line
        directory = self._directory
        online = OnlineDrafter.of(
            _Policy(line.engine.target),
            layer=self._layer,
            config=online_config(self._config.drafter, directory / "drafter.log"),
            checkpoint=directory / "drafter.training",
            seed=self._config.seed,
        )
        line.engine.sink = GuardedSink(online.sink, self._fail)
        self._version = 0
        self._deaths = TrainerWatch.of(online, self._event, self._config.drafter)
        self._online = online

    def _end_training(self) -> None:
        with self._lock:
            online, self._online, self._deaths = self._online, None, None
            self._used_before_s += 0.0 if online is None else online.used_s
        if online is not None:
            online.sink.collects = False
            online.close()

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the training for good; the drafter in use stays."""
        log.error("the drafter of this server is trained no longer", exc_info=error)
        first, self._error = not self._error, self._error or f"{type(error).__name__}: {error}"
        if first:
            self._event("drafter_failed", reason=self._error)
            self._try(self._end_training)

    def _follow(self, online: OnlineDrafter) -> None:
        source = self._source
        if source is not None and not source.is_closed and source.engine.version != self._version:
            self._version = source.engine.version
            online.after_update()
        with self._lock:
            self._number += online.adopt()


def served_line(run: ServedRun, drafter: ServerDrafter, own_line: str, folder: Path, line: str) -> ServedLine:
    """Return a line with a new engine.

    Args:
        run: The run.
        drafter: Learned drafter of the own engine.
        own_line: Name of the line whose requests are no trainer's.
        folder: Of the server, for logs and tokenizer of engines in processes.
        line: Name of this line.
    """
    if run.config.rl.engine == "vllm":
        return ServedLine(_vllm_engine(run, folder, line), line != own_line, None, drafter)
    target = run.target()
    drafters: dict[DrafterKind, Drafter] = {}
    layer = drafter.copy_for(target)
    if layer is not None:
        drafters["layer"] = layer
    if run.config.drafter.kind in ("suffix", "auto"):
        drafters["suffix"] = SuffixDrafter(device=str(target.device))
    engine = Engine(
        target,
        drafters=drafters,
        chooser=choose_among(drafters, target),
        tokenizer=StopDecoder(run.tokenizer),
    )
    return ServedLine(engine, line != own_line, layer, drafter)
