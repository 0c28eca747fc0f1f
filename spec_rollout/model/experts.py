"""A mixture of experts: a router chooses k gated MLPs for each token and weighs their outputs.

Shapes: T tokens, d hidden size, E experts, k chosen experts, i inner size of an expert.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.spec_rollout.model.layers import Function
from aedit.spec_rollout.model.linear_layers import linear


@dataclass(frozen=True, slots=True)
class Experts:
    """Router and experts of one layer (Mixtral, arXiv:2401.04088; Qwen3-MoE)."""

    router: Tensor
    """(E, d)."""
    gate_up: Tensor
    """(E, 2 * i, d)."""
    down: Tensor
    """(E, d, i)."""
    top_k: int
    is_normalized: bool
    """Whether the weights of the k chosen experts are divided by their sum."""
    activation: Function

    def __call__(self, x_Td: Tensor) -> Tensor:
        """Return the output, (T, d). Only the weights of chosen experts are read."""
        logits = linear(x_Td, self.router)
        exact = torch.promote_types(logits.dtype, torch.float32)
        weights_Tk, experts_Tk = torch.softmax(logits, -1, dtype=exact).topk(self.top_k, -1)
        if self.is_normalized:
            weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
        chosen = experts_Tk.flatten()
        order = chosen.argsort()  # by expert: one product for all its tokens
        tokens = x_Td.index_select(0, order // self.top_k)
        counts = torch.bincount(chosen, minlength=len(self.router)).tolist()
        outputs = torch.empty_like(tokens)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                outputs[part] = self._run(expert, tokens[part])
                start += count
        outputs = torch.empty_like(outputs).index_copy_(0, order, outputs)
        weighted = outputs.view(len(x_Td), self.top_k, -1) * weights_Tk[:, :, None]
        return weighted.sum(1).to(x_Td.dtype)

    def _run(self, expert: int, x: Tensor) -> Tensor:
        gate, up = linear(x, self.gate_up[expert]).chunk(2, -1)
        return linear(self.activation(gate) * up, self.down[expert])
