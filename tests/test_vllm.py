"""Tests vLLM behind the interfaces of an engine: the same tokens, whatever it drafts and whatever happens.

The oracle is the model's own uncached forward pass in `transformers` with the noise of each sample's key, in
float32. vLLM runs in `.venv-vllm`, which `make vllm` builds; without it these tests are skipped.
"""

import hashlib
import json
import os
import pydoc_data.topics
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise, takewhile
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest
import torch
from kit.eagle3 import layer_for
from kit.rollout_servers import TrainerEnd
from kit.rollouts import decode_plainly, logprobs_of, perturbed, prompts_of
from kit.served_models import byte_level
from kit.served_runs import served_run
from kit.vllm_job import HARM
from kit.waiting import until
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from aedit.proto.versions import VersionsClient, VersionStore, patterns
from aedit.spec_rollout import Engine, Prompt, RolloutSource, Sampling, WorkerConfig, WorkerSource
from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import LayerDrafter, load_drafter
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import LARGE_VOCABULARY, encode_prompt, gumbel
from aedit.spec_rollout.server import EngineSpec, check_supported, vllm_server
from aedit.spec_rollout.server.vllm_server import VllmServerError, make_vllm_server_engine
from aedit.spec_rollout.training import Restarts
from aedit.spec_rollout.vllm.noise import keyed_draw, keyed_gumbel

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MAKE = "aedit.spec_rollout.server.vllm_engine:make_vllm_engine"
MAKE_SERVER = "aedit.spec_rollout.server.vllm_server:make_vllm_server_engine"
VOCABULARY = 96
LIMIT_S = 500.0
ATTEMPTS = 10
"""Rounds of samples until one is disturbed: on a busy machine they may end before this process looks."""
TEMPERATURES = (1.0, 0.7, 0.0)

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: `make vllm` builds it"),
]


def policy(*, tied=False, layers=2, vocabulary=VOCABULARY):
    """Return a policy that vLLM can compute on a CPU: its heads must have 32 values or more."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        **sizes,
    )
    return LlamaForCausalLM(config).eval()


def changed(model):
    """Return a second version of a policy."""
    other = LlamaForCausalLM(model.config).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    return other


def samples(temperature, first, num=6, length=20, least=4):
    """Return samples of which some share a prefix that fills a block of vLLM's cache."""
    shared = tuple((5 * place + 1) % VOCABULARY for place in range(150))
    sampling = Sampling(temperature=temperature, max_new_tokens=length)
    made = []
    for i in range(num):
        tokens = (*shared, i) if i % 3 == 0 else tuple((7 * i + j) % VOCABULARY for j in range(1 + 3 * i))
        stops = replace(sampling, stop_tokens=(7, 11, 40), min_new_tokens=least) if i % 2 else sampling
        made.append(Prompt(tokens=tokens, rollout=first, sample=i, sampling=stops))
    return made


def check(model, prompts, answers):
    for prompt, tokens, (rollout, sample, found, logprobs, _, finish, *_) in zip(
        prompts, decode_plainly(model, prompts), answers, strict=True
    ):
        assert (rollout, sample) == prompt.key
        assert found == tokens, prompt.name
        assert logprobs == pytest.approx(logprobs_of(model, prompt, tokens), abs=5e-5)
        has_stopped = tokens[-1] in prompt.sampling.stop_tokens
        assert finish == ("stop" if has_stopped else "length")


def check_spans(models, prompt, tokens, logprobs, versions):
    """Check each token against the version that its span names, given the text before it."""
    assert sorted(versions) == versions
    for version in {*versions}:
        text = torch.tensor([[*prompt.tokens, *tokens]])
        with torch.no_grad():
            logits = models[version](input_ids=text, use_cache=False).logits[0, len(prompt.tokens) - 1 : -1]
        logp = (logits / (prompt.sampling.temperature or 1.0)).log_softmax(-1)
        for place, own in enumerate(versions):
            if own == version:
                assert logprobs[place] == pytest.approx(float(logp[place, tokens[place]]), abs=5e-5)
                if place >= prompt.sampling.min_new_tokens:
                    position = len(prompt.tokens) + place
                    assert int(perturbed(logits[place], prompt, position).argmax()) == tokens[place]


@pytest.mark.parametrize("vocabulary", [1, 5, 1000, 16_383, 16_384, 20_001])
@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 100.0])
def test_the_plug_in_draws_with_the_noise_of_the_own_engine(vocabulary, spread):
    random = np.random.default_rng(0)
    ids = [(int(a), int(b)) for a, b in random.integers(-(2**63), 2**63 - 1, (12, 2))]
    keys = [(*each, int(random.integers(2**20))) for each in [*ids, (0, 0), (-1, 3)]]
    rollouts, sample_ids, positions = torch.tensor(keys).unbind(1)
    noise_NV = gumbel(rollouts, sample_ids, positions[:, None], vocabulary)[:, 0]
    assert torch.equal(keyed_gumbel(keys, vocabulary), noise_NV)
    normal_NV = torch.tensor(random.normal(0.0, 1.0, noise_NV.shape), dtype=torch.float32) * spread
    for x_NV in (normal_NV, (4 * normal_NV).round() + 2.0**21, normal_NV.clone(), normal_NV - 1e30):
        if x_NV[0, 0] == normal_NV[0, 0]:
            x_NV[:4, 3:] = -torch.inf  # few possible tokens, none, and an infinite one
            x_NV[2], x_NV[3, 0] = -torch.inf, torch.inf
        assert torch.equal(keyed_draw(x_NV, keys), (x_NV + noise_NV).argmax(-1))
    normal_NV[1] = torch.nan
    assert torch.equal(keyed_draw(normal_NV, keys), (normal_NV + noise_NV).argmax(-1))


