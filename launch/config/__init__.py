"""Configuration of a run: values, files, flags. Imports no torch.

Begin at `config.RunConfig` and `loading.load`.

config, rl, swarm: the tables of a configuration file.
loading: from TOML files, presets and flags to one value, with the origin of each key.
fields: keys by dotted name, as types and as TOML text; which of them decide the result.
flags: keys as flags of the command line, and their help.
checks: keys without effect, and objects named by import path.
memory: what a run needs, and what the machine has.
placement: which nodes run where, and the commands that start them.

Every command loads one; nodes, hubs and peers get it from `run.toml` or from the hub.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.config.checks import (
        LOAD_S,
        TRIAL_S,
        check_effects,
        check_imports,
        first_call,
        load_object,
    )
    from aedit.launch.config.config import (
        AlertConfig,
        DataConfig,
        ModelConfig,
        RunConfig,
        TraceConfig,
        TrainConfig,
        given_to_nodes,
        of_this_machine,
        samples_per_step,
        tokens_per_step,
        unit_rules,
    )
    from aedit.launch.config.fields import difference, hints, literal, method, to_toml, values
    from aedit.launch.config.flags import flag_keys, flags_help, split_flags, with_flags
    from aedit.launch.config.loading import (
        PREFIX,
        continued,
        load,
        load_run,
        parse_config,
        preset_names,
        preset_text,
    )
    from aedit.launch.config.memory import (
        FP32_BYTES,
        check_memory,
        least_parameters,
        machine_bytes,
        state_bytes,
        trains_on_cpu,
    )
    from aedit.launch.config.placement import (
        FIRST,
        JoinOptions,
        NodeOptions,
        Placement,
        check_hub_start,
        ranks_per_node,
        warnings,
    )
    from aedit.launch.config.rl import DrafterConfig, PromptConfig, RewardConfig, RLConfig, VllmConfig
    from aedit.launch.config.swarm import PEER_EXCHANGES, SwarmConfig

__all__ = [
    "FIRST",
    "FP32_BYTES",
    "LOAD_S",
    "PEER_EXCHANGES",
    "PREFIX",
    "TRIAL_S",
    "AlertConfig",
    "DataConfig",
    "DrafterConfig",
    "JoinOptions",
    "ModelConfig",
    "NodeOptions",
    "Placement",
    "PromptConfig",
    "RLConfig",
    "RewardConfig",
    "RunConfig",
    "SwarmConfig",
    "TraceConfig",
    "TrainConfig",
    "VllmConfig",
    "check_effects",
    "check_hub_start",
    "check_imports",
    "check_memory",
    "continued",
    "difference",
    "first_call",
    "flag_keys",
    "flags_help",
    "given_to_nodes",
    "hints",
    "least_parameters",
    "literal",
    "load",
    "load_object",
    "load_run",
    "machine_bytes",
    "method",
    "of_this_machine",
    "parse_config",
    "preset_names",
    "preset_text",
    "ranks_per_node",
    "samples_per_step",
    "split_flags",
    "state_bytes",
    "to_toml",
    "tokens_per_step",
    "trains_on_cpu",
    "unit_rules",
    "values",
    "warnings",
    "with_flags",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
