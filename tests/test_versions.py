"""Tests of policy versions between processes: complete or not there, continued, and believed only by hash."""

import gc
import threading
import tracemalloc

import grpc
import numpy as np
import pytest
from kit.wire import cutting

from aedit.proto.rpc import HubRefused, HubUnreachable, Limits, Server, frames, is_author, new_secret
from aedit.proto.rpc import versions_pb2 as pb
from aedit.proto.rpc.client import channel
from aedit.proto.versions import (
    LineUnknown,
    Manifest,
    Receiving,
    VersionLayout,
    VersionsClient,
    VersionsCore,
    VersionStore,
    patch,
    versions_service,
)
from aedit.proto.versions.manifest import UnitVersion
from aedit.proto.versions.patch import unit_hash
from aedit.proto.versions.receiving import TransferRefused
from aedit.proto.versions.store import LinesFull
from aedit.types import Layout, TensorLayout, UnitLayout

SIZES = {"block.0": 40_000, "block.1": 40_000, "rest": 700_000}
UNITS = tuple(UnitLayout(name, (TensorLayout(f"{name}.w", (n,)),)) for name, n in SIZES.items())
LAYOUT = VersionLayout(Layout(UNITS), "bf16")
NUM_BYTES = 2 * sum(SIZES.values())


def run_of(num_versions, seed=0, share=0.02):
    """Return the values of consecutive versions, of which a share changes each time."""
    rng = np.random.default_rng(seed)
    now = {name: rng.integers(0, 2**16, n, np.uint16) for name, n in SIZES.items()}
    versions = [now]
    for _ in range(num_versions - 1):
        now = {name: x + (rng.random(x.size) < share) for name, x in now.items()}
        versions.append({name: x.astype(np.uint16) for name, x in now.items()})
    return versions


def author(num_versions, ring=8, line="run"):
    store = VersionStore(LAYOUT, ring=ring)
    values = run_of(num_versions)
    for serial, units in enumerate(values, 1):
        store.publish(line, serial, units)
    return store, values


def reader(line="run", **options):
    store = VersionStore(LAYOUT, **options)
    store.open(line)
    return store


def messages(made, offset=0, chunk_bytes=frames.CHUNK_BYTES):
    head, data = made[0].SerializeToString(), memoryview(made[1])
    return [frames.pack_chunk(c) for c in frames.chunks(head, data, offset=offset, chunk_bytes=chunk_bytes)]


def take_all(receiving, source):
    for missing in receiving.missing:
        wanted = receiving.manifest
        made = source.transfer(wanted.line, missing.unit, missing.base, wanted.serial)
        receiving.take(iter(messages(made)))


def catch_up(store, source, serial, line="run"):
    receiving = Receiving(store, source.manifest(line, serial))
    take_all(receiving, source)
    receiving.finish()


def equal(store, serial, values, line="run"):
    with store.hold(line, serial) as units:
        return all(np.array_equal(units[name], values[name]) for name in SIZES)


@pytest.fixture
def served():
    """Yield a function that serves a core and returns a client; both end with the test."""
    ending = []

    def serve(core, **limits):
        server = Server([versions_service(core, Limits(**limits) if limits else None)], "127.0.0.1:0")
        client = VersionsClient(server.address, call_timeout_s=20.0)
        ending.append((server, client))
        return client

    yield serve
    for server, client in ending:
        client.close()
        server.stop(0.0)


