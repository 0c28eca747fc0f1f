"""Policy gradient: advantages, log-probabilities under the trained model, loss, backward pass.

A micro-batch is padded on the right: L is the length of its longest text, T = L - 1, and place t of T is the
prediction of token t + 1.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from aedit.edit import Shards
from aedit.launch.config import RLConfig, RunConfig
from aedit.launch.node.objective import AddLoss
from aedit.launch.node.rl_audit import TrainingAudit
from aedit.launch.node.rl_engine import ForwardLearner
from aedit.spec_rollout.rl import (
    LOSSES,
    MEANS,
    Group,
    LossInputs,
    LossSettings,
    PolicyLoss,
    advantages,
    find_loss,
    loss_metrics,
    mean_metrics,
    overlong_penalty,
)
from aedit.spec_rollout.sampling import Rollout, SampleKey


def with_advantages(groups: Sequence[Group], config: RLConfig) -> list[Rollout]:
    """Return the rollouts of `groups` with their advantages; None for one without a reward.

    Rewards are first lowered by the penalty of answers that are almost too long.
    """
    most, window = config.sampling.max_new_tokens, config.overlong
    rewards = [
        [
            None if reward is None else reward + overlong_penalty(len(rollout.tokens), most, window)
            for reward, rollout in zip(group.rewards, group.rollouts, strict=True)
        ]
        for group in groups
    ]
    return [
        replace(rollout, advantage=None if reward is None else advantage)
        for group, row, found in zip(groups, rewards, advantages(rewards, config.advantage), strict=True)
        for rollout, advantage, reward in zip(group.rollouts, found, row, strict=True)
    ]


def num_trained(rollout: Rollout) -> int:
    """Return the number of trained tokens of a rollout."""
    return 0 if rollout.advantage is None else len(rollout.tokens)


@dataclass(slots=True, kw_only=True)
class PolicyGradient:
    """Gradients of the policy loss of `config` for `model`. All ranks of the node together."""

    config: RunConfig
    model: nn.Module
    reference: nn.Module | None
    """Model of the KL divergence; None without one."""
    shards: Shards
    device: torch.device
    learner: ForwardLearner | None = None
    """Drafter that learns from these forward passes; None without one."""
    audit: TrainingAudit | None = None
    """Checks samples of rollout servers in these forward passes."""
    proximal: dict[SampleKey, Tensor] = field(default_factory=dict)
    """Log-probabilities of the tokens before the first inner step on the batch, where the loss needs them."""
    sums: Counter[str] = field(default_factory=Counter)
    """Sums and counts of `loss_metrics` on this rank since `means`."""
    _loss: PolicyLoss = field(init=False)
    _settings: LossSettings = field(init=False)

    def __post_init__(self) -> None:
        rl = self.config.rl
        self._loss = find_loss(rl.loss)
        self._settings = LossSettings.of(rl)

    def accumulate(self, samples: Sequence[Rollout], add_loss: AddLoss, version: int | None = None) -> int:
        """Run the forward and backward passes over this rank's samples of one inner step.

        Returns the trained tokens of all ranks.

        version: policy version that the weights are; None if they have moved since. The drafter learns from
        features of whole versions only, and only then samples can be checked. A sample that fails is left out
        like one without a reward.

        The loss is that of the samples of all ranks, of which each has as many. FSDP2 averages gradients over
        the ranks, so each rank's part is multiplied by their number.

        Micro-batches without a gradient have a forward pass only, for the metrics. One always has both, as an
        optimizer does not do the same without gradients as with gradients of 0. On a node of one rank, no
        micro-batch mixes samples with and without one; several ranks must have equally many micro-batches.
        """
        if self.audit is not None:
            samples = self.audit.without_excluded(samples)
        parts = list(micro_batches(samples, self._size, apart=self._needs_signal and self.shards.size == 1))
        trained = [num_trained(sample) for sample in samples]
        signals = [not self._needs_signal or any(sample.advantage for sample in part) for part in parts]
        counts = [sum(trained), sum(count > 0 for count in trained), *signals]
        num_tokens, num_sequences, *gradients = self.shards.sum(torch.tensor(counts)).tolist()
        num_tokens, num_sequences = max(1, num_tokens), max(1, num_sequences)
        learner = self.learner if version is not None else None
        if learner is not None and version is not None:
            learner.begin(version)
        for number, part in enumerate(parts):
            has_gradient = gradients[number] > 0 or number == 0  # on any rank
            with (
                torch.set_grad_enabled(has_gradient),
                learner.collecting(self.model, part) if learner is not None else nullcontext(),
            ):
                loss = self._loss_of(part, version, num_tokens, num_sequences)
            if has_gradient:
                (loss * self.shards.size).backward()  # type: ignore[no-untyped-call]
            if learner is not None:
                learner.features.write()
            add_loss(loss.detach() * self.shards.size)
        return int(num_tokens)

    @property
    def _needs_signal(self) -> bool:
        """Return whether the loss of a sample has a gradient only with an advantage.

        The shipped losses are proportional to the advantage, apart from the KL term. Of other losses nothing
        is known.
        """
        return self._settings.kl == 0 and self.config.rl.loss in LOSSES

    @torch.no_grad()
    def before_steps(self, parts: Sequence[Sequence[Rollout]], version: int) -> None:
        """Run the forward passes that the inner steps on `parts` of a batch need before the first of them.

        They fill `proximal`, unless no loss will need it (`LossSettings.needs_proximal`), or there is a
        single step on the batch. Samples of servers in later parts are checked here: their own steps come
        when the weights have moved.

        Args:
            parts: This rank's samples of each inner step.
            version: Policy version that the weights are.
        """
        rl = self.config.rl
        self.proximal = {}
        is_proximal = self._settings.needs_proximal and rl.epochs * rl.batches > 1
        samples: Sequence[Rollout] = [
            sample for part in (parts if is_proximal else parts[1:]) for sample in part
        ]
        if not is_proximal:
            samples = self._to_check(samples, version)
        for part in micro_batches(samples, self._size):
            tokens_BL, answers_BT = self._padded(part)
            logits_NV = self._logits(self.model, tokens_BL, answers_BT)
            if self.audit is not None:
                self.audit.check(part, logits_NV, version, whole=True)
            if is_proximal:
                logp_BT = self._of_logits(logits_NV, tokens_BL, answers_BT)[0].cpu()
                for sample, logp_T, mask_T in zip(part, logp_BT, answers_BT.cpu(), strict=True):
                    self.proximal[sample.prompt.key] = logp_T[mask_T]

    def _to_check(self, samples: Sequence[Rollout], version: int) -> Sequence[Rollout]:
        """Return samples with all that the audit has to check, as many on each rank. Collective."""
        if self.audit is None or not samples:
            return []
        audit = self.audit
        first = [sample for sample in samples if audit.has_to_check(sample, version)]
        others = [sample for sample in samples if not audit.has_to_check(sample, version)]
        return [*first, *others][: self.shards.most([len(first)])[0]]

    def means(self) -> dict[str, float]:
        """Return the means of `loss_metrics` over the ranks since the last call."""
        names = sorted({*MEANS, *MEANS.values()})
        sums = torch.tensor([float(self.sums[name]) for name in names], dtype=torch.float64)
        totals = dict(zip(names, self.shards.sum(sums).tolist(), strict=True))
        self.sums.clear()
        return mean_metrics(totals)

    @property
    def _size(self) -> int:
        """Return the rollouts of a rank's forward pass."""
        return max(1, self.config.train.batch_size // self.shards.size)

    def _loss_of(
        self, samples: Sequence[Rollout], version: int | None, num_tokens: int, num_sequences: int
    ) -> Tensor:
        tokens_BL, answers_BT = self._padded(samples)
        trained_B = torch.tensor([sample.advantage is not None for sample in samples], device=self.device)
        trained_BT = answers_BT & trained_B[:, None]
        logits_NV = self._logits(self.model, tokens_BL, trained_BT)
        mask_BT = trained_BT
        if self.audit is not None and version is not None:
            kept_B = self.audit.check(samples, logits_NV.detach(), version).to(self.device)
            mask_BT = mask_BT & kept_B[:, None]
        logp_BT, entropy_BT = self._of_logits(logits_NV, tokens_BL, trained_BT)
        reference_BT = None
        if self.reference is not None:
            with torch.no_grad():
                logits_NV = self._logits(self.reference, tokens_BL, trained_BT)
                reference_BT = self._of_logits(logits_NV, tokens_BL, trained_BT)[0]
        behaviour_N = [torch.tensor(sample.logprobs, dtype=torch.float64).float() for sample in samples]
        proximal_N = [self.proximal[sample.prompt.key] for sample in samples] if self.proximal else None
        inputs = LossInputs(
            logp_BT=logp_BT,
            behaviour_BT=_scattered(answers_BT, behaviour_N),
            mask_BT=mask_BT,
            advantages_B=torch.tensor([sample.advantage or 0.0 for sample in samples], device=self.device),
            reference_BT=reference_BT,
            proximal_BT=None if proximal_N is None else _scattered(answers_BT, proximal_N),
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            max_tokens=self.config.rl.sampling.max_new_tokens,
        )
        output = self._loss(inputs, self._settings)
        self.sums.update(loss_metrics(inputs, output, entropy_BT))
        return output.loss

    def _padded(self, samples: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
        """Return the texts of a micro-batch (B, L), and the places of their answers, bool (B, T)."""
        rows, longest = len(samples), max(map(_length, samples))
        tokens_BL = torch.zeros(rows, longest, dtype=torch.int64)
        answers_BT = torch.zeros(rows, longest - 1, dtype=torch.bool)
        for row, sample in enumerate(samples):
            text = (*sample.prompt.tokens, *sample.tokens)
            tokens_BL[row, : len(text)] = torch.tensor(text)
            answers_BT[row, len(sample.prompt.tokens) - 1 : len(text) - 1] = True
        return tokens_BL.to(self.device), answers_BT.to(self.device)

    def _logits(self, model: nn.Module, tokens_BL: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the logits of the tokens of the mask, (N, V), sequence by sequence."""
        bf16 = self.config.model.dtype == "bf16"
        with torch.autocast(tokens_BL.device.type, dtype=torch.bfloat16, enabled=bf16):
            output: Any = model(input_ids=tokens_BL)
        logits_NV: Tensor = output.logits[:, :-1][mask_BT]
        return logits_NV

    def _of_logits(self, logits_NV: Tensor, tokens_BL: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (B, T) at the temperature of sampling, and entropies; 0 outside the mask.

        The engine reports behaviour log-probabilities at that temperature too.
        """
        logp_NV = (logits_NV.float() / self.config.rl.sampling.temperature).log_softmax(-1)
        chosen_N = logp_NV.gather(-1, tokens_BL[:, 1:][mask_BT][:, None])[:, 0]
        entropy_N = -(logp_NV.detach().exp() * logp_NV.detach()).sum(-1)
        zeros_BT = torch.zeros(mask_BT.shape, dtype=torch.float32, device=mask_BT.device)
        return zeros_BT.masked_scatter(mask_BT, chosen_N), zeros_BT.masked_scatter(mask_BT, entropy_N)


def micro_batches(samples: Sequence[Rollout], size: int, *, apart: bool = False) -> Iterator[list[Rollout]]:
    """Yield at most `size` samples at a time, those of similar length together, first those with a signal.

    apart: None has both samples with and without a signal.
    """
    ordered = sorted(samples, key=lambda sample: (not sample.advantage, _length(sample)))
    num_first = sum(bool(sample.advantage) for sample in ordered) if apart else 0
    for part in (ordered[:num_first], ordered[num_first:]):
        for start in range(0, len(part), size):
            yield part[start : start + size]


def _length(sample: Rollout) -> int:
    return len(sample.prompt.tokens) + len(sample.tokens)


def _scattered(mask_BT: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Return values of each sample's answer at the places of the mask, fp32; 0 elsewhere."""
    found_N = torch.cat(list(values)).to(mask_BT.device)
    return torch.zeros(mask_BT.shape, dtype=torch.float32, device=mask_BT.device).masked_scatter(
        mask_BT, found_N
    )


def without_dropout(model: nn.Module) -> None:
    """Set all dropout of `model` to 0.

    The engine generates without it, and with it trainer and behaviour probabilities would differ.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
