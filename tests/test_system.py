"""Tests operating-system primitives."""

import gc
import os
import subprocess
import sys

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


PRINTS = """
import resource, sys
from aedit.system import drop_output_without_room
{drops}
print("first", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
print("lost", flush=True)
print("lost too", file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("last")
print("and the end", file=sys.stderr)
"""


@pytest.mark.parametrize("drops", [True, False])
def test_a_log_on_a_full_disk_loses_lines_and_does_not_end_its_process(tmp_path, drops):
    """Found: a hub that gave up its lease for lack of room ended as it could not print a warning."""
    log = tmp_path / "log"
    with log.open("a") as file:
        code = PRINTS.format(drops="drop_output_without_room()" if drops else "")
        done = subprocess.run([sys.executable, "-c", code], stdout=file, stderr=file, timeout=60)
    assert (done.returncode == 0) is drops
    if drops:
        assert log.read_text().splitlines() == ["first", "last", "and the end"]


def test_output_into_a_pipe_stays_as_it_is():
    code = "import sys\nfrom aedit.system import drop_output_without_room\nbefore = sys.stdout\n"
    code += "drop_output_without_room()\nprint(sys.stdout is before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True"
