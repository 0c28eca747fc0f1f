"""POST /v1/chat/completions."""

import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from aedit.spec_rollout.service.http.answering import answered
from aedit.spec_rollout.service.http.answers import Answer, AnswerOptions, Part, usage
from aedit.spec_rollout.service.http.common_fields import read_key_fields, read_stream, read_text_hints
from aedit.spec_rollout.service.http.event_stream import event
from aedit.spec_rollout.service.http.fields import Fields
from aedit.spec_rollout.service.http.generation import Call, Generation
from aedit.spec_rollout.service.http.logprobs import chat_logprobs
from aedit.spec_rollout.service.http.noise_keys import noise_keys
from aedit.spec_rollout.service.http.prompts import in_thread
from aedit.spec_rollout.service.http.sampling_fields import BIGGEST, read_sampling
from aedit.spec_rollout.service.http.service import Service

MAX_MESSAGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for answers to a chat."""

    call: Call
    logprobs: bool
    return_token_ids: bool
    options: AnswerOptions
    include_usage: bool


async def chat_completions(request: Request) -> Response:
    """Answer a request."""
    return await answered(request, read_chat, _Chat)


async def read_chat(body: Any, service: Service, request: Request) -> ChatRequest:
    """Return the request of a body.

    Raises:
        ApiError: A parameter is not valid.
    """
    fields, limits = Fields(body), service.limits
    service.check_model(fields)
    tokens = await read_chat_prompt(fields, service)
    n = fields.integer("n", 1, 1, limits.max_samples)
    logprobs = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", 0, 0, limits.max_logprobs)
    if top and not logprobs:
        raise fields.bad("top_logprobs", "needs logprobs true")
    room = max(1, service.max_tokens - len(tokens))
    num_new = fields.integer("max_tokens", None, 1, BIGGEST)
    num_new = fields.integer("max_completion_tokens", num_new, 1, BIGGEST)
    sampling = read_sampling(
        fields, limits, service.eos, max_new_tokens=room if num_new is None else num_new, top_logprobs=top
    )
    seed, request_id = read_key_fields(fields, request)
    stream, include_usage = read_stream(fields)
    options = AnswerOptions(skip_special=fields.boolean("skip_special_tokens", True))
    return_token_ids = fields.boolean("return_token_ids", False)
    read_text_hints(fields)
    fields.allow("modalities", ["text"])
    fields.allow("parallel_tool_calls", True, False)
    fields.finish()
    keys = noise_keys([tokens], n, seed=seed, request_id=request_id)
    call = Call(prompts=(tokens,), sampling=sampling, n=n, keys=keys, stream=stream, request_id=request_id)
    return ChatRequest(
        call=call, logprobs=logprobs, return_token_ids=return_token_ids, options=options,
        include_usage=include_usage,
    )  # fmt: skip


async def read_chat_prompt(fields: Fields, service: Service) -> tuple[int, ...]:
    """Return the tokens of `messages` and `tools` in the model's chat template.

    Raises:
        ApiError: A parameter is not valid, or the template does not fit.
    """
    messages = _messages(fields)
    options: dict[str, Any] = {
        "add_generation_prompt": fields.boolean("add_generation_prompt", True),
        "continue_final_message": fields.boolean("continue_final_message", False),
    }
    if options["add_generation_prompt"] and options["continue_final_message"]:
        raise fields.bad("continue_final_message", "needs add_generation_prompt false")
    tools, more = fields.any("tools"), fields.any("chat_template_kwargs")
    if tools:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise fields.bad("tools", "must be a list of objects")
        if "tools" not in (service.codec.chat_template or ""):
            raise fields.bad("tools", "are not part of this model's chat template: it would not see them")
        options["tools"] = tools
    fields.allow("tool_choice", *(("auto", "none") if tools else ("none", "auto")))
    if more is not None:
        if not isinstance(more, dict) or set(more) & _TEMPLATE_OPTIONS:
            names = ", ".join(sorted(_TEMPLATE_OPTIONS))
            raise fields.bad("chat_template_kwargs", f"must be an object without {names}")
        options.update(more)
    tokens: tuple[int, ...] = await in_thread(service.codec.chat, messages, **options)
    return tokens


_TEMPLATE_OPTIONS = {
    *("chat_template", "tools", "documents", "tokenize", "return_dict", "return_tensors", "padding"),
    *("truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask", "conversation"),
    *("add_generation_prompt", "continue_final_message"),
}
"""Arguments of `apply_chat_template` that are not variables of the template."""


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """Return the messages; the content of each is a text, or a list of texts, which are joined."""
    found = fields.any("messages")
    if not isinstance(found, list) or not found:
        raise fields.bad("messages", "must be a list of messages, and not empty")
    if len(found) > MAX_MESSAGES:
        raise fields.bad("messages", f"must be at most {MAX_MESSAGES}, got {len(found)}")
    messages = []
    for i, message in enumerate(found):
        if not isinstance(message, dict):
            raise fields.bad(f"messages[{i}]", "must be an object")
        role, content = message.get("role"), message.get("content")
        fields.check_text(f"messages[{i}].role", role)
        if isinstance(content, list):
            content = "".join(_text_part(fields, f"messages[{i}].content", part) for part in content)
        if content is not None:
            fields.check_text(f"messages[{i}].content", content)
        elif not message.get("tool_calls"):
            raise fields.bad(f"messages[{i}].content", "is missing")
        messages.append({**message, "content": content})
    return messages


def _text_part(fields: Fields, name: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise fields.bad(name, 'must have parts of type "text" only: this server has text models')
    return fields.check_text(name, part.get("text"))


class _Chat:
    """Answer of a request, whole or in parts."""

    def __init__(self, service: Service, asked: ChatRequest, generation: Generation) -> None:
        self._service, self._asked, self._generation = service, asked, generation
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if asked.call.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.model,
        }
        call = asked.call
        assert call.sampling is not None
        self._answers = [
            Answer(service.codec, call.prompts[0], call.sampling, asked.options) for _ in range(call.n)
        ]
        self._num_new = 0

    def whole(self) -> dict[str, Any]:
        """Return the answer when all samples are over."""
        choices = []
        for i, answer in enumerate(self._answers):
            part = answer.read(self._generation.feed.samples[i])
            message = {"role": "assistant", "content": part.text, "refusal": None}
            choices.append({**self._choice(i, part), "message": message})
        return {**self._head, "choices": choices, "usage": self._usage(), **self._prompt_ids()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer in parts."""
        first = {"role": "assistant", "content": ""}
        for i in range(len(self._answers)):
            choice = {"index": i, "delta": first, "logprobs": None, "finish_reason": None}
            yield self._event(choice, **self._prompt_ids())
        async for _ in self._generation.news():
            for i, answer in enumerate(self._answers):
                if answer.is_over:
                    continue
                part = answer.read(self._generation.feed.samples[i])
                shows_tokens = part.tokens and (self._asked.logprobs or self._asked.return_token_ids)
                if part.text or part.finish_reason or shows_tokens:
                    delta = {"content": part.text} if part.text else {}
                    yield self._event({**self._choice(i, part), "delta": delta})
        if self._asked.include_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        if self._asked.include_usage:
            more["usage"] = None
        return event({**self._head, "choices": [choice], **more})

    def _choice(self, i: int, part: Part) -> dict[str, Any]:
        """Return the news of one sample as a choice without text."""
        self._num_new += len(part.tokens)
        choice: dict[str, Any] = {"index": i, "logprobs": None, "finish_reason": part.finish_reason}
        if self._asked.logprobs:
            choice["logprobs"] = chat_logprobs(self._service.codec, part.tokens, part.logprobs, part.tops)
        if self._asked.return_token_ids:
            choice["token_ids"] = list(part.tokens)
        return choice

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._asked.call.prompts[0]} if self._asked.return_token_ids else {}

    def _usage(self) -> dict[str, Any]:
        return usage(len(self._asked.call.prompts[0]), self._num_new)
