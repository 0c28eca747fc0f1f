"""Configuration of reinforcement learning: prompts, rewards, policy loss, drafter, servers and their audit.

Imports no torch.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from aedit.types import (
    ImportPath,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    check,
    checked,
    is_import_path,
)

Scalar = int | float | bool | str
LossName = Literal["dppo-tv", "grpo", "dapo", "dr-grpo", "gspo", "cispo"]


@checked("prompts")
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptConfig:
    """Source of the problems: a prompt each, with the columns that rewards read."""

    source: str = ""
    """Empty: no reinforcement learning, the run trains on text. A JSON-lines file, `hf:NAME` or
    `hf:NAME:SUBSET` for a Hugging Face dataset, `gym:GENERATOR` for a generator of reasoning-gym (several as
    `gym:A*2+B`, with weights), or a function of your own as `package.module:name`, called with `size`, `seed`
    and `options`, that returns rows, as `aedit.spec_rollout.rl.tasks.arithmetic:rows` does."""

    options: dict[str, Scalar] = field(default_factory=dict)
    """Options of the generator."""

    size: Annotated[int, Range(least=2)] = 10_000
    """Problems that a generator makes. Files and datasets are read whole."""

    split: str = "train"
    """Split of a Hugging Face dataset."""

    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""

    answer_key: str = "answer"
    """Column of the right answer, for the supervised warm-up and the built-in rewards."""

    chat_template: bool = True
    """Use the tokenizer's chat template where it has one; a text becomes one message of the user."""

    held_out: Annotated[float, Range(above=0, below=1)] = 0.05
    """Share of the problems, chosen by hash of the prompt, that is never trained on and is evaluated."""

    curriculum: bool = False
    """Draw harder problems as more are solved, where the generator has levels."""


