"""Tests of the engine's thread: order, priorities, cancellation, limits, and mistakes that harm no other."""

import contextlib
import itertools
import threading
from dataclasses import replace

import pytest
import torch
from kit.hosts import LIMIT_S, Kept, Steps, host_of, submit
from kit.rollouts import decode_plainly, logprobs_of, prompts_of, tiny_policy
from kit.waiting import until

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import KVMemoryError
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.server import DeadlinePassed, HostEnding, HostLimits, LineClosed, Overloaded
from aedit.spec_rollout.server.tickets import Priority


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture
def closing():
    with contextlib.ExitStack() as stack:
        yield lambda host: stack.callback(host.close) and host


def test_samples_of_many_threads_are_those_of_plain_decoding(policy, closing):
    host, prompts = closing(host_of(rows=3)), prompts_of(9, group_size=3)
    kept, _ = submit(host, prompts)
    rollouts = [each.result() for each in kept]
    assert [rollout.tokens for rollout in rollouts] == decode_plainly(policy, prompts)
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        torch.testing.assert_close(rollout.logprobs, logprobs_of(policy, prompt, rollout.tokens))
    assert [each.texts for each in kept] == [rollout.tokens for rollout in rollouts]
    assert host.drain(LIMIT_S)
    assert host.status()["samples"] == 0
    assert host.status()["tokens"] == sum(len(rollout.tokens) for rollout in rollouts)


def test_samples_of_the_run_take_the_rows_of_public_ones_which_lose_no_token(policy, closing):
    steps = Steps()
    host, prompts = closing(host_of(steps=steps)), prompts_of(6)
    public, _ = submit(host, prompts[:3])
    steps.release(3)
    assert [len(each.texts) for each in public] == [3, 3, 0]
    run, _ = submit(host, prompts[3:], priority=Priority.RUN)
    steps.release(2)  # the step that waited is still one of public samples
    assert [len(each.texts) for each in public] == [4, 4, 0]
    assert [len(each.texts) for each in run] == [1, 1, 0]
    steps.open()
    assert [each.result().tokens for each in public + run] == decode_plainly(policy, prompts)


def test_samples_of_the_run_that_fit_leave_public_ones_their_rows(policy, closing):
    steps = Steps()
    host, prompts = closing(host_of(rows=3, steps=steps)), prompts_of(3)
    public, _ = submit(host, prompts[:2])
    steps.release()
    run, _ = submit(host, prompts[2:], priority=Priority.RUN)
    steps.release(2)
    assert [len(each.texts) for each in public + run] == [3, 3, 1]
    steps.open()


def test_two_samples_with_one_key_come_one_after_the_other_and_are_equal(policy, closing):
    host, prompt = closing(host_of(rows=4)), prompts_of(1)[0]
    kept, _ = submit(host, [prompt, prompt, prompt])
    assert [each.result().tokens for each in kept] == 3 * decode_plainly(policy, [prompt])


def test_a_cancelled_sample_ends_between_two_steps_and_others_go_on(policy, closing):
    steps = Steps()
    host, prompts = closing(host_of(steps=steps)), prompts_of(4)
    kept, tickets = submit(host, prompts)
    steps.release(2)
    host.cancel(tickets[0])
    host.cancel(tickets[3])  # it waits
    steps.release()
    assert kept[0].result().finish_reason == kept[3].result().finish_reason == "abort"
    assert len(kept[0].result().tokens) == 3
    assert kept[3].result().tokens == []
    host.cancel(tickets[0])
    steps.open()
    expected = decode_plainly(policy, prompts)
    assert [kept[i].result().tokens for i in (1, 2)] == expected[1:3]
    assert kept[0].result().tokens == expected[0][:3]


