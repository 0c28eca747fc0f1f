"""Sampling settings of a request, in the names of OpenAI's interface and of vLLM."""

from collections.abc import Mapping
from typing import Any

from aedit.spec_rollout.http.errors import bad_request
from aedit.spec_rollout.http.fields import Fields
from aedit.spec_rollout.http.limits import HttpLimits
from aedit.spec_rollout.sampling import MIN_TOP_P, Sampling

NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_tokens": "stop_token_ids",
    "stop_strings": "stop",
    "top_logprobs": "logprobs",
}
"""Parameters of requests by the fields of `Sampling` that have other names."""
BIGGEST = 1 << 31


def read_sampling(
    fields: Fields, limits: HttpLimits, eos: tuple[int, ...], *, max_new_tokens: int, top_logprobs: int
) -> Sampling:
    """Return the sampling settings of a request.

    Args:
        fields: The request.
        limits: Limits of the server.
        eos: Tokens that end an answer, unless the request has `ignore_eos`.
        max_new_tokens: Upper limit of new tokens.
        top_logprobs: Alternatives that are reported with each token.

    Raises:
        ApiError: A value is not valid.
    """
    numbers: dict[str, Any] = {
        name: fields.number(name, default)
        for name, default in (
            ("temperature", 1.0),
            ("min_p", 0.0),
            ("repetition_penalty", 1.0),
            ("frequency_penalty", 0.0),
            ("presence_penalty", 0.0),
        )
    }
    top_p = fields.number("top_p", 1.0)
    more_stops = fields.any("stop_token_ids")
    stops = () if more_stops is None else fields.tokens("stop_token_ids", more_stops)
    if len(stops) > 1024:
        raise fields.bad("stop_token_ids", f"must be at most 1024, got {len(stops)}")
    own = () if fields.boolean("ignore_eos", False) else eos
    try:
        return Sampling(
            **numbers,
            top_p=MIN_TOP_P if top_p == 0 else top_p,
            top_k=max(0, fields.integer("top_k", 0, -1, BIGGEST)),
            logit_bias=_logit_bias(fields, limits),
            max_new_tokens=max_new_tokens,
            min_new_tokens=fields.integer("min_tokens", 0, 0, BIGGEST),
            stop_tokens=tuple(sorted({*own, *stops})),
            stop_strings=_stop_strings(fields, limits),
            top_logprobs=top_logprobs,
        )
    except ValueError as error:
        raise rename(error) from None


def rename(error: ValueError) -> Exception:
    """Return the answer for a `ValueError` about sampling, in the names of the request."""
    text = str(error).removeprefix("Sampling: ")
    name, _, rule = text.partition(" ")
    if not name.replace("_", "").isalpha() or ("_" not in name and name not in ("temperature",)):
        return bad_request(None, text)
    param = NAMES.get(name, name)
    return bad_request(param, rule)


def _logit_bias(fields: Fields, limits: HttpLimits) -> Mapping[int, float]:
    found: Any = fields.any("logit_bias")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise fields.bad("logit_bias", "must be an object of token ids and numbers")
    if len(found) > limits.max_logit_bias:
        raise fields.bad("logit_bias", f"must have at most {limits.max_logit_bias} tokens, got {len(found)}")
    bias: dict[int, float] = {}
    for name, value in found.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (name.isascii() and name.isdigit() and len(name) < 12) or not is_number:
            raise fields.bad("logit_bias", "must be an object of token ids and numbers")
        if not -100 <= value <= 100:
            raise fields.bad("logit_bias", "must have values from -100 to 100")
        bias[int(name)] = float(value)
    return bias


def _stop_strings(fields: Fields, limits: HttpLimits) -> tuple[str, ...]:
    found = fields.any("stop")
    if found is None:
        return ()
    stops = [found] if isinstance(found, str) else found
    if not isinstance(stops, list):
        raise fields.bad("stop", "must be a string or a list of strings")
    if len(stops) > limits.max_stop:
        raise fields.bad("stop", f"must be at most {limits.max_stop} strings, got {len(stops)}")
    for each in stops:
        if not fields.check_text("stop", each):
            raise fields.bad("stop", "must not have an empty string")
        if len(each) > limits.max_stop_chars:
            raise fields.bad("stop", f"must have strings of at most {limits.max_stop_chars} characters")
    return tuple(stops)
