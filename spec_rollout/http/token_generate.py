"""POST /inference/v1/generate: tokens in, tokens out, with the policy version of each token."""

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from aedit.spec_rollout.engine import Scoring
from aedit.spec_rollout.http.answers import finite
from aedit.spec_rollout.http.completions import DEFAULT_TOKENS
from aedit.spec_rollout.http.fields import (
    BIGGEST,
    Ignored,
    RouteBody,
    SamplingBody,
    Tokens,
    between,
    broken,
)
from aedit.spec_rollout.http.generation import Call, Generation, RouteAnswer, event, noise_keys, respond
from aedit.spec_rollout.http.service import HttpService
from aedit.spec_rollout.sampling import Rollout


class TokenSampling(SamplingBody):
    """The object `sampling_params`. The last fields are about text, of which the answer has none."""

    logprobs: Annotated[int, between(0, "max_logprobs")] | None = None
    """Number of alternatives of each token; None: no log-probabilities."""
    prompt_logprobs: Annotated[int, between(0, "max_logprobs")] | None = None
    max_tokens: Annotated[int, between(1, BIGGEST)] = DEFAULT_TOKENS
    skip_special_tokens: Ignored = None
    spaces_between_special_tokens: Ignored = None
    include_stop_str_in_output: Ignored = None
    detokenize: Ignored = None
    output_kind: Ignored = None


class TokenBody(RouteBody):
    """A request for the tokens that follow a prompt of tokens."""

    token_ids: Tokens = Field(None, validate_default=True)
    sampling_params: TokenSampling = TokenSampling.model_construct()
    cache_salt: Ignored = None
    return_token_ids: Ignored = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream and self.sampling_params.prompt_logprobs is not None:
            rule = "needs stream false: events have new tokens only"
            raise broken(rule, "sampling_params.prompt_logprobs")
        return self


async def generate_tokens(request: Request) -> Response:
    """Answer a request."""
    return await respond(request, TokenBody, _call_of, _TokenAnswer)


async def _call_of(asked: TokenBody, service: HttpService, request: Request) -> Call:
    settings, tokens, request_id = asked.sampling_params, asked.token_ids, asked.id_of(request)
    return Call(
        prompts=(tokens,),
        sampling=settings.sampling(
            service.eos, max_new_tokens=settings.max_tokens, top_logprobs=settings.logprobs or 0
        ),
        n=settings.n,
        keys=noise_keys([tokens], settings.n, seed=settings.seed, request_id=request_id),
        prompt_logprobs=settings.prompt_logprobs,
        stream=asked.stream,
        request_id=request_id,
    )


class _TokenAnswer(RouteAnswer[TokenBody]):
    """Answer of a request, whole or in parts."""

    def __init__(self, service: HttpService, asked: TokenBody, generation: Generation) -> None:
        super().__init__(service, asked, generation)
        self._num_shown = [0] * self._call.num_samples
        self._head = {"request_id": self._call.request_id}

    def whole(self) -> dict[str, Any]:
        """Return the answer when all samples are over."""
        choices = []
        for i in range(self._call.num_samples):
            rollout = self._generation.rollout(i)
            choices.append(self._choice(i, rollout, len(rollout.tokens), rollout.finish_reason))
        scores = self._generation.scores
        prompt_logprobs = _prompt_logprobs(scores[0]) if scores else None
        return {**self._head, "choices": choices, "prompt_logprobs": prompt_logprobs, "usage": self.usage()}

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
            yield event({**self._head, "choices": [], "usage": self.usage()})

    def _choice(self, i: int, rollout: Rollout, end: int, finish_reason: str | None) -> dict[str, Any]:
        """Return the tokens of a sample that were not shown yet, as a choice."""
        start, self._num_shown[i] = self._num_shown[i], end
        self._num_new += end - start
        shown = None
        if self._asked.sampling_params.logprobs is not None:
            shown = {"content": _logprobs(rollout, start, end)}
        return {
            "index": i,
            "finish_reason": finish_reason,
            "token_ids": rollout.tokens[start:end],
            "logprobs": shown,
            "weight_versions": weight_versions(rollout.versions[start:end], start),
        }


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
