"""The trainer as a library, for programs with their own loop: reinforcement learning, distillation, research.

    import mega_trainer

    engine = mega_trainer.TrainingEngine({"model": {"from": "path/to/hf-folder"}, "parallel": {"tp": 2}, "data": {"seq_length": 4096}})
    old = engine.log_probs(sequences)                     # one tensor a sequence, the same on every rank
    engine.train_step(sequences, lambda new: policy_loss(new, old, advantages))
    for bucket in engine.stream_weights():                # HuggingFace's names, whole tensors
        inference.load_weights(bucket)

Every method is a collective call: all ranks make it, with the same arguments, and get the same. What this module exports
follows semantic versioning: nothing is taken away or changes its meaning but in a new major version, after a minor one
that warns of it.
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

from mega_ckpt.extend_vocabulary import extend_to_size
from mega_ckpt.source import open_weight_source, resolve_checkpoint, write_file_durably
from mega_ckpt.store import Location, parse_location, save_sharded_checkpoint
from mega_common.errors import ConfigError, DataError
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.data.micro_batch import MicroBatch, split_micro_batches
from mega_trainer.data.packed_rows import PackedRows
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.distributed.device import select_rank_device
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.distributed.rank_info import RankInfo
from mega_trainer.job.step_result import StepResult
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.context_parallel import rank_token_indices
from mega_trainer.parallel.expert_routing import RoutingReplay, list_expert_layers
from mega_trainer.parallel.parameter_info import get_local_values
from mega_trainer.run.build_components import compute_dtype, connect_groups
from mega_trainer.run.train_state import load_stage_weights
from mega_trainer.run.train_step import train_step
from mega_trainer.run.training_run import assemble_training
from mega_trainer.run.weight_stream import NamedTensors, RankShareSource, stream_weight_buckets

# The log-probabilities of some sequences' tokens to what is to be made small, a scalar.
LossFunction = Callable[[list[Tensor]], Tensor]
BUCKET_BYTES = 1 << 30


class TrainingEngine:
    """Model that is trained by method calls, in any layout of ranks.

    Its ranks are those of torch's default process group, if the program has made that (torchrun and
    `dist.init_process_group`); without, this process is the only rank.

    Args:
        config: a run's configuration, or what a run.yaml would say. `model`, `parallel`, `optimizer`, `precision`,
            `recompute` and the like mean what they mean there; `data.seq_length` is the length of rows, and the longest
            sequence; `batch.micro` is how many rows are computed at once. Data, steps and schedules of the learning
            rate are the program's business.
        groups: this rank's process groups, where they exist already; by default they are made.

    Attributes:
        config: as it was read.
        device: of this rank's part of the model.
        step: updates made, skipped ones included.

    Raises:
        ConfigError: for what does not fit: the configuration, or the number of ranks.
        CheckpointError: when the weights to start from cannot be used.
    """

    def __init__(self, config: RunConfig | Mapping[str, Any], groups: ParallelGroups | None = None) -> None:
        size = dist.get_world_size() if dist.is_initialized() else 1
        self.config = config if isinstance(config, RunConfig) else _parse_config(config, size)
        if self.config.model.has_encoder or not self.config.model.causal:
            raise ConfigError("TrainingEngine: trains decoders, and the model is or has an encoder", hint="mega train")
        rank = dist.get_rank() if dist.is_initialized() else 0
        local = int(os.environ.get("LOCAL_RANK", rank))
        self._groups = groups or connect_groups(self.config, RankInfo(rank, size, local))
        self.device = select_rank_device(self.config.device, local)
        self._state, self._executor = assemble_training(self.config, self._groups, self.device)
        self._assets: Mapping[str, Path | bytes] = {}
        self._away: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        if self.config.init_from is not None:
            self.load_weights(self.config.init_from)
        else:
            for stage in self._state.stages.values():
                initialize_weights(stage, self.config.train.seed)
            self._state.optimizer.load_main_from_model()

    @property
    def step(self) -> int:
        """Number of updates made, skipped ones included."""
        return self._state.step

    # ------------------------------------------------------------------------------------------------------- computing

    def log_probs(self, sequences: Sequence[Sequence[int]], *, routes: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the log-probability of every token but the first, given those before it.

        Args:
            sequences: token ids, each from 2 to `data.seq_length` + 1 of them; packed into rows, closed to each other.
            routes: of a model with experts, which ones to send each token to, as `routes` tells them; weighted by the
                model's own scores.

        Returns:
            For each sequence of L tokens one tensor [L - 1] on `device`, fp32, or fp64 in an fp64 run.

        Raises:
            DataError: for a sequence that is too short or too long, or a token that the model has not.
        """
        rows = self._pack_rows(sequences)
        return self._unpack_rows(rows, self._compute_log_probs(self._local_micro_batches(rows, routes=routes), rows))

    def routes(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the expert ids of every token but the last, for rollout routing replay (R3, arXiv:2510.11370).

        Returns:
            For each sequence of L tokens one tensor int64 [L - 1, layers with experts, top_k] on `device`.

        Raises:
            ConfigError: when the model has no experts.
        """
        rows = self._pack_rows(sequences)
        batches = self._with_routes(self._local_micro_batches(rows), rows, [])
        with torch.no_grad(), self._executor.evaluation_mode():
            self._executor.run_operations(batches, 1.0)
        told = [one.routes.recorded for one in batches if one.routes is not None]
        whole = told[0].new_zeros(len(rows.tokens), *told[0].shape[1:])
        for one, part in zip(batches, told, strict=True):
            whole[torch.tensor(one.samples, device=self.device)] = part
        all_reduce(whole, self._groups.world)
        return self._unpack_rows(rows, whole - 1)

    def train_step(
        self,
        sequences: Sequence[Sequence[int]],
        loss: LossFunction,
        *,
        lr: float | None = None,
        routes: Sequence[Tensor] | None = None,
    ) -> StepResult:
        """Run one update by a loss of the sequences' log-probabilities.

        They are computed first, for all sequences; then `loss` is called, on every rank, and its gradient with respect to
        each of them is what the tokens' losses are weighted with in the forward and backward that follow. So it may
        be any differentiable function of all of them, and micro-batches, pipelines and context ranks need not know
        it. With dropout it sees the model without.

        Args:
            sequences: as in `log_probs`.
            loss: of the log-probabilities, as `log_probs` gives them, to a scalar; it sees all sequences, and so
                does any mean in it.
            lr: learning rate of this step; `optimizer.lr` by default.
            routes: as in `log_probs`.

        Returns:
            What the step tells; `loss` is the value of `loss`, `tokens` counts those with a gradient.

        Raises:
            DataError: as in `log_probs`.
            TrainingError: when the numbers go wrong and the run's policy says stop.
        """
        rows = self._pack_rows(sequences)
        found = self._compute_log_probs(self._local_micro_batches(rows, routes=routes), rows)
        given = [each.requires_grad_() for each in self._unpack_rows(rows, found)]
        value = loss(given)
        torch.autograd.backward([value])
        weights = np.zeros(rows.tokens.shape, np.float64 if self._is_fp64 else np.float32)
        for (row, here), each in zip(rows.positions_of_sequences, given, strict=True):
            if each.grad is not None:
                weights[row, here] = -each.grad.cpu().numpy()
        settings = self.config.optimizer
        result = train_step(
            self._executor, self._state.optimizer, self._local_micro_batches(rows, weights, routes),
            tokens=[1.0, *[float("inf")] * self.config.model.mtp_layers],  # of further tokens none is asked for
            lr=settings.lr if lr is None else lr, clip=settings.clip_grad, decoupled_lr=settings.decoupled_lr,
            loss_scale=self._state.loss_scale,
        )  # fmt: skip
        result = replace(result, loss=value.item(), tokens=float(np.count_nonzero(weights)), mtp_loss=None)
        self._state.step += 1
        self._state.guard.check_step(self._state.step, result)
        return result

    def _pack_rows(self, sequences: Sequence[Sequence[int]]) -> PackedRows:
        return PackedRows.pack_sequences(
            sequences, self.config.data.seq_length, self._groups.dp.size * self.config.batch.micro
        )

    @property
    def _is_fp64(self) -> bool:
        return compute_dtype(self.config) == torch.float64

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
            raise ConfigError("routes are of a model with experts, and this one has none")
        layers = [layer for layer in list_expert_layers(model) if layer < model.num_layers]
        shape = (len(layers), moe.top_k)
        given = torch.full((*rows.tokens.shape, *shape), -1, device=self.device)
        for number, ((row, here), each) in enumerate(zip(rows.positions_of_sequences, routes, strict=bool(routes))):
            if tuple(each.shape) != (here.stop - here.start, *shape):
                wanted = [here.stop - here.start, *shape]
                raise DataError(f"routes of sequence {number} have shape {list(each.shape)} instead of {wanted}")
            given[row, here] = each.to(given)
        parts = [given[torch.tensor(one.samples, device=self.device)] for one in micro]
        return [
            replace(
                one, routes=RoutingReplay(layers, one.token_indices, part if routes else None, torch.zeros_like(part))
            )
            for one, part in zip(micro, parts, strict=True)
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
            places = rank_token_indices(out.shape[1], self._groups.cp).to(self.device)
            for number, losses in self._executor.losses.items():
                there = torch.tensor(batches[number].samples, device=self.device)
                out[there.unsqueeze(1), places] = -losses.to(out.dtype)
        all_reduce(out, self._groups.world)
        return out

    def _unpack_rows(self, rows: PackedRows, found: Tensor) -> list[Tensor]:
        return [found[row, here].clone() for row, here in rows.positions_of_sequences]

    # --------------------------------------------------------------------------------------------------------- weights

    def stream_weights(
        self, *, bucket_bytes: int = BUCKET_BYTES, family: str | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[NamedTensors]:
        """Yield all weights as (name, whole tensor) under HuggingFace's names, in buckets: the form that vLLM and
        SGLang load.

        They are byte for byte those of the folder that `mega ckpt convert --to hf` would write. Two buckets at most are in
        memory, that at hand and the one that is made; the tensors of one lie in one piece of memory, for one collective call.
        All ranks go through all buckets.

        Args:
            bucket_bytes: most bytes of a bucket; a tensor that is larger comes alone.
            family: `model_type` whose names to use; None: that of the folder the weights came from, or the first that fits.
            dtype: to cast floating-point weights to; None leaves them in the run's.

        Raises:
            CheckpointError: when no family has all of the model.
        """
        self._state.optimizer.wait_for_params()
        source = RankShareSource(self.config.model, self._state.stages, self._groups.world, self.device, self._assets)
        return stream_weight_buckets(source, bucket_bytes, family=family, dtype=dtype)

    def load_weights(self, path: str | Path) -> None:
        """Load the weights of a mega checkpoint, a HuggingFace or Megatron folder or a GGUF file; optimizer moments
        stay.

        Where the engine's vocabulary is the larger one, its further rows are the mean of theirs.

        Raises:
            CheckpointError: when they are of another model, or cannot be read.
        """
        source = extend_to_size(open_weight_source(path), self.config.model.vocab_size)
        load_stage_weights(source, self._state.stages)
        self._assets = source.asset_files()
        self._state.optimizer.load_main_from_model()

    def save(self, folder: str | Path) -> Location:
        """Write a complete checkpoint to `folder`/step-..., independent of the layout, with the tokenizer that came
        with the weights; returns its path when it is durable.
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
        """Resume from the newest checkpoint in `folder`, or from `folder` itself, whatever layout wrote it.

        Raises:
            CheckpointError: when there is none.
            ConfigError: when it is of another model.
        """
        self._state.restore_checkpoint(resolve_checkpoint(folder), self._groups.world.process_group)

    # ---------------------------------------------------------------------------------------------------------- memory

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory until `reload`; no other method may be called
        before.
        """
        if self._away:
            raise ConfigError("the engine is offloaded already", hint="call reload first")
        self._state.optimizer.wait_for_params()
        for storage in self._device_storages():
            kept = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            kept.copy_(storage)
            storage.resize_(0)
            self._away.append((storage, kept))

    def reload(self) -> None:
        """Move offloaded state back to the device, to the same tensor addresses."""
        for storage, kept in self._away:
            storage.resize_(kept.nbytes())
            storage.copy_(kept)
        self._away.clear()

    def _device_storages(self) -> list[torch.UntypedStorage]:
        """Return each storage that lives as long as the engine and is on its device, once."""
        weights = (get_local_values(p) for stage in self._state.stages.values() for p in stage.parameters())
        tensors = chain(weights, self._state.optimizer.persistent_tensors())
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device == self.device}
        return [storage for storage in found.values() if storage.resizable()]  # not what is in host memory already


def _parse_config(raw: Mapping[str, Any], ranks: int) -> RunConfig:
    """Parse the configuration with defaults for what a run requires and the engine ignores: data and the global batch."""
    data, batch = {"train": ["none"], **raw.get("data", {})}, dict(raw.get("batch", {}))
    batch.setdefault("global", batch.get("micro", 1) * ranks)
    return RunConfig.parse(resolve_run_config({**raw, "data": data, "batch": batch}), source="TrainingEngine")
