"""Where a run's numbers go beside the screen and metrics.jsonl: TensorBoard, Weights & Biases, MLflow, Trackio, Prometheus.

Each is asked for in `log` and begins with a function that gives what takes the numbers of a step, and what ends it. A run
that is resumed is the same one to a service: what that knows it by lies in the run's folder.
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

from mega_common.errors import ConfigError, MissingPackageError
from mega_common.files import atomic_file
from mega_common.log import logger
from mega_trainer.config import RunConfig

Numbers = dict[str, float]


@dataclass(frozen=True)
class Tracker:
    """Takes (step, numbers) of each step that is told of, and is ended once."""

    put: Callable[[int, Numbers], object]
    close: Callable[[], object]


def trackers(config: RunConfig, start: int) -> Iterator[Tracker]:
    """Those that a run asks for, which goes on after step `start`.

    Raises:
        MissingPackageError: when one is not installed; TensorBoard, which runs have without asking, is left out then.
        ConfigError: when Prometheus's port cannot be had.
    """
    log, folder = config.log, Path(config.output)
    if log.tensorboard and (tracker := _tensorboard(folder / "tensorboard", start)):
        yield tracker
    if log.wandb is not None:
        yield _wandb(log.wandb, config, folder)
    if log.mlflow is not None:
        yield _mlflow(log.mlflow, config, folder)
    if log.trackio is not None:
        yield _trackio(log.trackio, config, folder)
    if log.prometheus_port is not None:
        yield _prometheus(log.prometheus_port, log.prometheus_address)


def run_id(path: Path, make: Callable[[], str] = lambda: uuid4().hex) -> str:
    """What a file says that was made once and stays: a resumed run is the same one to a service."""
    if not path.exists():
        with atomic_file(path, text=True) as stream:
            stream.write(make())
    return path.read_text(encoding="utf-8").strip()


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.replace("_", "-")
        extra = {"prometheus_client": "prometheus"}.get(name, name)
        raise MissingPackageError(
            f"log.{extra} is set, but {package} is not installed", hint=f"pip install 'packages/trainer[{extra}]'"
        ) from error


def _settings(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True)


def _finite(numbers: Numbers) -> Numbers:
    """Without those that a data base has no place for."""
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _tensorboard(folder: Path, start: int) -> Tracker | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.info("tensorboard is not installed; the numbers are in metrics.jsonl")
        return None
    writer = SummaryWriter(str(folder), purge_step=start + 1)

    def put(step: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return Tracker(put, writer.close)


def _wandb(project: str, config: RunConfig, folder: Path) -> Tracker:
    run = _package("wandb").init(
        project=project, dir=str(folder), id=run_id(folder / "wandb-id"), resume="allow", config=_settings(config),
        allow_val_change=True,
    )  # fmt: skip
    return Tracker(lambda step, numbers: run.log(numbers, step=step), run.finish)


def _mlflow(experiment: str, config: RunConfig, folder: Path) -> Tracker:
    mlflow, known = _package("mlflow"), folder / "mlflow-id"
    mlflow.set_experiment(experiment)
    if known.exists():
        mlflow.start_run(run_id=run_id(known))
    else:
        run = mlflow.start_run(run_name=folder.resolve().name)
        run_id(known, lambda: str(run.info.run_id))
    mlflow.log_dict(_settings(config), "run.yaml")  # no parameters: these cannot change at a resume
    return Tracker(lambda step, numbers: mlflow.log_metrics(_finite(numbers), step=step), mlflow.end_run)


def _trackio(project: str, config: RunConfig, folder: Path) -> Tracker:
    trackio = _package("trackio")
    trackio.init(project, name=run_id(folder / "trackio-id"), config=_settings(config), resume="allow")
    return Tracker(lambda step, numbers: trackio.log(_finite(numbers), step=step), trackio.finish)


def _prometheus(port: int, address: str) -> Tracker:
    """Gauges at http://ADDRESS:PORT/metrics: `loss` is mega_train_loss, `phases/forward` is mega_train_phases{name="forward"}."""
    client = _package("prometheus_client")
    registry, gauges = client.CollectorRegistry(), dict[str, Any]()
    try:
        server, thread = client.start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"log.prometheus_port = {port}: cannot be listened on at {address} ({error.strerror})",
            hint="set another port, or log.prometheus_address",
        ) from error

    def put(step: int, numbers: Numbers) -> None:
        for key, value in {"step": float(step), **numbers}.items():
            base, _, label = key.partition("/")
            name = "mega_train_" + re.sub(r"\W", "_", base)
            if name not in gauges:
                gauges[name] = client.Gauge(name, f"{base} of metrics.jsonl", ["name"] * bool(label), registry=registry)
            (gauges[name].labels(label) if label else gauges[name]).set(value)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return Tracker(put, close)
