"""The parameter `prompt`: a text, token ids, or lists of these."""

import asyncio
from typing import Any

from aedit.spec_rollout.http.fields import Fields
from aedit.spec_rollout.http.service import Service

LONG_CHARS = 4096
"""Texts above this size are encoded in another thread, so that the event loop goes on."""


async def read_prompts(
    fields: Fields, service: Service
) -> tuple[tuple[tuple[int, ...], ...], tuple[str | None, ...]]:
    """Return the prompts of a request as token ids, and those that came as text as text.

    Raises:
        ApiError: The parameter is missing or not valid.
    """
    value, most = fields.any("prompt"), service.limits.max_prompts
    special = fields.boolean("add_special_tokens", True)
    if value is None:
        raise fields.bad("prompt", "is missing: give a text or token ids")
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not value:
        raise fields.bad("prompt", "must be a text, a list of texts, or token ids, and not empty")
    if len(value) > most:
        raise fields.bad("prompt", f"must be at most {most} prompts, got {len(value)}")
    prompts: list[tuple[int, ...]] = []
    texts: list[str | None] = []
    for each in value:
        text = fields.check_text("prompt", each) if isinstance(each, str) else None
        texts.append(text)
        if text is None:
            prompts.append(fields.tokens("prompt", each))
        else:
            prompts.append(await encode(service, text, special=special))
    return tuple(prompts), tuple(texts)


async def encode(service: Service, text: str, *, special: bool) -> tuple[int, ...]:
    """Return the tokens of a text, without keeping the event loop for long."""
    if len(text) <= LONG_CHARS:
        return service.codec.encode(text, special=special)
    tokens: tuple[int, ...] = await in_thread(service.codec.encode, text, special=special)
    return tokens


async def in_thread(function: Any, *args: Any, **options: Any) -> Any:
    """Return the result of a function that takes long."""
    return await asyncio.to_thread(function, *args, **options)
