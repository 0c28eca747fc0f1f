"""Tests of real clients against the HTTP server: openai, curl, renderers; each beside transformers."""

import asyncio
import copy
import functools
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from kit.hosts import LIMIT_S
from kit.serving import ask, byte_tokenizer, served, text_policy
from tokenizers.processors import TemplateProcessing

from aedit.spec_rollout.http.chat import ChatBody
from aedit.spec_rollout.http.completions import CompletionBody
from aedit.spec_rollout.http.token_generate import TokenBody

KEY = "sk-test"


@pytest.fixture(scope="module")
def openai():
    """Return the client library: imported by the one process that needs it, as that takes a second."""
    import openai
    import openai.types.chat.completion_create_params
    import openai.types.completion_create_params

    return openai


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return text_policy(tokenizer)


@pytest.fixture(scope="module")
def server(model, tokenizer):
    with served(model, tokenizer, keys=(KEY,)) as (service, address):
        yield service, address


@pytest.fixture(scope="module")
def client(openai, server):
    return openai.OpenAI(base_url=f"http://{server[1]}/v1", api_key=KEY, timeout=LIMIT_S)


@torch.no_grad()
def by_transformers(model, tokens, count):
    """Return greedy tokens and their log-probabilities."""
    ids = torch.tensor([tokens])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    logp = model(input_ids=made).logits[0, :-1].log_softmax(-1)
    values = logp.gather(1, made[0, 1:, None])[:, 0].tolist()
    return made[0, len(tokens) :].tolist(), values[len(tokens) - 1 :]


def test_openai_gets_the_tokens_and_logprobs_of_transformers(model, tokenizer, client):
    tokens = tokenizer("the quick")["input_ids"]
    made, values = by_transformers(model, tokens, 10)
    assert [card.id for card in client.models.list()] == ["tiny"]
    answer = client.completions.create(
        model="tiny", prompt="the quick", max_tokens=10, temperature=0, logprobs=0
    )
    (choice,) = answer.choices
    assert choice.text == tokenizer.decode(made)
    torch.testing.assert_close(choice.logprobs.token_logprobs, values, atol=1e-4, rtol=0)
    chunks = client.completions.create(
        model="tiny", prompt=tokens, max_tokens=10, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(chunks)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert last.usage.completion_tokens == 10


def test_openai_chats_in_async_streams_next_to_each_other(openai, model, tokenizer, server):
    async def chat(client, text):
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": text}], max_tokens=9, temperature=0,
            stream=True,
        )  # fmt: skip
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of(texts):
        url = f"http://{server[1]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, timeout=LIMIT_S) as client:
            return await asyncio.gather(*(chat(client, text) for text in texts))

    texts = ["one", "two", "three four five", "\u20ac"]
    prompts = [tokenizer(f"<user>{text}\n<assistant>")["input_ids"] for text in texts]
    expected = [tokenizer.decode(by_transformers(model, tokens, 9)[0]) for tokens in prompts]
    assert asyncio.run(all_of(texts)) == expected


