"""Tests the adapter for trl's asynchronous GRPO trainer: its steps, its samples, its failures."""

import asyncio
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout import Engine, Sampling, TrlWorker, TrlWorkerConfig

ROWS = [{"prompt": letter * 3, "answer": letter} for letter in "abcd"]
SAMPLING = Sampling(max_new_tokens=6, stop_tokens=(256,))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return a directory with a tiny model, tied as small models are, and its tokenizer."""
    path = tmp_path_factory.mktemp("trl")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=257, **SIZES, max_position_embeddings=128, tie_word_embeddings=True)
    config.eos_token_id = 256
    LlamaForCausalLM(config).save_pretrained(path)
    ByteTokenizer().save(path)
    return path


def ascii_share(prompts, completions, completion_ids, answer):
    assert len(prompts) == len(completions) == len(answer)
    return [sum(token < 128 for token in ids) / len(ids) for ids in completion_ids]


def worker(directory, *rewards, **changed):
    model = LlamaForCausalLM.from_pretrained(directory)
    engine = Engine.of(model, rows=8, max_tokens=32)
    settings = {"group_size": 4, "max_ahead": 16, "sampling": SAMPLING} | changed
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return TrlWorker(engine, ROWS, rewards or [ascii_share], tokenizer, TrlWorkerConfig(**settings))


def flash_attention(q, k, v, starts_q, starts_k, *longest, softmax_scale, causal, window_size):
    """Attention of each segment's queries to the keys of its path, whose last ones are its own."""
    assert causal
    assert window_size == (-1, -1)
    out, groups = [], q.shape[1] // k.shape[1]
    for i in range(len(starts_q) - 1):
        rows, path = (slice(*starts[i : i + 2].tolist()) for starts in (starts_q, starts_k))
        Q, K, V = (x.transpose(0, 1) for x in (q[rows], k[path], v[path]))
        K, V = (x.repeat_interleave(groups, 0) for x in (K, V))
        n, m = Q.shape[1], K.shape[1]
        seen = torch.ones(n, m).tril(m - n).bool()
        scores = (Q @ K.transpose(1, 2) * softmax_scale).masked_fill(~seen, -torch.inf)
        out.append((scores.softmax(-1) @ V).transpose(0, 1))
    return torch.cat(out)


class Kept(queue.Queue):
    """Queue that remembers what was put into it."""

    def __init__(self):
        super().__init__()
        self.all = []

    def put(self, item, *args, **more):
        self.all.append(item)
        super().put(item, *args, **more)


