"""The `aedit` command. Each subcommand imports its modules when it runs, so that `--help` is fast."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aedit
from aedit.launch.cli.arguments import (
    Parser,
    add_audit_options,
    add_generate_options,
    add_keys_options,
    check_audit_options,
    check_generate_options,
)
from aedit.launch.cli.service_options import (
    add_hub_options,
    add_peer_options,
    add_serve_options,
    run_hub,
    run_peer,
    serve_request,
)
from aedit.system import drop_output_without_room, end_with_named_parent
from aedit.types import RunFailed, UserError, printable

USER_ERROR = 2
INTERRUPTED = 130

Options = argparse.Namespace
Task = Callable[[Options], int | None]
AddOptions = Callable[[Parser], None]


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit code: 0, 1 for a failure, 2 for a user's error, 130 after Ctrl-C."""
    end_with_named_parent()
    # Characters that the terminal cannot encode are replaced by `?` instead of raising.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        return _dispatch(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        print(f"aedit: {error}", file=sys.stderr)
        return USER_ERROR
    except RunFailed as error:
        print(f"aedit: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has ended, as `head` does. Without this Python reports it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> Parser:
    """Return the parser of all commands and options, without the configuration flags."""
    top = Parser(prog="aedit", description="Asynchronous decentralized training.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"aedit {aedit.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, does: str, task: Task, *options: AddOptions, to: Any = commands) -> Parser:
        """Add a command with these options, in the order of its help."""
        described = f"{does[0].upper()}{does[1:]}."
        command: Parser = to.add_parser(name, help=does, description=described, allow_abbrev=False)
        command.set_defaults(task=task)
        for each in options:
            each(command)
        return command

    does = "train; the same command continues a stopped run"
    add("run", does, _run, _with_flags, _add_configs, _add_run, _add_trust)
    does = "run the hub of a training run, which nodes join at any time"
    add("hub", does, run_hub, _with_flags, _add_configs, add_hub_options, _add_trust)
    add("join", "join a run as a node", _join, _with_flags, _add_join, _add_trust)
    does = "keep replicas of parts of a swarm's model; aedit run and aedit join start it for each node"
    add("peer", does, run_peer, _with_flags, _add_configs, add_peer_options, _add_trust)
    does = "generate for a run, or serve a model over HTTP"
    serve = add("serve", does, _serve, _with_flags, add_serve_options, _add_trust)
    serve.set_defaults(command=serve)
    does = "make certificates and tokens for a hub, its nodes and others, or revoke them"
    add("keys", does, _keys, add_keys_options)
    for name, does in VIEWS.items():
        place = "run directory, such as runs/tiny, or HOST:PORT of a hub or a peer"
        view = add(name, does, _view)
        view.set_defaults(view=name)
        view.add_argument("run", metavar="RUN", help=place)
        if name == "view":
            does = "address of the page (default 127.0.0.1:0, a free port); elsewhere it needs --keys"
            view.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:0", help=does)
        if name == "plot":
            does = "write the page of `aedit view` as one file instead"
            view.add_argument("--html", action="store_true", help=does)
        _add_trust(view)
    ledger = add("ledger", "account for every sample of a run", _ledger)
    ledger.add_argument("run", metavar="RUN", help="run directory, such as runs/tiny")
    ledger.add_argument("--csv", metavar="FILE", type=Path, help="write a row for each position or range")
    ledger.add_argument("--parquet", metavar="FILE", type=Path, help="the same as Parquet; needs pyarrow")
    export = add("export", "write a Hugging Face model directory", _export)
    place = "run directory, a hub's folder in one, or HOST:PORT of a hub"
    export.add_argument("run", metavar="RUN", help=place)
    export.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    does = "require a drafter that other engines load: they start both with OUT/drafter"
    export.add_argument("--drafter", action="store_true", help=does)
    _add_trust(export)
    does = "generate text with speculative decoding, and print the speed"
    add("generate", does, _generate, add_generate_options)
    does = "train a drafter for the policy of a run, once, before the run"
    drafter = add("train-drafter", does, _train_drafter, _with_flags, _add_configs)
    does = "directory to write, for drafter.pretrained"
    drafter.add_argument("--out", metavar="DIR", type=Path, required=True, help=does)
    does = "minutes of training (default 10), after the rollouts"
    drafter.add_argument("--minutes", metavar="M", type=float, default=10.0, help=does)
    does = "tokens of rollouts to learn from (default 65536)"
    drafter.add_argument("--tokens", metavar="N", type=int, default=65_536, help=does)
    add("audit", "check recorded rollouts of servers against the policy", _audit, add_audit_options)
    config = commands.add_parser("config", help="print the configuration, or the differences of two files")
    actions = config.add_subparsers(title="commands", metavar="COMMAND", required=True)
    does = "print all values and their origin"
    add("show", does, _config_show, _with_flags, _add_configs, to=actions)
    does = "print digests that fix the model and its first anchors at a hub"
    add("model", does, _config_model, _with_flags, _add_configs, to=actions)
    diff = add("diff", "print the differences of two files", _config_diff, to=actions)
    diff.add_argument("a", metavar="A", type=Path)
    diff.add_argument("b", metavar="B", type=Path)
    init = add("init", "write a configuration file from a preset", _init)
    init.add_argument("name", metavar="NAME", nargs="?", default="run", help="writes NAME.toml (default run)")
    does = "source of the values (default: the preset NAME, or tiny)"
    init.add_argument("--preset", metavar="PRESET", default="", help=does)
    doctor = add("doctor", "check this machine and a configuration", _doctor)
    doctor.add_argument("config", metavar="CONFIG", type=Path, nargs="*", help="TOML files, as for run")
    completion = add("completion", "print a completion script for a shell", _completion)
    completion.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    return top


def _dispatch(arguments: list[str]) -> int:
    flags: list[str] = []
    with_flags = (["run"], ["hub"], ["join"], ["peer"], ["serve"], ["train-drafter"])
    if arguments[:1] in with_flags or arguments[:2] in SETS_VALUES:
        from aedit.launch.config import split_flags

        drop_output_without_room()
        arguments, flags = split_flags(arguments)
    options = parser().parse_args(arguments or ["--help"], Options(flags=flags))
    task: Task = options.task
    return task(options) or 0


def _with_flags(command: Parser) -> None:
    command.set_defaults(takes_flags=True)
    command.epilog = "Any value is a flag too: --edit.every 64 --model.sizes.hidden_size 128"


def _add_configs(command: Parser) -> None:
    does = "TOML file or preset:NAME; later files override earlier ones"
    command.add_argument("config", metavar="CONFIG", type=Path, nargs="+", help=does)


def _add_run(run: Parser) -> None:
    run.add_argument("--local", metavar="N", type=int, help="start all N nodes on this machine")
    run.add_argument("--dry-run", action="store_true", help="print the plan of the run and start nothing")
    run.add_argument("--nodes", metavar="N", type=int, default=1, help="machines in the run (default 1)")
    run.add_argument("--node", metavar="I", type=int, default=0, help="index of this machine, from 0")
    does = "address of node 0, with several machines"
    run.add_argument("--master", metavar="HOST:PORT", default="", help=does)


def _add_join(join: Parser) -> None:
    does = (
        "HOST:PORT of the hub (several, separated by commas, split the units) or of a peer of a swarm;"
        " or a file of peers, or multiaddresses of a DHT"
    )
    join.add_argument("hub", metavar="ADDRESS", help=does)
    join.add_argument("--as", dest="name", metavar="NAME", default="", help="name of this node in the run")


def _add_trust(command: Parser) -> None:
    command.add_argument("--keys", metavar="DIR", type=Path, help="folder of keys that aedit keys made")
    does = "connect without TLS over a network that others can read"
    command.add_argument("--insecure", action="store_true", help=does)


def _run(options: Options) -> int:
    from aedit.launch.config import Placement, check_hub_start, load
    from aedit.launch.processes import preflight

    local = options.local is not None
    if local and (options.master or options.nodes != 1 or options.node):
        raise UserError("--local: starts all nodes here; remove --nodes, --node and --master")
    nodes = options.local if local else options.nodes
    placement = Placement(
        nodes=nodes,
        node=options.node,
        local=local,
        master=options.master,
        keys=options.keys,
        insecure=options.insecure,
    )
    config = load(options.config, options.flags, strict=True).config
    check_hub_start(config, placement)
    preflight(config, placement)
    if options.dry_run:
        from aedit.launch.processes import check_plan_fits, measure, render

        plan = measure(config, placement)
        print(render(plan))
        check_plan_fits(plan)
        return 0
    from aedit.launch.processes import run

    return run(config, placement)


def _join(options: Options) -> int:
    from aedit.launch.processes import join

    return join(options.hub, options.flags, name=options.name, keys=options.keys, insecure=options.insecure)


def _serve(options: Options) -> int:
    from aedit.launch.cli.service_options import MODEL_OPTIONS, RUN_OPTIONS, is_model_folder, refuse_options

    if is_model_folder(options.place):
        refuse_options(options.command, options, RUN_OPTIONS, "MODEL_DIR")
        return _serve_model(options)
    others = tuple(name for name in MODEL_OPTIONS if not (options.http and name == "api_key_file"))
    refuse_options(options.command, options, others, "HOST:PORT")
    from aedit.launch.serve import serve_run

    return serve_run(serve_request(options))


def _serve_model(options: Options) -> int:
    from aedit.launch.cli.arguments import check_model_folder
    from aedit.launch.cli.service_options import check_model_options, model_flags

    config = model_flags(options)
    options.device, options.vllm, options.traces = config.device, config.rollout.vllm, config.traces
    check_model_options(options)
    check_model_folder(options.place)  # before torch is imported
    from aedit.launch.cli.serve_model import serve_model

    return serve_model(options)


def _keys(options: Options) -> None:
    from aedit.launch.cli.keys import keys

    print(keys(options))


def _view(options: Options) -> None:
    from aedit.launch import views  # only the module of this command is imported

    command = getattr(views, f"{options.view}_command")
    own = {name: getattr(options, name) for name in ("listen", "html") if getattr(options, name, False)}
    for path in command(options.run, options.keys, insecure=options.insecure, **own) or ():
        print(path)


def _ledger(options: Options) -> int:
    from aedit.launch.cli.ledger import print_ledger

    return print_ledger(options)


def _export(options: Options) -> None:
    from aedit.launch.cli.arguments import check_run_place

    check_run_place(options.run)  # before torch is imported
    from aedit.launch.cli.export import export

    trust = options.keys, options.insecure
    export(options.run, options.out, trust[0], insecure=trust[1], needs_drafter=options.drafter)


def _generate(options: Options) -> int:
    check_generate_options(options)  # before torch is imported
    from aedit.launch.cli.generate import generate

    return generate(options)


def _train_drafter(options: Options) -> None:
    from aedit.launch.config import load

    config = load(options.config, options.flags, strict=True).config
    from aedit.launch.cli.train_drafter import write_trained_drafter

    write_trained_drafter(config, options.out, minutes=options.minutes, num_tokens=options.tokens)


def _audit(options: Options) -> int:
    check_audit_options(options)
    if options.file.suffix == ".json":
        return _audit_proof(options.file)
    from aedit.launch.cli.audit import audit

    return audit(options)


def _audit_proof(path: Path) -> int:
    """Print what a file proves: the owner of a part has given nodes different anchors.

    Returns 1, as for a server that fails. Raises UserError if it proves nothing.
    """
    from aedit.proto.rpc import parsed_statement
    from aedit.proto.swarm import read_proof

    try:
        found = read_proof(path)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    place = found.statement
    if place is None:
        raise UserError(f"{path}: two cards of one peer, which two processes with one key cause as well")
    print(f"PROVEN: the peer with the key {found.public_key.hex()}")
    print(f"has signed two values of {place.described()} of run {printable(place.run)},")
    print(f"journal {place.lineage}:")
    for data in (found.one, found.other):
        print(f"  SHA-256 {parsed_statement(data).sha256.hex()}")
    return 1


def _config_show(options: Options) -> None:
    from aedit.launch.config import literal, load, values

    loaded = load(options.config, options.flags, strict=True)
    rows = [(name, literal(value), loaded.origin[name]) for name, value in values(loaded.config)]
    _print_columns(rows)


def _config_model(options: Options) -> None:
    from aedit.launch.cli.export import model_digests
    from aedit.launch.config import load

    print(model_digests(load(options.config, options.flags, strict=True).config))


def _config_diff(options: Options) -> None:
    from aedit.launch.config import load
    from aedit.launch.records import differences

    found = differences(load(options.a, []).config, load(options.b, []).config)
    _print_columns([(name, old, new) for name, (old, new) in found.items()])


def _print_columns(rows: list[tuple[str, str, str]]) -> None:
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    for name, value, origin in rows:
        print(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}")


def _init(options: Options) -> None:
    from aedit.launch.cli.init import init

    path = init(options.name, options.preset)
    print(f"wrote {path}: `aedit run {path} --dry-run` prints its plan, `--local 2` starts two nodes")


def _doctor(options: Options) -> int:
    from aedit.launch.cli.doctor import doctor

    return doctor(options.config)


def _completion(options: Options) -> None:
    from aedit.launch.cli.arguments import completion

    print(completion(parser(), options.shell))


SETS_VALUES = (["config", "show"], ["config", "model"])

SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")

VIEWS = {
    "status": "print the state of a run",
    "top": "follow a run",
    "view": "show a run in the browser",
    "plot": "plot a run: loss, time, norms, bytes, staleness",
}


if __name__ == "__main__":
    sys.exit(main())
