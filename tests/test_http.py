"""Tests of the HTTP routes: tokens and log-probabilities of transformers, streams, stops, seeds, refusals."""

import copy
import functools
import hashlib
import json
import operator
import random
import re
import socket
import urllib.request
from contextlib import suppress

import numpy as np
import pytest
import torch
from kit.hosts import LIMIT_S, Steps
from kit.rollouts import decode_plainly
from kit.serving import MAX_TOKENS, ask, byte_tokenizer, served, text_policy
from kit.waiting import until
from transformers import LlamaForCausalLM

from aedit.spec_rollout.http import TextCodec
from aedit.spec_rollout.http.answers import AnswerText
from aedit.spec_rollout.http.server import HttpLimits
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.server import HostLimits

PROMPTS = ["the quick brown", "jumps over \u20ac", "1 2 3"]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return text_policy(tokenizer)


@pytest.fixture(scope="module")
def server(model, tokenizer):
    with served(model, tokenizer) as (service, address):
        yield service, address


@pytest.fixture(scope="module")
def address(server):
    return server[1]


@torch.no_grad()
def greedy(model, tokens, count):
    """Return the tokens that transformers generates."""
    ids = torch.tensor([tokens])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return made[0, len(tokens) :].tolist()


@torch.no_grad()
def logprobs(model, tokens):
    """Return the log-probability of each token but the first, from one forward of transformers."""
    logp = model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def complete(address, prompt, **more):
    status, _, answer = ask(address, "/v1/completions", {"prompt": prompt, **more})
    assert status == 200, answer
    return answer


def events(address, path, body):
    """Return the JSON events of a stream."""
    request = urllib.request.Request(f"http://{address}{path}", json.dumps({**body, "stream": True}).encode())
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.decode() for line in answer if line.strip()]
    assert lines.pop() == "data: [DONE]\n"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# --- answers


def test_greedy_answers_of_all_kinds_of_prompts_are_those_of_transformers(model, tokenizer, address):
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    for prompt, expected in ((PROMPTS, ids), (ids, ids), (PROMPTS[0], ids[:1]), (ids[1], ids[1:2])):
        answer = complete(address, prompt, temperature=0, max_tokens=12, logprobs=2, return_token_ids=True)
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        for tokens, choice in zip(expected, answer["choices"], strict=True):
            made = greedy(model, tokens, 12)
            assert choice["token_ids"] == made
            assert choice["prompt_token_ids"] == tokens
            shown = choice["logprobs"]
            exact = logprobs(model, tokens + made)[-len(made) :]
            torch.testing.assert_close(shown["token_logprobs"], exact, atol=1e-4, rtol=0)
            assert choice["text"] == tokenizer.decode(tokens + made, skip_special_tokens=True).removeprefix(
                tokenizer.decode(tokens)
            )
            assert [max(top.values()) for top in shown["top_logprobs"]] == shown["token_logprobs"]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_the_prompt_as_transformers_does(model, tokenizer, address, max_tokens):
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    answer = complete(address, ids, temperature=0, max_tokens=max_tokens, logprobs=1, echo=True)
    for tokens, choice in zip(ids, answer["choices"], strict=True):
        shown = choice["logprobs"]
        assert shown["token_logprobs"][0] is None
        assert len(shown["tokens"]) == len(tokens) + max_tokens
        torch.testing.assert_close(
            shown["token_logprobs"][1 : len(tokens)], logprobs(model, tokens), atol=1e-4, rtol=0
        )
        with torch.no_grad():
            best = model(input_ids=torch.tensor([tokens])).logits[0, :-1].argmax(-1).tolist()
        is_best = [
            value == max(top.values())
            for value, top in zip(shown["token_logprobs"], shown["top_logprobs"], strict=True)
            if top is not None
        ]
        assert is_best[: len(tokens) - 1] == [a == b for a, b in zip(best, tokens[1:], strict=True)]
        text = tokenizer.decode(tokens)
        assert choice["text"].startswith(text)
        assert shown["text_offset"][len(tokens) :] == [len(text)] * max_tokens