@pytest.mark.parametrize("end", ["cancel", "abort_all", "deadline"])
@pytest.mark.parametrize("is_paused", [False, True])
def test_the_figures_of_a_line_are_right_after_its_samples_have_ended_by_no_step(closing, end, is_paused):
    now_s = itertools.count(0.0, 1e-6)  # less than `REFRESH_S` between steps
    later = [0.0]
    host = closing(host_of(rows=4, clock=lambda: next(now_s) + later[0]))

    long = replace(prompts_of(1)[0], sampling=Sampling(max_new_tokens=50, stop_tokens=()))
    prompts = [replace(long, rollout=number) for number in range(4)]
    steps = Steps()
    host.open("b", lambda: Engine.of(tiny_policy(), rows=4, max_tokens=64), between_steps=steps)
    kept = [Kept() for _ in prompts]
    tickets = [host.submit("b", p, k, deadline_s=30.0) for p, k in zip(prompts, kept, strict=True)]
    later[0] = 1.0
    steps.release(2)
    assert host.status()["lines"]["b"]["running"] == 4
    if is_paused:
        host.pause()
        steps.open()
        until(lambda: host.status()["lines"]["b"]["running"] == 4, "the figures of a paused line")
    if end == "cancel":
        for ticket in tickets:
            host.cancel(ticket)
    elif end == "abort_all":
        host.abort_all("b")
    else:
        later[0] = 31.0
        host.call("a", lambda engine: None)  # wakes the thread
    steps.open()
    for each in kept:
        assert each.over.wait(LIMIT_S)
    found = ("running", "waiting", "public_samples", "run_samples")
    until(lambda: not any(host.status()["lines"]["b"][name] for name in found), "figures without samples")
    host.resume()


def test_a_sample_fails_at_its_deadline_wherever_it_is(policy, closing):
    now = [0.0]
    steps = Steps()
    host, prompts = closing(host_of(rows=1, steps=steps, clock=lambda: now[0])), prompts_of(3)
    kept, _ = submit(host, prompts[:2], deadline_s=5.0)
    later, _ = submit(host, prompts[2:], deadline_s=500.0)
    steps.release()
    now[0] = 5.0
    steps.release(2)
    for each in kept:
        with pytest.raises(DeadlinePassed):
            each.result()
    steps.open()
    assert [later[0].result().tokens] == decode_plainly(policy, prompts[2:])


def test_full_queues_refuse_each_priority_apart_and_take_samples_again_later(policy, closing):
    steps = Steps()
    limits = HostLimits(max_waiting_public=2, max_waiting_run=1, max_waiting_tokens=30)
    host, prompts = closing(host_of(rows=1, limits=limits, steps=steps)), prompts_of(5)
    kept, _ = submit(host, prompts[:1])
    steps.wait()
    kept += submit(host, prompts[1:3])[0]
    with pytest.raises(Overloaded, match="max_waiting_public 2: so many") as refused:
        submit(host, prompts[3:4])
    assert refused.value.retry_after_s >= 1
    kept += submit(host, prompts[3:4], priority=Priority.RUN)[0]
    with pytest.raises(Overloaded, match="max_waiting_run 1"):
        submit(host, prompts[4:], priority=Priority.RUN)
    assert host.status()["waiting_public"] == 2
    assert host.status()["waiting_run"] == 1
    steps.open()
    assert [each.result().tokens for each in kept] == decode_plainly(policy, prompts[:4])
    kept, _ = submit(host, prompts[4:])
    assert [kept[0].result().tokens] == decode_plainly(policy, prompts[4:])


def test_the_tokens_that_wait_are_limited(closing):
    steps = Steps()
    host = closing(host_of(rows=1, limits=HostLimits(max_waiting_tokens=30), steps=steps))
    prompt = Prompt(tokens=(1,) * 20, sampling=Sampling(max_new_tokens=4))
    submit(host, [prompt])
    steps.wait()
    submit(host, [prompt])
    with pytest.raises(Overloaded, match="max_waiting_tokens 30: 40 tokens would wait"):
        submit(host, [prompt])
    steps.open()


def test_a_request_that_cannot_be_served_is_refused_at_once(closing):
    host, prompt = closing(host_of()), prompts_of(1)[0]
    with pytest.raises(ValueError, match="token 64 is outside the vocabulary"):
        submit(host, [replace(prompt, tokens=(64,))])
    with pytest.raises(ValueError, match="exceed max_tokens 64"):
        submit(host, [replace(prompt, sampling=Sampling(max_new_tokens=70))])
    with pytest.raises(LineClosed, match="there is no line 'b'; open lines: 'a'"):
        host.submit("b", prompt, Kept())
    assert host.status()["samples"] == 0


