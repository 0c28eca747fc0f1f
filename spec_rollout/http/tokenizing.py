"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from aedit.spec_rollout.http.bodies import json_body
from aedit.spec_rollout.http.chat import read_chat_prompt
from aedit.spec_rollout.http.errors import bad_request
from aedit.spec_rollout.http.fields import Fields
from aedit.spec_rollout.http.prompts import encode, in_thread
from aedit.spec_rollout.http.service import Service


async def tokenize(request: Request) -> Response:
    """Answer with the tokens of a text or of a chat."""
    service: Service = request.app.state.service
    async with json_body(request, service) as body:
        fields = Fields(body)
        service.check_model(fields)
        if fields.any("messages") is not None:
            tokens, _ = await read_chat_prompt(fields, service)
        else:
            text = fields.text("prompt", None)
            if text is None:
                raise fields.bad("prompt", "is missing: give a text, or messages")
            special = fields.boolean("add_special_tokens", True)
            tokens = await encode(service, text, special=special)
        with_texts = fields.boolean("return_token_strs", False)
        fields.finish()
    shown = {"count": len(tokens), "max_model_len": service.max_tokens, "tokens": tokens}
    if with_texts:
        shown["token_strs"] = [service.codec.token_text(token) for token in tokens]
    return JSONResponse(shown)


async def detokenize(request: Request) -> Response:
    """Answer with the text of tokens."""
    service: Service = request.app.state.service
    async with json_body(request, service) as body:
        fields = Fields(body)
        service.check_model(fields)
        tokens = fields.tokens("tokens", fields.any("tokens"))
        fields.finish()
    most = service.engine.target.vocabulary
    if tokens and not 0 <= min(tokens) <= max(tokens) < most:
        raise bad_request("tokens", f"has a token outside the vocabulary of {most}")
    text = await in_thread(service.codec.decode, tokens, skip_special=False)
    return JSONResponse({"prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """Answer with special tokens and chat template."""
    service: Service = request.app.state.service
    return JSONResponse(service.codec.info())
