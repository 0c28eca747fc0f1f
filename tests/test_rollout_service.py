"""Tests the stream of rollouts between a server and trainers, over gRPC, against plain decoding."""

import json
import threading

import grpc
import pytest
from kit.rollout_servers import PATIENCE_S, Author, TrainerEnd, patient, tiny_server
from kit.rollouts import VOCABULARY, decode_plainly, logprobs_of, prompts_of, tiny_policy
from kit.waiting import until

from aedit.proto.rpc import HubRefused, new_secret
from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.audit import Origin, is_signed, statement_of
from aedit.spec_rollout.sampling import ROLLOUT_PROTOCOL, Rollout, Sampling, encode_sampling


def test_trainers_get_the_tokens_of_a_plain_engine_with_signed_ends_on_lines_of_their_own():
    models = {"line-a": tiny_policy(1), "line-b": tiny_policy(2)}
    prompts = prompts_of(12, group_size=3, max_new_tokens=20)
    with tiny_server() as server:
        ends = {line: TrainerEnd(server.address, line) for line in models}
        for end in ends.values():
            end.wait(lambda end=end: end.opened, "Opened")
            for prompt in prompts:
                end.add(prompt)
        assert not any(end.samples for end in ends.values())  # no weights yet
        for line, model in models.items():
            server.publish(line, model, 1)
        for line, end in ends.items():
            end.ends(len(prompts))
            wanted = decode_plainly(models[line], prompts)
            for prompt, tokens in zip(prompts, wanted, strict=True):
                got = end.samples[prompt.key]
                assert got.tokens == tokens
                assert got.versions == [1] * len(tokens)
                assert got.logprobs == pytest.approx(logprobs_of(models[line], prompt, tokens), abs=1e-9)
                assert got.order == ["tokens"] * (len(got.order) - 1) + ["ended"]
                assert_signed(server, end, line, prompt, got)
            assert end.rejected == []
            end.wait(lambda end=end: end.figures[-1].fixed_s + end.figures[-1].row_s > 0, "a measured step")
            end.wait(lambda end=end, wanted=wanted: generated(end) == sum(map(len, wanted)), "totals")
            end.close()


def generated(end):
    return json.loads(end.figures[-1].json)["rollout_tokens"]


def assert_signed(server, end, line, prompt, got, given=0):
    rollout = Rollout(prompt, got.tokens, got.logprobs, got.versions, finish_reason=got.ended.finish_reason)
    origin = Origin("run", line, "server")
    statement = statement_of(origin, rollout, encode_sampling(prompt.sampling), given=given)
    assert end.opened.public_key == server.identity.key.public
    assert is_signed(statement, got.ended.signature, end.opened.public_key)
    statement.line = "another"
    assert not is_signed(statement, got.ended.signature, end.opened.public_key)


def test_a_sample_continues_after_the_tokens_that_it_brings_and_the_statement_says_how_many():
    model = tiny_policy(1)
    (prompt,) = prompts_of(1, max_new_tokens=24)
    whole = decode_plainly(model, [prompt])[0]
    logprobs = logprobs_of(model, prompt, whole)
    begun = Rollout(prompt, whole[:9], list(logprobs[:9]), [1] * 9)
    with tiny_server() as server, TrainerEnd(server.address) as end:
        end.wait(lambda: end.opened, "Opened")
        server.publish("line", model, 2)
        end.add(begun.to_prompt())
        end.ends(1)
        got = end.samples[prompt.key]
        assert got.tokens == whole[9:]
        assert got.versions == [2] * len(whole[9:])
        # A log-probability travels to a server as float32, of which the statement has the hash.
        got.tokens, got.versions = whole, [1] * 9 + got.versions
        got.logprobs = begun.logprobs + got.logprobs
        assert_signed(server, end, "line", prompt, got, given=9)


