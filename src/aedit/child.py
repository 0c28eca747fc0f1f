"""Child processes: start, options, readiness, log, restarts, and the end with this process.

`start_module` starts a Python module of this package, whose first call is `begin_child`; `end_group` ends it.
`Child` is a command with all its descendants, such as torchrun; `HostProcess` a hub or peer of a run, which
is restarted. Options travel as one JSON value: `to_json` here, `run_task` or `from_json` there. `StopSignals`
catches what asks this process to end.
"""

import _thread
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType, NoneType, TracebackType
from typing import IO, Any, TypeVar, get_args, get_origin, get_type_hints

import psutil

from aedit.system import (
    PARENT,
    drop_output_without_room,
    end_with_named_parent,
    end_with_parent,
    exit_text,
    read_line,
    show_stacks_on_signal,
)
from aedit.types import NonNegativeFloat, NonNegativeInt, RunFailed, UserError, checked

T = TypeVar("T")
USER_ERROR = 2
"""Exit code of a process that a restart does not mend."""
END_S = 10.0
"""Longest wait for the end of a process that was killed."""
LOOK_EVERY_S = 2.0
"""Least time between two searches for descendants."""
START_LIMIT_S = 60.0
POLL_S = 0.05


_WITH_THIS_PACKAGE = """
import importlib.util, runpy, sys
folder, module = sys.argv[1:3]
find = importlib.util.spec_from_file_location
found = find("aedit", folder + "/__init__.py", submodule_search_locations=[folder])
package = sys.modules["aedit"] = importlib.util.module_from_spec(found)
found.loader.exec_module(package)
sys.argv[:3] = [module]
runpy.run_module(module, run_name="__main__")
"""


def start_module(
    module: str | Sequence[str],
    arguments: Sequence[str] = (),
    *,
    fds: Sequence[int] = (),
    stdin: "int | IO[Any]" = subprocess.DEVNULL,
    stdout: "int | IO[Any]" = subprocess.DEVNULL,
    stderr: "int | IO[Any] | None" = None,
    session: bool = True,
    python: Path | None = None,
) -> "subprocess.Popen[bytes]":
    """Start `python -m MODULE PARENT ARGUMENTS`; the module must begin with `begin_child`.

    Start it in a thread that lasts: the kernel ends the process together with that thread.

    Args:
        module: Name of the module, or a command that does the same.
        arguments: Its further arguments.
        fds: File descriptors that it inherits.
        stdin: Its standard input, as `subprocess.Popen` takes it.
        stdout: Its standard output.
        stderr: Its standard error; None: that of this process.
        session: Whether it has a session of its own, which Ctrl-C in the terminal does not reach and
            `end_group` ends. Outside Linux it has a process group instead: a suspended group whose parent has
            ended gets SIGCONT and SIGHUP, which ends it on systems without PR_SET_PDEATHSIG.
        python: Another interpreter. It imports this package from here, and everything else from its own
            environment.
    """
    command = [sys.executable, "-m", module] if isinstance(module, str) else module
    if python is not None and isinstance(module, str):
        command = [str(python), "-c", _WITH_THIS_PACKAGE, str(Path(__file__).parent), module]
    on_linux = sys.platform == "linux"
    return subprocess.Popen(
        [*command, str(os.getpid()), *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(fds),
        start_new_session=session and on_linux,
        process_group=0 if session and not on_linux else None,
    )


def begin_child(arguments: Sequence[str], *, bound: bool = True) -> list[str]:
    """Bind this process to the life of its parent, and ignore SIGINT; return the further arguments.

    It must be the first call of a process that `start_module` started.

    Args:
        arguments: Command line arguments, without the name of the program.
        bound: False: the kernel does not end this process with the thread that started it; it is only
            checked that the parent lives.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    show_stacks_on_signal()
    drop_output_without_room()
    parent = int(arguments[0])
    if bound:
        end_with_parent(parent, signal.SIGKILL)  # also ends a suspended process
    elif os.getppid() != parent:
        os._exit(1)
    return list(arguments[1:])


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process that leads a session and all processes in its group, and wait for its end.

    Raises:
        subprocess.TimeoutExpired: It is still there after `END_S`.
    """
    # It is not reaped before, so that no other process has its id, which is that of the group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=END_S)


def to_json(options: Any) -> str:
    """Return a dataclass as one line of JSON, paths as text."""
    return json.dumps(asdict(options), default=str)


def from_json(cls: type[T], text: str) -> T:
    """Return the instance of a dataclass that `to_json` wrote."""
    found: T = _typed(json.loads(text), cls)
    return found


def _typed(value: Any, hint: Any) -> Any:
    if value is None:
        return None
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{name: _typed(each, hints[name]) for name, each in value.items()})  # type: ignore[operator]
    within = [each for each in get_args(hint) if each not in (NoneType, ...)]
    if get_origin(hint) is tuple:
        hints_of_all = within if len(within) == len(value) else within * len(value)
        return tuple(_typed(each, one) for each, one in zip(value, hints_of_all, strict=True))
    if NoneType in get_args(hint):
        return _typed(value, within[0])
    return Path(value) if hint is Path else value


