"""Kubernetes manifests of a run: ConfigMap, headless Service and Indexed Job."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from mega_cli.launch.value_grammars import (
    ENVIRONMENT,
    RESTARTS,
    SAVE_SECONDS,
    escape_kubernetes_references,
    torchrun_agent_command,
)

PORT = 29500  # each pod has its own address
GROUP = 10001  # of the user in mega's images
CONTAINER = "trainer"
NODES = "nodes"  # of a JobSet


@dataclass(frozen=True)
class KubernetesTrainingJobPlan:
    """Kubernetes training job of `nodes` pods with `gpus` ranks each.
    `overrides` are the `--set` options of `mega train`.
    """

    job: str
    nodes: int
    gpus: int
    image: str
    volume: str
    shared_memory: str
    overrides: Sequence[str]
    jobset: bool = False

    @property
    def first_pod_address(self) -> str:
        """DNS name of the job's first pod in the cluster, where the ranks rendezvous."""
        return f"{self.job}-{NODES}-0-0.{self.job}" if self.jobset else f"{self.job}-0.{self.job}"


def build_training_job_manifests(plan: KubernetesTrainingJobPlan, config: str) -> str:
    """Return the Kubernetes manifests of a training job as YAML documents.
    They are a ConfigMap, a Service and a Job, or a JobSet. `config` is the text of run.yaml.
    """
    metadata = {"name": plan.job, "labels": {"app": plan.job}}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"run.yaml": config}}
    if plan.jobset:
        return dump_kubernetes_yaml([config_map, _job_set(plan, metadata)])
    # Pods resolve the address of the first pod before any of them is ready.
    service_spec = {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": plan.job},
        "ports": [{"name": "rendezvous", "port": PORT}],
    }  # fmt: skip
    service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service_spec}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _job_spec(plan)}
    return dump_kubernetes_yaml([config_map, service, job])


def dump_kubernetes_yaml(objects: Sequence[dict[str, Any]]) -> str:
    """Return Kubernetes objects as YAML text, one document each."""
    return yaml.dump_all(objects, Dumper=_ManifestDumper, sort_keys=False, width=120, explicit_start=True)


class _ManifestDumper(yaml.SafeDumper):
    """YAML dumper with indented lists, block style for texts of several lines, and no references."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


_ManifestDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _job_spec(plan: KubernetesTrainingJobPlan) -> dict[str, Any]:
    return {
        "completionMode": "Indexed", "completions": plan.nodes, "parallelism": plan.nodes,
        "backoffLimit": 10 * plan.nodes,
        "podFailurePolicy": {"rules": [
            # Saved and exited, or evicted by the cluster: not a failure, a replacement pod resumes.
            {"action": "Ignore", "onExitCodes": _codes(os.EX_TEMPFAIL, 128 + signal.SIGTERM)},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            # Exit status 2 is a user error: a restart cannot help.
            {"action": "FailJob", "onExitCodes": _codes(2)},
        ]},
        "template": {"metadata": {"labels": {"app": plan.job}}, "spec": _pod_spec(plan)},
    }  # fmt: skip


def _job_set(plan: KubernetesTrainingJobPlan, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a JobSet, which restarts all pods when pods were replaced too often, but not after a user error."""
    user_error = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "failurePolicy": {"maxRestarts": RESTARTS, "rules": [user_error]},
        "network": {"enableDNSHostnames": True, "subdomain": plan.job, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": NODES, "replicas": 1, "template": {"spec": _job_spec(plan)}}],
    }  # fmt: skip
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _codes(*values: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": list(values)}


def _pod_spec(plan: KubernetesTrainingJobPlan) -> dict[str, Any]:
    """Return the pod of one machine. When another machine's pod is lost, its agent restarts its ranks, which resume
    from the last save.
    """
    command = torchrun_agent_command(
        "python3", plan.nodes, plan.gpus, endpoint=f"{plan.first_pod_address}:{PORT}", job=plan.job, index="JOB_COMPLETION_INDEX",
        train=shlex.join(["/config/run.yaml", *(f"--set={escape_kubernetes_references(item)}" for item in plan.overrides)]),
    )  # fmt: skip
    container = {
        "name": CONTAINER,
        "image": plan.image,
        "workingDir": "/workspace",
        "command": ["sh", "-c", command],
        "env": [{"name": name, "value": value} for name, value in ENVIRONMENT.items()],
        "resources": {"limits": {"nvidia.com/gpu": plan.gpus}},
        "volumeMounts": [
            {"name": "config", "mountPath": "/config", "readOnly": True},
            {"name": "workspace", "mountPath": "/workspace"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        **({} if plan.jobset else {"subdomain": plan.job}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_SECONDS,
        # A new volume belongs to root, but the container runs as another user.
        "securityContext": {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": plan.job}},
            {"name": "workspace", "persistentVolumeClaim": {"claimName": plan.volume}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": plan.shared_memory}},
        ],
    }
