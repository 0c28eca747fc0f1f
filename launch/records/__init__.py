"""The run directory: preparation, metrics and event records, and their reader. Imports no torch.

run_directory: prepares it, and reads how a start ended.
recorder: writes a node's metrics and events, also to experiment trackers.
positions: writes and reads what became of each position of the stream; `accounts` adds it up.
alerts: states of a node or hub that need attention.
reader: reads all of it, once or repeatedly. Begin there.
kept_rollouts: writes and reads the rollouts that a rank keeps for views.
records, hub_records, server_records: the frozen values of nodes, of hubs and swarms, and of the folder of one
rollout server.

The processes of a run write, `launch.views` reads.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.records.accounts import (
        Accounts,
        Bias,
        JournalFacts,
        Lease,
        NodeTotals,
        SampleVerdict,
        accounts_of,
    )
    from aedit.launch.records.alerts import OF_NODE_WITH_HUB, Alerts, HubWatch, NodeAlerts, NodeWatch
    from aedit.launch.records.hub_records import (
        HubRecords,
        HubSample,
        NodeSample,
        PartSample,
        PeerSample,
        ServerSample,
        SwarmSample,
        Totals,
        by_node,
        gained,
        totals,
    )
    from aedit.launch.records.kept_rollouts import (
        FOLDER,
        MOST_PROMPT,
        MOST_TOKENS,
        KeptRollout,
        KeptToken,
        RolloutStore,
        read_rollouts,
    )
    from aedit.launch.records.positions import PositionLog, ranges_of, read_positions
    from aedit.launch.records.reader import (
        NodeRecords,
        Run,
        RunFollower,
        Tail,
        read_run,
        require_run,
        thinned,
    )
    from aedit.launch.records.recorder import Clock, Recorder, open_trackers
    from aedit.launch.records.records import (
        BAD_LINE,
        IN_WAIT,
        KEY_FILE,
        EvalEvent,
        Line,
        Metric,
        RLMetric,
        RoundEvent,
        float_or_nan,
        text,
    )
    from aedit.launch.records.run_directory import (
        FAILED,
        claimed,
        differences,
        error_of,
        failure_in,
        has_trained,
        indices_of,
        next_attempt,
        prepare,
        refusal_in,
        resting_file,
    )
    from aedit.launch.records.server_records import (
        ServingRecords,
        ServingSample,
        is_server_folder,
        read_server,
    )

__all__ = [
    "BAD_LINE",
    "FAILED",
    "FOLDER",
    "IN_WAIT",
    "KEY_FILE",
    "MOST_PROMPT",
    "MOST_TOKENS",
    "OF_NODE_WITH_HUB",
    "Accounts",
    "Alerts",
    "Bias",
    "Clock",
    "EvalEvent",
    "HubRecords",
    "HubSample",
    "HubWatch",
    "JournalFacts",
    "KeptRollout",
    "KeptToken",
    "Lease",
    "Line",
    "Metric",
    "NodeAlerts",
    "NodeRecords",
    "NodeSample",
    "NodeTotals",
    "NodeWatch",
    "PartSample",
    "PeerSample",
    "PositionLog",
    "RLMetric",
    "Recorder",
    "RolloutStore",
    "RoundEvent",
    "Run",
    "RunFollower",
    "SampleVerdict",
    "ServerSample",
    "ServingRecords",
    "ServingSample",
    "SwarmSample",
    "Tail",
    "Totals",
    "accounts_of",
    "by_node",
    "claimed",
    "differences",
    "error_of",
    "failure_in",
    "float_or_nan",
    "gained",
    "has_trained",
    "indices_of",
    "is_server_folder",
    "next_attempt",
    "open_trackers",
    "prepare",
    "ranges_of",
    "read_positions",
    "read_rollouts",
    "read_run",
    "read_server",
    "refusal_in",
    "require_run",
    "resting_file",
    "text",
    "thinned",
    "totals",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
