"""Norms, routers and Gemma's attention in float64, which `transformers` rounds to float32 in any model."""

import functools

import torch
from transformers.models.gemma2 import modeling_gemma2


def normalize_exactly(model):
    """Make RMSNorm and router classes of the model compute float64 inputs in float64; return the model.

    The classes are changed, not the instances: an engine refuses an instance with a forward of its own.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            _patch(type(module), _gemma_norm if hasattr(module, "eps") else _norm)
        if type(module).__name__.endswith("TopKRouter"):
            _patch(type(module), _router)
    return model


def _patch(kind, exact):
    narrow = kind.forward
    if hasattr(narrow, "__wrapped__"):
        return

    @functools.wraps(narrow)
    def forward(self, x):
        return exact(self, x) if x.dtype == torch.float64 else narrow(self, x)

    kind.forward = forward


def _norm(self, x):
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def _gemma_norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


def _router(self, x):
    logits = x.reshape(-1, x.shape[-1]) @ self.weight.T
    weights, experts = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
    if getattr(self, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, experts


_narrow_attention = modeling_gemma2.eager_attention_forward


def _attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **more):
    """Compute attention as Gemma 2, which has no other implementation than this one on a CPU."""
    if query.dtype != torch.float64:
        return _narrow_attention(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, **more
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores if attention_mask is None else scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


modeling_gemma2.eager_attention_forward = _attention
