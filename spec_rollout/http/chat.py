"""POST /v1/chat/completions."""

import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from aedit.spec_rollout.http.answers import AnswerOptions, AnswerPart, GrowingAnswer, chat_logprobs, usage
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
from aedit.spec_rollout.http.service import HttpService, in_thread

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


async def read_chat(body: Any, service: HttpService, request: Request) -> ChatRequest:
    """Return the request of a body.

    Raises:
        ApiError: A parameter is not valid.
    """
    fields, limits = Fields(body), service.limits
    service.check_model(fields)
    tokens, has_tools = await read_chat_prompt(fields, service)
    one_call = _one_call(fields, service, has_tools)
    n = fields.integer("n", 1, 1, limits.max_samples)
    logprobs = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", 0, 0, limits.max_logprobs)
    if top and not logprobs:
        raise fields.bad("top_logprobs", "needs logprobs true")
    room = max(1, service.max_tokens - len(tokens))
    old_num_new = fields.integer("max_tokens", None, 1, BIGGEST)
    num_new = fields.integer("max_completion_tokens", old_num_new, 1, BIGGEST)
    if old_num_new not in (None, num_new):
        raise fields.bad("max_tokens", f"must be max_completion_tokens {num_new}, got {old_num_new}")
    sampling = read_sampling(
        fields, limits, service.eos, max_new_tokens=room if num_new is None else num_new, top_logprobs=top
    )
    kept_stops = tuple(end for end in one_call if end not in sampling.stop_strings)
    sampling = replace(sampling, stop_strings=(*sampling.stop_strings, *kept_stops))
    seed, request_id = read_seed(fields), read_request_id(fields, request)
    stream, include_usage = read_stream(fields)
    options = AnswerOptions(skip_special=fields.boolean("skip_special_tokens", True), kept_stops=kept_stops)
    return_token_ids = fields.boolean("return_token_ids", False)
    read_text_hints(fields)
    fields.allow("modalities", ["text"])
    fields.finish()
    keys = noise_keys([tokens], n, seed=seed, request_id=request_id)
    call = Call(prompts=(tokens,), sampling=sampling, n=n, keys=keys, stream=stream, request_id=request_id)
    return ChatRequest(
        call=call, logprobs=logprobs, return_token_ids=return_token_ids, options=options,
        include_usage=include_usage,
    )  # fmt: skip


async def read_chat_prompt(fields: Fields, service: HttpService) -> tuple[tuple[int, ...], bool]:
    """Return the tokens of `messages` and `tools` in the model's chat template, and whether tools are there.

    With `tool_choice` "none" the template does not get the tools.

    Raises:
        ApiError: A parameter is not valid, or the template does not fit.
    """
    messages, codec = _messages(fields), service.codec
    settings: dict[str, Any] = {
        "add_generation_prompt": fields.boolean("add_generation_prompt", True),
        "continue_final_message": fields.boolean("continue_final_message", False),
    }
    if settings["add_generation_prompt"] and settings["continue_final_message"]:
        raise fields.bad("continue_final_message", "needs add_generation_prompt false")
    tools, variables = fields.any("tools"), fields.any("chat_template_kwargs")
    fields.allow("tool_choice", "auto", "none")
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise fields.bad("tools", "must be a list of objects")
    has_tools = bool(tools) and fields.any("tool_choice") != "none"
    if has_tools:
        if "tools" not in (codec.chat_template or ""):
            raise fields.bad("tools", "are not part of this model's chat template: it would not see them")
        settings["tools"] = tools
    variables = {} if variables is None else variables
    if not isinstance(variables, dict):
        raise fields.bad("chat_template_kwargs", "must be an object with variables of the chat template")
    if taken := sorted(codec.chat_arguments & variables.keys()):
        raise fields.bad(
            f"chat_template_kwargs.{taken[0]}",
            "is no variable of the chat template for a client to set: leave it out",
        )
    tokens: tuple[int, ...] = await in_thread(codec.chat, messages, settings, variables)
    return tokens, has_tools


def _one_call(fields: Fields, service: HttpService, has_tools: bool) -> tuple[str, ...]:
    """Return the text after which an answer ends because it has its one call of a tool; empty: none is set.

    Raises:
        ApiError: `parallel_tool_calls` is false, and cannot be observed.
    """
    if fields.boolean("parallel_tool_calls", True):
        return ()
    if not fields.any("tools"):
        raise fields.bad("parallel_tool_calls", "needs tools")
    if not has_tools:
        return ()
    template = service.codec.chat_template or ""
    for begin, end in CALL_MARKS:
        if begin in template and end in template:
            return (end,)
    raise fields.bad(
        "parallel_tool_calls", "must be true: where a call ends in this model's answers is not known here"
    )


CALL_MARKS = (
    ("<tool_call>", "</tool_call>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    ("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"),
    ("<invoke", "</invoke>"),
)
"""Beginning and end of one call of a tool in the text of Qwen, GLM and Granite; Kimi; DeepSeek; MiniMax."""


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

    def __init__(self, service: HttpService, asked: ChatRequest, generation: Generation) -> None:
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
            GrowingAnswer(service.codec, call.prompts[0], call.sampling, asked.options) for _ in range(call.n)
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

    def _choice(self, i: int, part: AnswerPart) -> dict[str, Any]:
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
