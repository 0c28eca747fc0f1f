"""Tests of `aedit audit` on recordings of honest and lying servers."""

import json
from dataclasses import replace

import torch
from tests.kit import tiny_policies
from tests.kit.audited import generate, held

from aedit.launch.cli.main import main
from aedit.spec_rollout.audit.recording import Recording, to_line
from aedit.spec_rollout.sampling import Sampling

SAMPLING = Sampling(max_new_tokens=40)


def policy(shift=0.0):
    model = tiny_policies.policy(dtype=torch.float32, loudness=1.0)
    with torch.no_grad():
        model.lm_head.weight.add_(shift)
        model.lm_head.weight[::2].mul_(1 + shift)
    return model


def record(directory, *, versions=2, lie=False):
    """Record eight samples of two versions of an honest server, and of a second one."""
    recording = Recording(directory, max_bytes=1 << 22, versions=versions, model=policy().config.to_dict())
    for version, shift in ((4, 0.0), (5, 0.2)):
        model = policy(shift)
        recording.weights(version, model.state_dict())
        for each in generate(model, 4, version=version, sampling=SAMPLING):
            recording.rollout(held(each, server="true"))
            changed = (*each.tokens[:7], (each.tokens[7] + 1) % 48, *each.tokens[8:])
            recording.rollout(held(each, server="other", **({"tokens": changed} if lie else {})))
    return directory / "rollouts.jsonl"


def test_honest_servers_pass_with_the_weights_beside_the_file(tmp_path, capsys):
    assert main(["audit", str(record(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert out.count("passed") == 2
    assert out.count(" 320 ") == 2
    assert "not judged" not in out


def test_a_lying_server_is_named_with_key_and_token(tmp_path, capsys):
    assert main(["audit", str(record(tmp_path, lie=True))]) == 1
    out = capsys.readouterr().out
    assert (out.count("passed"), out.count("FAILED")) == (1, 1)
    assert "other: sample 7/0: a token is not the one that the policy draws with this key (place 7" in out
    assert "version 4)" in out


def test_versions_that_are_not_given_are_counted_and_not_judged(tmp_path, capsys):
    path = record(tmp_path, versions=1, lie=True)
    assert main(["audit", str(path)]) == 1
    assert "true: 160 tokens not judged: version 4 is not given" in capsys.readouterr().out
    policy(0.0).save_pretrained(tmp_path / "four")
    assert main(["audit", str(path), "--model", f"4={tmp_path / 'four'}"]) == 1
    assert "not given" not in capsys.readouterr().out
    wrong = ["audit", str(record(tmp_path / "b")), "--model", f"4={tmp_path / 'five'}"]
    policy(0.5).save_pretrained(tmp_path / "five")
    assert main(wrong) == 1, "an honest server fails under the weights of another version"


def test_a_trusted_server_calibrates_the_limits_of_the_next_check(tmp_path, capsys):
    path, out = record(tmp_path), tmp_path / "calibration.json"
    assert main(["audit", str(path), "--trust", "true", "--calibrate", str(out)]) == 0
    assert "trusted" in capsys.readouterr().out
    made = json.loads(out.read_text())["servers"]["true"]
    assert made["num_tokens"] == 320
    assert 1e-8 < made["eps"] < 1e-4
    assert main(["audit", str(path), "--calibration", str(out)]) == 0
    slightly = [
        replace(each, logprobs=[x - 8e-5 for x in each.logprobs])
        for each in generate(policy(), 4, version=4, sampling=SAMPLING)
    ]
    path.write_text("".join(to_line(held(each, server="true")) for each in slightly))
    assert main(["audit", str(path)]) == 0, "within the wide limits"
    assert main(["audit", str(path), "--calibration", str(out)]) == 1


def test_input_that_cannot_be_checked_ends_with_2_and_one_line(tmp_path, capsys):
    path = record(tmp_path)
    (tmp_path / "empty").write_text("")
    (tmp_path / "bad").write_text("{}\n")
    (tmp_path / "lone").mkdir()
    lone = tmp_path / "lone" / "rollouts.jsonl"
    lone.write_text(path.read_text())
    greedy = tmp_path / "top.jsonl"
    greedy.write_text(
        "".join(
            to_line(held(x)) for x in generate(policy(), 1, version=4, sampling=replace(SAMPLING, top_k=3))
        )
    )
    for words, error in (
        (["missing"], "no such file"),
        ([str(tmp_path / "empty")], "no rollout is in it"),
        ([str(tmp_path / "bad")], "line 1: no recorded rollout"),
        ([str(lone)], "weights of versions 4, 5 are not beside it"),
        ([str(lone), "--model", str(tmp_path)], "versions 4, 5; say which"),
        ([str(lone), "--model", "4=nowhere"], "no run and no model directory"),
        ([str(path), "--trust", "true"], "give both, or none"),
        ([str(path), "--calibration", str(path)], "no file of calibrations"),
        ([str(path), "--trust", "x", "--calibrate", str(tmp_path / "c")], "server x: calibration needs"),
        ([str(greedy)], "no token could be judged"),
    ):
        assert main(["audit", *words]) == 2, words
        assert error in capsys.readouterr().err, words
