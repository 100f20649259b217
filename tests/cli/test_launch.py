"""Batch scripts and manifests: checked, and run with stand-ins for what a cluster offers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mega_cli.launch.command import app, to_dns_label
from mega_cli.launch.value_grammars import escape_kubernetes_references
from mega_common.errors import ConfigError

CONFIG = {
    "model": {"preset": "tiny"},
    "data": {"train": "tokens"},
    "parallel": {"tp": 2, "pp": 2, "cp": 1},
    "batch": {"micro": 2, "global": 64},
}


def launch(tmp_path: Path, *args: str, config: dict[str, Any] = CONFIG) -> str:
    run = tmp_path / "big_run.yaml"
    run.write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(app, [args[0], str(run), *args[1:]], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def directives(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    return dict(found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ("--partition", "gpu", "--time", "1:00:00"),
            {"nodes": "4", "gpus-per-node": "8", "ntasks-per-node": "1", "partition": "gpu", "time": "1:00:00"},
        ),
        ((), {"job-name": "big-run", "cpus-per-task": "32", "requeue": "", "mem": None, "exclusive": None}),
        (("--exclusive",), {"exclusive": "", "mem": "0"}),
        (("--exclusive", "--mem", "500G", "--cpus-per-task", "96"), {"mem": "500G", "cpus-per-task": "96"}),
        (("--name", "my job", "--account", "a"), {"job-name": "'my job'", "account": "a"}),
    ],
)
def test_a_slurm_job_asks_for_what_it_was_told(
    tmp_path: Path, options: tuple[str, ...], expected: dict[str, str | None]
) -> None:
    script = launch(tmp_path, "slurm", "--nodes", "4", *options)
    assert script.startswith("#!/bin/bash\n#SBATCH")
    asked = directives(script)
    assert {key: asked.get(key) for key in expected} == expected


def fake(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def start_job(tmp_path: Path, trainer: str, *options: str, node: int = 0, job: int = 40_042) -> subprocess.Popen[str]:
    """The generated script as a process, with Slurm's commands and the interpreter replaced by small stand-ins."""
    script = launch(tmp_path, "slurm", "--nodes", "2", "--python", str(tmp_path / "python"), *options)
    (tmp_path / "job.sh").write_text(script)
    fake(tmp_path, "scontrol", 'echo "scontrol $*" >> log; [[ $1 == show ]] && printf "node7\\nnode8\\n"; true')
    only_the_command = 'echo "$0 $*" >> steps; while [[ $1 == -* ]]; do shift; done'
    fake(tmp_path, "srun", f'{only_the_command}; exec "$@"')
    fake(tmp_path, "apptainer", 'echo "$0 $*" >> steps; while [[ $1 != bash ]]; do shift; done; exec "$@"')
    fake(tmp_path, "python", trainer)
    env = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "n",
        "SLURM_PROCID": str(node), "SLURM_CPUS_PER_TASK": "32",
    }  # fmt: skip
    return subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE)


@pytest.mark.parametrize(("status", "again"), [(1, True), (75, True), (0, False)])
def test_a_slurm_job_saves_and_queues_itself_again_before_its_limit(tmp_path: Path, status: int, again: bool) -> None:
    job = start_job(
        tmp_path, f"trap 'echo saved >> log; exit {status}' TERM; echo up >> log; while true; do sleep 0.05; done"
    )
    log = tmp_path / "log"
    while not log.exists() or "up" not in log.read_text():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(20) == 0
    assert log.read_text().splitlines()[2:] == ["saved", *(["scontrol requeue 40042"] if again else [])]


@pytest.mark.parametrize(("status", "ends", "again"), [(0, 0, False), (3, 3, False), (143, 143, False), (75, 0, True)])
def test_a_slurm_job_ends_as_its_training_does_and_goes_on_when_that_was_interrupted(
    tmp_path: Path, status: int, ends: int, again: bool
) -> None:
    job = start_job(tmp_path, f"exit {status}")
    assert job.wait(20) == ends
    assert ("requeue" in (tmp_path / "log").read_text()) == again