def test_trls_trainer_trains_on_rollouts_of_the_engine(directory, tmp_path, monkeypatch):
    """trl 1.16 runs on GPUs of the Hopper kind: its attention kernel and a lookup of the GPU are replaced.

    Everything else is trl's. Each log-probability is compared with a plain forward pass of the weights that
    trl has sent as the version that the sample names, or a later one.
    """
    pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    kernels = SimpleNamespace(flash_attn_varlen_func=flash_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernels)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *args: None)
    made, versions = worker(directory), []
    made.rollout_buffer = kept = Kept()
    send = made.send_weights

    def sending(iterator):
        weights = dict(iterator)
        versions.append({name: tensor.clone() for name, tensor in weights.items()})
        send(iter(weights.items()))

    monkeypatch.setattr(made, "send_weights", sending)
    args = AsyncGRPOConfig(
        str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=8,
        token_budget=0,
        num_generations=4,
        max_staleness=4,
        learning_rate=1e-2,
        logging_steps=1,
        model_init_kwargs={"dtype": torch.float32},
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = AsyncGRPOTrainer(
        str(directory),
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=AutoTokenizer.from_pretrained(directory),
        rollout_worker=made,
        weight_transfer=made,
    )
    trainer.train()
    assert not [thread for thread in threading.enumerate() if thread.name == "aedit-trl-rollouts"]
    logs = trainer.state.log_history[:4]
    assert [log["step"] for log in logs] == [1, 2, 3, 4]
    assert logs[0]["sample/staleness_max"] == 0
    assert logs[0]["ratio"] == pytest.approx(1, abs=1e-5), "the engine's probabilities are the trainer's"
    assert logs[0]["kl"] < 1e-8
    assert max(log["sample/staleness_max"] for log in logs) >= 1
    first, last = (sent["model.norm.weight"] for sent in (versions[0], versions[-1]))
    assert not torch.equal(first, last)
    compare_with_plain_forward_passes(kept.all, versions, directory)


def compare_with_plain_forward_passes(samples, versions, directory):
    model = LlamaForCausalLM.from_pretrained(directory)
    found = []
    for weights in versions:
        model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            found.append([scored(model, sample) for sample in samples])
    assert len({sample.model_version for sample in samples}) >= 2
    for i, sample in enumerate(samples):
        answered = sample.completion_mask == 1
        given = sample.old_log_probs[answered]
        by_version = np.array([scores[i] for scores in found[sample.model_version - 1 :]])
        assert np.allclose(given[0], by_version[0, 0], atol=1e-4), "the first token is the named version's"
        assert (np.abs(by_version - given).min(0) < 1e-4).all()
        assert not sample.old_log_probs[~answered].any()


def scored(model, sample):
    """Return the log-probability of each answered token."""
    ids = torch.tensor(sample.input_ids)[None]
    logp = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logp.numpy()[sample.completion_mask[1:] == 1]


def received(made, number):
    """Return so many samples of a worker that runs, then stop it."""
    made.start()
    try:
        return [made.rollout_buffer.get(timeout=TIMEOUT_S) for _ in range(number)]
    finally:
        made.stop()


def test_groups_come_whole_in_the_order_of_their_prompts_with_their_advantages(directory):
    """A rollout ends with its first byte that is not ASCII, so that groups finish in another order."""
    uneven = Sampling(max_new_tokens=12, stop_tokens=tuple(range(128, 257)))
    made, finished = worker(directory, max_ahead=32, sampling=uneven), []
    step = made._engine.step

    def watched():
        done = step()
        finished.extend(rollout.prompt.rollout for rollout in done.finished)
        return done

    made._engine.step = watched
    samples = received(made, 40)
    assert [sample.group_id for sample in samples] == [i // 4 for i in range(40)]
    ends = [max(i for i, group in enumerate(finished) if group == wanted) for wanted in range(10)]
    assert ends != sorted(ends), "a group overtook another one"
    for start in range(0, 40, 4):
        group = samples[start : start + 4]
        assert {sample.prompt for sample in group} == {ROWS[start // 4 % 4]["prompt"]}
        rewards = np.array([sample.metrics["reward"] for sample in group])
        wanted = (rewards - rewards.mean()) / rewards.std(ddof=1) if np.ptp(rewards) > 0 else 0 * rewards
        assert [sample.advantage for sample in group] == pytest.approx(wanted)


def test_no_more_rollouts_run_ahead_than_allowed(directory):
    """Nothing is taken from the queue: the worker comes to rest when it holds as many as may run ahead."""
    resting = threading.Event()

    class Stopping(threading.Event):
        def wait(self, timeout=None):
            resting.set()
            return super().wait(timeout)

    made = worker(directory, max_ahead=10)
    made._stopping = Stopping()
    made.start()
    try:
        assert resting.wait(TIMEOUT_S)
        assert made.rollout_buffer.qsize() == 8
    finally:
        made.stop()


def test_a_rollout_without_any_reward_is_left_out_and_rewards_are_added(directory):
    def some(completion_ids, **columns):
        return [None if i == 2 else float(i) for i in range(len(completion_ids))]

    def others(completion_ids, **columns):
        return [None if i == 2 else 10.0 if i == 1 else None for i in range(len(completion_ids))]

    samples = received(worker(directory, some, others), 6)
    assert [sample.metrics["reward"] for sample in samples] == [0.0, 11.0, 3.0] * 2


def test_asynchronous_rewards_use_one_loop_in_all_groups(directory):
    lock, loops = asyncio.Lock(), set()

    async def judge(i):
        async with lock:
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0)
            return float(i)

    async def counted(completion_ids, **columns):
        return await asyncio.gather(*map(judge, range(len(completion_ids))))

    samples = received(worker(directory, counted), 12)
    assert [sample.metrics["reward"] for sample in samples] == [0.0, 1.0, 2.0, 3.0] * 3
    assert len(loops) == 1


def test_chat_prompts_are_templated_and_answered_by_the_assistant(directory):
    made = worker(directory)
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    made._texts.tokenizer.chat_template = turns + "{% if add_generation_prompt %}:{% endif %}"
    made._rows = [{"prompt": [{"role": "user", "content": "hi"}], "answer": ""}]
    (sample,) = received(made, 1)
    asked = sample.input_ids[sample.completion_mask == 0]
    assert bytes(asked.tolist()) == b"<user>hi:"
    assert sample.completion[0]["role"] == "assistant"


def test_a_reward_that_raises_is_reported_to_the_trainer(directory):
    def broken(**columns):
        raise KeyError("gold")

    made = worker(directory, broken)
    made.start()
    made._thread.join(TIMEOUT_S)
    with pytest.raises(RuntimeError, match="the rollout worker has failed") as caught:
        made.check_health(stale_after_s=1e9)
    assert isinstance(caught.value.__cause__, KeyError)
    made.stop()


def test_a_reward_of_the_wrong_length_is_named(directory):
    def short(**columns):
        return [0.0]

    made = worker(directory, short)
    made.start()
    made._thread.join(TIMEOUT_S)
    with pytest.raises(RuntimeError) as caught:
        made.check_health(stale_after_s=1e9)
    assert str(caught.value.__cause__) == (
        "reward short returned 1 values, expected a list of 4, one number or None per completion"
    )
    made.stop()


def test_a_worker_that_hangs_is_reported(directory):
    entered, release = threading.Event(), threading.Event()

    def hangs(completion_ids, **columns):
        entered.set()
        assert release.wait(TIMEOUT_S)
        return [0.0] * len(completion_ids)

    made = worker(directory, hangs)
    made.check_health(stale_after_s=0)
    made.start()
    try:
        assert entered.wait(TIMEOUT_S)
        with pytest.raises(RuntimeError, match="in one step or reward for 0 s; the limit is 0 s"):
            made.check_health(stale_after_s=0)
    finally:
        release.set()
        made.stop()


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="max_ahead must be at least a group, got 4"):
        TrlWorkerConfig(group_size=8, max_ahead=4)
