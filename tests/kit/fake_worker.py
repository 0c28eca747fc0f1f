"""Rollout worker without a model, for faults: starts in a moment, and draws tokens made of keys.

`python -m kit.fake_worker PARENT FD` in place of `aedit.spec_rollout.server.worker`. Its behaviour is
`options["does"]`: `serve`, `be slow`, `end` at once, `end with NUMBER` when it has that sample and
has finished the others, `be silent`.
"""

import json
import os
import signal
import socket
import sys
import time

from aedit.spec_rollout.server import Channel
from aedit.system import end_with_parent


def token(rollout, sample, place):
    return (7 * rollout + 3 * sample + place) % 48


def main(parent, fd):
    end_with_parent(int(parent), signal.SIGKILL)
    channel = Channel(socket.socket(fileno=int(fd)))
    samples, does, poison = {}, None, None
    while not channel.closed:
        for message in channel.receive():
            if message["kind"] == "begin":
                does = message["engine"]["options"]["does"]
                if does == "end":
                    sys.exit(3)
                channel.send("ready") if does != "be silent" else None
            elif message["kind"] == "add":
                prompt = json.loads(message["prompt"])
                key = prompt["rollout"], prompt["sample"]
                if does == f"end with {key[1]}":
                    poison = key[1]
                    continue
                place = len((prompt["partial"] or {"tokens": []})["tokens"])
                samples[key] = [prompt, place, message["version"]]
            elif message["kind"] == "remove":
                found = samples.pop(tuple(message["key"]), None)
                channel.send("removed", key=message["key"], found=found is not None)
        if does != "be silent" and samples:
            advance(channel, samples)
        if poison is not None and not samples:
            channel.send("error", message=f"ValueError: sample {poison} is poison")
            sys.exit(1)
        Channel.wait([channel], 0.002 if samples else 0.5)
        if does == "be slow" and samples:
            time.sleep(0.01)


def advance(channel, samples):
    """Draw one token of each of the first four samples."""
    tokens, ended = [], []
    for key, each in list(samples.items())[:4]:
        tokens.append([*key, [token(*key, each[1])], [-0.5], [each[2]], [], each[1] + 1])
        each[1] += 1
        if each[1] == each[0]["sampling"]["max_new_tokens"]:
            ended.append([*key, "length", each[1]])
            del samples[key]
    report = {"tokens": tokens, "ended": ended, "version": 1, "drafter": 0}
    speed, figures = [1e-3, 1e-4, 1e-4], {"rollout_tokens": 1, "arms": {"off": 1}}
    channel.send("report", **report, speed=speed, figures=figures)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
