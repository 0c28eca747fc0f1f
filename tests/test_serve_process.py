"""Tests `aedit serve HOST:PORT` as a process beside a real hub, against plain decoding."""

import json
import urllib.request
from dataclasses import replace

import pytest
from kit.hub_processes import HubProcess, status
from kit.rollout_servers import TrainerEnd
from kit.rollouts import decode_plainly, prompts_of
from kit.served_runs import LIMIT_S, served_run


def asked(address, prompt):
    """Return the answer of the HTTP server to a greedy request."""
    body = {"prompt": prompt.tokens, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def greedy(model, prompt):
    sampling = replace(prompt.sampling, temperature=0.0, stop_tokens=(256,))
    return decode_plainly(model, [replace(prompt, sampling=sampling)])[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_served_run_generates_the_policy_of_hub_and_trainer_survives_the_hub_and_ends_with_the_run(
    tmp_path,
):
    prompts = prompts_of(6, max_new_tokens=24)
    with served_run(tmp_path, words=["--http=127.0.0.1:0"], drafter="auto") as (founder, (server,)):
        model = founder.model()
        wanted = decode_plainly(model, prompts)
        with TrainerEnd(server.address, "run", beats=True) as public:
            public.wait(lambda: public.opened, "Opened", LIMIT_S)
            for prompt in prompts:
                public.add(prompt)
            public.ends(6)
            assert [public.samples[prompt.key].tokens for prompt in prompts] == wanted
            for unit in range(len(founder.numels)):  # the next version
                assert founder.push(unit).accepted
            server.wait(lambda: server.events("version")[-1]["version"] == 2, "the second version")
            later = prompts_of(6, seed=1, max_new_tokens=24)
            for prompt in later:
                public.add(prompt, min_version=2)
            public.ends(12)
            wanted = decode_plainly(founder.model(), later)
            assert [public.samples[prompt.key].tokens for prompt in later] == wanted
            assert {v for p in later for v in public.samples[p.key].versions} == {2}
            assert public.rejected == []
            public.end_quietly()
        server.wait(lambda: server.events("http"), "HTTP")
        answer = asked(server.events("http")[0]["address"], prompts[0])
        assert answer["choices"][0]["token_ids"] == greedy(founder.model(), prompts[0])
        listed = status(founder.address)["servers"]
        assert [(each["name"], each["role"], each["live"]) for each in listed] == [("s1", "rollout", True)]
        founder.process.kill()
        server.wait(lambda: server.events("hub_lost"), "the loss of the hub")
        again = HubProcess(founder.toml, founder.process.directory)
        assert again.address == founder.address
        server.wait(lambda: len(server.events("announced")) == 2, "the second announcement")
        assert server.stop() == 0
        assert "rollout server s1: ended" in server.log.read_text()
        (listed,) = status(again.address)["servers"]
        assert (listed["state"], listed["live"]) == ("gone: left", False)
        assert server.events("end")[-1]["reason"] == "ended"
