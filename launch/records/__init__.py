"""The run directory: preparation, metrics and event records, and their reader. Imports no torch."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.records.ending import FAILED, Ending, error_of, how, indices_of, refusal
    from aedit.launch.records.hub_records import (
        HubRecords,
        HubSample,
        NodeSample,
        Totals,
        by_node,
        gained,
        totals,
    )
    from aedit.launch.records.reader import NodeRecords, Run, RunFollower, read_run, require_run
    from aedit.launch.records.recorder import Clock, Recorder
    from aedit.launch.records.records import EvalEvent, Metric, RoundEvent
    from aedit.launch.records.resting import resting_file
    from aedit.launch.records.rl_records import RLEvalEvent, RLMetric
    from aedit.launch.records.run_directory import claimed, differences, file_name, next_attempt, prepare
    from aedit.launch.records.server_records import KEY_FILE, ServerSample, ServerWork
    from aedit.launch.records.serving_records import (
        ServingRecords,
        ServingSample,
        is_server_folder,
        read_server,
    )
    from aedit.launch.records.sinks import Origin, open_sinks
    from aedit.launch.records.swarm_records import PartSample, PeerSample, SwarmSample
    from aedit.launch.records.values import BAD_LINE, number

__all__ = [
    "BAD_LINE",
    "FAILED",
    "KEY_FILE",
    "Clock",
    "Ending",
    "EvalEvent",
    "HubRecords",
    "HubSample",
    "Metric",
    "NodeRecords",
    "NodeSample",
    "Origin",
    "PartSample",
    "PeerSample",
    "RLEvalEvent",
    "RLMetric",
    "Recorder",
    "RoundEvent",
    "Run",
    "RunFollower",
    "ServerSample",
    "ServerWork",
    "ServingRecords",
    "ServingSample",
    "SwarmSample",
    "Totals",
    "by_node",
    "claimed",
    "differences",
    "error_of",
    "file_name",
    "gained",
    "how",
    "indices_of",
    "is_server_folder",
    "next_attempt",
    "number",
    "open_sinks",
    "prepare",
    "read_run",
    "read_server",
    "refusal",
    "require_run",
    "resting_file",
    "totals",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
