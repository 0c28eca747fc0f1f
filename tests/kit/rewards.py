"""Reward functions for tests, good and bad, and groups to call them with. Workers import this module."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def group(position, texts, prompt="1+2=", **columns):
    """Return a group and the texts of its rollouts, whose tokens are their bytes."""
    from aedit.spec_rollout import Group, Problem, Prompt, Rollout

    problem = Problem(index=position, prompt=prompt, tokens=(1,), columns=columns)
    rollouts = [
        Rollout(Prompt(tokens=(1,), rollout=position, sample=sample), tokens=list(text.encode()))
        for sample, text in enumerate(texts)
    ]
    return Group(position=position, problem=problem, rollouts=tuple(rollouts)), texts


def rewarded(pool, limit_s=60.0):
    """Return position -> (rewards, report) of all groups that are pending."""
    found, deadline = {}, time.monotonic() + limit_s
    while pool.pending:
        assert time.monotonic() < deadline, f"{pool.pending} groups were not rewarded within {limit_s:g} s"
        found |= {group.position: (group.rewards, report) for group, report in pool.wait(1.0)}
    return found


# --- good


def echo(**everything):
    Path(everything["told"][0]).write_text(json.dumps(everything))
    return [0.0] * len(everything["completions"])


def one(completions):
    return [1.0] * len(completions)


def length(completions):
    return [len(completion) for completion in completions]


async def in_time(completions, answer):
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def only_digits(completions):
    return [float(completion) if completion.isdigit() else None for completion in completions]


class Scorer:
    def __call__(self, prompts, completions, **columns):
        import numpy as np

        return np.array([len(prompt) for prompt in prompts], dtype=np.float32)


scorer = Scorer()


def after_file(completions, gate):
    """Return when the file of the column `gate` is there."""
    while gate[0] and not os.path.exists(gate[0]):
        time.sleep(0.005)
    return [1.0] * len(completions)


def prints(completions):
    print("a line", '{"values": [5]}', flush=True)
    os.write(1, b'{"values": [5]}\n' * 1000)
    print("to standard error", file=sys.stderr)
    return [1.0] * len(completions)


def forks(completions):
    """Return in two processes: the copy must not answer as well."""
    os.fork()
    return [1.0] * len(completions)


def leaves_a_child(completions, told):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(told[0]).write_text(str(child.pid))
    return [1.0] * len(completions)


lock, at_once = asyncio.Lock(), asyncio.Semaphore(2)
"""They belong to the loop in which a call has waited for them first."""


async def locked(completions):
    async def judge(completion):
        async with at_once, lock:
            await asyncio.sleep(0)
            return float(len(completion))

    return await asyncio.gather(*map(judge, completions))


clients = []


async def asked(completions, url):
    """Return the numbers that a server gives, over one HTTP client that keeps its connections."""
    import httpx

    if not clients:
        clients.append(httpx.AsyncClient(trust_env=False))
    answers = await asyncio.gather(*(clients[0].post(url[0], content=text) for text in completions))
    return [float(answer.text) for answer in answers]


running: set[str] = set()


async def meets(completions, name, told):
    """Wait until as many calls run as the completion says; record each call that is cancelled."""
    running.add(name[0])
    try:
        while len(running) < int(completions[0]):
            await asyncio.sleep(0.001)
    except asyncio.CancelledError:
        with open(told[0], "a") as file:
            print(os.getpid(), name[0], file=file, flush=True)
        raise
    return [1.0] * len(completions)


async def cannot_be_cancelled(completions):
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(600)


async def exits_in_a_task(completions):
    async def leave():
        sys.exit("enough")

    await asyncio.gather(leave())


async def forks_and_awaits(completions):
    os.fork()
    await asyncio.sleep(0)
    return [float(os.getpid())] * len(completions)


async def leaves_after_the_others(completions):
    await asyncio.sleep(0.2)
    os._exit(3)


def returns_a_coroutine(completions):
    return locked(completions)


# --- bad the first time that the file of the column `marker` is not there


def _first(marker):
    try:
        os.close(os.open(marker[0], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def killed_once(completions, marker):
    if _first(marker):
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(completions)


def hangs_once(completions, marker):
    if _first(marker):
        time.sleep(600)
    return [1.0] * len(completions)


# --- bad


def needs_more(completions, trainer_state, *, solution, log_metric=None):
    return [0.0] * len(completions)


def by_position(completions, /):
    return [0.0] * len(completions)


def only_none(completions):
    return [None] * len(completions)


def never(completions):
    raise OSError("the judge is not there")


calls: list[int] = []


def loads_slowly(completions):
    """Take two seconds for the first call in a process, and no time for the others."""
    if not calls:
        time.sleep(2)
    calls.append(len(completions))
    return [1.0] * len(completions)


def raises(completions):
    for completion in completions:
        if completion == "bad":
            raise KeyError("no such\nthing")
    return [0.0] * len(completions)


def raises_for_two(completions):
    if len(completions) > 1:
        raise ValueError("one at a time")
    return [1.0]


def hangs(completions):
    time.sleep(600)


def hangs_and_tells(completions, told):
    with open(told[0], "a") as file:
        print(os.getpid(), file=file, flush=True)
    time.sleep(600)


def is_killed(completions):
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(completions):
    os._exit(3)


def exits(completions):
    sys.exit("enough")


def closes_everything(completions):
    os.closerange(3, 4096)
    return [1.0] * len(completions)


def nan(completions):
    return [1.0, float("nan")]


def infinite(completions):
    return [float("inf"), 1.0]


def short(completions):
    return [1.0]


def text(completions):
    return ["1", "0"]


def nothing(completions):
    return None


def one_number(completions):
    return 1.0


def one_text(completions):
    return "10"


def one_set(completions):
    return {0.5, 1.5}


def endless(completions):
    return [10**400] * len(completions)


def nested(completions):
    return [[1.0], [0.0]]


not_callable = 3
