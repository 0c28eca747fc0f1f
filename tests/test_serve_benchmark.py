"""Tests that the serving benchmark counts, compares and judges as it says. No test asserts a timing."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from benchmarks import serve
from benchmarks.programs.serve_attackers import KINDS, Attack, Attacker
from benchmarks.programs.serve_load import Clients, Load, Seen, prompt_of
from benchmarks.serve import OURS, TRANSFORMERS, Attacked, Memory, Overload, Turns

LOAD = Load(
    url="", model="m", clients=2, seconds=60.0, vocabulary=50, prompt=(2, 4), max_tokens=3, most_requests=4
)
OK = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(text="", reason=None):
    return "data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": reason}]}) + "\n\n"


ANSWER = OK + event("t1") + event(" t2 t3") + event("", "length") + "data: [DONE]\n\n"
REFUSAL = "HTTP/1.1 429 No\r\n{}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}"


@asynccontextmanager
async def server(answers):
    """Serve the answers in turn, the last one for ever; yields the address and the requests."""
    requests, left = [], list(answers)

    async def serve(reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
            length = int(lengths[0].split(b":")[1]) if lengths else 0
            requests.append((head, b""))
            body = await reader.readexactly(min(length, 100_000))
            requests[-1] = head, body
            writer.write((left.pop(0) if len(left) > 1 else left[0]).encode())
            await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            requests.append((b"broken", b""))
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", requests


def loaded(*answers, **changes):
    async def run():
        async with server(answers) as (url, requests):
            return await Clients(replace(LOAD, url=url, **changes)).run(), requests

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_clients_count_each_token_and_send_prompts_of_their_own():
    seen, requests = loaded(ANSWER, sends_seed=True)
    assert (seen.finished, seen.tokens, seen.refused, seen.failures) == (4, 12, 0, [])
    assert (len(seen.first_s), len(seen.gaps_s)) == (4, 4)  # two pieces of text each
    bodies = [json.loads(body) for _, body in requests]
    assert len({body["prompt"] for body in bodies}) == len({body["seed"] for body in bodies}) == 4
    assert bodies[0]["prompt"] == prompt_of(LOAD, 0, 0)
    assert all(2 <= len(body["prompt"].split()) <= 4 for body in bodies)
    assert {(body["max_tokens"], body["temperature"], body["stream"]) for body in bodies} == {(3, 1.0, True)}
    assert set(seen.texts.values()) == {"t1 t2 t3"}


def test_a_refused_request_is_sent_again_after_the_wait_that_it_was_told():
    refused = [REFUSAL.format("Retry-After: 0.01\r\n"), REFUSAL.format("Retry-After: 0\r\n")]
    seen, requests = loaded(*refused, ANSWER, clients=1, most_requests=1)
    assert (seen.finished, seen.refused, seen.waits_s, seen.failures) == (1, 2, [0.01, 0.0], [])
    assert len({body for _, body in requests}) == 1
    assert len(requests) == 3


def test_a_client_that_is_told_to_wait_beyond_the_end_does_not_ask_again():
    seen, requests = loaded(REFUSAL.format("Retry-After: 60\r\n"), clients=2, most_requests=99, seconds=0.5)
    assert (seen.finished, seen.refused, len(requests)) == (0, 2, 2)


def test_a_refusal_without_a_wait_is_seen():
    seen, _ = loaded(REFUSAL.format(""), clients=1, most_requests=1, seconds=0.5)
    assert (seen.finished, seen.refused, seen.waits_s) == (0, 1, [])


@pytest.mark.parametrize(
    "broken",
    [
        OK + event("t1"),
        OK + event("t1") + "data: [DONE]\n\n",
        OK + event("t1") + 'data: {"error": {"message": "x"}}\n\n',
        "HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
        "",
    ],
)
def test_an_answer_without_an_end_is_a_failure(broken):
    seen, _ = loaded(broken, clients=1, most_requests=1)
    assert (seen.finished, len(seen.failures), seen.tokens) == (0, 1, 0)


def test_an_answer_that_is_left_at_the_end_counts_with_what_has_come():
    async def run():
        waiting = asyncio.Event()

        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write((OK + event("t1") + event(" t2 t3")).encode())
            await waiting.wait()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            seen = await Clients(replace(LOAD, url=url, clients=1, seconds=2.0, leaves=True)).run()
            waiting.set()
        return seen

    seen = asyncio.run(asyncio.wait_for(run(), 60))
    assert (seen.finished, seen.tokens, len(seen.first_s), seen.failures) == (0, 3, 1, [])


@pytest.mark.parametrize("kind", KINDS)
def test_attackers_do_what_their_name_says(kind):
    async def run():
        # A stream that does not end, so that somebody leaves it.
        answer = OK + event("t1") if kind == "abandoned" else "HTTP/1.1 400 No\r\nContent-Length: 0\r\n\r\n"
        async with server([answer]) as (url, requests):
            attack = Attack(url=url, control_url=url, model="m", kind=kind, seconds=0.3, rate_hz=10.0)
            return await Attacker(attack).run(), list(requests)

    outcome, requests = asyncio.run(asyncio.wait_for(run(), 60))
    assert sum(outcome.statuses.values()) == outcome.begun > 0
    heads = [head.decode("latin-1") for head, _ in requests]
    if kind == "abandoned":
        assert set(outcome.statuses) == {"left"}
        assert all(json.loads(body)["stream"] for _, body in requests)
    elif kind == "oversized":
        assert all(f"Content-Length: {32 << 20}" in head for head in heads)
    elif kind == "unauthenticated":
        assert not any("Bearer" in head and "Bearer wrong" not in head for head in heads)
    elif kind == "slow":
        assert outcome.statuses == {"left": 100}


# --- judgement

FAST = Seen(
    seconds=10.0, tokens=1000, finished=10, first_s=[0.1] * 10, gaps_s=[0.01] * 90, texts={"0 0": "t1"}
)


def verdicts(report):
    return [bar.passed for bar in report.bars]


@pytest.mark.parametrize(
    ("during", "after", "expected"),
    [
        ({}, {}, [True, True, True, True]),
        ({"waits_s": [1.0]}, {}, [False, True, True, True]),
        ({"refused": 0, "waits_s": []}, {}, [False, True, True, True]),
        ({"failures": ["500"]}, {}, [True, False, True, True]),
        ({"tokens": 890}, {}, [True, True, False, True]),
        ({}, {"tokens": 890}, [True, True, True, False]),
    ],
)
def test_an_overload_passes_if_all_refusals_tell_a_wait_and_the_goodput_stays(during, after, expected):
    busy = replace(FAST, **{"refused": 2, "waits_s": [1.0, 1.0], **during})
    seen = Overload(FAST, busy, replace(FAST, **after))
    assert verdicts(serve.overload_report(seen, (), False)) == expected
    quick = verdicts(serve.overload_report(seen, (), True))
    assert quick == [*expected[:2], None, None]


def test_memory_grows_by_what_a_line_through_the_second_half_says():
    at = tuple(range(0, 1001, 100))
    grows = Memory(1000, 0, (), at, tuple(10**7 + 2000 * n for n in at))
    assert grows.slope_bytes() == pytest.approx(2000)
    assert verdicts(serve.memory_report(grows, (), False)) == [True, False]
    settles = Memory(1000, 0, (), at, tuple(10**7 + 2000 * min(n, 300) for n in at))
    assert verdicts(serve.memory_report(settles, (), False)) == [True, True]


@pytest.mark.parametrize(
    ("attacked", "statuses", "expected"),
    [
        ({}, {"400": 3}, [True, True, True]),
        ({"texts": {"0 0": "t2"}}, {"400": 3}, [False, True, True]),
        ({"texts": {}}, {"400": 3}, [False, True, True]),
        ({"failures": ["x"]}, {"400": 3}, [False, True, True]),
        ({}, {"500": 1}, [True, False, True]),
        ({"first_s": [0.16]}, {"400": 3}, [True, True, False]),
    ],
)
def test_attackers_are_borne_if_answers_are_equal_and_not_late(attacked, statuses, expected):
    result = Attacked([FAST], [replace(FAST, **attacked)], statuses, 3)
    assert verdicts(serve.attacks_report({"slow": result}, (), False)) == expected


def test_a_race_passes_against_transformers_by_the_median_of_the_ratios_of_turns():
    slow = replace(FAST, tokens=400)
    found = {
        (OURS, 8): Turns([FAST, FAST, slow]),
        (TRANSFORMERS, 8): Turns([slow, slow, replace(slow, tokens=800)]),
    }
    report = serve.race_report(found, {OURS: (8, 8), TRANSFORMERS: (7, 8)}, (), False)
    assert verdicts(report) == [True, None, True, True]
    assert report.rows[1][3].startswith("2.50 ")
    assert report.rows[0][4:8] == ("100", "100", "10", "10")
    assert verdicts(serve.race_report(found, {OURS: (7, 8)}, (), True)) == [False, True, None]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_run_prints_all_tables():
    race, overload, memory, attacks = serve.measure(serve.QUICK, print)
    assert [row[:2] for row in race.rows] == [(OURS, "1"), (OURS, "4")]
    assert [row[0] for row in overload.rows] == ["before", "during", "after"]
    assert memory.figures["finished"] == 120
    assert [row[0] for row in attacks.rows] == list(KINDS)
    wrong = [
        bar.text for report in (race, overload, memory, attacks) for bar in report.bars if bar.passed is False
    ]
    assert not wrong
