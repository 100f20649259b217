"""Downstream tasks on a model in training, with its current weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from lm_eval.tasks import TaskManager

from mega_common.errors import ConfigError
from mega_common.progress_logging import logger
from mega_eval.harness_tasks import HarnessModel, HarnessTaskOptions, load_harness_task_manager, run_harness_tasks
from mega_eval.live_model import make_training_model_replicas
from mega_eval.multi_rank_inference import ModelReplicas, PromptTokenizer
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.data_check import find_run_tokenizer
from mega_trainer.pipeline.executor import PipelineExecutor


@dataclass
class InTrainingTaskEvaluator:
    """Evaluation during training on lm-evaluation-harness tasks.
    The tasks are listed under `eval` in run.yaml; all ranks of the run take part.

    Raises:
        ConfigError: when a task or the tokenizer is missing.
    """

    config: RunConfig
    _run_start: float = field(default_factory=time.monotonic)
    _spent: float = 0.0

    def __post_init__(self) -> None:
        tokenizer = find_run_tokenizer(self.config.data, self.config.model.vocab_size)
        if tokenizer is None:
            raise ConfigError(
                "eval.tasks requires the tokenizer of the data, which was not found",
                hint="set data.tokenizer to the folder of the tokenizer",
            )
        self._prompts = PromptTokenizer(tokenizer)
        # a long timeout: other ranks wait while the first rank reads a data set or aggregates; a watchdog detects hangs
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if dist.is_initialized() else None
        self._manager: TaskManager = load_harness_task_manager(self.config.eval.tasks, self.config.eval.include_path)

    def __call__(self, executor: PipelineExecutor) -> Mapping[str, float]:
        """Return the task scores of the model in training as `eval/TASK/METRIC` on rank 0; empty on other ranks, or
        when evaluation has used up its share of the run's time.
        """
        replicas = make_training_model_replicas(executor, self.config, self._prompts, self._group)
        if replicas.rank:
            replicas.repeat_rank_zero_calls()
            return {}
        begin = time.monotonic()
        allowed = self.config.eval.max_share * (begin - self._run_start)
        found = {} if self._spent > allowed else self._run_tasks(replicas)
        replicas.stop_followers()
        self._spent += time.monotonic() - begin
        return found

    def _run_tasks(self, replicas: ModelReplicas) -> dict[str, float]:
        """Run the tasks and return their scores by metric name."""
        settings, tokenizer = self.config.eval, self._prompts.tokenizer
        model = HarnessModel(replicas, frozenset({tokenizer.eos_id or 0}), None, self.config.data.seq_length)
        options = HarnessTaskOptions(settings.include_path, settings.num_fewshot, settings.limit)
        with torch.random.fork_rng():  # the harness seeds torch's generator
            results = run_harness_tasks(model, settings.tasks, options, manager=self._manager)["results"]
        found = {
            f"eval/{task}/{metric.removesuffix(',none')}": float(value)
            for task, metrics in results.items()
            for metric, value in metrics.items()
            if isinstance(value, float) and "stderr" not in metric
        }
        logger.info("%s", "  ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in found.items()))
        return found
