"""Tests the recipes in deploy/: schemas, command lines and configurations; the compose file is run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
import yaml
from kit.compose import Compose, services_of

from aedit.launch.cli.main import parser
from aedit.launch.config import load, split_flags
from aedit.launch.records import read_run
from aedit.launch.views import report

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.32"


def run(*words, **env):
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=os.environ | env)


# -- what each recipe starts


def documents(text):
    return [document for document in yaml.safe_load_all(text) if document]


def compose_commands():
    return [
        ["aedit", *map(str, service["command"])] for service in services_of(DEPLOY / "compose.yaml").values()
    ]


def containers(node):
    """Yield the containers in a manifest."""
    if isinstance(node, dict):
        yield from node.get("containers", ())
        for value in node.values():
            yield from containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from containers(value)


def rendered(values=None):
    """Return the chart's manifests, with the values of values.yaml and these."""
    found = {
        "Values": yaml.safe_load((DEPLOY / "helm" / "values.yaml").read_text()),
        "Release": {"Name": "demo"},
    }
    found["Values"] |= values or {}

    def value(match):
        node = found
        for name in match[1].split("."):
            node = node[name]
        return str(node)

    texts = []
    for path in sorted((DEPLOY / "helm" / "templates").glob("*.yaml")):
        text = re.sub(r"\{\{ \.([\w.]+) \}\}", value, path.read_text())
        assert "{{" not in text, f"{path.name}: more than plain values"
        texts += documents(text)
    return texts


def manifests():
    return [
        d
        for name in ("hub", "jobset")
        for d in documents((DEPLOY / "kubernetes" / f"{name}.yaml").read_text())
    ]


def manifest_commands(manifests):
    return [["aedit", *map(str, each["args"])] for each in containers(manifests)]


def sky_jobs():
    return documents((DEPLOY / "skypilot.yaml").read_text())


def sky_commands():
    return [shlex.split(line) for job in sky_jobs()[1:] for line in job["run"].splitlines() if line]


def slurm(*words, **env):
    return run("bash", str(DEPLOY / "slurm-hub.sbatch"), *words, **env)


def slurm_commands():
    done = slurm("--dry-run", "deploy/run.toml", "keys")
    assert done.returncode == 0, done.stderr
    keys, hub, nodes = map(shlex.split, done.stdout.splitlines())
    start = nodes.index("-c")
    shell = nodes[start + 1].removeprefix("exec ")
    for name, word in zip(("$0", "$1"), nodes[start + 2 :], strict=True):
        shell = shell.replace(name, word)
    return [keys, hub, shlex.split(shell)]


def units():
    return sorted((DEPLOY / "systemd").glob("*.service"))


