"""Tests the mistakes of users of `aedit serve HOST:PORT`: one line each, before anything starts."""

import socket

import pytest

from aedit.launch.cli.main import main


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere"], "nowhere: no such directory, and no HOST:PORT"),
        (["10.0.0.1:7000"], "10.0.0.1 is another machine"),
        (["h:1", "--http=nowhere"], "--http nowhere: expected HOST:PORT"),
        (["h:1", "--http=0.0.0.0:80"], "anybody could use it: name a file of keys with --api-key-file"),
        (["h:1", "--api-key-file=keys"], "--api-key-file has no effect with HOST:PORT"),
        (["h:1", "--serve.row=3"], "unknown flag --serve.row; did you mean --serve.rows?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, text, capsys):
    assert main(["serve", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("aedit: ")
    assert said.count("\n") == 1
    assert text.replace("10.0.0.1 is", "10.0.0.1:7000 is") in said


def test_an_address_without_a_hub_is_named_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("aedit.proto.rpc.client.HELLO_LIMIT_S", 0.5)
    with socket.socket() as free:  # bound, and nobody listens
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
        assert main(["serve", place]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"aedit: {place}, asked to ")
    assert said.count("\n") == 1