@checked("reward")
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Functions that score completions, in processes of their own."""

    functions: tuple[str, ...] = ("exact",)
    """`exact`, `numeric`, `regex`, `format`, `gym` (the generator's own score), `math` (extra `math`), or
    functions of your own as `package.module:name` with TRL's signature, sync or async."""

    weights: tuple[float, ...] = ()
    """Weight of each function in the sum; empty: 1 each."""

    options: dict[str, Scalar] = field(default_factory=dict)
    """Options of the built-in functions, such as `regex.pattern`, written as `"regex.pattern" = "..."`."""

    solved: float = 1.0
    """Reward from which a completion counts as solved."""

    workers: PositiveInt = 1
    """Processes per rank that compute rewards."""

    time_limit_s: PositiveFloat = 10.0
    """Limit of one call. A call that takes longer is ended and tried once more; then its rewards are None and
    its completions are left out."""

    first_time_limit_s: PositiveFloat = 300.0
    """Limit of a function's first call in each process, which may load a model, where it is above
    `reward.time_limit_s`."""

    on_error: Literal["skip", "stop"] = "skip"
    """An exception in a function of yours leaves its completions out, or ends the run."""

    max_failed_groups: NonNegativeInt = 64
    """Groups in a row on a rank without any reward after which the run ends, with the last error; 0:
    never."""

    def __post_init__(self) -> None:
        check(bool(self.functions), "reward.functions", "must name at least one function", self.functions)
        names = list(self.functions)
        check(len(set(names)) == len(names), "reward.functions", "must name each function once", names)
        fits = not self.weights or len(self.weights) == len(self.functions)
        check(fits, "reward.weights", "must have one weight for each of reward.functions", self.weights)


@checked("rl.sampling")
@dataclass(frozen=True, slots=True, kw_only=True)
class RLSamplingConfig:
    """Sampling of rollouts. No top-k or top-p: the behaviour probabilities are those of the policy."""

    temperature: PositiveFloat = 1.0
    """Softmax temperature of rollouts; held-out problems are answered greedily."""

    max_new_tokens: PositiveInt = 128
    """Most tokens of a rollout."""

    stop: tuple[str, ...] = ()
    """A rollout also ends with the token that completes one of these, as with the end-of-text token."""

    def __post_init__(self) -> None:
        check("" not in self.stop, "rl.sampling.stop", "must not have an empty text", list(self.stop))


@checked("rl")
@dataclass(frozen=True, slots=True, kw_only=True)
class RLConfig:
    """Groups of rollouts, advantages and policy loss."""

    groups: PositiveInt = 8
    """Prompts per node and batch, over all its ranks."""

    group_size: PositiveInt = 8
    """Rollouts per prompt, at least 2, as an advantage compares them; 1 with a loss of your own only."""

    loss: LossName | ImportPath = "dppo-tv"
    """Policy loss, or a function of your own as `package.module:name`."""

    advantage: Literal["std", "mean", "leave-one-out"] = "mean"
    """Reward minus group mean, with or without division by the group's standard deviation, or minus the mean
    of the other rollouts."""

    clip_low: PositiveFloat = 0.2
    """Clip range of the ratio below 1 (of the probability difference with `dppo-tv`)."""

    clip_high: PositiveFloat = 0.2
    """Clip range of the ratio above 1."""

    importance: Literal["off", "token", "sequence"] = "off"
    """Truncated importance weights of trainer over behaviour probabilities, per token or per sequence."""

    importance_cap: PositiveFloat = 2.0
    """Upper limit of an importance weight."""

    old_logprobs: Literal["engine", "trainer"] = "engine"
    """Log-probabilities that ratios are relative to: those of the engine, or, with `max_staleness = 0`, those
    of the trainer before the first step on a batch, so that the engine's rounding has no influence."""

    kl: float = 0.0
    """Weight of the KL divergence to the configured model as it is before any step; above 0 costs memory for
    a second copy of the weights. It excludes `rl.supervised_steps`: export the model after a warm-up, and
    start from it with `model.pretrained`."""

    max_staleness: int = 0
    """Policy versions by which a rollout may be older than the weights that it trains (eta). 0: each batch is
    generated by the weights that it trains. Above, samples of a long tail continue over steps."""

    epochs: PositiveInt = 1
    """Passes over each batch."""

    batches: PositiveInt = 1
    """Inner steps per pass: parts into which the batch is divided."""

    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal, before the penalty of `rl.overlong`, by groups of further
    prompts."""

    overlong: int = 0
    """Tokens before `rl.sampling.max_new_tokens` over which the reward falls linearly by 1; 0: no such
    penalty."""

    rows: int = 0
    """Rollouts that a rank decodes at a time; 0: all of its batch."""

    engine_dtype: Literal["same", "bf16", "fp32", "fp64"] = "same"
    """`same` generates with the trained parameters in place; others with a copy."""

    engine: Literal["aedit", "vllm"] = "aedit"
    """Engine of the rollouts: this package's, or vLLM in worker processes (`[rollout.vllm]`)."""

    pool: bool = False
    """Nodes of one world that wait in the rounds generate for slow ones, with the same tokens; with
    `max_staleness = 0` and without workers."""

    workers: int = 0
    """Processes per rank that generate, each with a copy of the weights; 0: the rank generates itself,
    between two training steps. With `rl.servers` or `rl.engine = "vllm"` at least one runs, which does
    everything when no server is there."""

    servers: str = "off"
    """Rollout servers that generate too: `hub` for those that the run's hub lists (`aedit serve ADDRESS`), or
    addresses as `HOST:PORT,HOST:PORT`."""

    server_silent_s: PositiveFloat = 5.0
    """Silence after which a server's samples continue elsewhere."""

    server_stalled_s: PositiveFloat = 60.0
    """Seconds without a token of a sample after which this sample continues elsewhere, whatever the server
    does for others."""

    on_new_version: Literal["recompute", "finish"] = "recompute"
    """Samples that run at a server when a new policy version comes: go on with it, or end with theirs."""

    supervised_steps: int = 0
    """Inner steps of a supervised warm-up on prompts and right answers, before the first rollout, for models
    trained from nothing."""

    supervised_batch: PositiveInt = 32
    """Problems per node and step of the supervised warm-up."""

    supervised_lr: PositiveFloat = 1e-3
    """Learning rate of the supervised warm-up."""

    eval_every: int = 10
    """Steps between evaluations on held-out problems; 0: only at the start and the end."""

    eval_problems: PositiveInt = 64
    """Held-out problems per evaluation, answered greedily."""

    keep_rollouts: NonNegativeInt = 64
    """Rollouts that each rank keeps in the node's directory for `aedit view`, in whole groups: of each batch
    at most the first, evenly over the run, and the newest. 0: none."""

    sampling: RLSamplingConfig = field(default_factory=RLSamplingConfig)

    @property
    def num_workers(self) -> int:
        """Return the processes per rank that generate: at least one with servers or vLLM."""
        return max(self.workers, int(self.has_servers or self.engine == "vllm"))

    @property
    def has_servers(self) -> bool:
        """Return whether rollout servers generate too."""
        return self.servers != "off"

    @property
    def server_addresses(self) -> tuple[str, ...]:
        """Return the addresses of servers that need no hub."""
        return () if self.servers in ("off", "hub") else tuple(self.servers.split(","))

    @property
    def version_dtype(self) -> str:
        """Return the dtype in which policy versions travel to rollout servers: bf16 or fp32."""
        return "bf16" if self.engine_dtype == "bf16" else "fp32"

    def __post_init__(self) -> None:
        for name in ("kl", "max_staleness", "overlong", "rows", "workers", "supervised_steps", "eval_every"):
            check(getattr(self, name) >= 0, f"rl.{name}", "must not be negative", getattr(self, name))
        self._check_servers()
        alone = self.group_size == 1 and not is_import_path(self.loss)
        check(not alone, "rl.group_size", "must be at least 2: advantages compare the rollouts of a group", 1)
        most = self.sampling.max_new_tokens
        rule = f"must be at most rl.sampling.max_new_tokens = {most}"
        check(self.overlong <= most, "rl.overlong", rule, self.overlong)
        moved = self.old_logprobs == "trainer" and self.importance == "off" and self.max_staleness > 0
        rule = 'must be "engine" with rl.max_staleness above 0, or rl.importance "token" or "sequence"'
        check(not moved, "rl.old_logprobs", rule, self.old_logprobs)
        warmed = bool(self.kl and self.supervised_steps)
        check(not warmed, "rl.kl", "must be 0 in a run with rl.supervised_steps", self.kl)

    def _check_servers(self) -> None:
        places = self.server_addresses
        for place in places:
            host, _, port = place.rpartition(":")
            fits = bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16 and place == place.strip()
            rule = 'must be "off", "hub", or HOST:PORT, several separated by commas'
            check(fits, "rl.servers", rule, repr(self.servers))
        check(len({*places}) == len(places), "rl.servers", "must name each server once", repr(self.servers))


@checked("rollout.vllm")
@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """vLLM, in an environment of its own."""

    python: str = ""
    """Python interpreter with vLLM, such as `.venv-vllm/bin/python` of `make vllm`."""

    speculative: dict[str, Scalar] = field(default_factory=dict)
    """vLLM's `speculative_config`, such as `method = "suffix"`, `num_speculative_tokens = 8`; empty: no
    drafts. Drafts change no token. `method = "eagle3"` without `model` drafts with the run's own drafter."""

    choose: bool = True
    """vLLM drafts only in steps in which that is measured to pay; off: in all."""

    server: str = ""
    """`http://HOST:PORT` of a vLLM server with the plug-in, in place of `python`; of one rank alone, which
    pushes each version to it."""

    weights: str = "/dev/shm"
    """Directory for a version on its way to that server, which reads it there."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.server)
            fits = not self.server or (parts.scheme == "http" and bool(parts.hostname and parts.port))
        except ValueError:
            fits = False
        check(fits, "rollout.vllm.server", "must be http://HOST:PORT", repr(self.server))
        alone = not self.server or not (self.python or self.speculative)
        rule = "must be empty with rollout.vllm.python or speculative, which are those of the server; got"
        check(alone, "rollout.vllm.server", rule, repr(self.server))

    @property
    def has_own_drafter(self) -> bool:
        """Return true if vLLM drafts with the layer that the run trains."""
        return self.speculative.get("method") == "eagle3" and "model" not in self.speculative


@checked("rollout")
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Engines of rollouts that are not part of this package."""

    vllm: VllmConfig = field(default_factory=VllmConfig)


@checked("drafter")
@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Speculative decoding of rollouts, which changes no token."""

    kind: Literal["off", "suffix", "layer", "auto"] = "auto"
    """`suffix` drafts from the texts of the run, `layer` from a small trained layer, `auto` from whichever is
    faster at each step, or not at all."""

    train: bool = False
    """In a run on text: train a layer for the model while the nodes wait, for `aedit export`. The layer
    changes nothing in the run; each node has its own, and the one with the most training is exported."""

    idle_training: bool = True
    """Train the layer while the node waits."""

    priority: Literal["normal", "idle"] = "normal"
    """Of the training on a CPU, which runs only in waits of its node. `idle`: only in time that no other
    program wants."""

    form: Literal["own", "eagle3"] = "own"
    """`eagle3`: the layer has the form that other engines load."""

    vocabulary: NonNegativeInt = 0
    """Number of tokens that a layer of the form `eagle3` can draft; 0: all."""

    pretrained: str = ""
    """Trained layer to begin with: the folder `drafter` of an exported run, a folder in the format of
    speculators, or a `drafter.safetensors`. Empty: a new layer."""

    share: bool = True
    """Exchange the trained layer with the other nodes in the rounds."""

    lr: PositiveFloat = 1e-3
    """Learning rate of the layer's training."""

    loss: Literal["ce", "lk", "tv", "coupled"] = "ce"
    """Loss of the layer's training: `ce` cross-entropy, `lk` -log of the chance that a token is accepted;
    over all drafted tokens: `tv` total variation, `coupled` rejections with the policy's own noise."""

    memory_bytes: int = 2**26
    """Memory for the newest features, on which the layer is trained."""

    @property
    def trains_on_text(self) -> bool:
        """Return whether a run on text trains a layer."""
        return self.train and self.idle_training and self.kind in ("layer", "auto")

    def __post_init__(self) -> None:
        check(self.memory_bytes >= 2**20, "drafter.memory_bytes", "must be at least 1 MiB", self.memory_bytes)


@checked("serve")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Rollout servers (`aedit serve ADDRESS`). A flag of the server overrides the run's value there."""

    rows: PositiveInt = 16
    """Samples that the engine of each line of policy versions decodes at a time."""

    lines: PositiveInt = 4
    """Ranks of trainers that a server generates for at a time. Each one has an engine of its own, with its
    own weights."""

    waiting: PositiveInt = 1024
    """Samples of one rank that may wait beyond `rows`."""

    max_tokens: NonNegativeInt = 0
    """Limit of prompt and answer of a sample; 0: `data.seq_len`."""

    versions: PositiveInt = 4
    """Newest policy versions of each line that are kept, from which a newer one needs only the difference."""


@checked("audit")
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Checks that rollouts of servers are those of the policy; see docs/security.md."""

    on: bool = True
    """Check rollouts of servers. Off: everything that has the right form is trained on."""

    rate: float = 0.2
    """Share of the samples of a new server that are recomputed. Samples wait for the next recomputed one of
    their server, or for the end of the batch."""

    floor: float = 0.02
    """Lowest share, after a long time without a wrong token. After a failure it is 1."""

    halved_by: PositiveInt = 20_000
    """Audited tokens without a wrong one after which the share is half as large."""

    versions: PositiveInt = 4
    """Newest policy versions whose weights the audit keeps; `rl.max_staleness + 2` or more. Samples with
    tokens of older ones are generated again."""

    training: bool = True
    """Check also in the forward pass of training, where the weights are still those that have generated: all
    samples, at the cost of their noise. With `rl.batches` above 1 and `rl.importance = "off"`, samples of
    servers in later parts of a batch cost one more forward pass."""

    device: str = "same"
    """Device of the recomputation: `same` as that of training, `cpu`, or `cuda:1`."""

    threads: PositiveInt = 1
    """Processor threads of the recomputation."""

    calibration: str = ""
    """File of measured numerical differences, by server: `aedit audit FILE --trust SERVER --calibrate OUT`
    writes it. Empty: the verifier's own rounding in 16 bits, in fp32 the defaults, which are wide."""

    record: bool = False
    """Write the rollouts of servers into the directory of the node, `audit/RANK/rollouts.jsonl`."""

    record_bytes: int = 2**28
    """Upper limit of recorded rollouts, in bytes; the newest remain."""

    record_versions: NonNegativeInt = 2
    """Newest policy versions whose weights are recorded too; 0: none."""

    def __post_init__(self) -> None:
        check(0 < self.rate <= 1, "audit.rate", "must be above 0 and at most 1", self.rate)
        rule = f"must be above 0 and at most audit.rate = {self.rate}"
        check(0 < self.floor <= self.rate, "audit.floor", rule, self.floor)
        bytes_rule = "must be at least 1 MiB"
        check(self.record_bytes >= 2**20, "audit.record_bytes", bytes_rule, self.record_bytes)
        check(bool(self.device), "audit.device", 'must name a device, or "same"', self.device)
