"""Tests of lm-eval and of TRL's asynchronous GRPO worker against the HTTP server, beside transformers."""

import json
import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from kit.hosts import LIMIT_S
from kit.serving import byte_tokenizer, served, text_policy

from aedit.spec_rollout.http import control_routes

pytestmark = pytest.mark.slow  # imports of the frameworks take 10 s and more


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return text_policy(tokenizer)


@pytest.fixture(scope="module")
def address(model, tokenizer):
    with served(model, tokenizer, more_routes=control_routes(None)) as (_, address):
        yield address


@torch.no_grad()
def logprobs(model, tokens):
    logp = model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logp.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist(), logp.argmax(-1).tolist()


DOCS = [
    {"question": "one two", "choices": [" three", " fox"], "answer": 0},
    {"question": "the quick", "choices": [" brown", " 5 4"], "answer": 1},
    {"question": "lazy", "choices": [" dog.", " cat"], "answer": 0},
]
CHOICE = {
    "task": "tiny_choice", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
    "doc_to_target": "answer", "doc_to_choice": "choices", "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}  # fmt: skip
WRITE = {
    "task": "tiny_write", "output_type": "generate_until", "doc_to_text": "{{question}}",
    "doc_to_target": "{{question}}", "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 9},
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


def test_lm_eval_scores_and_generates_as_transformers_does(model, tokenizer, address, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    file = tmp_path / "docs.json"
    file.write_text("\n".join(map(json.dumps, DOCS)))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
    }
    api = LocalCompletionsAPI(base_url=f"http://{address}/v1/completions", model="tiny", batch_size=4)
    assert api.tokenizer_backend == "remote"
    found = simple_evaluate(
        api, tasks=[{**CHOICE, **data}, {**WRITE, **data}], log_samples=True, bootstrap_iters=0
    )
    for sample in found["samples"]["tiny_choice"]:
        question = tokenizer(sample["doc"]["question"])["input_ids"]
        for choice, response in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            whole = tokenizer(sample["doc"]["question"] + choice)["input_ids"]
            values, best = logprobs(model, whole)
            start = len(question) - 1
            ((value, is_greedy),) = response
            assert float(value) == pytest.approx(sum(values[start:]), abs=1e-4)
            assert (str(is_greedy) == "True") == (best[start:] == whole[1:][start:])
    for sample in found["samples"]["tiny_write"]:
        ids = torch.tensor([tokenizer(sample["doc"]["question"])["input_ids"]])
        with torch.no_grad():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9)
        text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).split("\n\n")[0]
        assert sample["resps"][0][0] == text


def test_trls_asynchronous_worker_gets_samples_with_logprobs_of_transformers(model, address):
    pytest.importorskip("aiohttp")
    from accelerate.state import PartialState
    from datasets import Dataset
    from trl.chat_template_utils import qwen3_chat_template
    from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    PartialState()
    client = VLLMClient(f"http://{address}", server_timeout=LIMIT_S)
    client.wait_for_server_ready()
    assert (client.get_max_model_len(), client.get_world_size()) == (128, 1)
    client.pause()
    client.resume()

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = qwen3_chat_template  # one that the worker knows
    prompts = [[{"role": "user", "content": text}] for text in ("one two", "fox")]
    samples = queue.Queue()
    loop = _AsyncRolloutLoop(
        model_name="tiny",
        dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=[lambda completions, **columns: [float(i) for i in range(len(completions))]],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        rollout_buffer=samples,
        model_version_value=SimpleNamespace(value=0),
        heartbeat_value=SimpleNamespace(value=time.time()),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        num_generations=3,
        max_inflight_tasks=6,
        vllm_server_url=f"http://{address}",
        max_tokens=10,
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        found = [samples.get(timeout=LIMIT_S) for _ in range(6)]
    finally:
        loop._loop.call_soon_threadsafe(loop._stop_event.set)
        while thread.is_alive():
            thread.join(0.01)
            while not samples.empty():
                samples.get()
    for sample in found:
        tokens = sample.input_ids.tolist()
        count = int(sample.completion_mask.sum())
        asked = tokenizer.apply_chat_template(sample.prompt, add_generation_prompt=True, return_dict=True)
        assert tokens[:-count] == asked["input_ids"]
        values, _ = logprobs(model, tokens)
        own = sample.old_log_probs[-count:].tolist()
        torch.testing.assert_close(own, values[-count:], atol=1e-4, rtol=0)