def test_a_sample_that_is_taken_back_is_answered_after_its_tokens_and_may_come_again_at_once():
    model, going = tiny_policy(1), threading.Event()
    going.set()
    prompts = prompts_of(6, max_new_tokens=60)  # more than the rows
    with tiny_server(gate=lambda: going.wait(60)) as server, TrainerEnd(server.address) as end:
        end.wait(lambda: end.opened, "Opened")
        server.publish("line", model, 1)
        for prompt in prompts:
            end.add(prompt)
        end.wait(lambda: len(end.samples) >= 4, "tokens of the samples with a row")
        going.clear()
        for prompt in prompts:
            end.remove(prompt.key)
        end.add(prompts[0])
        end.remove((77, 77))
        going.set()
        end.wait(lambda: len(end.removed) == 7, "answers to removals")
        assert {(r.rollout, r.sample) for r in end.removed if r.found} >= {p.key for p in prompts[4:]}
        assert [r.found for r in end.removed if r.rollout == 77] == [False]
        wanted = decode_plainly(model, prompts)
        for prompt, tokens in zip(prompts[1:], wanted[1:], strict=True):
            got = end.samples[prompt.key]
            assert got.order[-1] == "removed"
            assert got.tokens == tokens[: len(got.tokens)]
        first = end.samples[prompts[0].key]
        end.wait(lambda: "ended" in first.order, "the end of the sample that came again")
        again = first.order.index("removed")
        assert first.tokens[-60:] == wanted[0]
        assert first.order[again:] == ["removed", *["tokens"] * (len(first.order) - again - 2), "ended"]
        assert until(lambda: server.host.status()["samples"] == 0, "no sample left")


def test_versions_of_an_author_reach_the_engine_and_nobody_else_may_write_the_line():
    models = {1: tiny_policy(1), 2: tiny_policy(2)}
    prompts = prompts_of(4, max_new_tokens=12)
    later = prompts_of(4, seed=1, max_new_tokens=12)
    author, thief = Author(), Author().publish(tiny_policy(3), 5)
    for version, model in models.items():
        author.publish(model, version)
    with tiny_server() as server:
        with pytest.raises(HubRefused, match="open a stream for it first"):
            author.give(server.address, 1, new_secret())
        with TrainerEnd(server.address) as end:
            end.wait(lambda: end.opened, "Opened")
            author.give(server.address, 1, end.secret)
            for prompt in prompts:
                end.add(prompt)
            end.ends(4)
            for prompt in later:
                end.add(prompt, min_version=2)  # comes first, and waits
            for secret in ("", new_secret()):
                with pytest.raises(HubRefused, match="belongs to another trainer") as refused:
                    thief.give(server.address, 5, secret)
                assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
            author.give(server.address, 2, end.secret)
            end.ends(8)
            for version, batch in ((1, prompts), (2, later)):
                for prompt, tokens in zip(batch, decode_plainly(models[version], batch), strict=True):
                    assert end.samples[prompt.key].tokens == tokens
                    assert end.samples[prompt.key].versions == [version] * len(tokens)
            with TrainerEnd(server.address) as other:  # another trainer
                assert other.end()[0] is grpc.StatusCode.PERMISSION_DENIED
            assert end.error is None
            with TrainerEnd(server.address, secret=end.secret) as again:
                again.wait(lambda: again.opened, "Opened")
                assert end.end() == (
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "a newer stream of this line has replaced this one",
                )
                again.add(prompts[0])
                again.ends(1)
                assert again.samples[prompts[0].key].versions == [2] * 12  # the weights were kept


def test_wrong_requests_are_rejected_for_good_by_name_and_harm_nobody():
    model = tiny_policy(1)
    (good,) = prompts_of(1, max_new_tokens=12)
    settings = json.loads(encode_sampling(Sampling(max_new_tokens=4)))
    token, span = [3], pb.Span(version=1, start=0, end=1)
    wrong = {
        "is outside the vocabulary": {"prompt": [VOCABULARY]},
        "the prompt is empty": {"prompt": []},
        "tokens are given, where 128": {"prompt": [1] * 500},
        "exceed max_tokens 128": {"prompt": [1] * 126},
        "sampling settings: JSONDecodeError": {"sampling": b"{"},
        "sampling settings: TypeError": {"sampling": b"[]"},
        "unexpected keyword argument 'seed'": {"sampling": json.dumps(settings | {"seed": 1}).encode()},
        "sampling settings: KeyError": {"sampling": b"{}"},
        "temperature must be a finite": {"sampling": json.dumps(settings | {"temperature": 1e999}).encode()},
        "Recursion": {"sampling": b"[" * 100_000},
        "top_logprobs is above": {"sampling": json.dumps(settings | {"top_logprobs": 1000}).encode()},
        "more than 256 stop": {"sampling": json.dumps(settings | {"stop_tokens": [1] * 300}).encode()},
        "allowed must be bool": {"sampling": json.dumps(settings | {"allowed": [1, 0]}).encode()},
        "1 tokens are given, with 0": {"tokens": token, "spans": [span]},
        "does not begin at": {"tokens": token, "logprobs": [-1.0], "spans": [span, span]},
        "is not finite": {"tokens": token, "logprobs": [float("nan")], "spans": [span]},
        "has ended already": {
            "tokens": [3] * 4,
            "logprobs": [-1.0] * 4,
            "spans": [pb.Span(version=1, end=4)],
        },
    }
    with tiny_server() as server, TrainerEnd(server.address) as end, TrainerEnd(server.address, "b") as other:
        for each in (end, other):
            each.wait(lambda each=each: each.opened, "Opened")
        server.publish("line", model, 1)
        server.publish("b", model, 1)
        for i, fields in enumerate(wrong.values()):
            usual = {"prompt": [1, 2], "sampling": json.dumps(settings).encode()}
            end.send(add=pb.Add(rollout=900 + i, **(usual | fields)))
        for each in (end, other):
            each.add(good)
            each.ends(1)
        end.wait(lambda: len(end.rejected) == len(wrong), "refusals")
        for i, (reason, rejected) in enumerate(zip(wrong, end.rejected, strict=True)):
            assert rejected.final, rejected
            assert (rejected.rollout, reason in rejected.reason) == (900 + i, True), (reason, rejected)
        assert end.samples[good.key].tokens == decode_plainly(model, [good])[0]
        assert other.rejected == []
        end.send(open=pb.Open())
        assert end.end()[0] is grpc.StatusCode.INVALID_ARGUMENT