class Forbidding:
    """Constraint that allows nothing after so many tokens."""

    def __init__(self, after):
        self.after = after

    def allowed(self, tokens):
        return None if len(tokens) < self.after else []


def test_a_sample_without_a_next_token_fails_alone(policy, closing):
    host, prompts = closing(host_of(rows=3)), prompts_of(3)
    sampling = replace(prompts[1].sampling, constraint=Forbidding(2))
    bad = replace(prompts[1], sampling=sampling)
    kept, _ = submit(host, [prompts[0], bad, prompts[2]])
    with pytest.raises(ValueError, match="no next token for rollout 1/1"):
        kept[1].result()
    assert len(kept[1].texts) == 2
    expected = decode_plainly(policy, prompts)
    assert [kept[i].result().tokens for i in (0, 2)] == [expected[0], expected[2]]


def test_a_sample_for_which_memory_does_not_suffice_fails_alone(policy, closing, monkeypatch):
    host, prompts = closing(host_of(rows=2)), prompts_of(3)
    engine = host.engine("a")
    step, long = engine.step, replace(prompts[1], sampling=Sampling(max_new_tokens=30))

    def short_of_memory():
        if [each.prompt.key for each in engine.running] == [long.key]:
            raise KVMemoryError("no memory for one sample")
        return step()

    monkeypatch.setattr(engine, "step", short_of_memory)
    kept, _ = submit(host, [prompts[0], long, prompts[2]])
    with pytest.raises(KVMemoryError):
        kept[1].result()
    expected = decode_plainly(policy, prompts)
    assert [kept[i].result().tokens for i in (0, 2)] == [expected[0], expected[2]]


def test_a_receiver_that_raises_harms_no_other_sample(policy, closing):
    host, prompts = closing(host_of()), prompts_of(3)

    class Raising(Kept):
        def tokens(self, rollout, start):
            raise OSError("gone")

    host.submit("a", prompts[0], Raising())
    kept, _ = submit(host, prompts[1:])
    assert [each.result().tokens for each in kept] == decode_plainly(policy, prompts[1:])
    assert host.drain(LIMIT_S)


def test_the_death_of_the_thread_is_reported_to_all_and_later_requests_are_refused(monkeypatch):
    steps = Steps()
    host, prompts = host_of(rows=1, steps=steps), prompts_of(2)
    kept, tickets = submit(host, prompts)
    steps.release()
    done = host.swap("a", tiny_policy().state_dict, 1)

    def broken():
        raise RuntimeError("device lost")

    monkeypatch.setattr(host.engine("a"), "step", broken)
    steps.open()
    for each in kept:
        with pytest.raises(RuntimeError, match=r"thread has died: .*device lost"):
            each.result()
    with pytest.raises(RuntimeError, match="device lost"):
        done.result(LIMIT_S)
    with pytest.raises(RuntimeError, match="the engine's thread has died"):
        submit(host, prompts)
    host.cancel(tickets[0])
    assert host.status()["error"]
    assert host.drain(0.0)
    host.close()


def test_new_weights_come_between_two_steps_and_bad_ones_change_nothing(policy, closing):
    steps = Steps()
    host, prompt = closing(host_of(steps=steps)), prompts_of(1)[0]
    other = tiny_policy(seed=1)
    kept, _ = submit(host, [prompt])
    steps.release(3)
    bad = host.swap("a", lambda: {"no such weight": torch.zeros(1)}, 1)
    done = host.swap("a", lambda: {k: v.clone() for k, v in other.state_dict().items()}, 2)
    prepared(host)
    steps.open()
    with pytest.raises(ValueError, match="no such weight"):
        bad.result(LIMIT_S)
    done.result(LIMIT_S)
    rollout = kept[0].result()
    assert rollout.versions == [0] * 4 + [2] * 4
    first = decode_plainly(policy, [prompt])[0][:4]
    assert rollout.tokens[:4] == first
    moved = replace(prompt, tokens=(*prompt.tokens, *first), sampling=Sampling(max_new_tokens=4))
    assert rollout.tokens[4:] == decode_plainly(other, [moved])[0]


