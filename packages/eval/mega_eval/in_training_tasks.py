"""Downstream tasks on a model in training, with its current weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from lm_eval.tasks import TaskManager
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mega_ckpt.lora_tensors import adapted_modules
from mega_common.errors import ConfigError
from mega_common.progress_logging import logger
from mega_eval.harness_tasks import HarnessModel, HarnessTaskOptions, find_harness_tasks, run_harness_tasks
from mega_eval.multi_rank_inference import ModelReplicas, PromptTokenizer, ReplicaLayout
from mega_eval.sharded_decoders import GatheredDecoder, GatheredPipelineDecoder, GatheredWeights, PipelineDecoder
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.data_check import find_run_tokenizer
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import select_model_class
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.pipeline.executor import PipelineExecutor


@dataclass
class TrainingTasks:
    """Evaluation during training on the lm-evaluation-harness tasks listed under `eval` in run.yaml; all ranks of the
    run take part.

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
        self._manager: TaskManager = find_harness_tasks(self.config.eval.tasks, self.config.eval.include_path)

    def __call__(self, executor: PipelineExecutor) -> Mapping[str, float]:
        """Return the task scores of the model in training as `eval/TASK/METRIC` on rank 0; empty on other ranks, or
        when evaluation has used up its share of the run's time.
        """
        world, parallel = executor.parallel_groups.world, self.config.parallel
        # ZeRO-3 gathers weights over all ranks of a stage, so all ranks form one copy
        block = world.size // parallel.pp if parallel.zero == 3 else parallel.ep * parallel.expert_tp
        replicas = ModelReplicas(
            build_inference_model(executor, self.config), self._prompts, 8, world.rank, world.size,
            ReplicaLayout(parallel.tp, block, parallel.pp), self._group,
        )  # fmt: skip
        if world.rank:
            replicas.follow_first_rank()
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


def build_inference_model(executor: PipelineExecutor, run: RunConfig) -> Decoder:
    """Return an inference model that shares the weights of the model in training; context parallelism is off, so each
    rank computes whole sequences.
    """
    groups, live = executor.parallel_groups, executor.first_local_stage
    config = live.config.model_copy(update={"mtp_layers": 0})
    build = LayerBuilder(
        config, replace(groups, cp=CommGroup("cp", (groups.world.rank,))), dtype=live.dtype, device=torch.device("meta"),
        adapts={} if run.lora is None else adapted_modules(config, run.lora),
    )  # fmt: skip
    sharded = isinstance(live, FSDPModule)
    if groups.pp.size > 1:
        own = {number: range(stage.stage.first, stage.stage.last) for number, stage in sorted(executor.stages.items())}
        pipeline_class = GatheredPipelineDecoder if sharded else PipelineDecoder
        model: Decoder = pipeline_class(build, executor.schedule.owners, own)
    else:
        model = (GatheredDecoder if sharded else select_model_class(config))(build)
    weights = _select_tensors(executor, lambda stage: stage.named_parameters(), dict(model.named_parameters()))
    if isinstance(model, GatheredWeights):
        model.gather_from({name: tensor for name, tensor in weights.items() if isinstance(tensor, nn.Parameter)})
        weights = {}
    buffers = _select_tensors(executor, lambda stage: stage.named_buffers(), dict(model.named_buffers()))
    for name, tensor in {**weights, **buffers}.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, tensor)
    return model.eval()


def _select_tensors(
    executor: PipelineExecutor, named: Callable[[Decoder], Iterable[tuple[str, Tensor]]], names: Container[str]
) -> dict[str, Tensor]:
    """Return the tensors of this rank's pipeline stages in training that `named` lists, by their names in the inference
    model, which has those called `names`: not the MTP layers and their embedding.
    """
    found, before = {}, 0
    for _, stage in sorted(executor.stages.items()):
        for name, tensor in named(stage):
            first, _, rest = name.partition(".")
            if first == "layers":
                number, _, rest = rest.partition(".")
                name = f"layers.{int(number) + before}.{rest}"
            if name in names:
                found[name] = tensor
        if stage.stage.heads and "matrix" in names:
            found["matrix"] = stage.output_weight  # a copy of a tied embedding if the stage has MTP layers
        before += len(stage.layers)
    return found
