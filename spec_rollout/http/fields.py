"""Requests as pydantic models: fields that several routes have in common, and errors in OpenAI's form.

A field with the value null counts as absent, and an unknown one is an error. The limits of the server are the
context of a validation: `parse_body` passes the service.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from aedit.spec_rollout.http.errors import ApiError, bad_request
from aedit.spec_rollout.sampling import MIN_TOP_P, Sampling

if TYPE_CHECKING:
    from aedit.spec_rollout.http.service import HttpService

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
RULES = {
    "bool_type": "must be true or false, got {kind}",
    "int_type": "must be an integer, got {kind}",
    "float_type": "must be a number, got {kind}",
    "finite_number": "must be a finite number",
    "string_type": "must be a string, got {kind}",
    "missing": "is missing",
}
"""Messages by pydantic's types of errors."""

B = TypeVar("B", bound="Body")
Info = ValidationInfo["HttpService"]
"""Of a validator of a field; the context is the service."""


def broken(rule: str, field: str = "") -> PydanticCustomError:
    """Return the error of a rule about the value that is validated, or about a field of it."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule, "field": field})


def kind_of(value: Any) -> str:
    """Return the JSON type of a value."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def short(value: Any) -> str:
    """Return a value as text of at most 64 characters."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge number"
    return text if len(text) <= 64 else text[:61] + "..."


def check_range(value: int, low: int, high: int, field: str = "") -> int:
    """Return an integer if it is from low to high."""
    if not low <= value <= high:
        raise broken(f"must be {low} to {high}, got {short(value)}", field)
    return value


def between(low: int, high: int | str) -> AfterValidator:
    """Return the check of an integer from low to high; a name is a field of `HttpLimits`."""

    def check(value: int, info: Info) -> int:
        return check_range(value, low, getattr(info.context.limits, high) if isinstance(high, str) else high)

    return AfterValidator(check)


def only(*values: Any) -> PlainValidator:
    """Return the check of a field that has no effect here: it is absent or has one of these values."""

    def check(value: Any) -> Any:
        if value not in values:
            rule = f"must be {' or '.join(map(short, values))}" if values else "is not supported"
            raise broken(f"{rule}: this server has nothing else, got {short(value)}")
        return value

    return PlainValidator(check)


def check_unicode(value: str, field: str = "") -> str:
    """Return a string if it is valid Unicode."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise broken("is not valid Unicode: it has half of a surrogate pair", field) from None
    return value


def check_text(value: Any, field: str = "") -> str:
    """Return a value if it is a string of valid Unicode."""
    if not isinstance(value, str):
        raise broken(f"must be a string, got {kind_of(value)}", field)
    return check_unicode(value, field)


def check_texts(value: Any) -> list[str]:
    """Return a value if it is a list of strings of valid Unicode."""
    if not isinstance(value, list):
        raise broken(f"must be a list of strings, got {kind_of(value)}")
    return [check_text(each) for each in value]


def check_tokens(value: Any) -> tuple[int, ...]:
    """Return a value if it is a list of token ids."""
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise broken(f"must be a list of token ids, got {kind_of(value)}")
    return tuple(value)


def _check_stop_tokens(value: Any) -> tuple[int, ...]:
    tokens = check_tokens(value)
    if len(tokens) > 1024:
        raise broken(f"must be at most 1024, got {len(tokens)}")
    return tokens


def _check_stops(value: Any, info: Info) -> tuple[str, ...]:
    limits, stops = info.context.limits, [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise broken("must be a string or a list of strings")
    if len(stops) > limits.max_stop:
        raise broken(f"must be at most {limits.max_stop} strings, got {len(stops)}")
    for each in stops:
        if not check_text(each):
            raise broken("must not have an empty string")
        if len(each) > limits.max_stop_chars:
            raise broken(f"must have strings of at most {limits.max_stop_chars} characters")
    return tuple(stops)


def _check_bias(value: Any, info: Info) -> Mapping[int, float]:
    if not isinstance(value, dict):
        raise broken("must be an object of token ids and numbers")
    if len(value) > (most := info.context.limits.max_logit_bias):
        raise broken(f"must have at most {most} tokens, got {len(value)}")
    bias: dict[int, float] = {}
    for name, number in value.items():
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not (name.isascii() and name.isdigit() and len(name) < 12) or not is_number:
            raise broken("must be an object of token ids and numbers")
        if not -100 <= number <= 100:
            raise broken("must have values from -100 to 100")
        bias[int(name)] = float(number)
    return bias


def _check_model(name: str, info: Info) -> str:
    if name != (model := info.context.model):
        message = f"there is no model {name[:128]!r} here: use {model!r}, or see /v1/models"
        raise ApiError(404, message, param="model", code="model_not_found")
    return name


def _check_format(value: Any) -> Any:
    if value != {"type": "text"}:
        raise broken('must be {"type": "text"}: answers are not constrained here')
    return value


Number = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, AfterValidator(lambda value: check_unicode(value))]
ModelName = Annotated[Text, AfterValidator(_check_model)] | None
Tokens = Annotated[tuple[int, ...], PlainValidator(check_tokens)]
Ignored = Annotated[Any, "ignored"]
"""Type of a field that changes nothing in the answer."""


