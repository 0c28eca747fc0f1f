"""POST /v1/completions."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from aedit.spec_rollout.http.answers import (
    AnswerOptions,
    AnswerPart,
    AnswerText,
    GrowingAnswer,
    completion_logprobs,
    usage,
)
from aedit.spec_rollout.http.fields import (
    BIGGEST,
    Fields,
    read_request_id,
    read_sampling,
    read_seed,
    read_stream,
    read_text_hints,
)
from aedit.spec_rollout.http.generation import Call, Generation, answered, event, noise_keys
from aedit.spec_rollout.http.service import HttpService, read_prompts

DEFAULT_TOKENS = 16
"""New tokens of an answer without `max_tokens`, as at OpenAI."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A request for completions."""

    call: Call
    texts: tuple[str | None, ...]
    """Prompts that came as text."""
    echo: bool
    logprobs: int | None
    """Number of alternatives at each place; None: no log-probabilities."""
    return_token_ids: bool
    options: AnswerOptions
    include_usage: bool


async def completions(request: Request) -> Response:
    """Answer a request."""
    return await answered(request, read_completion, _Completion)


async def read_completion(body: Any, service: HttpService, request: Request) -> CompletionRequest:
    """Return the request of a body.

    Raises:
        ApiError: A parameter is not valid.
    """
    fields, limits = Fields(body), service.limits
    service.check_model(fields)
    prompts, texts = await read_prompts(fields, service)
    n = fields.integer("n", 1, 1, limits.max_samples)
    if n * len(prompts) > limits.max_samples:
        raise fields.bad(
            "n", f"times {len(prompts)} prompts exceeds the {limits.max_samples} samples of a request"
        )
    fields.allow("best_of", n)
    echo, logprobs = fields.boolean("echo", False), fields.integer("logprobs", None, 0, limits.max_logprobs)
    num_new = fields.integer("max_tokens", DEFAULT_TOKENS, 0 if echo else 1, BIGGEST)
    sampling = read_sampling(
        fields, limits, service.eos, max_new_tokens=max(1, num_new), top_logprobs=logprobs or 0
    )
    seed, request_id = read_seed(fields), read_request_id(fields, request)
    stream, include_usage = read_stream(fields)
    options = AnswerOptions(
        skip_special=fields.boolean("skip_special_tokens", True), offsets=logprobs is not None
    )
    return_token_ids = fields.boolean("return_token_ids", False)
    fields.allow("suffix", "")
    read_text_hints(fields)
    fields.finish()
    call = Call(
        prompts=prompts,
        sampling=sampling if num_new else None,
        n=n,
        keys=noise_keys(prompts, n, seed=seed, request_id=request_id),
        prompt_logprobs=logprobs if echo else None,
        stream=stream,
        request_id=request_id,
    )
    return CompletionRequest(
        call=call, texts=texts, echo=echo, logprobs=logprobs, return_token_ids=return_token_ids,
        options=options, include_usage=include_usage,
    )  # fmt: skip


class _Completion:
    """Answer of a request, whole or in parts."""

    def __init__(self, service: HttpService, asked: CompletionRequest, generation: Generation) -> None:
        self._service, self._asked, self._generation = service, asked, generation
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model,
        }
        call = asked.call
        self._answers = [
            GrowingAnswer(service.codec, call.prompts[i // call.n], call.sampling, asked.options)
            for i in range(call.num_samples)
            if call.sampling is not None
        ]
        self._num_new = 0
        self._echo_lengths: dict[int, int] = {}

    def whole(self) -> dict[str, Any]:
        """Return the answer when all samples are over."""
        choices = []
        for i in range(len(self._asked.call.prompts) * self._asked.call.n):
            echo = self._echo(i) if self._asked.echo else None
            if not self._answers:
                choices.append({**(echo or {}), "index": i, "finish_reason": "length"})
                continue
            part = self._answers[i].read(self._generation.feed.samples[i])
            choices.append(self._joined(echo, self._choice(i, part)))
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer in parts."""
        await self._generation.wait_scores()
        for i in range(len(self._asked.call.prompts) * self._asked.call.n) if self._asked.echo else ():
            reason = None if self._answers else "length"
            yield self._event([{**self._echo(i), "index": i, "finish_reason": reason}])
        if self._answers:
            async for _ in self._generation.news():
                for i, answer in enumerate(self._answers):
                    if not answer.is_over:
                        choice = self._choice(i, answer.read(self._generation.feed.samples[i]))
                        if choice["text"] or choice["finish_reason"] or self._shows_tokens(choice):
                            yield self._event([choice])
        if self._asked.include_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})

    def _event(self, choices: Sequence[Any]) -> bytes:
        more = {"usage": None} if self._asked.include_usage else {}
        return event({**self._head, "choices": choices, **more})

    def _shows_tokens(self, choice: dict[str, Any]) -> bool:
        return bool(choice.get("token_ids")) or bool(choice["logprobs"] and choice["logprobs"]["tokens"])

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
            prompt = self._asked.call.prompts[i // self._asked.call.n]
            choice["prompt_token_ids"] = list(prompt) if part.finish_reason else None
        return choice

    def _echo(self, i: int) -> dict[str, Any]:
        """Return the prompt of a sample as a choice."""
        codec, asked, number = self._service.codec, self._asked, i // self._asked.call.n
        tokens, text = asked.call.prompts[number], asked.texts[number]
        if text is None:
            text = codec.decode(tokens, skip_special=asked.options.skip_special)
        self._echo_lengths[i] = len(text)
        choice: dict[str, Any] = {"text": text, "logprobs": None}
        if asked.logprobs is not None:
            place = AnswerText(codec, (), skip_special=asked.options.skip_special)
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

    def _usage(self) -> dict[str, Any]:
        return usage(sum(map(len, self._asked.call.prompts)), self._num_new)