@pytest.mark.parametrize("node", [0, 1])
def test_machines_of_a_slurm_job_meet_at_the_first_and_on_a_port_of_the_job(tmp_path: Path, node: int) -> None:
    trainer = 'echo "$@" > args; env > environment'
    prologue = ("--prologue", "export LOADED='a b'", "--set", "train.steps=7", "--set", "optimizer.name=adamw")
    assert start_job(tmp_path, trainer, *prologue, node=node).wait(20) == 0
    args = (tmp_path / "args").read_text().split()
    wanted = [
        "--nnodes=2", "--nproc-per-node=8", "--max-restarts=10", "--rdzv-endpoint=node7:10042", "--rdzv-id=40042",
        "--set=train.steps=7", str(tmp_path / "big_run.yaml"),
    ]  # fmt: skip
    assert set(wanted) <= set(args)
    assert f"is_host={int(node == 0)}," in next(arg for arg in args if arg.startswith("--rdzv-conf="))
    environment = (tmp_path / "environment").read_text()
    assert "LOADED=a b" in environment
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in environment
    assert start_job(tmp_path, trainer, node=node, job=40_043).wait(20) == 0
    assert "--rdzv-endpoint=node7:10043" in (tmp_path / "args").read_text()


@pytest.mark.parametrize(
    ("image", "step"),
    [
        ("reg#team/mega:1", r"srun .*--container-image=reg#team/mega:1 --container-mounts=(.*):\1,/data:/d "),
        ("/images/mega.sif", r"apptainer exec --nv --bind=(.*) --pwd=\1 --bind=/data:/d /images/mega.sif bash"),
    ],
)
def test_a_slurm_job_trains_in_a_container(tmp_path: Path, image: str, step: str) -> None:
    assert start_job(tmp_path, "exit 0", "--container", image, "--mount", "/data:/d").wait(20) == 0
    steps = (tmp_path / "steps").read_text()
    assert re.search(step, steps), steps
    assert re.search("--cpus-per-task=32 --kill-on-bad-exit=0 --wait=120", steps)


@pytest.mark.parametrize(
    ("options", "interpreter"),
    [
        ((), sys.executable),
        (("--prologue", "true"), "python3"),
        (("--container", "x.sif"), "python3"),
        (("--container", "x.sif", "--python", "/opt/py"), "/opt/py"),
    ],
)
def test_the_interpreter_is_the_one_that_has_mega(tmp_path: Path, options: tuple[str, ...], interpreter: str) -> None:
    assert f"exec {interpreter} -m mega_trainer.launch.elastic" in launch(tmp_path, "slurm", "--nodes", "2", *options)


def objects(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(launch(tmp_path, "kubernetes", "--nodes", "2", *options)))


def test_a_kubernetes_manifest_is_consistent(tmp_path: Path) -> None:
    config, service, job = objects(tmp_path, "--image", "trainer:7", "--volume", "disk")
    assert [part["kind"] for part in (config, service, job)] == ["ConfigMap", "Service", "Job"]
    assert {part["metadata"]["name"] for part in (config, service, job)} == {"big-run"}
    assert yaml.safe_load(config["data"]["run.yaml"]) == CONFIG
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["image"] == "trainer:7"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["subdomain"] == service["metadata"]["name"]


def test_a_jobset_begins_anew_but_after_a_mistake(tmp_path: Path) -> None:
    """Pods of one are called <name>-<job>-<which of these>-<index> (jobset.sigs.k8s.io)."""
    config, jobset = objects(tmp_path, "--jobset")
    spec, (nodes,) = jobset["spec"], jobset["spec"]["replicatedJobs"]
    assert (config["kind"], jobset["kind"]) == ("ConfigMap", "JobSet")
    assert spec["failurePolicy"]["maxRestarts"] == 10
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    pod = nodes["template"]["spec"]["template"]["spec"]
    assert "subdomain" not in pod  # which is the network's
    first = f"{jobset['metadata']['name']}-{nodes['name']}-0-0.{spec['network']['subdomain']}"
    assert f'--rdzv-endpoint="{first}:29500"' in pod["containers"][0]["command"][2]


