"""Tests that callers without valid keys reach nothing of a hub and are told why."""

import os
import stat
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.verification import PolicyBuilder, Store
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from aedit.launch.cli import keys as making
from aedit.launch.cli.keys import hosted_of, make_keys, revoke
from aedit.launch.config import RunConfig
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.launch.hub.main import open_to_others
from aedit.proto.rpc import (
    Server,
    ServerKeys,
    Service,
    check_exposure,
    client_keys,
    is_loopback,
    name_of,
    server_keys,
)
from aedit.types import UserError

CALL_S = 10.0


class Hub:
    """Answers every kind of call, and records that it was reached."""

    def __init__(self):
        self.reached = []
        self.handlers = {
            "unary": grpc.unary_unary_rpc_method_handler(self.one),
            "up": grpc.stream_unary_rpc_method_handler(self.one),
            "down": grpc.unary_stream_rpc_method_handler(self.many),
            "both": grpc.stream_stream_rpc_method_handler(self.many),
        }

    def one(self, request, context):
        self.reached.append(context.auth_context().get("x509_common_name", [b""])[0].decode())
        return b"in"

    def many(self, request, context):
        yield self.one(request, context)


@contextmanager
def served(keys):
    """Yield a hub that requires `keys` on loopback, and its port."""
    hub = Hub()
    server = Server([Service("hub", hub.handlers)], "127.0.0.1:0", keys=keys)
    try:
        yield hub, server.port
    finally:
        server.stop(0.0)


@contextmanager
def channel(credentials, port, host="127.0.0.1"):
    target = f"{host}:{port}"
    made = grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
    with made:
        yield made


def calls(made):
    """Return every kind of call, by name; each returns the first answer or raises."""
    health_check = health_pb2_grpc.HealthStub(made).Check
    listing = reflection_pb2_grpc.ServerReflectionStub(made).ServerReflectionInfo
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    return {
        "unary": lambda: made.unary_unary("/hub/unary")(b"x", timeout=CALL_S),
        "up": lambda: made.stream_unary("/hub/up")(iter([b"x", b"y"]), timeout=CALL_S),
        "down": lambda: next(made.unary_stream("/hub/down")(b"x", timeout=CALL_S)),
        "both": lambda: next(made.stream_stream("/hub/both")(iter([b"x"]), timeout=CALL_S)),
        "health": lambda: health_check(health_pb2.HealthCheckRequest(), timeout=CALL_S),
        "reflection": lambda: next(listing(iter([asked]), timeout=CALL_S)),
    }


