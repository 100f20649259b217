"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, Trackio, Prometheus.

Each is configured in `log` and opened by a function that returns an `ExperimentTracker`. A resumed run continues the same run
of a service, whose id is kept in the run's folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from mega_common.atomic_files import open_atomic_file
from mega_common.errors import ConfigError, MissingPackageError
from mega_common.progress_logging import logger
from mega_trainer.config.run_config import RunConfig

ScalarMetrics = dict[str, float]


@dataclass(frozen=True)
class ExperimentTracker:
    """Connection to one experiment tracker, such as TensorBoard or Weights & Biases.
    It has two functions: `put` takes the step and the metrics of each logged step, `close` ends it.
    """

    put: Callable[[int, ScalarMetrics], object]
    close: Callable[[], object]


def open_experiment_trackers(config: RunConfig, start: int) -> Iterator[ExperimentTracker]:
    """Open and yield each experiment tracker that the run configures; the caller closes them.

    The run continues after step `start`.

    Raises:
        MissingPackageError: when one is not installed, except TensorBoard, which is on by default and then skipped.
        ConfigError: when Prometheus's port cannot be opened.
    """
    log, folder = config.log, Path(config.output)
    if log.tensorboard and (tracker := _open_tensorboard(folder / "tensorboard", start)):
        yield tracker
    if log.wandb is not None:
        yield _open_wandb(log.wandb, config, folder)
    if log.mlflow is not None:
        yield _open_mlflow(log.mlflow, config, folder)
    if log.trackio is not None:
        yield _open_trackio(log.trackio, config, folder)
    if log.prometheus_port is not None:
        yield _open_prometheus(log.prometheus_port, log.prometheus_address)


def load_or_create_run_id(path: Path, make: Callable[[], str] = lambda: uuid4().hex) -> str:
    """Return the run id in the file `path`, written with that of `make` if missing, so that a tracker resumes the run."""
    if not path.exists():
        with open_atomic_file(path, text=True) as stream:
            stream.write(make())
    return path.read_text(encoding="utf-8").strip()


def _import_tracker(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.replace("_", "-")
        extra = {"prometheus_client": "prometheus"}.get(name, name)
        raise MissingPackageError(
            f"log.{extra} requires the package {package}, which is not installed",
            hint=f"pip install 'packages/trainer[{extra}]'",
        ) from error


def _run_settings(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True)


def _finite_numbers(numbers: ScalarMetrics) -> ScalarMetrics:
    """Return the numbers without non-finite ones, which a database cannot store."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _open_tensorboard(folder: Path, start: int) -> ExperimentTracker | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.info("tensorboard is not installed; metrics are only in metrics.jsonl")
        return None
    writer = SummaryWriter(str(folder), purge_step=start + 1)

    def log_scalars(step: int, numbers: ScalarMetrics) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return ExperimentTracker(log_scalars, writer.close)


def _open_wandb(project: str, config: RunConfig, folder: Path) -> ExperimentTracker:
    run = _import_tracker("wandb").init(
        project=project, dir=str(folder), id=load_or_create_run_id(folder / "wandb-id"), resume="allow", config=_run_settings(config),
        allow_val_change=True,
    )  # fmt: skip
    return ExperimentTracker(lambda step, numbers: run.log(numbers, step=step), run.finish)


def _open_mlflow(experiment: str, config: RunConfig, folder: Path) -> ExperimentTracker:
    mlflow, id_file = _import_tracker("mlflow"), folder / "mlflow-id"
    mlflow.set_experiment(experiment)
    if id_file.exists():
        mlflow.start_run(run_id=load_or_create_run_id(id_file))
    else:
        run = mlflow.start_run(run_name=folder.resolve().name)
        load_or_create_run_id(id_file, lambda: str(run.info.run_id))
    mlflow.log_dict(_run_settings(config), "run.yaml")  # not as parameters, which cannot change at a resume
    return ExperimentTracker(
        lambda step, numbers: mlflow.log_metrics(_finite_numbers(numbers), step=step), mlflow.end_run
    )


def _open_trackio(project: str, config: RunConfig, folder: Path) -> ExperimentTracker:
    trackio = _import_tracker("trackio")
    trackio.init(
        project, name=load_or_create_run_id(folder / "trackio-id"), config=_run_settings(config), resume="allow"
    )
    return ExperimentTracker(lambda step, numbers: trackio.log(_finite_numbers(numbers), step=step), trackio.finish)


def _open_prometheus(port: int, address: str) -> ExperimentTracker:
    """Serve gauges at http://ADDRESS:PORT/metrics: `loss` is mega_train_loss, `phases/forward` is
    mega_train_phases{name="forward"}.
    """
    client = _import_tracker("prometheus_client")
    registry, gauges = client.CollectorRegistry(), dict[str, Any]()
    try:
        server, thread = client.start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"log.prometheus_port = {port} must be free at {address}: {error.strerror}",
            hint="set another port, or another log.prometheus_address",
        ) from error

    def set_gauges(step: int, numbers: ScalarMetrics) -> None:
        for key, value in {"step": float(step), **numbers}.items():
            base, _, label = key.partition("/")
            name = "mega_train_" + re.sub(r"\W", "_", base)
            if name not in gauges:
                gauges[name] = client.Gauge(name, f"{base} of metrics.jsonl", ["name"] * bool(label), registry=registry)
            (gauges[name].labels(label) if label else gauges[name]).set(value)

    def stop_server() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return ExperimentTracker(set_gauges, stop_server)
