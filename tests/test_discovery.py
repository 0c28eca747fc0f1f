"""Tests every discovery backend against one contract (tests/kit/discovery_contract.py), and the peer file."""

import os

import pytest
from kit import discovery_contract

from aedit.proto.swarm import PeerFile


class FileMeeting:
    """Peers that share a file."""

    def __init__(self, folder):
        self.path = folder / "peers.txt"
        self.path.write_text("# peers\n")
        self.opened = []

    def open(self, number):
        self.opened.append(PeerFile(self.path))
        return self.opened[-1]

    def introduce(self, number):
        with self.path.open("a") as file:
            file.write(f"10.0.0.{number}:7001 # number {number}\n")

    def spoil(self):
        with self.path.open("ab") as file:
            file.write(b"\xff\0garbage\n" + b"[" * 1000 + b"\n")

    def break_down(self):
        self.path.rename(self.path.with_suffix(".away"))

    def mend(self):
        self.path.with_suffix(".away").rename(self.path)

    def close(self):
        for each in self.opened:
            each.close()


@pytest.mark.parametrize("promise", discovery_contract.PROMISES, ids=lambda promise: promise.__name__)
def test_by_a_peer_file(promise, tmp_path):
    meeting = FileMeeting(tmp_path)
    try:
        promise(meeting)
    finally:
        meeting.close()


def peers(tmp_path, text):
    path = tmp_path / "peers.txt"
    path.write_text(text)
    return PeerFile(path)


def test_a_file_lists_one_address_per_line_and_comments(tmp_path):
    found = peers(
        tmp_path, "# all\n\n10.0.0.1:7001  # first\n  [::1]:80\nhost.example:443\r\n10.0.0.1:7001\n"
    )
    assert found.found() == ("10.0.0.1:7001", "[::1]:80", "host.example:443")
    assert found.state == ""


def test_a_wrong_line_is_named_with_its_number_and_the_others_count(tmp_path):
    found = peers(tmp_path, "10.0.0.1:7001\n\n10.0.0.2\n10.0.0.3:0\n10.0.0.4:7001\n")
    assert found.found() == ("10.0.0.1:7001", "10.0.0.4:7001")
    path = tmp_path / "peers.txt"
    assert found.state == (
        f"{path}, line 3: address '10.0.0.2' is not HOST:PORT, as in 10.0.0.1:7001 (and 1 more)"
    )


def test_a_file_is_read_again_when_it_changes_and_only_then(tmp_path):
    found = peers(tmp_path, "10.0.0.1:7001\n")
    first = found.found()
    assert found.found() is first
    (tmp_path / "peers.txt").write_text("10.0.0.2:7001\n10.0.0.3:7001\n")
    assert found.found() == ("10.0.0.2:7001", "10.0.0.3:7001")
    os.replace(tmp_path / "peers.txt", tmp_path / "gone")
    assert found.found() == ("10.0.0.2:7001", "10.0.0.3:7001")
    assert "cannot read" in found.state
    (tmp_path / "peers.txt").write_text("")
    assert found.found() == ()
    assert found.state == ""


def test_a_file_that_is_too_large_is_not_taken(tmp_path):
    found = peers(tmp_path, "10.0.0.1:7001\n" * 100_000)
    assert found.found() == ()
    assert "more than 1048576 bytes" in found.state