def refusal(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def unary_refusal(credentials, port, host="127.0.0.1"):
    with channel(credentials, port, host) as made:
        return refusal(calls(made)["unary"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("run") / "keys"
    make_keys(made, ["127.0.0.1"], ["alpha"])
    return made


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """Return the keys of another run."""
    made = tmp_path_factory.mktemp("other") / "keys"
    make_keys(made, ["127.0.0.1"], ["alpha"])
    return made


def read(path):
    return path.read_bytes()


def with_token(tls, token):
    return grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(token))


def tls_of(folder, node=None):
    pair = (read(node / "node.key"), read(node / "node.crt")) if node else (None, None)
    return grpc.ssl_channel_credentials(read(folder / "ca.crt"), *pair)


def token_of(folder):
    return (folder / "alpha" / "token").read_text().strip()


# -- over the wire


def test_the_right_keys_open_every_kind_of_call(folder):
    keys = client_keys(folder / "alpha")
    with served(server_keys(folder / "hub")) as (hub, port), channel(keys, port) as made:
        for call in calls(made).values():
            call()
        assert len(hub.reached) == 4


def test_a_hub_that_asks_for_certificates_learns_the_name_of_the_node(folder):
    keys = client_keys(folder / "alpha")
    asking = server_keys(folder / "hub", require_client_certificates=True)
    with served(asking) as (hub, port), channel(keys, port) as made:
        calls(made)["unary"]()
        assert hub.reached == ["alpha"]


def test_a_hub_may_call_another_one_that_asks_for_certificates(folder):
    """The caller is a standby, or the hub of a region."""
    keys = client_keys(folder / "hub")
    asking = server_keys(folder / "hub", require_client_certificates=True)
    with served(asking) as (hub, port), channel(keys, port) as made:
        calls(made)["unary"]()
        assert hub.reached == ["hub"]


@pytest.mark.parametrize("token", [None, "w" * 43, "", "Bearer"])
def test_without_the_token_nothing_is_reached_by_any_kind_of_call(folder, token):
    tls = tls_of(folder)
    credentials = tls if token is None else with_token(tls, token)
    with served(server_keys(folder / "hub")) as (hub, port), channel(credentials, port) as made:
        for call in calls(made).values():
            error = refusal(call)
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
            assert ("no token" if token is None else "wrong token") in error.details()
            assert "aedit" in error.details() or "keys" in error.details()
        assert hub.reached == []


def test_two_tokens_of_which_one_is_right_are_not_enough(folder):
    credentials = with_token(tls_of(folder), token_of(folder))
    with served(server_keys(folder / "hub")) as (hub, port), channel(credentials, port) as made:
        call = made.unary_unary("/hub/unary")
        twice = lambda: call(b"x", timeout=CALL_S, metadata=(("authorization", "Bearer x"),))  # noqa: E731
        assert refusal(twice).code() == grpc.StatusCode.UNAUTHENTICATED
        assert hub.reached == []


def test_a_node_of_another_run_does_not_show_its_token_to_this_hub(folder, strangers):
    with served(server_keys(folder / "hub")) as (hub, port):
        error = unary_refusal(client_keys(strangers / "alpha"), port)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "CERTIFICATE_VERIFY_FAILED" in error.details()
        assert hub.reached == []


def test_a_hub_under_another_name_than_its_certificate_has_is_not_believed(tmp_path):
    make_keys(tmp_path, ["hub.example"])
    with served(server_keys(tmp_path / "hub")) as (hub, port):
        keys = client_keys(tmp_path / "nodes")
        with channel(keys, port) as made:
            calls(made)["unary"]()  # loopback is always in it
        target = f"127.0.0.1:{port}"
        named = lambda name: grpc.secure_channel(  # noqa: E731
            target, keys, [("grpc.ssl_target_name_override", name)]
        )
        with named("hub.example") as right:
            calls(right)["unary"]()
        with named("other.example") as wrong:
            error = refusal(calls(wrong)["unary"])
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "Hostname Verification" in error.details()
        assert len(hub.reached) == 2


def test_plaintext_gets_nothing_out_of_a_hub_with_tls(folder):
    with served(server_keys(folder / "hub")) as (hub, port):
        error = unary_refusal(None, port)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert error.details()
        assert hub.reached == []


def test_a_hub_that_asks_for_certificates_refuses_a_node_without(folder):
    with served(server_keys(folder / "hub", require_client_certificates=True)) as (hub, port):
        error = unary_refusal(with_token(tls_of(folder), token_of(folder)), port)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert error.details()
        assert hub.reached == []


def test_a_certificate_of_another_authority_is_refused_with_the_right_token(folder, strangers):
    credentials = with_token(tls_of(folder, strangers / "alpha"), token_of(folder))
    with served(server_keys(folder / "hub", require_client_certificates=True)) as (hub, port):
        assert unary_refusal(credentials, port).code() == grpc.StatusCode.UNAVAILABLE
        assert hub.reached == []


def test_a_certificate_that_a_node_signed_itself_is_refused(folder, tmp_path):
    credentials = with_token(tls_of(folder, self_signed(tmp_path)), token_of(folder))
    with served(server_keys(folder / "hub", require_client_certificates=True)) as (hub, port):
        assert unary_refusal(credentials, port).code() == grpc.StatusCode.UNAVAILABLE
        assert hub.reached == []


def test_a_node_cannot_pose_as_the_hub(folder):
    pair = (read(folder / "alpha" / "node.key"), read(folder / "alpha" / "node.crt"))
    posing = ServerKeys(grpc.ssl_server_credentials([pair]), ())
    with served(posing) as (hub, port):
        error = unary_refusal(client_keys(folder / "alpha"), port)
        assert "CERTIFICATE_VERIFY_FAILED" in error.details()
        assert hub.reached == []


def test_a_hubs_certificate_that_has_expired_is_not_believed(folder, tmp_path):
    hub_folder = expired(folder, tmp_path / "hub", "server")
    pair = (read(hub_folder / "server.key"), read(hub_folder / "server.crt"))
    with served(ServerKeys(grpc.ssl_server_credentials([pair]))) as (hub, port):
        error = unary_refusal(client_keys(folder / "alpha"), port)
        assert "certificate has expired" in error.details()
        assert hub.reached == []


def test_a_nodes_certificate_that_has_expired_is_refused(folder, tmp_path):
    node = expired(folder, tmp_path / "beta", "node")
    credentials = with_token(tls_of(folder, node), token_of(folder))
    with served(server_keys(folder / "hub", require_client_certificates=True)) as (hub, port):
        assert unary_refusal(credentials, port).code() == grpc.StatusCode.UNAVAILABLE
        assert hub.reached == []


def test_a_rollout_server_is_believed_at_its_own_hosts_and_called_by_its_name(tmp_path):
    make_keys(
        tmp_path,
        ["hub.example"],
        ["alpha"],
        servers={"spare": ["127.0.0.1"], "far": ["10.1.2.3"]},
    )
    with served(server_keys(tmp_path / "spare", require_client_certificates=True)) as (server, port):
        for caller in ("alpha", "far", "hub"):
            with channel(client_keys(tmp_path / caller), port) as made:
                calls(made)["unary"]()
        assert server.reached == ["alpha", "far", "hub"]
    with served(server_keys(tmp_path / "far")) as (server, port):
        error = unary_refusal(client_keys(tmp_path / "alpha"), port)
        assert "Hostname Verification" in error.details()
        target = f"127.0.0.1:{port}"
        posing = [("grpc.ssl_target_name_override", "hub.example")]
        with grpc.secure_channel(target, client_keys(tmp_path / "alpha"), posing) as made:
            assert "Hostname Verification" in refusal(calls(made)["unary"]).details()
        assert server.reached == []


def self_signed(folder):
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "alpha")])
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = making.begun(name, name, key, 1).sign(key, hashes.SHA256())
    (folder / "node.key").write_bytes(making.pem(key))
    (folder / "node.crt").write_bytes(certificate.public_bytes(making.Encoding.PEM))
    return folder


