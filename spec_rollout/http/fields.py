"""Typed access to the fields of a JSON object. A field that is not read is an error, not ignored.

`read_sampling` and the functions after it read the fields that several routes have in common.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from starlette.requests import Request

from aedit.spec_rollout.http.errors import ApiError, bad_request
from aedit.spec_rollout.http.server import HttpLimits
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
MAX_ID_CHARS = 256
ID_HEADERS = ("x-request-id", "idempotency-key")
IGNORED_TEXT_FIELDS = (
    *("user", "cache_salt", "safety_identifier", "metadata"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
"""Fields of the routes for text that say nothing about the answer."""


T = TypeVar("T")
MISSING: Final = object()


class Fields:
    """Fields of a request. A field with the value null counts as absent."""

    def __init__(self, body: Any, where: str = "") -> None:
        """Wrap a JSON value; `where` is the name of the field that has it."""
        if not isinstance(body, dict):
            what = where or "the body"
            raise bad_request(where or None, f"must be an object, got {_name(body)}" if where else
                              f"{what} must be a JSON object, got {_name(body)}")  # fmt: skip
        self._body: Mapping[str, Any] = body
        self._where = f"{where}." if where else ""
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """Return the name of a field in messages."""
        return self._where + name

    def bad(self, name: str, rule: str) -> ApiError:
        """Return the error of a field."""
        return bad_request(self.path(name), rule)

    def any(self, name: str) -> Any:
        """Return a field as it is, or None."""
        self._read.add(name)
        return self._body.get(name)

    def boolean(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(name, f"must be true or false, got {_name(value)}")
        return value

    def integer(self, name: str, default: T, low: int, high: int) -> int | T:
        """Return an integer from low to high."""
        value = self.any(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(name, f"must be an integer, got {_name(value)}")
        if not low <= value <= high:
            raise self.bad(name, f"must be {low} to {high}, got {_short(value)}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a finite number."""
        value = self.any(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(name, f"must be a number, got {_name(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.bad(name, "must be a finite number")
        return number

    def text(self, name: str, default: T) -> str | T:
        """Return a string of valid Unicode."""
        value = self.any(name)
        return default if value is None else self.check_text(name, value)

    def check_text(self, name: str, value: Any) -> str:
        """Return a value if it is a string of valid Unicode."""
        if not isinstance(value, str):
            raise self.bad(name, f"must be a string, got {_name(value)}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.bad(name, "is not valid Unicode: it has half of a surrogate pair") from None
        return value

    def texts(self, name: str) -> list[str] | None:
        """Return a list of strings of valid Unicode, None if the field is absent."""
        value = self.any(name)
        if value is not None and not isinstance(value, list):
            raise self.bad(name, f"must be a list of strings, got {_name(value)}")
        return None if value is None else [self.check_text(name, each) for each in value]

    def tokens(self, name: str, value: Any) -> tuple[int, ...]:
        """Return a value if it is a list of token ids."""
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise self.bad(name, f"must be a list of token ids, got {_name(value)}")
        return tuple(value)

    def allow(self, name: str, *values: Any) -> None:
        """Check that a field that has no effect here is absent or has one of these values."""
        value = self.any(name)
        if value is not None and value not in values:
            found = _short(value)
            rule = f"must be {' or '.join(map(_short, values))}" if values else "is not supported"
            raise self.bad(name, f"{rule}: this server has nothing else, got {found}")

    def ignore(self, *names: str) -> None:
        """Read fields that say nothing about the answer."""
        self._read.update(names)

    def finish(self) -> None:
        """Check that no field is unknown."""
        unknown = sorted(set(self._body) - self._read)
        if unknown:
            name = unknown[0][:64]
            raise self.bad(name, "is not a parameter of this route: remove it, or correct its name")


def _name(value: Any) -> str:
    """Return the JSON type of a value."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge number"
    return text if len(text) <= 64 else text[:61] + "..."


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


def read_seed(fields: Fields) -> int | None:
    """Return the seed, which fixes the noise of a request; see `noise_keys`."""
    return fields.integer("seed", None, -(1 << 63), (1 << 64) - 1)


def read_request_id(fields: Fields, request: Request) -> str:
    """Return the id of a request, which fixes its noise if it has no seed; see `noise_keys`.

    The id is the field `request_id`, else the header X-Request-Id, else Idempotency-Key.
    """
    request_id = fields.text("request_id", "")
    for header in ID_HEADERS:
        request_id = request_id or request.headers.get(header, "")
    if len(request_id) > MAX_ID_CHARS:
        raise bad_request("request_id", f"must have at most {MAX_ID_CHARS} characters")
    return request_id


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """Return whether the answer comes in parts, and whether the last one has the usage."""
    stream, found = fields.boolean("stream", False), fields.any("stream_options")
    if found is None:
        return stream, False
    if not stream:
        raise fields.bad("stream_options", "needs stream true")
    options = Fields(found, "stream_options")
    include_usage = options.boolean("include_usage", False)
    options.allow("include_obfuscation", False)
    options.allow("continuous_usage_stats", False)
    options.finish()
    return stream, include_usage


def read_text_hints(fields: Fields) -> None:
    """Read fields that change no token of the answer; see docs/serving.md.

    Requests are served in the order in which they come, so a priority is refused. Keys and values are shared
    between equal prefixes under one policy version only, with any salt.
    """
    fields.allow("priority", 0)
    fields.ignore(*IGNORED_TEXT_FIELDS)
    fields.allow("store", False)
    fields.allow("service_tier", "auto", "default")
    fields.allow("use_beam_search", False)
    fields.allow("length_penalty", 1, 1.0)
    fields.allow("include_stop_str_in_output", False)
    fields.allow("spaces_between_special_tokens", True)
    fields.allow("truncate_prompt_tokens")
    response_format = fields.any("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise fields.bad("response_format", 'must be {"type": "text"}: answers are not constrained here')
