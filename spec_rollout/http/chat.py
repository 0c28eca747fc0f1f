"""POST /v1/chat/completions."""

import secrets
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from aedit.spec_rollout.http.answers import AnswerPart, GrowingAnswer, chat_logprobs
from aedit.spec_rollout.http.errors import bad_request
from aedit.spec_rollout.http.fields import BIGGEST, Body, TextBody, between, broken, check_text, only
from aedit.spec_rollout.http.generation import Call, Generation, RouteAnswer, event, noise_keys, respond
from aedit.spec_rollout.http.service import HttpService, in_thread

MAX_MESSAGES = 4096
CALL_MARKS = (
    ("<tool_call>", "</tool_call>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    ("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"),
    ("<invoke", "</invoke>"),
)
"""Beginning and end of one call of a tool in the text of Qwen, GLM and Granite; Kimi; DeepSeek; MiniMax."""


def _check_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages; the content of each is a text, or a list of texts, which are joined."""
    if not isinstance(value, list) or not value:
        raise broken("must be a list of messages, and not empty")
    if len(value) > MAX_MESSAGES:
        raise broken(f"must be at most {MAX_MESSAGES}, got {len(value)}")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise broken("must be an object", f"[{i}]")
        role, content = message.get("role"), message.get("content")
        check_text(role, f"[{i}].role")
        if isinstance(content, list):
            content = "".join(_text_part(f"[{i}].content", part) for part in content)
        if content is not None:
            check_text(content, f"[{i}].content")
        elif not message.get("tool_calls"):
            raise broken("is missing", f"[{i}].content")
        messages.append({**message, "content": content})
    return messages


def _text_part(name: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise broken('must have parts of type "text" only: this server has text models', name)
    return check_text(part.get("text"), name)


def _check_tools(value: Any) -> Any:
    if value and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise broken("must be a list of objects")
    return value


def _check_variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise broken("must be an object with variables of the chat template")
    return value


class ChatPrompt(Body):
    """Messages and tools for the model's chat template."""

    messages: Annotated[Any, PlainValidator(_check_messages)] = Field(None, validate_default=True)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[Any, PlainValidator(_check_tools)] = None
    tool_choice: Annotated[Any, only("auto", "none")] = None
    chat_template_kwargs: Annotated[dict[str, Any], PlainValidator(_check_variables)] = Field({})

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise broken("needs add_generation_prompt false", "continue_final_message")
        return self

    @property
    def has_tools(self) -> bool:
        """Return whether the template gets tools: not with `tool_choice` "none"."""
        return bool(self.tools) and self.tool_choice != "none"

    async def tokens(self, service: HttpService) -> tuple[int, ...]:
        """Return the tokens of messages and tools in the model's chat template.

        Raises:
            ApiError: The template does not fit.
        """
        codec, variables = service.codec, self.chat_template_kwargs
        settings: dict[str, Any] = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        if self.has_tools:
            if "tools" not in (codec.chat_template or ""):
                raise bad_request(
                    "tools", "are not part of this model's chat template: it would not see them"
                )
            settings["tools"] = self.tools
        if taken := sorted(codec.chat_arguments & variables.keys()):
            raise bad_request(
                f"chat_template_kwargs.{taken[0]}",
                "is no variable of the chat template for a client to set: leave it out",
            )
        tokens: tuple[int, ...] = await in_thread(codec.chat, self.messages, settings, variables)
        return tokens


class ChatBody(ChatPrompt, TextBody):
    """A request for answers to a chat."""

    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Annotated[int, between(0, "max_logprobs")] = 0
    max_tokens: Annotated[int, between(1, BIGGEST)] | None = None
    max_completion_tokens: Annotated[int, between(1, BIGGEST)] | None = None
    modalities: Annotated[Any, only(["text"])] = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if not self.parallel_tool_calls and not self.tools:
            raise broken("needs tools", "parallel_tool_calls")
        if self.top_logprobs and not self.logprobs:
            raise broken("needs logprobs true", "top_logprobs")
        num_new, old_num_new = self.max_completion_tokens, self.max_tokens
        if num_new is not None and old_num_new not in (None, num_new):
            raise broken(f"must be max_completion_tokens {num_new}, got {old_num_new}", "max_tokens")
        return self


async def chat_completions(request: Request) -> Response:
    """Answer a request."""
    return await respond(request, ChatBody, _call_of, _Chat)


async def _call_of(asked: ChatBody, service: HttpService, request: Request) -> Call:
    tokens = await asked.tokens(service)
    one_call = _one_call(service) if asked.has_tools and not asked.parallel_tool_calls else ()
    num_new = asked.max_completion_tokens or asked.max_tokens or max(1, service.max_tokens - len(tokens))
    sampling = asked.sampling(
        service.eos,
        max_new_tokens=num_new,
        top_logprobs=asked.top_logprobs,
        stops=tuple(end for end in one_call if end not in asked.stop),
    )
    request_id = asked.id_of(request)
    keys = noise_keys([tokens], asked.n, seed=asked.seed, request_id=request_id)
    return Call(
        prompts=(tokens,),
        sampling=sampling,
        n=asked.n,
        keys=keys,
        stream=asked.stream,
        request_id=request_id,
    )


def _one_call(service: HttpService) -> tuple[str, ...]:
    """Return the text after which an answer ends because it has its one call of a tool.

    Raises:
        ApiError: It is not known.
    """
    template = service.codec.chat_template or ""
    for begin, end in CALL_MARKS:
        if begin in template and end in template:
            return (end,)
    raise bad_request(
        "parallel_tool_calls", "must be true: where a call ends in this model's answers is not known here"
    )


class _Chat(RouteAnswer[ChatBody]):
    """Answer of a request, whole or in parts."""

    def __init__(self, service: HttpService, asked: ChatBody, generation: Generation) -> None:
        super().__init__(service, asked, generation)
        call = self._call
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if call.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.model,
        }
        assert call.sampling is not None
        kept = call.sampling.stop_strings[len(asked.stop) :]
        self._answers = [
            GrowingAnswer(
                service.codec,
                call.prompts[0],
                call.sampling,
                skip_special=asked.skip_special_tokens,
                kept_stops=kept,
            )
            for _ in range(call.n)
        ]

    def whole(self) -> dict[str, Any]:
        """Return the answer when all samples are over."""
        choices = []
        for i, answer in enumerate(self._answers):
            part = answer.read(self._generation.feed.samples[i])
            message = {"role": "assistant", "content": part.text, "refusal": None}
            choices.append({**self._choice(i, part), "message": message})
        return {**self._head, "choices": choices, "usage": self.usage(), **self._prompt_ids()}

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
            yield event({**self._head, "choices": [], "usage": self.usage()})

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
        return {"prompt_token_ids": self._call.prompts[0]} if self._asked.return_token_ids else {}
