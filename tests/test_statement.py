"""Tests of signed statements, with signatures checked by an implementation of RFC 8032 in plain integers."""

import hashlib
import os
import struct
from dataclasses import replace

import pytest

from aedit.proto.rpc import RolloutStatement, SigningKey
from aedit.spec_rollout.audit import Origin, is_signed, signature_of, statement_of, versions_of
from aedit.spec_rollout.audit.statement import PURPOSE, spans_of
from aedit.spec_rollout.sampling import Prompt, Rollout

ORIGIN = Origin("run-1", "run", "server-a")
SAMPLING = b'{"temperature":1.0}'
# RFC 8032, section 7.1, test 2.
PRIVATE = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P


def point(encoded):
    """Return the affine point of 32 bytes."""
    value = int.from_bytes(encoded, "little")
    y, sign = value & ((1 << 255) - 1), value >> 255
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * pow(2, (P - 1) // 4, P) % P
    return (P - x if x & 1 != sign else x), y


def add(a, b):
    (x1, y1), (x2, y2) = a, b
    k = D * x1 * x2 * y1 * y2 % P
    return (x1 * y2 + x2 * y1) * pow(1 + k, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - k, -1, P) % P


def times(n, a):
    total = (0, 1)
    while n:
        total = add(total, a) if n & 1 else total
        a, n = add(a, a), n >> 1
    return total


def verifies(public, message, signature):
    """Return whether a signature fits, by RFC 8032, section 5.1.7."""
    base = point((4 * pow(5, -1, P) % P).to_bytes(32, "little"))
    s = int.from_bytes(signature[32:], "little")
    h = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % ORDER
    return times(s, base) == add(point(signature[:32]), times(h, point(public)))


def rollout():
    prompt = Prompt(tokens=(1, 2, 3), rollout=7, sample=2)
    return Rollout(prompt, [5, 6, 70_000], [-0.5, -1.25, -0.1], [3, 3, 4], finish_reason="stop")


def test_a_statement_names_the_bytes_that_the_format_describes():
    found = statement_of(ORIGIN, rollout(), SAMPLING, given=1)
    assert (found.run, found.line, found.server) == ("run-1", "run", "server-a")
    assert (found.rollout, found.sample, found.finish_reason, found.given) == (7, 2, "stop", 1)
    assert found.prompt_sha256 == hashlib.sha256(struct.pack("<3I", 1, 2, 3)).digest()
    assert found.answer_sha256 == hashlib.sha256(struct.pack("<3I", 5, 6, 70_000)).digest()
    assert found.logprobs_sha256 == hashlib.sha256(struct.pack("<3f", -0.5, -1.25, -0.1)).digest()
    assert found.sampling_sha256 == hashlib.sha256(SAMPLING).digest()
    assert [(each.version, each.start, each.end) for each in found.spans] == [(3, 0, 2), (4, 2, 3)]


def test_a_signature_is_that_of_rfc_8032_over_purpose_and_statement():
    statement = statement_of(ORIGIN, rollout(), SAMPLING)
    signature = signature_of(statement, SigningKey(PRIVATE))
    assert SigningKey(PRIVATE).public == PUBLIC
    assert verifies(PUBLIC, PURPOSE + statement.SerializeToString(), signature)
    assert not verifies(PUBLIC, statement.SerializeToString(), signature)


def edited():
    said = rollout()
    yield "rollout", replace(said, prompt=replace(said.prompt, rollout=8)), ORIGIN, SAMPLING, 0
    yield "sample", replace(said, prompt=replace(said.prompt, sample=3)), ORIGIN, SAMPLING, 0
    yield "prompt", replace(said, prompt=replace(said.prompt, tokens=(1, 2, 4))), ORIGIN, SAMPLING, 0
    yield "token", replace(said, tokens=[5, 6, 70_001]), ORIGIN, SAMPLING, 0
    yield "logprob", replace(said, logprobs=[-0.5, -1.25, -0.2]), ORIGIN, SAMPLING, 0
    yield "version", replace(said, versions=[3, 3, 5]), ORIGIN, SAMPLING, 0
    yield "reason", replace(said, finish_reason="length"), ORIGIN, SAMPLING, 0
    yield "sampling", said, ORIGIN, b'{"temperature":0.9}', 0
    yield "given", said, ORIGIN, SAMPLING, 1
    yield "run", said, replace(ORIGIN, run="run-2"), SAMPLING, 0
    yield "line", said, replace(ORIGIN, line="other"), SAMPLING, 0
    yield "server", said, replace(ORIGIN, server="server-b"), SAMPLING, 0


def test_a_signature_fits_nothing_but_the_signed_statement():
    key = SigningKey()
    statement = statement_of(ORIGIN, rollout(), SAMPLING)
    signature = signature_of(statement, key)
    assert is_signed(statement, signature, key.public)
    for name, said, origin, sampling, given in edited():
        other = statement_of(origin, said, sampling, given=given)
        assert not is_signed(other, signature, key.public), name
    assert not is_signed(statement, signature, SigningKey().public)
    for bad in (b"", signature[:-1], signature + b"\0", bytes(64)):
        assert not is_signed(statement, bad, key.public)
    for bad in (b"", b"\xff" * 32, bytes(32), key.public + b"\0"):
        assert not is_signed(statement, signature, bad)


def test_a_key_stays_in_its_file_and_only_its_owner_may_read_it(tmp_path):
    path = tmp_path / "server.key"
    before = os.umask(0)
    try:
        key = SigningKey.kept(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert SigningKey.kept(path).public == key.public != SigningKey().public
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"server\.key: a private key has 32 bytes, got 5; delete it"):
        SigningKey.kept(path)


def test_spans_cover_an_answer_without_gaps():
    assert spans_of([]) == []
    assert spans_of([2, 2, 5, 2]) == [(2, 0, 2), (5, 2, 3), (2, 3, 4)]
    assert versions_of(spans_of([2, 2, 5, 2])) == [2, 2, 5, 2]
    for bad in ([(1, 1, 2)], [(1, 0, 2), (2, 3, 4)], [(1, 0, 2), (2, 1, 4)], [(1, 0, 0)]):
        with pytest.raises(ValueError, match="span"):
            versions_of(bad)


def test_a_statement_has_no_field_that_is_not_tested():
    names = [field.name for field in RolloutStatement.DESCRIPTOR.fields]
    assert len(names) == 12
