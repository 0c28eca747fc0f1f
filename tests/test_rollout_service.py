"""Tests the stream of rollouts between a server and trainers, over gRPC, against plain decoding."""

import json
import threading

import pytest
from kit.rollout_servers import MAX_TOKENS, TrainerEnd, tiny_server
from kit.rollouts import decode_plainly, logprobs_of, prompts_of, tiny_policy
from kit.waiting import until

from aedit.spec_rollout.audit.statement import Origin, is_signed, statement_of
from aedit.spec_rollout.engine.engine import Engine
from aedit.spec_rollout.migration.sample_text import encode_sampling
from aedit.spec_rollout.sampling.samples import Rollout


def engine_of(model, rows=4):
    return Engine.of(model, rows=rows, max_tokens=MAX_TOKENS)


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
        assert not end.removed[-1].found or not end.removed[0].found
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
