"""Tests how a rollout server of a run ends by the word of its hub: line, exit code and records."""

import json
import signal

import grpc
import pytest
from kit.served_runs import write_served_run

from aedit.launch.cli.main import main
from aedit.launch.config import load, to_toml
from aedit.launch.serve import run_line, run_member, run_server
from aedit.proto.rpc import HelloReply, HubRefused, HubUnreachable
from aedit.proto.rpc import directory_pb2 as pb

HUB = "127.0.0.1:1"  # nobody listens there


class FakeDirectory:
    """`DirectoryClient` whose hub gives these replies one after the other, and then the last one again."""

    def __init__(self, *replies):
        self.replies, self.names, self.withdrawn, self.is_closed = list(replies), [], [], False

    def announce(self, card, key):
        self.names.append(card.name)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def withdraw(self, name, process):
        self.withdrawn.append(name)

    def servers(self):
        return ()

    def close(self):
        self.is_closed = True


LISTED = pb.AnnounceReply(lease_s=15.0)
BANNED = pb.AnnounceReply(banned=True, reason="accused by 2 of 3 nodes")
FINISHED = pb.AnnounceReply(finished=True)
TAKEN = HubRefused(grpc.StatusCode.ALREADY_EXISTS, "another server has the name s1; choose one with --as")
WRONG_KEY = HubRefused(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
AWAY = HubUnreachable("the hub does not answer")
BUSY = HubRefused(grpc.StatusCode.FAILED_PRECONDITION, "this hub does not lead")


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Return a function that runs `aedit serve` with the replies of a hub."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    config = to_toml(load(write_served_run(tmp_path, drafter="off"), []).config, defaults=False)
    monkeypatch.setattr(run_server, "greet", lambda *_: HelloReply(config=config))
    monkeypatch.setattr(run_server, "LOOK_S", 0.01)
    monkeypatch.setattr(run_line, "EVERY_S", 0.01)

    def serve(*replies):
        directory = FakeDirectory(*replies)
        monkeypatch.setattr(run_member, "DirectoryClient", lambda *_, **__: directory)
        code = main(["serve", HUB, "--as=s1", f"--dir={tmp_path}", "--device=cpu"])
        assert directory.is_closed
        assert set(directory.names) == {"s1"}
        assert directory.withdrawn == ["s1"]
        path = tmp_path / "run" / "servers" / "s1" / "events.jsonl"
        return code, [json.loads(line) for line in path.read_text().splitlines()]

    yield serve
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("replies", "code", "reason"),
    [
        ([LISTED, LISTED, BANNED], 1, "ended by the hub: accused by 2 of 3 nodes"),
        ([BANNED], 1, "ended by the hub: accused by 2 of 3 nodes"),
        ([LISTED, TAKEN], 1, f"ended by the hub: {TAKEN.text}"),
        ([LISTED, WRONG_KEY], 1, "ended by the hub: wrong token"),
        ([LISTED, FINISHED], 0, "the run is finished"),
        ([LISTED, AWAY, BUSY, LISTED, FINISHED], 0, "the run is finished"),
    ],
)
def test_a_server_ends_with_one_line_that_says_why_and_an_exit_code(
    replies, code, reason, served, capsys, tmp_path
):
    found, events = served(*replies)
    assert found == code
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("run run: rollout server s1 at 127.0.0.1:")
    assert said[-1] == f"run run: rollout server s1: {reason}"
    assert (events[-1]["event"], events[-1]["reason"]) == ("end", reason)
    names = [event["event"] for event in events]
    assert names.count("hub_lost") == (AWAY in replies), "once, however often it does not answer"
    assert main(["status", str(tmp_path / "run" / "servers" / "s1")]) == 0
    shown = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    assert "rollout server s1" in shown
    assert f"state {reason} address 127.0.0.1:" in shown
    assert ("hub lost 1 time" in shown) == (AWAY in replies)


def test_a_name_that_is_taken_at_the_start_is_a_mistake_of_the_user_in_one_line(served, capsys):
    code, events = served(TAKEN)
    assert code == 2
    said = capsys.readouterr()
    assert said.err == f"aedit: {TAKEN.text}\n"
    assert said.out == ""
    assert "announced" not in [event["event"] for event in events]
