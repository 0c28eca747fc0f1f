"""Tests of served models of several families and kinds of tokenizers, each against transformers."""

import json
import urllib.request

import pytest
import torch
from kit.served_models import saved
from kit.serving import ask, served
from transformers import AutoModelForCausalLM, AutoTokenizer

from aedit.launch.cli.service_options import is_model_folder
from aedit.types import UserError

NUM_NEW = 20
TEXT = "The quick brown caf\u00e9 \u4e2d fox"


@pytest.fixture(params=["llama", "qwen2", "gpt2", "gemma2"])
def model(request, tmp_path):
    """Return a model and its tokenizer, as transformers reads them from a directory."""
    directory = saved(request.param, tmp_path / "m")
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return loaded.eval().requires_grad_(False), AutoTokenizer.from_pretrained(directory)


def generated(model, ids):
    ends = torch.ones(1, len(ids), dtype=torch.long)
    made = model.generate(
        torch.tensor([ids]), attention_mask=ends, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
    )
    return made[0, len(ids) :].tolist()


def logprobs(model, ids, tokens):
    logits = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def text_after(tokenizer, ids, tokens):
    """Return what the tokens add to the text of the prompt."""
    before = tokenizer.decode(ids, skip_special_tokens=True)
    return tokenizer.decode(ids + tokens, skip_special_tokens=True)[len(before) :]


def streamed(address, path, body):
    data = json.dumps({**body, "stream": True}).encode()
    with urllib.request.urlopen(f"http://{address}{path}", data, timeout=60) as answer:
        lines = answer.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)


def test_answers_are_those_of_transformers_whole_and_streamed(model):
    policy, tokenizer = model
    ids = tokenizer(TEXT)["input_ids"]
    wanted = generated(policy, ids)
    with served(policy, tokenizer) as (_, address):
        body = {"prompt": TEXT, "max_tokens": NUM_NEW, "temperature": 0}
        more = {"logprobs": 0, "return_token_ids": True}
        status, _, told = ask(address, "/v1/completions", {**body, **more})
        assert status == 200
        choice = told["choices"][0]
        assert choice["token_ids"] == wanted
        assert choice["text"] == text_after(tokenizer, ids, wanted)
        got = torch.tensor(choice["logprobs"]["token_logprobs"])
        torch.testing.assert_close(got, logprobs(policy, ids, wanted), rtol=0, atol=1e-4)
        assert streamed(address, "/v1/completions", body) == choice["text"]
        assert ask(address, "/tokenize", {"prompt": TEXT})[2]["tokens"] == ids
        assert ask(address, "/detokenize", {"tokens": ids})[2]["prompt"] == tokenizer.decode(ids)
        check_chat(address, policy, tokenizer)


def check_chat(address, policy, tokenizer):
    messages = [{"role": "user", "content": TEXT}]
    body = {"messages": messages, "max_tokens": NUM_NEW, "temperature": 0}
    status, _, told = ask(address, "/v1/chat/completions", body)
    if tokenizer.chat_template is None:
        assert status == 400
        assert "chat template" in told["error"]["message"]
        return
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    wanted = text_after(tokenizer, ids, generated(policy, ids))
    assert told["choices"][0]["message"]["content"] == wanted
    assert streamed(address, "/v1/chat/completions", body) == wanted
    assert told["usage"]["prompt_tokens"] == len(ids)


def test_a_directory_that_is_not_there_is_told_as_such(tmp_path):
    assert is_model_folder(str(tmp_path))
    assert not is_model_folder("hub.example:7000")
    with pytest.raises(UserError, match="no such directory, and no HOST:PORT"):
        is_model_folder(str(tmp_path / "modle"))