class Body(BaseModel):
    """Fields of a request, or of an object in it. A field with the value null counts as absent."""

    model_config = ConfigDict(strict=True, frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _known(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        if not isinstance(value, dict):
            raise broken(f"must be an object, got {kind_of(value)}")
        given = {name: value[name] for name in cls.model_fields if value.get(name) is not None}
        found: Self = handler(given)
        if unknown := sorted(value.keys() - cls.model_fields.keys()):
            name = unknown[0][:64].encode(errors="replace").decode()
            raise broken("is not a parameter of this route: remove it, or correct its name", name)
        return found


class StreamOptions(Body):
    """The object `stream_options`."""

    include_usage: bool = False
    include_obfuscation: Annotated[Any, only(False)] = False
    continuous_usage_stats: Annotated[Any, only(False)] = False


class RouteBody(Body):
    """A request for an answer, whole or in parts."""

    model: ModelName = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: Text = ""
    priority: Annotated[Any, only(0)] = 0
    """Requests are served in the order in which they come."""

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise broken("needs stream true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Return whether the last part of the answer has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def id_of(self, request: Request) -> str:
        """Return the id of the request, which fixes its noise if it has no seed; see `noise_keys`.

        The id is the field `request_id`, else the header X-Request-Id, else Idempotency-Key.
        """
        request_id = self.request_id
        for header in ID_HEADERS:
            request_id = request_id or request.headers.get(header, "")
        if len(request_id) > MAX_ID_CHARS:
            raise bad_request("request_id", f"must have at most {MAX_ID_CHARS} characters")
        return request_id


class SamplingBody(Body):
    """Settings of sampling."""

    n: Annotated[int, between(1, "max_samples")] = 1
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Annotated[int, between(-1, BIGGEST)] = 0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    logit_bias: Annotated[Mapping[int, float], PlainValidator(_check_bias)] = {}
    stop: Annotated[tuple[str, ...], PlainValidator(_check_stops)] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(_check_stop_tokens)] = ()
    ignore_eos: bool = False
    min_tokens: Annotated[int, between(0, BIGGEST)] = 0
    seed: Annotated[int, between(-(1 << 63), (1 << 64) - 1)] | None = None
    """Fixes the noise of a request; see `noise_keys`."""

    def sampling(
        self, eos: tuple[int, ...], *, max_new_tokens: int, top_logprobs: int, stops: tuple[str, ...] = ()
    ) -> Sampling:
        """Return the settings.

        Args:
            eos: Tokens that end an answer, unless the request has `ignore_eos`.
            max_new_tokens: Upper limit of new tokens.
            top_logprobs: Alternatives that are reported with each token.
            stops: Stop strings besides those of the request.

        Raises:
            ApiError: A value is not valid.
        """
        own = () if self.ignore_eos else eos
        try:
            return Sampling(
                temperature=self.temperature,
                top_p=MIN_TOP_P if self.top_p == 0 else self.top_p,
                top_k=max(0, self.top_k),
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
                logit_bias=self.logit_bias,
                max_new_tokens=max_new_tokens,
                min_new_tokens=self.min_tokens,
                stop_tokens=tuple(sorted({*own, *self.stop_token_ids})),
                stop_strings=(*self.stop, *stops),
                top_logprobs=top_logprobs,
            )
        except ValueError as error:
            raise _renamed(error) from None


class TextBody(SamplingBody, RouteBody):
    """A request for text.

    Fields of the second half change no token of the answer; see docs/serving.md. Keys and values are shared
    between equal prefixes under one policy version only, with any salt.
    """

    skip_special_tokens: bool = True
    return_token_ids: bool = False

    user: Ignored = None
    cache_salt: Ignored = None
    safety_identifier: Ignored = None
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    store: Annotated[Any, only(False)] = False
    service_tier: Annotated[Any, only("auto", "default")] = None
    use_beam_search: Annotated[Any, only(False)] = False
    length_penalty: Annotated[Any, only(1, 1.0)] = 1
    include_stop_str_in_output: Annotated[Any, only(False)] = False
    spaces_between_special_tokens: Annotated[Any, only(True)] = True
    truncate_prompt_tokens: Annotated[Any, only()] = None
    response_format: Annotated[Any, PlainValidator(_check_format)] = None


def parse_body(kind: type[B], body: Any, service: "HttpService") -> B:
    """Return the request that a JSON value is.

    Raises:
        ApiError: A field is missing, unknown or not valid.
    """
    try:
        return kind.model_validate(body, context=service)
    except ValidationError as error:
        found: Any = error.errors(include_url=False)[0]
    value, context = found["input"], found.get("ctx", {})
    if found["type"] == "float_type" and type(value) is int:  # one beyond float64
        found["type"] = "finite_number"
    rule = context.get("rule") or RULES.get(found["type"], found["msg"]).format(kind=kind_of(value))
    param = ""
    for part in (*found["loc"], *filter(None, [context.get("field")])):
        param += part if not param or part.startswith("[") else f".{part}"
    if not param:
        rule = rule.replace("must be an object", "the body must be a JSON object")
    raise bad_request(param or None, rule)


def _renamed(error: ValueError) -> ApiError:
    """Return the answer for a `ValueError` about sampling, in the names of the request."""
    text = str(error).removeprefix("Sampling: ")
    name, _, rule = text.partition(" ")
    if not name.replace("_", "").isalpha() or ("_" not in name and name not in ("temperature",)):
        return bad_request(None, text)
    return bad_request(NAMES.get(name, name), rule)