def expired(folder, target, kind):
    """Return a folder whose certificate was signed by the run's authority and has expired."""
    authority = x509.load_pem_x509_certificate(read(folder / "ca.crt"))
    signer = load_pem_private_key(read(folder / "ca.key"), None)
    like = x509.load_pem_x509_certificate(
        read(folder / "hub" / "server.crt" if kind == "server" else folder / "alpha" / "node.crt")
    )
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        authority.subject,
        like.subject,
        key.public_key(),
        x509.random_serial_number(),
        now - timedelta(days=3),
        now - timedelta(days=1),
        list(like.extensions),
    )
    target.mkdir()
    (target / f"{kind}.key").write_bytes(making.pem(key))
    (target / f"{kind}.crt").write_bytes(
        builder.sign(signer, hashes.SHA256()).public_bytes(making.Encoding.PEM)
    )
    for name in ("ca.crt", "token"):
        (target / name).write_bytes(read(folder / "alpha" / name))
    return target


# -- before anything is sent


@pytest.mark.parametrize("kind", ["server", "node"])
def test_keys_that_have_expired_are_said_to_have_by_file_and_day(folder, tmp_path, kind):
    old = expired(folder, tmp_path / "old", kind)
    with pytest.raises(UserError, match=rf"old/{kind}\.crt was valid until \d{{4}}-\d\d-\d\d"):
        server_keys(old) if kind == "server" else client_keys(old)


@pytest.mark.parametrize("name", ["ca.crt", "token", "server.key", "server.crt"])
def test_a_missing_file_is_named(tmp_path, name):
    make_keys(tmp_path, ["127.0.0.1"])
    (tmp_path / "hub" / name).unlink()
    with pytest.raises(UserError, match=name):
        read_as(name)(tmp_path / "hub")


@pytest.mark.parametrize(("name", "content"), [("token", b"short\n"), ("server.crt", b"nonsense")])
def test_a_damaged_file_is_named(tmp_path, name, content):
    make_keys(tmp_path, ["127.0.0.1"])
    (tmp_path / "hub" / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        read_as(name)(tmp_path / "hub")


def read_as(name):
    """Return what reads a file of this name: a hub shows no token, it checks those of others."""
    return client_keys if name == "token" else server_keys


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.8.9.1:70", "[::1]:70", "localhost:70"])
def test_loopback_is_open(address):
    assert is_loopback(address)
    check_exposure(address, None, insecure=False)


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:70", "[::]:70", "10.0.0.1:70", "hub.example:70", ":70", "127.0.0.1.example:70", "*:70"],
)
def test_other_addresses_want_keys_or_the_word_insecure(address, folder):
    for keys in (None, ServerKeys(), ServerKeys(credentials=server_keys(folder / "hub").credentials)):
        with pytest.raises(UserError, match=r"aedit keys.*--insecure"):
            check_exposure(address, keys, insecure=False)
    check_exposure(address, server_keys(folder / "hub"), insecure=False)
    check_exposure(address, None, insecure=True)


