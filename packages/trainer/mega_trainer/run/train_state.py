"""Saved and resumed state of a run: weights, optimizer and a few numbers, all by canonical name, none by rank.

Checkpoints hold no state of random generators: every random draw is a function of the seed and its purpose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mega_ckpt.checkpoint_folders import delete_checkpoints_after_step, latest_checkpoint_until_step
from mega_ckpt.lora_adapter import check_adapter_base
from mega_ckpt.source import WeightSource, load_weights
from mega_ckpt.store import (
    AsyncSaver,
    Checkpoint,
    Location,
    delete_old_checkpoints,
    load_sharded_checkpoint,
    remove_leftovers,
    save_sharded_checkpoint,
)
from mega_ckpt.tensor_pieces import ShardedTensor, boxes_by_name, merge_sharded_tensors
from mega_common.errors import CheckpointError, NumericalError
from mega_common.object_store import ObjectStoreError
from mega_common.progress_logging import logger
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.job.memory_checkpoint import TrainingStateCopy
from mega_trainer.job.resume import check_resume_settings
from mega_trainer.job.step_result import StepResult
from mega_trainer.job.training_guard import BestValidation, LossGuard, RollbackRequested, SkippedSampleRanges
from mega_trainer.model.decoder import Decoder
from mega_trainer.optim.gradient_clipping import LossScale
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.parallel.parameter_info import (
    get_local_values,
    get_parameter_info,
    get_quantized_weight,
    is_trainable,
    iterate_saved_buffers,
)
from mega_trainer.parallel.parameter_shards import replica_groups, split_replicated_tensors_to_save


@dataclass
class TrainState:
    """Everything of a run that changes while training, on this rank: weights, optimizer, counters and loss guard.

    Attributes:
        step: optimizer steps done, including skipped ones.
        consumed_samples: samples read, over all ranks.
        loss_scale: of fp16, else None.
        count_samples_read: returns the number of samples before a position of each data set; None without data.
        find_stream_positions: returns the position in each streamed data set, before a position of all data.
        adapter_base: fingerprint of the base weights of an adapter, as checkpoints store it.
        skipped_ranges: samples skipped by rollbacks.
        rollbacks: consecutive rollbacks to the same checkpoint.
        best: lowest validation loss.
    """

    config: RunConfig
    stages: Mapping[int, Decoder]
    optimizer: ShardedOptimizer
    guard: LossGuard
    step: int = 0
    consumed_samples: int = 0
    loss_scale: LossScale | None = None
    count_samples_read: Callable[[int], Mapping[str, int]] | None = None
    find_stream_positions: Callable[[int], Mapping[str, Any]] | None = None
    adapter_base: Mapping[str, str] | None = None
    skipped_ranges: SkippedSampleRanges = field(default_factory=SkippedSampleRanges)
    rollbacks: int = 0
    best: BestValidation = field(default_factory=BestValidation)

    @property
    def data_position(self) -> int:
        """Position of the next sample in the order of the data, skipped samples included."""
        return self.skipped_ranges.data_position(self.consumed_samples)

    @property
    def is_finished(self) -> bool:
        """True if all steps are done, or if early stopping applies."""
        settings = self.config.train
        return self.step >= settings.steps or (
            settings.early_stop is not None and self.best.since >= settings.early_stop
        )

    def advance_step(self, result: StepResult) -> None:
        """Count a finished step and its samples, and apply the run's policies for bad losses.
        The policies are for non-finite losses and loss spikes; they apply to the step's loss and gradient norm.

        Raises:
            NumericalError: when the run's policy is to stop.
            RollbackRequested: when it is to roll back.
        """
        size = self.config.batch.batch_size_after_samples(self.consumed_samples)
        samples = self.skipped_ranges.format_sample_positions(self.consumed_samples, size)
        self.step += 1
        self.consumed_samples += size
        self.guard.check_loss_and_grad_norm(self.step, result, samples)

    def roll_back(self, request: RollbackRequested, world: CommGroup) -> None:
        """Return to an earlier checkpoint after a bad step, skip all samples read since then, and delete later checkpoints.
        It is the newest checkpoint at least `train.rollback_steps` steps before the bad step.

        Raises:
            NumericalError: without such a checkpoint, or after `train.max_skips` consecutive rollbacks to it.
        """
        settings, root, position = self.config.train, self.config.checkpoint_root, self.data_position
        found = latest_checkpoint_until_step(root, request.step - settings.rollback_steps)
        if found is None:
            missing = f"no checkpoint in {root} is {settings.rollback_steps} step(s) older (train.rollback_steps)"
            raise NumericalError(f"{request.message}; {missing}", hint="set checkpoint.every to save during a run")
        before, at = self.skipped_ranges, self.consumed_samples
        self.restore_checkpoint(found, world.process_group)
        again = bool(before.ranges) and before.ranges[-1][0] == self.consumed_samples
        self.rollbacks = self.rollbacks + 1 if again else 1
        if self.rollbacks > settings.max_skips:
            message = f"{request.message}; {settings.max_skips} consecutive rollbacks to step {self.step} failed (train.max_skips)"
            raise NumericalError(
                message, hint="lower optimizer.lr, or raise train.rollback_steps to return to an earlier checkpoint"
            )
        self.skipped_ranges = self.skipped_ranges.skip_to_position(position, self.consumed_samples)
        logger.warning(
            "%s\n  rolled back to step %d; skipped %s", request.message, self.step,
            f"samples {before.data_position(self.consumed_samples)} to {before.data_position(at) - 1}",
        )  # fmt: skip
        if world.rank == 0:
            delete_checkpoints_after_step(root, self.step)

    def checkpoint_tensors(self) -> dict[str, ShardedTensor]:
        """Return all tensors of a checkpoint as this rank's slices, which are views of the tensors in training."""
        self.optimizer.wait_for_params()
        weights = collect_stage_weights(
            self.stages, prefix="weights/", computed=True, trainable_only=self.config.lora is not None
        )
        return weights | self.optimizer.checkpoint_tensors()

    def tensors_to_save(self) -> dict[str, ShardedTensor]:
        """Return the tensors of the training state that this rank writes into a checkpoint.
        Replicated tensors are split among the ranks that hold them.
        """
        self.optimizer.wait_for_params()
        weights = collect_stage_weights(
            self.stages, prefix="weights/", computed=True, to_save=True, trainable_only=self.config.lora is not None
        )
        return weights | self.optimizer.checkpoint_tensors(to_save=True)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the JSON state that a checkpoint saves in addition to the tensors: counters, settings and positions."""
        return {
            "consumed_samples": self.consumed_samples,
            "left_out": [list(each) for each in self.skipped_ranges.ranges],
            "read": self.count_samples_read and self.count_samples_read(self.data_position),
            "streamed": self.find_stream_positions(self.data_position) if self.find_stream_positions else {},
            "optimizer_steps": self.optimizer.update_count,
            "loss_average": self.guard.average,
            "loss_seen": self.guard.seen,
            "best": asdict(self.best),
            "loss_scale": self.loss_scale and [self.loss_scale.value, self.loss_scale.good_steps],
            "settings": self.config.model_dump(mode="json", by_alias=True),
            "extensions": self.config.registry.versions,
            **({} if self.adapter_base is None else {"base": dict(self.adapter_base)}),
        }

    def restore_checkpoint(self, folder: Location, group: dist.ProcessGroup | None) -> list[str]:
        """Resume from a checkpoint of any parallel layout, and return the settings that differ from the saved ones.
        `folder` is the checkpoint.

        Raises:
            ConfigError: when it is of another model, or the learning rate would jump.
            CheckpointError: when it is not a complete checkpoint.
        """
        saved = Checkpoint.open_folder(folder)
        if "settings" not in saved.trainer_state:
            raise CheckpointError(
                f"{folder} holds weights without the state of a run, and cannot be resumed",
                hint=f"set init_from={folder} to start from its weights, in another output folder and without checkpoint.load",
            )
        lines = check_resume_settings(saved.trainer_state, saved.step, self.config, str(folder))
        if self.adapter_base is not None:
            check_adapter_base(saved.trainer_state.get("base"), self.adapter_base, str(folder))
        wanted = self.checkpoint_tensors()
        if not saved.tensor_keys("optimizer/main/"):  # saved in full precision: the weights are the main weights
            wanted = {key: value for key, value in wanted.items() if not key.startswith("optimizer/main/")}
        if not saved.tensor_keys("optimizer/ema/"):
            wanted = {key: value for key, value in wanted.items() if not key.startswith("optimizer/ema/")}
        load_sharded_checkpoint(folder, wanted, group=group)
        self._apply_loaded(saved.step, saved.trainer_state, wanted)
        return lines

    def restore_memory_copy(self, copy: TrainingStateCopy) -> None:
        """Resume from `copy`, the copy of this rank's training state in host memory."""
        wanted = self.checkpoint_tensors()
        copy.copy_into(wanted)
        self._apply_loaded(copy.step, copy.state, wanted)

    def _apply_loaded(self, step: int, state: Mapping[str, Any], loaded: Mapping[str, ShardedTensor]) -> None:
        """Set the state that goes with loaded tensors."""
        self.optimizer.pack_loaded_state()
        if any(key.startswith("optimizer/main/") for key in loaded):
            self.optimizer.copy_main_to_model()
        else:
            self.optimizer.load_main_from_model()
        if not any(key.startswith("optimizer/ema/") for key in loaded):
            self.optimizer.initialize_weight_ema()
        self.best = BestValidation(**state.get("best", {}))
        self.step = step
        self.consumed_samples = state["consumed_samples"]
        self.skipped_ranges = SkippedSampleRanges.from_checkpoint_state(state)
        self.optimizer.update_count = state["optimizer_steps"]
        self.guard.average, self.guard.seen = state["loss_average"], state["loss_seen"]
        if self.loss_scale is not None and state.get("loss_scale"):
            self.loss_scale.value, self.loss_scale.good_steps = state["loss_scale"]


