"""The auditor of a connection process, made of words that JSON can hold."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from aedit.spec_rollout.audit.auditor import AuditSettings, SpotAuditor
from aedit.spec_rollout.audit.calibration import read_calibrations
from aedit.spec_rollout.audit.rates import RateRule
from aedit.spec_rollout.audit.recording import Recording

_transformers: Any = (AutoConfig, AutoModelForCausalLM, AutoTokenizer)  # their methods carry no types


class ConnectionSettings(Protocol):
    """The settings of a connection process that its auditor needs."""

    @property
    def tokenizer(self) -> str:
        """Return the directory of a saved tokenizer; empty: none."""

    @property
    def audit_options(self) -> Mapping[str, Any]:
        """Return the arguments of `make_auditor`'s parts."""


def make_auditor(settings: ConnectionSettings) -> SpotAuditor:
    """Return the auditor for `audit_options`.

    `model` is the configuration of the policy, `dtype` and `device` those of its engine, `calibration` a file
    or empty, `record` a directory or empty; the others are keys of `[audit]`.

    Raises:
        ValueError: The file of calibrations is not one.
        OSError: It cannot be read.
    """
    options = settings.audit_options
    torch.set_num_threads(options["threads"])
    table = read_calibrations(Path(options["calibration"])) if options["calibration"] else {}
    rule = RateRule(rate=options["rate"], floor=options["floor"], halved_by=options["halved_by"])
    recording = None
    if options["record"]:
        recording = Recording(
            Path(options["record"]),
            max_bytes=options["record_bytes"],
            versions=options["record_versions"],
            model=options["model"],
        )
    _, _, tokenizers = _transformers
    return SpotAuditor(
        lambda: shaped_model(options["model"], options["dtype"], options["device"]),
        AuditSettings(rule=rule, versions_kept=options["versions"], calibrations=table),
        tokenizer=tokenizers.from_pretrained(settings.tokenizer, trust_remote_code=False)
        if settings.tokenizer
        else None,
        recording=recording,
    )


def shaped_model(model: Mapping[str, Any], dtype: str, device: str) -> nn.Module:
    """Return a model of this configuration with random weights.

    Args:
        model: As `PretrainedConfig.to_dict` gives it.
        dtype: Name of the dtype in torch.
        device: Device.
    """
    configs, models, _ = _transformers
    sizes = dict(model)
    config = configs.for_model(sizes.pop("model_type"), **sizes)
    made: nn.Module = models.from_config(config, dtype=torch.float32)
    return made.to(device, getattr(torch, dtype)).eval()