def unit_commands():
    found = []
    for path in units():
        text = path.read_text()
        env = dict(re.findall(r"^Environment=(\w+)=(.*)$", text, re.MULTILINE))
        (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
        for name, value in env.items():
            line = line.replace(f"${{{name}}}", value)
        words = shlex.split(line)
        assert words[0].endswith("/.venv/bin/aedit")
        found.append(["aedit", *words[1:]])
    return found


COMMANDS = {
    "compose": compose_commands,
    "kubernetes": lambda: manifest_commands(manifests()),
    "helm": lambda: manifest_commands(rendered()),
    "skypilot": sky_commands,
    "slurm": slurm_commands,
    "systemd": unit_commands,
}
ROLES = {
    "compose": ["hub", "hub", "join", "join", "keys", "serve"],
    "kubernetes": ["hub", "join", "join", "serve"],
    "helm": ["hub", "join", "join", "serve"],
    "skypilot": ["hub", "join", "join", "serve"],
    "slurm": ["hub", "join", "keys"],
    "systemd": ["join", "serve"],
}


@pytest.mark.parametrize("recipe", COMMANDS)
def test_every_command_line_and_configuration_is_one_that_aedit_takes(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = COMMANDS[recipe]()
    assert sorted(words[1] for words in commands) == ROLES[recipe]
    for words in commands:
        assert words[0] == "aedit"
        rest, flags = (words[1:], []) if words[1] == "keys" else split_flags(words[1:])
        options = parser().parse_args(rest)
        configs = getattr(options, "config", None) or [Path("deploy/run.toml")]
        config = load(configs, flags, strict=True).config
        if words[1] == "hub":
            assert config.hub.address.rpartition(":")[0] not in ("", "127.0.0.1", "0.0.0.0")
        if words[1] != "keys":
            assert options.keys is not None, f"{words}: without keys nothing starts on a network"


def test_members_connect_to_the_hub_of_their_recipe_with_keys_for_its_host(monkeypatch):
    monkeypatch.chdir(ROOT)
    for recipe in ("compose", "kubernetes", "helm", "skypilot", "slurm"):
        commands = COMMANDS[recipe]()
        hubs = []
        for words in (words for words in commands if words[1] == "hub" and "--standby" not in words):
            rest, flags = split_flags(words[1:])
            hubs.append(load(parser().parse_args(rest).config, flags, strict=True).config.hub.address)
        called = {words[2] for words in commands if words[1] in ("join", "serve")}
        assert called == set(hubs), recipe
        keys = next((words for words in commands if words[1] == "keys"), None)
        if keys is not None:
            made = [keys[i + 1] for i, word in enumerate(keys) if word == "--host"]
            assert [hub.rpartition(":")[0] for hub in hubs] == made
    hosts = {
        "kubernetes": "kubernetes/kustomization.yaml",
        "helm": "helm/values.yaml",
        "skypilot": "skypilot.yaml",
    }
    for recipe, name in hosts.items():  # the keys that a person makes first
        serve = next(words for words in COMMANDS[recipe]() if words[1] == "serve")
        host = serve[serve.index("--address") + 1].rpartition(":")[0]
        (line,) = re.findall(r"aedit keys.*", (DEPLOY / name).read_text())
        assert shlex.split(line)[-1] == f"{serve[serve.index('--as') + 1]}={host}"
        assert shlex.split(line)[3:5] == ["--host", serve[2].rpartition(":")[0]]


# -- schemas


def test_the_compose_file_fits_the_specification(tmp_path):
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = run(*check, str(DEPLOY / "compose.yaml"))
    assert done.returncode == 0, done.stdout
    broken = tmp_path / "compose.yaml"
    broken.write_text((DEPLOY / "compose.yaml").read_text().replace("command:", "comand:"))
    assert run(*check, str(broken)).returncode == 1


def validate(manifest):
    import kubernetes_validate

    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.parametrize("source", [manifests, rendered])
def test_the_manifests_fit_the_schemas_of_kubernetes(source):
    import kubernetes_validate

    kinds = []
    for manifest in source():
        kinds.append(manifest["kind"])
        if manifest["kind"] == "JobSet":  # of an extension: its jobs are the cluster's own
            assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
            names = [job["name"] for job in manifest["spec"]["replicatedJobs"]]
            assert set(manifest["spec"]["successPolicy"]["targetReplicatedJobs"]) < set(names)
            for job in manifest["spec"]["replicatedJobs"]:
                assert set(job) == {"name", "replicas", "template"}
                head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
                validate(head | job["template"])
                with pytest.raises(kubernetes_validate.ValidationError):
                    validate(head | job["template"] | {"spec": {"templates": {}}})
        else:
            validate(manifest)
    assert "StatefulSet" in kinds


def test_the_hub_of_each_cluster_has_its_journal_on_a_volume():
    for source in (manifests, rendered):
        (hub,) = (m for m in source() if m["kind"] == "StatefulSet" and m["metadata"]["name"].endswith("hub"))
        (claim,) = hub["spec"]["volumeClaimTemplates"]
        (container,) = containers(hub)
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts[claim["metadata"]["name"]] == "/aedit/runs"  # the image's working directory is /aedit
        assert hub["spec"]["replicas"] == 1


def test_values_of_the_chart_reach_what_they_name():
    text = yaml.safe_dump_all(
        rendered({"image": "registry/aedit:9", "port": 7777, "large": {"replicas": 5, "gpus": 3}})
    )
    assert text.count("registry/aedit:9") == 4
    assert "hub:7777" in text
    assert "replicas: 5" in text
    assert "nvidia.com/gpu: '3'" in text


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl")
def test_kustomize_builds_what_the_folder_has():
    done = run("kubectl", "kustomize", str(DEPLOY / "kubernetes"))
    assert done.returncode == 0, done.stderr
    built = documents(done.stdout)
    assert sorted(m["kind"] for m in built) == sorted(m["kind"] for m in manifests())
    assert {each["image"] for each in containers(built)} == {"aedit:latest"}


def test_the_job_group_has_a_header_and_unequal_jobs():
    """The fields are those of SkyPilot 0.14, whose own schema is not a dependency."""
    header, *jobs = sky_jobs()
    assert set(header) == {"name", "execution", "primary_tasks", "termination_delay"}
    assert header["execution"] == "parallel"
    assert set(header["primary_tasks"]) < {job["name"] for job in jobs}
    allowed = {"name", "resources", "file_mounts", "workdir", "setup", "run", "num_nodes"}
    assert all(set(job) <= allowed for job in jobs)
    assert len({str(job["resources"]) for job in jobs}) == len(jobs)
    for job in jobs:  # hosts are JOB-RANK.GROUP
        for host in re.findall(r"[\w-]+\.aedit\b", job["run"]):
            name, _, rank = host.removesuffix(".aedit").rpartition("-")
            assert name in {each["name"] for each in jobs}
            assert rank == "0"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path):
    def verified(path, text):
        unit = tmp_path / path.name
        unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
        tmp_path.chmod(0o700)
        return run("systemd-analyze", "--user", "verify", str(unit), XDG_RUNTIME_DIR=str(tmp_path))

    assert len(units()) == 2
    for path in units():
        done = verified(path, path.read_text())
        assert (done.returncode, done.stderr) == (0, "")
        assert "KillMod'" in verified(path, path.read_text().replace("KillMode=", "KillMod=")).stderr


def test_the_slurm_script_is_clean_and_refuses_bad_arguments_in_one_line():
    shellcheck = shutil.which("shellcheck") or str(Path(sys.executable).parent / "shellcheck")
    done = run(shellcheck, str(DEPLOY / "slurm-hub.sbatch"))
    assert done.returncode == 0, done.stdout
    for words in ([], ["run.toml"], ["run.yaml", "keys"], ["a", "b", "c"], ["run.toml", "keys"]):
        clean = {"SLURM_JOB_NODELIST": ""}
        done = slurm(*words, **clean)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1


def test_the_image_runs_the_commands_of_the_recipes():
    text = (ROOT / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["aedit"]' in text
    assert "WORKDIR /aedit" in text
    assert "COPY . ." in text
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert not {"deploy", "configs"} & set(ignored)
    services = services_of(DEPLOY / "compose.yaml")
    assert (DEPLOY / services["keys"]["build"] / "Dockerfile").resolve() == ROOT / "Dockerfile"
    volumes = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["volumes"]
    for name, service in services.items():
        mounts = dict(volume.split(":")[:2] for volume in service["volumes"])
        assert set(mounts) <= set(volumes)
        assert name == "keys" or mounts[name] == "/aedit/runs"
        assert "ports" not in service, "nothing listens outside the network"


# -- the compose file, run


def small(text):
    """Return the run with fewer steps."""
    found = tomllib.loads(text)
    found["train"] |= {"steps": 10, "batch_size": 16}
    found["rl"] |= {"supervised_steps": 2, "groups": 2, "group_size": 4, "eval_every": 0, "eval_problems": 4}
    found["model"]["sizes"] |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    found["edit"]["every"] = 2
    return tomli_w.dumps(found)


@pytest.mark.slow  # six processes that import torch, or wait for others that do
@pytest.mark.timeout(500)
def test_the_services_of_the_compose_file_make_a_run_that_ends_with_a_report(tmp_path):
    services = Compose(DEPLOY / "compose.yaml", tmp_path, small((DEPLOY / "run.toml").read_text()))
    try:
        services.up(400.0, stays=["standby"])
    finally:
        services.down()
    run_dir = tmp_path / "hub" / "runs" / "demo"
    shown = report(run_dir)
    assert re.search(r"pushes +[1-9]\d* accepted", shown), shown
    assert "rollout servers" in shown
    assert list((tmp_path / "standby" / "runs" / "demo" / "hub").glob("journal-*"))
    trained = [read_run(tmp_path / name / "runs" / "demo") for name in ("trainer-1", "trainer-2")]
    steps = [node.metrics[-1].step for run in trained for node in run.nodes if node.metrics]
    assert sum(steps) >= 10, services.logs()