def collect_stage_weights(
    stages: Mapping[int, Decoder],
    *,
    prefix: str = "",
    computed: bool = False,
    to_save: bool = False,
    trainable_only: bool = False,
    packed: bool = True,
) -> dict[str, ShardedTensor]:
    """Return the weights of some pipeline stages by canonical name, as this rank's slices.
    The slices are views of the parameters.

    Args:
        prefix: of the names.
        computed: return weights in the compute dtype, which under ZeRO-3 are rounded copies of the stored ones. Frozen
            weights are always as stored.
        to_save: return this rank's share of replicated weights only.
        trainable_only: leave out frozen weights.
        packed: include quantised weights, as unpacked copies.
    """
    parts = []
    for stage in stages.values():
        by_replicas: dict[tuple[CommGroup, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in filter(is_trainable, stage.parameters()) if trainable_only else stage.parameters():
            if not packed and get_quantized_weight(parameter) is not None:
                continue
            groups = (
                replica_groups(get_parameter_info(parameter), sharded=isinstance(parameter, DTensor)) if to_save else ()
            )
            by_replicas[groups].append(parameter)
        for groups, parameters in by_replicas.items():
            values = ((_unpacked_values(parameter), get_parameter_info(parameter).pieces) for parameter in parameters)
            boxes = boxes_by_name((t.to(stage.dtype) if computed else t, pieces) for t, pieces in values)
            parts.append(split_replicated_tensors_to_save(boxes, groups))
        if not trainable_only:
            parts.append(
                split_replicated_tensors_to_save(
                    boxes_by_name(iterate_saved_buffers(stage)),
                    (stage.groups.tp, stage.groups.dp_cp) if to_save else (),
                )
            )
    return {prefix + name: sharded for name, sharded in merge_sharded_tensors(parts).items()}


def _unpacked_values(parameter: nn.Parameter) -> Tensor:
    packed = get_quantized_weight(parameter)
    return get_local_values(parameter) if packed is None else packed.unpack_values()


def load_stage_weights(
    source: WeightSource, stages: Mapping[int, Decoder], wanted: Callable[[str], bool] = lambda name: True
) -> None:
    """Load the weights of some pipeline stages from a source of weights.
    Only weights whose canonical names are `wanted` are loaded; packed (quantised) weights are always loaded, one parameter
    at a time.

    Raises:
        CheckpointError: when the source lacks a tensor or has it in another shape.
    """
    weights = collect_stage_weights(stages, packed=False)
    load_weights(source, {name: boxes for name, boxes in weights.items() if wanted(name)})
    for parameter in (parameter for stage in stages.values() for parameter in stage.parameters()):
        packed = get_quantized_weight(parameter)
        if packed is not None:
            with packed.fill_and_quantize() as values:
                load_weights(source, boxes_by_name([(values, get_parameter_info(parameter).pieces)]))


class CheckpointSaver:
    """Saver of a run's checkpoints, in the background if configured; deletes old checkpoints by the retention settings.

    Leaving the `with` block waits for a running save; its errors are raised there, or by `wait_for_save`.
    """

    def __init__(self, config: RunConfig, provenance: Mapping[str, Any] | None = None) -> None:
        self.root, self._config, self._provenance = config.checkpoint_root, config, provenance
        self._best: int | None = None
        self._background = AsyncSaver() if config.checkpoint.async_ else None
        if self._is_leader:
            remove_leftovers(self.root)

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, *error: object) -> None:
        if self._background is not None:
            self._background.__exit__(*error)
        self._delete_old()

    def save_checkpoint(self, state: TrainState) -> None:
        """Save a checkpoint of `state`, unless saving is disabled; training may continue as soon as this returns."""
        if not self._config.checkpoint.save:
            return
        write = save_sharded_checkpoint if self._background is None else self._background.start_save
        assets = Path(self._config.output) / "assets"
        write(
            self.root,
            state.step,
            state.tensors_to_save(),
            model=self._config.model,
            state=state.checkpoint_state(),
            assets=assets if assets.exists() else None,
            provenance=self._provenance,
        )
        self._best = state.best.step if self._config.checkpoint.best else None
        self._delete_old()

    @property
    def has_failed(self) -> bool:
        """True if a background save has failed and this rank has noticed; `wait_for_save` raises its error."""
        return self._background is not None and self._background.has_failed

    def wait_for_save(self) -> None:
        """Wait for a save in the background, and raise the error if it failed.

        Raises:
            CheckpointError: the same on every rank, when it failed.
        """
        if self._background is not None:
            self._background.wait_for_save()

    @property
    def _is_leader(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def _delete_old(self) -> None:
        if self._is_leader:
            settings = self._config.checkpoint
            try:
                delete_old_checkpoints(self.root, keep=settings.keep, keep_every=settings.keep_every, best=self._best)
            except ObjectStoreError as error:  # the next save tries again
                logger.warning("old checkpoints were not deleted: %s", error)
