"""Configuration of a run as one frozen value, and what follows from it: samples per step, rules of units.

Imports no torch, so that `aedit --help` is fast.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from aedit.async_sgd.rules import DRAFTER, HubConfig, OuterConfig, UnitRule, UnitRules
from aedit.edit import EditConfig
from aedit.launch.config.rl import (
    AuditConfig,
    DrafterConfig,
    PromptConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    ServeConfig,
)
from aedit.launch.config.swarm import PEER_EXCHANGES, SwarmConfig
from aedit.types import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Share,
    check,
    check_url,
    checked,
    name_fault,
)

SMALL: dict[str, int | float | bool | str] = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
"""Default model, also that of most presets."""


@checked("model")
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A `transformers` causal language model, new or pretrained."""

    family: str = "llama"
    """`model_type` of a transformers causal LM: llama, qwen2, gpt2, ..."""

    sizes: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Fields of that family's transformers config, such as hidden_size; others keep the family's defaults.
    Without any, a `llama` has about 10 M parameters, not the 6.7 billion of its family.
    `vocab_size` comes from the tokenizer; the number of positions defaults to `data.seq_len`."""

    pretrained: str = ""
    """Directory or Hugging Face name to load weights from; `family` and `sizes` then have no effect."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Compute precision; parameters and outer state stay fp32."""

    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more compute."""

    compile: bool = False
    """`torch.compile` each block."""

    @property
    def own_sizes(self) -> dict[str, int | float | bool | str]:
        """Return `sizes`, or the sizes of a small model if there are none and the family is `llama`."""
        return self.sizes or (dict(SMALL) if self.family == "llama" else {})


@checked("data")
@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Source of the text, and how it is cut into samples."""

    source: str = "stdlib"
    """`stdlib` (the running Python's own library, no download), a file or glob (.txt .md .py .rst, one
    document each; .jsonl; .parquet), or `hf:NAME` or `hf:NAME:SUBSET` for a Hugging Face dataset by path
    or name. A text file given alone is cut into pieces of 4096 characters. Parquet and `hf:` need the
    `datasets` extra."""

    text_key: str = "text"
    """Field that holds the text in jsonl, parquet and Hugging Face data."""

    split: str = "train"
    """Split of a Hugging Face dataset."""

    tokenizer: str = "byte"
    """`byte`, or the directory or name of a Hugging Face tokenizer."""

    special_tokens: Literal["tokenizer", "none"] = "tokenizer"
    """Special tokens before each document and each prompt that is text: those that the tokenizer puts before
    a text, such as BOS, or none. Chats have those of the chat template."""

    seq_len: Annotated[int, Range(least=2)] = 256
    """Sequence length in tokens."""

    held_out: Annotated[float, Range(above=0, below=1)] = 0.02
    """Share of the documents, chosen by hash, that is held out for evaluation."""


@checked("train")
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Inner optimizer, length of the run and evaluation."""

    steps: PositiveInt = 1000
    """Inner steps per node; with `edit.schedule = "seconds"` the mean over the nodes."""

    seconds: PositiveFloat | None = None
    """End the run at the first round after so many seconds; needs `edit.schedule = "seconds"`."""

    batch_size: PositiveInt = 8
    """Samples per node and micro-batch, over all its ranks."""

    accumulate: PositiveInt = 1
    """Micro-batches per inner step."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """Inner optimizer. `muon` steps the matrices of the transformer blocks along their orthogonalised
    momentum, as long as a step of AdamW (arXiv:2502.16982), so that `lr` and `weight_decay` mean the same;
    embeddings, the head and vectors are stepped by AdamW."""

    lr: PositiveFloat = 1e-3
    """Peak learning rate of the inner optimizer."""

    lr_by_nodes: Share = 0.0
    """Power of the number of live nodes by which `lr` grows. AdamW divides by the noise of one node's
    gradients, so the mean of N nodes' steps is shorter than a step on all their samples; 0.5 makes up for
    it (the square-root rule of arXiv:2205.10287)."""

    lr_warmup: Annotated[float, Range(least=0, below=1)] = 0.02
    """Share of the run with linear warm-up of the learning rate."""

    lr_final: Share = 0.1
    """Final learning rate of the cosine schedule, as a share of `lr`; 1 keeps it constant."""

    weight_decay: NonNegativeFloat = 0.1
    betas: tuple[float, float] = (0.9, 0.95)

    grad_clip: PositiveFloat = 1.0
    """Gradients with a larger norm are clipped to it."""

    eval_every: NonNegativeInt = 1
    """Rounds between evaluations on held-out text; 0 evaluates only at the start and the end."""

    eval_samples: PositiveInt = 32
    """Held-out samples per evaluation."""

    eval_in_waits: bool = False
    """Evaluate a copy of the weights while the node waits, batch by batch, at no cost of training time; what
    no wait has finished when the next evaluation is due is finished then. Nodes of one rank; the others
    evaluate at once."""


@checked("checkpoint")
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Frequency and number of checkpoints."""

    every: NonNegativeInt = 1
    """Rounds between checkpoints; 0: only at the end. In a run without rounds (`edit.warmup_steps = "all"`)
    `edit.every` steps count as one."""

    keep: PositiveInt = 2
    """Newest checkpoints kept per node."""

    time_share: Annotated[float, Range(above=0, most=1)] = 0.02
    """Share of a node's time that its checkpoints take at most, in a run with a hub, which has the anchors:
    one that is due earlier is written later. 1: none waits."""


