"""Checks that rollouts of a server are those of the policy.

Connections to servers and `aedit audit` call it; begin with `auditor.py`.

- `statement.py`: signed rollouts, and the interface `Auditor`; `auditor.py`: the auditor, its rate of checks.
- `token_margins.py`: margins of claimed tokens under the verifier's policy versions.
- `judge.py`: rules and tests per server; `sequential.py`: the tests; `calibration.py`: numerical limits.
- `recording.py`: recorded rollouts.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.audit.auditor import score, shaped_model
    from aedit.spec_rollout.audit.calibration import (
        Calibration,
        OwnNoise,
        calibrate,
        calibration_of,
        read_calibrations,
        write_calibrations,
    )
    from aedit.spec_rollout.audit.judge import RewardRecord, Scored, ServerRecord, form_error
    from aedit.spec_rollout.audit.recording import CONFIG, read_recording, signature_error, weights_files
    from aedit.spec_rollout.audit.statement import (
        Auditor,
        AuditVerdict,
        HeldRollout,
        Origin,
        WeightReader,
        is_signed,
        signature_of,
        spans_of,
        statement_of,
        try_auditor,
        versions_of,
    )
    from aedit.spec_rollout.audit.token_margins import (
        ClaimedTokens,
        Margins,
        PolicyVersions,
        margins,
        not_auditable,
    )

__all__ = [
    "CONFIG",
    "AuditVerdict",
    "Auditor",
    "Calibration",
    "ClaimedTokens",
    "HeldRollout",
    "Margins",
    "Origin",
    "OwnNoise",
    "PolicyVersions",
    "RewardRecord",
    "Scored",
    "ServerRecord",
    "WeightReader",
    "calibrate",
    "calibration_of",
    "form_error",
    "is_signed",
    "margins",
    "not_auditable",
    "read_calibrations",
    "read_recording",
    "score",
    "shaped_model",
    "signature_error",
    "signature_of",
    "spans_of",
    "statement_of",
    "try_auditor",
    "versions_of",
    "weights_files",
    "write_calibrations",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