class SilentCalls:
    """Calls of Generate that send nothing."""

    def __init__(self, address, count):
        each, never = 200, threading.Event().wait  # a server takes 256 on one connection
        self.channels = [grpc.insecure_channel(address) for _ in range(-(-count // each))]
        self.calls = [
            self.channels[i // each].stream_stream("/aedit.v1.Rollouts/Generate")(iter(never, 1))
            for i in range(count)
        ]

    def ends(self):
        """Wait until all have ended, and return why."""
        reasons = []
        for call in self.calls:
            with pytest.raises(grpc.RpcError) as raised:
                next(call)
            reasons.append(raised.value.details())
        return reasons

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for channel in self.channels:
            channel.close()


def test_calls_that_send_nothing_take_no_place_from_a_trainer():
    """500 of them, and they never give up theirs: those that are left end when no Open has come for long."""
    limits = patient(streams=8, streams_per_host=6)
    with tiny_server(limits=limits) as server, SilentCalls(server.address, 500) as silent:
        until(lambda: sum(call.done() for call in silent.calls) == 494, "the end of those beyond the limit")
        with TrainerEnd(server.address) as end:
            end.wait(lambda: end.opened, "Opened")
            model, prompts = tiny_policy(1), prompts_of(2, max_new_tokens=4)
            server.publish("line", model, 1)
            for prompt in prompts:
                end.add(prompt)
            end.ends(2)
            wanted = decode_plainly(model, prompts)
            assert [end.samples[prompt.key].tokens for prompt in prompts] == wanted
        server.clock.pass_patience()
        assert silent.ends().count(f"no open came within {PATIENCE_S:g} s") == 5  # the trainer took one place
        until(lambda: server.service.num_calls == 0, "the end of the calls")


def test_a_stream_beyond_the_limit_is_refused_if_all_others_are_open():
    limits = patient(streams=4, streams_per_host=2)
    with (
        tiny_server(limits=limits) as server,
        TrainerEnd(server.address, "a") as first,
        TrainerEnd(server.address, "b") as second,
    ):
        for end in (first, second):
            end.wait(lambda end=end: end.opened, "Opened")
        with TrainerEnd(server.address, "c") as third:
            full = "your host has 2 streams, which is the limit"
            assert third.end() == (grpc.StatusCode.RESOURCE_EXHAUSTED, full)


def test_a_stream_is_refused_with_its_reason():
    refused = {
        f"protocol {ROLLOUT_PROTOCOL - 1} was asked for, and this server speaks {ROLLOUT_PROTOCOL}": {
            "protocol": ROLLOUT_PROTOCOL - 1
        },
        "serves the run 'run', not 'another'": {"run": "another"},
        "expected recompute or finish": {"on_new_version": "restart"},
        "needs a secret of 64 characters": {"secret": "short"},
        "is not 1 to 64 letters": {"line": "a b"},
    }
    with tiny_server(limits=patient(lines=1, streams=2)) as server:
        for text, settings in refused.items():
            with TrainerEnd(server.address, **settings) as end:
                code, details = end.end()
                assert text in details
                assert code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
        assert server.host.lines() == []
        with TrainerEnd(server.address, "a") as first:
            first.wait(lambda: first.opened, "Opened")
            with TrainerEnd(server.address, "b") as second:
                full = "this server has 1 lines of trainers, which is its limit (--serve.lines)"
                assert second.end() == (grpc.StatusCode.RESOURCE_EXHAUSTED, full)
            with SilentCalls(server.address, 1):
                until(lambda: server.service.num_calls == 2, "the silent call")
                assert first.error is None
        until(lambda: server.service.num_calls == 0, "the end of the first stream")
        with TrainerEnd(server.address, "b") as again:  # takes the place of the unused line
            again.wait(lambda: again.opened, "Opened")
            assert server.host.lines() == ["b"]
            assert server.made["a"].closed


def no_samples(server):
    until(lambda: server.host.status()["samples"] == 0, "the end of the samples")


@pytest.mark.parametrize("is_full", [True, False])
def test_a_trainer_that_does_not_read_is_cut_off_and_others_go_on(is_full):
    """As too much waits to be sent, about 64 steps of four samples, or as it has read nothing for long."""
    unsent_bytes = 2**19 if is_full else 2**40
    model, prompts = tiny_policy(1), prompts_of(300, max_new_tokens=100, top_logprobs=60)
    with tiny_server(limits=patient(waiting=400, unsent_bytes=unsent_bytes)) as server:
        deaf = TrainerEnd(server.address, "deaf", reads=False)
        until(lambda: "deaf" in server.host.lines(), "the line")
        server.publish("deaf", model, 1)
        (call,) = server.service._calls
        with TrainerEnd(server.address, "other") as other:
            other.wait(lambda: other.opened, "Opened")
            server.publish("other", model, 1)
            for prompt in prompts:
                deaf.add(prompt)
            for prompt in prompts[:4]:
                other.add(prompt)
            other.ends(4)
            if is_full:
                until(lambda: server.service.num_streams == 1, "the cut")
            else:
                until(lambda: call.unread_for_s > 1.0, "a message that is not read")
        if not is_full:
            until(lambda: server.service.num_streams == 1, "the end of the other stream")
            server.clock.pass_patience()
        until(lambda: server.service.num_streams == 0, "the end of both streams")
        no_samples(server)
        with pytest.raises(grpc.RpcError) as cut:
            list(deaf.call)
        ends = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        assert cut.value.code() in ends  # the last one: its connection is shut before the status is read
        top = [json.loads(text) for text in other.samples[prompts[0].key].top if text]
        assert sum(map(len, top)) == 100
        assert {len(place) for part in top for place in part} == {60}
        deaf.close()


def test_a_trainer_that_says_nothing_is_ended_with_its_samples_and_its_line_is_closed_later():
    going = threading.Event()
    with tiny_server(limits=patient(waiting=4, version_s=1e9), gate=lambda: going.wait(60)) as server:
        with TrainerEnd(server.address) as end:
            end.wait(lambda: end.opened, "Opened")
            for prompt in prompts_of(20):
                end.add(prompt, min_version=3)
            end.wait(lambda: len(end.rejected) == 12, "refusals of samples beyond rows and waiting")
            assert all(not each.final and each.retry_after_s > 0 for each in end.rejected)
            assert "this stream has 8 samples, which is the limit" in end.rejected[0].reason
            assert server.host.status()["samples"] == 8
            server.clock.pass_patience()
            code, text = end.end()
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            assert text == f"nothing came from the trainer for {PATIENCE_S:g} s: send beat every 2 s"
            no_samples(server)
            assert not server.made["line"].closed
        until(lambda: server.service.status()["trainer_lines"]["line"]["streams"] == 0, "the unused line")
        server.clock.pass_patience()
        until(lambda: server.made["line"].closed, "the closed line")
        assert server.host.lines() == []
        assert server.lines.store.lines == ()
        going.set()


def test_a_sample_waits_for_its_version_for_a_limited_time_and_an_ending_server_says_so():
    model = tiny_policy(1)
    first, second = prompts_of(2)
    with tiny_server(limits=patient(version_s=1.0)) as server, TrainerEnd(server.address) as end:
        end.wait(lambda: end.opened, "Opened")
        server.publish("line", model, 1)
        end.add(first, min_version=7)
        end.wait(lambda: end.rejected, "the refusal")
        assert end.rejected[0].reason == "version 7 of the policy did not come within 1 s; version 1 is here"
        assert not end.rejected[0].final
        server.service.end()
        end.wait(lambda: end.figures[-1].ending, "the notice")
        end.add(second)  # taken back by the trainer, not dropped by the server
        end.ends(1)
        with TrainerEnd(server.address, "late") as late:
            assert late.end() == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "this server is ending: use another one",
            )
        server.service.close()
        assert end.end()[0] is grpc.StatusCode.FAILED_PRECONDITION
