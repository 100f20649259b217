"""Kubernetes manifests of a server: Deployment, Service, PodMonitor and HorizontalPodAutoscaler."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mega_cli.launch.kubernetes import dump_kubernetes_yaml
from mega_cli.launch.value_grammars import escape_kubernetes_references
from mega_common.errors import ConfigError

CONTAINER = "server"
PORT = 8000
KEY = "api-key"  # in the Secret
LOAD_SECONDS = 3600  # for a pod to load its model
STOP_SECONDS = 5  # until no Service sends requests to a pod that ends
WAITING, RUNNING = "mega_engine_waiting", "mega_engine_running"  # gauges of /metrics
FULL = 0.8  # share of a batch that the autoscaler aims at
OWNED = ("host", "port", "replicas", "tp", "api_key", "api_key_file")  # options that the manifest sets


@dataclass(frozen=True)
class KubernetesServerPlan:
    """Settings of a model server on Kubernetes: name, image, volume, numbers of pods and GPUs, and serve options.

    Attributes:
        name: name of all objects.
        model: path of the model on the volume, which is mounted at /workspace.
        least, most: numbers of pods between which the autoscaler chooses.
        gpus: GPUs per pod, which share the model by tensor parallelism; 0: a CPU.
        image: container image with mega and its server.
        volume: PersistentVolumeClaim with the model, which is only read.
        shared_memory: size of /dev/shm.
        options: further options of `mega serve`.
        batch_size: sequences per batch of the server.
        drain: seconds in which a pod finishes its requests.
    """

    name: str
    model: str
    least: int
    most: int
    gpus: int
    image: str
    volume: str
    shared_memory: str
    options: Sequence[str]
    batch_size: int
    drain: float


def parse_serve_options(model: str, text: str) -> tuple[list[str], int, float]:
    """Return the words of `mega serve` options in a text, and the batch size and drain time in seconds they set.

    Raises:
        ConfigError: when the manifest sets such an option itself.
        UsageError: of the command line, when `mega serve` does not have such an option.
    """
    import typer

    from mega_cli.serve import serve_command

    app = typer.Typer()
    app.command()(serve_command)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--serve-options: {error}", hint="quote values as in a shell") from None
    context = typer.main.get_command(app).make_context("mega serve", [model, *words])
    for name in OWNED:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"--serve-options must not have --{name.replace('_', '-')}, which the manifest sets")
    return words, int(context.params["batch_size"]), float(context.params["drain"])


def serving_manifests(plan: KubernetesServerPlan) -> str:
    """Return the manifests of a server as YAML: Deployment, Service, PodMonitor and HorizontalPodAutoscaler.
    The PodMonitor requires the Prometheus operator, and the autoscaler an adapter that offers Prometheus's metrics of
    pods as custom metrics (prometheus-adapter). All read the API key from the Secret of the same name.
    """
    metadata = {"name": plan.name, "labels": {"app": plan.name}}
    selector = {"matchLabels": {"app": plan.name}}
    deployment = {
        "selector": selector,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "progressDeadlineSeconds": LOAD_SECONDS + 600,
        "template": {"metadata": {"labels": {"app": plan.name}}, "spec": _pod_spec(plan)},
    }
    service = {"selector": {"app": plan.name}, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]}
    secret = {"type": "Bearer", "credentials": {"name": plan.name, "key": KEY}}
    monitor = {
        "selector": selector,
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "15s", "authorization": secret}],
    }
    return dump_kubernetes_yaml([
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": deployment},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": metadata, "spec": monitor},
        {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": metadata, "spec": _autoscaler_spec(plan)},
    ])  # fmt: skip


def _autoscaler_spec(plan: KubernetesServerPlan) -> dict[str, Any]:
    """Return the autoscaler: more pods when requests wait or batches are nearly full, fewer after ten quiet minutes."""
    targets = {WAITING: "1", RUNNING: str(max(1, int(FULL * plan.batch_size)))}
    return {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": plan.name},
        "minReplicas": plan.least,
        "maxReplicas": plan.most,
        "metrics": [
            {"type": "Pods", "pods": {"metric": {"name": name}, "target": {"type": "AverageValue", "averageValue": value}}}
            for name, value in targets.items()
        ],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}]}},
    }  # fmt: skip


def _pod_spec(plan: KubernetesServerPlan) -> dict[str, Any]:
    """Return the pod of one server."""
    command = ["mega", "serve", plan.model, "--name", plan.name, "--host", "0.0.0.0", "--port", str(PORT)]
    command += ["--tp", str(plan.gpus)] if plan.gpus > 1 else []
    health: dict[str, Any] = {"httpGet": {"path": "/health", "port": "http"}}
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": plan.image,
        "workingDir": "/workspace",
        "command": [escape_kubernetes_references(word) for word in [*command, *plan.options]],
        "env": [{"name": "MEGA_API_KEY", "valueFrom": {"secretKeyRef": {"name": plan.name, "key": KEY}}}],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": {**health, "periodSeconds": 10, "failureThreshold": LOAD_SECONDS // 10},
        "readinessProbe": {**health, "periodSeconds": 5, "timeoutSeconds": 3, "failureThreshold": 2},
        # a step that hangs longer than --timeout, or an engine that has failed for good
        "livenessProbe": {**health, "periodSeconds": 20, "timeoutSeconds": 5, "failureThreshold": 3},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(STOP_SECONDS)]}}},
        **({"resources": {"limits": {"nvidia.com/gpu": plan.gpus}}} if plan.gpus else {}),
        "volumeMounts": [
            {"name": "workspace", "mountPath": "/workspace", "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "terminationGracePeriodSeconds": int(plan.drain) + STOP_SECONDS + 30,
        "containers": [container],
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": {"claimName": plan.volume, "readOnly": True}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": plan.shared_memory}},
        ],
    }
