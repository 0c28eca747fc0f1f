"""Checks that rollouts of a server are those of the policy."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.audit.auditor import score
    from aedit.spec_rollout.audit.calibration import (
        Calibration,
        OwnNoise,
        calibrate,
        calibration_of,
        read_calibrations,
        write_calibrations,
    )
    from aedit.spec_rollout.audit.form import form_error
    from aedit.spec_rollout.audit.hook import Auditor, AuditVerdict, HeldRollout, WeightReader, try_auditor
    from aedit.spec_rollout.audit.judge import RewardRecord, Scored, ServerRecord
    from aedit.spec_rollout.audit.make import shaped_model
    from aedit.spec_rollout.audit.recording import CONFIG, read_recording, signature_error, weights_files
    from aedit.spec_rollout.audit.statement import Origin, is_signed, signature_of, statement_of, versions_of
    from aedit.spec_rollout.audit.token_margins import ClaimedTokens, Margins, margins, not_auditable
    from aedit.spec_rollout.audit.versions import PolicyVersions

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
    "statement_of",
    "try_auditor",
    "versions_of",
    "weights_files",
    "write_calibrations",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
