"""Tests operating-system primitives."""

import gc

import pytest

from aedit.system import no_collections


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
