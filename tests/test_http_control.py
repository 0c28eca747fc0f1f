"""Tests of the control routes: pause, new weights from a directory, checks before anything changes."""

import json
import os
import threading
import time

import pytest
import torch
from kit.hosts import LIMIT_S
from kit.serving import ask, byte_tokenizer, served, text_policy
from safetensors.torch import save_file

from aedit.spec_rollout.http import control, control_routes
from aedit.system import check_folder

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def place(tokenizer, tmp_path_factory):
    """Return a server with control routes, and the directory below which it reads weights."""
    root = tmp_path_factory.mktemp("weights")
    model = text_policy(tokenizer)
    with served(model, tokenizer, keys=("secret",), more_routes=control_routes(root)) as (service, address):
        yield service, address, root


def do(address, path, body=None, method="POST"):
    return ask(address, path, body if body is not None or method == "GET" else b"", method, KEY)


def greedy(address):
    body = {"prompt": "the quick", "max_tokens": 8, "temperature": 0, "return_token_ids": True, "logprobs": 0}
    answer = do(address, "/v1/completions", {**body, "echo": True})[2]
    return answer["choices"][0]["token_ids"], answer["choices"][0]["logprobs"]["token_logprobs"]


def expected(model, tokenizer):
    """Return tokens and log-probabilities of transformers for the same."""
    ids = torch.tensor([tokenizer("the quick")["input_ids"]])
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        logp = model(input_ids=made).logits[0, :-1].log_softmax(-1)
    return made[0, ids.shape[1] :].tolist(), logp.gather(1, made[0, 1:, None])[:, 0].tolist()


def test_new_weights_of_a_directory_generate_and_score_from_then_on(place, tokenizer):
    service, address, root = place
    new, folder = text_policy(tokenizer, seed=5), root / "step_5"
    new.save_pretrained(folder)
    before = service.engine.version
    status, _, answer = do(address, "/update_weights", {"weight_dir": str(folder)})
    assert (status, answer) == (200, {"status": "ok", "weight_version": str(before + 1)})
    assert do(address, "/weight_info", method="GET")[2] == {"weight_version": str(before + 1)}
    tokens, logprobs = greedy(address)
    exact, values = expected(new, tokenizer)
    assert tokens == exact
    torch.testing.assert_close(logprobs[1:], values, atol=1e-4, rtol=0)
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
    (choice,) = do(address, "/inference/v1/generate", body)[2]["choices"]
    assert choice["weight_versions"] == [{"version": str(before + 1), "start": 0, "end": 2}]


class Evil:
    """Object whose unpickling runs code."""

    def __reduce__(self):
        return (open, ("/nonexistent/evil", "w"))


def test_bad_weights_are_refused_and_change_nothing(place, tokenizer, tmp_path):
    _, address, root = place
    outside = tmp_path / "outside"
    good = text_policy(tokenizer, seed=9)
    good.save_pretrained(outside)
    (root / "link").symlink_to(outside)
    (root / "empty").mkdir()

    def saved(name, **changes):
        state = {**good.state_dict(), **changes}
        (root / name).mkdir()
        kept = {k: v.contiguous() for k, v in state.items() if v is not None}
        save_file(kept, root / name / "model.safetensors")

    norm = good.model.norm.weight
    saved("missing", **{"model.norm.weight": None})
    saved("unknown", extra=norm.clone())
    saved("shape", **{"model.norm.weight": norm[:4]})
    saved("infinite", **{"model.norm.weight": norm * torch.inf})
    (root / "pickle").mkdir()
    torch.save({**good.state_dict(), "evil": Evil()}, root / "pickle" / "pytorch_model.bin")
    (root / "damaged").mkdir()
    (root / "damaged" / "model.safetensors").write_bytes(b"\xff" * 100)
    before = greedy(address), do(address, "/weight_checker", {})[2]
    for name, reason in (
        (str(outside), "below --weights-root"),
        ("..", "below --weights-root"),
        (".", "below --weights-root"),
        ("link", "below --weights-root"),
        ("nowhere", "no directory"),
        ("a\0b", "no path"),
        ("empty", "no weights"),
        ("missing", "no weights for model.norm.weight"),
        ("unknown", "unknown weights extra"),
        ("shape", "with shape"),
        ("infinite", "not finite"),
        ("pickle", "no weights"),
        ("damaged", "cannot be read"),
    ):
        status, _, answer = do(address, "/update_weights", {"weight_dir": name})
        assert (status, answer["error"]["param"]) == (400, "weight_dir"), (name, answer)
        assert reason in answer["error"]["message"]
    assert do(address, "/update_weights", {})[0] == 400
    assert (greedy(address), do(address, "/weight_checker", {})[2]) == before


