"""Tests that a node of another build joins a run.

Other sources, one more setting, same protocol and method.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit.hub_process import real_hub
from test_own_hub_loop import HUB, Net, anchors

import aedit

TESTS = Path(__file__).parent
NODE = """
import json, sys
import aedit
from aedit.edit.config import EditConfig
from aedit.launch.config.loading import parse_config
from aedit.launch.config.fields import method
from aedit.launch.records.run_directory import source_digest
from aedit.proto.rpc.client import HubClient
from aedit.proto.rpc.client import PROTOCOL
from aedit.proto.rpc.hub_pb2 import HelloRequest, Method
from aedit.proto.rpc.keys import ClientKeys
from test_own_hub_loop import node

address = sys.argv[1]
client = HubClient(address, None, call_timeout_s=30.0)
hello = HelloRequest(protocol=PROTOCOL, version=aedit.__version__)
settings = method(parse_config(client.hello(hello).config, "the hub"))
hello.method.CopyFrom(Method(settings=settings))  # as `aedit run` and `aedit join` do
run = client.hello(hello).run
client.close()
moved = node(address, "volunteer", 1, 9)
told = {"version": aedit.__version__, "sources": source_digest(), "new": EditConfig().new_setting, "run": run}
told |= {"settings": settings, "moved": {name: value.tolist() for name, value in moved.items()}}
print(json.dumps(told))
"""


def other_build(directory):
    """Copy the package with another version, a comment in every file, and one more setting."""
    package = directory / "aedit"
    shutil.copytree(Path(aedit.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in package.rglob("*.py"):
        file.write_text(file.read_text() + "\n# another build\n")
    for name, old, new in (
        ("__init__.py", r'__version__ = "[^"]*"', '__version__ = "9.9.9"'),
        (
            "edit/config.py",
            r"    fragments: PositiveInt = 1\n",
            "    new_setting: int = 3\n    fragments: PositiveInt = 1\n",
        ),
    ):
        text, found = re.subn(old, new, (package / name).read_text())
        assert found == 1
        (package / name).write_text(text)
    return directory


@pytest.mark.filterwarnings("ignore:buffers of this model")
def test_a_node_of_another_build_joins_and_what_it_learns_is_in_the_anchors(tmp_path):
    from aedit.launch.records.run_directory import source_digest

    path = os.pathsep.join(map(str, (other_build(tmp_path / "other"), TESTS, TESTS.parent)))
    (tmp_path / "hub").mkdir()
    with real_hub(tmp_path / "hub", HUB) as hub:
        done = subprocess.run(
            [sys.executable, "-c", NODE, hub.address],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        learned = anchors(hub.address)
    assert (told["version"], told["new"], told["run"]) == ("9.9.9", 3, "test")
    assert told["sources"] != source_digest()
    assert told["settings"]["edit.every"] == "3.0"
    for name, first in Net(1).named_parameters():
        assert torch.equal(learned[name], first.detach() + torch.tensor(told["moved"][name])), name
