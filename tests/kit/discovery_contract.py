"""Contract of every discovery backend. Each function gets a `Meeting`, and checks what a peer can see."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

from kit.swarm import data_of, key_of
from kit.waiting import until

FAST_S = 5.0
"""No call takes longer, whatever the network does."""


def timed(call):
    began = time.monotonic()
    result = call()
    assert time.monotonic() - began < FAST_S
    return result


def card_of_number(number, serial=1):
    return data_of(key_of(number), serial, name=f"p{number}", address=f"10.0.0.{number}:7001")


def mentions(found, number):
    """Return whether a hint leads to peer `number`."""
    address = f"10.0.0.{number}:7001"
    return any(hint == address or hint == card_of_number(number) for hint in found)


def a_peer_is_found_by_another(meeting):
    one, other = meeting.open(1), meeting.open(2)
    meeting.introduce(1)
    one.announce(card_of_number(1))
    until(lambda: mentions(timed(other.found), 1), "the first peer")


def hints_are_addresses_or_cards(meeting):
    one = meeting.open(1)
    meeting.introduce(1)
    meeting.introduce(2)
    one.announce(card_of_number(1))
    until(lambda: timed(one.found), "anybody")
    for hint in one.found():
        assert isinstance(hint, str | bytes)


def garbage_in_the_records_raises_nothing(meeting):
    one = meeting.open(1)
    meeting.spoil()
    meeting.introduce(1)
    timed(lambda: one.announce(card_of_number(1)))
    until(lambda: mentions(timed(one.found), 1), "the peer beside the garbage")


def no_fault_of_the_network_raises_and_state_names_it(meeting):
    one = meeting.open(1)
    meeting.introduce(1)
    one.announce(card_of_number(1))
    until(lambda: mentions(one.found(), 1), "the peer")
    assert one.state == ""
    meeting.break_down()
    until(lambda: (timed(one.found), one.state)[1], "a word about the fault")
    timed(lambda: one.announce(card_of_number(1, 2)))
    assert mentions(one.found(), 1)  # what was known last
    meeting.mend()
    until(lambda: (timed(one.found), not one.state)[1], "the end of the fault", limit_s=60.0)


def any_thread_may_read_the_state(meeting):
    one = meeting.open(1)
    with ThreadPoolExecutor(4) as pool:
        assert all(isinstance(state, str) for state in pool.map(lambda _: one.state, range(20)))


def closing_is_fast_and_may_be_repeated(meeting):
    one = meeting.open(1)
    one.announce(card_of_number(1))
    timed(one.close)
    timed(one.close)
    with contextlib.suppress(AttributeError):
        assert meeting.processes_of(one) == []


PROMISES = [
    a_peer_is_found_by_another,
    hints_are_addresses_or_cards,
    garbage_in_the_records_raises_nothing,
    no_fault_of_the_network_raises_and_state_names_it,
    any_thread_may_read_the_state,
    closing_is_fast_and_may_be_repeated,
]
