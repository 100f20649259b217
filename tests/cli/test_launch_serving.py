"""Kubernetes manifests of a server: valid by the published schemas, and consistent with the server."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from commands import typed
from serving import Scripted
from typer.testing import CliRunner

from mega_cli.launch.command import app
from mega_common.errors import ConfigError
from mega_eval.server.request_gate import PUBLIC
from mega_eval.server.server_metrics import ServerMetrics

MODEL = ("kubernetes", "models/Llama_8B", "--serve", "--nodes", 2)


def objects(*options: object) -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(typed(app, *MODEL, *options).stdout)}


@pytest.mark.parametrize("options", [(), ("--gpus-per-node", 0), ("--max-nodes", 9, "--serve-options", "--draft none")])
def test_manifests_follow_the_schemas_of_kubernetes(options: tuple[object, ...]) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    found = objects(*options)
    assert set(found) == {"Deployment", "Service", "PodMonitor", "HorizontalPodAutoscaler"}
    for kind, one in found.items():
        if kind != "PodMonitor":  # of the Prometheus operator
            for version in ("1.27", "1.37"):
                validator.validate(one, version, strict=True)


def test_manifests_are_consistent() -> None:
    found = objects("--max-nodes", 6, "--gpus-per-node", 2, "--image", "eval:7", "--serve-options", "--batch-size 64 --drain 90 --precision bf16")  # fmt: skip
    deployment, scaler = found["Deployment"]["spec"], found["HorizontalPodAutoscaler"]["spec"]
    pod = deployment["template"]["spec"]
    (server,) = pod["containers"]
    name = found["Deployment"]["metadata"]["name"]
    assert {one["metadata"]["name"] for one in found.values()} == {name} == {"llama-8b"}
    labels = deployment["template"]["metadata"]["labels"]
    assert labels == found["Service"]["spec"]["selector"] == deployment["selector"]["matchLabels"]
    assert labels == found["PodMonitor"]["spec"]["selector"]["matchLabels"]
    assert server["image"] == "eval:7"
    assert server["command"][:3] == ["mega", "serve", "models/Llama_8B"]
    assert server["command"][-6:] == ["--batch-size", "64", "--drain", "90", "--precision", "bf16"]
    assert server["command"][server["command"].index("--tp") + 1] == "2"
    assert server["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert {mount["name"] for mount in server["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": server["ports"][0]["name"]}
    assert "/health" in PUBLIC, "probes have no API key"
    key = server["env"][0]["valueFrom"]["secretKeyRef"]
    assert key == found["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"]
    assert pod["terminationGracePeriodSeconds"] > 90
    assert "replicas" not in deployment, "the autoscaler sets them"
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 6)
    assert scaler["scaleTargetRef"]["name"] == name
    exported = ServerMetrics(Scripted()).render_metrics().decode()  # type: ignore[arg-type]
    for metric in scaler["metrics"]:
        assert f"\n{metric['pods']['metric']['name']} " in exported
    assert scaler["metrics"][1]["pods"]["target"]["averageValue"] == str(int(0.8 * 64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--serve-options", "--port 3"), "--serve-options must not have --port, which the manifest sets"),
        (("--serve-options", "--name 'a"), "--serve-options: No closing quotation"),
        (("--max-nodes", 1), "--max-nodes 1 must be at least --nodes 2"),
        (("--jobset",), "--jobset is not supported with --serve"),
        (("--stage", "a"), "--stage is not supported with --serve"),
        (("--set", "a=1"), "--set is not supported with --serve"),
    ],
)
def test_servers_that_cannot_be(options: tuple[object, ...], message: str) -> None:
    assert message in str(typed(app, *MODEL, *options, fails=ConfigError).exception)


def test_options_that_the_server_does_not_have_are_refused() -> None:
    done = CliRunner().invoke(app, [*map(str, MODEL), "--serve-options", "--speed high"])
    assert (done.exit_code, "--speed" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-nodes", 2), "--max-nodes is not supported without --serve"),
        (("--serve-options", "--tp 2"), "--serve-options is not supported without --serve"),
        (("--gpus-per-node", 0), "--gpus-per-node 0 is supported with --serve only"),
    ],
)
def test_options_of_a_server_are_for_servers(options: tuple[object, ...], message: str) -> None:
    mistake = typed(app, "kubernetes", "run.yaml", "--nodes", 2, *options, fails=ConfigError)
    assert message in str(mistake.exception)
