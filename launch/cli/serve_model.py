"""`aedit serve MODEL_DIR`: a Hugging Face model directory over HTTP, no run needed."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aedit import traces
from aedit.child import StopSignals
from aedit.launch.cli.export import FOLDER
from aedit.launch.cli.generate import AUTO, drafting_engine
from aedit.launch.cli.policy import Policy, read_directory
from aedit.launch.cli.service_options import control_address
from aedit.launch.node import vllm_settings
from aedit.launch.serve import Addresses, close_servers, read_keys, start_servers
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.http import HttpService, TextCodec
from aedit.spec_rollout.remote import EngineProcess, WorkerConfig
from aedit.spec_rollout.server import EngineHost, HostLimits, arm_of, check_supported
from aedit.system import keep_one_arena
from aedit.types import UserError, first_line

DEFAULT_MAX_TOKENS = 4096
LINE = "model"
LOOK_S = 0.5
START_S = 900.0
"""Limit of the time in which vLLM starts; on CUDA it compiles the model."""


def serve_model(options: Namespace) -> int:
    """Serve a model directory until Ctrl-C or SIGTERM; return the exit code.

    Raises:
        UserError: The model, an option or an address cannot be used.
    """
    keep_one_arena()
    addresses = _addresses(options)
    stop = StopSignals()
    wanted, name = options.traces, options.served_name or Path(options.place).resolve().name
    traces.begin(wanted.endpoint, "serve", ratio=wanted.ratio, model=name)
    try:
        return _serve(options, addresses, stop, name)
    finally:
        traces.end_traces()


def _serve(options: Namespace, addresses: Addresses, stop: StopSignals, name: str) -> int:
    policy = read_directory(options.place, Path(options.place))
    make = _vllm_engine if options.engine == "vllm" else _engine
    engine = make(policy, options)
    host = EngineHost(HostLimits(max_waiting_public=options.max_waiting))
    host.open(LINE, lambda: engine)
    service = HttpService(
        host=host, line=LINE, codec=TextCodec(policy.tokenizer), model=name, eos=policy.stop_tokens
    )
    service.metrics.follow(host.status)
    servers = start_servers(service, addresses)
    at = ", ".join(f"http://{server.address}" for server in servers[:1])
    control = f", control at http://{servers[1].address}" if len(servers) > 1 else ""
    print(f"serving {service.model} at {at}{control}", flush=True)
    while not stop.asked.wait(LOOK_S) and host.error is None:
        pass
    # Answers that are not finished in time are ended; new requests get 503 meanwhile.
    error, end_s = host.error, options.end_s
    if error is None and not host.drain(end_s):
        host.abort_all()
        host.drain(end_s)
    close_servers(servers)
    host.close()
    if error is not None:
        raise RuntimeError("the engine's thread has died") from error
    return 0


def _addresses(options: Namespace) -> Addresses:
    control = control_address(options.control) if options.control else None
    public, private = options.api_key_file, options.control_key_file
    return Addresses(
        host=options.host,
        port=options.port,
        keys=() if public is None else read_keys(public, "--api-key-file"),
        control=control,
        control_keys=() if private is None else read_keys(private, "--control-key-file"),
        weights_root=options.weights_root,
    )


def _engine(policy: Policy, options: Namespace) -> Engine:
    """Return the engine of the options."""
    device, max_tokens = _sizes(policy, options)
    dtype: Any = {} if options.dtype == "auto" else {"dtype": getattr(torch, options.dtype)}
    try:
        policy.model.to(device=device, **dtype)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: cannot be used: {first_line(error)}") from None
    arm = options.arm or AUTO
    drafter = None if options.drafter is None else Path(options.drafter)
    return drafting_engine(policy, arm, drafter, rows=options.rows, max_tokens=max_tokens)


def _vllm_engine(policy: Policy, options: Namespace) -> Any:
    """Return vLLM in a process of its own, when it has generated a token with the model's weights."""
    device, max_tokens = _sizes(policy, options)
    vllm, folder = options.vllm, Path(options.place).resolve()
    if vllm.has_own_drafter:
        if not (folder / FOLDER).is_dir():
            raise UserError(
                f"--rollout.vllm.speculative: {options.place} has no {FOLDER} of EAGLE-3's form: name a model"
            )
        vllm = replace(vllm, speculative={**vllm.speculative, "model": str(folder / FOLDER)})
    dtype = policy.model.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    model: Any = policy.model  # its `to` has no usable type
    model.to(dtype=dtype)
    engine = EngineProcess(
        policy.model,
        WorkerConfig(
            **vllm_settings(vllm),
            rows=options.rows,
            max_tokens=max_tokens,
            dtype=dtype,
            device=device,
            threads=torch.get_num_threads(),
            tokenizer=folder,
            starts_within_s=START_S,
        ),
        tokenizer=policy.tokenizer,
        arm=arm_of(vllm.speculative),
        check_sample=check_supported,
    )
    try:
        engine.update_weights(None, 1)
        engine.wait_ready()
    except (RuntimeError, ValueError) as error:
        engine.close()
        raise UserError(f"--engine vllm: {first_line(error)}") from None
    return engine


def _sizes(policy: Policy, options: Namespace) -> tuple[str, int]:
    """Return device, and the limit of prompt and answer."""
    device = options.device if options.device not in ("", "auto") else ""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    most = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    limit = most if isinstance(most, int) else DEFAULT_MAX_TOKENS
    max_tokens = options.max_tokens or min(limit, DEFAULT_MAX_TOKENS)
    if max_tokens > limit:
        raise UserError(f"--max-tokens {max_tokens}: this model has {limit} positions")
    return device, max_tokens