@checked("alerts")
@dataclass(frozen=True, slots=True, kw_only=True)
class AlertConfig:
    """Bounds of alerts, and the URL that gets them. Of this machine: a hub gives none of it to its nodes."""

    intervals: NonNegativeInt = 10
    """Usual intervals between accepted pushes after which a hub that accepts none gives an alert, and a node
    of which none is accepted, at least 30 s; 0: never."""

    mismatch_kl: NonNegativeFloat = 0.05
    """Mismatch of engine and trainer, in nats per token, above which there is an alert; 0: never."""

    disk_bytes: NonNegativeInt = 2**30
    """Free bytes on the disk of a node or hub below which there is an alert; 0: never."""

    webhook: str = ""
    """URL that gets each alert, and its end, as JSON by POST: `run`, `source`, `kind`, `text`, `over`."""

    def __post_init__(self) -> None:
        check_url("alerts.webhook", self.webhook)


@checked("traces")
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """OpenTelemetry traces of pushes, rollouts and requests that this machine sends.

    A hub gives the URL to no node.
    """

    endpoint: str = ""
    """URL of an OTLP receiver over HTTP, such as http://127.0.0.1:4318/v1/traces; empty: no traces. Needs the
    extra `otel`."""

    ratio: Share = 1.0
    """Share of the traces that this process begins which are recorded, chosen at random: of pushes and groups
    of a node, and of requests at a server whose client names no trace."""

    def __post_init__(self) -> None:
        check_url("traces.endpoint", self.endpoint)


@checked("local")
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """Simulated machines of `aedit run --local N`."""

    slowdown: tuple[float, ...] = ()
    """Factor per node by which each of its steps is slowed down; missing entries are 1."""

    ranks: PositiveInt = 1
    """Processes per node, sharded by FSDP2."""

    def __post_init__(self) -> None:
        check(
            all(s >= 1 for s in self.slowdown), "local.slowdown", "entries must be at least 1", self.slowdown
        )