def run_task(task: Callable[[Path, str], int]) -> int:
    """Call `task` with the two arguments of this process; return its exit code.

    They are the configuration file of a run, and options that `to_json` wrote. The process ends with the
    parent that its environment names. An error of the user ends it with `USER_ERROR`, a run that cannot go on
    with 1, and the message, as they end a command of `aedit`.
    """
    end_with_named_parent()
    show_stacks_on_signal()
    drop_output_without_room()
    try:
        return task(Path(sys.argv[1]), sys.argv[2])
    except (UserError, RunFailed) as error:
        print(f"aedit: {error}", file=sys.stderr)
        return USER_ERROR if isinstance(error, UserError) else 1


@checked()
@dataclass(frozen=True, slots=True)
class Restarts:
    """Number of deaths so far, and when the next start is allowed.

    Each death doubles the pause before the next start. A process that has worked for a while resets the
    count.
    """

    limit: NonNegativeInt = 5
    """Number of deaths in a row after which there are no more starts."""
    pause_s: NonNegativeFloat = 1.0
    """Pause after the first death."""
    longest_pause_s: float = 60.0
    in_row: int = 0
    total: int = 0
    died_at_s: float = 0.0

    def died(self, now_s: float, *, worked: bool) -> "Restarts":
        """Return the rule after a death; `worked` resets the count of deaths in a row."""
        in_row = 1 if worked else self.in_row + 1
        return replace(self, in_row=in_row, total=self.total + 1, died_at_s=now_s)

    @property
    def given_up(self) -> bool:
        """Return true if there are no more starts."""
        return self.in_row > self.limit

    def may_start(self, now_s: float) -> bool:
        """Return true if a start is allowed now."""
        if self.in_row == 0:
            return True
        pause_s = min(self.pause_s * 2 ** (self.in_row - 1), self.longest_pause_s)
        return not self.given_up and now_s >= self.died_at_s + pause_s


