"""Tests receipts: a hub that has lost what it acknowledged does not lead, and no liar can feign a loss."""

import random
import shutil
import zlib

import grpc
import pytest
from kit.hub_processes import Client, HubProcess, HubRefused, HubUnreachable, ending, write_run
from kit.leading_hub import leading_hub
from test_journal import Book, config, same
from test_journal_format import Format

from aedit.async_sgd.hub import Denied
from aedit.async_sgd.journal import (
    Damaged,
    Journal,
    JournalBroken,
    Store,
    chain_of,
    frames,
    segment_numbers,
    segment_path,
    snapshot_path,
)
from aedit.async_sgd.journal.journal import NOTE
from aedit.async_sgd.journal.receipts import Receipts
from aedit.async_sgd.replication import Mirror
from aedit.launch.hub.folder import make_hub
from aedit.proto.agent import AgentPlan
from aedit.proto.agent.membership import Membership
from aedit.proto.rpc import HubClient
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import UserError


def beat(node, claim):
    """Send a heartbeat that shows what the node saw acknowledged."""
    return node.hub.heartbeat(pb.HeartbeatRequest(who=node.who, state="training", claim=claim))


def claim_of(node):
    """Return what the node saw acknowledged, with the receipt for it."""
    news = node.heartbeat()
    return pb.Claim(receipt=news.receipt, seqs=node.seqs, versions=[item.version for item in news.units])


def moved(node, hub):
    """Return the node, connected to another hub process under the same session."""
    node.hub.close()
    node.hub, node.address = HubClient(hub.address, call_timeout_s=5.0), hub.address
    return node


def lost(tmp_path):
    """Run a hub, and put an older copy of its folder in its place; return the node and what it knows."""
    with leading_hub(tmp_path) as hub:
        node = hub.node().found()
        node.merged(0)
        shutil.copytree(tmp_path / "hub", tmp_path / "copy")
        node.merged(0)
        node.merged(1)
        claim = claim_of(node)
    shutil.rmtree(tmp_path / "hub")
    (tmp_path / "copy").rename(tmp_path / "hub")
    return node, claim


def test_a_hub_that_has_everything_leads_after_a_restart(tmp_path):
    with leading_hub(tmp_path) as hub:
        node = hub.node().found()
        node.merged(0)
        claim = claim_of(node)
        beat(node, claim)
    with leading_hub(tmp_path) as hub:
        moved(node, hub)
        beat(node, claim)
        request = node.request()
        request.claim.CopyFrom(claim)
        receipt = node.hub.join(request).news.receipt
        assert receipt.epoch == claim.receipt.epoch
        assert (receipt.segment, receipt.offset) > (claim.receipt.segment, claim.receipt.offset)
        assert not hub.process.is_over


@pytest.mark.parametrize("joins", [False, True])
def test_a_hub_that_was_rolled_back_does_not_lead_and_names_what_is_missing(tmp_path, joins):
    node, claim = lost(tmp_path)
    with leading_hub(tmp_path) as hub:
        moved(node, hub)
        request = node.request()
        request.claim.CopyFrom(claim)
        with pytest.raises(HubRefused, match=r"has lost what was acknowledged") as refused:
            node.hub.join(request) if joins else beat(node, claim)
        assert refused.value.code == grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(HubRefused, match="has lost"):
            node.push(0)
        assert hub.process.is_over
        missing = r"unit0: pushes 3 to 3 of the node; unit0: versions 3 to 3; unit1: pushes 2 to 2"
        with pytest.raises(UserError, match=f"{missing}.*Copy the journal back.*--force-lead"):
            hub.process.exit_code()


def test_a_hub_that_was_rolled_back_and_has_gone_on_is_found_by_its_other_records(tmp_path):
    node, claim = lost(tmp_path)
    with leading_hub(tmp_path) as hub:
        other = hub.node("other").found()
        for _ in range(6):
            other.merged(0)
        assert claim_of(other).receipt.segment == claim.receipt.segment
        assert claim_of(other).receipt.offset > claim.receipt.offset
        with pytest.raises(HubRefused, match="has lost what was acknowledged"):
            beat(moved(node, hub), claim)


def test_nobody_can_invent_a_receipt(tmp_path):
    _, claim = lost(tmp_path)
    with leading_hub(tmp_path) as hub:
        other = hub.node("other")
        other.join()
        for name, value in (
            ("offset", 2**62),
            ("segment", 2**62),
            ("process", 5),
            ("chain", b""),
            ("chain", bytes(99)),
            ("mac", b""),
            ("mac", bytes(16)),
        ):
            forged = pb.Claim()
            forged.CopyFrom(claim)
            setattr(forged.receipt, name, value)
            with pytest.raises(HubRefused, match="no hub of this run has given") as refused:
                beat(other, forged)
            assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
        beat(other, pb.Claim(seqs=[2**60], versions=[2**60]))  # without a receipt it proves nothing
        assert not hub.process.is_over
        assert other.heartbeat().nodes


