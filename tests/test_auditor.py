"""Tests of the auditor against servers that lie in each way, with rollouts of real engines."""

import copy
import json
import re
from dataclasses import replace
from itertools import count

import pytest
import torch
from safetensors.torch import load_file
from tests.kit import tiny_policies
from tests.kit.audited import PROMPT, generate, held

from aedit.proto.rpc import SigningKey
from aedit.spec_rollout.audit import (
    Origin,
    calibration,
    read_recording,
    signature_error,
    signature_of,
    statement_of,
    weights_files,
)
from aedit.spec_rollout.audit.auditor import AuditSettings, RateRule, SpotAuditor
from aedit.spec_rollout.audit.recording import Recording, to_line
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.sampling import ROLLOUT_PROTOCOL, Prompt, Sampling

SAMPLING = Sampling(max_new_tokens=24, stop_tokens=(0,))
VERSION = 3


def policy(seed=0):
    """Return the policy in fp32; another seed moves its weights a little, as training does."""
    model = tiny_policies.policy(dtype=torch.float32, loudness=1.0)
    if seed:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for each in model.parameters():
                each.add_(torch.randn(each.shape, generator=generator) * 0.05 * each.std())
    return model


def arrays(model):
    return {name: value.detach().clone().numpy() for name, value in model.state_dict().items()}


def auditor(draw=lambda: 0.0, versions=None, **settings):
    made = SpotAuditor(policy, AuditSettings(**settings), draw=draw)
    for version, model in sorted((versions or {VERSION: policy()}).items()):
        made.publish(version, lambda model=model: arrays(model))
    return made


def first_failure(samples, checker):
    """Return the verdict that convicts a server, and the tokens until then; None if all samples pass."""
    tokens = 0
    for sample in samples:
        verdict = checker.check(sample)
        tokens += len(sample.tokens)
        if not verdict.passed:
            return verdict, tokens
    return None, tokens


def honest(number=12, **options):
    return generate(policy(), number, version=VERSION, sampling=SAMPLING, **options)


def claimed_as(rollout, **changes):
    """Return the rollout under the key, settings and version that were asked for."""
    return held(replace(rollout, prompt=replace(rollout.prompt, sampling=SAMPLING)), **changes)


def test_an_honest_server_passes_and_its_rate_falls():
    checker = auditor(rule=RateRule(rate=0.5, floor=0.1, halved_by=20))
    for rollout in honest():
        assert checker.check(held(rollout)).passed
    assert checker.rate("a") == 0.1
    found = checker.servers["a"]
    assert (found.num_samples, found.num_mismatches, found.num_failures) == (12, 0, 0)
    assert found.largest_margin < 1e-4


def other_seed():
    return [held(x, key=(7, i)) for i, x in enumerate(honest(first=50))]


def greedy():
    found = generate(policy(), 12, sampling=replace(SAMPLING, temperature=0.0), version=VERSION)
    return [claimed_as(each) for each in found]


def cooler():
    found = generate(policy(), 12, sampling=replace(SAMPLING, temperature=0.9), version=VERSION)
    return [claimed_as(each) for each in found]


def other_model():
    return [held(x) for x in generate(policy(seed=1), 12, sampling=SAMPLING, version=VERSION)]


def four_bits():
    model = policy()
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() == 2:
                step = each.abs().amax(1, keepdim=True) / 7
                each.copy_((each / step).round() * step)
    return [held(x) for x in generate(model, 12, sampling=SAMPLING, version=VERSION)]


def edited():
    texts = honest()
    tokens = [[(t + 1) % 48 or 1 if i == 9 else t for i, t in enumerate(each.tokens)] for each in texts]
    return [held(each, tokens=tuple(changed)) for each, changed in zip(texts, tokens, strict=True)]


def reused():
    first = honest(1)[0]
    return [held(first, key=(7, 1))]


def cherry_picked():
    """The longest of four answers, under the key of the first."""
    texts = honest(12)
    best = [max(texts[i : i + 4], key=lambda x: (len(x.tokens), -x.tokens[0])) for i in range(0, 12, 4)]
    return [held(x, key=(7, 100 + i)) for i, x in enumerate(best)]


