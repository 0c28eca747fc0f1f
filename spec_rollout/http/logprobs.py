"""Log-probabilities in the forms of OpenAI's interfaces."""

from collections.abc import Sequence
from typing import Any

from aedit.spec_rollout.http.text_codec import TextCodec
from aedit.spec_rollout.sampling import TopLogprobs

LOWEST = -9999.0
"""Written for minus infinity, which JSON has not; vLLM writes the same."""


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, LOWEST)


def completion_logprobs(
    codec: TextCodec,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[TopLogprobs],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """Return the object `logprobs` of /v1/completions.

    The alternatives of a place include the token that is there. Tokens with the same text are one entry, the
    most likely one.
    """
    alternatives: list[dict[str, float] | None] = []
    for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        if logprob is None:
            alternatives.append(None)
            continue
        found: dict[str, float] = {}
        for other, value in (*(tops[i] if i < len(tops) else ()), (token, logprob)):
            text = codec.token_text(other)
            found[text] = max(found.get(text, LOWEST), finite(value))
        alternatives.append(found)
    return {
        "tokens": [codec.token_text(token) for token in tokens],
        "token_logprobs": [None if value is None else finite(value) for value in logprobs],
        "top_logprobs": alternatives,
        "text_offset": list(offsets),
    }


def chat_logprobs(
    codec: TextCodec, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopLogprobs]
) -> dict[str, Any]:
    """Return the object `logprobs` of /v1/chat/completions."""
    content = []
    for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        top = [_entry(codec, *pair) for pair in (tops[i] if i < len(tops) else ())]
        content.append({**_entry(codec, token, logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(codec: TextCodec, token: int, logprob: float) -> dict[str, Any]:
    text = codec.token_text(token)
    return {"token": text, "logprob": finite(logprob), "bytes": codec.token_bytes(token)}