def test_weights_are_prepared_while_the_engine_steps_and_one_version_after_the_other(closing):
    host, policies = closing(host_of(rows=3)), {n: tiny_policy(seed=n) for n in range(4)}
    begun, go = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go.wait(LIMIT_S)
        return policies[1].state_dict()

    swaps = [host.swap("a", slow, 1)]
    assert begun.wait(LIMIT_S)
    swaps += [host.swap("a", policies[n].state_dict, n) for n in (2, 3)]
    kept, _ = submit(host, prompts_of(3))
    for each in kept:
        assert set(each.result().versions) == {0}, "the engine does not wait"
    go.set()
    for swap in swaps:
        swap.result(LIMIT_S)
    assert host.engine("a").version == 3
    kept, _ = submit(host, prompts_of(3, seed=1))
    assert [each.result().tokens for each in kept] == decode_plainly(policies[3], prompts_of(3, seed=1))
    back = host.swap("a", policies[2].state_dict, 3)
    with pytest.raises(ValueError, match="version 3 is not above version 3"):
        back.result(LIMIT_S)
    with pytest.raises(ValueError, match="must be recompute or finish, got 'pause'"):
        host.swap("a", dict, 4, "pause")


def test_finish_ends_samples_with_old_weights_beside_new_ones_and_a_third_version_waits(closing):
    steps, clock = Steps(), itertools.count().__next__  # so that no figure is too new to be copied
    host = closing(host_of(rows=2, steps=steps, clock=clock))
    policies = {n: tiny_policy(seed=n) for n in range(3)}
    old, _ = submit(host, prompts_of(2))
    steps.release(3)
    assert host.status()["lines"]["a"]["spare_weight_bytes"] == 0
    first = host.swap("a", policies[1].state_dict, 1, "finish")
    prepared(host)
    new, tickets = submit(host, prompts_of(3, seed=1), min_version=1)
    steps.release(2)
    first.result(LIMIT_S)
    status = host.status()["lines"]["a"]
    assert (status["version"], status["finishing_samples"], status["running"]) == (1, 2, 2)
    assert status["spare_weight_bytes"] == sum(p.nbytes for p in policies[1].parameters())
    third = host.swap("a", policies[2].state_dict, 2, "finish")
    host.cancel(tickets[1])
    steps.open()
    for kept, n, prompts in ((old, 0, prompts_of(2)), (new, 1, prompts_of(3, seed=1))):
        results = [each.result() for each in kept]
        plain = decode_plainly(policies[n], prompts)
        for rollout, tokens in zip(results, plain, strict=True):
            if rollout.finish_reason == "abort":
                assert rollout is results[1]
                continue
            assert set(rollout.versions) <= {n, 2}, "the last one may start after the third version"
            if set(rollout.versions) == {n}:
                assert rollout.tokens == tokens
    assert [r.result().versions for r in old] == [[0] * 8] * 2
    third.result(LIMIT_S)
    kept, _ = submit(host, prompts_of(3, seed=2))
    assert [each.result().tokens for each in kept] == decode_plainly(policies[2], prompts_of(3, seed=2))
    assert host.status()["lines"]["a"]["finishing_samples"] == 0


def test_a_line_that_is_closed_while_weights_are_prepared_fails_its_swaps(closing):
    host, begun, go = closing(host_of()), threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go.wait(LIMIT_S)
        return tiny_policy(seed=1).state_dict()

    swaps = [host.swap("a", slow, n) for n in (1, 2)]
    assert begun.wait(LIMIT_S)
    host.close_line("a")
    for swap in swaps:
        with pytest.raises(LineClosed):
            swap.result(LIMIT_S)
    go.set()


def prepared(host):
    """Wait until the next weights of line a have been prepared."""
    until(lambda: host._lines["a"].weights.is_prepared, "the preparation of weights")


