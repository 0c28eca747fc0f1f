"""`aedit audit`: check recorded rollouts of servers against the policy that they claim."""

import json
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import logging

from aedit.launch.cli.arguments import policy_folder
from aedit.launch.cli.export import load_run_model
from aedit.launch.cli.policy import read_model
from aedit.spec_rollout.audit import (
    CONFIG,
    Calibration,
    HeldRollout,
    Margins,
    OwnNoise,
    PolicyVersions,
    Scored,
    ServerRecord,
    calibrate,
    calibration_of,
    form_error,
    not_auditable,
    read_calibrations,
    read_recording,
    score,
    shaped_model,
    signature_error,
    weights_files,
    write_calibrations,
)
from aedit.spec_rollout.sampling import decode_sampling
from aedit.types import UserError, first_line

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_logging: Any = logging  # its functions carry no types


@dataclass(slots=True)
class ServerResult:
    """Checks of one server's rollouts."""

    record: ServerRecord = field(default_factory=ServerRecord)
    reasons: list[str] = field(default_factory=list)
    unjudged: Counter[str] = field(default_factory=Counter)
    """Tokens that could not be judged, by the reason."""
    parts: list[tuple[Margins, Tensor]] = field(default_factory=list)
    """Judged tokens, of a trusted server."""


def audit(options: Namespace) -> int:
    """Print a table of the servers; return 1 if one fails, else 0.

    Raises UserError if a file or model cannot be read, or nothing could be judged.
    """
    _logging.disable_progress_bar()
    try:
        rollouts = list(read_recording(options.file))
        table = read_calibrations(options.calibration) if options.calibration else {}
    except (OSError, ValueError) as error:
        raise UserError(first_line(error)) from None
    if not rollouts:
        raise UserError(f"{options.file}: no rollout is in it")
    policy = load_versions(options, versions_in(rollouts))
    results = check_all(rollouts, policy, table, options.trust)
    print_results(results, policy)
    if not any(each.record.num_tokens or each.parts or each.reasons for each in results.values()):
        raise UserError(
            f"{options.file}: no token could be judged: give the weights of its versions with "
            f"--model VERSION=DIR ({', '.join(map(str, versions_in(rollouts)))})"
        )
    if options.calibrate is not None:
        _calibrate(options, results, policy.dtype)
    return int(any(each.reasons for each in results.values()))


def versions_in(rollouts: Sequence[HeldRollout]) -> list[int]:
    """Return the policy versions of the tokens that servers have generated."""
    return sorted({version for each in rollouts for version in each.versions[each.start :]})


def load_versions(options: Namespace, versions: Sequence[int]) -> PolicyVersions:
    """Return the policy versions that are needed and given.

    Raises UserError if a model cannot be read, or several models differ in shape, or none is given.
    """
    weights: dict[int, Mapping[str, Tensor]] = {}
    model: nn.Module | None = None
    dtype = DTYPES.get(options.dtype)
    for version, place in _places(options.model, versions).items():
        path = policy_folder(place)
        is_run = (path / "run.toml").is_file()
        loaded: nn.Module = load_run_model(path)[0] if is_run else read_model(place, path)
        model = loaded.to(dtype=dtype)
        weights[version] = {name: value.detach().clone() for name, value in model.state_dict().items()}
    kept = weights_files(options.file.parent)
    for version in sorted({*kept} & {*versions} - {*weights}):
        try:
            weights[version] = load_file(kept[version])
        except Exception as error:  # safetensors raises an exception of its own
            raise UserError(f"{kept[version]}: cannot be read ({first_line(error)})") from None
    if model is None and weights:
        dtype = dtype or next(iter(next(iter(weights.values())).values())).dtype
        model = _beside(options.file.parent).to(dtype=dtype)
    if model is None:
        raise UserError(
            f"{options.file}: the weights of versions {', '.join(map(str, versions))} are not beside it: "
            "give them with --model VERSION=DIR"
        )
    policy = PolicyVersions(model, kept=len(weights))
    try:
        for version in sorted(weights):
            policy.add(version, weights[version])
    except ValueError as error:
        raise UserError(str(error)) from None
    return policy