def test_a_node_of_another_journal_is_refused_and_the_hub_leads_on(tmp_path):
    with leading_hub(tmp_path) as hub:
        node = hub.node().found()
        claim = claim_of(node)
    shutil.rmtree(tmp_path / "hub")
    with leading_hub(tmp_path) as hub:
        moved(node, hub)
        request = node.request()
        request.claim.CopyFrom(claim)
        for call in (lambda: node.hub.join(request), lambda: beat(node, claim)):
            with pytest.raises(HubRefused, match="start the node again") as refused:
                call()
            assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
        assert not hub.process.is_over
        assert hub.node("new").join().founder


def test_an_accepted_loss_draws_a_new_epoch_and_term(tmp_path):
    node, claim = lost(tmp_path)
    segment_path(tmp_path / "hub", 1).write_bytes(segment_path(tmp_path / "hub", 1).read_bytes())
    with leading_hub(tmp_path, force=True) as hub:
        with pytest.raises(HubRefused, match="start the node again"):
            beat(moved(node, hub), claim)
        again = hub.node()
        reply = again.join()
        assert (reply.term, list(reply.versions), list(reply.seqs)) == (2, [2, 1], [2, 1])
        assert reply.news.receipt.epoch != claim.receipt.epoch
        again.merged(0)
        kept = claim_of(again)
    with leading_hub(tmp_path) as hub:  # the flag is needed once
        beat(moved(again, hub), kept)
        assert not hub.process.is_over


def test_a_missing_newest_segment_can_be_accepted(tmp_path):
    book = Book(tmp_path).join("a")
    before = book.hub.state.units[0].version
    book.ledger.journal.rotate()
    book.push(0, 0)
    segment_path(tmp_path, 2).unlink()
    hub = make_hub(config(), (0, 1))
    with pytest.raises(UserError, match="--force-lead"):
        Store(tmp_path).recover(hub)
    journal = Store(tmp_path).recover(hub, accept_loss=True)
    assert hub.state.units[0].version == before
    assert journal.epoch != book.ledger.journal.epoch
    Store(tmp_path).recover(make_hub(config(), (0, 1)))


class _FakeHub:
    """Client of a hub that gives the receipts of a list, and records what it is shown."""

    def __init__(self, receipts):
        self.receipts, self.shown, self.left = receipts, [], []

    def hello(self, request, timeout_s=None):
        return pb.HelloReply(term=1)

    def join(self, request):
        self.shown.append(request.claim)
        return pb.JoinReply(term=1, session=3, news=pb.News(receipt=self.receipts.pop(0)))

    def heartbeat(self, request, timeout_s):
        self.shown.append(request.claim)
        return pb.News(term=1, receipt=self.receipts.pop(0))

    def leave(self, request, timeout_s):
        self.left.append(request.who)


class _Owner:
    def joined(self, part, reply):
        pass

    def refounded(self, part, generation):
        self.begun = part, generation

    def reported(self):
        return []

    def inherits(self):
        return [7]

    def leased_upto(self):
        return 0

    def take_news(self, part, news):
        pass

    def report(self, part):
        return pb.HeartbeatRequest()

    def beaten(self, part, heartbeat):
        pass

    def refused(self, text):
        raise AssertionError(text)


def test_a_node_shows_the_newest_receipt_and_its_numbers():
    receipts = [pb.Receipt(epoch="e", segment=s, offset=o) for s, o in ((1, 9), (1, 7), (2, 1))]
    hub = _FakeHub([*receipts, pb.Receipt()])
    plan = AgentPlan(addresses=("127.0.0.1:1",), name="a", run="r", version="0", units=(), num_samples=1)
    membership = Membership(0, plan, lambda address: hub)
    membership.known = lambda: pb.Claim(seqs=[4], versions=[2])
    for _ in range(4):
        membership.turn(_Owner())
    assert [(claim.receipt.segment, claim.receipt.offset) for claim in hub.shown] == [
        (0, 0),
        (1, 9),
        (1, 9),
        (2, 1),
    ]
    assert all((list(claim.seqs), list(claim.versions)) == ([4], [2]) for claim in hub.shown)
    membership.acknowledged(pb.Receipt(epoch="e", segment=2, offset=5), 1)  # with a push
    assert membership._claim().receipt.offset == 5


def test_a_node_that_has_left_sends_no_heartbeat_that_would_join_it_again():
    hub = _FakeHub([pb.Receipt()])
    plan = AgentPlan(addresses=("127.0.0.1:1",), name="a", run="r", version="0", units=(), num_samples=1)
    membership = Membership(0, plan, lambda address: hub)
    membership.turn(_Owner())
    membership.leave([])
    membership.run(_Owner())  # the thread's next round; the hub has no answer for it
    assert hub.left == [membership.who()]