class Child:
    """One command with all its descendants, which end with the block."""

    def __init__(
        self, command: list[str], log: Path, env: Mapping[str, str] | None = None, *, own: bool = False
    ) -> None:
        """Start the command; its output is appended to `log`.

        Args:
            command: Program and arguments.
            log: File of its output.
            env: In place of this process's environment.
            own: The command is `aedit`, which ends with this process by itself. Nothing of Python then runs
                between fork and exec, where a process with threads of gRPC may abort.
        """
        end = None if own else partial(end_with_parent, os.getpid(), signal.SIGTERM)
        env = {**(env or os.environ), PARENT: str(os.getpid())} if own else env
        with log.open("ab") as output:
            self._read_to = output.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                # Ctrl-C in the terminal reaches only this process, which forwards signals to the nodes.
                start_new_session=True,
                preexec_fn=end,
            )
        self._log, self._own = log, own
        self._output = ""
        # Workers have sessions of their own: they are found through their parents while those run.
        self._seen: dict[int, psutil.Process] = {self._process.pid: psutil.Process(self._process.pid)}
        self._looked = float("-inf")

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def look(self) -> None:
        """Record the descendants of the command, which `kill` ends, unless it was done in the last seconds.

        Call it often. Those of `aedit` end by themselves and are not looked for.
        """
        if not self._own and time.monotonic() > self._looked + LOOK_EVERY_S:
            self._look()

    def running(self) -> bool:
        """Return whether the command runs."""
        return self._process.poll() is None

    def exit_code(self) -> int:
        """Return the exit code. Only after `running` returned False or `kill` was called."""
        return self._process.wait(timeout=END_S)

    def output(self) -> str:
        """Return the output of the command, and of workers that had no log yet."""
        with self._log.open("rb") as file:
            file.seek(self._read_to)
            self._output += file.read().decode(errors="replace")
            self._read_to = file.tell()
        return self._output

    def workers(self) -> list[psutil.Process]:
        """Return the live processes that the command started: for torchrun those of the node."""
        with contextlib.suppress(psutil.Error):
            return list(psutil.Process(self._process.pid).children())
        return []

    def terminate(self) -> None:
        """Send SIGTERM; torchrun gives its workers 30 s."""
        self._look()
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill all processes, and wait for their end for at most `END_S`."""
        self._look()
        for process in self._seen.values():
            # psutil compares start times, so that a reused process id is not killed.
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(list(self._seen.values()), timeout=END_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_S)

    def _look(self) -> None:
        """Record the descendants. Each `children` reads the status of all processes of the machine."""
        self._looked = time.monotonic()
        covered: set[int] = set()
        for pid, process in list(self._seen.items()):
            # The command covers all but the children of processes whose own parents have ended.
            if pid not in covered:
                with contextlib.suppress(psutil.Error):
                    below = {child.pid: child for child in process.children(recursive=True)}
                    covered |= below.keys()
                    self._seen |= {pid: child for pid, child in below.items() if pid not in self._seen}


class StopSignals:
    """Catches the first SIGINT or SIGTERM, which asks for the end; the second one ends the process."""

    def __init__(self) -> None:
        """Catch them, in the main thread; in another one `asked` is set by others only."""
        self.asked = threading.Event()
        self.by_hand = False
        """True after SIGINT (Ctrl-C), which often reaches the nodes too; a supervisor sends SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._caught)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_DFL)
        self.by_hand = number == signal.SIGINT
        # In another thread: the main one, in which this runs, may hold the lock of the event as it waits for
        # it, and would wait for itself. Neither this signal nor another one would then end the process.
        _thread.start_new_thread(self.asked.set, ())


class HostProcess:
    """One hub or peer of the run, restarted if it fails."""

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        directory: Path,
        log: Path,
        restarts: int,
        may_end: bool = True,
    ) -> None:
        """Start it.

        Args:
            name: For messages: the hub, a standby of it, or the peer of a node.
            command: Program and arguments.
            directory: Its folder, in which it writes its address once it is ready.
            log: File of its output.
            restarts: Most restarts.
            may_end: Whether an end without error is none: a peer may leave, and ends with a run that it has
                joined.
        """
        self.name, self.directory, self.log, self.restarts = name, directory, log, restarts
        self._command, self._may_end = command, may_end
        (directory / "address").unlink(missing_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        self.child = Child(command, log)

    def wait_for(self, file: str, is_right: Callable[[str], bool] = bool, fault: str = "") -> str:
        """Return the text of a file of its folder, once it has started and the text is right.

        Raises UserError with its last message, or with `fault`, if it ends before or needs more than
        `START_LIMIT_S`.
        """
        deadline = time.monotonic() + START_LIMIT_S
        while not is_right(text := read_line(self.directory / file)):
            if not self.child.running() or time.monotonic() > deadline:
                said = "" if fault else _last_line(self.child.output())
                raise UserError(said or f"{fault or 'it did not start'}: see {self.log}")
            time.sleep(POLL_S)
        return text

    @property
    def is_over(self) -> bool:
        """Return whether it ended without error: the run is over, and no members were left."""
        return not self.child.running() and self.child.exit_code() == 0

    def mend(self) -> None:
        """Restart it if it has failed; it continues its journal at the same address."""
        self.child.look()
        if self.child.running() or self.is_over or self.fault:
            return
        self.restarts -= 1
        self.child.kill()
        self.child = Child(self._command, self.log)

    @property
    def fault(self) -> str:
        """Return why it has failed and is not restarted; "" otherwise."""
        if self.child.running() or (self.is_over and self._may_end):
            return ""
        code = self.child.exit_code()
        if code == 0:
            return f"{self.name} was stopped; see {self.log}"
        if self.restarts and code != USER_ERROR:
            return ""
        error = _last_line(self.child.output()) if code > 0 else ""
        again = "" if code == USER_ERROR else " more often than restarts allows"
        return (
            f"{self.name} has failed{again} ({exit_text(code)}){': ' if error else ''}{error}; see {self.log}"
        )


def _last_line(output: str) -> str:
    """Return the last message of `aedit` in the output, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("aedit: ")]
    return (ours or lines or [""])[-1].removeprefix("aedit: ")
