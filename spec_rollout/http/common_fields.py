"""Fields that several routes have in common."""

from starlette.requests import Request

from aedit.spec_rollout.http.errors import bad_request
from aedit.spec_rollout.http.fields import Fields

MAX_ID_CHARS = 256
ID_HEADERS = ("x-request-id", "idempotency-key")


IGNORED_TEXT_FIELDS = (
    *("user", "cache_salt", "safety_identifier", "metadata"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
"""Fields of the routes for text that say nothing about the answer."""


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
