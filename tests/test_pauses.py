"""Tests of a pause that waits for the running samples: at the engine's host, and as a control route."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from kit.hosts import LIMIT_S, Steps, host_of, submit
from kit.rollouts import decode_plainly, prompts_of, tiny_policy
from kit.serving import ask, byte_tokenizer, served, text_policy
from kit.waiting import until

from aedit.spec_rollout.engine import Scoring
from aedit.spec_rollout.engine.scoring import PART_TOKENS
from aedit.spec_rollout.http import control_routes
from aedit.spec_rollout.server import PauseReplaced


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def test_running_samples_end_and_waiting_ones_start_after_the_pause(policy):
    steps, prompts, other = Steps(), prompts_of(3), tiny_policy(seed=1)
    with closing(host_of(rows=2, steps=steps)) as host:
        kept, _ = submit(host, prompts[:1])
        steps.release(2)
        ended = host.pause_after_running()
        assert host.is_paused
        kept += submit(host, prompts[1:2])[0]  # there is a row for it
        steps.release(2)
        assert not ended.done()
        steps.open()
        ended.result(LIMIT_S)
        assert [kept[0].result().tokens] == decode_plainly(policy, prompts[:1])
        late, _ = submit(host, prompts[2:])
        host.swap("a", other.state_dict, 1).result(LIMIT_S)
        assert host.status()["samples"] == 2
        assert not kept[1].begun.is_set()
        assert not late[0].begun.is_set()
        host.resume()
        assert not host.is_paused
        after = [kept[1].result(), late[0].result()]
        assert [each.tokens for each in after] == decode_plainly(other, prompts[1:])
        assert all(set(each.versions) == {1} for each in after)


def test_a_pause_ends_at_once_without_running_samples_and_takes_over_frozen_ones(policy):
    steps, prompts = Steps(), prompts_of(2)
    with closing(host_of(rows=2, steps=steps)) as host:
        for _ in range(2):
            host.pause_after_running().result(LIMIT_S)
        waiting, _ = submit(host, prompts[:1])
        host.pause_after_running().result(LIMIT_S)
        assert not waiting[0].begun.is_set()
        host.resume()
        steps.release(2)
        host.pause()
        ended = [host.pause_after_running() for _ in range(2)]
        steps.open()
        for each in ended:
            each.result(LIMIT_S)
        assert [waiting[0].result().tokens] == decode_plainly(policy, prompts[:1])


@pytest.mark.parametrize("change", ["resume", "pause"])
def test_another_change_of_the_pause_ends_the_wait(policy, change):
    steps = Steps()
    with closing(host_of(rows=1, steps=steps)) as host:
        kept, _ = submit(host, prompts_of(2))
        steps.release()
        ended = host.pause_after_running()
        getattr(host, change)()
        with pytest.raises(PauseReplaced, match="before the running samples had ended"):
            ended.result(LIMIT_S)
        steps.open()
        host.resume()
        assert [each.result().tokens for each in kept] == decode_plainly(policy, prompts_of(2))
        ended = host.pause_after_running()
        ended.result(LIMIT_S)
    assert host.error is None


def test_a_wait_fails_when_the_host_is_closed():
    steps = Steps()
    host = host_of(rows=1, steps=steps)
    submit(host, prompts_of(1))
    steps.wait()
    ended = host.pause_after_running()
    closer = threading.Thread(target=host.close)
    closer.start()
    until(lambda: host._is_closing, "the order to close")
    steps.open()
    closer.join(LIMIT_S)
    with pytest.raises(RuntimeError, match="the server is ending"):
        ended.result(LIMIT_S)


def test_a_text_that_is_scored_in_part_is_scored_to_its_end_and_the_next_one_waits():
    steps = Steps()
    text = [i % 7 for i in range(2 * PART_TOKENS + 5)]
    with closing(host_of(rows=1, steps=steps)) as host:
        first, second = (host.score("a", Scoring(text)) for _ in range(2))
        steps.release(1)
        sample, _ = submit(host, prompts_of(1))  # steps go on after the first text
        steps.release(1)
        ended = host.pause_after_running()
        steps.open()
        ended.result(LIMIT_S)
        sample[0].result()
        assert first.done()
        assert not second.done()
        host.resume()
        assert second.result(LIMIT_S).logprobs == first.result(LIMIT_S).logprobs


# --- the route


@pytest.fixture
def place(tmp_path):
    """Return a server with one row whose steps the test releases, and the directory of weights."""
    tokenizer, steps = byte_tokenizer(), Steps()
    routes = control_routes(tmp_path)
    options = {"rows": 1, "between_steps": steps, "more_routes": routes}
    with (
        served(text_policy(tokenizer), tokenizer, **options) as (service, address),
        ThreadPoolExecutor() as pool,
    ):

        def do(path, body=None, method="POST"):
            return pool.submit(ask, address, path, b"" if body is None and method == "POST" else body, method)

        try:
            yield service, steps, do
        finally:
            steps.open()
            do("/resume").result(LIMIT_S)


def completion(prompt):
    return {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "seed": 1, "return_token_ids": True}


def test_the_route_answers_when_no_sample_runs_and_weights_change_before_the_queued_ones(place, tmp_path):
    service, steps, do = place
    new = text_policy(byte_tokenizer(), seed=5)
    new.save_pretrained(tmp_path / "new")
    running = do("/v1/completions", completion("a"))
    steps.release(2)
    pause = do("/pause?mode=wait")
    until(lambda: service.host.is_paused, "the pause")
    queued = do("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 3}})
    until(lambda: service.host.status()["samples"] == 2, "the queued sample")
    assert not pause.done()
    steps.open()
    assert pause.result(LIMIT_S)[::2] == (200, {"status": "paused", "mode": "wait"})
    (choice,) = running.result(LIMIT_S)[2]["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 20)
    assert do("/is_paused", method="GET").result(LIMIT_S)[2] == {"is_paused": True}
    assert do("/update_weights", {"weight_dir": "new"}).result(LIMIT_S)[0] == 200
    assert not queued.done()
    assert do("/resume").result(LIMIT_S)[0] == 200
    (choice,) = queued.result(LIMIT_S)[2]["choices"]
    assert {span["version"] for span in choice["weight_versions"]} == {"1"}


def test_the_route_says_when_samples_run_on_after_its_deadline(place):
    service, steps, do = place
    running = do("/v1/completions", completion("a"))
    steps.release(2)
    for _ in range(2):  # asked again, it waits again
        status, _, answer = do("/pause?mode=wait&timeout_s=0.05").result(LIMIT_S)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        assert answer["error"]["message"].startswith("samples that still run after 0.05 s: 1. They go on")
    assert service.host.is_paused
    waiting = do("/pause?mode=wait")
    until(lambda: len(service.host._pausing) == 3, "the third request")
    assert do("/resume").result(LIMIT_S)[0] == 200
    status, _, answer = waiting.result(LIMIT_S)
    assert (status, answer["error"]["code"]) == (409, "pause_replaced")
    abort = do("/pause?mode=abort")
    until(lambda: service.host.is_paused, "the pause")
    steps.open()
    assert abort.result(LIMIT_S)[0] == 200
    assert running.result(LIMIT_S)[2]["choices"][0]["finish_reason"] == "abort"
    for query in ("mode=wait&timeout_s=0", "mode=wait&timeout_s=x", "mode=wait&timeout_s=nan", "timeout_s=1"):
        status, _, answer = do(f"/pause?{query}").result(LIMIT_S)
        assert (status, answer["error"]["param"]) == (400, "timeout_s")


def test_a_server_that_ends_takes_no_pause(place):
    service, steps, do = place
    steps.open()
    service.host.close()
    for mode in ("wait", "abort"):
        status, _, answer = do(f"/pause?mode={mode}").result(LIMIT_S)
        assert (status, answer["error"]["code"]) == (503, "ending")