NAMES = (
    *("../outside/model.safetensors", "a/../../outside/model.safetensors", "./model.safetensors", "."),
    *("link.safetensors", "links/model.safetensors", "..\\outside\\model.safetensors", "C:model.safetensors"),
    *(
        "a\0b",
        "a" * 300,
        "a/" * 3000 + "b",
        "",
        "/etc/passwd",
        "\ud800",
        "pipe",
        "folder",
        5,
        None,
        ["a"],
        {},
    ),
)


@pytest.mark.parametrize("name", NAMES, ids=[f"{str(name)[:24]!a}" for name in NAMES])
def test_weights_that_an_index_names_are_read_from_its_directory_only(place, tokenizer, tmp_path, name):
    _, address, root = place
    outside, folder = root.parent / "outside", root / f"index-{tmp_path.name}"
    secret = text_policy(tokenizer, seed=21)
    secret.save_pretrained(outside)
    folder.mkdir()
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    if str(name).startswith("link"):
        (folder / "link.safetensors").symlink_to(outside / "model.safetensors")
        (folder / "links").symlink_to(outside)
    names = dict.fromkeys(secret.state_dict(), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    before = do(address, "/weight_checker", {})[2]
    status, _, answer = do(address, "/update_weights", {"weight_dir": folder.name})
    assert (status, answer["error"]["param"]) == (400, "weight_dir"), answer
    assert str(root.parent) not in answer["error"]["message"]
    assert do(address, "/weight_checker", {})[2] == before


def adapter(folder, outside):
    text = json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(outside)})
    (folder / "adapter_config.json").write_text(text)


def index_link(folder, outside):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").symlink_to(outside / "model.safetensors.index.json")


def link_within(folder, outside):
    (folder / "more").mkdir()
    (folder / "more" / "chat_template.jinja").symlink_to(outside / "config.json")


def pipe(folder, outside):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def deep_index(folder, outside):
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)


