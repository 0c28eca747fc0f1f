"""Rollout worker without a model, for faults: starts in a moment, and draws tokens made of keys.

`python -m kit.fake_worker PARENT FD` in place of `aedit.spec_rollout.server.worker`. Its behaviour is
`options["does"]`: `serve`, `be slow`, `end` at once, `end with NUMBER` when it has that sample and
has finished the others, `refuse NUMBER`: that sample, `be silent`.
"""

import json
import os
import signal
import socket
import sys
import time

from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.sampling import ROLLOUT_PROTOCOL
from aedit.spec_rollout.server import WORKER_LANE, Channel
from aedit.system import end_with_parent


def token(rollout, sample, place):
    return (7 * rollout + 3 * sample + place) % 48


def main(parent, fd):
    end_with_parent(int(parent), signal.SIGKILL)
    channel = Channel(socket.socket(fileno=int(fd)))
    samples, does, poison = {}, None, None

    def send(**message):
        channel.send_frame(WORKER_LANE, pb.ToTrainer(**message).SerializeToString())

    while not channel.closed:
        for lane, data in channel.receive():
            if not lane:
                does = json.loads(data)["engine"]["options"]["does"]
                if does == "end":
                    sys.exit(3)
                send(opened=pb.Opened(protocol=ROLLOUT_PROTOCOL, rows=4)) if does != "be silent" else None
                continue
            message = pb.ToServer.FromString(data)
            if message.HasField("add"):
                add = message.add
                key = add.rollout, add.sample
                if does == f"end with {key[1]}":
                    poison = key[1]
                    continue
                if does == f"refuse {key[1]}":
                    reason = f"sample {key[1]} is poison"
                    send(rejected=pb.Rejected(rollout=key[0], sample=key[1], reason=reason))
                    continue
                most = json.loads(add.sampling)["max_new_tokens"]
                samples[key] = [most, len(add.tokens), add.min_version, len(add.tokens)]
            elif message.HasField("remove"):
                key = message.remove.rollout, message.remove.sample
                found = samples.pop(key, None) is not None
                send(removed=pb.Removed(rollout=key[0], sample=key[1], found=found))
        if does != "be silent" and samples:
            advance(send, samples)
        if poison is not None and not samples:
            channel.send("error", message=f"ValueError: sample {poison} is poison")
            sys.exit(1)
        channel.flush()
        Channel.wait([channel], 0.002 if samples else 0.5)
        if does == "be slow" and samples:
            time.sleep(0.01)


def advance(send, samples):
    """Draw one token of each of the first four samples."""
    figures = json.dumps({"rollout_tokens": 1, "arms": {"off": 1}}).encode()
    send(figures=pb.Figures(version=1, fixed_s=1e-3, row_s=1e-4, prefill_s=1e-4, json=figures))
    for key, each in list(samples.items())[:4]:
        most, place, version, first = each
        fields = {"rollout": key[0], "sample": key[1]}
        drawn = {"start": place, "tokens": [token(*key, place)], "logprobs": [-0.5], "versions": [version]}
        send(tokens=pb.Tokens(**fields, **drawn, passes=place + 1 - first))
        each[1] += 1
        if each[1] == most:
            send(ended=pb.Ended(**fields, finish_reason="length", passes=most - first))
            del samples[key]


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
