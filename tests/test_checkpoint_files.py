"""Tests the files of a checkpoint: what is in them, that half of one is refused, and the memory it takes."""

import gc
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_jobs.checkpoint_jobs import VALUES
from kit import text_nodes
from safetensors.torch import load_file

from aedit.edit import Shards
from aedit.launch.node import Mark, NodeCheckpoints
from aedit.types import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
META = {"sync": {"steps": 3}}
MARK = Mark(1)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def states():
    """Return the state of a node: tensors of all kinds under several levels of names, and other values."""
    chance = torch.Generator().manual_seed(0)
    embedding = torch.randn(7, 5, generator=chance)
    flat = torch.randn(12, generator=chance)
    inner = {str(dtype): (100 * torch.rand(3, 5, generator=chance)).to(dtype) for dtype in DTYPES}
    return {
        "model": {"embed.weight": embedding, "head.weight": embedding, "turned": flat[:6].view(2, 3).t()},
        "inner": {
            "state": {**inner, "step": torch.tensor(3.0), "none": torch.empty(0, 4), "on": flat > 0},
            "param_groups": [{"lr": 0.125, "betas": (0.5, 0.75), "maximize": False}],
        },
        "sync": {"anchor/a": flat[:6], "anchor/b": flat[6:].view(2, 3)},
        "rng": torch.get_rng_state(),
    }


def blank(state):
    """Return the state with zeros for its numbers."""
    if isinstance(state, dict):
        return {name: blank(value) for name, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def leaves(state, prefix=""):
    for name, value in state.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def assert_equal(found, expected):
    found, expected = dict(leaves(found)), dict(leaves(expected))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


@pytest.fixture
def checkpoints(tmp_path):
    return NodeCheckpoints(tmp_path / "checkpoints", keep=2, shards=Shards())


def test_a_checkpoint_is_one_file_that_any_reader_of_safetensors_reads(checkpoints):
    state = states()
    num_bytes = checkpoints.save(MARK, state, META)
    files = {path.name: path.stat().st_size for path in checkpoints.path(MARK).iterdir()}
    assert files.keys() == {"rank_0.safetensors", ".metadata", "meta.json"}
    assert num_bytes == sum(files.values())
    found = load_file(checkpoints.path(MARK) / "rank_0.safetensors")
    expected = {name: value for name, value in leaves(state) if isinstance(value, torch.Tensor)}
    del expected["model.head.weight"]  # the same tensor as the embedding
    assert {name for name in found if not name.startswith("inner.param_groups.")} == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def test_what_was_saved_is_loaded_bit_for_bit_with_values_that_are_no_tensors(checkpoints):
    state = states()
    checkpoints.save(MARK, state, META)
    loaded = blank(state)
    checkpoints.load(MARK, loaded)
    assert_equal(loaded, state)


def test_a_checkpoint_of_an_older_version_is_loaded(checkpoints):
    """Older versions let torch.distributed.checkpoint call torch.save for each tensor."""
    state, path = states(), checkpoints.path(MARK)
    path.mkdir(parents=True)
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    (path / "meta.json").write_text(json.dumps(META))
    assert not list(path.glob("*.safetensors"))
    assert checkpoints.marks() == [MARK]
    loaded = blank(state)
    checkpoints.load(MARK, loaded)
    assert_equal(loaded, state)


@pytest.mark.parametrize("file", ["rank_0.safetensors", ".metadata"])
def test_a_file_that_was_cut_short_anywhere_is_refused(checkpoints, file):
    state = states()
    checkpoints.save(MARK, state, META)
    path = checkpoints.path(MARK) / file
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(
            UserError, match=r"round_000001 cannot be read .*remove it to resume from an older"
        ):
            checkpoints.load(MARK, blank(state))
    path.unlink()
    with pytest.raises(UserError, match="round_000001 cannot be read"):
        checkpoints.load(MARK, blank(state))
    path.write_bytes(whole)
    checkpoints.load(MARK, blank(state))


def test_every_file_is_on_disk_before_a_checkpoint_has_its_name(checkpoints, monkeypatch):
    log = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def synced(fd):
        fsync(fd)
        log.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))

    def renamed(source, target, **options):
        log.append(("name", Path(target).name))
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(
        os,
        "replace",
        lambda source, target: (log.append(("name", Path(target).name)), replace(source, target)),
    )
    checkpoints.save(MARK, states(), META)
    named = [name for act, name in log if act == "name"]
    assert named[-2:] == ["meta.json", "round_000001"]
    data, metadata = log.index(("sync", "rank_0.safetensors")), log.index(("sync", ".metadata.tmp"))
    assert data < metadata < log.index(("name", "meta.json")) < log.index(("name", "round_000001"))
    assert log.index(("name", "round_000001")) < log.index(("sync", "checkpoints"))