@checked("")
@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Configuration of one run. Each field is a key of the TOML file and a dotted flag."""

    name: str = "run"
    """The run directory is `dir`/`name`."""

    dir: str = "runs"
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"

    restarts: NonNegativeInt = 3
    """Number of times that the processes of a node, or the hub or peer of a run on this machine, are
    restarted after a failure."""

    log: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Experiment trackers that receive the metrics too; each needs the extra of its name."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    edit: EditConfig = field(default_factory=EditConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    swarm: SwarmConfig = field(default_factory=SwarmConfig)
    prompts: PromptConfig = field(default_factory=PromptConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    alerts: AlertConfig = field(default_factory=AlertConfig)
    traces: TraceConfig = field(default_factory=TraceConfig)
    local: LocalConfig = field(default_factory=LocalConfig)

    def __post_init__(self) -> None:
        if fault := name_fault(self.name):
            raise ValueError(f"name {fault}")
        check(len(set(self.log)) == len(self.log), "log", "must name each tracker once", list(self.log))
        timed = self.edit.schedule == "seconds"
        check(
            timed or self.train.seconds is None,
            "train.seconds",
            'needs edit.schedule = "seconds"; with "steps" use train.steps',
            self.train.seconds,
        )
        self._check_hub()
        if self.prompts.source:
            self._check_lengths()
            self._check_engine()
        if self.rl.has_servers and self.audit.on:
            least = self.rl.max_staleness + 2
            rule = (
                f"must be at least rl.max_staleness + 2 = {least}, or the audit has not the weights it needs"
            )
            check(self.audit.versions >= least, "audit.versions", rule, self.audit.versions)

    @property
    def has_hub(self) -> bool:
        """Return whether the nodes push to owners of units: a hub, or peers of a swarm."""
        return bool(self.hub.address) or self.swarm.has_parts

    def _check_swarm(self) -> None:
        """Raise ValueError for a value that cannot be in a swarm."""
        if not self.swarm.on:
            return
        for name in ("address", "standby", "parent"):
            value = getattr(self.hub, name)
            check(
                not value, f"hub.{name}", "must be empty in a swarm, whose peers own the units", repr(value)
            )
        check(
            not self.prompts.source, "prompts.source", "must be empty in a swarm", repr(self.prompts.source)
        )
        PEER_EXCHANGES[self.swarm.exchange].check(self)
        no_page = self.hub.metrics_port is None
        check(no_page, "hub.metrics_port", "has no effect in a swarm; use", "aedit status")

    def _check_lengths(self) -> None:
        """Raise ValueError if there is no place for a prompt, or the supervised warm-up never ends."""
        most, steps = self.rl.sampling.max_new_tokens, self.train.steps
        rule = f"must be above rl.sampling.max_new_tokens = {most}, as it is the length of prompt and answer"
        check(self.data.seq_len > most, "data.seq_len", rule, self.data.seq_len)
        rule = f"must be at most train.steps = {steps}, of which they are the first"
        check(self.rl.supervised_steps <= steps, "rl.supervised_steps", rule, self.rl.supervised_steps)

    def _check_engine(self) -> None:
        """Raise ValueError if vLLM cannot compute in the dtype."""
        if self.rl.engine != "vllm":
            return
        dtype = self.rl.engine_dtype
        check(dtype != "fp64", "rl.engine_dtype", 'must be "fp32" or "bf16" for vLLM', dtype)
        fits = self.drafter.form == "eagle3" and self.drafter.kind in ("layer", "auto")
        rule = 'needs drafter.form = "eagle3" and drafter.kind = "layer", or a model, for method eagle3; got'
        one = not self.rollout.vllm.server or self.rl.workers <= 1
        check(one, "rl.workers", "must be 0 or 1 with rollout.vllm.server", self.rl.workers)
        speculative = self.rollout.vllm.speculative
        check(fits or not self.rollout.vllm.has_own_drafter, "rollout.vllm.speculative", rule, speculative)

    def _check_hub(self) -> None:
        """Raise ValueError for a value that has no effect with a hub, or without one."""
        hub, edit = self.hub, self.edit
        self._check_swarm()
        listed = self.rl.servers != "hub" or bool(hub.address)
        rule = "must be HOST:PORT,HOST:PORT in a run without a hub, which lists no servers"
        check(listed, "rl.servers", rule, repr(self.rl.servers))
        if not self.has_hub:
            check(hub == HubConfig(), "hub.address", "must be HOST:PORT for [hub] to have an effect", "''")
            check(not self.outer.look_ahead, "outer.look_ahead", "needs a hub", self.outer.look_ahead)
            check(self.outer.kind != "heloco", "outer.kind", "needs a hub", self.outer.kind)
            check(edit.schedule != "dylu", "edit.schedule", "needs a hub ([hub] address), not", edit.schedule)
            return
        check(edit.landing == "arrival", "edit.landing", 'must be "arrival" with a hub', edit.landing)
        check(edit.warmup_steps == 0, "edit.warmup_steps", "must be 0 with a hub", edit.warmup_steps)
        check(not edit.offload, "edit.offload", "has no effect with a hub", edit.offload)
        whole = hub.codec_down == "fp32" or not self.outer.look_ahead
        check(whole, "outer.look_ahead", 'needs hub.codec_down = "fp32", not', hub.codec_down)


def of_this_machine(config: RunConfig) -> RunConfig:
    """Return the hub's configuration with the settings that belong to this machine at their defaults."""
    own = RunConfig()
    mine = own.swarm
    swarm = replace(config.swarm, peers=mine.peers, listen=mine.listen, announce=mine.announce)
    return replace(
        config,
        dir=own.dir,
        device=own.device,
        log=own.log,
        local=LocalConfig(),
        alerts=own.alerts,
        traces=own.traces,
        swarm=swarm,
        rollout=own.rollout,  # programs and paths of this machine: a hub must not name what is started here
    )


def given_to_nodes(config: RunConfig) -> RunConfig:
    """Return the configuration as a hub gives it to nodes: without its URLs, which may be secret."""
    return replace(config, alerts=AlertConfig(), traces=TraceConfig())


def samples_per_step(config: RunConfig) -> int:
    """Return the samples, or prompts, that a node draws per inner step, rounded up."""
    if not config.prompts.source:
        return config.train.batch_size * config.train.accumulate
    return -(-config.rl.groups // (config.rl.batches * config.rl.epochs))


def tokens_per_step(config: RunConfig) -> int:
    """Return the tokens that an inner step of a node counts for: with rewards, its rollouts.

    Their lengths depend on the policy, and a node must not count for more because its answers are longer.
    """
    if not config.prompts.source:
        return config.train.batch_size * config.train.accumulate * config.data.seq_len
    return samples_per_step(config) * config.rl.group_size


def unit_rules(config: RunConfig) -> UnitRules:
    """Return the rules of such units by name: of the drafter, if the run has one and shares it.

    Nodes with training loops of their own bring one only if the configuration of their hub names it.
    """
    kinds = ("layer", "auto") if config.prompts.source else ("layer",) if config.hub.endless else ()
    is_used = config.rl.engine == "aedit" or config.rollout.vllm.has_own_drafter
    has_drafter = config.drafter.kind in kinds and is_used
    return {DRAFTER: UnitRule()} if has_drafter and config.drafter.share else {}