def early_end():
    texts = [each for each in honest() if len(each.tokens) > 8]
    return [
        held(
            each,
            tokens=(*each.tokens[:6], 0),
            logprobs=(*each.logprobs[:6], -0.5),
            versions=(VERSION,) * 7,
            finish_reason="stop",
        )
        for each in texts
    ]


def truncated():
    return [
        held(x, tokens=tuple(x.tokens[:5]), logprobs=tuple(x.logprobs[:5]), versions=tuple(x.versions[:5]))
        for x in honest()
        if len(x.tokens) > 5
    ]


def false_logprobs():
    return [held(each, logprobs=tuple(x - 0.05 for x in each.logprobs)) for each in honest()]


def few_false_logprobs():
    """A third of the tokens: the median stays right."""
    return [
        held(each, logprobs=tuple(x - 0.3 * (i % 3 == 0) for i, x in enumerate(each.logprobs)))
        for each in honest()
    ]


LIES = {
    "other seed": (other_seed, "not the one that the policy draws"),
    "greedy": (greedy, "not the one that the policy draws"),
    "cooler": (cooler, "of the policy|in the median|policy draws"),
    "other model": (other_model, "of the policy|in the median|policy draws"),
    "four bits": (four_bits, "of the policy|in the median|policy draws"),
    "edited": (edited, "not the one that the policy draws"),
    "reused": (reused, "not the one that the policy draws"),
    "cherry-picked": (cherry_picked, "not the one that the policy draws"),
    "early end": (early_end, "not the one that the policy draws"),
    "truncated": (truncated, "finish reason"),
    "false logprobs": (false_logprobs, "in the median"),
    "few false logprobs": (few_false_logprobs, "not those of the policy"),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_found_within_a_few_samples(lie):
    make, reason = LIES[lie]
    checker = auditor()
    verdict, _ = first_failure(make(), checker)
    assert verdict is not None
    assert re.search(reason, verdict.reason)
    assert verdict.is_final
    assert verdict.evidence["key"][0] == 7
    assert checker.rate("a") == 1.0


def test_each_token_is_judged_under_the_whole_text_of_its_own_version():
    """An engine that takes over new weights twice; the spans are true, then each wrong in one way."""
    models = {version: policy(seed) for version, seed in ((3, 0), (4, 1), (5, 2))}
    running = copy.deepcopy(models[3])
    engine = Engine.of(running, rows=4, max_tokens=128)
    engine.update_weights(None, 3)
    chosen = Sampling(max_new_tokens=30)
    rollouts = [engine.add(Prompt(tokens=PROMPT, rollout=7, sample=i, sampling=chosen)) for i in range(4)]
    for step in count():
        if step in (10, 20):
            version = 3 + step // 10
            engine.update_weights(models[version].state_dict(), version)
        if not engine.step().rollouts:
            break
    assert {tuple(sorted({*each.versions})) for each in rollouts} == {(3, 4, 5)}
    checker = auditor(versions=models, rule=RateRule(rate=1.0))
    assert [checker.check(held(each)).passed for each in rollouts] == [True] * 4
    for versions in ((5,) * 30, (3,) * 30, (3,) * 10 + (4,) * 20):
        lying = [held(each, server="b", versions=versions) for each in rollouts]
        assert first_failure(lying, auditor(versions=models))[0] is not None
    older = auditor(versions={4: models[4], 5: models[5]})
    verdict = older.check(held(rollouts[0]))
    assert (verdict.passed, verdict.is_final) == (False, False)
    assert "version 3 are not here any more" in verdict.reason


def test_only_the_tokens_of_the_server_itself_count():
    true = honest(1)[0]
    given = held(true, tokens=(9, *true.tokens[1:]))
    assert not auditor().check(given).passed
    engine = Engine.of(policy(), rows=1, max_tokens=128)
    engine.update_weights(None, VERSION)
    partial = replace(true, tokens=[9, 8, 7], logprobs=[-9.0] * 3, versions=[1] * 3, finish_reason="")
    rest = next(engine.generate([replace(true.prompt, partial=partial)]))
    assert auditor().check(held(rest, start=3)).passed
    assert not auditor().check(held(rest, start=2, versions=(3,) * len(rest.tokens))).passed


def test_old_versions_make_room_and_accuse_nobody():
    checker = auditor(versions={3: policy(), 4: policy(1), 5: policy(2)}, versions_kept=2)
    old = held(honest(1)[0])
    new = held(generate(policy(2), 1, version=5, sampling=SAMPLING)[0])
    assert [checker.can_judge(each) for each in (old, new)] == [False, True]
    assert not checker.check(old).is_final
    assert checker.check(new).passed


def test_samples_are_selected_at_the_rate_of_the_server_and_all_places_alike():
    numbers = iter([0.3, 0.19, 0.99, 0.19, 0.0, 0.5])
    checker = auditor(draw=lambda: next(numbers), rule=RateRule(rate=0.2))
    samples = [held(each) for each in honest(4)]
    assert checker.select("a", samples, draining=False) is None  # 0.3 is not below the rate
    assert checker.select("a", samples, draining=False) == 3  # 0.99 * 4
    assert checker.select("a", samples, draining=False) == 0
    assert checker.select("a", samples, draining=True) == 2
    assert checker.select("a", [], draining=True) is None


def test_after_a_failure_every_sample_is_checked():
    checker = auditor(draw=lambda: 0.999, rule=RateRule(rate=0.2))
    samples = [held(each) for each in honest(2)]
    assert checker.select("a", samples, draining=False) is None
    assert not checker.check(replace(samples[0], key=(8, 8))).passed
    assert checker.select("a", samples, draining=False) == 1
    assert checker.select("b", samples, draining=False) is None
    checker.accuse("b")
    assert checker.select("b", samples, draining=False) == 1


def test_settings_that_cannot_be_judged_accuse_nobody():
    rollout = generate(policy(), 1, version=VERSION, sampling=replace(SAMPLING, top_k=5))[0]
    verdict = auditor().check(held(rollout))
    assert (verdict.passed, verdict.is_final) == (False, False)
    assert "top_k cannot be audited" in verdict.reason
    assert not auditor().can_judge(held(rollout))


def test_every_sample_and_version_is_recorded_once_and_read_as_it_was(tmp_path):
    config = policy().config.to_dict()
    recording = Recording(tmp_path / "r", max_bytes=1 << 20, versions=2, model=config)
    checker = SpotAuditor(policy, AuditSettings(), draw=lambda: 0.999, recording=recording)
    for version in (3, 4, 5):
        checker.publish(version, lambda: arrays(policy()))
    one, two, three = (held(each, signature=b"s", statement=b"t") for each in honest(3))
    for samples in ([one], [one], [one, two, three], [three]):
        checker.select("a", samples, draining=False)
    assert list(read_recording(tmp_path / "r" / "rollouts.jsonl")) == [one, two, three]
    assert sorted(weights_files(tmp_path / "r")) == [4, 5]
    kept = load_file(weights_files(tmp_path / "r")[5])
    assert all(torch.equal(kept[name], value) for name, value in policy().state_dict().items())


def test_a_recording_stays_within_its_bytes_and_keeps_the_newest(tmp_path):
    rollouts = [held(each) for each in honest(8)]
    size = len(to_line(rollouts[0]))
    recording = Recording(tmp_path, max_bytes=7 * size, versions=0, model={})
    recording.weights(1, {"a": torch.zeros(1)})
    for each in rollouts * 3:
        recording.rollout(each)
    files = [tmp_path / "rollouts.1.jsonl", tmp_path / "rollouts.jsonl"]
    assert sum(file.stat().st_size for file in files) <= 7 * size
    found = [each for file in files for each in read_recording(file)]
    assert found == (rollouts * 3)[-len(found) :]
    assert len(found) >= 3
    assert weights_files(tmp_path) == {}


def test_a_recording_that_cannot_be_written_costs_nothing_else(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    recording = Recording(tmp_path / "file", max_bytes=1000, versions=1, model={})
    recording.rollout(held(honest(1)[0]))
    recording.weights(1, {"a": torch.zeros(1)})
    assert capsys.readouterr().err.count("aedit: rollouts are not recorded") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": None},
        {"tokens": ["1"]},
        {"tokens": [True]},
        {"spans": [[1, 1, 2]]},
        {"spans": [[1, 0, 2, 3]]},
        {"key": [1]},
        {"key": [1, 2**63]},
        {"public_key": "xy"},
        {"sampling": "{}"},
        {"sampling": "["},
        {"logprobs": ["a"]},
        {"start": 0.5},
    ],
    ids=str,
)
def test_damaged_lines_are_named(tmp_path, change):
    lines = [to_line(held(each)) for each in honest(2)]
    path = tmp_path / "rollouts.jsonl"
    path.write_text(lines[0] + json.dumps(json.loads(lines[1]) | change) + "\n")
    with pytest.raises(ValueError, match=r"rollouts\.jsonl, line 2: "):
        list(read_recording(path))