def test_a_call_that_was_made_before_the_node_joined_again_does_not_make_it_join_once_more():
    hub = _FakeHub([pb.Receipt()])
    plan = AgentPlan(addresses=("127.0.0.1:1",), name="a", run="r", version="0", units=(), num_samples=1)
    membership = Membership(0, plan, lambda address: hub)
    membership.turn(_Owner())
    late = HubRefused(grpc.StatusCode.NOT_FOUND, "a has joined again since")
    membership.refused(late, membership.who().session + 1)
    assert membership.wait(0.0)
    membership.refused(late, membership.who().session)
    assert not membership.wait(0.0)


def harmed(directory, rng):
    """Damage one or two files of a hub's folder; return what was done."""
    files = sorted(p for p in directory.iterdir() if p.name.startswith(("journal-", "snapshot-")))
    path, other = rng.sample(files, 2)
    data = path.read_bytes()
    at = rng.randrange(len(data))
    match kind := rng.choice(["cut", "cut near the end", "flip", "delete", "swap", "zero", "copy", "note"]):
        case "cut":
            path.write_bytes(data[:at])
        case "cut near the end":
            path.write_bytes(data[: -rng.randrange(1, min(len(data), 900))])
        case "flip":
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        case "delete":
            path.unlink()
        case "swap":
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)
        case "zero":
            size = min(rng.randrange(1, 500), len(data) - at)
            path.write_bytes(data[:at] + bytes(size) + data[at + size :])
        case "copy":
            path.write_bytes(other.read_bytes())
        case "note":
            (directory / NOTE).unlink()
            segments = segment_numbers(directory, "journal")
            segment_path(directory, segments[-1]).unlink()
    return kind, path.name, other.name, at


@pytest.mark.parametrize("snapshots", [False, True])
def test_whatever_happens_to_the_files_it_is_detected_or_nothing_acknowledged_is_lost(tmp_path, snapshots):
    (place := tmp_path / "hub").mkdir()
    book = Book(place).join("a", "b")
    for turn in range(9):
        book.push(turn % 2, turn % 3 % 2)
        if turn % 3 == 1:
            book.ledger.snapshot() if snapshots else book.ledger.journal.rotate()
    receipt, rng = book.ledger.receipt, random.Random(snapshots)
    assert (receipt.segment, receipt.offset) == book.ledger.journal.position
    recovered = 0
    for turn in range(120):
        (copy := tmp_path / f"copy-{turn}").mkdir()
        for path in place.iterdir():
            shutil.copy(path, copy)
        harm, hub = harmed(copy, rng), make_hub(config(), (0, 1))
        try:
            journal = Store(copy, fsync=False).recover(hub)
            found = Receipts(journal).lacks(receipt)
        except (UserError, Denied):
            found = True
        if not found:
            recovered += 1
            try:
                same(book.hub, hub)
            except AssertionError as error:
                raise AssertionError(f"lost without notice after {harm}") from error
        shutil.rmtree(copy)
    assert 0 < recovered < 120 if snapshots else recovered == 0
    assert not snapshots or snapshot_path(place, segment_numbers(place, "snapshot")[-1]).exists()


@pytest.mark.slow
def test_hub_processes_find_out_about_their_folder_and_end(tmp_path):
    toml, place = write_run(tmp_path), tmp_path / "run" / "hub"
    with ending():
        first = HubProcess(toml, place)
        node = Client(first.address).found()
        node.merged(0)
        (place / "lock").unlink()
        second = HubProcess(toml, place)
        assert second.process.wait(60) == 2
        assert "another hub is running in this folder" in second.log.read_text()
        shutil.copytree(place, tmp_path / "copy")
        node.merged(0)
        claim = claim_of(node)
        accepted = len(node.accepted)
        segment_path(place, 1).unlink()
        with pytest.raises((HubRefused, HubUnreachable)):
            node.push(0)
        assert len(node.accepted) == accepted
        assert first.process.wait(60) == 1
        assert "nothing is acknowledged any more" in first.log.read_text()

        gone = HubProcess(toml, place)
        assert gone.process.wait(60) == 2
        assert "is missing: this folder had the journal" in gone.log.read_text()
        shutil.rmtree(place)
        (tmp_path / "copy").rename(place)
        (place / "address").unlink()
        back = HubProcess(toml, place)
        with pytest.raises(HubRefused, match="has lost what was acknowledged"):
            beat(moved(node, back), claim)
        assert back.process.wait(60) == 2
        assert "unit0: pushes 3 to 3 of the node" in back.log.read_text()
        again = HubProcess(toml, place, "--force-lead")
        assert Client(again.address).join().term == 2
        assert again.stop() == 0