def test_an_open_hub_says_what_it_allows_to_others(tmp_path, folder):
    config = RunConfig(name="run")
    ends = partial(HubEndpoint, config, tmp_path, (0, 1), False)
    said = open_to_others(ends("0.0.0.0:0", None), "0.0.0.0:7000")
    for word in ("--insecure", "0.0.0.0:7000", "change the model", "journal", "aedit keys"):
        assert word in said
    assert open_to_others(ends("127.0.0.1:0", None), "127.0.0.1:7000") == ""
    assert open_to_others(ends("0.0.0.0:0", folder / "hub"), "0.0.0.0:7000") == ""


# -- `aedit keys`


def test_keys_name_their_holder_unless_many_share_them(tmp_path, folder):
    make_keys(tmp_path, ["127.0.0.1"])
    assert (name_of(folder / "alpha"), name_of(tmp_path / "nodes"), name_of(None)) == ("alpha", "", "")


def test_a_name_has_one_role_until_its_keys_are_revoked(tmp_path):
    make_keys(tmp_path, ["127.0.0.1"], ["alpha"])
    with pytest.raises(UserError, match="has keys of a node"):
        make_keys(tmp_path, ["127.0.0.1"], readers=["alpha"])
    with pytest.raises(UserError, match="cannot be a node and a reader"):
        make_keys(tmp_path, ["127.0.0.1"], ["beta"], readers=["beta"])
    with pytest.raises(UserError, match="has no keys"):
        revoke(tmp_path, ["gamma"])
    with pytest.raises(UserError, match="in a new folder"):
        revoke(tmp_path, ["hub"])
    revoke(tmp_path, ["alpha"])
    make_keys(tmp_path, ["127.0.0.1"], readers=["alpha"])


@pytest.mark.parametrize("change", ["role", "name", "issued", "signature"])
def test_a_token_that_its_holder_has_changed_is_refused(folder, change):
    """A node makes itself a hub, another node, or newer than a revocation."""
    role, issued, name, signed = token_of(folder).split(".")
    forged = {
        "role": f"hub.{issued}.{name}.{signed}",
        "name": f"{role}.{issued}.beta.{signed}",
        "issued": f"{role}.{int(issued) + 1}.{name}.{signed}",
        "signature": f"{role}.{issued}.{name}.{signed[:-8]}AAAAAAAA",
    }[change]
    with served(server_keys(folder / "hub")) as (hub, port):
        error = unary_refusal(with_token(tls_of(folder), forged), port)
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        assert "wrong token" in error.details()
        assert hub.reached == []


def test_only_their_owner_can_read_the_files(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {str(path.relative_to(folder)) for path in files} == {
        *("ca.key", "ca.crt"),
        *("hub/ca.crt", "hub/token", "hub/server.key", "hub/server.crt", "hub/node.key", "hub/node.crt"),
        *("alpha/ca.crt", "alpha/token", "alpha/node.key", "alpha/node.crt"),
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    folders = [path for path in folder.rglob("*") if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folders)} == {0o700}


def test_the_certificates_are_those_of_a_strict_verifier(folder):
    """Web rules are stricter than gRPC's: extensions, usages, names, validity."""
    store = Store([x509.load_pem_x509_certificate(read(folder / "ca.crt"))])
    server = x509.load_pem_x509_certificate(read(folder / "hub" / "server.crt"))
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    usage = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.ExtendedKeyUsageOID.SERVER_AUTH]
    for kind in ("hub/server", "alpha/node"):
        held = x509.load_pem_x509_certificate(read(folder / f"{kind}.crt"))
        assert isinstance(held.public_key().curve, ec.SECP256R1)
        held.verify_directly_issued_by(x509.load_pem_x509_certificate(read(folder / "ca.crt")))
        days = (held.not_valid_after_utc - datetime.now(UTC)).total_seconds() / 86400
        assert 364.9 < days < 365.1
    verifier = PolicyBuilder().store(store).max_chain_depth(0)
    verifier.build_server_verifier(x509.DNSName("localhost")).verify(server, [])


