"""Tests the settings that hub and nodes must have in common, whatever their builds."""

import hashlib
import json

from aedit.launch.config import RunConfig, difference, method, parse_config, to_toml, with_flags
from aedit.launch.config.fields import defaults
from aedit.proto.rpc import PROTOCOL

DEFAULTS = {7: "9b059f9d7664595c"}
"""SHA-256, by protocol number, of the names and defaults of all settings that decide the result."""


def test_a_default_that_changes_or_goes_needs_a_new_protocol_number():
    """New settings need none: a build that lacks a setting takes part as long as it is at its default."""
    text = json.dumps(sorted(defaults().items()))
    found = hashlib.sha256(text.encode()).hexdigest()[:16]
    message = "a new PROTOCOL if a default has changed; else the new digest here"
    assert {PROTOCOL: found} == DEFAULTS, message


def test_a_value_given_as_it_is_by_default_is_no_difference():
    usual, given = RunConfig(), with_flags(RunConfig(), ["--edit.every", "128", "--outer.lr", "0.8"])
    assert method(usual) == method(given) == {}


def test_the_first_setting_that_differs_is_named_with_both_values():
    ours = method(with_flags(RunConfig(), ["--edit.every", "64", "--outer.lr", "0.5"]))
    assert difference(ours, ours) is None
    assert difference(ours, {"outer.lr": "0.5"}) == ("edit.every", "64.0", "128")
    assert difference(ours, ours | {"outer.lr": "0.6"}) == ("outer.lr", "0.5", "0.6")
    assert difference({"edit.strange": "1"}, {}) == ("edit.strange", "1", "its default")


def test_what_a_machine_chooses_for_itself_is_no_difference():
    flags = ["--train.batch_size", "2", "--model.dtype", "bf16", "--edit.timeout_s", "60"]
    assert method(with_flags(RunConfig(), flags)) == {}


def test_a_hub_sends_only_what_is_not_at_its_default():
    """An older build can then read the configuration of a newer one."""
    config = with_flags(
        RunConfig(), ["--edit.every", "64", "--edit.penalty.clip", "none", "--model.sizes.n", "3"]
    )
    text = to_toml(config, defaults=False)
    assert parse_config(text, "hub") == config
    assert text == '[model.sizes]\nn = 3\n\n[edit]\nevery = 64.0\n\n[edit.penalty]\nclip = "none"\n'