def mirrored(source, place, sizes=4096):
    """Return a mirror that has received all segments of a folder."""
    place.mkdir()
    mirror = Mirror(Store(place), lambda: make_hub(config(), (0, 1)))
    for number in segment_numbers(source, "journal"):
        data = segment_path(source, number).read_bytes()
        for at in range(0, len(data), sizes):
            piece = data[at : at + sizes]
            mirror.take(pb.TailChunk(segment=number, offset=at, data=piece, crc=zlib.crc32(piece)))
            mirror.apply()
    return mirror


@pytest.mark.parametrize("sizes", [50, 4096, 2**20])
def test_a_standby_that_takes_over_has_the_epoch_and_what_its_leader_gave_receipts_for(tmp_path, sizes):
    (tmp_path / "a").mkdir()
    book = Book(tmp_path / "a").join("a")
    for _ in range(3):
        book.push(0, 0)
        book.ledger.journal.rotate()
        book.push(0, 1)
    old = book.ledger.receipt
    journal = mirrored(tmp_path / "a", tmp_path / "b", sizes).journal()
    assert journal.epoch == old.epoch
    assert not Receipts(journal).lacks(old)
    book.push(0, 1)
    assert Receipts(journal).lacks(book.ledger.receipt)
    Store(tmp_path / "b").recover(make_hub(config(), (0, 1)))


@pytest.mark.parametrize("sizes", [50, 4096])
def test_the_chain_that_is_kept_is_that_of_the_bytes(tmp_path, sizes):
    """Written, mirrored, cut back, taken over and read: the parser of the page computes it anew."""
    (tmp_path / "a").mkdir()
    book, form = Book(tmp_path / "a").join("a"), Format()
    for _ in range(3):
        book.push(0, 0)

    def checked(journal):
        data = segment_path(journal.directory, 1).read_bytes()
        ends = [end for name, _, end, _ in form.frames(data) if name == "RECORDS"]
        chains = [form.chain(data[:end]) for end in ends]
        assert [journal.chain_at((1, end)) for end in ends] == chains
        assert journal.chain.digest == form.chain(data)
        return list(zip(ends, chains, strict=True))

    known = checked(book.ledger.journal)
    mirror = mirrored(tmp_path / "a", tmp_path / "b", sizes)
    for back in (1, 4):
        end, chain = known[-back]
        mirror.cut((1, end))
        assert mirror.trim() == ((1, end), chain)
    journal = mirror.journal()
    assert mirror.trim() == ((1, end), chain), "after an election that failed"
    journal.append(b"[]")
    assert len(checked(journal)) == len(known) - 2
    checked(Store(tmp_path / "b").recover(make_hub(config(), (0, 1))))


def test_a_journal_keeps_its_chain_at_a_bounded_number_of_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "_KNOWN_ENDS", 3)
    journal = Journal(tmp_path, 1, fsync=False)
    ends = [journal.append(b"[]") for _ in range(5)]
    assert [journal.chain_at(end) is not None for end in ends] == [False, False, True, True, True]
    receipts = Receipts(journal)
    for end in ends:
        assert receipts.has(end, chain_of(journal.file, end[1]).digest)
        assert not receipts.has(end, bytes(32))


def test_a_mirror_refuses_a_segment_that_was_not_written_after_its_last_one(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        book = Book(tmp_path / name).join("a")
        book.ledger.journal.rotate()
    shutil.copy(segment_path(tmp_path / "other", 2), segment_path(tmp_path / "one", 2))
    mirror = mirrored(tmp_path / "one", tmp_path / "mirror", 2**20)
    with pytest.raises(Damaged, match="was not written after"):
        list(iter(mirror.apply, False))


def test_a_standby_confirms_nothing_once_its_folder_is_gone(tmp_path):
    (tmp_path / "a").mkdir()
    Book(tmp_path / "a").join("a")
    mirror = mirrored(tmp_path / "a", tmp_path / "b")
    mirror.sync()
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(JournalBroken, match="while the standby was running"):
        mirror.sync()


@pytest.mark.parametrize("come", [1, 30])
def test_a_standby_that_leads_drops_a_segment_whose_head_has_not_come(tmp_path, come):
    (tmp_path / "a").mkdir()
    book = Book(tmp_path / "a").join("a")
    receipt = book.ledger.receipt
    book.ledger.journal.rotate()
    path = segment_path(tmp_path / "a", 2)
    head = path.read_bytes()
    path.unlink()
    mirror = mirrored(tmp_path / "a", tmp_path / "b")
    piece = head[:come]
    mirror.take(pb.TailChunk(segment=2, offset=0, data=piece, crc=zlib.crc32(piece)))
    journal = mirror.journal()
    assert not Receipts(journal).lacks(receipt)
    assert journal.position[0] == 1
    journal.append(b"[]")
    Store(tmp_path / "b").recover(make_hub(config(), (0, 1)))
