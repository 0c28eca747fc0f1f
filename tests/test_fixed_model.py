"""Tests a hub whose configuration fixes the model: who joins first does not decide what the run trains."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import grpc
import numpy as np
import pytest
from kit.hub_processes import HubRefused, numbers
from kit.leading_hub import leading_hub

from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import Layout, TensorLayout, UnitLayout, model_sha256

ROOT = Path(__file__).parent.parent
NUMELS = (5000, 70)
LAYOUT = Layout(tuple(UnitLayout(f"unit{i}", (TensorLayout("w", (n,)),)) for i, n in enumerate(NUMELS)))
MODEL = model_sha256(LAYOUT, (("seed", "0"),), 1000)


def anchors():
    """Return the digests of what `Client.found` sends."""
    return [sha256(numbers(unit, 1, numel).tobytes()).hexdigest() for unit, numel in enumerate(NUMELS)]


def refusal(call):
    with pytest.raises(HubRefused) as caught:
        call()
    return caught.value


def test_another_model_than_the_configured_one_cannot_found_the_run(tmp_path):
    """As found: whoever joined first fixed the model."""
    with leading_hub(tmp_path, f'model_sha256 = "{MODEL}"') as hub:
        for liar in (hub.node("a", numels=(5000, 71)), hub.node("b")):
            facts = {"seed": "1"} if liar.name == "b" else {}
            told = refusal(lambda liar=liar, facts=facts: liar.join(**facts))
            assert told.code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"hub.model_sha256 is {MODEL}" in str(told)
        assert hub.node("c").found().heartbeat().nodes == 1


def test_other_first_anchors_than_the_configured_ones_are_refused_and_their_sender_is_put_out(tmp_path):
    with leading_hub(tmp_path, f"anchors_sha256 = {anchors()}\npush_filter = {{ violations = 3 }}") as hub:
        liar = hub.node("liar")
        assert liar.join().founder
        wrong = np.full(NUMELS[1], 6.66, np.float32).data.cast("B")
        head = pb.PushHead(who=liar.who, unit=1, seq=1, codec="fp32", num_bytes=len(wrong))
        told = refusal(lambda: liar.hub.push(head, wrong))
        assert "hub.anchors_sha256 names" in str(told)
        for _ in range(2):
            refusal(lambda: liar.hub.push(head, wrong))
        assert refusal(liar.heartbeat).code is grpc.StatusCode.PERMISSION_DENIED
        assert all(unit["version"] == 0 for unit in hub.node().status()["units"])


def test_the_configured_anchors_are_taken_and_an_empty_digest_takes_any(tmp_path):
    with leading_hub(tmp_path, f'anchors_sha256 = ["{anchors()[0]}", ""]') as hub:
        node = hub.node().found()
        assert node.version(0) == node.version(1) == 1


def test_the_number_of_units_is_compared_before_anything_is_sent(tmp_path):
    with leading_hub(tmp_path, f"anchors_sha256 = {anchors()[:1]}") as hub:
        assert "this model has 2 units" in str(refusal(hub.node().join))


def test_a_unit_may_not_be_named_with_control_characters(tmp_path):
    with leading_hub(tmp_path) as hub:
        node = hub.node()
        request = node.request()
        request.layout[0].name = "\x1b[2J"
        assert "printable" in str(refusal(lambda: node.hub.join(request)))
        request.layout[0].name = "u" * 257
        assert "256" in str(refusal(lambda: node.hub.join(request)))
        request = node.request()
        request.facts["seed"] = "\x1b]0;owned\x07"
        assert "facts" in str(refusal(lambda: node.hub.join(request)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_with_the_digests_that_the_command_prints_trains(tmp_path):
    """The command builds the model, reads the data and states the facts as a node does."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    config = [str(ROOT / "configs" / "tiny.toml")]
    flags = ["--hub.address", "127.0.0.1:0", "--dir", str(tmp_path), "--train.steps", "4", "--device", "cpu"]

    def aedit(*words):
        made = [sys.executable, "-m", "aedit.launch.cli", *words]
        return subprocess.run(made, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)

    printed = aedit("config", "model", *config, *flags)
    assert printed.returncode == 0, printed.stderr
    fixed = tmp_path / "fixed.toml"
    fixed.write_text(printed.stdout)
    ran = aedit("run", *config, str(fixed), "--local", "1", *flags)
    assert ran.returncode == 0, ran.stdout + ran.stderr
