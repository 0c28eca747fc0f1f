"""Fixtures of the fault tests: small runs of real processes (tiny_run.py)."""

import pytest
from faults.tiny_run import Run, Server


@pytest.fixture(scope="session")
def node_server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def make_run(node_server, tmp_path):
    """Return a function that makes a run in its own directory, as in `make_run("a", steps=20)`.

    The processes of every run are ended after the test.
    """
    made = []

    def make(name="run", **options):
        made.append(Run(node_server, tmp_path / name, **options))
        return made[-1]

    yield make
    for run in made:
        run.end()


@pytest.fixture(scope="session")
def undisturbed(node_server, tmp_path_factory):
    """Return the final checkpoints, by node, of an undisturbed run of two nodes."""
    run = Run(node_server, tmp_path_factory.mktemp("undisturbed"))
    run.train()
    return [run.newest(node) for node in range(2)]
