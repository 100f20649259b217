"""What a run tells services. Calls go to stand-ins with the arguments that the published libraries take."""

from __future__ import annotations

import socket
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mega_common.errors import ConfigError, MissingPackageError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.job.experiment_trackers import open_experiment_trackers

Settings = Callable[..., dict[str, Any]]


class MLflow:
    """`mlflow.tracking.fluent` of MLflow 3.18."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def set_experiment(self, experiment_name=None, experiment_id=None, trace_location=None) -> None:
        self.told.append(("experiment", experiment_name))

    def start_run(
        self, run_id=None, experiment_id=None, run_name=None, nested=False, parent_run_id=None, tags=None, description=None,
        log_system_metrics=None,
    ) -> SimpleNamespace:  # fmt: skip
        self.told.append(("start", run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "id-of-mlflow"))

    def log_dict(self, dictionary, artifact_file, run_id=None) -> None:
        self.told.append(("dict", dictionary["train"]["steps"], artifact_file))

    def log_metrics(
        self, metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None, dataset=None
    ) -> None:
        self.told.append(("metrics", metrics, step))

    def end_run(self, status="FINISHED") -> None:
        self.told.append(("end", status))


class Trackio:
    """Trackio 0.43."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def init(
        self, project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None, config=None,
        resume="never", settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0, auto_log_cpu=None,
        cpu_log_interval=10.0, webhook_url=None, webhook_min_level=None,
    ) -> None:  # fmt: skip
        self.told.append(("init", project, name, resume, config["train"]["steps"]))

    def log(self, metrics, step=None) -> None:
        self.told.append(("log", metrics, step))

    def finish(self) -> None:
        self.told.append(("finish",))


def log_steps(config: RunConfig, start: int = 0) -> None:
    for tracker in list(open_experiment_trackers(config, start)):
        tracker.put(start + 1, {"loss": 2.0, "grad_norm": float("inf"), "phases/forward": 0.5})
        tracker.close()


@pytest.fixture
def config(settings: Settings, tmp_path: Path) -> Callable[..., RunConfig]:
    (tmp_path / "run").mkdir()
    return lambda **log: RunConfig.parse(settings(log={"tensorboard": False, **log}))


def test_mlflow_goes_on_with_the_same_run(config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for start in (0, 5):
        log_steps(config(mlflow="mine"), start)
    metrics = {"loss": 2.0, "phases/forward": 0.5}
    assert mlflow.told == [
        ("experiment", "mine"), ("start", None, "run"), ("dict", 6, "run.yaml"), ("metrics", metrics, 1), ("end", "FINISHED"),
        ("experiment", "mine"), ("start", "id-of-mlflow", None), ("dict", 6, "run.yaml"), ("metrics", metrics, 6),
        ("end", "FINISHED"),
    ]  # fmt: skip


def test_trackio_goes_on_with_the_same_run(config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for start in (0, 5):
        log_steps(config(trackio="mine"), start)
    first, again = (call for call in trackio.told if call[0] == "init")
    assert first == again
    assert first[1::2] == ("mine", "allow")
    assert [call[2] for call in trackio.told if call[0] == "log"] == [1, 6]
    assert trackio.told.count(("finish",)) == 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_prometheus_reads_the_last_step_and_the_port_is_free_after(config: Callable[..., RunConfig]) -> None:
    port = free_port()
    for _ in range(2):
        (tracker,) = open_experiment_trackers(config(prometheus_port=port), 0)
        for step, loss in ((1, 3.0), (2, 2.5)):
            tracker.put(step, {"loss": loss, "phases/forward": 0.5, "phases/data": float("nan")})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        tracker.close()
        assert {"mega_train_loss 2.5", "mega_train_step 2.0", 'mega_train_phases{name="forward"} 0.5'} <= set(lines)


def test_a_port_that_is_taken_is_named(config: Callable[..., RunConfig]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"log.prometheus_port = {port} must be free at"):
            list(open_experiment_trackers(config(prometheus_port=port), 0))


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_service_that_is_not_installed_is_named(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=rf"log.{name} requires the package {name}"):
        list(open_experiment_trackers(config(**{name: "mine"}), 0))