@pytest.mark.parametrize("protocol", [1, ROLLOUT_PROTOCOL + 1])
def test_a_recording_of_another_protocol_is_refused_in_one_line(tmp_path, protocol):
    fields = json.loads(to_line(held(honest(1)[0]))) | {"protocol": protocol}
    if protocol == 1:
        del fields["protocol"]  # older builds did not write it
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(fields) + "\n")
    with pytest.raises(
        ValueError, match=f"line 1: a rollout of protocol {protocol}, expected {ROLLOUT_PROTOCOL}: audit"
    ):
        list(read_recording(path))


def test_a_recorded_signature_fits_its_rollout_only():
    key, rollout = SigningKey(), honest(1)[0]
    statement = statement_of(Origin("run", "line", "a"), rollout, held(rollout).sampling)
    signed = held(
        rollout,
        public_key=key.public,
        statement=statement.SerializeToString(deterministic=True),
        signature=signature_of(statement, key),
    )
    assert signature_error(signed) == ""
    assert signature_error(held(rollout)) == ""
    assert "not fit" in signature_error(replace(signed, signature=b"x" * 64))
    assert "not fit" in signature_error(replace(signed, public_key=SigningKey().public))
    assert "damaged" in signature_error(replace(signed, statement=b"\xff\xff"))
    for change in ({"tokens": (1, 2)}, {"server": "b"}, {"start": 1}, {"key": (1, 1)}, {"prompt": (1,)}):
        assert "not the rollout that was signed" in signature_error(replace(signed, **change)), change


