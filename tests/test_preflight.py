"""Tests the checks before a start: missing data, too little data, a model that cannot fit."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from aedit.launch.cli import main
from aedit.launch.config import (
    PREFIX,
    DataConfig,
    ModelConfig,
    Placement,
    RunConfig,
    check_memory,
    least_parameters,
    load,
    machine_bytes,
    preset_names,
    state_bytes,
)
from aedit.launch.data import check_data
from aedit.launch.processes import measure
from aedit.types import UserError

HUGE = {"hidden_size": 65536, "num_hidden_layers": 200}


def data(source, **changes):
    return DataConfig(**({"source": str(source), "seq_len": 16} | changes))


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, "*.txt", "no such file"),
        ({"a.doc": b"x" * 100}, "*.doc", "unknown suffix"),
        ({"a.txt": b"\xff" * 100}, "a.txt", "not UTF-8"),
        ({"a.txt": b"x" * 20, "b.txt": b"x" * 10}, "*.txt", "too little text: at most 32 tokens"),
        ({"a.jsonl": b'{"text": "x"}\n{"test": "x"}\n'}, "a.jsonl", "'text' is missing in .*a.jsonl:2"),
        ({"a.jsonl": b'{"text": "x"}\n'}, "a.jsonl", "at most 2 tokens"),
    ],
)
def test_data_that_cannot_be_trained_on_is_named(tmp_path, files, source, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        check_data(data(tmp_path / source))


def test_enough_data_is_not_read_to_its_end(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "' + "x" * 40 + '"}\nnot json\n')
    check_data(data(tmp_path / "a.jsonl"))
    (tmp_path / "a.txt").write_text("x" * 33)
    check_data(data(tmp_path / "a.txt"))
    check_data(DataConfig())


def test_a_way_to_read_files_is_no_dataset():
    with pytest.raises(UserError, match="names a file format, not a dataset"):
        check_data(data("hf:json"))
    check_data(data("hf:roneneldan/TinyStories"))


WIDE = {"hidden_size": 16384, "num_hidden_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128}
"""Model wider than the family's own feed-forward layer."""

FAMILIES = [
    ModelConfig(),
    ModelConfig(sizes={"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
    ModelConfig(sizes=WIDE),
    ModelConfig(family="qwen2", sizes={"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}),
    ModelConfig(family="gpt2", sizes={"n_embd": 64, "n_layer": 3, "n_head": 4}),
    ModelConfig(family="gpt_neox", sizes={"hidden_size": 64, "num_hidden_layers": 2}),
]


@pytest.mark.parametrize("model", FAMILIES)
def test_the_estimate_is_never_above_the_parameters_that_a_model_has(model):
    config = RunConfig(device="cpu", model=model)
    actual = measure(config, Placement()).num_params
    assert 0 < least_parameters(config) <= actual


def test_the_estimate_is_close_for_every_preset():
    for name in preset_names():
        config = load_preset(name)
        if config.model.pretrained:  # its model has its own sizes
            continue
        actual = measure(config, Placement()).num_params
        assert 0.98 * actual <= least_parameters(config) <= actual, name


def load_preset(name):
    from pathlib import Path

    return load(Path(f"{PREFIX}{name}"), ["--device", "cpu"]).config


def test_a_pretrained_directory_tells_its_parameters(tmp_path):
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(11)}, tmp_path / "two.safetensors")
    assert least_parameters(RunConfig(model=ModelConfig(pretrained=str(tmp_path)))) == 33
    assert least_parameters(RunConfig(model=ModelConfig(pretrained="some/name"))) is None


def test_a_model_fits_up_to_the_last_byte_of_the_machine(monkeypatch):
    config = RunConfig()
    each = sum(state_bytes(config, 1000, 1000).values())
    assert each == 24_000  # weights, gradients, two moments, anchors, momentum in fp32
    check_memory(config, 1000, nodes=3, have=3 * each)
    with pytest.raises(UserError, match="3 nodes of"):
        check_memory(config, 1000, nodes=3, have=3 * each - 1)
    assert 2**28 < machine_bytes() < 2**50


@pytest.mark.parametrize("words", [["run"], ["run", "--dry-run"], ["run", "--local", "2"]])
def test_a_model_that_cannot_fit_is_one_line_without_loading_torch(tmp_path, words):
    path = tmp_path / "big.toml"
    sizes = ", ".join(f"{name} = {value}" for name, value in HUGE.items())
    path.write_text(f'device = "cpu"\nmodel.sizes = {{ {sizes} }}\n')
    code = (
        "import sys\nfrom aedit.launch.cli import main\ncode = main(sys.argv[1:])\n"
        "sys.exit(f'imported torch' if 'torch' in sys.modules else code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, words[0], str(path), f"--dir={tmp_path}/runs", *words[1:]],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("aedit: memory: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_the_doctor_names_data_and_memory(tmp_path, capsys):
    path = tmp_path / "big.toml"
    sizes = ", ".join(f"{name} = {value}" for name, value in HUGE.items())
    path.write_text(f'device = "cpu"\ndata.source = "nothing"\nmodel.sizes = {{ {sizes} }}\n')
    assert main(["doctor", str(path)]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "no such file" in shown
    assert "billion parameters" in shown


def test_an_empty_file_is_a_small_model(tmp_path):
    (tmp_path / "empty.toml").touch()
    config = load(tmp_path / "empty.toml", []).config
    assert measure(config, Placement()).num_params < 20e6
