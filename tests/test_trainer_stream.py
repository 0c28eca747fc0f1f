"""Tests the stream of a worker process past its socket: order of messages, and silence of a stuck engine."""

import json
import threading
from types import SimpleNamespace

import pytest
from kit.hosts import Steps
from kit.rollouts import prompts_of, tiny_policy
from kit.waiting import until

from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.remote.dispatcher import RequestedSample
from aedit.spec_rollout.sampling import encode_sampling
from aedit.spec_rollout.server import EngineHost, HostLimits, StreamLimits
from aedit.spec_rollout.server.trainer_lines import TrainerLine
from aedit.spec_rollout.server.trainer_stream import TrainerStream

LENGTH = 12


@pytest.fixture
def worker():
    """Return the stream of a worker, what it has sent, and its steps, which the test releases."""
    model, steps, host = tiny_policy(), Steps(), EngineHost(HostLimits())
    engine = Engine.of(model, rows=2, max_tokens=64)
    engine.update_weights({name: value.clone() for name, value in model.state_dict().items()}, 1)
    line = TrainerLine("", SimpleNamespace(engine=engine, between_steps=steps, drafter_version=0), "")
    host.open("", lambda: engine, between_steps=line.before_step)
    stream, sent = TrainerStream(None, host, line, StreamLimits(figures_s=0.02)), []

    def send():
        for data in stream.messages():
            sent.append(pb.ToTrainer.FromString(data))

    threading.Thread(target=send, daemon=True).start()
    yield stream, sent, steps
    stream.close()
    steps.open()
    host.close()


def add(stream, *prompts):
    for prompt in prompts:
        sample = RequestedSample(prompt.to_rollout(), encode_sampling(prompt.sampling))
        stream.handle(pb.ToServer(add=sample.request(1)))


def remove(stream, key):
    stream.handle(pb.ToServer(remove=pb.Remove(rollout=key[0], sample=key[1])))


def kinds(sent, *wanted):
    return [kind for kind in (message.WhichOneof("message") for message in sent) if kind in wanted]


def test_figures_stop_with_the_engine_and_go_on_with_it(worker):
    """The rank ends a worker from which nothing comes: its engine hangs, though the process lives."""
    stream, sent, steps = worker
    until(lambda: kinds(sent, "figures"), "figures of a worker without samples")
    add(stream, *prompts_of(2, max_new_tokens=LENGTH))
    steps.wait()
    until(lambda: not grows(sent), "silence")
    steps.open()
    until(lambda: len(kinds(sent, "ended")) == 2, "the ends")


def grows(sent):
    before = len(sent)
    threading.Event().wait(0.2)
    return len(sent) > before


def test_the_figures_before_an_end_count_its_tokens_and_nothing_is_signed(worker):
    stream, sent, steps = worker
    (prompt,) = prompts_of(1, max_new_tokens=LENGTH)
    steps.open()
    add(stream, prompt)
    until(lambda: kinds(sent, "ended"), "the end")
    place = next(i for i, message in enumerate(sent) if message.HasField("ended"))
    assert json.loads(sent[place - 1].figures.json)["rollout_tokens"] == LENGTH
    assert (sent[place].ended.signature, sent[place].ended.passes) == (b"", LENGTH)
    tokens = [message.tokens for message in sent[:place] if message.HasField("tokens")]
    assert [each.passes for each in tokens][-1] == sum(len(each.tokens) for each in tokens) == LENGTH


def test_each_request_to_return_a_sample_is_answered_after_its_tokens(worker):
    """A key that is added again in between has no tokens of the sample before."""
    stream, sent, steps = worker
    (prompt,) = prompts_of(1, max_new_tokens=LENGTH)
    add(stream, prompt)
    steps.release(3)
    remove(stream, prompt.key)
    remove(stream, prompt.key)
    add(stream, prompt)
    steps.open()
    until(lambda: kinds(sent, "ended"), "the end")
    order = kinds(sent, "tokens", "removed", "ended")
    last = len(order) - order[::-1].index("removed")
    removed = [message.removed.found for message in sent if message.HasField("removed")]
    assert removed == [True, False]
    starts = [message.tokens.start for message in sent if message.HasField("tokens")]
    assert starts.count(0) == 2
    assert starts[order[:last].count("tokens")] == 0