@pytest.mark.parametrize("harm", [adapter, index_link, link_within, pipe, deep_index])
def test_a_directory_that_leads_out_of_the_root_is_refused(place, tokenizer, tmp_path, harm):
    _, address, root = place
    folder, outside = root / f"harm-{harm.__name__}", tmp_path / "outside"
    secret = text_policy(tokenizer, seed=22)
    for each in (folder, outside):
        secret.save_pretrained(each)
    names = dict.fromkeys(secret.state_dict(), "part.safetensors")
    (outside / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    harm(folder, outside)
    before = do(address, "/weight_checker", {})[2]
    assert do(address, "/update_weights", {"weight_dir": folder.name})[0] == 400
    assert do(address, "/weight_checker", {})[2] == before


def test_a_link_that_is_put_there_after_the_check_is_not_followed(place, tokenizer, tmp_path, monkeypatch):
    _, address, root = place
    folder, outside = root / "later", tmp_path / "outside"
    for each in (folder, outside):
        text_policy(tokenizer, seed=23).save_pretrained(each)

    def check_then_replace(*args):
        check_folder(*args)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(outside / "model.safetensors")

    monkeypatch.setattr(control, "check_folder", check_then_replace)
    status, _, answer = do(address, "/update_weights", {"weight_dir": folder.name})
    assert (status, answer["error"]["param"]) == (400, "weight_dir"), answer
    assert "link to outside" in answer["error"]["message"]


def test_weights_in_several_files_are_those_of_one(place, tokenizer):
    _, address, root = place
    new = text_policy(tokenizer, seed=24)
    new.save_pretrained(root / "shards", max_shard_size="20KB")
    assert len(list((root / "shards").glob("*.safetensors"))) > 2
    assert do(address, "/update_weights", {"weight_dir": "shards"})[0] == 200
    tokens, logprobs = greedy(address)
    exact, values = expected(new, tokenizer)
    assert tokens == exact
    torch.testing.assert_close(logprobs[1:], values, atol=1e-4, rtol=0)


def test_checksums_tell_which_tensors_differ(place, tokenizer):
    _, address, _root = place
    first = do(address, "/weight_checker", {"action": "checksum"})[2]["checksums"]
    assert do(address, "/weight_checker", {"action": "compare", "baseline": first})[2]["equal"]
    service = place[0]
    model = service.engine.target.model
    changed = {k: v.clone() for k, v in model.state_dict().items()}
    changed["model.norm.weight"][0] += 1
    service.host.swap("model", lambda: changed, service.engine.version + 1).result(LIMIT_S)
    found = do(address, "/weight_checker", {"action": "compare", "baseline": first})[2]
    assert (found["equal"], found["different"]) == (False, ["model.norm.weight"])


def test_a_paused_server_keeps_requests_until_it_goes_on(place):
    service, address, _ = place
    assert do(address, "/pause?mode=keep")[0] == 200
    assert do(address, "/is_paused", method="GET")[2] == {"is_paused": True}
    answers = []
    thread = threading.Thread(target=lambda: answers.append(greedy(address)))
    thread.start()
    tokens = service.host.status()["tokens"]
    assert do(address, "/weight_checker", {})[0] == 200  # the thread works, but steps nothing
    assert service.host.status()["tokens"] == tokens
    assert not answers
    assert do(address, "/resume")[0] == 200
    thread.join(LIMIT_S)
    assert answers == [greedy(address)]


def test_abort_ends_requests_with_the_tokens_that_they_have(place):
    service, address, _ = place
    answers = []
    body = {"prompt": "the", "max_tokens": 100, "ignore_eos": True}
    for end in ("/pause?mode=abort", "/abort_requests"):
        do(address, "/pause")
        thread = threading.Thread(target=lambda: answers.append(do(address, "/v1/completions", body)))
        thread.start()
        while not service.host.status()["samples"]:
            thread.join(0.01)
        assert do(address, end)[0] == 200
        thread.join(LIMIT_S)
        do(address, "/resume")
    assert [answer[2]["choices"][0]["finish_reason"] for answer in answers] == ["abort", "abort"]


def test_abort_by_id_ends_the_requests_with_these_ids_and_no_other(place):
    service, address, _ = place
    routes = {
        "one": ("/v1/completions", {"prompt": "the"}),
        "two": ("/inference/v1/generate", {"token_ids": [5, 6]}),
        "three": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]}),
        "other": ("/v1/completions", {"prompt": "the"}),
    }
    answers = {}

    def send(name):
        path, body = routes[name]
        size = {"max_tokens": 30, "ignore_eos": True}
        body = body | ({"sampling_params": size} if "token_ids" in body else size)
        status, _, answer = do(address, path, body | {"request_id": name})
        assert status == 200, answer
        answers[name] = answer["choices"][0]

    do(address, "/pause")
    threads = [threading.Thread(target=send, args=(name,)) for name in routes]
    for thread in threads:
        thread.start()
    while service.host.status()["samples"] < len(routes):
        time.sleep(0.01)
    given = do(address, "/abort_requests", {"request_ids": ["one", "two", "three", "two", "absent"]})
    assert given[2] == {"status": "aborted", "requests": 3}
    for thread in threads[:3]:
        thread.join(LIMIT_S)
    assert set(answers) == {"one", "two", "three"}
    do(address, "/resume")
    threads[3].join(LIMIT_S)
    assert {name: answer["finish_reason"] for name, answer in answers.items()} == {
        **dict.fromkeys(("one", "two", "three"), "abort"),
        "other": "length",
    }
    assert not service.running._by_id, "nothing is kept of requests that are over"
    assert do(address, "/abort_requests", {"request_ids": ["one"]})[2]["requests"] == 0
    assert do(address, "/abort_requests", {"request_ids": "one"})[0] == 400


def test_other_control_routes_and_their_key(place):
    _, address, _ = place
    assert do(address, "/liveness", method="GET")[0] == 200
    assert do(address, "/get_world_size", method="GET")[2] == {"world_size": 1}
    assert do(address, "/reset_prefix_cache")[0] == 200
    assert "lines" in do(address, "/status", method="GET")[2]
    assert do(address, "/pause?mode=other")[0] == do(address, "/weight_checker", {"action": "x"})[0] == 400
    for path, body in (
        ("/pause?wait_for_inflight_requests=true", b""),  # it would be a pause of another kind
        ("/pause?mode=wait&timeout=5", b""),
        ("/pause?clear_cache=perhaps", b""),
        ("/pause", {"mode": "wait"}),
    ):
        assert do(address, path, body)[0] == 400, path
    assert do(address, "/is_paused", method="GET")[2] == {"is_paused": False}
    assert do(address, "/pause?clear_cache=true", {})[0] == do(address, "/resume")[0] == 200
    for path in ("/pause", "/resume", "/update_weights", "/abort_requests", "/weight_checker"):
        assert ask(address, path, b"", "POST")[0] == 401
