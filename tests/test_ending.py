"""Tests how `aedit run` reads from a run directory how its nodes ended."""

import json

import pytest

from aedit.launch.records import has_trained, indices_of


@pytest.mark.parametrize(("last_stop", "trained"), [(40, False), (41, True)])
def test_a_start_that_found_nothing_to_do_is_told_from_one_that_trained(tmp_path, last_stop, trained):
    events = [
        {"event": "start", "step": 0},
        {"event": "stop", "step": 40},
        {"event": "start", "step": 40},
        {"event": "stop", "step": last_stop},
    ]
    for node in (0, 1):
        home = tmp_path / "nodes" / str(node)
        home.mkdir(parents=True)
        lines = events if node == 1 else events[:3] + events[1:2]
        (home / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines) + '{"torn')
    assert has_trained(tmp_path, (0, 1)) is trained


def test_a_node_that_has_joined_is_found_by_its_name(tmp_path):
    for index, name in ((3, "box"), (4, "box-2")):
        home = tmp_path / "nodes" / str(index)
        home.mkdir(parents=True)
        (home / "name").write_text(name)
    assert indices_of(tmp_path, "box") == (3,)
    assert indices_of(tmp_path, "nobody") == ()
