"""Model in training as an inference model that shares its weights, and answers that it samples during training."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mega_ckpt.lora_tensors import adapted_modules
from mega_common.errors import ConfigError
from mega_eval.engine_requests import EngineRequest
from mega_eval.inference_engine import InferenceEngine
from mega_eval.multi_rank_inference import ModelReplicas, PromptTokenizer, ReplicaLayout
from mega_eval.sampling import Sampling
from mega_eval.sharded_decoders import GatheredDecoder, GatheredPipelineDecoder, PipelineDecoder, WeightGatheringDecoder
from mega_eval.text_stream import GenerationLimits
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.data_check import find_run_tokenizer
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import select_model_class
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.objectives.policy_objective import Rollout
from mega_trainer.pipeline.executor import PipelineExecutor

ROWS = 64  # answers that a copy of the model samples together


@dataclass
class RolloutSampler:
    """Sampler of answers by the model in training, at temperature 1; all ranks of the run take part.

    A draw depends on (seed, sample, position) alone.

    Raises:
        ConfigError: when the tokenizer has no end token.
    """

    config: RunConfig

    def __post_init__(self) -> None:
        tokenizer = find_run_tokenizer(self.config.data, self.config.model.vocab_size)
        if tokenizer is None or tokenizer.eos_id is None:
            raise ConfigError(
                "objective.kind = grpo requires a tokenizer with an end token, found none",
                hint="set data.tokenizer to the folder of a tokenizer with an eos_token",
            )
        self._tokenizer, self._prompts = tokenizer, PromptTokenizer(tokenizer)
        self._limits = GenerationLimits(self.config.objective.max_new_tokens, ends=[tokenizer.eos_id])
        # a long timeout: copies of the model that sample short answers wait; a watchdog detects hangs
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if dist.is_initialized() else None

    def __call__(self, executor: PipelineExecutor, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Rollout]:
        """Return an answer for each (sample number, prompt), on all ranks."""
        replicas = make_training_model_replicas(executor, self.config, self._prompts, self._group)
        own = self._sample_share(replicas.model, prompts[replicas.copy_index :: replicas.num_copies])
        parts = [own]
        if replicas.world_size > 1:
            parts = [[] for _ in range(replicas.world_size)]
            dist.all_gather_object(parts, own, group=self._group)
        found = {one.sample: one for part in parts for one in part}
        return [found[sample] for sample, _ in prompts]

    def _sample_share(self, model: Decoder, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Rollout]:
        """Return the answers of this rank's copy of the model."""
        if not prompts:
            return []
        rows = min(ROWS, len(prompts))
        longest = max(len(prompt) for _, prompt in prompts) + self._limits.max_new_tokens
        engine = InferenceEngine(model, self._tokenizer, cache_tokens=rows * longest, batch_size=rows)
        sampling = Sampling(temperature=1.0, seed=self.config.train.seed)
        numbers = [
            engine.add_request(EngineRequest(prompt, self._limits, sampling, sample, logprobs=0))
            for sample, prompt in prompts
        ]
        found = {
            number: Rollout(sample, [*prompt], [], [], "", truncated=False)
            for number, (sample, prompt) in zip(numbers, prompts, strict=True)
        }
        while engine.num_waiting or engine.num_running:
            for event in engine.step():
                one = found[event.request]
                found[event.request] = replace(
                    one,
                    tokens=[*one.tokens, *event.tokens],
                    log_probs=[*one.log_probs, *(each.logprob for each in event.scored)],
                    text=one.text + event.text,
                    truncated=event.finish == "length",
                )
        return [found[number] for number in numbers]


def make_training_model_replicas(
    executor: PipelineExecutor, config: RunConfig, prompts: PromptTokenizer, group: dist.ProcessGroup | None
) -> ModelReplicas:
    """Return the copies of the model in training that the ranks of its layout form, with its current weights."""
    world, parallel = executor.parallel_groups.world, config.parallel
    # ZeRO-3 gathers weights over all ranks of a stage, so all ranks form one copy
    block = world.size // parallel.pp if parallel.zero == 3 else parallel.ep * parallel.expert_tp
    return ModelReplicas(
        build_inference_model(executor, config), prompts, 8, world.rank, world.size,
        ReplicaLayout(parallel.tp, block, parallel.pp), group,
    )  # fmt: skip


def build_inference_model(executor: PipelineExecutor, run: RunConfig) -> Decoder:
    """Return an inference model that shares the weights of the model in training.
    Context parallelism is off, so each rank computes whole sequences.
    """
    groups, live = executor.parallel_groups, executor.first_local_stage
    config = live.config.model_copy(update={"mtp_layers": 0})
    build = LayerBuilder(
        config, replace(groups, cp=CommGroup("cp", (groups.world.rank,))), dtype=live.dtype, device=torch.device("meta"),
        adapts={} if run.lora is None else adapted_modules(config, run.lora), blocks=run.registry.make_block_factories(config),
        functions=run.registry.bind_extension_functions(config),
    )  # fmt: skip
    sharded = isinstance(live, FSDPModule)
    if config.per_layer_input_size and (sharded or groups.pp.size > 1):
        raise ConfigError(
            "generation in training requires parallel.pp = 1 and parallel.zero <= 2 for a model with model.per_layer_input_size",
            hint="set parallel.zero=2 and parallel.pp=1",
        )
    if groups.pp.size > 1:
        own = {number: range(stage.stage.first, stage.stage.last) for number, stage in sorted(executor.stages.items())}
        pipeline_class = GatheredPipelineDecoder if sharded else PipelineDecoder
        model: Decoder = pipeline_class(build, executor.schedule.owners, own)
    else:
        model = (GatheredDecoder if sharded else select_model_class(config))(build)
    weights = _select_tensors(executor, lambda stage: stage.named_parameters(), dict(model.named_parameters()))
    if isinstance(model, WeightGatheringDecoder):
        model.set_training_parameters(
            {name: tensor for name, tensor in weights.items() if isinstance(tensor, nn.Parameter)}
        )
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
