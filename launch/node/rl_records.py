"""Figures of reinforcement learning for the lines of metrics: newest batch, and running totals."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
import torch

from aedit.edit import LayerSync, Shards
from aedit.launch.config import RunConfig
from aedit.launch.node.rl_engine import ARMS
from aedit.launch.node.rl_groups import GroupPipeline
from aedit.launch.records import MOST_PROMPT, MOST_TOKENS, Recorder, RolloutStore
from aedit.spec_rollout.audit import spans_of
from aedit.spec_rollout.rl import Group
from aedit.spec_rollout.sampling import Rollout, SampleKey
from aedit.spec_rollout.server import arms_of
from aedit.spec_rollout.training import CAUSES, OnlineDrafter

SUMS = (
    "groups",
    "rollouts",
    "no_signal",
    "excluded",
    "retried",
    "rollout_tokens",
    "passes",
    "plain_tokens",
    "digest",
)
"""Totals that are added over the ranks of a node."""
OF_DRAFTER = ("steps", "published", "adopted", "refused")
"""Counts of the learned drafter, added over the ranks."""
OF_POOL = (
    "asked",
    "given",
    "moved",
    "received",
    "received_tokens",
    "taken_back",
    "helped",
    "helped_tokens",
    "messages",
    "bytes",
    "helped_s",
)
"""Totals of the pool of nodes, added over the ranks; of seconds the mean is taken."""
SECONDS = (
    "rollout_s",
    "worker_s",
    "worker_idle_s",
    "reward_s",
    "train_s",
    "plain_s",
    "compared_s",
    "as_plain_s",
    "as_plain_error_s",
    "idle_used_s",
    "idle_usable_s",
)
"""Totals of which the mean over the ranks is taken."""


@dataclass(slots=True)
class Waits:
    """Waits of a rank other than those for rounds, by cause; idle work of `sync` runs meanwhile."""

    sync: LayerSync
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def window(self, cause: str) -> Iterator[None]:
        """Count the time of the block as a wait, and let idle work run in it."""
        idle, began = self.sync.idle, time.monotonic()
        with idle.window(cause) if idle else nullcontext():
            yield
        self.seconds[cause] = self.seconds.get(cause, 0.0) + time.monotonic() - began


@dataclass(slots=True, kw_only=True)
class RLRecords:
    """Totals and newest values of a node; `totals` and `add_batch` are called on all its ranks together."""

    config: RunConfig
    sync: LayerSync
    pipeline: GroupPipeline
    waits: Waits
    shards: Shards
    online: OnlineDrafter | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts of `GroupStream`, replaced before each use."""
    train_s: float = 0.0
    digest: int = 0
    """Sum over the rollouts of this rank of 24 bits of a CRC of position, sample and tokens.
    Runs with equal rollouts have equal totals, others most probably not."""
    supervised_steps: int = 0
    newest: dict[str, float | None] = field(default_factory=dict)
    waited_before_s: float = 0.0
    """Part of `sync.waited_s` that is in `before`."""
    before: dict[str, Any] = field(default_factory=dict)
    """Totals of the attempts before this one."""

    def add_batch(self, groups: Sequence[Group], version: int) -> None:
        """Measure a batch of this rank's groups, to be trained with the weights of this policy version."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = [reward for group in groups for reward in group.rewards if reward is not None]
        lengths = [len(rollout.tokens) for rollout in rollouts]
        self.digest += sum(map(_digest, rollouts))
        ages = [version - each for rollout in rollouts for each in rollout.versions]
        solved = sum(reward >= self.config.reward.solved for reward in rewards)
        mine = [sum(rewards), solved, len(rewards), sum(lengths), len(lengths), sum(ages), len(ages)]
        sums = self.shards.sum(torch.tensor(mine, dtype=torch.float64)).tolist()
        length_max, staleness_max = self.shards.most([max(lengths, default=0), max(ages, default=0)])
        self.newest |= {
            "reward": _ratio(sums[0], sums[2]),
            "solved": _ratio(sums[1], sums[2]),
            "length": _ratio(sums[3], sums[4]),
            "length_max": length_max,
            "staleness": _ratio(sums[5], sums[6]),
            "staleness_max": staleness_max,
        }

    def totals(self) -> dict[str, Any]:
        """Return the running totals of the node, those of earlier attempts included."""
        status = dict(self.pipeline.source.status())
        found = {**self.counts, **status, "train_s": self.train_s, "rollout_s": self.pipeline.rollout_s}
        found |= {
            "digest": self.digest,
            "reward_s": self.pipeline.reward_s,
            "idle_used_s": self.sync.idle_used_s,
        }
        drafter = self.online.status() if self.online is not None else {}
        found["idle_usable_s"] = drafter.get("allowed_s", 0.0)
        pool = status.get("pool", {})
        found["rollout_s"] -= pool.get("helped_in_steps_s", 0.0)
        arms = status.get("arms", {})
        cause = "hub" if self.sync.free else "round"
        idle = self.waits.seconds | {cause: self.sync.waited_s - self.waited_before_s}
        row = [float(found.get(name, 0)) for name in SUMS]
        row += [float(arms.get(name, 0)) for name in self._arms]
        row += [float(found.get(name, 0.0)) / self.shards.size for name in SECONDS]
        row += [idle.get(name, 0.0) / self.shards.size for name in CAUSES]
        used = drafter.get("used_by_cause_s", {})
        row += [used.get(name, 0.0) / self.shards.size for name in CAUSES]
        row += [float(drafter.get(name, 0)) for name in OF_DRAFTER]
        row += [float(pool.get(name, 0)) for name in OF_POOL[:-1]]
        row += [pool.get("helped_s", 0.0) / self.shards.size]
        values = iter(self.shards.sum(torch.tensor(row, dtype=torch.float64)).tolist())
        totals: dict[str, Any] = {name: int(next(values)) for name in SUMS}
        totals["arms"] = {name: int(count) for name in self._arms if (count := next(values))}
        totals |= {name: round(next(values), 4) for name in SECONDS}
        totals["idle_s"] = {name: round(seconds, 4) for name in CAUSES if (seconds := next(values))}
        totals["used_s"] = {name: round(seconds, 4) for name in CAUSES if (seconds := next(values))}
        of_drafter = {name: int(next(values)) for name in OF_DRAFTER}
        totals |= {"drafter": of_drafter} if drafter else {}
        of_pool: dict[str, float] = {name: int(next(values)) for name in OF_POOL[:-1]}
        of_pool["helped_s"] = round(next(values), 4)
        totals |= {"pool": of_pool} if pool else {}
        totals["supervised_steps"] = self.supervised_steps
        return _added(self.before, totals)

    @property
    def _arms(self) -> tuple[str, ...]:
        """Return the names of all arms that engines of this run may use."""
        own = self.config.rollout.vllm
        of_vllm = {str(arm) for arm in arms_of(own.speculative, has_layer=own.has_own_drafter)}
        return ("off", *ARMS, *sorted(of_vllm - {*ARMS}))

    def line(self) -> dict[str, Any]:
        """Return totals and newest values for a line of metrics."""
        totals = self.totals()
        servers = self.pipeline.source.status().get("servers")
        if servers:  # those of the first rank
            totals["servers"] = servers
        totals["drafted_length"] = self.pipeline.source.status().get("drafted_length")  # of the first rank
        totals["drafting_bound"] = self.pipeline.source.status().get("drafting_bound")  # of the first rank
        if self.online is not None:
            length = totals["drafted_length"]
            rests = int(bool(self.online.status()["training"].get("rests")))
            totals["drafter"] |= {
                "accepted_length": length,
                "version": totals["drafter"]["adopted"],
                "rests": rests,
            }
        return totals | self.newest


@dataclass(slots=True, kw_only=True)
class KeptGroups:
    """Groups of one rank that are kept for views. A full disk does not end the training."""

    store: RolloutStore
    most: int
    """Most rollouts of a group."""
    decode: Callable[[Sequence[int]], str]
    recorder: Recorder
    _failed: bool = False

    def add_first(self, step: int, groups: Sequence[Group], samples: Sequence[Sequence[Rollout]]) -> None:
        """Keep the first group of a batch, if the store wants one.

        Args:
            step: Inner steps of the node so far.
            groups: Of this rank, in the order in which their prompts were drawn.
            samples: Their rollouts with advantages, in parts.
        """
        if not groups or not self.store.wants(step):
            return
        known = (rollout for part in samples for rollout in part)
        advantages = {rollout.prompt.key: rollout.advantage for rollout in known}
        try:
            self.store.add(self._line(step, groups[0], advantages))
        except OSError as error:
            failed, self._failed = self._failed, True
            if not failed:
                with suppress(OSError):  # standard output may be on that disk
                    print(f"aedit: kept rollouts: {error}; training continues without them", flush=True)

    def _line(self, step: int, group: Group, advantages: Mapping[SampleKey, float | None]) -> dict[str, Any]:
        rollouts = [
            {
                "sample": rollout.prompt.sample,
                "completion": self.decode(rollout.tokens[:MOST_TOKENS]),
                "ids": (ids := rollout.tokens[:MOST_TOKENS]),
                "texts": [self.decode([id]) for id in ids],
                "logprobs": [round(value, 5) for value in rollout.logprobs[:MOST_TOKENS]],
                "versions": spans_of(rollout.versions),
                "drafted": [at for at in rollout.drafted if at < MOST_TOKENS]
                if rollout.knows_drafted
                else None,
                "num_tokens": len(rollout.tokens),
                "reward": reward,
                "values": {name: values[i] for name, values in group.values.items()},
                "advantage": advantages.get(rollout.prompt.key),
                "finish_reason": rollout.finish_reason,
                "servers": [list(part) for part in rollout.servers],
            }
            for i, (rollout, reward) in enumerate(zip(group.rollouts, group.rewards, strict=True))
        ]
        return {
            "t": round(self.recorder.clock.elapsed_s, 3),
            "step": step,
            "position": group.position,
            "prompt": self.decode(group.problem.tokens)[-MOST_PROMPT:],
            "rollouts": rollouts[: self.most],
        }


def _digest(rollout: Rollout) -> int:
    numbers = (rollout.prompt.rollout, rollout.prompt.sample, *rollout.tokens)
    return crc32(np.array(numbers, np.int64).tobytes()) >> 8


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None


def _added(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sums of two sets of totals, also of the tables in them."""
    found: dict[str, Any] = dict(before)
    for name, value in now.items():
        earlier = before.get(name)
        if isinstance(value, Mapping):
            found[name] = _added(earlier or {}, value)
        else:
            found[name] = value if earlier is None else earlier + value
    return found
