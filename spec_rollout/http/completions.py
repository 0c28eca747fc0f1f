"""POST /v1/completions."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Self

from pydantic import PlainValidator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from aedit.spec_rollout.http.answers import AnswerPart, AnswerText, GrowingAnswer, completion_logprobs
from aedit.spec_rollout.http.fields import (
    BIGGEST,
    Info,
    TextBody,
    between,
    broken,
    check_range,
    check_text,
    check_tokens,
    only,
    short,
)
from aedit.spec_rollout.http.generation import Call, Generation, RouteAnswer, event, noise_keys, respond
from aedit.spec_rollout.http.service import HttpService, encode

DEFAULT_TOKENS = 16
"""New tokens of an answer without `max_tokens`, as at OpenAI."""


def _check_prompt(value: Any, info: Info) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts of a request: texts, and token ids."""
    most = info.context.limits.max_prompts
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not value:
        raise broken("must be a text, a list of texts, or token ids, and not empty")
    if len(value) > most:
        raise broken(f"must be at most {most} prompts, got {len(value)}")
    return tuple(check_text(each) if isinstance(each, str) else check_tokens(each) for each in value)


class CompletionBody(TextBody):
    """A request for completions."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_check_prompt)] = ()
    add_special_tokens: bool = True
    best_of: Any = None
    echo: bool = False
    logprobs: Annotated[int, between(0, "max_logprobs")] | None = None
    """Number of alternatives at each place; None: no log-probabilities."""
    max_tokens: int = DEFAULT_TOKENS
    suffix: Annotated[Any, only("")] = ""

    @model_validator(mode="after")
    def _check(self, info: Info) -> Self:
        most, count = info.context.limits.max_samples, len(self.prompt)
        if not count:
            raise broken("is missing: give a text or token ids", "prompt")
        if self.n * count > most:
            raise broken(f"times {count} prompts exceeds the {most} samples of a request", "n")
        if self.best_of not in (None, self.n):
            rule = f"must be {self.n}: this server has nothing else, got {short(self.best_of)}"
            raise broken(rule, "best_of")
        check_range(self.max_tokens, 0 if self.echo else 1, BIGGEST, "max_tokens")
        return self


async def completions(request: Request) -> Response:
    """Answer a request."""
    return await respond(request, CompletionBody, _call_of, _Completion)


async def _call_of(asked: CompletionBody, service: HttpService, request: Request) -> Call:
    prompts: list[tuple[int, ...]] = []
    for each in asked.prompt:
        if isinstance(each, str):
            each = await encode(service, each, special=asked.add_special_tokens)
        prompts.append(each)
    sampling = asked.sampling(
        service.eos, max_new_tokens=max(1, asked.max_tokens), top_logprobs=asked.logprobs or 0
    )
    request_id = asked.id_of(request)
    return Call(
        prompts=tuple(prompts),
        sampling=sampling if asked.max_tokens else None,
        n=asked.n,
        keys=noise_keys(prompts, asked.n, seed=asked.seed, request_id=request_id),
        prompt_logprobs=asked.logprobs if asked.echo else None,
        stream=asked.stream,
        request_id=request_id,
    )


class _Completion(RouteAnswer[CompletionBody]):
    """Answer of a request, whole or in parts."""

    def __init__(self, service: HttpService, asked: CompletionBody, generation: Generation) -> None:
        super().__init__(service, asked, generation)
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model,
        }
        call = self._call
        self._answers = [
            GrowingAnswer(
                service.codec,
                call.prompts[i // call.n],
                call.sampling,
                skip_special=asked.skip_special_tokens,
                offsets=asked.logprobs is not None,
            )
            for i in range(call.num_samples)
            if call.sampling is not None
        ]
        self._echo_lengths: dict[int, int] = {}

    def whole(self) -> dict[str, Any]:
        """Return the answer when all samples are over."""
        choices = []
        for i in range(len(self._call.prompts) * self._call.n):
            echo = self._echo(i) if self._asked.echo else None
            if not self._answers:
                choices.append({**(echo or {}), "index": i, "finish_reason": "length"})
                continue
            part = self._answers[i].read(self._generation.feed.samples[i])
            choices.append(self._joined(echo, self._choice(i, part)))
        return {**self._head, "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer in parts."""
        await self._generation.wait_scores()
        for i in range(len(self._call.prompts) * self._call.n) if self._asked.echo else ():
            reason = None if self._answers else "length"
            yield self._event([{**self._echo(i), "index": i, "finish_reason": reason}])
        if self._answers:
            async for _ in self._generation.news():
                for i, answer in enumerate(self._answers):
                    if not answer.is_over:
                        choice = self._choice(i, answer.read(self._generation.feed.samples[i]))
                        shown = choice["text"] or choice["finish_reason"] or choice.get("token_ids")
                        if shown or (choice["logprobs"] and choice["logprobs"]["tokens"]):
                            yield self._event([choice])
        if self._asked.include_usage:
            yield event({**self._head, "choices": [], "usage": self.usage()})

    def _event(self, choices: Sequence[Any]) -> bytes:
        more = {"usage": None} if self._asked.include_usage else {}
        return event({**self._head, "choices": choices, **more})

    def _choice(self, i: int, part: AnswerPart) -> dict[str, Any]:
        """Return the news of one sample as a choice."""
        self._num_new += len(part.tokens)
        choice: dict[str, Any] = {
            "index": i,
            "text": part.text,
            "logprobs": None,
            "finish_reason": part.finish_reason,
        }
        if self._asked.logprobs is not None:
            shift = self._echo_lengths.get(i, 0)
            offsets = [shift + offset for offset in part.offsets]
            choice["logprobs"] = completion_logprobs(
                self._service.codec, part.tokens, part.logprobs, part.tops, offsets
            )
        if self._asked.return_token_ids:
            choice["token_ids"] = list(part.tokens)
            prompt = self._call.prompts[i // self._call.n]
            choice["prompt_token_ids"] = list(prompt) if part.finish_reason else None
        return choice

    def _echo(self, i: int) -> dict[str, Any]:
        """Return the prompt of a sample as a choice."""
        codec, asked, number = self._service.codec, self._asked, i // self._call.n
        tokens, text = self._call.prompts[number], asked.prompt[number]
        if not isinstance(text, str):
            text = codec.decode(tokens, skip_special=asked.skip_special_tokens)
        self._echo_lengths[i] = len(text)
        choice: dict[str, Any] = {"text": text, "logprobs": None}
        if asked.logprobs is not None:
            place = AnswerText(codec, (), skip_special=asked.skip_special_tokens)
            for token in tokens:
                place.add([token])
            score = self._generation.scores[number]
            choice["logprobs"] = completion_logprobs(
                codec, tokens, score.logprobs, score.top_logprobs, place.offsets
            )
        return choice

    def _joined(self, echo: dict[str, Any] | None, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a choice whose text begins with the prompt."""
        if echo is None:
            return choice
        logprobs = choice["logprobs"]
        if logprobs is not None:
            logprobs = {name: echo["logprobs"][name] + values for name, values in logprobs.items()}
        return {**choice, "text": echo["text"] + choice["text"], "logprobs": logprobs}
