"""Tests that every shipped TOML passes a dry run, is the method of its name, and plans the right figures."""

from pathlib import Path

import pytest
import torch
from benchmarks.heart import POLICY
from benchmarks.policies import new_model
from transformers import LlamaConfig, LlamaForCausalLM

from aedit.launch.cli import main
from aedit.launch.config import ModelConfig, Placement, RunConfig, TrainConfig, load
from aedit.launch.config.config import EditConfig, LocalConfig, OuterConfig
from aedit.launch.processes import measure, render
from aedit.spec_rollout import make_target
from aedit.types import UserError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny(**changes):
    return RunConfig(device="cpu", model=ModelConfig(sizes=SIZES), **changes)


def test_there_is_a_preset_for_every_method():
    assert {path.stem for path in CONFIGS} >= {"ddp", "diloco", "edit", "a-edit", "streaming", "tiny"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_can_be_planned(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if path.stem == "heart":  # it begins with a policy that `make run-heart` trains
        new_model(POLICY).config.save_pretrained(tmp_path / "runs" / "heart" / "policy")
    before = sorted(tmp_path.rglob("*"))
    assert main(["run", str(path), "--local", "3", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "parameters" in shown
    assert "bytes per round" in shown
    assert load(path, []).config.name == path.stem
    assert sorted(tmp_path.rglob("*")) == before


def test_the_presets_are_the_methods_they_are_named_after():
    ddp, diloco, edit, a_edit, streaming = (
        load(next(path for path in CONFIGS if path.stem == name), []).config
        for name in ("ddp", "diloco", "edit", "a-edit", "streaming")
    )
    assert ddp.edit.warmup_steps == "all"
    assert (diloco.edit.schedule, diloco.edit.every, diloco.edit.units) == ("steps", 500, "model")
    assert (diloco.edit.penalty.weights, diloco.edit.penalty.detector) == ("uniform", "off")
    assert diloco.edit.penalty.clip is None
    assert diloco.outer == OuterConfig(kind="nesterov", lr=0.7, momentum=0.9)
    assert (edit.edit.schedule, edit.edit.every, edit.edit.units) == ("steps", 128, "auto")
    assert edit.edit.prefetch > 0
    assert edit.edit.penalty.weights != "uniform"
    assert (a_edit.edit.schedule, a_edit.edit.every, a_edit.edit.penalty.step_weight) == ("seconds", 600, 0.5)
    assert streaming.edit.landing == "arrival"
    assert streaming.edit.fragments > 1


def test_the_plan_counts_what_transformers_counts():
    plan = measure(tiny(), Placement(nodes=4, local=True))
    reference = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=257))
    assert plan.num_params == sum(p.numel() for p in reference.parameters())
    assert [name for name, _ in plan.units] == ["rest", *(f"model.layers.{i}" for i in range(3))]
    assert dict(plan.units)["model.layers.1"] == sum(
        p.numel() for p in reference.model.layers[1].parameters()
    )
    assert sum(numel for _, numel in plan.units) == plan.num_params


def test_the_plan_is_arithmetic_a_person_can_redo():
    edit = EditConfig(every=100, warmup_steps=200, fragments=4)
    train = TrainConfig(steps=1000, batch_size=6, accumulate=2)
    plan = measure(tiny(edit=edit, train=train, local=LocalConfig(ranks=2)), Placement(nodes=4, local=True))
    assert plan.num_rounds == (1000 - 200) // 100 * 4 + 4, "each group of units moves once more at the end"
    assert plan.tokens_per_step == 6 * 2 * 256
    assert plan.round_bytes == plan.num_params * 4 // 4
    assert plan.wire_bytes == round(plan.round_bytes * 2 * 3 / 4)
    # parameters, gradients, two moments, anchor, momentum: six fp32 copies over two ranks
    assert sum(plan.memory().values()) == 6 * 4 * plan.num_params // 2
    assert f"{1000 * 4 * 6 * 2 * 256:,} tokens in all" in render(plan)
    gathered = 5 * 129 * 64 * 2  # in bf16: half of 257 rows of 64, both halves, and Gloo's copy of these
    line = f"{plan.num_params * 2 / 1024:.4g} KiB of weights in bf16 and {gathered / 1024:.4g} KiB during"
    assert f"rollout engine   {line} a hand-over" in render(plan)
    alone = measure(tiny(), Placement())
    assert "rollout engine   shares the parameters of the trainer" in render(alone)


def test_the_plan_knows_who_needs_no_anchors_and_no_momentum():
    synchronous = measure(tiny(edit=EditConfig(warmup_steps="all")), Placement())
    assert synchronous.num_rounds == 1000
    assert sum(synchronous.memory().values()) == 4 * 4 * synchronous.num_params
    average = measure(tiny(outer=OuterConfig(kind="average", lr=1)), Placement())
    assert sum(average.memory().values()) == 5 * 4 * average.num_params
    assert average.wire_bytes == 0


def test_the_plan_of_a_run_with_rewards_has_the_memory_of_its_engine():
    path = next(path for path in CONFIGS if path.stem == "tiny-rl")
    config = load(path, []).config
    plan = measure(config, Placement())
    shape = LlamaConfig(**config.model.sizes, vocab_size=257, max_position_embeddings=config.data.seq_len)
    target = make_target(LlamaForCausalLM(shape), rows=1, max_tokens=config.data.seq_len)
    assert plan.kv_values_per_token == target.read_kv(0, 3).numel() // 3
    rows = config.rl.groups * config.rl.group_size
    expected = rows * config.data.seq_len * plan.kv_values_per_token * 4 / 2**20
    assert f"{rows} rows with {expected:.4g} MiB of keys and values" in render(plan)
    assert config.prompts.source in render(plan)


def test_the_plan_says_which_process_needs_which_copy_of_the_weights():
    """In copies of the fp32 weights. What two processes share is in both, and once in the sum."""
    path = next(path for path in CONFIGS if path.stem == "tiny-rl")
    keys = ["--rl.workers", "2", "--drafter.kind", "off"]
    plan = measure(load(path, keys).config, Placement(nodes=2, local=True))
    found, copy = {each.name: each for each in plan.processes()}, 4 * plan.num_params
    largest = 4 * max(numel for _, numel in plan.units)
    without = {name: sum(each.own.values()) - each.own["program"] for name, each in found.items()}
    assert without["node"] == 5 * copy, "parameters, gradients, two moments, values at the last push"
    assert without["agent"] == copy // 2 + 4 * largest, "a push in bf16, four units under way"
    assert without["hub"] == copy + 3 * largest, "anchors, a unit in merge; its outer optimizer has no state"
    assert without["worker"] == 3 * copy + 2**28, "in use, packed, and one that arrives; the prefix cache"
    assert sum(found["agent"].shared.values()) == 2 * copy, "anchors and outbox"
    assert sum(found["worker"].shared.values()) == 2 * copy, "two versions"
    assert sum(found["node"].shared.values()) == 4 * copy, "both"
    numbers = {name: each.number for name, each in found.items()}
    assert numbers == {"node": 2, "agent": 2, "hub": 1, "worker": 4, "torchrun": 2, "aedit run": 1}
    own = sum(each.number * sum(each.own.values()) for each in found.values())
    assert f"memory here      {(own + 2 * 4 * copy) / 2**30:.4g} GiB of " in render(plan)
    with_momentum = measure(load(path, [*keys, "--outer.kind", "nesterov"]).config, Placement(local=True))
    (hub,) = (each for each in with_momentum.processes() if each.name == "hub")
    assert hub.own["outer optimizer"] == copy


def test_the_plan_of_a_run_without_a_hub_has_anchors_in_the_node_and_no_other_process_with_weights():
    plan = measure(tiny(local=LocalConfig(ranks=2)), Placement(nodes=3, local=True))
    found = {each.name: each for each in plan.processes()}
    assert found.keys() == {"node", "torchrun", "aedit run"}
    assert (found["node"].number, found["torchrun"].number) == (6, 1)
    assert sum(found["node"].own.values()) == found["node"].own["program"] + 6 * 4 * plan.num_params // 2
    assert not found["node"].shared


def test_the_plan_counts_the_drafter_that_a_process_beside_the_rank_trains():
    path = next(path for path in CONFIGS if path.stem == "tiny-rl")
    config = load(path, ["--drafter.kind", "layer"]).config
    plan = measure(config, Placement())
    assert plan.drafter_params > 0
    found = {each.name: each for each in plan.processes()}["drafter's trainer"]
    assert found.own["features"] == config.drafter.memory_bytes
    assert found.own["layer"] == 6 * 4 * plan.drafter_params
    off = measure(load(path, ["--drafter.kind", "suffix"]).config, Placement())
    assert off.drafter_params == 0
    assert "drafter's trainer" not in render(off)


def test_the_plan_of_a_clocked_run_counts_rounds_by_time():
    edit = EditConfig(schedule="seconds", every=30)
    assert measure(tiny(edit=edit, train=TrainConfig(seconds=100)), Placement()).num_rounds == 3 + 1
    assert measure(tiny(edit=edit), Placement()).num_rounds is None


def test_the_plan_of_a_pretrained_model_reads_its_configuration_only(tmp_path):
    LlamaConfig(**SIZES, vocab_size=257, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    config = RunConfig(device="cpu", model=ModelConfig(pretrained=str(tmp_path)))
    with torch.device("meta"):
        reference = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=257))
    assert measure(config, Placement()).num_params == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny(edit=EditConfig(units=("nowhere.*",))), "nowhere"),
        (RunConfig(model=ModelConfig(pretrained="/nowhere")), "model.pretrained"),
        (RunConfig(device="cpu", model=ModelConfig(sizes={"hiden_size": 64})), "hiden_size"),
    ],
)
def test_what_cannot_be_planned_is_named(config, message):
    with pytest.raises(UserError, match=message):
        measure(config, Placement())