def test_a_stream_has_the_parts_of_the_whole_answer(address):
    body = {"prompt": PROMPTS, "seed": 3, "max_tokens": 40, "logprobs": 1, "return_token_ids": True}
    whole = complete(address, **body)
    parts = events(address, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert parts.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert len(own) > 3
        assert "".join(part["text"] for part in own) == choice["text"]
        assert functools.reduce(operator.iadd, (part["token_ids"] for part in own), []) == choice["token_ids"]
        for name, values in choice["logprobs"].items():
            assert functools.reduce(operator.iadd, (part["logprobs"][name] for part in own), []) == values
        assert [part["finish_reason"] for part in own][-1] == choice["finish_reason"]
        assert not any(part["finish_reason"] for part in own[:-1])


def test_an_answer_ends_before_a_stop_string_that_spans_tokens(tokenizer, address):
    body = {"prompt": "the quick", "seed": 12, "max_tokens": 60, "return_token_ids": True, "logprobs": 0}
    whole = complete(address, **body)["choices"][0]
    place = next(i for i in range(8, 60) if whole["text"][i : i + 3].isascii())
    stop = whole["text"][place : place + 3]
    cut = complete(address, **body, stop=["never there", stop])["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert len(cut["token_ids"]) == len(cut["logprobs"]["token_logprobs"])
    parts = events(address, "/v1/completions", {**body, "stop": stop})
    assert "".join(part["choices"][0]["text"] for part in parts) == cut["text"]


def test_an_end_token_ends_the_answer_and_is_not_in_its_text(tokenizer, address):
    end = {"logit_bias": {str(tokenizer.eos_token_id): 100}}
    choice = complete(address, "the", max_tokens=9, return_token_ids=True, **end)["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", [tokenizer.eos_token_id])
    assert choice["finish_reason"] == "stop"
    more = complete(address, "the", max_tokens=3, ignore_eos=True, return_token_ids=True, **end)["choices"][0]
    assert (more["finish_reason"], len(more["token_ids"])) == ("length", 3)


def test_chat_uses_the_template_and_streams_the_same_text(model, tokenizer, address):
    messages = [{"role": "user", "content": [{"type": "text", "text": "one two"}]}]
    body = {"messages": messages, "max_tokens": 10, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    status, _, answer = ask(address, "/v1/chat/completions", body)
    assert status == 200
    tokens = tokenizer("<user>one two\n<assistant>")["input_ids"]
    made = greedy(model, tokens, 10)
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    exact = logprobs(model, tokens + made)[-10:]
    torch.testing.assert_close([each["logprob"] for each in content], exact, atol=1e-4, rtol=0)
    assert all(each["top_logprobs"][0]["token"] == each["token"] for each in content)
    raw = bytes(byte for each in content for byte in each["bytes"])
    assert choice["message"]["content"] == raw.decode(errors="replace") == tokenizer.decode(made)
    parts = events(address, "/v1/chat/completions", body)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    shown = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert shown == choice["message"]["content"]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
USER = [{"role": "user", "content": "the quick"}]
SAYS = ["<tool_call>", '{"name": "f"}', "</tool_", "call>\n", "z"]


def model_that_says(tokenizer, texts):
    """Return a policy after whose token `texts[i]`, a word of the tokenizer, comes the next one, in a circle.

    All other tokens are followed by the first one.
    """
    tokenizer.add_tokens(texts)
    size = len(tokenizer)
    config = copy.deepcopy(text_policy(tokenizer).config)
    config.update({"hidden_size": -(-size // 8) * 8, "num_attention_heads": 4, "num_key_value_heads": 4})
    config.head_dim = config.hidden_size // 4
    made = LlamaForCausalLM(config).eval().requires_grad_(False)
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    ids = tokenizer.convert_tokens_to_ids(texts)
    after = torch.full((size,), ids[0])
    after[ids] = torch.tensor(ids).roll(-1)
    made.model.embed_tokens.weight.copy_(torch.eye(size, config.hidden_size))
    made.lm_head.weight.zero_()
    made.lm_head.weight[after, torch.arange(size)] = 10.0
    return made


@pytest.fixture(scope="module")
def caller():
    """Return the address of a server whose answers are calls of tools."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += "{# <tool_call> </tool_call> #}"
    with served(model_that_says(tokenizer, SAYS), tokenizer) as (_, address):
        yield address


@pytest.mark.parametrize("parallel", [None, True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_without_parallel_tool_calls_an_answer_ends_after_its_first_call(caller, parallel, stream):
    body = {"messages": USER, "tools": [TOOL], "max_tokens": 25, "temperature": 0, "n": 2}
    body |= {"parallel_tool_calls": parallel, "stop": "never"}
    if stream:
        choices = [
            choice for part in events(caller, "/v1/chat/completions", body) for choice in part["choices"]
        ]
        texts = ["", ""]
        for each in choices:
            texts[each["index"]] += each["delta"].get("content", "")
        reasons = {each["finish_reason"] for each in choices} - {None}
    else:
        choices = ask(caller, "/v1/chat/completions", body)[2]["choices"]
        texts = [each["message"]["content"] for each in choices]
        reasons = {each["finish_reason"] for each in choices}
    call = '<tool_call>{"name": "f"}</tool_call>'
    if parallel is False:
        assert (texts, reasons) == ([call] * 2, {"stop"})
    else:
        assert (texts, reasons) == ([f"{call}\nz" * 5] * 2, {"length"})


def test_calls_whose_end_is_not_known_and_calls_without_tools_cannot_be_limited(address):
    body = {"messages": USER, "max_tokens": 1, "parallel_tool_calls": False}
    for tools in (None, [], [TOOL]):
        status, _, answer = ask(address, "/v1/chat/completions", body | {"tools": tools})
        assert (status, answer["error"]["param"]) == (400, "parallel_tool_calls")
    free = body | {"tools": [TOOL], "tool_choice": "none"}
    assert ask(address, "/v1/chat/completions", free)[0] == 200


def test_tools_are_in_the_prompt_unless_none_may_be_called(tokenizer, address):
    for choice, tools in ((None, [TOOL]), ("auto", [TOOL]), ("none", None)):
        exact = tokenizer.apply_chat_template(USER, tools=tools, add_generation_prompt=True)["input_ids"]
        body = {"messages": USER, "tools": [TOOL], "tool_choice": choice}
        assert ask(address, "/tokenize", body)[2]["tokens"] == exact
        more = {"max_tokens": 1, "return_token_ids": True}
        assert ask(address, "/v1/chat/completions", body | more)[2]["prompt_token_ids"] == exact
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        status, _, answer = ask(address, "/v1/chat/completions", body | {"tool_choice": choice})
        assert (status, answer["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_variables_of_the_template_have_no_names_that_are_taken(address, path):
    taken = ("self", "messages", "conversation", "conversations", "chat_template", "return_dict", "tools")
    taken += ("function", "args", "kwargs", "context", "tokenize", "padding", "sanitize_control_tokens")
    free = {"function", "args", "context"}
    for name in taken:
        status, _, answer = ask(address, path, {"messages": USER, "chat_template_kwargs": {name: "x"}})
        assert status == (200 if name in free else 400), (name, answer)
        if status == 400:
            assert answer["error"]["param"] == f"chat_template_kwargs.{name}"
    odd = {"a b": 1, "": 2, "\u20ac": {}, "raise_exception": None, "loop": 1, "bos_token": "x"}
    assert ask(address, path, {"messages": USER, "chat_template_kwargs": odd})[0] == 200
    assert ask(address, path, {"messages": USER, "chat_template_kwargs": ["x"]})[0] == 400


def test_tokens_in_tokens_out_with_versions_and_scores_of_the_prompt(model, tokenizer, address):
    tokens = tokenizer(PROMPTS[0])["input_ids"]
    settings = {"max_tokens": 6, "temperature": 0, "logprobs": 1, "prompt_logprobs": 1}
    status, _, answer = ask(
        address, "/inference/v1/generate", {"token_ids": tokens, "sampling_params": settings}
    )
    assert status == 200
    (choice,) = answer["choices"]
    made = greedy(model, tokens, 6)
    assert choice["token_ids"] == made
    assert [each["token"] for each in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in made]
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    exact = logprobs(model, tokens + made)
    found = [each["logprob"] for each in choice["logprobs"]["content"]]
    torch.testing.assert_close(found, exact[-6:], atol=1e-4, rtol=0)
    scored = answer["prompt_logprobs"]
    assert scored[0] is None
    found = [entry[str(token)]["logprob"] for entry, token in zip(scored[1:], tokens[1:], strict=True)]
    torch.testing.assert_close(found, exact[: len(tokens) - 1], atol=1e-4, rtol=0)


def test_text_of_any_bytes_grows_by_whole_characters_and_is_the_tokenizers_own(tokenizer):
    codec, draw = TextCodec(tokenizer), random.Random(0)
    for text in ("h\u00e9llo \u20ac \U0001d11e end", ""):
        tokens = list(codec.encode(text)) or [draw.randrange(3, 300) for _ in range(400)]
        for prompt in ((), codec.encode("\u20ac")):
            grown, pieces = AnswerText(codec, prompt), []
            for token in tokens:
                grown.add([token])
                pieces.append(grown.take())
                assert text == "" or "\ufffd" not in pieces[-1]
            grown.finish(by_stop=False)
            pieces.append(grown.take())
            whole = codec.decode([*prompt, *tokens])[len(codec.decode(prompt)) :]
            assert "".join(pieces) == grown.text == whole


@pytest.mark.parametrize("by_stop", [True, False])
def test_a_complete_stop_string_is_held_back_until_it_is_known_whether_the_answer_ends(tokenizer, by_stop):
    codec = TextCodec(tokenizer)
    grown = AnswerText(codec, (), ("never there", "own"))
    shown = ""
    for token in codec.encode("the quick brown"):
        grown.add([token])
        shown += grown.take()
    assert shown == "the quick br"
    grown.finish(by_stop=by_stop)
    assert shown + grown.take() == grown.text == ("the quick br" if by_stop else "the quick brown")


def test_a_stop_string_that_has_not_ended_the_answer_does_not_cut_it_beside_a_longer_one(tokenizer):
    """With `min_tokens` the first one counts as text. Found: the answer was cut there in the end."""
    codec = TextCodec(tokenizer)
    grown = AnswerText(codec, (), ("a longer one that is not there", "own"))
    shown = []
    for token in codec.encode("brown, own"):
        grown.add([token])
        shown.append(grown.take())
    assert "".join(shown) == "brown, "
    grown.finish(by_stop=True)
    assert "".join(shown) + grown.take() == grown.text == "brown, "


# --- noise


def key_of(kind, *parts):
    """Return the documented key: 8 bytes of BLAKE2b over the parts, each with its length."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (kind, *parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(digest.digest(), "little", signed=True)


def test_seed_and_prompt_fix_the_tokens_of_each_sample(model, tokenizer, address):
    tokens = tokenizer(PROMPTS[0])["input_ids"]
    body = {"max_tokens": 12, "n": 2, "seed": 7, "return_token_ids": True}
    first = complete(address, [PROMPTS[1], PROMPTS[0], PROMPTS[0]], **body)["choices"]
    again = complete(address, PROMPTS[0], **body)["choices"]
    made = [choice["token_ids"] for choice in first]
    assert [choice["token_ids"] for choice in again] == made[2:4]
    key = key_of(b"seed", b"7", np.asarray(tokens, "<i8").tobytes())
    sampling = Sampling(max_new_tokens=12, stop_tokens=(tokenizer.eos_token_id,))
    prompts = [Prompt(tokens=tuple(tokens), rollout=key, sample=i, sampling=sampling) for i in range(4)]
    assert made[2:] == decode_plainly(model, prompts)
    assert len({tuple(each) for each in made}) == 6


def test_a_repeated_request_id_fixes_the_tokens_and_without_one_they_differ(model, tokenizer, address):
    body = {"prompt": PROMPTS[0], "max_tokens": 12, "return_token_ids": True}

    def made(**headers):
        return ask(address, "/v1/completions", body, headers=headers)[2]["choices"][0]["token_ids"]

    first = made(**{"X-Request-Id": "a"})
    assert first == made(**{"Idempotency-Key": "a"}) != made(**{"X-Request-Id": "b"})
    prompt = Prompt(
        tokens=tuple(tokenizer(PROMPTS[0])["input_ids"]),
        rollout=key_of(b"request", b"a"),
        sampling=Sampling(max_new_tokens=12, stop_tokens=(tokenizer.eos_token_id,)),
    )
    assert [first] == decode_plainly(model, [prompt])
    assert made() != made()


# --- refusals


REFUSED = [
    (b"{", 400, None),
    (b"[1]", 400, None),
    (b"[" * 100_000, 400, None),
    (b'{"prompt": "a", "temperature": NaN}', 400, None),
    (b'{"prompt": "\\ud800"}', 400, "prompt"),
    (b'{"prompt": "a", "max_tokens": 1e999}', 400, "max_tokens"),
    ({}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": [300]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [1 << 70]}, 400, "prompt"),
    ({"prompt": ["a"] * 129}, 400, "prompt"),
    ({"prompt": "a", "n": 0}, 400, "n"),
    ({"prompt": ["a"] * 100, "n": 2}, 400, "n"),
    ({"prompt": "a", "best_of": 3}, 400, "best_of"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "max_tokens": MAX_TOKENS}, 400, "prompt"),
    ({"prompt": "a", "max_tokens": "9"}, 400, "max_tokens"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    ({"prompt": "a", "top_p": 2}, 400, "top_p"),
    ({"prompt": "a", "top_k": -2}, 400, "top_k"),
    ({"prompt": "a", "min_p": 2}, 400, "min_p"),
    ({"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"999": 1}}, 400, "logit_bias"),
    ({"prompt": "a", "stop": ["a"] * 17}, 400, "stop"),
    ({"prompt": "a", "stop": ""}, 400, "stop"),
    ({"prompt": "a", "stop_token_ids": [999]}, 400, "stop_token_ids"),
    ({"prompt": "a", "seed": 1.5}, 400, "seed"),
    ({"prompt": "a", "priority": 3}, 400, "priority"),
    ({"prompt": "a", "stream_options": {}}, 400, "stream_options"),
    ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x"),
    ({"prompt": "a", "temprature": 1}, 400, "temprature"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"prompt": "a", "model": "other"}, 404, "model"),
]


@pytest.mark.parametrize(("body", "status", "param"), REFUSED)
def test_a_wrong_request_is_refused_in_openais_form_and_names_the_parameter(address, body, status, param):
    found, _, answer = ask(address, "/v1/completions", body)
    assert (found, answer["error"]["param"]) == (status, param), answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ("/v1/chat/completions", {"messages": [{"role": 1, "content": "a"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": [{"role": "u", "content": "a"}], "top_logprobs": 1}, None),
        ("/v1/chat/completions", {"messages": [{"role": "u", "content": "a"}], "functions": []}, None),
        (
            "/v1/chat/completions",
            {"messages": USER, "max_tokens": 2, "max_completion_tokens": 3},
            "max_tokens",
        ),
        ("/inference/v1/generate", {"token_ids": "a"}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [5], "seed": 1}, "seed"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"x": 1}}, "sampling_params.x"),
        ("/inference/v1/generate", {"token_ids": [5], "stream": 1}, "stream"),
        ("/inference/v1/generate", {"token_ids": [5], "stream_options": {}}, "stream_options"),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "stream": True, "sampling_params": {"prompt_logprobs": 0}},
            "sampling_params.prompt_logprobs",
        ),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
    ],
)
def test_other_routes_refuse_wrong_requests_as_well(address, path, body, param):
    found, _, answer = ask(address, path, body)
    assert found == 400, answer
    assert param is None or answer["error"]["param"] == param


def test_routes_and_methods_that_do_not_exist_are_refused_in_openais_form(address):
    for path, body, status in (
        ("/v1/nothing", None, 404),
        ("/v1/completions", None, 405),
        ("/health", {}, 405),
    ):
        found, _, answer = ask(address, path, body)
        assert (found, answer["error"]["code"]) == (status, "no_such_route")


def test_models_tokenizer_health_version_and_metrics(server, tokenizer):
    service, address = server
    card = ask(address, "/v1/models")[2]["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", MAX_TOKENS)
    assert ask(address, "/v1/models/tiny")[2] == card
    tokens = tokenizer("one \u20ac")["input_ids"]
    assert ask(address, "/tokenize", {"prompt": "one \u20ac"})[2]["tokens"] == tokens
    assert ask(address, "/detokenize", {"tokens": tokens})[2] == {"prompt": "one \u20ac"}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert ask(address, "/tokenize", chat)[2]["tokens"] == tokenizer("<user>a\n<assistant>")["input_ids"]
    info = ask(address, "/tokenizer_info")[2]
    assert (info["eos_token"], info["chat_template"]) == ("</s>", tokenizer.chat_template)
    assert ask(address, "/health")[0] == ask(address, "/ping")[0] == 200
    assert ask(address, "/version")[2]["weight_version"] == "0"
    assert ask(address, "/v1/completions", {})[0] == 400
    assert ask(address, "/v1/completions", {"prompt": [1], "max_tokens": 2})[0] == 200
    before = service.host.status()["tokens"]  # samples of clients that have gone may still take a step
    text = ask(address, "/metrics")[2].decode()
    shown = float(re.search(r"^aedit_serve_tokens_total (\S+)$", text, re.M)[1])
    assert 2 <= before <= shown <= service.host.status()["tokens"]
    assert 'aedit_http_requests_total{route="/v1/completions",status="400"}' in text


# --- clients that do harm


def test_only_known_keys_are_served_and_others_before_their_body_is_read(model, tokenizer):
    with served(model, tokenizer, keys=("right", "other")) as (_, address):
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
            status, headers, answer = ask(address, "/v1/models", headers=header)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer"
        assert ask(address, "/health")[0] == 200
        for key in ("right", "other"):
            assert ask(address, "/v1/models", headers={"Authorization": f"Bearer {key}"})[0] == 200
        with socket.create_connection(address.split(":"), timeout=LIMIT_S) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 401 ")


def test_overload_answers_429_and_the_server_recovers(model, tokenizer):
    steps = Steps()
    options = {"host_limits": HostLimits(max_waiting_public=2), "between_steps": steps, "rows": 1}
    with served(model, tokenizer, **options) as (service, address):
        streams = []
        for _ in range(3):
            body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 4}).encode()
            streams.append(urllib.request.urlopen(f"http://{address}/v1/completions", body, timeout=LIMIT_S))
            steps.wait()
        status, headers, answer = ask(address, "/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["code"], int(headers["retry-after"]) >= 1) == (
            429,
            "overloaded",
            True,
        )
        status, _, _ = ask(address, "/v1/completions", {"prompt": ["a", "b", "c"]})
        assert status == 429
        until(lambda: service.host.status()["samples"] <= 3, "the end of samples of a refused request")
        steps.open()
        for stream in streams:
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert ask(address, "/v1/completions", {"prompt": "a"})[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_the_samples_of_a_client_that_goes_away_are_cancelled(model, tokenizer, stream):
    steps = Steps()
    with served(model, tokenizer, between_steps=steps) as (service, address):
        body = json.dumps({"prompt": "a", "n": 2, "max_tokens": 100, "stream": stream}).encode()
        with socket.create_connection(address.split(":"), timeout=LIMIT_S) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            client.sendall(body)
            steps.wait()
        until(lambda: service.metrics.cancelled._value.get() == 1, "the departure")
        steps.open()
        until(lambda: service.host.status()["samples"] == 0, "the end of the samples")
        assert service.host.status()["tokens"] < 50


def is_closed(client):
    """Wait for the server to close or reset the connection; return false if it sends something instead."""
    with suppress(ConnectionResetError):
        return client.recv(1) == b""
    return True


def test_slow_idle_and_too_many_connections_are_closed_and_harm_nobody(model, tokenizer):
    limits = HttpLimits(idle_s=1.0, body_s=0.5, max_connections=8, max_body_bytes=1000)
    with served(model, tokenizer, limits=limits) as (_, address):

        def connect():
            return socket.create_connection(address.split(":"), timeout=LIMIT_S)

        idle = [connect() for _ in range(20)]
        assert ask(address, "/v1/completions", {"prompt": "a"})[0] == 200
        assert all(map(is_closed, idle[:12]))  # too many: the oldest are closed
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")  # and never goes on
        assert all(map(is_closed, idle[12:]))
        with connect() as client:
            client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            assert client.recv(100).startswith(b"HTTP/1.1 408 ")
        status, _, answer = ask(address, "/tokenize", {"prompt": "a" * 1000})
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
        with connect() as client:
            client.sendall(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            client.sendall(b"400\r\n" + b"a" * 1024 + b"\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 413 ")
        with connect() as client:
            client.sendall(b"\x16\x03\x01 no http\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400 ")
        assert ask(address, "/v1/completions", {"prompt": "a"})[0] == 200
        for client in idle:
            client.close()


def test_a_client_that_does_not_read_its_stream_is_cut(model, tokenizer):
    limits = HttpLimits(write_s=0.5, idle_s=0.5, max_entries=1 << 30)
    with served(model, tokenizer, limits=limits, rows=16) as (service, address):
        body = {
            "prompt": "a",
            "n": 128,
            "max_tokens": 120,
            "stream": True,
            "logprobs": 20,
            "ignore_eos": True,
        }
        text = json.dumps(body).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(address.split(":")[1])))
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(text)
            )
            client.sendall(text)
            until(lambda: service.metrics.cancelled._value.get() == 1, "the cut", 60)
        until(lambda: service.host.status()["samples"] == 0, "the end of the samples")
        assert ask(address, "/v1/completions", {"prompt": "a"})[0] == 200


def test_requests_while_the_server_ends_get_503(model, tokenizer):
    with served(model, tokenizer) as (service, address):
        assert service.host.drain(LIMIT_S)
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/health", None)):
            status, headers, answer = ask(address, path, body)
            assert (status, answer["error"]["code"]) == (503, "ending")
            assert int(headers["retry-after"]) > 0
