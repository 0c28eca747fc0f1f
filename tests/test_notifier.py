"""Tests that a call that waits for something is woken when it happens, and costs nothing meanwhile."""

import asyncio
import threading
import time
from contextlib import suppress

import grpc
import pytest
from kit.waiting import until

from aedit.proto.rpc import NoNews, Notifier, Server, Service

LONG_S = 60.0


def test_who_waits_is_woken_and_what_has_happened_before_is_not_missed():
    notifier = Notifier()

    async def waits():
        asyncio.get_running_loop().call_later(0.05, threading.Thread(target=notifier.notify).start)
        await notifier.wait(0, LONG_S)
        assert notifier.count == 1
        await notifier.wait(0, LONG_S)  # it was notified since
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(notifier.wait(1, LONG_S), 0.05)
        await notifier.wait(1, 0.01)
        assert notifier._waiting == []

    asyncio.run(asyncio.wait_for(waits(), LONG_S))


def test_a_notification_is_possible_though_the_loop_of_one_that_waited_has_ended():
    notifier, loop = Notifier(), asyncio.new_event_loop()
    task = loop.create_task(notifier.wait(0, LONG_S))
    loop.run_until_complete(asyncio.sleep(0))
    waiting = list(notifier._waiting)
    assert len(waiting) == 1
    task.cancel()
    with suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    notifier._waiting = waiting
    notifier.notify()


@pytest.fixture
def stream():
    """Yield a notifier, the number of times the handler was asked, and a function that calls the service."""
    notifier, asked = Notifier(), []

    def handler(request, context):
        for number in range(3):
            seen = notifier.count
            asked.append(number)
            yield NoNews(notifier, seen, LONG_S)
            yield b"%d" % number

    plain = grpc.unary_stream_rpc_method_handler(handler)
    server = Server([Service("test.Stream", {"Watch": plain}, ())], "127.0.0.1:0")
    channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
    try:
        yield notifier, asked, lambda: channel.unary_stream("/test.Stream/Watch")(b"x", timeout=LONG_S)
    finally:
        channel.close()
        server.stop(0.0)


def test_a_handler_that_has_nothing_to_send_is_asked_again_only_when_there_may_be_something(stream):
    notifier, asked, call = stream
    answers = call()
    for number in range(3):
        until(lambda expected=number + 1: len(asked) == expected, "the handler to have been asked")
        time.sleep(0.2)
        assert len(asked) == number + 1, "it was asked again and again"
        until(lambda: notifier._waiting, "the call to wait")
        notifier.notify()
        assert next(answers) == b"%d" % number