def test_openai_names_what_is_wrong(openai, client):
    ask = client.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model="tiny", prompt="a", max_tokens=1000)
    assert (bad.value.param, bad.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError):
        ask(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_openai_repeats_a_refused_request_and_gets_the_same_tokens(model, tokenizer, client, server):
    service, calls = server[0], []
    submit = service.host.submit

    def busy_once(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise OSError("the connection to the engine was cut")
        return submit(*args, **options)

    ask = {"model": "tiny", "prompt": "the", "max_tokens": 12, "extra_headers": {"X-Request-Id": "job-7"}}
    first = client.completions.create(**ask).choices[0].text
    service.host.submit = busy_once
    try:
        again = client.completions.create(**ask).choices[0].text
    finally:
        del service.host.submit
    assert len(calls) == 2
    assert again == first
    others = {client.completions.create(model="tiny", prompt="the", max_tokens=12).choices[0].text}
    assert others != {first}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_gets_whole_answers_and_streams(model, tokenizer, server):
    body = {"model": "tiny", "prompt": "one two", "max_tokens": 8, "temperature": 0}

    def curl(*words, **more):
        command = ["curl", "-sS", "--max-time", "60", "-H", f"Authorization: Bearer {KEY}"]
        command += ["-d", json.dumps({**body, **more}), *words, f"http://{server[1]}/v1/completions"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout

    made, _ = by_transformers(model, tokenizer("one two")["input_ids"], 8)
    assert json.loads(curl())["choices"][0]["text"] == tokenizer.decode(made)
    lines = [line for line in curl("-N", stream=True).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(parts) == tokenizer.decode(made)


class TextRenderer:
    """Renderer of this test's template, with the methods that the client calls."""

    supports_tools = False

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def get_stop_token_ids(self):
        return [self._tokenizer.eos_token_id]

    def parse_response(self, ids, **options):
        class Parsed:
            content, reasoning_content, tool_calls = self._tokenizer.decode(ids), None, []
            reasoning_complete = True

        return Parsed


def test_renderers_client_gets_tokens_and_logprobs(openai, model, tokenizer, server):
    from renderers.client import generate

    tokens = tokenizer("<user>five\n<assistant>")["input_ids"]

    async def ask():
        url = f"http://{server[1]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, timeout=LIMIT_S) as client:
            return await generate(
                client=client, renderer=TextRenderer(tokenizer), messages=[], model="tiny",
                prompt_ids=tokens, sampling_params={"max_tokens": 7, "temperature": 0.0}, cache_salt="v1",
            )  # fmt: skip

    found = asyncio.run(ask())
    made, values = by_transformers(model, tokens, 7)
    assert (found["prompt_ids"], found["completion_ids"]) == (tokens, made)
    torch.testing.assert_close(found["completion_logprobs"], values, atol=1e-4, rtol=0)
    assert found["finish_reason"] == ("stop" if made[-1] == tokenizer.eos_token_id else "length")


# --- every field that a route for text accepts

A = 67
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = {"messages": [{"role": "user", "content": "the quick"}], "max_tokens": 12, "seed": 3}
COMPLETION = {"prompt": "the quick", "max_tokens": 12, "seed": 3}
TOKENS = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 12, "seed": 3}}
FORCED = {"temperature": 0, "logit_bias": {str(A): 100}}
OFTEN = {"temperature": 1, "logit_bias": {str(A): 6}, "max_tokens": 60}
ENDED = {"temperature": 0, "logit_bias": {"1": 100}}
SAMPLING = {
    "max_tokens": (3, {}),
    "temperature": (0, {}),
    "top_p": (0.01, {}),
    "top_k": (1, {}),
    "min_p": (0.99, {}),
    "frequency_penalty": (2, OFTEN),
    "presence_penalty": (2, OFTEN),
    "repetition_penalty": (2.0, OFTEN),
    "logit_bias": ({str(A): 100}, {}),
    "n": (2, {}),
    "seed": (4, {}),
    "stop": ("a", FORCED),
    "stop_token_ids": ([A], FORCED),
    "min_tokens": (5, ENDED),
    "ignore_eos": (True, ENDED),
}
TEXT = {
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "skip_special_tokens": (False, {"temperature": 0, "logit_bias": {"2": 100}}),
    "return_token_ids": (True, {}),
    "request_id": ("b", {"seed": None, "request_id": "a"}),
}
IGNORED_TEXT = {"user", "cache_salt", "safety_identifier", "metadata", "prompt_cache_key"}
IGNORED_TEXT |= {"prompt_cache_retention", "prompt_cache_options"}
IGNORED_SAMPLING = {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
IGNORED_SAMPLING |= {"detokenize", "output_kind"}
BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/inference/v1/generate": TokenBody,
}
EFFECTS = {
    "/v1/chat/completions": (
        CHAT,
        SAMPLING
        | TEXT
        | {
            "messages": ([{"role": "user", "content": "the lazy"}], {}),
            "max_completion_tokens": (3, {"max_tokens": None}),
            "logprobs": (True, {}),
            "top_logprobs": (2, {"logprobs": True}),
            "tools": ([TOOL], {}),
            "tool_choice": ("none", {"tools": [TOOL]}),
            "parallel_tool_calls": (
                False,
                {"tools": [TOOL], "temperature": 0, "logit_bias": {"CALL": 100}},
            ),
            "add_generation_prompt": (False, {}),
            "continue_final_message": (True, {"add_generation_prompt": False}),
            "chat_template_kwargs": ({"extra": "lazy"}, {}),
        },
        {
            "model": "other",
            "tool_choice": "required",
            "modalities": ["audio"],
            "response_format": {"type": "json_object"},
        },
        IGNORED_TEXT,
    ),
    "/v1/completions": (
        COMPLETION,
        SAMPLING
        | TEXT
        | {
            "prompt": ("the lazy", {}),
            "echo": (True, {}),
            "logprobs": (2, {}),
            "add_special_tokens": (False, {}),
        },
        {"model": "other", "best_of": 3, "suffix": "b", "response_format": {"type": "json_object"}},
        IGNORED_TEXT,
    ),
    "/inference/v1/generate": (
        TOKENS,
        {f"sampling_params.{name}": each for name, each in SAMPLING.items()}
        | {name: TEXT[name] for name in ("stream", "stream_options")}
        | {
            "token_ids": ([7, 8], {}),
            "sampling_params": ({"max_tokens": 3, "seed": 3}, {}),
            "sampling_params.logprobs": (1, {}),
            "sampling_params.prompt_logprobs": (1, {}),
            "request_id": ("b", {"sampling_params": {"max_tokens": 3}, "request_id": "a"}),
        },
        {"model": "other", "priority": 3},
        {"cache_salt", "return_token_ids", *(f"sampling_params.{name}" for name in IGNORED_SAMPLING)},
    ),
}
"""By route: a request, the fields that change its answer, values that are refused, and ignored fields."""
REFUSED_TEXT = {
    "priority": 3,
    "store": True,
    "service_tier": "flex",
    "use_beam_search": True,
    "length_penalty": 2.0,
    "include_stop_str_in_output": True,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 3,
    "stream_options": {"include_obfuscation": True},
}


@pytest.fixture(scope="module")
def open_place():
    """Return a server at which every field can have an effect, and its tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    start = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[start])
    tokenizer.chat_template += "{{ extra }}{# <tool_call> </tool_call> #}"
    with served(text_policy(tokenizer), tokenizer) as (_, address):
        yield address, tokenizer


def field_names(kind):
    """Yield the fields of a request, and those of `sampling_params`."""
    for name, field in kind.model_fields.items():
        yield name
        if name == "sampling_params":
            yield from (f"{name}.{inner}" for inner in field.annotation.model_fields)


def merged(request, change):
    """Return a request with other fields; a name with a point is a field of an object."""
    made = copy.deepcopy(request)
    for name, value in change.items():
        outer, _, inner = name.partition(".")
        if inner:
            made[outer][inner] = value
        else:
            made[outer] = value
    return made


@pytest.mark.parametrize("path", EFFECTS)
def test_every_field_that_is_accepted_has_an_effect_is_refused_or_is_listed_as_ignored(
    openai, open_place, path
):
    address, tokenizer = open_place
    request, effects, refused, ignored = EFFECTS[path]
    refused = refused | ({} if path == "/inference/v1/generate" else REFUSED_TEXT)
    read = set(field_names(BODIES[path]))
    call = str(tokenizer.convert_tokens_to_ids("</tool_call>"))

    def answer(body):
        status, _, found = ask(address, path, json.dumps(body).replace("CALL", call).encode())
        if isinstance(found, dict):
            return status, {key: each for key, each in found.items() if key not in ("id", "created")}
        parts = [json.loads(line[6:]) for line in found.splitlines() if line.startswith(b"data: {")]
        choices = [choice for part in parts for choice in part["choices"]]
        texts = [each.get("text") or each.get("delta", {}).get("content") or "" for each in choices]
        tokens = [token for each in choices for token in each.get("token_ids", ())]
        return status, ("".join(texts), tokens, parts[-1].get("usage"))

    @functools.cache
    def usual(more):
        first, again = (answer(merged(request, json.loads(more))) for _ in range(2))
        assert first == again, more  # only the field changes the answer
        return first

    for name, (value, more) in effects.items():
        prefix = name.rpartition(".")[0]
        more = {f"{prefix}.{key}" if prefix else key: each for key, each in more.items()}
        before, after = usual(json.dumps(more)), answer(merged(request, more | {name: value}))
        assert (before[0], after[0]) == (200, 200), (name, before, after)
        assert before[1] != after[1], f"{name} has no effect"
    for name, value in refused.items():
        more = {"stream": True} if name == "stream_options" else {}
        status, found = answer(merged(request, more | {name: value}))
        assert status in (400, 404), name
        assert found["error"]["param"].split(".")[0] == name
    page = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()
    for name in ignored:
        assert answer(merged(request, {name: "x"})) == usual("{}"), name
        assert f"`{name.rpartition('.')[2]}`" in page, f"{name} is not listed as ignored"
    assert read == {*effects, *refused, *ignored}
    theirs = {
        "/v1/chat/completions": openai.types.chat.completion_create_params.CompletionCreateParamsBase,
        "/v1/completions": openai.types.completion_create_params.CompletionCreateParamsBase,
    }
    for name in {*getattr(theirs.get(path), "__annotations__", ())} - read:
        status, found = answer({**request, name: "x"})
        assert (status, found["error"]["param"]) == (400, name)