def test_a_dtype_that_the_file_cannot_hold_is_named_and_older_checkpoints_stay(checkpoints):
    checkpoints.save(MARK, states(), META)
    with pytest.raises(OSError, match=r"model\.phase has the dtype torch\.complex128"):
        checkpoints.save(Mark(2), {"model": {"phase": torch.zeros(2, dtype=torch.complex128)}}, META)
    assert checkpoints.marks() == [MARK]
    assert [path.name for path in checkpoints.directory.iterdir()] == ["round_000001"]


def peak_bytes():
    """Return the highest resident memory since the last call of `forget_peak`, and the present one."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [1024 * int(lines[name].split()[0]) for name in ("VmHWM", "VmRSS")]


def forget_peak():
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.parametrize("is_loaded", [False, True], ids=["written", "read"])
def test_the_state_is_not_copied_while_it_is(checkpoints, is_loaded):
    """One tensor at a time is in memory twice."""
    size, parts = 2**27, 16
    flat = torch.ones(size // 4)
    state = {"sync": {str(i): part for i, part in enumerate(flat.chunk(parts))}}
    if is_loaded:
        checkpoints.save(MARK, state, META)
    forget_peak()
    before = peak_bytes()[1]
    if is_loaded:
        checkpoints.load(MARK, state)
        # Pages of the file that is read are in the page cache, which the system takes back at will.
        assert peak_bytes()[0] - before < size + 4 * size // parts
    else:
        checkpoints.save(MARK, state, META)
        assert peak_bytes()[0] - before < 4 * size // parts
    shutil.rmtree(checkpoints.directory)


def test_each_rank_writes_a_file_and_another_number_of_ranks_reads_them(world, tmp_path):
    jobs, directory = "tests/dist_jobs/checkpoint_jobs.py", tmp_path / "checkpoints"
    world.run(jobs, "save", size=2, args={"directory": str(directory)})
    files = {path.name for path in (directory / "round_000001").glob("*.safetensors")}
    assert files == {"rank_0.safetensors", "rank_1.safetensors"}
    for size in (1, 3):
        for found in world.run(jobs, "load", size=size, args={"directory": str(directory)}):
            assert found == (VALUES.tolist(), VALUES[0].tolist())


@pytest.mark.parametrize(
    ("at_a_hub", "share", "rounds"),
    [(True, 1e-9, [1, 7]), (True, 1.0, [1, 2, 3, 4, 5, 7]), (False, 1e-9, [1, 2, 3, 4, 5, 7])],
    ids=["checkpoints take long", "any time is allowed", "nodes must have checkpoints of the same round"],
)
def test_checkpoints_are_put_off_at_a_hub_if_they_take_more_than_their_share(
    tmp_path, at_a_hub, share, rounds
):
    """The first one is written when it is due: what it takes is not known before. So is that of the end."""
    keys = {"train__steps": 12, "edit__every": 2, "checkpoint__every": 1, "checkpoint__time_share": share}

    def join(node):
        if at_a_hub:
            node.hub = SimpleNamespace(
                begin=lambda node: None, record_step=lambda node: None, next_number=lambda unit: 0
            )

    node = text_nodes.run(text_nodes.config_of(tmp_path, **keys), join)
    events = map(json.loads, (node.recorder.directory / "events.jsonl").read_text().splitlines())
    assert [event["round"] for event in events if event["event"] == "checkpoint"] == rounds
