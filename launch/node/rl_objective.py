"""Reinforcement learning as the objective of a node: groups of rollouts, advantages, policy loss.

`train_policy` is its loop; `WarmUp` trains right answers before the first rollout.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from aedit import traces
from aedit.edit import LayerSync
from aedit.launch.config import RunConfig
from aedit.launch.data import AnswerTokens, Curriculum, solved_of
from aedit.launch.node.objective import AddLoss, lr_at
from aedit.launch.node.rl_engine import TrainerWatch, save_drafter
from aedit.launch.node.rl_groups import GroupStream, solved_share
from aedit.launch.node.rl_policy import PolicyGradient, with_advantages
from aedit.launch.node.rl_records import KeptGroups, RLRecords
from aedit.launch.node.train import TrainingNode
from aedit.launch.node.world import World
from aedit.spec_rollout.rl import Group, Problem
from aedit.spec_rollout.sampling import Sampling
from aedit.spec_rollout.training import OnlineDrafter


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Supervised steps on prompts and answers of `problems`."""

    config: RunConfig
    model: nn.Module
    problems: Sequence[Problem]
    answers: AnswerTokens
    world: World

    def is_over(self, progress: float) -> bool:
        """Return whether the run, of which this share is done, has had its supervised steps."""
        return progress * self.config.train.steps >= self.config.rl.supervised_steps - 0.5

    def accumulate(self, step: int, add_loss: AddLoss) -> int:
        """Run the forward and backward passes of a supervised step; return its tokens.

        step: inner steps of this node so far. Its problems depend on it, the seed and the node alone.
        """
        tokens_BT, mask_BT = self.answers.batch(self._problems(step))
        num_tokens = int(mask_BT.sum())
        mine = slice(self.world.rank, None, self.world.ranks)
        tokens_BL = tokens_BT[mine].to(self.world.device)
        mask_BT = mask_BT[mine, 1:].to(self.world.device)
        bf16 = self.config.model.dtype == "bf16"
        with torch.autocast(tokens_BL.device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = self.model(input_ids=tokens_BL).logits[:, :-1]
        total = cross_entropy(logits[mask_BT].float(), tokens_BL[:, 1:][mask_BT], reduction="sum")
        loss = total * self.world.ranks / num_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        add_loss(loss.detach())
        return num_tokens

    def _problems(self, step: int) -> Sequence[Problem]:
        key = np.random.SeedSequence((self.config.seed % 2**32, self.world.node, step, 0x5F7))
        size = self.config.rl.supervised_batch
        indices = np.random.default_rng(key).integers(0, len(self.problems), size)
        return [self.problems[int(index)] for index in indices]


@dataclass(slots=True, kw_only=True)
class PolicyObjective:
    """Objective of a run with `prompts.source`. Its methods are lines of `train_policy`."""

    config: RunConfig
    sync: LayerSync
    stream: GroupStream
    gradient: PolicyGradient
    warm_up: WarmUp
    records: RLRecords
    held_out: Sequence[Problem]
    curriculum: Curriculum | None
    greedy: Sampling
    online: OnlineDrafter | None
    """The learned drafter of this rank."""
    watch: TrainerWatch | None
    """Of the process that trains the drafter; None without a drafter."""
    directory: Path
    """Directory of the node."""
    kept: KeptGroups
    """Rollouts of this rank that are kept for views."""
    version: int = 0
    """Policy version of the newest hand-over."""
    started: bool = False
    """True once the supervised warm-up is over. It does not begin again."""
    _steps: deque[Sequence[Group] | None] = field(default_factory=deque)
    """Groups of each inner step that is left in this batch; None: a supervised step."""
    _new: int = 0
    """Number of these steps that train groups for the first time."""
    _is_first: bool = False
    """True until the first inner step on this batch: until then the weights are those of `version`."""
    _tokens: int = 0
    _spans: Sequence[traces.TraceSpan] = ()
    """Of the groups of the step under way."""
    _used: list[int] = field(default_factory=lambda: [0])
    """At [s], the draws that the first s steps of this attempt have used up."""
    _evaluated_step: int = 0

    # -- a batch

    def warm_up_ends(self, progress: float) -> bool:
        """Return whether the supervised warm-up ends now, at this share of the run's budget."""
        ends = not self.started and self.sync.shards.decide([self.warm_up.is_over(progress)])[0] == 1
        self.started = self.started or ends
        return ends

    def take_answers(self) -> None:
        """Make the next batch one step on right answers."""
        self._steps.append(None)

    def update_engine(self) -> None:
        """Land what has arrived, and hand the weights to the source of rollouts."""
        self.version = self.sync.update_engine(self.stream.pipeline.source)

    def take_groups(self) -> None:
        """Wait for the groups of the next batch, and divide them into the inner steps on them."""
        groups = self.stream.next_batch()
        self.records.add_batch(groups, self.version)
        parts = _parts(groups, self.config.rl.batches)
        samples = [with_advantages(part, self.config.rl) for part in parts]
        self.kept.add_first(self.sync.steps, groups, samples)
        self.gradient.before_steps(samples, self.version)
        self._steps.extend(parts * self.config.rl.epochs)
        self._new, self._is_first = len(parts), True

    def has_steps(self) -> bool:
        """Return whether an inner step on the batch is left."""
        return bool(self._steps)

    # -- an inner step

    def accumulate_gradients(self, add_loss: AddLoss) -> None:
        """Run the forward and backward passes of the next inner step on the batch."""
        began = time.perf_counter()
        groups = self._steps[0]
        self._spans = [traces.opened("train", group.trace, step=self.sync.steps) for group in groups or ()]
        if groups is None:
            self._tokens = self.warm_up.accumulate(self.sync.steps, add_loss)
        else:
            samples = with_advantages(groups, self.config.rl)
            version = self.version if self._is_first else None
            self._tokens = self.gradient.accumulate(samples, add_loss, version)
        self.records.train_s += time.perf_counter() - began

    def lr(self, progress: float, nodes: int) -> float:
        """Return the learning rate of the warm-up, or of the schedule over the rest of the run."""
        if not self.started:
            return self.config.rl.supervised_lr
        warm_up = min(self.config.rl.supervised_steps / self.config.train.steps, 0.999)
        return lr_at(max(0.0, progress - warm_up) / (1 - warm_up), self.config.train, nodes)

    def positions(self) -> list[int]:
        """Return the positions of the groups that the step trains first; none in the warm-up."""
        groups = self._steps[0] if self._steps and self._new else None
        return [group.position for group in groups or ()]

    def end_step(self) -> int:
        """Count the step and its groups as trained; return its tokens."""
        groups, self._is_first = self._steps.popleft(), False
        traces.end_trained(self._spans)
        if groups is None:
            self.records.supervised_steps += 1
        elif self._new:
            self._new -= 1
            self._follow(self.stream.trained(len(groups)))
        if groups is not None and not self._steps:
            self.records.newest |= self.gradient.means()
        self._used.append(self.stream.first_pending())
        return self._tokens

    def _follow(self, groups: Sequence[Group]) -> None:
        """Let the curriculum follow the solved shares of trained groups, of all ranks. Collective."""
        if self.curriculum is not None:
            shards, limit = self.sync.shards, self.config.reward.solved
            solved = torch.zeros(shards.size, len(groups), 2, dtype=torch.float64)
            solved[shards.rank] = torch.tensor([solved_of(group, limit) for group in groups])
            self.curriculum.add(
                (int(level), share) for level, share in shards.sum(solved).flatten(0, 1).tolist()
            )

    def undo_step(self) -> None:
        """Put the groups back that no step has trained."""
        self._steps.clear()
        self.stream.put_back()

    def drawn(self) -> int:
        """Return the prompts that were drawn in this attempt."""
        return self.stream.order.state()["drawn"]

    def used(self, steps: int) -> int:
        """Return the first draws that the first `steps` steps of this attempt have used up."""
        return self._used[min(steps, len(self._used) - 1)]

    # -- evaluation, records and checkpoints

    def evaluation_is_due(self, milestone: int, evaluated: int) -> bool:
        """Return whether `rl.eval_every` steps have passed since the last evaluation; none in the warm-up."""
        every = self.config.rl.eval_every
        return bool(every) and self.started and self.sync.steps >= self._evaluated_step + every

    def evaluate(self) -> tuple[str, dict[str, Any]]:
        """Return the share of held-out problems that greedy answers solve."""
        self._evaluated_step = self.sync.steps
        self.update_engine()
        stream, shards = self.stream, self.sync.shards
        return "rl_eval", solved_share(self.held_out, self.config, stream.pipeline, self.greedy, shards)

    def evaluate_later(self, step: int, round: int) -> bool:
        """Return false: answers are generated with the weights in use."""
        return False

    def finish_evaluation(self) -> None:
        """Do nothing."""

    def metrics(self) -> dict[str, Any]:
        """Return the table `rl`."""
        self.records.counts = self.stream.counts
        line = self.records.line()
        if self.watch is not None:
            self.watch.report()
            line["drafter"]["starved"] = int(self.watch.starved)
        return {"rl": line}

    def order_state(self) -> dict[str, int]:
        """Return the state of the stream of prompts before the first group that was not trained."""
        return self.stream.order.state() | {"drawn": self.stream.first_pending()}

    def state(self) -> dict[str, Any]:
        """Return totals and progress for a checkpoint, and write the drafter beside it."""
        if self.online is not None and self.sync.shards.leads:
            save_drafter(self.online, self.directory)
        self.records.counts = self.stream.counts
        return {
            "started": self.started,
            "evaluated_step": self._evaluated_step,
            "totals": self.records.totals(),
            "curriculum": self.curriculum.state() if self.curriculum else {},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.started = state.get("started", self.started)
        self._evaluated_step = state.get("evaluated_step", 0)
        if self.curriculum is not None:
            self.curriculum.restore(state.get("curriculum", {}))
        self.records.before, self.records.waited_before_s = state.get("totals", {}), self.sync.waited_s

    def close(self) -> None:
        """End the source of rollouts, the reward processes and the drafter's trainer."""
        try:
            self.stream.pipeline.close()
        finally:
            self.sync.idle = None
            if self.online is not None:
                self.online.close()


def _parts(groups: Sequence[Group], num_parts: int) -> list[Sequence[Group]]:
    """Return `groups` in parts whose sizes differ by at most one; the first ones are the larger ones."""
    size, more = divmod(len(groups), num_parts)
    ends = [(i + 1) * size + min(i + 1, more) for i in range(num_parts)]
    return [groups[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def train_policy(node: TrainingNode, policy: PolicyObjective) -> None:
    """Train until the end of the run's budget or a stop request; then save and leave with the other nodes.

    policy: the objective of `node`.
    """
    with node.in_run():
        while node.goes_on():
            node.stop.check()
            if policy.warm_up_ends(node.budget.progress()):
                node.evaluate()
            node.begin_step()
            if policy.started:
                policy.update_engine()  # lands; one policy version begins all new groups of the batch
                policy.take_groups()  # prompts, rollouts, rewards
            else:
                policy.take_answers()
            while policy.has_steps() and node.goes_on():
                node.accumulate_gradients()  # advantages, policy loss
                node.sync.average_gradients()  # during the warm-up of `edit` only
                node.inner_step()
                node.end_step()
                node.sync.step()  # opens a round if one is due
                node.record_step()
            node.evaluate_if_due()
            node.save_after_a_round()
