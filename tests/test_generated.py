"""Tests that the generated code matches proto/*.proto."""

import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent / "src"


def test_the_generated_code_is_that_of_the_proto_files(tmp_path):
    protos = [str(file.relative_to(SRC)) for file in (SRC / "aedit/proto/rpc").glob("*.proto")]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    words = (sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *outputs, *protos)
    done = subprocess.run(words, cwd=SRC, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made = {file.name: file.read_text() for file in (tmp_path / "aedit/proto/rpc").iterdir()}
    ours = {
        file.name: file.read_text() for file in (SRC / "aedit/proto/rpc").glob("*_pb2*") if file.is_file()
    }
    assert len(protos) == len(ours) / 2 > 0
    assert ours == made, "run `make proto`"