def check_all(
    rollouts: Sequence[HeldRollout],
    policy: PolicyVersions,
    table: Mapping[str, Calibration],
    trusted: Sequence[str] = (),
) -> dict[str, ServerResult]:
    """Return the results by server. Samples of trusted servers are measured and not judged."""
    results: dict[str, ServerResult] = {}
    noise = OwnNoise(policy.dtype)
    for held in rollouts:
        result = results.setdefault(held.server, ServerResult())
        sampling = decode_sampling(held.sampling)
        name = f"sample {held.key[0]}/{held.key[1]}"
        wrong = signature_error(held) or form_error(held, sampling, policy.vocabulary)
        if wrong:
            result.reasons.append(f"{name}: {wrong}")
            continue
        reason = not_auditable(sampling)
        if reason:
            result.unjudged[reason] += len(held.tokens) - held.start
            continue
        scored = score(policy, held, sampling, noise)
        for version in held.versions[held.start :]:
            if version not in policy.versions:
                result.unjudged[f"version {version} is not given"] += 1
        if held.server in trusted:
            result.parts.append((scored.margins, torch.tensor(scored.logprobs, dtype=torch.float64)))
        elif scored.tokens:
            _judge(result, scored, calibration_of(held.server, table, policy.dtype, noise), name)
    return results


def print_results(results: Mapping[str, ServerResult], policy: PolicyVersions) -> None:
    """Print a line for each server, the first reasons of failures, and what could not be judged."""
    table = Table(
        *("server", "samples", "tokens", "mismatches", "other tokens", "log-prob bias"),
        *("largest margin", "failures", "result"),
    )
    for server, result in sorted(results.items()):
        record, margins = result.record, [part.margins_T for part, _ in result.parts]
        others = record.num_others + sum(int((each > 0).sum()) for each in margins)
        apart = record.sum_of_differences + sum(
            float((x - part.logprobs_T).sum()) for part, x in result.parts
        )
        tokens = record.num_tokens + sum(map(len, margins))
        largest = max([record.largest_margin, *(float(each.max()) for each in margins if len(each))])
        verdict = "trusted" if margins else "passed" if tokens else "not judged"
        table.add_row(
            server,
            str(record.num_samples + len(margins)),
            str(tokens),
            str(record.num_mismatches),
            f"{others / max(1, tokens):.3%}",
            f"{apart / max(1, tokens):+.1e}",
            f"{largest:.3g}",
            str(len(result.reasons)),
            "FAILED" if result.reasons else verdict,
        )
    console = Console(width=max(100, Console().width), highlight=False, markup=False)
    console.print(table)
    for server, result in sorted(results.items()):
        for reason in result.reasons[:3]:
            console.print(f"{server}: {reason}")
        for reason, count in result.unjudged.items():
            console.print(f"{server}: {count} tokens not judged: {reason}")


def _judge(result: ServerResult, scored: Scored, calibration: Calibration, name: str) -> None:
    result.record, judgement = result.record.judge(scored, calibration)
    if judgement.reason:
        found = judgement.evidence
        result.reasons.append(
            f"{name}: {judgement.reason} (place {found['place']}: token {found['token']}, right "
            f"{found['right_token']}, margin {found['margin']:.4g}, version {found['version']})"
            if isinstance(found["margin"], float)
            else f"{name}: {judgement.reason} (place {found['place']}: token {found['token']})"
        )


def _calibrate(options: Namespace, results: Mapping[str, ServerResult], dtype: torch.dtype) -> None:
    made = {}
    for server in options.trust:
        parts = results[server].parts if server in results else []
        try:
            made[server] = calibrate(parts, dtype)
        except ValueError as error:
            raise UserError(f"server {server}: {error}") from None
        print(
            f"{server}: eps {made[server].eps:.3g}, tau {made[server].tau:.3g}, mismatches up to "
            f"{made[server].rate:.3g}, other tokens up to {made[server].ties:.2f} of those expected, bias "
            f"{made[server].largest_bias:.3g}, from {made[server].num_tokens} tokens"
        )
    try:
        write_calibrations(options.calibrate, made)
    except OSError as error:
        raise UserError(f"{options.calibrate}: cannot be written: {error.strerror or error}") from None


def _places(models: Sequence[str], versions: Sequence[int]) -> dict[int, str]:
    """Return the place of each given version. Raises UserError if that of a model is not clear."""
    found: dict[int, str] = {}
    for text in models:
        number, is_given, place = text.partition("=")
        if is_given and number.isdecimal():
            found[int(number)] = place
        elif len(versions) == 1:
            found[versions[0]] = text
        else:
            known = ", ".join(map(str, versions))
            raise UserError(f"--model {text}: the file has versions {known}; say which: --model VERSION=DIR")
    return {version: place for version, place in found.items() if version in versions}


def _beside(directory: Path) -> nn.Module:
    """Return a model of the recorded configuration."""
    try:
        return shaped_model(json.loads((directory / CONFIG).read_text()), "float32", "cpu")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory / CONFIG}: no configuration of a model ({first_line(error)})") from None
