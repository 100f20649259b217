"""The trainer as a library, for programs with their own loop: reinforcement learning, distillation, research.

    import mega_trainer

    engine = mega_trainer.TrainingEngine({"model": {"from": "path/to/hf-folder"}, "parallel": {"tp": 2}, "data": {"seq_length": 4096}})
    old = engine.log_probs(sequences)                     # one tensor per sequence, equal on every rank
    engine.train_step(sequences, lambda new: policy_loss(new, old, advantages))
    for bucket in engine.stream_weights():                # whole tensors under HuggingFace names
        inference.load_weights(bucket)

Every method is a collective call: all ranks make it with equal arguments and get equal results. The exports of this module
follow semantic versioning: a removal or a change of meaning needs a new major version, after a minor version that warns
about it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mega_ckpt.extend_vocabulary import extend_vocabulary_to_size
from mega_ckpt.source import open_weight_source, resolve_run_to_checkpoint, write_file_durably
from mega_ckpt.store import Location, parse_location, save_sharded_checkpoint
from mega_common.errors import ConfigError, DataError
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.data.micro_batch import MicroBatch, split_micro_batches
from mega_trainer.data.packed_rows import PackedRows
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.distributed.device import select_rank_device, to_host
from mega_trainer.distributed.process_groups import ParallelGroups, RankInfo
from mega_trainer.job.step_result import StepResult
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.context_parallel import get_context_rank_token_indices
from mega_trainer.parallel.expert_routing import RoutingReplay, list_expert_layers
from mega_trainer.parallel.parameter_info import get_local_values
from mega_trainer.run.build_components import connect_parallel_groups, get_compute_dtype
from mega_trainer.run.train_state import load_stage_weights
from mega_trainer.run.train_step import train_step
from mega_trainer.run.training_run import build_training_state_and_executor
from mega_trainer.run.weight_stream import NamedTensors, RankShareWeightSource, stream_weight_buckets

# Returns the scalar loss of the log-probabilities of sequences.
LossFunction = Callable[[list[Tensor]], Tensor]
BUCKET_BYTES = 1 << 30


class TrainingEngine:
    """Model that a program trains by method calls instead of `mega train`, on any parallel layout of ranks.

    The ranks are those of torch's default process group, if the program has initialised it (torchrun and
    `dist.init_process_group`); otherwise this process is the only rank.

    Args:
        config: configuration of a run, as an object or as the contents of a run.yaml. `model`, `parallel`, `optimizer`,
            `precision`, `recompute` and others have the same meaning as in a run; `data.seq_length` is the length of rows
            and of the longest sequence, `batch.micro` the number of rows in a micro-batch. Data, steps and learning-rate
            schedules are up to the program.
        groups: existing process groups of this rank; None: created here.

    Attributes:
        config: the parsed configuration.
        device: of this rank's part of the model.
        step: number of updates, including skipped ones.

    Raises:
        ConfigError: for an invalid configuration, or one that does not fit the number of ranks.
        CheckpointError: when the initial weights cannot be used.
    """

    def __init__(self, config: RunConfig | Mapping[str, Any], groups: ParallelGroups | None = None) -> None:
        size = dist.get_world_size() if dist.is_initialized() else 1
        self.config = config if isinstance(config, RunConfig) else _parse_config(config, size)
        if self.config.model.has_encoder or not self.config.model.causal:
            raise ConfigError("TrainingEngine requires a decoder, found a model with an encoder", hint="use mega train")
        rank = dist.get_rank() if dist.is_initialized() else 0
        local = int(os.environ.get("LOCAL_RANK", rank))
        self._groups = groups or connect_parallel_groups(self.config, RankInfo(rank, size, local))
        self.device = select_rank_device(self.config.device, local)
        self._state, self._executor = build_training_state_and_executor(self.config, self._groups, self.device)
        self._assets: Mapping[str, Path | bytes] = {}
        self._offloaded: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        if self.config.init_from is not None:
            self.load_weights(self.config.init_from)
        else:
            for stage in self._state.stages.values():
                initialize_weights(stage, self.config.train.seed, self.config.init_factor_of)
            self._state.optimizer.load_main_from_model()

    @property
    def step(self) -> int:
        """Number of optimizer updates made so far, skipped ones included."""
        return self._state.step

    # ------------------------------------------------------------------------------------------------------- computing

    def log_probs(self, sequences: Sequence[Sequence[int]], *, routes: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the log-probability, without gradient, that the model gives to each token of each sequence but the first.
        Each probability is conditional on the tokens before it.

        Args:
            sequences: token ids, each with 2 to `data.seq_length` + 1 tokens; packed into rows, without attention between
                them.
            routes: expert ids of each token, as `routes` returns them (rollout routing replay); weighted by the model's own
                scores.

        Returns:
            For each sequence of L tokens one tensor [L - 1] on `device`, fp32, or fp64 in an fp64 run.

        Raises:
            DataError: for a sequence that is too short or too long, or a token outside of the vocabulary.
        """
        rows = self._pack_rows(sequences)
        return self._unpack_rows(rows, self._compute_log_probs(self._local_micro_batches(rows, routes=routes), rows))

    def routes(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the ids of the experts to which the routers send every token of each sequence but the last.
        They are for rollout routing replay (R3, arXiv:2510.11370).

        Returns:
            For each sequence of L tokens one tensor int64 [L - 1, layers with experts, top_k] on `device`.

        Raises:
            ConfigError: when the model has no experts.
        """
        rows = self._pack_rows(sequences)
        batches = self._with_routes(self._local_micro_batches(rows), rows, [])
        with torch.no_grad(), self._executor.evaluation_mode():
            self._executor.run_operations(batches, 1.0)
        recorded = [batch.routes.recorded for batch in batches if batch.routes is not None]
        routes = recorded[0].new_zeros(len(rows.tokens), *recorded[0].shape[1:])
        for batch, part in zip(batches, recorded, strict=True):
            routes[torch.tensor(batch.samples, device=self.device)] = part
        all_reduce(routes, self._groups.world)
        return self._unpack_rows(rows, routes - 1)

    def train_step(
        self,
        sequences: Sequence[Sequence[int]],
        loss: LossFunction,
        *,
        lr: float | None = None,
        routes: Sequence[Tensor] | None = None,
    ) -> StepResult:
        """Run one optimizer update by `loss`, a differentiable function of the log-probabilities of all sequences.

        First the log-probabilities of all sequences are computed, without dropout. Then `loss` is called on every rank, and
        its gradient with respect to each log-probability becomes the weight of that token's loss in the forward and backward
        that follow. So the loss may be any differentiable function of all log-probabilities, independent of micro-batches,
        pipeline stages and context ranks.

        Args:
            sequences: as in `log_probs`.
            loss: returns the scalar loss of the log-probabilities of all sequences, as `log_probs` returns them.
            lr: learning rate of this step; `optimizer.lr` by default.
            routes: as in `log_probs`.

        Returns:
            The result of the step; `loss` is the value of `loss`, `tokens` the number of tokens with a gradient.

        Raises:
            DataError: as in `log_probs`.
            TrainingError: when loss or gradient are not finite and the run's policy is to stop.
        """
        rows = self._pack_rows(sequences)
        computed = self._compute_log_probs(self._local_micro_batches(rows, routes=routes), rows)
        log_probs = [each.requires_grad_() for each in self._unpack_rows(rows, computed)]
        value = loss(log_probs)
        torch.autograd.backward([value])
        weights = np.zeros(rows.tokens.shape, np.float64 if self._is_fp64 else np.float32)
        for (row, positions), each in zip(rows.positions_of_sequences, log_probs, strict=True):
            if each.grad is not None:
                weights[row, positions] = -to_host(each.grad).numpy()
        settings = self.config.optimizer
        result = train_step(
            self._executor, self._state.optimizer, self._local_micro_batches(rows, weights, routes),
            tokens=[1.0, *[float("inf")] * self.config.model.mtp_layers],  # no loss of MTP layers
            lr=settings.lr if lr is None else lr, clip=settings.clip_grad, decoupled_lr=settings.decoupled_lr,
            loss_scale=self._state.loss_scale,
        )  # fmt: skip
        result = replace(result, loss=to_host(value).item(), tokens=float(np.count_nonzero(weights)), mtp_loss=None)
        self._state.step += 1
        self._state.guard.check_loss_and_grad_norm(self._state.step, result)
        return result

    def _pack_rows(self, sequences: Sequence[Sequence[int]]) -> PackedRows:
        return PackedRows.pack_sequences(
            sequences, self.config.data.seq_length, self._groups.dp.size * self.config.batch.micro
        )

    @property
    def _is_fp64(self) -> bool:
        return get_compute_dtype(self.config) == torch.float64

    def _local_micro_batches(
        self, rows: PackedRows, weights: np.ndarray | None = None, routes: Sequence[Tensor] | None = None
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches, without loss unless `weights` [R, S] are given."""
        weights = np.zeros(rows.tokens.shape, np.float32) if weights is None else weights
        own = rows.rows_of_rank(self._groups.dp.rank, self._groups.dp.size)
        micro = list(split_micro_batches(rows.make_step_batch(own, weights), self.config, self.device, self._groups.cp))
        return micro if routes is None else self._with_routes(micro, rows, routes)

    def _with_routes(self, micro: Sequence[MicroBatch], rows: PackedRows, routes: Sequence[Tensor]) -> list[MicroBatch]:
        """Return micro-batches with the given expert ids of `routes`, and with buffers that record the chosen ones."""
        model, moe = self.config.model, self.config.model.moe
        if moe is None:
            raise ConfigError("routes require a model with experts (model.moe)")
        layers = [layer for layer in list_expert_layers(model) if layer < model.num_layers]
        shape = (len(layers), moe.top_k)
        expert_ids = torch.full((*rows.tokens.shape, *shape), -1, device=self.device)
        for number, ((row, positions), each) in enumerate(
            zip(rows.positions_of_sequences, routes, strict=bool(routes))
        ):
            if tuple(each.shape) != (positions.stop - positions.start, *shape):
                expected = [positions.stop - positions.start, *shape]
                raise DataError(f"routes of sequence {number} must have shape {expected}, found {list(each.shape)}")
            expert_ids[row, positions] = each.to(expert_ids)
        parts = [expert_ids[torch.tensor(batch.samples, device=self.device)] for batch in micro]
        return [
            replace(
                batch,
                routes=RoutingReplay(layers, batch.token_indices, part if routes else None, torch.zeros_like(part)),
            )
            for batch, part in zip(micro, parts, strict=True)
        ]

    @torch.no_grad()
    def _compute_log_probs(self, batches: Sequence[MicroBatch], rows: PackedRows) -> Tensor:
        """Return the log-probabilities of all rows, [R, S]."""
        out = torch.zeros(
            rows.tokens.shape, dtype=torch.float64 if self._is_fp64 else torch.float32, device=self.device
        )
        with self._executor.evaluation_mode():
            self._executor.run_operations(batches, 1.0)
        if self._groups.tp.rank == 0:
            positions = get_context_rank_token_indices(out.shape[1], self._groups.cp).to(self.device)
            for number, losses in self._executor.losses.items():
                samples = torch.tensor(batches[number].samples, device=self.device)
                out[samples.unsqueeze(1), positions] = -losses.to(out.dtype)
        all_reduce(out, self._groups.world)
        return out

    def _unpack_rows(self, rows: PackedRows, values: Tensor) -> list[Tensor]:
        return [values[row, positions].clone() for row, positions in rows.positions_of_sequences]

    # --------------------------------------------------------------------------------------------------------- weights

    def stream_weights(
        self, *, bucket_bytes: int = BUCKET_BYTES, family: str | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[NamedTensors]:
        """Yield all weights as (name, whole tensor) under HuggingFace names, as vLLM and SGLang load them.

        The weights come in lists (buckets) of about `bucket_bytes`; all ranks must iterate over all of
        them. They are byte for byte equal to the folder that `mega ckpt convert --to hf` writes. At most two buckets
        are in memory, each in one allocation for one collective call.

        Args:
            bucket_bytes: largest bytes of a bucket; a larger tensor gets a bucket of its own.
            family: `model_type` whose names to use; None: of the folder the weights came from, or the first that fits.
            dtype: to cast floating-point weights to; None: the run's.

        Raises:
            CheckpointError: when no family supports the whole model.
        """
        self._state.optimizer.wait_for_params()
        source = RankShareWeightSource(
            self.config.model, self._state.stages, self._groups.world, self.device, self._assets
        )
        families = self.config.registry.families
        return stream_weight_buckets(source, bucket_bytes, family=family, dtype=dtype, families=families)

    def load_weights(self, path: str | Path) -> None:
        """Load weights into the model from a checkpoint or a folder of another format.
        The source is a mega checkpoint, a HuggingFace or Megatron folder or a GGUF file; optimizer moments stay
        unchanged.

        If the engine's vocabulary is larger, the additional rows are the mean of the loaded ones.

        Raises:
            CheckpointError: when the weights are of another model, or cannot be read.
        """
        foreign = self.config.model.transformers is not None
        families = self.config.registry.families
        opened = open_weight_source(path, implementation="transformers" if foreign else "mega", families=families)
        source = opened if foreign else extend_vocabulary_to_size(opened, self.config.model.vocab_size)
        load_stage_weights(source, self._state.stages)
        self._assets = source.asset_files()
        self._state.optimizer.load_main_from_model()

    def save(self, folder: str | Path) -> Location:
        """Write a complete checkpoint to `folder`/step-..., and return its path once it is durable.
        The checkpoint is independent of the parallel layout and has the tokenizer that came with the weights.
        """
        tensors, numbers = self._state.tensors_to_save(), self._state.checkpoint_state()
        with tempfile.TemporaryDirectory() as assets:
            for name, content in self._assets.items():
                write_file_durably(Path(assets) / name, content)
            return save_sharded_checkpoint(
                parse_location(folder), self.step, tensors, model=self.config.model, state=numbers,
                assets=Path(assets) if self._assets else None,
            )  # fmt: skip

    def resume(self, folder: str | Path) -> None:
        """Restore weights, optimizer state and step from `folder`: its newest checkpoint, or itself if it is one.
        The checkpoint may be of any parallel layout.

        Raises:
            CheckpointError: when the folder holds no checkpoint.
            ConfigError: when it is of another model.
        """
        self._state.restore_checkpoint(resolve_run_to_checkpoint(folder), self._groups.world.process_group)

    # ---------------------------------------------------------------------------------------------------------- memory

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory; no other method may be called until `reload`."""
        if self._offloaded:
            raise ConfigError("offload requires a loaded engine, found an offloaded one", hint="call reload first")
        self._state.optimizer.wait_for_params()
        for storage in self._device_storages():
            copy = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            copy.copy_(storage)
            storage.resize_(0)
            self._offloaded.append((storage, copy))

    def reload(self) -> None:
        """Move the weights, gradients and optimizer state from host memory back to the device.
        `offload` moved them to host memory; they return to the same tensor addresses.
        """
        for storage, copy in self._offloaded:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._offloaded.clear()

    def _device_storages(self) -> list[torch.UntypedStorage]:
        """Return all persistent storages of the engine on its device, each once."""
        weights = (get_local_values(p) for stage in self._state.stages.values() for p in stage.parameters())
        tensors = chain(weights, self._state.optimizer.persistent_tensors())
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device == self.device}
        return [
            storage for storage in found.values() if storage.resizable()
        ]  # storages that cannot be resized are in host memory already


def _parse_config(raw: Mapping[str, Any], ranks: int) -> RunConfig:
    """Parse the configuration, with defaults for settings that a run requires and the engine ignores: data and the global
    batch.
    """
    data, batch = {"train": ["none"], **raw.get("data", {})}, dict(raw.get("batch", {}))
    batch.setdefault("global", batch.get("micro", 1) * ranks)
    return RunConfig.parse(resolve_run_config({**raw, "data": data, "batch": batch}), source="TrainingEngine")