@pytest.fixture
def traced():
    """Yield a function that returns the most bytes that have been allocated since the test began."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def nobody(line, caller):
    return False


# --- manifests


def test_a_manifest_that_no_author_writes_is_refused():
    unit = UnitVersion("rest", 1, bytes(32), 8)
    good = {"line": "run", "serial": 2, "parent": 1, "dtype": "bf16", "units": (unit,)}
    assert Manifest.from_message(Manifest(**good).message) == Manifest(**good)
    for wrong, reason in (
        ({"line": "x" * 2**20}, "is not 1 to 64 letters"),
        ({"line": "../etc"}, "is not 1 to 64 letters"),
        ({"line": ""}, "is not 1 to 64 letters"),
        ({"serial": 1}, "above its parent"),
        ({"serial": 2**63}, "above its parent"),
        ({"dtype": "int8"}, "expected one of bf16"),
        ({"units": ()}, "at least one"),
        ({"units": (unit, unit)}, "once"),
        ({"units": (UnitVersion("rest", 1, b"x", 8),)}, "1 bytes, not 32"),
    ):
        with pytest.raises(ValueError, match=reason) as error:
            Manifest(**{**good, **wrong})
        assert len(str(error.value)) < 300


def test_a_layout_refuses_other_units_sizes_and_dtypes():
    manifest = author(1)[0].newest("run")
    LAYOUT.check(manifest)
    for wrong, reason in (
        (Manifest("run", 2, 1, "fp32", manifest.units), "dtype is fp32, expected bf16"),
        (Manifest("run", 2, 1, "bf16", manifest.units[:2]), "2 units, where the model has 3"),
        (Manifest("run", 2, 1, "bf16", manifest.units[::-1]), "expected 'block.0' of 80000"),
        (Manifest("run", 2, 1, "bf16", (*manifest.units, UnitVersion("x", 1, bytes(32), 2**60))), "4 units"),
    ):
        with pytest.raises(ValueError, match=reason):
            LAYOUT.check(wrong)
    with pytest.raises(ValueError, match="none of them is empty"):
        VersionLayout(Layout((UnitLayout("rest", ()),)), "bf16")


# --- store


def test_every_version_of_the_ring_is_a_base_and_any_other_one_gives_all_values():
    source, values = author(6, ring=4)
    for base in range(1, 7):
        store = reader()
        store.publish("run", base, values[base - 1])
        catch_up(store, source, 6) if base < 6 else None
        assert equal(store, 6, values[5])
        made = source.transfer("run", "rest", base, 6)
        assert made[0].base == (base if base > 2 else 0), "1 and 2 have left the ring"
        assert (len(made[1]) < 0.1 * 2 * SIZES["rest"]) == (base > 2)
    with pytest.raises(LineUnknown, match="version 1 of line run is not here"):
        source.transfer("run", "rest", 0, 1)
    with pytest.raises(ValueError, match="no unit 'embed'"):
        source.transfer("run", "embed", 0, 6)


def test_a_version_that_goes_back_or_repeats_is_refused():
    source, values = author(2)
    for serial in (1, 2):
        with pytest.raises(ValueError, match="above"):
            source.publish("run", serial, values[0])
        with pytest.raises(ValueError, match="is not above"):
            Receiving(source, source.manifest("run", serial))
    assert source.newest("run").serial == 2
    assert source.newest("run").parent == 1


def test_memory_is_counted_and_does_not_grow_with_versions():
    source, _values = author(1)
    store, mirror = reader(ring=2), run_of(40, share=0.001)
    source = VersionStore(LAYOUT, ring=2, cache_bytes=100_000)
    counted = []
    for serial, units in enumerate(mirror, 1):
        source.publish("run", serial, units)
        catch_up(store, source, serial)
        counted.append((source.num_bytes, store.num_bytes))
    assert set(counted[4:]) == {counted[-1]} or max(c for c, _ in counted) <= 2 * NUM_BYTES + 100_000
    assert max(mine for _, mine in counted) <= 3 * NUM_BYTES, "two versions, and one that is being built"
    assert equal(store, 40, mirror[-1])
    store.close("run")
    assert store.num_bytes <= NUM_BYTES, "spare buffers of one version"


def test_a_unit_that_does_not_change_is_kept_once_and_not_sent():
    values = run_of(1)[0]
    source, store = VersionStore(LAYOUT), reader()
    source.publish("run", 1, values)
    catch_up(store, source, 1)
    later = {**values, "block.0": values["block.0"] + np.uint16(1)}
    source.publish("run", 2, later)
    assert source.buffers.num_bytes == NUM_BYTES + 2 * SIZES["block.0"]
    receiving = Receiving(store, source.manifest("run", 2))
    assert [missing.unit for missing in receiving.missing] == ["block.0"]
    take_all(receiving, source)
    receiving.finish()
    assert equal(store, 2, later)
    assert equal(store, 1, values)


def test_values_that_are_held_outlive_the_ring_and_are_not_overwritten():
    source, values = author(6, ring=6)
    store = reader(ring=1)
    catch_up(store, source, 1)
    with store.hold("run", 1) as held:
        for serial in range(2, 7):
            catch_up(store, source, serial)
        assert all(np.array_equal(held[name], values[0][name]) for name in SIZES)
    assert equal(store, 6, values[5])


def test_lines_are_bounded_and_closing_one_makes_room():
    store = VersionStore(LAYOUT, max_lines=2)
    store.open("a"), store.open("b"), store.open("a")
    with pytest.raises(LinesFull, match="2 lines are open"):
        store.open("c")
    store.close("a"), store.close("never")
    store.open("c")
    assert store.lines == ("b", "c")


def test_equal_transfers_are_made_once_for_all_who_ask(monkeypatch):
    source, values = author(2)
    other = "line-2"
    for serial, units in enumerate(values, 1):
        source.publish(other, serial, units)
    calls, encode = [], patch.encode_transfer
    started, go = threading.Event(), threading.Event()

    def slow(*arguments):
        calls.append(1)
        started.set()
        assert go.wait(60)
        return encode(*arguments)

    monkeypatch.setattr(patch, "encode_transfer", slow)
    made = []
    threads = [
        threading.Thread(target=lambda line=line: made.append(source.transfer(line, "rest", 1, 2)[1]))
        for line in ("run", "run", other)
    ]
    for thread in threads:
        thread.start()
    assert started.wait(60)
    go.set()
    for thread in threads:
        thread.join(60)
    assert len(calls) == 1
    assert len(made) == 3
    assert len(set(made)) == 1


# --- receiving


def test_a_version_is_visible_only_when_all_of_its_units_are_right():
    source, values = author(2)
    store = reader()
    receiving = Receiving(store, source.manifest("run", 2))
    for name in SIZES:
        assert store.newest("run") is None
        with pytest.raises(ValueError, match="lacks"):
            receiving.finish()
        receiving.take(iter(messages(source.transfer("run", name, 0, 2))))
    assert store.newest("run") is None
    assert receiving.missing == ()
    receiving.finish()
    assert store.newest("run").serial == 2
    assert equal(store, 2, values[1])


def test_a_broken_transfer_is_continued_by_anybody_who_has_the_same_one():
    source, values = author(2)
    twin, _ = author(2)
    store = reader()
    receiving = Receiving(store, source.manifest("run", 2))
    first = messages(source.transfer("run", "rest", 0, 2), chunk_bytes=2**14)
    with pytest.raises(frames.ArrayIncomplete):
        receiving.take(iter(first[:3]))
    missing = receiving.missing[-1]
    assert (missing.unit, missing.offset) == ("rest", 3 * 2**14)
    made = twin.transfer("run", "rest", 0, 2)
    assert made[0].sha256 == missing.transfer
    receiving.take(iter(messages(made, offset=missing.offset)))
    # A transfer of other bytes, such as by another version of zlib, begins again.
    first = messages(source.transfer("run", "block.0", 0, 2), chunk_bytes=2**15)
    with pytest.raises(frames.ArrayIncomplete):
        receiving.take(iter(first[:2]))
    planes = values[1]["block.0"].view(np.uint8).reshape(-1, 2).T
    raw = b"\1" + b"".join(len(p).to_bytes(4, "little") + p.tobytes() for p in planes)
    other = pb.TransferHead(line="run", serial=2, unit="block.0", encoding=patch.ENCODING, num_bytes=len(raw))
    other.sha256 = unit_hash(np.frombuffer(raw, np.uint8))
    rest = frames.chunks(other.SerializeToString(), memoryview(raw), offset=2**16)
    with pytest.raises(frames.ArrayIncomplete, match="is not here"):
        receiving.take(frames.pack_chunk(c) for c in rest)
    assert next(m.offset for m in receiving.missing if m.unit == "block.0") == 0
    receiving.take(frames.pack_chunk(c) for c in frames.chunks(other.SerializeToString(), memoryview(raw)))
    take_all(receiving, source)
    receiving.finish()
    assert equal(store, 2, values[1])


def test_a_damaged_chunk_is_noticed_and_what_was_right_is_kept():
    source, values = author(1)
    store = reader()
    receiving = Receiving(store, source.manifest("run", 1))
    parts = messages(source.transfer("run", "rest", 0, 1), chunk_bytes=2**14)
    damaged = bytearray(parts[4])
    damaged[100] ^= 1
    with pytest.raises(frames.ChunkDamaged):
        receiving.take(iter([*parts[:4], bytes(damaged)]))
    missing = receiving.missing[-1]
    assert missing.offset == 4 * 2**14
    receiving.take(iter(messages(source.transfer("run", "rest", 0, 1), offset=missing.offset)))
    take_all(receiving, source)
    receiving.finish()
    assert equal(store, 1, values[0])


def lie(made, **fields):
    head = pb.TransferHead()
    head.CopyFrom(made[0])
    for name, value in fields.items():
        setattr(head, name, value)
    return [frames.pack_chunk(c) for c in frames.chunks(head.SerializeToString(), memoryview(made[1]))]


def test_lies_about_a_transfer_are_refused_before_memory_is_taken(traced):
    source, _ = author(3)
    store = reader()
    catch_up(store, source, 1)
    receiving = Receiving(store, source.manifest("run", 3))
    made = source.transfer("run", "rest", 1, 3)
    before = store.num_bytes
    tracemalloc.reset_peak()
    started = traced()
    for fields, reason in (
        ({"line": "other"}, "another version"),
        ({"serial": 2}, "another version"),
        ({"unit": "embed"}, "not asked for"),
        ({"base": 2}, "where version 1 is here"),
        ({"encoding": "pickle"}, "expected 'segments'"),
        ({"num_bytes": 2**62}, "at most"),
        ({"num_bytes": len(made[1]) - 1}, "a chunk of"),
        ({"num_bytes": len(made[1]) + 1}, "ended after"),
        ({"sha256": bytes(32)}, "not what its SHA-256 says"),
    ):
        with pytest.raises(ValueError, match=reason):
            receiving.take(iter(lie(made, **fields)))
    for noise in ([], [b""], [b"\xff" * 20], [frames.pack_chunk(frames.Chunk(0, 0, b"x", b"y"))]):
        with pytest.raises(ValueError, match=r"first chunk|ends within|wire type|checksum|no field|number"):
            receiving.take(iter(noise))
    with pytest.raises(ValueError, match="which was not asked for"):
        receiving.take(iter(messages(made)), unit="block.0")
    assert traced() - started < 2**20
    assert store.num_bytes - before < 2 * SIZES["rest"]
    assert {missing.unit for missing in receiving.missing} == set(SIZES)
    take_all(receiving, source)
    receiving.finish()


def test_values_of_another_version_or_base_are_recognised_by_the_hash_of_the_unit():
    source, values = author(3)
    liar = VersionStore(LAYOUT)
    for serial in (1, 2, 3):  # the same versions, but one bit differs
        wrong = {name: x.copy() for name, x in values[serial - 1].items()}
        wrong["rest"][0] ^= serial > 1
        liar.publish("run", serial, wrong)
    store = reader()
    catch_up(store, source, 1)
    receiving = Receiving(store, source.manifest("run", 3))
    with pytest.raises(TransferRefused, match="another hash") as error:
        receiving.take(iter(messages(liar.transfer("run", "rest", 1, 3))))
    assert error.value.code is grpc.StatusCode.DATA_LOSS
    assert receiving.missing[-1].base == 0, "next time all values"
    with pytest.raises(ValueError, match="from version 1, where version 0"):
        receiving.take(iter(messages(source.transfer("run", "rest", 1, 3))))
    with pytest.raises(TransferRefused) as error:
        receiving.take(iter(messages(liar.transfer("run", "rest", 0, 3))))
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    # A patch for another base that claims to be for this one.
    mixed = lie(source.transfer("run", "block.0", 2, 3), base=1)
    with pytest.raises(TransferRefused):
        receiving.take(iter(mixed))
    assert store.newest("run").serial == 1
    take_all(receiving, source)
    receiving.finish()
    assert equal(store, 3, values[2])


def test_a_sender_that_hangs_does_not_hold_up_the_next_one():
    source, values = author(1)
    store = reader()
    receiving = Receiving(store, source.manifest("run", 1))
    parts = messages(source.transfer("run", "rest", 0, 1), chunk_bytes=2**14)
    hangs, go, errors = threading.Event(), threading.Event(), []

    def hanging():
        yield from parts[:2]
        hangs.set()
        assert go.wait(60)
        yield from parts[2:]

    def first():
        try:
            receiving.take(hanging())
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert hangs.wait(60)
    take_all(receiving, source)
    go.set()
    thread.join(60)
    assert [error.code for error in errors] == [grpc.StatusCode.ABORTED]
    receiving.finish()
    assert equal(store, 1, values[0])


def test_a_version_that_is_given_up_frees_its_memory():
    source, _ = author(2)
    store = reader(ring=1)
    catch_up(store, source, 1)
    before = store.num_bytes
    receiving = Receiving(store, source.manifest("run", 2))
    receiving.take(iter(messages(source.transfer("run", "block.0", 1, 2))))
    half = messages(source.transfer("run", "rest", 0, 2), chunk_bytes=2**14)[:2]
    with pytest.raises(frames.ArrayIncomplete):
        receiving.take(iter(half))
    assert store.num_bytes > before + 2**20
    receiving.abandon()
    assert store.num_bytes <= before + 2 * SIZES["block.0"], "one spare buffer"
    with pytest.raises(TransferRefused, match="given up"):
        receiving.take(iter(half))
    with pytest.raises(ValueError, match="given up"):
        receiving.finish()


# --- service


def test_a_follower_gets_every_version_and_waits_for_the_next_one(served):
    source, values = author(2)
    client = served(VersionsCore(source, nobody))
    store, found = reader(), []
    assert client.newest("nobody-has-this") is None
    for serial in (2, 3):
        if serial == 3:  # it is published while the follower waits
            waiting = threading.Thread(
                target=lambda: found.append(client.newest("run", after=2, wait_s=25.0))
            )
            waiting.start()
            values.append(run_of(3)[2])
            source.publish("run", 3, values[2])
            waiting.join(60)
            assert found[0].serial == 3
        receiving = Receiving(store, client.newest("run"))
        client.fetch(receiving)
        receiving.finish()
        assert equal(store, serial, values[serial - 1])
    assert client.newest("run", after=3, wait_s=0.01).serial == 3


def test_a_client_that_is_closed_ends_its_wait_for_a_version(served):
    client, errors = served(VersionsCore(author(2)[0], nobody)), []

    def follow():
        try:
            client.newest("run", after=2, wait_s=25.0)
        except HubUnreachable as error:
            errors.append(str(error))

    assert client.newest("run", after=1, wait_s=1.0).serial == 2
    following = threading.Thread(target=follow)
    following.start()
    client.close()  # it waits by now, or is about to ask
    following.join(60)
    assert errors == [f"{client.address}, asked to Newest: closed here"]


def test_a_version_is_continued_at_another_server_and_a_liar_is_named(served):
    source, values = author(2)
    wrong = [{name: x ^ np.uint16(1) for name, x in units.items()} for units in values]
    liar = VersionStore(LAYOUT)
    for serial, units in enumerate(wrong, 1):
        liar.publish("run", serial, units)
    store = reader()
    receiving = Receiving(store, source.manifest("run", 2))
    lying = served(VersionsCore(liar, nobody))
    with pytest.raises(HubRefused, match="another hash than the manifest names"):
        lying.fetch(receiving)
    empty = served(VersionsCore(VersionStore(LAYOUT), nobody))
    with pytest.raises(HubRefused, match="there is no line 'run'"):
        empty.fetch(receiving)
    honest = served(VersionsCore(source, nobody))
    honest.fetch(receiving)
    receiving.finish()
    assert equal(store, 2, values[1])


def test_an_author_gives_its_versions_and_nobody_else_may(served):
    mine, values = author(3, line="a")
    store, arrived = VersionStore(LAYOUT, ring=2, max_lines=1), []
    secret = new_secret()
    core = VersionsCore(
        store, lambda line, who: line != "run" and is_author(secret, who.secret), arrived.append
    )
    client = served(core)
    with pytest.raises(HubRefused, match="may not author line a"):
        client.give(mine, "a", 1, new_secret())
    assert store.lines == ()
    for serial in (1, 3):
        client.give(mine, "a", serial, secret)
        assert equal(store, serial, values[serial - 1], "a")
    assert [manifest.serial for manifest in arrived] == [1, 3]
    client.give(mine, "a", 3, secret)
    assert len(arrived) == 2, "it is here: nothing was sent"
    with pytest.raises(HubRefused, match="is not above") as refused:
        client.give(mine, "a", 2, secret)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    other, _ = author(1, line="run")
    with pytest.raises(HubRefused, match="may not author line run") as refused:
        client.give(other, "run", 1, secret)
    assert refused.value.code is grpc.StatusCode.PERMISSION_DENIED
    assert store.lines == ("a",)
    core.close_line("a")
    assert store.lines == ()
    client.give(mine, "a", 3, secret)  # as after a restart of the receiver: no state is needed
    assert equal(store, 3, values[2], "a")


def test_an_author_continues_after_its_connection_broke_within_a_unit(served):
    mine, values = author(1, line="a")
    store = VersionStore(LAYOUT)
    core = VersionsCore(store, lambda line, caller: True)
    client = served(core)
    offer = pb.OfferRequest(manifest=mine.manifest("a", 1).message)
    with channel(client.address, None) as raw:
        call = raw.unary_unary("/aedit.v1.Versions/Offer")
        put = raw.stream_unary("/aedit.v1.Versions/Put")
        assert {
            m.unit for m in pb.OfferReply.FromString(call(offer.SerializeToString(), timeout=60)).missing
        } == set(SIZES)
        parts = messages(mine.transfer("a", "rest", 0, 1), chunk_bytes=2**14)
        with pytest.raises(grpc.RpcError) as broken:
            put(iter(parts[:3]), timeout=60)
        assert broken.value.code() is grpc.StatusCode.DATA_LOSS
        again = pb.OfferReply.FromString(call(offer.SerializeToString(), timeout=60))
        assert max(m.offset for m in again.missing) == 3 * 2**14
    client.give(mine, "a", 1)
    assert equal(store, 1, values[0], "a")


def test_a_put_goes_on_before_what_an_earlier_call_has_brought_since_the_offer():
    """The server reads on after the link was cut, while the author asks for the rest."""
    source, values = author(1)
    receiving = Receiving(reader(), source.manifest("run", 1))
    for unit in ("block.0", "block.1"):
        receiving.take(iter(messages(source.transfer("run", unit, 0, 1))))
    made = source.transfer("run", "rest", 0, 1)
    with pytest.raises(frames.ArrayIncomplete):
        receiving.take(iter(messages(made, chunk_bytes=2**14)[:3]))
    receiving.take(iter(messages(made, offset=2**14)))
    receiving.finish()
    assert equal(receiving._store, 1, values[0])


def test_versions_go_both_ways_over_a_link_that_is_cut_every_250_kb(served, monkeypatch):
    mine, values = author(1, line="a")
    store = VersionStore(LAYOUT)
    direct = served(VersionsCore(store, lambda line, caller: True))
    offsets, begin = [], Receiving._partial

    def noted(receiving, unit, head, offset):
        offsets.append((head.unit, offset))
        return begin(receiving, unit, head, offset)

    monkeypatch.setattr(Receiving, "_partial", noted)
    with cutting(direct.address) as (address, connections):
        client = VersionsClient(address, call_timeout_s=20.0)
        client.give(mine, "a", 1)
        assert equal(store, 1, values[0], "a")
        given = [offset for unit, offset in offsets if unit == "rest"]
        offsets.clear()
        receiving = Receiving(reader("a"), client.newest("a"))
        client.fetch(receiving)
        receiving.finish()
        client.close()
    assert equal(receiving._store, 1, values[0], "a")
    fetched = [offset for unit, offset in offsets if unit == "rest"]
    for way in (given, fetched):
        assert sorted(way) == way, "no try begins further back"
        assert len({*way}) >= 5
    assert len(connections) < 80


def test_a_version_that_cannot_be_given_names_the_cut_link_and_not_tls(served):
    mine, _ = author(1, line="a")
    direct = served(VersionsCore(VersionStore(LAYOUT), lambda line, caller: True))
    with cutting(direct.address, cut_bytes=20_000) as (address, _):
        client = VersionsClient(address, call_timeout_s=0.5)
        with pytest.raises(HubUnreachable) as error:
            client.give(mine, "a", 1)
        client.close()
    assert "TLS" not in str(error.value)


def test_strangers_names_of_a_megabyte_and_many_lines_leave_nothing_behind(served):
    mine, _ = author(1, line="a")
    store = VersionStore(LAYOUT, max_lines=3)
    core = VersionsCore(store, lambda line, caller: line.startswith("a"))
    client = served(core, calls_per_s=1e6)
    good = mine.manifest("a", 1).message
    codes, longest = {}, [0]
    gc.collect()
    with channel(client.address, None) as raw:
        offer = raw.unary_unary("/aedit.v1.Versions/Offer")
        newest = raw.unary_unary("/aedit.v1.Versions/Newest")
        put = raw.stream_unary("/aedit.v1.Versions/Put")

        def code(call, message):
            try:
                call(message, timeout=60)
            except grpc.RpcError as error:
                longest[0] = max(longest[0], len(error.details()))
                return error.code().name
            return "OK"

        for line in ["x" * 2**20, *(f"b{i}" for i in range(300)), *(f"a{i}" for i in range(300))]:
            good.line = line
            one = code(offer, pb.OfferRequest(manifest=good).SerializeToString())
            codes[one] = codes.get(one, 0) + 1
            code(newest, pb.NewestRequest(line=line, wait_s=0.001).SerializeToString())
        assert codes == {"INVALID_ARGUMENT": 1, "PERMISSION_DENIED": 300, "OK": 3, "RESOURCE_EXHAUSTED": 297}
        for noise in ([], [b"\xff" * 100], [b"x"]):
            assert code(put, iter(noise)) in ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "DATA_LOSS")
    assert longest[0] < 500
    assert len(store.lines) == 3
    assert store.num_bytes == 0


def test_more_waiting_callers_than_threads_do_not_hold_up_the_others(served):
    source, _ = author(1)
    client = served(VersionsCore(source, nobody), calls_per_s=1e6)
    with channel(client.address, None) as raw:
        newest = raw.unary_unary("/aedit.v1.Versions/Newest")
        waits = pb.NewestRequest(line="run", after=1, wait_s=30.0).SerializeToString()
        calls = [newest.future(waits, timeout=60) for _ in range(200)]
        receiving = Receiving(reader(), client.newest("run"))
        client.fetch(receiving)
        source.publish("run", 2, run_of(2)[1])
        serials = [pb.Manifest.FromString(call.result(60)).serial for call in calls]
    assert set(serials) <= {1, 2}
    assert serials.count(2) > 0


def test_a_server_that_is_gone_is_named_within_the_deadline():
    client = VersionsClient("127.0.0.1:9", call_timeout_s=0.3)
    receiving = Receiving(reader(), author(1)[0].manifest("run", 1))
    with pytest.raises(HubUnreachable, match=r"127\.0\.0\.1:9, asked to get unit block\.0"):
        client.fetch(receiving)
    client.close()
