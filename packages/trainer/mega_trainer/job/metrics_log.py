"""Metrics of a run: one line per step on the screen, in metrics.jsonl and to experiment trackers; norms by layer."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_common.atomic_files import add_path_to_errors, open_atomic_file
from mega_common.bounded_parsing import parse_json_text
from mega_common.model_config import ModelConfig
from mega_common.progress_logging import format_with_decimal_unit, logger
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.comm import CommGroup, all_reduce
from mega_trainer.distributed.device import to_host
from mega_trainer.job.experiment_trackers import open_experiment_trackers
from mega_trainer.job.goodput import GoodputCounter
from mega_trainer.job.step_result import StepResult
from mega_trainer.optim.optimizer_slots import OptimizerSlot, collect_slot_tensors_to_save
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.plan.flops import (
    compute_model_flops_per_token,
    compute_palm_flops_per_token,
    count_parameters_by_layer,
    find_peak_flops,
)
from mega_trainer.plan.layer_flops import image_flops
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.trainable_parameters import TrainableParameters

MetricsSink = Callable[[int, dict[str, float]], object]
MetricsLine = dict[str, Any]
LINE_SECONDS = 1.0  # between lines on the screen; metrics.jsonl has every step
LINE_COLUMNS = 109  # of a line on the screen, which has the time of day before it
SHOWN_SHARE = 0.01  # of a step: shorter phases are not on the screen


@dataclass(frozen=True)
class MfuCalculator:
    """FLOPs of one token and peak FLOP/s of all devices, for the model FLOPs utilisation (MFU).
    The MFU has two definitions: by exact GEMM counts, and by the PaLM formula.

    Attributes:
        exact: FLOPs per token, forward and backward, of each GEMM, with half of causal attention; without the gradients
            of frozen weights.
        palm: FLOPs per token by the 6N + 12LHQT rule (arXiv:2204.02311, appendix B).
        peak: FLOP/s of all devices together.
        image: additional FLOPs per image, by both definitions.
        peak_is_known: True if `peak` is from a data sheet; else it is the speed of a GEMM, which a step can exceed.
    """

    exact: float
    palm: float
    peak: float
    image: float = 0.0
    peak_is_known: bool = True

    @classmethod
    def for_run(cls, config: RunConfig, device: torch.device, dtype: torch.dtype, world_size: int) -> MfuCalculator:
        """Return the MFU calculator of a run on `world_size` devices; NaN utilisation for a module of transformers.

        The peak FLOP/s of a device without a known data sheet is measured.
        """
        model, lengths = config.model, config.sequence_lengths
        known = datasheet_peak_flops(device, config.precision)
        peak = known or measure_peak_flops(device, dtype)
        if model.transformers is not None:  # its operations are not known: no utilisation
            return cls(math.nan, math.nan, peak * world_size, peak_is_known=False)
        count = count_parameters_by_layer(model)
        run = make_training_layout(config, world_size)
        other = TrainableParameters.from_training_layout(model, run, count).extra_flops(model, count)
        image = sum(image_flops(model, run.freeze, config.lora).values())
        exact, palm = (
            compute_model_flops_per_token(model, lengths[0], target=lengths[1]),
            compute_palm_flops_per_token(model, *lengths),
        )
        return cls(exact + other, palm + other, peak * world_size, image, peak_is_known=known is not None)


def datasheet_peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the data sheet's peak FLOP/s of a GPU that is recognised by name, in `precision`; else None."""
    return find_peak_flops(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def measure_peak_flops(device: torch.device, dtype: torch.dtype, enough: float = 0.02, repeat: int = 3) -> float:
    """Return the FLOP/s of a square GEMM as measured on `device`, the best of `repeat` measurements.
    It is the reference for devices without a known data sheet.

    Larger GEMMs come nearer to the peak, but one in fp16 can take seconds on a CPU: sizes grow until one takes `enough`
    seconds.
    """
    peak = 0.0
    for size in (128, 256, 512, 1024, 2048, 4096, 8192):
        a = torch.randn(size, size, device=device).to(dtype)
        best = float("inf")
        for _ in range(repeat):
            begin = time.perf_counter()
            (a @ a)[0, 0].item()
            best = min(best, time.perf_counter() - begin)
        peak = max(peak, 2 * size**3 / best)
        if best > enough:
            break
    return peak


class MetricsLogger:
    """Logger of each step's metrics to the screen, metrics.jsonl and the experiment trackers; only rank 0 writes."""

    def __init__(
        self, config: RunConfig, speed: MfuCalculator, start: int, consumed_samples: int, *, writes: bool
    ) -> None:
        self._config, self._speed, self._writes = config, speed, writes
        self._sinks: list[MetricsSink] = []
        self._closers: list[Callable[[], object]] = []
        self._begin = self._last = time.monotonic()
        self._clock = time.time() - self._begin  # added to the monotonic clock: Unix time, even if the clock is set
        self._last_line = -math.inf
        self._start = self._consumed = consumed_samples
        self._earlier: tuple[MetricsLine, MetricsLine, MetricsLine] | None = None
        self._goodput = GoodputCounter(self._clock + self._begin)
        if writes:
            self._open_sinks(Path(config.output), start)

    def _open_sinks(self, folder: Path, start: int) -> None:
        path = folder / "metrics.jsonl"
        self._earlier = drop_metrics_after_step(path, start)
        stream = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__

        def write_json_line(step: int, numbers: dict[str, float]) -> None:
            with add_path_to_errors(path):
                _write_finite(stream, {"step": step, **numbers})

        self._sinks.append(write_json_line)
        self._closers.append(stream.close)
        for tracker in open_experiment_trackers(self._config, start):
            self._sinks.append(tracker.put)
            self._closers.append(tracker.close)

    def log_step(
        self,
        step: int,
        consumed_samples: int,
        lr: float,
        result: StepResult,
        phases: Mapping[str, float],
        epochs: Callable[[int], Mapping[str, float]] | None = None,
        **more: float | None,
    ) -> None:
        """Log the metrics of a finished step, each `log.every` steps; the screen gets at most a line a second.

        `phases` are seconds by phase of the step, logged as `phases/NAME`; `epochs` returns the passes over each data
        set before a sample, logged as `epochs/NAME`; `more` are further metrics, of which None values are left out.
        """
        self._goodput.add_lost_phases(phases)
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        samples, self._consumed = consumed_samples - self._consumed, consumed_samples
        if not self._writes or step % self._config.log.every:
            return
        rate = samples * self._config.tokens_per_sample / seconds
        end = self._config.batch.samples_after_steps(self._config.train.steps - step, consumed_samples)
        left = (end - consumed_samples) * (now - self._begin) / (consumed_samples - self._start)
        seen = (more.get("images") or 0.0) * self._speed.image / seconds
        numbers = {
            "consumed_samples": consumed_samples,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens_per_second": rate,
            "seconds": seconds,
            "tokens": result.tokens,
            "mfu": (rate * self._speed.exact + seen) / self._speed.peak,
            "mfu_palm": (rate * self._speed.palm + seen) / self._speed.peak,
            "memory_bytes": float(get_peak_allocated_bytes()),
            "seconds_left": left,
            **{name: value for name, value in more.items() if value is not None},
            **{f"epochs/{name}": value for name, value in (epochs(consumed_samples) if epochs else {}).items()},
            **{f"phases/{name}": value for name, value in phases.items()},
            "time": time.time(),
            **self._goodput.metrics_fields(self._clock + now),
        }
        for sink in self._sinks:
            sink(step, numbers)
        if now - self._last_line >= LINE_SECONDS or "valid_loss" in numbers or step == self._config.train.steps:
            self._last_line = now
            logger.info(self._format_line(step, numbers))

    def _format_line(self, step: int, n: Mapping[str, float]) -> str:
        """Return a line of the screen; parts that do not fit in `LINE_COLUMNS` are left out."""
        steps = self._config.train.steps
        parts = [f"step {step:{len(str(steps))}}/{steps}", f"loss {n['loss']:.4f}"]
        parts += [f"valid loss {n['valid_loss']:.4f}"] if "valid_loss" in n else []
        parts += [
            f"lr {n['lr']:.2e}",
            f"grad {n['grad_norm']:.3f}",
            f"{format_with_decimal_unit(n['tokens_per_second'])} tok/s",
        ]
        parts += [f"MFU {100 * n['mfu']:.1f} %"] if self._speed.peak_is_known else []
        parts += [f"{n['memory_bytes'] / 2**30:.1f} GiB", f"{timedelta(seconds=round(n['seconds_left']))} left"]
        parts += [f"goodput {100 * n['goodput']:.1f} %", _format_phases(n)]
        line = parts[0]
        for part in filter(None, parts[1:]):
            line = f"{line}  {part}" if len(line) + 2 + len(part) <= LINE_COLUMNS else line
        return line

    def __enter__(self) -> MetricsLogger:
        self._last = time.monotonic()
        if self._earlier:
            self._goodput = GoodputCounter.resume_counter(*self._earlier, self._clock + self._last)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for close in self._closers:
            close()


def _format_phases(n: Mapping[str, float]) -> str:
    """Return the shares of a step's phases in percent."""
    shares = {name[len("phases/") :]: n[name] / n["seconds"] for name in n if name.startswith("phases/")}
    shown = " ".join(f"{name} {100 * share:.0f}" for name, share in shares.items() if share >= SHOWN_SHARE)
    return shown and f"{shown} %"


def get_peak_allocated_bytes() -> int:
    """Return the peak bytes that torch allocated on the GPU; without one, the RAM that this process occupies now."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return pages * 4096


def drop_metrics_after_step(path: Path, step: int) -> tuple[MetricsLine, MetricsLine, MetricsLine] | None:
    """Remove the lines of metrics.jsonl after `step`; return the first line, the last kept one and the former last one.

    Returns:
        The first line, the last one that stays, which is empty when none does, and the last one that was there; None
        when none was.
    """
    texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    lines = [(_line_step(text), text) for text in texts]
    kept = [text for number, text in lines if number <= step]
    if len(kept) < len(texts):
        with open_atomic_file(path, text=True) as stream:
            stream.writelines(text + "\n" for text in kept)
    whole = [text for number, text in lines if number < math.inf]
    return (
        (parse_json_text(whole[0]), parse_json_text(kept[-1]) if kept else {}, parse_json_text(whole[-1]))
        if whole
        else None
    )


def _line_step(line: str) -> float:
    try:
        return float(parse_json_text(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line cut short by a kill
        return math.inf


def _write_finite(stream: IO[str], numbers: dict[str, Any]) -> None:
    finite = {name: value if value == value and abs(value) != float("inf") else None for name, value in numbers.items()}
    stream.write(json.dumps(finite) + "\n")
    stream.flush()


def compute_norms_by_layer(
    optimizer: ShardedOptimizer, model: ModelConfig, world: CommGroup, clip_factor: float
) -> dict[str, float]:
    """Return the gradient norm and weight norm of each layer as metrics, equal on all ranks.
    The metrics are `layer_grad_norm/NAME`, before gradient clipping, and `layer_weight_norm/NAME` of trainable
    parameters.

    NAME is the number of a layer, or the name of another module, such as `embed_tokens`.

    Args:
        optimizer: after an update.
        clip_factor: factor by which clipping multiplied the gradients.
    """
    optimizer.wait_for_params()
    names = list(dict.fromkeys(map(_layer_name, canonical_tensors(model))))
    grads = _sum_squares(((slot, slot.shard.grads) for slot in optimizer.slots), names)
    weights = _sum_squares(((slot, slot.main) for slot in optimizer.slots), names)
    sums = torch.stack([grads / clip_factor**2, weights])
    all_reduce(sums, world)
    return {
        f"{kind}/{name}": value
        for kind, values in zip(("layer_grad_norm", "layer_weight_norm"), sums.sqrt().tolist(), strict=True)
        for name, value in zip(names, values, strict=True)
    }


def _layer_name(name: str) -> str:
    words = name.split(".")
    return words[words.index("layers") + 1] if "layers" in words else words[-2:][0]


def _sum_squares(pairs: Iterable[tuple[OptimizerSlot, Tensor]], names: list[str]) -> Tensor:
    """Return the sums of squares by name, fp64 [names], on the host, of the elements that this rank owns."""
    sums = torch.zeros(len(names), dtype=torch.float64)
    for name, sharded in collect_slot_tensors_to_save(pairs).items():
        for box in sharded.boxes:
            sums[names.index(_layer_name(name))] += to_host(box.tensor.detach().double().square().sum())
    return sums
