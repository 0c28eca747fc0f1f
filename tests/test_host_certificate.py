"""Tests which certificates bind a peer's key: those of the run's authority, for its host, that sign it."""

import hashlib
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from kit.leading_hub import keys_of
from kit.swarm import key_of

from aedit.launch.cli.keys import make_keys
from aedit.proto.rpc import CA, SERVER, Endorsement, HostCertificates, host_certificates, own_endorsement
from aedit.types import UserError

RUN, KEY, ADDRESS = "run", key_of(1).public, "127.0.0.1:7000"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    peers = {"alice": ["127.0.0.1", "Alice.example.org", "::1"], "bob": ["127.0.0.1"]}
    return keys_of(tmp_path_factory.mktemp("keys"), ["dora"], hosts=(), peers=peers)


def made(keys, holder="alice", run=RUN, key=KEY):
    return own_endorsement(keys / holder, run, key)


@pytest.mark.parametrize("address", [ADDRESS, "127.0.0.1:1", "alice.example.org:7000", "[::1]:7000"])
def test_a_certificate_binds_the_key_that_it_has_signed_at_its_hosts(keys, address):
    host_certificates(keys / "bob").check(made(keys), RUN, KEY, address)


def test_the_fingerprint_is_that_of_the_certificate_that_tls_shows(keys):
    der = ssl.PEM_cert_to_DER_cert((keys / "alice" / f"{SERVER}.crt").read_text())
    assert made(keys).fingerprint == hashlib.sha256(der).hexdigest()
    assert Endorsement().fingerprint == ""


def test_everything_else_is_refused_with_the_reason(keys, tmp_path):
    make_keys(tmp_path / "other", (), peers={"eve": ["127.0.0.1"]})
    good = made(keys)
    cases = [
        (Endorsement(), {}, "has 0 bytes"),
        (replace(good, certificate=b"x" * 5000), {}, "has 5000 bytes"),
        (replace(good, certificate=b"x" * 50), {}, "error parsing"),
        (replace(good, signature=b""), {}, "has not signed its identity"),
        (replace(good, signature=made(keys, "bob").signature), {}, "has not signed its identity"),
        (made(keys, key=key_of(2).public), {}, "has not signed its identity"),
        (made(keys, run="another"), {}, "has not signed its identity"),
        (own_endorsement(tmp_path / "other" / "eve", RUN, KEY), {}, "not of the authority of this run"),
        (good, {"address": "10.0.0.1:7000"}, "not for a server at 10.0.0.1:7000"),
        (good, {"address": "example.org:7000"}, "not for a server at example.org:7000"),
    ]
    for endorsement, changes, named in cases:
        place = {"run": RUN, "key": KEY, "address": ADDRESS} | changes
        with pytest.raises(ValueError, match=named):
            host_certificates(keys / "bob").check(endorsement, **place)


def test_the_certificate_of_a_node_which_serves_nothing_binds_no_peer(keys, tmp_path):
    folder = keys / "dora"
    for kind in ("key", "crt"):
        (tmp_path / f"{SERVER}.{kind}").write_bytes((folder / f"node.{kind}").read_bytes())
    with pytest.raises(ValueError, match="not for a server"):
        host_certificates(folder).check(own_endorsement(tmp_path, RUN, KEY), RUN, KEY, ADDRESS)


@pytest.mark.parametrize("days", [-1, 4000])
def test_a_certificate_counts_while_it_is_valid(keys, days):
    authority = (keys / "alice" / CA).read_bytes()
    checks = HostCertificates(authority, lambda: datetime.now(UTC) + timedelta(days=days))
    with pytest.raises(ValueError, match="its certificate is valid until 20"):
        checks.check(made(keys), RUN, KEY, ADDRESS)


def test_files_that_are_no_keys_are_named(tmp_path):
    (tmp_path / CA).write_text("no certificate")
    with pytest.raises(UserError, match=r"ca\.crt is not an authority"):
        host_certificates(tmp_path)