def test_a_sample_waits_for_the_version_it_asks_for(closing):
    host, prompt = closing(host_of()), prompts_of(1)[0]
    other = tiny_policy(seed=1)
    kept, _ = submit(host, [prompt], min_version=3)
    submit(host, [replace(prompt, rollout=99)])[0][0].result()
    assert not kept[0].begun.is_set()
    host.swap("a", other.state_dict, 3)
    assert [kept[0].result().tokens] == decode_plainly(other, [prompt])


def test_pause_stops_all_steps_and_resume_goes_on(policy, closing):
    host, prompts = closing(host_of(model=policy)), prompts_of(3)
    host.pause()
    kept, _ = submit(host, prompts)
    host.swap("a", policy.state_dict, 1).result(LIMIT_S)  # the thread works, but steps nothing
    assert host.is_paused
    assert not any(each.begun.is_set() for each in kept)
    host.resume()
    assert [each.result().tokens for each in kept] == decode_plainly(tiny_policy(), prompts)
    host.pause()
    kept, _ = submit(host, prompts)
    host.abort_all()
    assert [each.result().finish_reason for each in kept] == ["abort"] * 3


def test_lines_take_turns_and_lines_of_the_run_come_first(closing):
    order = []
    host = closing(host_of(limits=HostLimits(max_lines=3, public_every=4), steps=lambda: order.append("a")))
    for name in "bc":
        engine = Engine.of(tiny_policy(), rows=2, max_tokens=64)
        host.open(name, lambda engine=engine: engine, between_steps=lambda name=name: order.append(name))
    host.pause()
    prompts, kept = prompts_of(3, max_new_tokens=9), [Kept() for _ in "abc"]
    for name, prompt, receiver in zip("abc", prompts, kept, strict=True):
        priority = Priority.RUN if name == "c" else Priority.PUBLIC
        host.submit(name, prompt, receiver, priority=priority)
    host.resume()
    for each in kept:
        each.result()
    assert "".join(order) == "cccacccbccca" + "ba" * 7 + "b"
    with pytest.raises(ValueError, match="max_lines 3"):
        host.open("d", tiny_policy)
    host.close_line("c")
    until(lambda: host.lines() == ["a", "b"], "the end of line c")
    with pytest.raises(LineClosed):
        host.submit("c", prompts[0], Kept())


def test_a_closed_line_lets_its_samples_fail(policy, closing):
    steps = Steps()
    host, prompts = closing(host_of(rows=1, steps=steps)), prompts_of(2)
    kept, _ = submit(host, prompts)
    steps.release()
    host.close_line("a")
    steps.open()
    for each in kept:
        with pytest.raises(LineClosed):
            each.result()


def test_the_idle_window_is_open_exactly_while_there_is_no_request(closing):
    log = []

    @contextlib.contextmanager
    def window(cause):
        log.append(cause)
        yield
        log.append("end")

    host, prompt = host_of(), prompts_of(1)[0]
    host.idle = window
    submit(host, [prompt])[0][0].result()
    until(lambda: log[-1:] == ["no requests"], "the window")
    submit(host, [prompt])[0][0].result()
    until(lambda: log[-2:] == ["end", "no requests"], "the next window")
    host.close()
    assert log == ["no requests", "end"] * (len(log) // 2)
    with pytest.raises(HostEnding):
        submit(host, [prompt])


def test_samples_that_are_here_at_the_end_fail_and_no_new_ones_come_in_while_it_drains(policy):
    steps = Steps()
    host, prompts = host_of(rows=1, steps=steps), prompts_of(2)
    kept, _ = submit(host, prompts)
    steps.wait()
    assert not host.drain(0.0)
    with pytest.raises(HostEnding):
        submit(host, prompts)
    steps.open()
    assert host.drain(LIMIT_S)
    assert [each.result().tokens for each in kept] == decode_plainly(policy, prompts)
    host.close()


def test_close_lets_unfinished_samples_fail(policy):
    host = host_of()
    host.pause()
    kept, _ = submit(host, prompts_of(2))
    host.close()
    for each in kept:
        with pytest.raises(HostEnding):
            each.result()