def test_a_pod_of_a_user_can_write_to_its_volume(tmp_path: Path) -> None:
    pod = objects(tmp_path)[2]["spec"]["template"]["spec"]
    assert pod["securityContext"]["fsGroup"] == 10001
    dockerfile = (Path(__file__).parents[2] / "docker/trainer.Dockerfile").read_text()
    assert "--uid 10001" in dockerfile


def test_an_interrupted_pod_is_no_failure_and_a_mistake_is_final(tmp_path: Path) -> None:
    spec = objects(tmp_path)[2]["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # which a pod failure policy asks for
    by_code = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }
    assert by_code == {75: "Ignore", 143: "Ignore", 2: "FailJob"}
    names = {
        rule["onExitCodes"]["containerName"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    }
    assert names == {container["name"] for container in spec["template"]["spec"]["containers"]}


@pytest.mark.parametrize("index", [0, 1])
def test_the_first_pod_hosts_the_meeting_whatever_its_name_resolves_to(tmp_path: Path, index: int) -> None:
    container = objects(tmp_path, "--set", "train.steps=7")[2]["spec"]["template"]["spec"]["containers"][0]
    fake(tmp_path, "python3", 'printf "%s\\n" "$@" > args')
    env = {item["name"]: item["value"] for item in container["env"]}
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index)}
    subprocess.run(container["command"], cwd=tmp_path, env=env, check=True)
    args = (tmp_path / "args").read_text().splitlines()
    assert args[:2] == ["-m", "mega_trainer.launch.elastic"]
    assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=big-run-0.big-run:29500"} <= set(args)
    assert f"--rdzv-conf=is_host={int(index == 0)},read_timeout=600,join_timeout=600" in args
    assert args[-3:] == ["train", "/config/run.yaml", "--set=train.steps=7"]


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("big_run", "big-run"), ("7b.v2", "run-7b-v2"), ("Größe", "gr-e"), ("__", "run"),
        ("a" * 39 + "-" + "b" * 9, "a" * 39), ("0" * 80, "run-" + "0" * 36),
    ],
)  # fmt: skip
def test_names_are_dns_labels(text: str, label: str) -> None:
    assert to_dns_label(text) == label
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,52}[a-z0-9])?", label)


def test_a_name_that_is_none_is_refused_with_one_that_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)must be a DNS label, found 'My_Job'.*--name my-job"):
        launch(tmp_path, "kubernetes", "--nodes", "2", "--name", "My_Job")


def test_output_goes_to_a_file(tmp_path: Path) -> None:
    assert launch(tmp_path, "slurm", "--nodes", "1", "--output", str(tmp_path / "job.sh")) == ""
    assert (tmp_path / "job.sh").read_text().startswith("#!/bin/bash")


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (
            {"parallel": {"tp": 1, "pp": 1, "cp": 3}},
            (),
            "does not divide|do not divide|must be a multiple|to be a multiple",
        ),
        ({"parallel": {"tp": 0}}, (), r"parallel\.tp = 0"),
        ({"batch": {"micro": 3, "global": 64}}, (), r"batch\.global = 64"),
        ({"batch": {"micro": 2, "global": 68}}, (), "16 rank"),
        ({"trian": {"steps": 3}}, (), "trian: unknown key"),
        ({"model": {"preset": "tinny"}}, (), "did you mean 'tiny'"),
        ({}, ("--set", "batch.global=6"), r"batch\.global = 6"),
    ],
)
def test_a_run_that_cannot_be_is_refused(
    tmp_path: Path, kind: str, change: dict[str, Any], options: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        launch(tmp_path, kind, "--nodes", "2", *options, config=CONFIG | change)


def test_a_model_that_is_elsewhere_is_not_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert launch(tmp_path, "slurm", "--nodes", "2", config=CONFIG | {"model": {"from": "/cluster/hf"}})
    assert "/cluster/hf does not exist on this machine" in caplog.text


LINE_ENDS = ("\n", "\r", "\x0b", "\x0c", "\x00", "\x1b", "\x7f", "\x85", "\u2028", "\u2029")


@pytest.mark.parametrize("end", LINE_ENDS)
@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("slurm", "name", "job"), ("slurm", "time", "1:00:00"), ("slurm", "partition", "gpu"),
        ("slurm", "account", "team"), ("slurm", "mem", "500G"), ("slurm", "prologue", "true"),
        ("slurm", "container", "a/b:1"), ("slurm", "mount", "/a:/b"), ("slurm", "python", "/bin/python"),
        ("slurm", "set", "train.steps=7"), ("kubernetes", "name", "job"), ("kubernetes", "image", "a/b:1"),
        ("kubernetes", "volume", "mega"), ("kubernetes", "shared-memory", "16Gi"), ("kubernetes", "set", "train.steps=7"),
    ],
)  # fmt: skip
def test_a_control_character_is_refused_in_every_value(
    tmp_path: Path, kind: str, option: str, value: str, end: str
) -> None:
    options = ("--nodes", "1", *(("--container", "a") if option == "mount" else ()))
    launch(tmp_path, kind, *options, f"--{option}", value)
    for bad in (f"{value}{end}", f"{value}{end}touch /tmp/x", f"{end}{value}"):
        with pytest.raises(ConfigError, match=f"^--{option} must be ") as error:
            launch(tmp_path, kind, *options, f"--{option}", bad)
        assert end not in error.value.message


