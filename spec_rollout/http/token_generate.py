"""POST /inference/v1/generate: tokens in, tokens out, with the policy version of each token."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from aedit.spec_rollout.engine import Scoring
from aedit.spec_rollout.http.answers import finite, usage
from aedit.spec_rollout.http.completions import DEFAULT_TOKENS
from aedit.spec_rollout.http.fields import (
    BIGGEST,
    Fields,
    read_request_id,
    read_sampling,
    read_seed,
    read_stream,
)
from aedit.spec_rollout.http.generation import Call, Generation, answered, event, noise_keys
from aedit.spec_rollout.http.service import HttpService
from aedit.spec_rollout.sampling import Rollout

IGNORED_SAMPLING_FIELDS = (
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("detokenize", "output_kind"),
)
"""Fields of `sampling_params` about text, of which the answer has none."""
IGNORED_FIELDS = ("cache_salt", "return_token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """A request for the tokens that follow a prompt of tokens."""

    call: Call
    logprobs: int | None
    """Number of alternatives of each token; None: no log-probabilities."""
    include_usage: bool


async def generate(request: Request) -> Response:
    """Answer a request."""
    return await answered(request, read_generate, _TokenAnswer)


async def read_generate(body: Any, service: HttpService, request: Request) -> TokenRequest:
    """Return the request of a body.

    Raises:
        ApiError: A parameter is not valid.
    """
    fields, limits = Fields(body), service.limits
    service.check_model(fields)
    found = fields.any("token_ids")
    tokens = fields.tokens("token_ids", found)
    stream, include_usage = read_stream(fields)
    given = fields.any("sampling_params")
    settings = Fields({} if given is None else given, "sampling_params")
    n = settings.integer("n", 1, 1, limits.max_samples)
    logprobs = settings.integer("logprobs", None, 0, limits.max_logprobs)
    prompt_logprobs = settings.integer("prompt_logprobs", None, 0, limits.max_logprobs)
    if stream and prompt_logprobs is not None:
        raise settings.bad("prompt_logprobs", "needs stream false: events have new tokens only")
    num_new = settings.integer("max_tokens", DEFAULT_TOKENS, 1, BIGGEST)
    sampling = read_sampling(
        settings, limits, service.eos, max_new_tokens=num_new, top_logprobs=logprobs or 0
    )
    seed, request_id = read_seed(settings), read_request_id(fields, request)
    settings.ignore(*IGNORED_SAMPLING_FIELDS)
    settings.finish()
    fields.allow("priority", 0)
    fields.ignore(*IGNORED_FIELDS)
    fields.finish()
    call = Call(
        prompts=(tokens,),
        sampling=sampling,
        n=n,
        keys=noise_keys([tokens], n, seed=seed, request_id=request_id),
        prompt_logprobs=prompt_logprobs,
        stream=stream,
        request_id=request_id,
    )
    return TokenRequest(call=call, logprobs=logprobs, include_usage=include_usage)


class _TokenAnswer:
    """Answer of a request, whole or in parts."""

    def __init__(self, service: HttpService, asked: TokenRequest, generation: Generation) -> None:
        self._asked, self._generation = asked, generation
        self._num_shown = [0] * asked.call.num_samples
        self._head = {"request_id": asked.call.request_id}

    def whole(self) -> dict[str, Any]:
        """Return the answer when all samples are over."""
        choices = []
        for i in range(self._asked.call.num_samples):
            rollout = self._generation.rollout(i)
            choices.append(self._choice(i, rollout, len(rollout.tokens), rollout.finish_reason))
        scores = self._generation.scores
        prompt_logprobs = _prompt_logprobs(scores[0]) if scores else None
        return {**self._head, "choices": choices, "prompt_logprobs": prompt_logprobs, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer in parts, as vLLM does: each event has the new tokens of one sample."""
        open_samples = dict(enumerate(self._generation.feed.samples))
        async for _ in self._generation.news():
            for i, sample in list(open_samples.items()):
                ends = sample.is_over  # before its state, as the engine writes in this order
                rollout, count = sample.state
                if sample.error is not None or rollout is None or not (ends or count > self._num_shown[i]):
                    continue
                reason = (rollout.finish_reason or "abort") if ends else None
                yield event(
                    {**self._head, "choices": [self._choice(i, rollout, count, reason)], "usage": None}
                )
                if ends:
                    del open_samples[i]
        if self._asked.include_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})

    def _choice(self, i: int, rollout: Rollout, end: int, finish_reason: str | None) -> dict[str, Any]:
        """Return the tokens of a sample that were not shown yet, as a choice."""
        start, self._num_shown[i] = self._num_shown[i], end
        shown = None
        if self._asked.logprobs is not None:
            shown = {"content": _logprobs(rollout, start, end)}
        return {
            "index": i,
            "finish_reason": finish_reason,
            "token_ids": rollout.tokens[start:end],
            "logprobs": shown,
            "weight_versions": weight_versions(rollout.versions[start:end], start),
        }

    def _usage(self) -> dict[str, Any]:
        return usage(len(self._asked.call.prompts[0]), sum(self._num_shown))


def weight_versions(versions: Sequence[int], start: int = 0) -> list[dict[str, Any]]:
    """Return half-open spans of tokens that one policy version has drawn; `start`: place of the first one."""
    spans: list[dict[str, Any]] = []
    for place, version in enumerate(versions, start):
        if not spans or spans[-1]["version"] != str(version):
            spans.append({"version": str(version), "start": place, "end": place})
        spans[-1]["end"] = place + 1
    return spans


def _logprobs(rollout: Rollout, start: int, end: int) -> list[dict[str, Any]]:
    """Return the log-probabilities of tokens start to end, with their alternatives."""
    content = []
    for place in range(start, end):
        top = rollout.top_logprobs[place] if rollout.top_logprobs else ()
        entry = _entry(rollout.tokens[place], rollout.logprobs[place])
        content.append({**entry, "top_logprobs": [_entry(*pair) for pair in top]})
    return content


def _entry(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "token_id": token, "logprob": finite(logprob)}


def _prompt_logprobs(scores: Scoring) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of the prompt by token id, with its alternatives; null for the first."""
    shown: list[dict[str, Any] | None] = []
    for token, logprob, top in zip(scores.tokens, scores.logprobs, scores.top_logprobs, strict=True):
        if logprob is None:
            shown.append(None)
        else:
            entries = {**dict(top), token: logprob}
            shown.append({str(other): {"logprob": finite(value)} for other, value in entries.items()})
    return shown
