"""Tests of real clients against the HTTP server: openai, curl, renderers; each beside transformers."""

import asyncio
import json
import shutil
import subprocess

import openai
import pytest
import torch
from kit.hosts import LIMIT_S
from kit.serving import byte_tokenizer, served, text_policy
from renderers.client import generate

KEY = "sk-test"


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
def client(server):
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


def test_openai_chats_in_async_streams_next_to_each_other(model, tokenizer, server):
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


def test_openai_names_what_is_wrong(client, server):
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


def test_renderers_client_gets_tokens_and_logprobs(model, tokenizer, server):
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