def test_without_vllm_the_plug_in_needs_only_torch_and_numpy():
    """The package is installed alone: nothing of it but the hooks in vLLM imports more."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'spec_rollout' / 'vllm')!r}); import noise; "
    code += "assert not [name for name in sys.modules if name.startswith('aedit')]; "
    code += "import torch; print(noise.keyed_draw(torch.zeros(1, 8), [(1, 2, 3)]).tolist())"
    done = subprocess.run([os.sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


NOISE = """
import sys; sys.path.insert(0, sys.argv[1])
import numpy, torch, noise
assert noise._search()  # numba is there
random = numpy.random.default_rng(0)
for trial in range(300):
    num = 1 + trial % 7
    vocabulary = [1, 3, 5, 96, 127, 128, 129, 1000, 16_383, 16_384, 20_001][trial % 11]
    x = random.normal(0.0, [0.0, 0.1, 1.0, 5.0, 100.0][trial % 5], (num, vocabulary)) + 1000.0 * (trial % 2)
    x = torch.tensor(x, dtype=torch.float32)
    if trial % 6 == 0:
        x[:, 2:] = -torch.inf
    if trial % 50 == 0:
        x[0] = -torch.inf
    if trial % 40 == 0:
        x[0, -1] = [torch.nan, torch.inf][trial % 80 // 40]
    keys = [(int(a), int(b), abs(int(a)) % 2**20) for a, b in random.integers(-(2**40), 2**40, (num, 2))]
    drawn = (x + noise.keyed_gumbel(keys, vocabulary)).argmax(-1)
    assert torch.equal(noise.keyed_draw(x, keys), drawn), trial
"""


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: `make vllm` builds it")
def test_the_compiled_search_draws_what_the_noise_of_all_tokens_draws():
    command = [PYTHON, "-c", NOISE, ROOT / "spec_rollout" / "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


class TestDrafters:
    """vLLM in one process, under each drafter that it has."""

    pytestmark = needs_vllm

    @pytest.mark.parametrize(
        ("kind", "tied", "vocabulary"),
        [
            ("off", False, VOCABULARY),
            ("ngram", True, VOCABULARY),
            ("suffix", False, VOCABULARY),
            ("draft_model", True, VOCABULARY),
            ("draft_model", True, LARGE_VOCABULARY + 5),
            ("eagle", False, VOCABULARY),
            ("eagle3", True, VOCABULARY),
        ],
    )
    def test_no_drafter_changes_a_token_and_no_harm_does(self, tmp_path, kind, tied, vocabulary):
        models, batches, passes_of, answers = generated(tmp_path, kind, tied=tied, vocabulary=vocabulary)
        for prompts, found in zip(batches[:-1], answers["batches"], strict=False):
            check(models[1], prompts, found)
            tokens, passes = ([each[place] for each in found] for place in (2, 6))
            assert passes == [passes_of(*each) for each in zip(prompts, tokens, passes, strict=True)]
            if kind in ("draft_model", "eagle", "eagle3") and prompts[0].sampling.temperature == 1.0:
                assert sum(passes) < sum(map(len, tokens))
        if kind == "eagle3":  # before the first drafter, and after it: it shares vLLM's embedding
            assert [each[2] for each in answers["undrafted"]] == [each[2] for each in answers["after"]]
            assert [each[6] for each in answers["undrafted"]] == [len(each[2]) for each in answers["after"]]
        assert all(answers["refused"].values()), answers["refused"]
        # Passes may differ: suffixes are those of all texts so far.
        assert [each[2] for each in answers["after"]] == [each[2] for each in answers["batches"][0]]
        moved = {sample: text for _, sample, *text in answers["batches"][-1]}
        assert sorted(moved) == [0, 1, 2, 3, 4]  # the last one was aborted
        for sample, (tokens, logprobs, versions, *_) in moved.items():
            check_spans(models, batches[-1][sample], tokens, logprobs, versions)
        assert {1, 2} <= {version for text in moved.values() for version in text[2]}

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("kind", ["off", "ngram", "draft_model"])
    def test_on_a_gpu_log_probabilities_and_most_texts_are_those_of_the_oracle(self, tmp_path, kind):
        """Its kernels round otherwise than a CPU: near ties may fall the other way."""
        asked = "import sys, torch; sys.exit(not torch.cuda.is_available())"
        if subprocess.run([str(PYTHON), "-c", asked], timeout=LIMIT_S).returncode:
            pytest.skip("vLLM in .venv-vllm is built for CPUs")
        (tmp_path / "device").write_text("cuda")
        models, batches, _, answers = generated(tmp_path, kind)
        equal = compared = 0
        for prompts, found in zip(batches[:-1], answers["batches"], strict=False):
            plain = decode_plainly(models[1], prompts)
            for prompt, tokens, (_, _, ours, logprobs, *_) in zip(prompts, plain, found, strict=True):
                assert logprobs == pytest.approx(logprobs_of(models[1], prompt, ours), abs=5e-3)
                equal, compared = equal + (ours == tokens), compared + 1
        assert equal >= 0.8 * compared
        assert all(answers["refused"].values()), answers["refused"]

    @pytest.mark.parametrize("kind", ["draft_model", "suffix"])
    def test_vllm_drafts_only_where_that_is_measured_to_pay_and_no_token_changes(self, tmp_path, kind):
        """Costs are those of a clock that the job moves; what is accepted is vLLM's."""
        model = policy()
        save_file(untied(model), tmp_path / "1.safetensors")
        PASSES[kind](model, tmp_path / "drafter")
        (tmp_path / "config.json").write_text(model.config.to_json_string(use_diff=False))
        batches = [samples(1.0, 30, length=90, num=4)] * 4
        texts = [[json.loads(encode_prompt(prompt)) for prompt in batch] for batch in batches]
        (tmp_path / "prompts.json").write_text(json.dumps(texts))
        run_job(tmp_path, speculative_of(kind, tmp_path / "drafter"), json.dumps([0.01, 50.0]))
        cheap, dear = json.loads((tmp_path / "answers.json").read_text())
        for found in (cheap, dear):
            check(model, batches[0], found["batches"][0])
            tokens = [[each[2] for each in answers] for answers in found["batches"]]
            assert tokens == tokens[:1] * len(batches)
        shares = [found["arms"].get("off", 0) / sum(found["arms"].values()) for found in (cheap, dear)]
        assert shares[1] > 0.9, dear["arms"]
        assert dear["tokens"] < 1.3
        if kind == "draft_model":  # each draft is accepted: whatever is cheap pays
            assert shares[0] < 0.5, cheap["arms"]
            assert cheap["tokens"] > 1.5


DEPTH = 3
"""Tokens that drafters draft at a time."""


def plain_passes(model, folder):
    return lambda prompt, tokens, passes: len(tokens)


def some_passes(model, folder):
    """Return a function that accepts all passes: a text decides what its own n-grams draft."""
    return lambda prompt, tokens, passes: min(passes, len(tokens))


def draft_model_passes(model, folder):
    """Write the policy as its own draft model: each pass but the first accepts all drafts."""
    model.save_pretrained(folder)
    return lambda prompt, tokens, passes: 1 + -(-(len(tokens) - 1) // (DEPTH + 1))


def eagle_passes(model, folder):
    """Write a drafter of EAGLE-1's form that knows the last token only; return the passes that it leads to.

    Its layer adds nothing, and `fc` reads the embedding only, so its logits are a table of bigrams.
    """
    size, wide = model.config.hidden_size, model.config.intermediate_size
    bigrams = torch.randn(size, size, generator=torch.Generator().manual_seed(5)) / 4
    tensors = {"fc.weight": torch.cat([bigrams, torch.zeros(size, size)], 1)}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(size)
    for name in "qkvo":
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = torch.zeros(size, size)
    for name, shape in (("gate", (wide, size)), ("up", (wide, size)), ("down", (size, wide))):
        tensors[f"layers.0.mlp.{name}_proj.weight"] = torch.zeros(shape)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with torch.no_grad():
        table = model.get_input_embeddings().weight @ bigrams.T @ model.lm_head.weight.T

    def passes_of(prompt, tokens, passes):
        num_done, num_passes = 1, 1
        while num_done < len(tokens):
            drafts = [tokens[num_done - 1]]
            for position in range(len(prompt.tokens) + num_done, len(prompt.tokens) + num_done + DEPTH):
                drafts.append(int(perturbed(table[drafts[-1]], prompt, position).argmax()))
            pairs = zip(drafts[1:], tokens[num_done:], strict=False)
            num_done += 1 + len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
            num_passes += 1
        return num_passes

    return passes_of


def eagle3_passes(model, folder):
    """Write a drafter whose weights come while vLLM runs; return the own engine's passes with it."""
    layer = layer_for(model, tuple(range(0, VOCABULARY, 2)))
    save_file(layer.state_dict(), folder.parent / "layer.safetensors")
    (folder.parent / "layer.json").write_text(json.dumps(asdict(layer.shape)))

    def passes_of(prompt, tokens, passes):
        target = Target.of(model, rows=1, max_tokens=256, nodes=16, taps=layer.shape.tap_layers)
        drafters = {"layer": LayerDrafter.of(layer, target)}
        engine = Engine(target, drafters=drafters, chooser=Fixed.of(f"layer:{DEPTH}"))
        (rollout,) = engine.generate([prompt])
        assert rollout.tokens == tokens
        return rollout.passes

    return passes_of


PASSES = {
    "off": plain_passes,
    "ngram": some_passes,
    "suffix": some_passes,
    "draft_model": draft_model_passes,
    "eagle": eagle_passes,
    "eagle3": eagle3_passes,
}
"""By drafter of vLLM: writes it to a folder, and returns a function of prompt, tokens and passes."""


def untied(model):
    """Return the tensors of a model, tied ones once."""
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def speculative_of(kind, drafter):
    if kind == "off":
        return {}
    ngram = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    more = {"ngram": ngram, "suffix": {}, "eagle3": {}}.get(kind, {"model": str(drafter)})
    return {"method": kind, "num_speculative_tokens": DEPTH, **more}


def generated(folder, kind, *, tied=False, vocabulary=VOCABULARY):
    """Return two versions of a policy, batches of prompts, the passes they need, and the answers of a job."""
    models = {1: policy(tied=tied, layers=4 if kind == "eagle3" else 2, vocabulary=vocabulary)}
    models[2] = changed(models[1])
    for version, model in models.items():
        save_file(untied(model), folder / f"{version}.safetensors")
    passes_of = PASSES[kind](models[1], folder / "drafter")
    (folder / "config.json").write_text(models[1].config.to_json_string(use_diff=False))
    batches = [samples(temperature, i) for i, temperature in enumerate(TEMPERATURES)]
    batches.append(samples(1.0, 9, num=6, length=60))
    texts = [[json.loads(encode_prompt(prompt)) for prompt in batch] for batch in batches]
    (folder / "prompts.json").write_text(json.dumps(texts))
    run_job(folder, speculative_of(kind, folder / "drafter"))
    return models, batches, passes_of, json.loads((folder / "answers.json").read_text())


def run_job(folder, speculative, *more):
    job = ROOT / "tests" / "kit" / "vllm_job.py"
    command = [str(PYTHON), str(job), str(folder), json.dumps(speculative), *more]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env, timeout=800)
    assert done.returncode == 0, (folder / "log").read_text()[-4000:]


@pytest.fixture(scope="module")
def server(tmp_path_factory, models):
    """Return the address of vLLM's own server, with the plug-in beside it, and some other weights."""
    folder = tmp_path_factory.mktemp("vllm-server")
    plug_in = shutil.copytree(ROOT / "spec_rollout" / "vllm", folder / "source")
    pip = [PYTHON, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", folder / "site", plug_in], check=True, timeout=LIMIT_S)
    changed(models[2]).save_pretrained(folder / "model")
    words = [f"--model={folder / 'model'}", "--max-model-len=320", "--skip-tokenizer-init"]
    ngram = {"method": "ngram", "num_speculative_tokens": DEPTH, "prompt_lookup_min": 1}
    words += ["--speculative-config", json.dumps(ngram), "--per-request-spec-decode-metrics", "summary"]
    words += ["--weight-transfer-config", json.dumps({"backend": "aedit"}), "--enable-scale-out"]
    env = {"PYTHONPATH": str(folder / "site"), "VLLM_SERVER_DEV_MODE": "1"}
    with stock_server(words, folder, env) as address:
        yield address


@contextmanager
def stock_server(words, folder, variables, log="log"):
    """Yield the address of vLLM's own server, which is started in a folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", f"--port={port}", "--host=127.0.0.1"]
    command += ["--dtype=float32", "--enforce-eager", "--max-num-seqs=8", *words]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with (folder / log).open("w+") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=env, start_new_session=True, cwd=folder
        )
        try:

            def answers():
                assert process.poll() is None, (folder / log).read_text()[-4000:]
                try:
                    return urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
                except OSError:
                    return False

            until(answers, "vLLM's server", LIMIT_S, 0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()  # it removes its shared memory
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(LIMIT_S)


ENGINES = ["aedit", *(pytest.param(name, marks=needs_vllm) for name in ("vllm", "server"))]


@pytest.fixture(scope="module", params=ENGINES)
def source(request, models, tmp_path_factory):
    """Return a source whose worker runs one of the engines."""
    other = {"make": MAKE, "python": PYTHON} if request.param == "vllm" else {}
    if request.param == "server":
        options = {"server": request.getfixturevalue("server"), "folder": str(tmp_path_factory.mktemp("w"))}
        other = {"make": MAKE_SERVER, "options": options}
    config = WorkerConfig(
        rows=4,
        max_tokens=256,
        starts_within_s=800.0,
        silent_s=400.0,
        restarts=Restarts(pause_s=0.0),
        logs=tmp_path_factory.mktemp(request.param),
        **other,
    )
    made = WorkerSource(models[1], config)
    made.update_weights(models[1].state_dict(keep_vars=True), 1)
    made.least = 0 if request.param == "server" else 4
    if request.param == "server":  # it reports tokens with the end of a sample
        made.has_begun = lambda: num_running(options["server"]) > 0
    else:
        made.has_begun = lambda: any(each.partial and each.partial.tokens for each in made.pending())
    yield made
    made.close()


@pytest.fixture(scope="module")
def models():
    first = policy()
    second = changed(first)
    return {version: first if version % 2 else second for version in range(1, 2 + ATTEMPTS)}


class TestContract:
    """What every engine behind a worker keeps."""

    @pytest.mark.parametrize("temperature", TEMPERATURES)
    def test_tokens_and_log_probabilities_are_those_of_plain_decoding(self, source, models, temperature):
        checked: RolloutSource = source
        prompts = samples(temperature, 20 + int(10 * temperature), least=source.least)
        done = finish(checked, prompts)
        version = source.version
        check(models[version], prompts, answers_of(prompts, done))
        assert {each for rollout in done.values() for each in rollout.versions} == {version}

    def test_weights_change_between_two_steps_of_running_samples(self, source, models):
        for attempt in range(ATTEMPTS):
            prompts = samples(1.0, 500 + attempt, length=60, least=source.least)
            version = source.version

            def disturb(version=version):
                if source.version == version and source.has_begun():
                    source.update_weights(models[version + 1].state_dict(keep_vars=True), version + 1)

            done = finish(source, prompts, disturb)
            for prompt in prompts:
                rollout = done[prompt.key]
                check_spans(models, prompt, rollout.tokens, rollout.logprobs, rollout.versions)
            if {version, version + 1} == {each for rollout in done.values() for each in rollout.versions}:
                return
        pytest.fail("no round of samples had tokens of two versions")

    def test_a_killed_worker_costs_time_only(self, source, models):
        killed = []

        def disturb():
            if not killed and source.has_begun():
                killed.extend(source.status()["pids"])
                os.kill(killed[0], signal.SIGKILL)

        for attempt in range(ATTEMPTS):
            prompts = samples(0.7, 600 + attempt, length=60, least=source.least)
            done = finish(source, prompts, disturb)
            check(models[source.version], prompts, answers_of(prompts, done))
            if killed:
                return
        pytest.fail("no sample was seen that had begun")

    def test_what_the_own_engine_generates_is_bitwise_the_same_text(self, source, models):
        prompts = samples(1.0, 70, least=source.least)
        done = finish(source, prompts)
        engine = Engine.of(models[source.version], rows=4, max_tokens=256)
        own = {rollout.prompt.key: rollout.tokens for rollout in engine.generate(prompts)}
        assert {key: rollout.tokens for key, rollout in done.items()} == own

    def test_cancelled_samples_end_and_their_keys_can_be_added_again(self, source, models):
        prompts = samples(1.0, 80, length=40, least=source.least)
        source.add(prompts)
        source.cancel()
        done = finish(source, prompts)
        check(models[source.version], prompts, answers_of(prompts, done))


def num_running(server):
    """Return the requests that vLLM's server computes."""
    return figure_of(server, "num_requests_running")


def figure_of(server, name):
    """Return the sum of a figure of vLLM's server."""
    text = urlopen(f"{server}/metrics", timeout=LIMIT_S).read().decode()
    return sum(float(value) for value in re.findall(rf"^vllm:{name}\{{.*\}} (.*)$", text, re.M))


class TestServedVllm:
    """vLLM's own server, whose weights are pushed over HTTP."""

    pytestmark = needs_vllm

    def engine(self, server, model, folder):
        config = json.loads(model.config.to_json_string(use_diff=False))
        options = {"server": server, "folder": str(folder)}
        sizes = {"rows": 8, "max_tokens": 320, "arms": ("off",)}
        return make_vllm_server_engine(
            EngineSpec(model=config, dtype="float32", device="cpu", options=options, **sizes)
        )

    def generate(self, engine, prompts):
        rollouts = [engine.add(prompt) for prompt in prompts]
        until(lambda: engine.step() and not engine.running, "the samples", LIMIT_S, look_s=0)
        return answers_of(prompts, {each.prompt.key: each for each in rollouts}), rollouts

    def test_refused_versions_change_no_text_and_weights_of_another_are_found(
        self, server, models, tmp_path, monkeypatch
    ):
        engine = self.engine(server, models[1], tmp_path)
        with pytest.raises(ValueError, match="min_new_tokens is not served by a vLLM server"):
            engine.add(samples(1.0, 2999)[1])
        weights = dict(models[1].state_dict())
        engine.update_weights(weights, 1)
        prompts = samples(1.0, 3000, least=0)
        before, rollouts = self.generate(engine, prompts)
        check(models[1], prompts, before)
        assert all(0 < each.passes <= len(each.tokens) for each in rollouts)
        repeated, (again,) = self.generate(engine, [greedy_loop(models[1])])
        check(models[1], [again.prompt], repeated)
        assert again.passes < 0.7 * len(again.tokens)  # it repeats itself, and n-grams are drafted
        assert engine.meters.num_passes == sum(each.passes for each in [*rollouts, again])
        for name, harm in HARM.items():
            harmed = {name: tensor.clone() for name, tensor in weights.items()}
            harm(harmed)
            with pytest.raises(ValueError, match="weights"):
                engine.update_weights(harmed, 2)
            assert engine.version == 1, name
        with monkeypatch.context() as patch:
            patch.setattr(vllm_server.hashlib, "file_digest", lambda file, kind: hashlib.sha256(b"other"))
            with pytest.raises(ValueError, match=r"refused version 2.*its hash is"):
                engine.update_weights(dict(models[2].state_dict()), 2)
        assert [each[2] for each in self.generate(engine, prompts)[0]] == [each[2] for each in before]
        assert not list(tmp_path.iterdir())
        engine.update_weights(dict(models[2].state_dict()), 2)
        check(models[2], prompts, self.generate(engine, prompts)[0])
        other = self.engine(server, models[1], tmp_path)
        other.update_weights(weights, 7)
        with pytest.raises(VllmServerError, match=r"names weights aedit/.*/7, expected aedit/.*/2"):
            self.generate(engine, prompts)

    def test_a_server_without_the_routes_is_refused_with_the_command(self, models, tmp_path):
        with HTTPServer(("127.0.0.1", 0), Healthy) as plain:
            Thread(target=plain.serve_forever, daemon=True).start()
            with pytest.raises(VllmServerError, match=r"lacks routes.*404.*VLLM_SERVER_DEV_MODE=1 python -m"):
                self.engine(f"http://127.0.0.1:{plain.server_port}", models[1], tmp_path)
            plain.shutdown()


def greedy_loop(model):
    """Return a sample whose text repeats itself."""
    starts = [Prompt(tokens=(token,), rollout=i, sample=0, sampling=LONG) for i, token in enumerate(range(8))]
    texts = decode_plainly(model, starts)
    return min(zip(starts, texts, strict=True), key=lambda pair: len({*pairwise(pair[1])}))[0]


LONG = Sampling(temperature=0.0, max_new_tokens=100)


TEXT_RUN = """
name = "text"
dir = "{folder}"
device = "cpu"
[model]
sizes = {{ hidden_size = 64, intermediate_size = 96, num_hidden_layers = 4, num_attention_heads = 2 }}
[data]
source = "{folder}/text.md"
seq_len = 128
[train]
steps = 120
batch_size = 4
lr = 3e-3
eval_every = 0
[edit]
every = 10
[drafter]
kind = "layer"
form = "eagle3"
train = true
[local]
slowdown = [1, 3]
"""


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: `make vllm` builds it")
def test_the_exported_drafter_of_a_text_run_is_served_with_its_policy_also_from_another_place(tmp_path):
    (tmp_path / "text.md").write_text("".join(pydoc_data.topics.topics.values())[: 1 << 16])
    (tmp_path / "text.toml").write_text(TEXT_RUN.format(folder=tmp_path))
    for words in (
        ["run", tmp_path / "text.toml", "--local=2"],
        ["export", tmp_path / "text", tmp_path / "out", "--drafter"],
    ):
        command = [sys.executable, "-m", "aedit.launch.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    layer = load_drafter(tmp_path / "out" / "drafter", model)
    prompts = [
        Prompt(tokens=tuple(b"def f" + bytes([97 + i])), rollout=0, sample=i, sampling=SERVED_SAMPLING)
        for i in range(8)
    ]
    target = Target.of(model, rows=8, max_tokens=128, nodes=16, taps=layer.shape.tap_layers)
    drafters = {"layer": LayerDrafter.of(layer, target)}
    engine = Engine(target, drafters=drafters, chooser=Fixed.of("layer:4"))
    own = {rollout.prompt.sample: rollout for rollout in engine.generate(prompts)}
    per_pass = engine.meters.status()["accepted_length"]
    assert per_pass > 1.2  # it has learned something in the waits
    assert [own[i].tokens for i in range(8)] == decode_plainly(model, prompts)

    def generated(server):
        body = {"prompt": [list(each.tokens) for each in prompts], "temperature": 0, "ignore_eos": True}
        body |= {"max_tokens": SERVED_SAMPLING.max_new_tokens, "return_token_ids": True}
        request = Request(f"{server}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urlopen(request, timeout=LIMIT_S) as answer:
            choices = json.load(answer)["choices"]
        return [each["token_ids"] for each in sorted(choices, key=lambda each: each["index"])]

    def check_server(words, folder, log):
        with stock_server(words, folder, {}, log) as server:
            assert generated(server) == [own[i].tokens for i in range(8)]
            names = ("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total")
            accepted, drafts = (figure_of(server, name) for name in names)
            assert abs((1 + accepted / drafts) / per_pass - 1) < 0.02

    check_server([f"--model={tmp_path / 'out' / 'drafter'}"], tmp_path, "log 1")
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    eagle = {"method": "eagle3", "model": "drafter", "num_speculative_tokens": 4}
    check_server(["--model=.", "--speculative-config", json.dumps(eagle)], moved, "log 2")


SERVED_SAMPLING = Sampling(temperature=0.0, max_new_tokens=64)


class Healthy(BaseHTTPRequestHandler):
    """A server that has no route but /health."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.send_error(404)

    def log_message(self, *arguments):
        pass


SERVED = ["--engine=vllm", f"--rollout.vllm.python={PYTHON}"]


class TestServer:
    """`aedit serve --engine vllm`, as a process."""

    pytestmark = needs_vllm

    def test_a_model_directory_has_the_texts_of_the_own_engine_and_refused_weights_change_none(
        self, tmp_path
    ):
        for name, model in (("first", policy(layers=3)), ("second", changed(policy(layers=3)))):
            saved_llama(model, tmp_path / name)
        (tmp_path / "key").write_text("secret\n")
        control = ["--control=127.0.0.1:0", f"--control-key-file={tmp_path / 'key'}"]
        words = [*SERVED, *control, f"--weights-root={tmp_path}"]
        with model_server(tmp_path / "first") as own, model_server(tmp_path / "first", *words) as vllm:
            before = [post(vllm[0], each) for each in REQUESTS]
            check_answers(before, [post(own[0], each) for each in REQUESTS])
            assert streamed_ids(vllm[0]) == before[0]["choices"][0]["token_ids"]
            with pytest.raises(HTTPError) as refused:
                post(vllm[0], {**REQUESTS[0], "top_p": 0.5})
            assert refused.value.code == 400
            assert "top_p 0.5 is not served by vLLM" in refused.value.read().decode()
            for kind in ("missing", "shape", "nan"):
                harmed(tmp_path / "second", tmp_path / kind, kind)
                with pytest.raises(HTTPError) as refused:
                    post(vllm[1], {"weight_dir": str(tmp_path / kind)}, "/update_weights")
                assert refused.value.code == 400, kind
            assert [texts_of(post(vllm[0], each)) for each in REQUESTS] == [*map(texts_of, before)]
            with ThreadPoolExecutor() as pool:
                later = pool.submit(post, vllm[0], {**REQUESTS[0], "max_tokens": 200})
                pids = wait_for_pids(vllm[1])
                os.kill(pids[0], signal.SIGKILL)  # costs time only
                wanted = post(own[0], {**REQUESTS[0], "max_tokens": 200})
                check_answers([later.result(LIMIT_S)], [wanted])
            answer = post(vllm[1], {"weight_dir": str(tmp_path / "second")}, "/update_weights")
            assert answer["weight_version"] == "2"
            after = [post(vllm[0], each) for each in REQUESTS]
            metrics = urlopen(f"http://{vllm[0]}/metrics").read().decode()
            assert 'aedit_serve_policy_version{line="model"} 2.0' in metrics
        with model_server(tmp_path / "second") as own:
            check_answers(after, [post(own[0], each) for each in REQUESTS])
        assert texts_of(after[0]) != texts_of(before[0])

    def test_versions_of_hub_and_trainer_are_followed_and_one_that_is_not_finite_changes_no_text(
        self, tmp_path
    ):
        prompts = prompts_of(4, max_new_tokens=24)
        with served_run(tmp_path, words=[*SERVED, "--http=127.0.0.1:0"], heads=1) as (founder, (server,)):
            wanted = decode_plainly(founder.model(), prompts)
            with TrainerEnd(server.address, "run", beats=True) as public:
                public.wait(lambda: public.opened, "Opened", LIMIT_S)
                assert generated_by(public, prompts, 1) == wanted
                for unit in range(len(founder.numels)):  # the next version
                    assert founder.push(unit).accepted
                later = prompts_of(4, seed=1, max_new_tokens=24)
                assert generated_by(public, later, 2) == decode_plainly(founder.model(), later)
                assert {v for p in later for v in public.samples[p.key].versions} == {2}
                public.end_quietly()
            model, versions = founder.model(), VersionStore(founder.run.layout)
            with TrainerEnd(server.address, "trainer", beats=True) as trainer:
                trainer.wait(lambda: trainer.opened, "Opened", LIMIT_S)
                give(versions, model, 5, server.address, trainer.secret)
                assert generated_by(trainer, prompts, 5) == decode_plainly(model, prompts)
                harm = deepcopy(model)
                next(harm.parameters()).data[0, 0] = torch.nan
                give(versions, harm, 6, server.address, trainer.secret)
                server.wait(lambda: server.events("error"), "the refusal of the version")
                assert "has values that are not finite" in server.events("error")[0]["message"]
                assert generated_by(trainer, later, 5) == decode_plainly(model, later)
                give(versions, changed(model), 7, server.address, trainer.secret)
                third = prompts_of(4, seed=2, max_new_tokens=24)
                assert generated_by(trainer, third, 7) == decode_plainly(changed(model), third)
                trainer.end_quietly()
            with TrainerEnd(server.address, "other", on_new_version="finish") as trainer:
                code, text = trainer.end()
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert 'has one version at a time: set rl.on_new_version = "recompute"' in text
            server.wait(lambda: server.events("http"), "HTTP")
            assert server.stop() == 0


REQUESTS = [
    {"prompt": "the quick", "temperature": 1.0, "seed": 1, "n": 2},
    {"prompt": "one two three " * 40, "temperature": 0.7, "seed": 2},  # its prefix fills blocks of the cache
    {"prompt": "one two three " * 40, "temperature": 0.0},
    {"prompt": [5, 6, 7], "temperature": 1.0, "seed": 3, "stop": ["a", "e"], "logprobs": 3},
]


def saved_llama(model, folder):
    """Write a model whose vocabulary is that of a byte-level tokenizer."""
    tokenizer = byte_level()
    config = LlamaConfig.from_dict({**model.config.to_dict(), "vocab_size": tokenizer.get_vocab_size()})
    torch.manual_seed(len(folder.name))
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def harmed(source, folder, kind):
    """Write a version that cannot be used."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if kind == "missing":
        del weights[name]
    elif kind == "shape":
        weights[name] = weights[name][:3].clone()
    else:
        weights[name][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@contextmanager
def model_server(folder, *words):
    """Yield the addresses of a server of a model directory: public, and control."""
    command = [sys.executable, "-m", "aedit.launch.cli", "serve", str(folder), "--port=0", "--end-s=1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = folder.parent / f"server-{len(words)}.log"
    with log.open("w+") as out:
        process = subprocess.Popen([*command, "--device=cpu", *words], stdout=out, stderr=out, env=env)
        try:

            def addresses():
                assert process.poll() is None, log.read_text()
                return re.findall(r"http://([\w.:]+)", log.read_text())

            until(addresses, "the server", LIMIT_S, 0.2)
            yield addresses()
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0, log.read_text()
        finally:
            process.kill()
            process.wait(LIMIT_S)


def post(address, body, path="/v1/completions"):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    body = body if path != "/v1/completions" else {"max_tokens": 24, "logprobs": 0, **body}
    data = json.dumps({**body, **({"return_token_ids": True} if "prompt" in body else {})}).encode()
    with urlopen(Request(f"http://{address}{path}", data, headers), timeout=LIMIT_S) as answer:
        return json.load(answer)


def streamed_ids(address):
    """Return the tokens of the first sample of the first request, as a stream brings them."""
    body = {**REQUESTS[0], "max_tokens": 24, "stream": True, "return_token_ids": True}
    request = Request(f"http://{address}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urlopen(request, timeout=LIMIT_S) as answer:
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    return [token for each in choices if each["index"] == 0 for token in each["token_ids"] or ()]


def texts_of(answer):
    return [(each["token_ids"], each["text"], each["finish_reason"]) for each in answer["choices"]]


def check_answers(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert texts_of(one) == texts_of(other)
        for mine, its in zip(one["choices"], other["choices"], strict=True):
            logprobs = mine["logprobs"], its["logprobs"]
            assert logprobs[0]["token_logprobs"] == pytest.approx(logprobs[1]["token_logprobs"], abs=5e-5)
            tops = [[[*place] for place in each["top_logprobs"] or ()] for each in logprobs]
            assert tops[0] == tops[1]


def wait_for_pids(control):
    """Return the processes of the engine, once it generates."""

    def running():
        request = Request(f"http://{control}/status", headers={"Authorization": "Bearer secret"})
        line = json.load(urlopen(request))["lines"]["model"]
        return line["running"] and line["pids"]

    return until(running, "a running sample", LIMIT_S, 0.01)


def generated_by(trainer, prompts, min_version):
    """Return the tokens of samples that need this version."""
    for prompt in prompts:
        trainer.add(prompt, min_version=min_version)
    keys = [prompt.key for prompt in prompts]

    def ended():
        assert trainer.error is None
        assert trainer.rejected == []
        return all(trainer.samples[key].ended is not None for key in keys)

    until(ended, "the ends of samples", LIMIT_S, 0.2)
    return [trainer.samples[key].tokens for key in keys]


def give(store, model, version, address, secret):
    """Give a server a version of the trainer's line."""
    own = dict(model.named_parameters())
    units = {}
    for unit in store.layout.layout.units:
        flat = torch.cat([own[each.name].detach().reshape(-1) for each in unit.tensors]).numpy()
        units[unit.name] = patterns(flat, store.layout.dtype)
    store.publish("trainer", version, units)
    client = VersionsClient(address)
    client.give(store, "trainer", version, secret)
    client.close()


def test_samples_that_vllm_would_draw_otherwise_are_refused_with_the_remedy():
    check_supported(Prompt(tokens=(1,), rollout=3, sampling=Sampling(stop_tokens=(2,), min_new_tokens=3)))
    error = 'prompt 3/0: top_p 0.5 is not served by vLLM: leave it out, or use the engine "aedit"'
    with pytest.raises(ValueError, match=error):
        check_supported(Prompt(tokens=(1,), rollout=3, sampling=Sampling(top_p=0.5)))
    with pytest.raises(ValueError, match="allowed tensor"):
        check_supported(Prompt(tokens=(1,), sampling=Sampling(allowed=torch.ones(4, dtype=torch.bool))))


class TestRefusals:
    """What is not run."""

    pytestmark = needs_vllm

    def test_an_unknown_version_of_vllm_is_refused_in_one_line(self):
        code = "import vllm; vllm.__version__ = '0.99.0'\n"
        code += "from aedit.spec_rollout.vllm import register; register()"
        last = failure(code).splitlines()[-1]
        assert last.startswith("RuntimeError: aedit-vllm: vLLM 0.99.0 is unknown: install one of 0.32.0")

    def test_the_second_model_runner_is_refused(self):
        code = "import os; os.environ['VLLM_USE_V2_MODEL_RUNNER'] = '1'\n"
        code += "from aedit.spec_rollout.vllm import register; register()"
        assert "coupled sampling needs runner V1" in failure(code).splitlines()[-1]


def failure(code):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 1
    return done.stderr.strip()


def finish(source, prompts, disturb=lambda: None):
    """Return the finished rollouts by key; `disturb` is called between steps."""
    source.add(prompts)
    done = {}

    def step():
        disturb()
        done.update((rollout.prompt.key, rollout) for rollout in source.step())
        return not source.running

    until(step, "the samples", LIMIT_S, look_s=0)
    assert sorted(done) == sorted(prompt.key for prompt in prompts)
    return done


def answers_of(prompts, done):
    rollouts = [done[prompt.key] for prompt in prompts]
    return [
        (*each.prompt.key, each.tokens, each.logprobs, each.versions, each.finish_reason) for each in rollouts
    ]
