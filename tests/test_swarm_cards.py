"""Tests peer cards: their bytes, bounds on every field, and that only the owner of a key makes valid ones."""

import struct
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.swarm import card_of, data_of, key_of, replica

from aedit.proto.rpc import swarm_pb2 as pb
from aedit.proto.swarm import Founding, decoded_card, encoded_card
from aedit.proto.swarm.card import MOST_CARD_BYTES, MOST_PARTS, PURPOSE

KEY = key_of(7)
FULL = card_of(
    KEY,
    2**40,
    parts={4: replica(), 0: replica("[::1]:7101", term=0, leads=False, in_sync=False)},
    fingerprint="0f" * 32,
    model="0123456789abcdef",
    steps_per_s=2.5,
    lease_s=12.0,
    leaving=True,
)
VOTE = Founding(generation=3, candidate=b"c" * 8, members=5, forced=2, founder=b"f" * 8)


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes((value & 127 | 128,)), value >> 7
    return out + bytes((value,))


def text(number, value):
    value = value if isinstance(value, bytes) else value.encode()
    return varint(number << 3 | 2) + varint(len(value)) + value


def signed(body, key=KEY, purpose=PURPOSE):
    return b"\x01" + key.private.sign(purpose + body) + body


def test_the_bytes_of_a_card_are_version_signature_and_message():
    second = b"\x08\x04" + text(2, "10.0.0.1:7100") + b"\x18\x03\x20\x01\x28\x01"
    body = (
        text(1, "run-1") + text(2, "alpha") + text(3, KEY.public) + b"\x20" + varint(2**40)
        + text(5, "10.0.0.1:7001") + text(6, text(2, "[::1]:7101")) + text(6, second)
        + text(7, "0f" * 32) + text(8, "0123456789abcdef")
        + b"\x49" + struct.pack("<d", 2.5) + b"\x51" + struct.pack("<d", 12.0) + b"\x58\x01"
    )  # fmt: skip
    data = encoded_card(FULL, KEY.private)
    assert data[:1] == b"\x01"
    assert data[65:] == body
    KEY.private.public_key().verify(data[1:65], b"aedit peer card 1\n" + body)
    assert decoded_card(data) == FULL


def test_a_small_card_is_these_bytes():
    data = data_of(KEY, 5, name="a", address="")
    assert data.hex() == (
        "01"
        "a6551df8dece4ddc1031f41ed4dcb0d8d1734f829caa874579376b09043d873e783dca944aa9fe472d0fe8e664"
        "14d8e58ca8f09c4a0ab70374181d549730990e0a0572756e2d311201611a203ee2a8a7283cb2fd728943daa127"
        "ef09e483071a8b4bc699ba4522f09b14cfde2005510000000000002440"
    )


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
@example(b"")
@example(b"\x01" + bytes(64))
@example(bytes(MOST_CARD_BYTES + 1))
def test_bytes_that_nobody_has_signed_are_refused_with_a_reason(garbage):
    for data in (garbage, b"\x01" + bytes(64) + garbage):
        with pytest.raises(ValueError, match=r"card|run|name|public_key|serial|lease_s"):
            decoded_card(data)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 8 * 250 - 1))
def test_a_card_with_one_bit_changed_is_refused(bit):
    data = bytearray(encoded_card(FULL, KEY.private))
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - any field may be the wrong one
        decoded_card(bytes(data))
    assert str(refused.value)


