"""Tests of streams of /inference/v1/generate, read by httpx: vLLM's events, tokens of the whole answer."""

import json
import socket

import httpx
import pytest
import torch
from kit.hosts import LIMIT_S, Steps
from kit.serving import byte_tokenizer, served, text_policy
from kit.waiting import until

from aedit.spec_rollout.http.server import HttpLimits
from aedit.spec_rollout.server import HostLimits

PATH = "/inference/v1/generate"
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return text_policy(tokenizer)


def asked(*, stream=True, options=None, **settings):
    """Return the body of a request."""
    body = {"token_ids": PROMPT, "sampling_params": settings, "request_id": "r1", "stream": stream}
    return body if options is None else body | {"stream_options": options}


def read_events(answer):
    """Yield the JSON values of the events, which must end with [DONE]."""
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    is_done = False
    for line in filter(None, answer.iter_lines()):
        assert not is_done, f"after [DONE]: {line}"
        data = line.removeprefix("data: ")
        is_done = data == "[DONE]"
        if not is_done:
            yield json.loads(data)
    assert is_done


def joined_spans(spans):
    """Return spans of versions, neighbours with one version as one."""
    found = []
    for span in spans:
        if found and found[-1]["version"] == span["version"]:
            assert found[-1]["end"] == span["start"]
            found[-1] = {**found[-1], "end": span["end"]}
        else:
            found.append(span)
    return found


def joined(parts):
    """Return the choice that the parts of one sample make."""
    *others, last = parts
    assert not any(part["finish_reason"] for part in others)
    return {
        "index": last["index"],
        "finish_reason": last["finish_reason"],
        "token_ids": [token for part in parts for token in part["token_ids"]],
        "logprobs": {"content": [entry for part in parts for entry in part["logprobs"]["content"]]},
        "weight_versions": joined_spans([span for part in parts for span in part["weight_versions"]]),
    }


def test_the_events_have_the_parts_of_the_whole_answer(model, tokenizer):
    settings = {"n": 3, "seed": 7, "max_tokens": 30, "logprobs": 2, "temperature": 0.8}
    with served(model, tokenizer) as (_, address), httpx.Client(base_url=f"http://{address}") as client:
        whole = client.post(PATH, json=asked(stream=False, **settings), timeout=LIMIT_S).json()
        body = asked(options={"include_usage": True}, **settings)
        with client.stream("POST", PATH, json=body, timeout=LIMIT_S) as answer:
            *events, last = read_events(answer)
        with client.stream("POST", PATH, json=asked(**settings), timeout=LIMIT_S) as answer:
            assert all(event["choices"] for event in read_events(answer)), "usage was not asked for"
    assert last == {"request_id": "r1", "choices": [], "usage": whole["usage"]}
    assert all(set(event) == {"request_id", "choices", "usage"} for event in events)
    assert {(event["request_id"], event["usage"]) for event in events} == {("r1", None)}
    choices = [choice for event in events for choice in event["choices"]]
    assert len(choices) == len(events)
    for choice in whole["choices"]:
        parts = [each for each in choices if each["index"] == choice["index"]]
        assert joined(parts) == choice


def test_greedy_tokens_of_a_stream_are_those_of_transformers(model, tokenizer):
    ids = torch.tensor([PROMPT])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    body = asked(temperature=0, max_tokens=20)
    with (
        served(model, tokenizer) as (_, address),
        httpx.stream("POST", f"http://{address}{PATH}", json=body, timeout=LIMIT_S) as answer,
    ):
        choices = [event["choices"][0] for event in read_events(answer)]
    assert [token for each in choices for token in each["token_ids"]] == made[0, len(PROMPT) :].tolist()
    assert choices[-1]["finish_reason"] in ("length", "stop")


def test_spans_of_a_stream_count_from_the_beginning_of_the_answer(model, tokenizer):
    steps, new = Steps(), text_policy(tokenizer, seed=3).state_dict()
    body = asked(max_tokens=40, ignore_eos=True, logprobs=0)
    with (
        served(model, tokenizer, between_steps=steps) as (service, address),
        httpx.stream("POST", f"http://{address}{PATH}", json=body, timeout=LIMIT_S) as answer,
    ):
        events, parts = read_events(answer), []
        steps.release(3)
        parts.append(next(events))  # while the sample waits for its next step
        swapped = service.host.swap("model", lambda: new, 1)
        steps.open()
        swapped.result(LIMIT_S)
        parts += events
    choice = joined([part["choices"][0] for part in parts])
    first, second = choice["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("0", 0, "1", 40)
    assert first["end"] == second["start"] > 0
    assert len(choice["token_ids"]) == 40


def test_a_client_that_goes_away_takes_its_samples_with_it(model, tokenizer):
    steps = Steps()
    with served(model, tokenizer, between_steps=steps) as (service, address):
        body = asked(n=2, max_tokens=100, ignore_eos=True)
        with httpx.stream("POST", f"http://{address}{PATH}", json=body, timeout=LIMIT_S):
            steps.wait()
        until(lambda: service.metrics.cancelled._value.get() == 1, "the departure")
        steps.open()
        until(lambda: service.host.status()["samples"] == 0, "the end of the samples")
        assert service.host.status()["tokens"] < 50


def test_a_stream_that_nobody_reads_is_cut(model, tokenizer):
    limits = HttpLimits(write_s=0.5, max_entries=1 << 30)
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    body = asked(n=128, max_tokens=100, logprobs=20, ignore_eos=True)
    with (
        served(model, tokenizer, limits=limits, rows=16) as (service, address),
        httpx.Client(transport=small) as client,
        client.stream("POST", f"http://{address}{PATH}", json=body, timeout=LIMIT_S),
    ):
        until(lambda: service.metrics.cancelled._value.get() == 1, "the cut", 60)
        until(lambda: service.host.status()["samples"] == 0, "the end of the samples")


def test_a_stream_that_is_aborted_or_refused_says_so(model, tokenizer):
    steps = Steps()
    with (
        served(model, tokenizer, between_steps=steps, rows=1, host_limits=HostLimits(max_waiting_public=2))
        as (service, address),
        httpx.Client(base_url=f"http://{address}") as client,
    ):  # fmt: skip
        with client.stream(
            "POST", PATH, json=asked(max_tokens=90, ignore_eos=True), timeout=LIMIT_S
        ) as answer:
            steps.wait()
            refused = client.post(PATH, json=asked(n=4), timeout=LIMIT_S)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert service.running.abort(["r1"]) == 1
            steps.open()
            *_, last = read_events(answer)
        assert last["choices"][0]["finish_reason"] == "abort"
