"""Configuration of the rollout servers of a run, and of their audit. Imports no torch."""

from dataclasses import dataclass

from aedit.types import NonNegativeInt, check, checked


@checked("serve")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Rollout servers (`aedit serve ADDRESS`). A flag of the server overrides the run's value there."""

    rows: int = 16
    """Samples that the engine of each line of policy versions decodes at a time."""

    lines: int = 4
    """Ranks of trainers that a server generates for at a time. Each one has an engine of its own, with its
    own weights."""

    waiting: int = 1024
    """Samples of one rank that may wait beyond `rows`."""

    max_tokens: NonNegativeInt = 0
    """Limit of prompt and answer of a sample; 0: `data.seq_len`."""

    versions: int = 4
    """Newest policy versions of each line that are kept, from which a newer one needs only the difference."""

    def __post_init__(self) -> None:
        for name in ("rows", "lines", "waiting", "versions"):
            check(getattr(self, name) >= 1, f"serve.{name}", "must be at least 1", getattr(self, name))


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

    halved_by: int = 20_000
    """Audited tokens without a wrong one after which the share is half as large."""

    versions: int = 4
    """Newest policy versions whose weights the audit keeps; `rl.max_staleness + 2` or more. Samples with
    tokens of older ones are generated again."""

    training: bool = True
    """Check also in the forward pass of training, where the weights are still those that have generated: all
    samples, at the cost of their noise. With `rl.batches` above 1 and `rl.importance = "off"`, samples of
    servers in later parts of a batch cost one more forward pass."""

    device: str = "same"
    """Device of the recomputation: `same` as that of training, `cpu`, or `cuda:1`."""

    threads: int = 1
    """Processor threads of the recomputation."""

    calibration: str = ""
    """File of measured numerical differences, by server: `aedit audit FILE --trust SERVER --calibrate OUT`
    writes it. Empty: the verifier's own rounding in 16 bits, in fp32 the defaults, which are wide."""

    record: bool = False
    """Write the rollouts of servers into the directory of the node, `audit/RANK/rollouts.jsonl`."""

    record_bytes: int = 2**28
    """Upper limit of recorded rollouts, in bytes; the newest remain."""

    record_versions: int = 2
    """Newest policy versions whose weights are recorded too; 0: none."""

    def __post_init__(self) -> None:
        check(0 < self.rate <= 1, "audit.rate", "must be above 0 and at most 1", self.rate)
        rule = f"must be above 0 and at most audit.rate = {self.rate}"
        check(0 < self.floor <= self.rate, "audit.floor", rule, self.floor)
        for name, least in (("halved_by", 1), ("versions", 1), ("threads", 1), ("record_versions", 0)):
            value = getattr(self, name)
            check(value >= least, f"audit.{name}", f"must be at least {least}", value)
        bytes_rule = "must be at least 1 MiB"
        check(self.record_bytes >= 2**20, "audit.record_bytes", bytes_rule, self.record_bytes)
        check(bool(self.device), "audit.device", 'must name a device, or "same"', self.device)
