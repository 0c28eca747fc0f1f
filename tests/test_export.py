"""Tests `aedit export`: transformers reads back the anchors, bit for bit."""

import math
import shutil

import numpy as np
import pytest
import torch
from dist_jobs.export_jobs import train_and_save
from kit.hub_processes import Client, HubProcess, ending, numbers, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from aedit.edit import EditConfig, find_units, flat_layout
from aedit.launch.cli import main
from aedit.launch.cli.export import export
from aedit.launch.config import load
from aedit.launch.data import load_tokenizer
from aedit.launch.hub import anchors_of, replayed
from aedit.launch.node import Mark, NodeCheckpoints, build_model
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import UserError

JOBS = "tests/dist_jobs/export_jobs.py"
RUN = """
[model]
family = "{family}"
sizes = {{ {sizes} }}
[data]
seq_len = 16
"""
LLAMA = (
    "hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2, num_attention_heads = 2,"
    " num_key_value_heads = 1, tie_word_embeddings = {tied}"
)


@pytest.fixture
def run_dir(tmp_path):
    return described(tmp_path, "llama", LLAMA.format(tied="false"))


def described(tmp_path, family, sizes):
    run = tmp_path / "runs" / "it"
    run.mkdir(parents=True)
    (run / "run.toml").write_text(RUN.format(family=family, sizes=sizes))
    return run


def reloaded(out):
    model, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    return model


