"""Tests operating-system primitives."""

import gc
import os

import pytest

from aedit.system import check_folder, no_collections, opened_below


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_suspended_for_a_block_and_then_as_before(enabled):
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with no_collections():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_links_of_the_owner_are_followed_and_no_link_leads_out_of_a_root(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "a").write_text("x")
    folder = tmp_path / "snapshots" / "main"
    folder.mkdir(parents=True)
    (folder / "config.json").symlink_to("../../blobs/a")
    check_folder(folder)
    check_folder(folder, tmp_path)
    with pytest.raises(ValueError, match=r"^config\.json is a link to outside of the allowed directory$"):
        check_folder(folder, tmp_path / "snapshots")


def test_a_file_is_judged_by_what_was_opened(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("inside")
    (tmp_path / "file").write_text("outside")
    with opened_below(root / "file", root) as path:
        (root / "file").unlink()
        (root / "file").symlink_to(tmp_path / "file")
        assert path.read_text() == "inside"
    with pytest.raises(ValueError, match="link to outside"), opened_below(root / "file", root):
        pass
    os.mkfifo(root / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(ValueError, match="no regular file"), opened_below(root / name, root):
            pass
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="no regular file"), opened_below(root / "pipe", root):
        pass
    assert len(os.listdir("/proc/self/fd")) == descriptors