@pytest.mark.parametrize(
    ("kind", "option", "bad", "good"),
    [
        ("slurm", "name", ("../job", "a/b", "-job", "a%j", "a#b", "a\'b", "a$(b)", "", "n" * 201), ("my job", "größe")),
        ("slurm", "time", ("1h", "1:2:3:4", "-1", "", "1-", "24:00:00 --x"), ("60", "1:30", "2-0", "2-12:30:00", "UNLIMITED")),
        ("slurm", "partition", ("a b", "a,", "--x", "a;b"), ("gpu", "gpu,long", "h100.x")),
        ("slurm", "account", ("a b", "a,b", "--x", ""), ("team-a",)),
        ("slurm", "mem", ("5 G", "G", "-1", "1.5G", "500GiB"), ("0", "500", "500G", "500GB")),
        ("slurm", "container", ("", "--writable"), ("reg#a/b:1", "/my images/a.sif")),
        ("slurm", "mount", ("/a", "/a:", ":/b", "/a:/b,/etc:/etc", "-a:/b"), ("/a:/b", "/a:/b:ro", "/my data:/d")),
        ("kubernetes", "image", ("a/B", "a b", "a:", "a@sha256:12", "-a", "", "a;b"),
         ("a", "h:5000/a/b:1", "localhost/a", "a@sha256:" + "0" * 64)),
        ("kubernetes", "volume", ("A", "a_b", "-a", "a-", "a..b", "", "a" * 254), ("a", "a.b-c", "0")),
        ("kubernetes", "shared-memory", ("16 Gi", "16GB", "-1", "", "Gi", "16gi"), ("16Gi", "1.5G", "1000", "1e9", "4M")),
    ],
)  # fmt: skip
def test_each_value_has_a_grammar(
    tmp_path: Path, kind: str, option: str, bad: tuple[str, ...], good: tuple[str, ...]
) -> None:
    options = ("--nodes", "1", *(("--container", "a") if option == "mount" else ()))
    for value in good:
        launch(tmp_path, kind, *options, f"--{option}={value}")
    for value in bad:
        with pytest.raises(ConfigError, match=f"^--{option} must be "):
            launch(tmp_path, kind, *options, f"--{option}={value}")


@pytest.mark.parametrize("path", ["a\nb.yaml", "a\x1bb.yaml", "-a.yaml"])
@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_configuration_with_a_strange_name_is_refused(kind: str, path: str) -> None:
    with pytest.raises(ConfigError, match=r"^--run must be a path"):
        CliRunner().invoke(app, [kind, "--nodes", "1", "--", path], catch_exceptions=False)


@pytest.mark.parametrize("word", ["a", "$(HOME)", "$$", "$$(HOME)", "$x", "a$", "$", "$((1))", "$$$", "(HOME)$("])
def test_kubernetes_expands_nothing_in_a_word(word: str) -> None:
    """Kubernetes replaces $$ by $ and $(NAME) by a variable, once, from left to right."""
    expand = re.compile(r"\$\$|\$\(([^)]*)\)")
    assert expand.sub(lambda found: "$" if found[0] == "$$" else "expanded", escape_kubernetes_references(word)) == word