def assert_is(model, expected):
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", LLAMA.format(tied="false")),
        ("llama", LLAMA.format(tied="true")),
        ("gpt2", "n_embd = 16, n_layer = 2, n_head = 2"),  # tied by default, with buffers
    ],
)
def test_the_exported_model_is_the_anchors_and_writes_text(tmp_path, family, sizes):
    run = described(tmp_path, family, sizes)
    anchors, params = train_and_save(run, node=0, mark=Mark(1))
    assert any(not torch.equal(anchors[name], params[name]) for name in anchors)  # a step has been made since
    export(run, tmp_path / "out")
    model, tokenizer = reloaded(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert_is(model, anchors)
    prompt = tokenizer("def main():", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert prompt["input_ids"].shape[1] < written.shape[1] <= prompt["input_ids"].shape[1] + 5
    assert tokenizer.decode(written[0]).startswith("def main():")
    assert model.config.use_cache
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 256


def test_a_run_sharded_over_two_ranks_is_exported_whole(world, tmp_path):
    run = described(tmp_path, "llama", LLAMA.format(tied="true"))
    anchors = world.run(JOBS, "save_sharded", size=2, args={"run_dir": str(run), "mark": Mark(3)})[0]
    export(run, tmp_path / "out")
    assert_is(reloaded(tmp_path / "out"), anchors)


def test_the_newest_checkpoint_of_any_node_is_taken(run_dir, tmp_path):
    train_and_save(run_dir, node=0, mark=Mark(9))
    newest, _ = train_and_save(run_dir, node=1, mark=Mark(10, 1))
    train_and_save(run_dir, node=2, mark=Mark(10))
    (run_dir / "nodes/0/checkpoints/round_000011").mkdir()  # not complete
    export(run_dir, tmp_path / "out")
    assert_is(reloaded(tmp_path / "out"), newest)


def test_during_the_warm_up_the_weights_of_a_node_are_exported(run_dir, tmp_path, capsys):
    _, params = train_and_save(run_dir, node=0, mark=Mark(0), config=EditConfig(warmup_steps="all"))
    export(run_dir, tmp_path / "out")
    assert_is(reloaded(tmp_path / "out"), params)
    shown = capsys.readouterr()
    assert "weights of" in shown.out
    assert shown.err == "", "no progress bar for what takes a moment"


def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_the_newest(
    run_dir, tmp_path, monkeypatch
):
    train_and_save(run_dir, node=0, mark=Mark(1))
    later = []
    read = NodeCheckpoints.load

    def pruned_under_the_reader(self, mark, into):
        if mark == Mark(1):
            later.append(train_and_save(run_dir, node=0, mark=Mark(2))[0])
            shutil.rmtree(self.path(mark))
        read(self, mark, into)

    monkeypatch.setattr(NodeCheckpoints, "load", pruned_under_the_reader)
    export(run_dir, tmp_path / "out")
    assert_is(reloaded(tmp_path / "out"), later[0])


def test_a_directory_with_something_in_it_is_left_alone(run_dir, tmp_path, capsys):
    train_and_save(run_dir, node=0, mark=Mark(1))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_empty_directory_may_be_written_into(run_dir, tmp_path):
    anchors, _ = train_and_save(run_dir, node=0, mark=Mark(1))
    (tmp_path / "out").mkdir()
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    assert_is(reloaded(tmp_path / "out"), anchors)
    assert not list(tmp_path.glob(".out*"))


def test_a_run_without_a_checkpoint_is_told_so_in_one_line(run_dir, tmp_path):
    with pytest.raises(UserError, match="no checkpoint yet"):
        export(run_dir, tmp_path / "out")
    with pytest.raises(UserError, match=r"run\.toml"):
        export(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_named(run_dir, tmp_path):
    train_and_save(run_dir, node=0, mark=Mark(1))
    for path in (run_dir / "nodes/0/checkpoints/round_000001").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"round_000001 cannot be read .*remove it"):
        export(run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_toml_of_another_model_is_refused(run_dir, tmp_path):
    train_and_save(run_dir, node=0, mark=Mark(1))
    (run_dir / "run.toml").write_text(
        (run_dir / "run.toml").read_text().replace("hidden_size = 16", "hidden_size = 32")
    )
    with pytest.raises(UserError, match=r"restore an edited run\.toml"):
        export(run_dir, tmp_path / "out")


def test_nothing_half_written_stays_behind(run_dir, tmp_path, monkeypatch):
    train_and_save(run_dir, node=0, mark=Mark(1))

    def disk_full(tokenizer, directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aedit.launch.data.tokenizer.ByteTokenizer.save", disk_full)
    with pytest.raises(UserError, match="No space left"):
        export(run_dir, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


MODEL_AT_A_HUB = """
[model]
sizes = { hidden_size = 16, intermediate_size = 24, num_hidden_layers = 2, num_attention_heads = 2 }
[data]
seq_len = 16
"""


class ModelClient(Client):
    """Client that pushes to the units of the model that a configuration describes."""

    def of(self, config):
        model = measured(config)
        self.layout = flat_layout.layout(find_units(model, config.edit.units))
        self.numels = tuple(unit.numel for unit in self.layout.units)
        return self

    def request(self, **others):
        request = super().request(**others)
        del request.layout[:]
        for unit in self.layout.units:
            told = [pb.Tensor(name=tensor.name, shape=tensor.shape) for tensor in unit.tensors]
            request.layout.append(pb.Unit(name=unit.name, tensors=told))
        return request

    def tensors(self, anchors):
        """Return the parameters by name, cut out of one vector per unit."""
        found = {}
        for unit, anchor in zip(self.layout.units, anchors, strict=True):
            parts = np.split(anchor, np.cumsum([math.prod(one.shape) for one in unit.tensors])[:-1])
            for one, part in zip(unit.tensors, parts, strict=True):
                found[one.name] = torch.tensor(part.reshape(one.shape))
        return found


def measured(config):
    tokenizer = load_tokenizer(config.data)
    return build_model(config.model, tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id)


def half_of(folder):
    """Return the hub of the folder without its second unit, as if another hub owned that."""
    hub = replayed(folder)
    del hub.state.units[1]
    return hub


def test_the_anchors_of_a_hub_are_exported_from_its_address_its_folder_and_where_a_node_joined(
    tmp_path, capsys, monkeypatch
):
    with ending():
        toml = write_run(tmp_path, MODEL_AT_A_HUB)
        hub = HubProcess(toml, tmp_path / "runs/it/hub")
        node = ModelClient(hub.address).of(load(toml, []).config).found()
        export(hub.address, tmp_path / "first")
        first = [numbers(i, 1, numel) for i, numel in enumerate(node.numels)]
        assert_is(reloaded(tmp_path / "first"), node.tensors(first))
        assert f"anchors of the hub at {hub.address}" in capsys.readouterr().out
        node.merged(1)
        joined = tmp_path / "joined"
        joined.mkdir()
        for name in ("run.toml", "join_me.toml"):
            text = toml.read_text().replace("127.0.0.1:0", hub.address if name.startswith("join") else "x:1")
            (joined / name).write_text(text)
        export(joined, tmp_path / "second")
        hub.stop()
        newest = {i: np.asarray(values) for i, values in anchors_of(tmp_path / "runs/it/hub").items()}
        assert not np.array_equal(newest[1], first[1])
        assert np.array_equal(newest[0], first[0])
        expected = node.tensors([newest[i] for i in sorted(newest)])
        assert_is(reloaded(tmp_path / "second"), expected)
        for i, place in enumerate((tmp_path / "runs/it/hub", tmp_path / "runs/it")):
            shutil.copy(toml, tmp_path / "runs/it/run.toml")
            export(place, tmp_path / f"folder{i}")
            assert_is(reloaded(tmp_path / f"folder{i}"), expected)
        with pytest.raises(UserError, match="no checkpoint yet"):
            export(joined, tmp_path / "third")
        assert "using the newest checkpoint here, as the hub cannot be asked" in capsys.readouterr().err
        monkeypatch.setattr("aedit.launch.cli.export.replayed", half_of)
        with pytest.raises(UserError, match=r"no anchors of model\.layers\.0: the folders of all hubs"):
            export(tmp_path / "runs/it", tmp_path / "third")
