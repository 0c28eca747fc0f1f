"""Runs for the fault tests: see tiny_run.py."""

import pytest
from faults.tiny_run import Run, Server


@pytest.fixture(scope="session")
def node_server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def make_run(node_server, tmp_path):
    """`make_run("a", steps=20)`: a run in a directory of its own; its processes are gone afterwards."""
    made = []

    def make(name="run", **options):
        made.append(Run(node_server, tmp_path / name, **options))
        return made[-1]

    yield make
    for run in made:
        run.end()


@pytest.fixture(scope="session")
def undisturbed(node_server, tmp_path_factory):
    """The final checkpoints, by node, of a run of two nodes that nothing happens to."""
    run = Run(node_server, tmp_path_factory.mktemp("undisturbed"))
    run.train()
    return [run.newest(node) for node in range(2)]
