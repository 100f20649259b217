"""Downstream tasks on a model that is being trained, with the weights that it has at that moment."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from lm_eval.tasks import TaskManager
from torch import nn

from mega_ckpt.lora import adapted
from mega_common.errors import ConfigError
from mega_common.log import logger
from mega_eval.gathered import GatheredDecoder
from mega_eval.harness import HarnessModel
from mega_eval.replicas import Prompts, Replicas, Sharing
from mega_eval.stages import StagedDecoder
from mega_eval.tasks import TaskOptions, find_tasks, run_tasks
from mega_trainer.comm import Group
from mega_trainer.config import RunConfig
from mega_trainer.model.builder import Builder
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import model_class
from mega_trainer.pipeline.run import Executor
from mega_trainer.tokens import run_tokenizer


@dataclass
class TrainingTasks:
    """Runs the tasks of `eval` in run.yaml, on all ranks of a run together.

    Raises:
        ConfigError: when there is no such task, or no tokenizer.
    """

    config: RunConfig
    _begun: float = field(default_factory=time.monotonic)
    _spent: float = 0.0

    def __post_init__(self) -> None:
        tokenizer = run_tokenizer(self.config.data, self.config.model.vocab_size)
        if tokenizer is None:
            raise ConfigError("eval.tasks: needs the tokenizer of the data", hint="data.tokenizer names its folder")
        self._prompts = Prompts(tokenizer)
        # Others wait while the first rank reads a data set or sums up; the watch tells that from a hang.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if dist.is_initialized() else None
        self._manager: TaskManager = find_tasks(self.config.eval.tasks, self.config.eval.include_path)

    def __call__(self, executor: Executor) -> Mapping[str, float]:
        """The scores, as `eval/TASK/METRIC`, on the first rank; none there either where it would take too much of the time."""
        world, parallel = executor.groups.world, self.config.parallel
        # ZeRO-3 gathers weights over all ranks, so that these make one copy
        block = world.size if parallel.zero == 3 else parallel.ep * parallel.expert_tp
        replicas = Replicas(
            for_inference(executor, self.config), self._prompts, 8, world.rank, world.size,
            Sharing(parallel.tp, block, parallel.pp), self._group,
        )  # fmt: skip
        if world.rank:
            replicas.follow()
            return {}
        begin = time.monotonic()
        found = {} if self._spent > self.config.eval.max_share * (begin - self._begun) else self._run(replicas)
        replicas.close()
        self._spent += time.monotonic() - begin
        return found

    def _run(self, replicas: Replicas) -> dict[str, float]:
        wanted, tokenizer = self.config.eval, self._prompts.tokenizer
        model = HarnessModel(replicas, frozenset({tokenizer.eos_id or 0}), None, self.config.data.seq_length)
        options = TaskOptions(wanted.include_path, wanted.num_fewshot, wanted.limit)
        with torch.random.fork_rng():  # which the harness seeds
            results = run_tasks(model, wanted.tasks, options, manager=self._manager)["results"]
        found = {
            f"eval/{task}/{metric.removesuffix(',none')}": float(value)
            for task, metrics in results.items()
            for metric, value in metrics.items()
            if isinstance(value, float) and "stderr" not in metric
        }
        logger.info("%s", "  ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in found.items()))
        return found


def for_inference(executor: Executor, run: RunConfig) -> Decoder:
    """A model in training as one for inference, on the very same tensors: whole sequences on every rank of a copy."""
    groups, live = executor.groups, executor.model
    config = live.config.model_copy(update={"mtp_layers": 0})
    build = Builder(
        config, replace(groups, cp=Group("cp", (groups.world.rank,))), dtype=live.dtype, device=torch.device("meta"),
        adapts={} if run.lora is None else adapted(config, run.lora),
    )  # fmt: skip
    if groups.pp.size > 1:
        own = {number: range(stage.stage.first, stage.stage.last) for number, stage in sorted(executor.stages.items())}
        model: Decoder = StagedDecoder(build, executor.schedule.owners, own)
    else:
        model = GatheredDecoder(build, live) if run.parallel.zero == 3 else model_class(config)(build)
    names = set(dict(model.named_buffers()))
    if not isinstance(model, GatheredDecoder):  # whose weights come when they are needed
        names |= dict(model.named_parameters()).keys()
    before = 0
    for _, stage in sorted(executor.stages.items()):
        _share(stage, model, names, before)
        before += len(stage.layers)
    return model.eval()


def _share(live: Decoder, model: Decoder, names: Container[str], before: int) -> None:
    """Give a model, of its tensors of these `names`, those of a part of one in training, behind so many layers of other parts."""
    for named in (live.named_parameters(), live.named_buffers()):
        for name, tensor in named:
            first, _, rest = name.partition(".")
            if first == "layers":
                number, _, rest = rest.partition(".")
                name = f"layers.{int(number) + before}.{rest}"
            if name in names:  # predictors are not, nor is what they embed with
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, tensor)
    if live.stage.heads and "matrix" in names:
        assert isinstance(live.head_weight, nn.Parameter)
        model.matrix = live.head_weight  # the embedding's copy, where predictors have one