def test_weights_of_bfloat16_arrive_as_their_bits():
    model = policy().to(torch.bfloat16)
    checker = SpotAuditor(lambda: policy().to(torch.bfloat16), AuditSettings())
    checker.publish(
        1, lambda: {n: v.detach().view(torch.uint16).numpy() for n, v in model.state_dict().items()}
    )
    checker.publish(2, lambda: None)
    rollout = generate(model, 1, version=1, sampling=SAMPLING)[0]
    assert checker.check(held(rollout)).passed
    with pytest.raises(ValueError, match="must be above 1"):
        checker.publish(1, lambda: arrays(policy()))
    with pytest.raises(ValueError, match=r"version 3: .*\.weight is missing"):
        checker.publish(3, dict)


def test_in_bf16_the_limits_of_a_server_follow_the_noise_that_the_audit_measures_itself(monkeypatch):
    """Log-probabilities that are 0.03 too high are near the default limits, and outside those measured."""
    monkeypatch.setattr(calibration, "MEASURED_TOKENS", 1000)
    model = tiny_policies.policy(dtype=torch.bfloat16, loudness=1.0)
    weights = {name: value.detach().float().numpy() for name, value in model.state_dict().items()}
    samples = generate(model, 120, version=VERSION, sampling=SAMPLING)
    raised = [replace(each, logprobs=[min(0.0, x + 0.03) for x in each.logprobs]) for each in samples[60:]]
    needed = {}
    for is_measured in (False, True):
        checker = SpotAuditor(
            lambda: tiny_policies.policy(dtype=torch.bfloat16, loudness=1.0), AuditSettings()
        )
        checker.publish(VERSION, lambda: weights)
        for rollout in samples[:60] if is_measured else ():
            assert checker.check(held(rollout, server="true")).passed
        verdict, needed[is_measured] = first_failure((held(x, server="false") for x in raised), checker)
        assert "log-probabilities" in verdict.reason
        assert checker.check(held(samples[0], server="true")).passed
    assert needed[True] < needed[False] / 2