def test_the_founding_of_a_part_has_these_bytes_and_those_of_a_forced_one_only_if_it_is():
    vote = {4: replace(VOTE, forced=0, founder=b"")}
    card = card_of(KEY, foundings=vote)
    data, body = encoded_card(card, KEY.private), b"\x08\x04\x10\x03" + text(3, "c" * 8) + b"\x20\x05"
    assert data.endswith(text(12, body))
    assert decoded_card(data).foundings == vote
    data = encoded_card(replace(card, foundings={4: VOTE}), KEY.private)
    assert data.endswith(text(12, body + b"\x28\x02" + text(6, "f" * 8)))
    assert decoded_card(data).foundings == {4: VOTE}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run": ""}, "run '' is not 1 to 64"),
        ({"name": "a" * 65}, "name .* is not 1 to 64"),
        ({"name": "a\x1b[2J"}, "name 'a[?]"),
        ({"public_key": b"k" * 31}, "public_key has 31 bytes; an Ed25519 key has 32"),
        ({"serial": 0}, r"serial is 0; it must be in \[1, 2\^63\)"),
        ({"foundings": {0: replace(VOTE, forced=2**20)}}, r"part 0: forced is 1048576; it must be in \[0, "),
        ({"foundings": {0: replace(VOTE, founder=b"")}}, "part 0: founder has 0 bytes; expected 8"),
        ({"foundings": {0: replace(VOTE, forced=0)}}, "part 0: founder has 8 bytes; expected 0"),
        ({"foundings": {0: replace(VOTE, candidate=b"")}}, "part 0: candidate has 0 bytes; expected 8"),
        ({"serial": 2**63}, "serial is 9223372036854775808"),
        ({"address": "10.0.0.1"}, "address '10.0.0.1' is not HOST:PORT"),
        ({"address": "unix:80"}, "address 'unix:80' is not HOST:PORT"),
        ({"address": "0.0.0.0:80"}, "name the host that others reach"),
        ({"fingerprint": "ab"}, "fingerprint 'ab' is not 64 hexadecimal"),
        ({"fingerprint": "A" * 64}, "fingerprint"),
        ({"address": "", "fingerprint": "0f" * 32}, "nobody can meet the certificate of a client"),
        ({"model": "x" * 16}, "model 'xxxxxxxxxxxxxxxx' is not 8 to 64 hexadecimal"),
        ({"steps_per_s": NAN}, r"steps_per_s is nan; it must be in \[0, 1e\+09\]"),
        ({"steps_per_s": INF}, "steps_per_s is inf"),
        ({"steps_per_s": -1.0}, "steps_per_s is -1"),
        ({"lease_s": NAN}, r"lease_s is nan; it must be in \[1, 300\]"),
        ({"lease_s": INF}, "lease_s is inf"),
        ({"lease_s": -INF}, "lease_s is -inf"),
        ({"lease_s": 0.0}, "lease_s is 0"),
        ({"address": "", "parts": {0: replica()}}, "a client hosts nothing"),
        ({"parts": {MOST_PARTS: replica()}}, "part 4096: parts are numbered 0 to 4095"),
        ({"parts": {0: replica("nowhere")}}, "part 0: address 'nowhere' is not HOST:PORT"),
        ({"parts": {0: replica(term=2**63)}}, "part 0: term is 9223372036854775808"),
        ({"parts": {n: replica() for n in range(200)}}, "at most 4095 are possible: host fewer parts"),
    ],
)
def test_a_value_that_cannot_be_true_is_refused_by_name_before_it_is_signed_and_when_it_arrives(
    changes, named
):
    card = replace(card_of(KEY), **changes)
    with pytest.raises(ValueError, match=named):
        encoded_card(card, KEY.private)
    parts = [
        pb.HostedPart(part=n, address=one.address, term=one.term) for n, one in sorted(card.parts.items())
    ]
    foundings = [
        pb.Founding(
            part=n,
            generation=one.generation,
            candidate=one.candidate,
            members=one.members,
            forced=one.forced,
            founder=one.founder,
        )
        for n, one in sorted(card.foundings.items())
    ]
    plain = {name: getattr(card, name) for name in (
        "run", "name", "public_key", "serial", "address", "fingerprint", "model", "steps_per_s", "lease_s",
    )}  # fmt: skip
    with pytest.raises(ValueError, match=named):
        decoded_card(signed(pb.Card(**plain, parts=parts, foundings=foundings).SerializeToString()))


def test_another_encoding_of_the_same_card_is_refused():
    data = encoded_card(FULL, KEY.private)
    body = data[65:]
    assert decoded_card(signed(body)) == FULL
    for other in (body + text(99, b"unknown"), body + text(1, "run-1"), text(2, "early") + body):
        with pytest.raises(ValueError, match="not in the form in which it is signed"):
            decoded_card(signed(other))


def test_a_signature_of_another_key_or_purpose_is_refused():
    body = encoded_card(FULL, KEY.private)[65:]
    for data in (
        signed(body, key_of(8)),
        signed(body, purpose=b""),
        signed(body, purpose=b"aedit server card"),
    ):
        with pytest.raises(ValueError, match="not signed with its own key"):
            decoded_card(data)
    with pytest.raises(ValueError, match="public_key is not that of the key"):
        encoded_card(FULL, key_of(8).private)


def test_a_card_of_another_version_is_named():
    with pytest.raises(ValueError, match="version 2; this build reads 1"):
        decoded_card(b"\x02" + encoded_card(FULL, KEY.private)[1:])
