"""Tests full, unwritable and damaged disks: training goes on, or stops with a one-line error."""

import contextlib
import json
import os
import shutil
import subprocess

import pytest
from faults.tiny_run import contents, deed, differing
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from aedit.launch.cli import main


def refusal(nodes, rank=0):
    """Return the node's one-line error: the last line of its log, or of its output if it has no log yet."""
    assert nodes.wait(rank) == 2, nodes.log()
    logs = [nodes.run_dir / f"nodes/{rank}/attempt_1.log", nodes.run_dir / "output.log"]
    line = next(log for log in logs if log.exists()).read_text().strip().splitlines()[-1]
    assert line.startswith("aedit: ")
    return line


def one_line(capsys, *words):
    """Return the one line that `aedit` printed when it exited with code 2."""
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1, said
    return said[0]


def test_a_disk_that_fills_up_does_not_end_the_training(make_run, undisturbed):
    run = make_run()
    run.train(deeds=[deed(1, "drawn", 9, "no room"), deed(1, "drawn", 17, "room")])
    failed = run.events("checkpoint_failed", 1)
    assert [event["round"] for event in failed] == [2, 3]
    assert "round_000002" in failed[0]["error"]
    assert run.events("checkpoint_failed", 0) == []
    assert not list(run.dir.glob("nodes/1/checkpoints/.writing*"))
    for node in range(2):
        assert differing(run.newest(node), undisturbed[node]) == []


def test_the_checkpoint_before_the_disk_was_full_is_resumed_from(make_run, undisturbed):
    run = make_run(more="[checkpoint]\nkeep = 5")
    full = [deed(1, "drawn", 9, "no room"), deed(1, "drawn", 14, "SIGTERM")]
    run.train(deeds=full)
    assert len(run.events("checkpoint_failed", 1)) == 2
    assert [path.name for path in run.checkpoints(1)] == ["round_000001"]
    run.train()
    assert run.events("start", 0)[-1]["resumed_round"] == 1
    for node in range(2):
        assert differing(run.newest(node), undisturbed[node]) == []


@contextlib.contextmanager
def small_disk(path, num_bytes, options=""):
    """Mount a small file system at `path`; skip the test without the right to mount."""
    path.mkdir(parents=True, exist_ok=True)
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}{options}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, timeout=10).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=10)


def test_a_really_full_disk_costs_checkpoints_and_nothing_else(make_run, undisturbed):
    run = make_run()
    one = 1_100_000  # room for one checkpoint, not for two
    with small_disk(run.dir / "nodes/1/checkpoints", one):
        run.train()
        assert run.events("checkpoint", 1)[0]["bytes"] < one < 2 * run.events("checkpoint", 1)[0]["bytes"]
        assert {event["round"] for event in run.events("checkpoint_failed", 1)} == {
            2,
            3,
            5,
        }
        assert "No space left" in run.events("checkpoint_failed", 1)[0]["error"]
        assert [path.name for path in run.checkpoints(1)] == ["round_000001"]
        assert contents(run.checkpoints(1)[0])["sync"]["round_id"] == 1
    assert differing(run.newest(0), undisturbed[0]) == []


def test_a_run_directory_that_cannot_be_written_is_refused_in_one_line(make_run, capsys):
    run = make_run()
    (run.dir / "nodes").write_text("")
    nodes = run.start(nodes=1)
    assert nodes.wait(0) == 2
    assert "aedit: cannot write to the run directory" in nodes.log()
    (run.toml.parent / "file").write_text("")
    line = one_line(capsys, "run", run.toml, "--local", 2, "--dir", run.toml.parent / "file")
    assert "cannot be written" in line
    assert "--dir" in line


def test_a_read_only_disk_is_refused_in_one_line(make_run, capsys):
    run = make_run()
    with small_disk(run.toml.parent / "read_only", 1_000_000, ",ro"):
        line = one_line(capsys, "run", run.toml, "--local", 2, "--dir", run.toml.parent / "read_only")
    assert "Read-only file system" in line


@pytest.mark.parametrize("file", ["rank_0.safetensors", ".metadata", "meta.json"])
def test_a_torn_checkpoint_is_named_and_the_older_one_goes_on_without_it(make_run, undisturbed, file):
    run = make_run()
    run.train(deeds=[deed(0, "drawn", 13, "SIGTERM"), deed(1, "drawn", 13, "SIGTERM")])
    torn = run.checkpoints(1)[-1]
    whole = (torn / file).read_bytes()
    (torn / file).write_bytes(whole[: len(whole) // 2])
    nodes = run.start()
    line = refusal(nodes, 1)
    assert str(torn) in line
    assert "remove" in line
    nodes.wait(0)
    shutil.rmtree(torn)
    run.train()
    for node in range(2):
        assert differing(run.newest(node), undisturbed[node]) == []


def test_another_model_than_the_checkpoints_is_refused(make_run, capsys):
    run = make_run(steps=8)
    run.train(nodes=1)
    line = one_line(capsys, "run", run.toml, "--local", 1, "--model.sizes.hidden_size", 48)
    assert "model.sizes.hidden_size (32 -> 48)" in line
    text = (run.dir / "run.toml").read_text().replace("num_hidden_layers = 2", "num_hidden_layers = 3")
    (run.dir / "run.toml").write_text(text)
    line = refusal(run.start(nodes=1))
    assert "made with parameters = " in line
    assert str(run.checkpoints()[-1]) in line


def test_another_tokenizer_under_the_same_name_is_refused(make_run):
    run = make_run(steps=8)
    tokenizer = run.toml.parent / "tokenizer"
    run.configure(steps=8, data=f'tokenizer = "{tokenizer}"')
    save_tokenizer(tokenizer, ["e", "t", "a", "o", "i", "n", "s", "h", "r", "d", "l", "u"])
    run.train(nodes=1)
    save_tokenizer(tokenizer, ["t", "e", "a", "o", "i", "n", "s", "h", "r", "d", "l", "u"])
    assert "made with tokenizer = " in refusal(run.start(nodes=1))


def save_tokenizer(path, words):
    vocabulary = {word: number for number, word in enumerate(["<unk>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.save_pretrained(path)


def test_missing_data_is_named(make_run):
    run = make_run()
    (run.toml.parent / "text.txt").unlink()
    assert "text.txt" in refusal(run.start(nodes=1))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("[train\nsteps = 1", "not valid TOML"),
        ("[train]\nstep = 1", "unknown key train.step; did you mean train.steps?"),
        ("[train]\nsteps = 0", "train.steps must be at least 1"),
    ],
)
def test_a_bad_configuration_is_one_line(make_run, capsys, wrong, right):
    run = make_run()
    run.toml.write_text(wrong)
    assert right in one_line(capsys, "run", run.toml, "--local", 1)
    (run.dir / "run.toml").write_text(wrong)
    assert right in refusal(run.start(nodes=1))


@pytest.mark.slow
def test_a_wrapper_that_finds_a_torn_checkpoint_says_so_and_leaves_nobody(make_run):
    run = make_run()
    run.train(deeds=[deed(0, "drawn", 13, "SIGTERM")])
    torn = run.checkpoints(1)[-1]
    (torn / ".metadata").write_bytes(b"torn")
    (run.dir / "run.toml").unlink()  # written by a test, not by `aedit run`
    process = run.aedit()
    _, err = process.communicate(timeout=110)
    assert process.returncode == 2, err
    assert [line for line in err.splitlines() if str(torn) in line] == err.strip().splitlines()
    assert run.processes() == []
    assert json.loads((run.checkpoints(0)[-1] / "meta.json").read_text())
