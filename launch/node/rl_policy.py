"""Policy gradient: log-probabilities of a micro-batch under the trained model, loss, backward pass."""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aedit.edit import Shards
from aedit.launch.config import RunConfig
from aedit.launch.node.objective import AddLoss
from aedit.launch.node.rl_audit import TrainingAudit
from aedit.launch.node.rl_drafter import ForwardLearner
from aedit.launch.node.rl_samples import Key, Sample, SampleTensors, micro_batches, to_tensors
from aedit.spec_rollout.rl import (
    MEANS,
    LossInputs,
    LossSettings,
    PolicyLoss,
    find_loss,
    loss_metrics,
    mean_metrics,
)


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
    """Drafter that learns from these forward passes; None where rollouts give it what it learns from."""
    audit: TrainingAudit | None = None
    """Checks samples of rollout servers in these forward passes."""
    sums: Counter[str] = field(default_factory=Counter)
    """Sums and counts of `loss_metrics` on this rank since `means`."""
    _loss: PolicyLoss = field(init=False)
    _settings: LossSettings = field(init=False)

    def __post_init__(self) -> None:
        rl = self.config.rl
        self._loss = find_loss(rl.loss)
        self._settings = LossSettings.of(rl)

    def accumulate(self, samples: Sequence[Sample], add_loss: AddLoss, version: int | None = None) -> int:
        """Run the forward and backward passes over this rank's samples of one inner step.

        Returns the trained tokens of all ranks.

        version: policy version that the weights are; None if they have moved since. The drafter learns from
        features of whole versions only, and only then samples can be checked. A sample that fails is left out
        like one without a reward.

        The loss is that of the samples of all ranks, of which each has as many. FSDP2 averages gradients over
        the ranks, so each rank's part is multiplied by their number.
        """
        if self.audit is not None:
            samples = self.audit.without_excluded(samples)
        trained = sum(sample.num_trained > 0 for sample in samples)
        counts = torch.tensor([sum(sample.num_trained for sample in samples), trained])
        num_tokens, num_sequences = (max(1, n) for n in self.shards.sum(counts).tolist())
        learner = self.learner if version is not None else None
        if learner is not None and version is not None:
            learner.begin(version)
        for part in micro_batches(samples, self._size):
            with learner.collecting(self.model, part) if learner is not None else nullcontext():
                loss = self._loss_of(part, version, num_tokens, num_sequences)
            (loss * self.shards.size).backward()  # type: ignore[no-untyped-call]
            if learner is not None:
                learner.features.write()
            add_loss(loss.detach() * self.shards.size)
        return int(num_tokens)

    @torch.no_grad()
    def before_steps(self, parts: Sequence[Sequence[Sample]], version: int) -> dict[Key, Tensor]:
        """Run the forward passes that the inner steps on `parts` of a batch need before the first of them.

        Samples of servers in later parts are checked here: their own steps come when the weights have moved.

        Args:
            parts: This rank's samples of each inner step.
            version: Policy version that the weights are.

        Returns:
            The log-probabilities of the present weights for each rollout's tokens, by its key. Nothing if no
            loss will need them: without importance weights, and for a single step on the batch.
        """
        rl, found = self.config.rl, {}
        is_proximal = rl.importance != "off" and rl.epochs * rl.batches > 1
        samples: Sequence[Sample] = [
            sample for part in (parts if is_proximal else parts[1:]) for sample in part
        ]
        if not is_proximal:
            samples = self._to_check(samples, version)
        for part in micro_batches(samples, self._size):
            batch = to_tensors(part, self.device, whole=True)
            logits_NV = self._answer_logits(self.model, batch)
            if self.audit is not None:
                self.audit.check(part, logits_NV, version, whole=True)
            if is_proximal:
                logp_BT = self._of_logits(logits_NV, batch)[0].cpu()
                for sample, logp_T, mask_T in zip(part, logp_BT, batch.mask_BT.cpu(), strict=True):
                    found[sample.rollout.prompt.key] = logp_T[mask_T]
        return found

    def _to_check(self, samples: Sequence[Sample], version: int) -> Sequence[Sample]:
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
        self, samples: Sequence[Sample], version: int | None, num_tokens: int, num_sequences: int
    ) -> Tensor:
        batch = to_tensors(samples, self.device)
        logits_NV = self._answer_logits(self.model, batch)
        mask_BT = batch.mask_BT
        if self.audit is not None and version is not None:
            kept_B = self.audit.check(samples, logits_NV.detach(), version).to(self.device)
            mask_BT = mask_BT & kept_B[:, None]
        logp_BT, entropy_BT = self._of_logits(logits_NV, batch)
        reference_BT = None
        if self.reference is not None:
            with torch.no_grad():
                reference_BT = self.logprobs(self.reference, batch)[0]
        inputs = LossInputs(
            logp_BT=logp_BT,
            behaviour_BT=batch.behaviour_BT,
            mask_BT=mask_BT,
            advantages_B=batch.advantages_B,
            reference_BT=reference_BT,
            proximal_BT=batch.proximal_BT,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            max_tokens=self.config.rl.sampling.max_new_tokens,
        )
        output = self._loss(inputs, self._settings)
        self.sums.update(loss_metrics(inputs, output, entropy_BT))
        return output.loss

    def logprobs(self, model: nn.Module, batch: SampleTensors) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (B, T) at the temperature of sampling, and entropies; 0 outside the mask.

        The engine reports behaviour log-probabilities at that temperature too.
        """
        return self._of_logits(self._answer_logits(model, batch), batch)

    def _of_logits(self, logits_NV: Tensor, batch: SampleTensors) -> tuple[Tensor, Tensor]:
        logp_NV = (logits_NV.float() / self.config.rl.sampling.temperature).log_softmax(-1)
        chosen_N = logp_NV.gather(-1, batch.tokens_BL[:, 1:][batch.mask_BT][:, None])[:, 0]
        entropy_N = -(logp_NV.detach().exp() * logp_NV.detach()).sum(-1)
        zeros_BT = torch.zeros_like(batch.behaviour_BT)
        return (
            zeros_BT.masked_scatter(batch.mask_BT, chosen_N),
            zeros_BT.masked_scatter(batch.mask_BT, entropy_N),
        )

    def _answer_logits(self, model: nn.Module, batch: SampleTensors) -> Tensor:
        """Return the logits of the tokens of the mask, (N, V), sequence by sequence."""
        bf16 = self.config.model.dtype == "bf16"
        with torch.autocast(batch.tokens_BL.device.type, dtype=torch.bfloat16, enabled=bf16):
            output: Any = model(input_ids=batch.tokens_BL)
        logits_NV: Tensor = output.logits[:, :-1][batch.mask_BT]
        return logits_NV


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
