"""Coupled sampling: the token is a function of weights, text and the counter-based noise of its position.

Begin with `samples` (prompts, sampling parameters, rollouts). `noise` and `noisy_argmax` draw, `distribution`
warps logits, `adjustments` changes them (bias, penalties, constraints), `verify` accepts drafted tokens,
`stops` ends a rollout and turns tokens into text, `sample_text` writes samples as JSON. Called by engine,
drafters, servers and audits.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.sampling.adjustments import LogitAdjustments
    from aedit.spec_rollout.sampling.distribution import RowSampling, logprobs, top_logprobs, warp_logits
    from aedit.spec_rollout.sampling.noise import LARGE_VOCABULARY, Ints, NoiseKeys, RowNoise, gumbel
    from aedit.spec_rollout.sampling.noisy_argmax import noisy_best_two
    from aedit.spec_rollout.sampling.sample_text import (
        decode_prompt,
        decode_sampling,
        encode_prompt,
        encode_sampling,
    )
    from aedit.spec_rollout.sampling.samples import (
        MIN_TOP_P,
        ROLLOUT_PROTOCOL,
        Constraint,
        FinishReason,
        Prompt,
        Rollout,
        SampleKey,
        SampleKV,
        Sampling,
        TopLogprobs,
    )
    from aedit.spec_rollout.sampling.stops import (
        MAX_INCOMPLETE_TOKENS,
        NUM_CONTEXT_TOKENS,
        REPLACEMENT,
        StopStrings,
        TextTokens,
        TokenDecoder,
    )
    from aedit.spec_rollout.sampling.verify import (
        AcceptedTokens,
        accept_path,
        coupled_tokens,
        node_depths,
        rejection_accept,
    )

__all__ = [
    "LARGE_VOCABULARY",
    "MAX_INCOMPLETE_TOKENS",
    "MIN_TOP_P",
    "NUM_CONTEXT_TOKENS",
    "REPLACEMENT",
    "ROLLOUT_PROTOCOL",
    "AcceptedTokens",
    "Constraint",
    "FinishReason",
    "Ints",
    "LogitAdjustments",
    "NoiseKeys",
    "Prompt",
    "Rollout",
    "RowNoise",
    "RowSampling",
    "SampleKV",
    "SampleKey",
    "Sampling",
    "StopStrings",
    "TextTokens",
    "TokenDecoder",
    "TopLogprobs",
    "accept_path",
    "coupled_tokens",
    "decode_prompt",
    "decode_sampling",
    "encode_prompt",
    "encode_sampling",
    "gumbel",
    "logprobs",
    "node_depths",
    "noisy_best_two",
    "rejection_accept",
    "top_logprobs",
    "warp_logits",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