def test_a_second_call_adds_a_node_and_changes_no_file(tmp_path):
    make_keys(tmp_path, ["127.0.0.1"], ["alpha"])
    before = {path: read(path) for path in tmp_path.rglob("*") if path.is_file()}
    said = make_keys(tmp_path, ["127.0.0.1"], ["alpha", "beta"])
    assert {path: read(path) for path in before} == before
    assert str(tmp_path / "beta") in said
    with served(server_keys(tmp_path / "hub", require_client_certificates=True)) as (hub, port):
        for name in ("alpha", "beta"):
            with channel(client_keys(tmp_path / name), port) as made:
                calls(made)["unary"]()
        assert hub.reached == ["alpha", "beta"]


def test_a_key_whose_certificate_is_gone_is_not_overwritten(tmp_path):
    make_keys(tmp_path, ["127.0.0.1"], ["alpha"])
    (tmp_path / "alpha" / "node.crt").unlink()
    before = read(tmp_path / "alpha" / "node.key")
    with pytest.raises(UserError, match=r"alpha/node\.key"):
        make_keys(tmp_path, ["127.0.0.1"], ["alpha"])
    assert read(tmp_path / "alpha" / "node.key") == before


def test_another_host_for_a_hub_that_has_its_keys_is_an_error_that_names_it(tmp_path):
    make_keys(tmp_path, ["127.0.0.1"])
    with pytest.raises(UserError, match=r"not for hub\.example: remove"):
        make_keys(tmp_path, ["hub.example"])


def test_it_says_what_to_copy_where_and_until_when_it_is_valid(tmp_path):
    said = make_keys(tmp_path, ["10.1.2.3"], ["alpha"], days=30)
    day = (datetime.now(UTC) + timedelta(days=30)).strftime("%Y-%m-%d")
    assert f"Copy {tmp_path / 'hub'} to the hub's machine, valid until {day}." in said.splitlines()
    assert f"Copy {tmp_path / 'alpha'} to node alpha, valid until {day}." in said.splitlines()
    assert "ca.key" in said
    secret = token_of(tmp_path)
    assert secret not in said
    assert "Copy" in make_keys(tmp_path / "plain", ["10.1.2.3"])
    assert not (tmp_path / "plain" / "nodes" / "node.key").exists()


def test_servers_are_named_with_their_hosts(tmp_path):
    assert hosted_of("server", ["a=10.0.0.5,gpu.example", "b=::1"]) == {
        "a": ["10.0.0.5", "gpu.example"],
        "b": ["::1"],
    }
    said = make_keys(tmp_path, ["10.1.2.3"], servers={"spare": ["10.0.0.5"]})
    assert f"Copy {tmp_path / 'spare'} to server spare" in said
    assert f"Copy {tmp_path / 'nodes'} to every node" in said  # those that train still need keys
    for wrong in ("a", "a=", "=b"):
        with pytest.raises(UserError, match="is not NAME=HOST"):
            hosted_of("server", [wrong])
    with pytest.raises(UserError, match="--server spare: 'a:70'"):
        make_keys(tmp_path, ["10.1.2.3"], servers={"spare": ["a:70"]})
    with pytest.raises(UserError, match="--server: 'hub'"):
        make_keys(tmp_path, ["10.1.2.3"], servers={"hub": ["10.0.0.5"]})
    with pytest.raises(UserError, match=r"not for 10\.0\.0\.6: remove"):
        make_keys(tmp_path, ["10.1.2.3"], servers={"spare": ["10.0.0.6"]})


@pytest.mark.parametrize("name", ["..", "a/b", "hub", "nodes", "token", "ca.key", "", "-x", "a b"])
def test_a_name_that_cannot_be_a_folder_of_its_own_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="--node"):
        make_keys(tmp_path / "keys", ["127.0.0.1"], [name])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hosts", [[], ["a:70"], ["a b"], [""], ["a..b"], ["http://a"]])
def test_hosts_must_be_names_or_addresses(tmp_path, hosts):
    with pytest.raises(UserError, match="--host"):
        make_keys(tmp_path / "keys", hosts)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        make_keys(tmp_path / "file" / "keys", ["127.0.0.1"])
    assert os.listdir(tmp_path) == ["file"]
    assert Path(tmp_path / "file").read_text() == ""
