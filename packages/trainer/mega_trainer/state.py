"""What a run saves and goes on from: weights, optimizer, and a few numbers; all by canonical name, none by rank.

There is no generator state to save: every random draw is a function of (seed, what it is for).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mega_ckpt.adapter import check_base
from mega_ckpt.folders import forget_after, newest_until
from mega_ckpt.pieces import Sharded, boxes_of, merge
from mega_ckpt.source import Source, load_weights
from mega_ckpt.store import AsyncSaver, Checkpoint, Place, latest, load, place, retain, save, sweep
from mega_common.errors import CheckpointError, NumbersError
from mega_common.log import logger
from mega_common.model_config import ModelConfig
from mega_common.remote import RemoteError
from mega_data.order.resumed import resumed
from mega_trainer.comm import Group
from mega_trainer.config import RunConfig
from mega_trainer.job.best import Best
from mega_trainer.job.guard import Guard
from mega_trainer.job.memory import Copy, Memory
from mega_trainer.job.resume import check_resume
from mega_trainer.job.rollback import LeftOut, RollBack
from mega_trainer.model.decoder import Decoder
from mega_trainer.optim.zero import Optimizer
from mega_trainer.parallel.param import info_of, kept_of, local_of, packed_of, trains
from mega_trainer.parallel.shared import copies, share_of_copies
from mega_trainer.precision import LossScale
from mega_trainer.step import StepResult


@dataclass
class TrainState:
    """Everything that changes while training, on this rank.

    Attributes:
        step: optimizer steps done, skipped ones included.
        consumed_samples: samples read, over all ranks: the position in the data.
        loss_scale: in fp16.
        read: tells how many of the samples before one are of each data set; None without data.
        base: what an adapter is beside, as a checkpoint tells it.
        left_out: the samples that a rollback went past.
        rollbacks: how often in a row it was to the same checkpoint.
        best: the lowest validation loss.
    """

    config: RunConfig
    stages: Mapping[int, Decoder]
    optimizer: Optimizer
    guard: Guard
    step: int = 0
    consumed_samples: int = 0
    loss_scale: LossScale | None = None
    read: Callable[[int], Mapping[str, int]] | None = None
    base: Mapping[str, str] | None = None
    left_out: LeftOut = field(default_factory=LeftOut)
    rollbacks: int = 0
    best: Best = field(default_factory=Best)

    @property
    def position(self) -> int:
        """Of the next sample, in the order of the data."""
        return self.left_out.position(self.consumed_samples)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or validations have long had no lower loss."""
        settings = self.config.train
        return self.step >= settings.steps or (
            settings.early_stop is not None and self.best.since >= settings.early_stop
        )

    def advance(self, result: StepResult) -> None:
        """Count a finished step, and let the guard judge its numbers.

        Raises:
            NumbersError: when the run's policy says stop.
            RollBack: when it says so.
        """
        size = self.config.batch.at(self.consumed_samples)
        samples = self.left_out.told(self.consumed_samples, size)
        self.step += 1
        self.consumed_samples += size
        self.guard.check(self.step, result, samples)

    def roll_back(self, back: RollBack, world: Group) -> None:
        """Return to a checkpoint before a bad step, and go past all samples since then. Later checkpoints are deleted.

        Raises:
            NumbersError: when there is none, or it has been returned to `train.max_skips` times in a row.
        """
        settings, root, position = self.config.train, self.config.checkpoints, self.position
        found = newest_until(root, back.step - settings.rollback_steps)
        if found is None:
            wanted = f"no checkpoint in {root} is {settings.rollback_steps} step(s) older (train.rollback_steps)"
            raise NumbersError(f"{back.message}; {wanted}", hint="checkpoint.every saves while a run goes on")
        before, at = self.left_out, self.consumed_samples
        self.restore(found, world.handle)
        again = bool(before.ranges) and before.ranges[-1][0] == self.consumed_samples
        self.rollbacks = self.rollbacks + 1 if again else 1
        if self.rollbacks > settings.max_skips:
            message = f"{back.message}; going back to step {self.step} did not help {settings.max_skips} times in a row"
            raise NumbersError(message, hint="lower optimizer.lr, or go further back: train.rollback_steps")
        self.left_out = self.left_out.to(position, self.consumed_samples)
        logger.warning(
            "%s\n  back to step %d; left out: %s", back.message, self.step,
            f"samples {before.position(self.consumed_samples)} to {before.position(at) - 1}",
        )  # fmt: skip
        if world.rank == 0:
            forget_after(root, self.step)

    def tensors(self) -> dict[str, Sharded]:
        """All tensors of a checkpoint as this rank's boxes, views of what training uses."""
        self.optimizer.settle()
        weights = weights_of(self.stages, prefix="weights/", computed=True, moving=self.config.lora is not None)
        return weights | self.optimizer.tensors()

    def to_save(self) -> dict[str, Sharded]:
        """Of these, what this rank brings to a checkpoint: a share of what several ranks hold alike."""
        self.optimizer.settle()
        weights = weights_of(
            self.stages, prefix="weights/", computed=True, to_save=True, moving=self.config.lora is not None
        )
        return weights | self.optimizer.tensors(to_save=True)

    def numbers(self) -> dict[str, Any]:
        """What a checkpoint says beside the tensors."""
        return {
            "consumed_samples": self.consumed_samples,
            "left_out": [list(each) for each in self.left_out.ranges],
            "read": self.read and self.read(self.position),
            "optimizer_steps": self.optimizer.steps,
            "loss_average": self.guard.average,
            "loss_seen": self.guard.seen,
            "best": asdict(self.best),
            "loss_scale": self.loss_scale and [self.loss_scale.value, self.loss_scale.good_steps],
            "settings": self.config.model_dump(mode="json", by_alias=True),
            **({} if self.base is None else {"base": dict(self.base)}),
        }

    def restore(self, folder: Place, group: dist.ProcessGroup | None) -> list[str]:
        """Go on from a checkpoint, in whatever layout it was saved; returns the settings that differ.

        Raises:
            ConfigError: when it is of another model, or the learning rate would jump.
            CheckpointError: when it is not a complete checkpoint.
        """
        saved = Checkpoint.open(folder)
        if "settings" not in saved.state:
            raise CheckpointError(
                f"{folder}: has weights alone, and nothing that a run goes on from",
                hint=f"init_from={folder} starts from its weights, in another output folder and without checkpoint.load",
            )
        lines = check_resume(saved.state, saved.step, self.config, str(folder))
        if self.base is not None:
            check_base(saved.state.get("base"), self.base, str(folder))
        wanted = self.tensors()
        if not saved.keys("optimizer/main/"):  # saved in full precision: weights are the main ones
            wanted = {key: value for key, value in wanted.items() if not key.startswith("optimizer/main/")}
        if not saved.keys("optimizer/ema/"):
            wanted = {key: value for key, value in wanted.items() if not key.startswith("optimizer/ema/")}
        load(folder, wanted, group=group)
        self._take(saved.step, saved.state, wanted)
        return lines

    def restore_copy(self, copy: Copy) -> None:
        """Go on from this rank's copy in host memory."""
        wanted = self.tensors()
        copy.fill(wanted)
        self._take(copy.step, copy.state, wanted)

    def _take(self, step: int, state: Mapping[str, Any], loaded: Mapping[str, Sharded]) -> None:
        """What goes with tensors that are loaded."""
        if any(key.startswith("optimizer/main/") for key in loaded):
            self.optimizer.use_main()
        else:
            self.optimizer.reload_main()
        if not any(key.startswith("optimizer/ema/") for key in loaded):
            self.optimizer.begin_average()
        self.best = Best(**state.get("best", {}))
        self.step = step
        self.consumed_samples = state["consumed_samples"]
        self.left_out = LeftOut.of(state)
        self.optimizer.steps = state["optimizer_steps"]
        self.guard.average, self.guard.seen = state["loss_average"], state["loss_seen"]
        if self.loss_scale is not None and state.get("loss_scale"):
            self.loss_scale.value, self.loss_scale.good_steps = state["loss_scale"]


def weights_of(
    stages: Mapping[int, Decoder],
    *,
    prefix: str = "",
    computed: bool = False,
    to_save: bool = False,
    moving: bool = False,
    packed: bool = True,
) -> dict[str, Sharded]:
    """The weights of these stages by canonical name, as boxes that are views of the parameters.

    With `computed` they are what the model computes with, which under ZeRO-3 is a rounded copy of what it keeps. Those
    that no gradient moves are always as they are kept. With `to_save` they are this rank's share of what several hold, with
    `moving` those alone that are trained. Of weights that are kept in few bits they are copies, in full; none without `packed`.
    """
    parts = []
    for stage in stages.values():
        alike: dict[tuple[Group, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in filter(trains, stage.parameters()) if moving else stage.parameters():
            if not packed and packed_of(parameter) is not None:
                continue
            groups = copies(info_of(parameter), sharded=isinstance(parameter, DTensor)) if to_save else ()
            alike[groups].append(parameter)
        for groups, parameters in alike.items():
            held = ((_values_of(parameter), info_of(parameter).pieces) for parameter in parameters)
            boxes = boxes_of((t.to(stage.dtype) if computed else t, pieces) for t, pieces in held)
            parts.append(share_of_copies(boxes, groups))
        if not moving:
            parts.append(
                share_of_copies(boxes_of(kept_of(stage)), (stage.groups.tp, stage.groups.dp_cp) if to_save else ())
            )
    return {prefix + name: held for name, held in merge(parts).items()}


def _values_of(parameter: nn.Parameter) -> Tensor:
    packed = packed_of(parameter)
    return local_of(parameter) if packed is None else packed.values()


def load_stages(
    source: Source, stages: Mapping[int, Decoder], wanted: Callable[[str], bool] = lambda name: True
) -> None:
    """Fill the weights of these stages whose canonical names are `wanted`, which all are that are kept in few bits.

    Of those one parameter at a time is there in full.

    Raises:
        CheckpointError: when the source lacks a tensor or has it in another shape.
    """
    held = weights_of(stages, packed=False)
    load_weights(source, {name: boxes for name, boxes in held.items() if wanted(name)})
    for parameter in (each for stage in stages.values() for each in stage.parameters()):
        packed = packed_of(parameter)
        if packed is not None:
            with packed.written() as values:
                load_weights(source, boxes_of([(values, info_of(parameter).pieces)]))


class Saver:
    """Saves a run's checkpoints where they are kept, in the background when asked, and keeps what is to be kept.

    Leaving the `with` block waits for a save under way; its errors are raised there, or by `wait`.
    """

    def __init__(self, config: RunConfig, provenance: Mapping[str, Any] | None = None) -> None:
        self.root, self._config, self._provenance = config.checkpoints, config, provenance
        self._best: int | None = None
        self._background = AsyncSaver() if config.checkpoint.async_ else None
        if self._leads:
            sweep(self.root)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *error: object) -> None:
        if self._background is not None:
            self._background.__exit__(*error)
        self._retain()

    def save(self, state: TrainState) -> None:
        """Save `state`, unless none is to be saved; training may go on as soon as this returns."""
        if not self._config.checkpoint.save:
            return
        write = save if self._background is None else self._background.start
        assets = Path(self._config.output) / "assets"
        write(
            self.root,
            state.step,
            state.to_save(),
            model=self._config.model,
            state=state.numbers(),
            assets=assets if assets.exists() else None,
            provenance=self._provenance,
        )
        self._best = state.best.step if self._config.checkpoint.best else None
        self._retain()

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed, as this rank knows by now; `wait` raises its error."""
        return self._background is not None and self._background.failed

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: the same on every rank, when it failed.
        """
        if self._background is not None:
            self._background.wait()

    @property
    def _leads(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def _retain(self) -> None:
        if self._leads:
            settings = self._config.checkpoint
            try:
                retain(self.root, keep=settings.keep, keep_every=settings.keep_every, best=self._best)
            except RemoteError as error:  # the next save's retention does it too
                logger.warning("old checkpoints are not removed: %s", error)


def continued(config: RunConfig, saved: Mapping[str, Any]) -> RunConfig:
    """The configuration of a run with what it keeps of the one that it goes on with, as that one's state tells, empty
    without one: the order of its data and how far each data set was read.

    Raises:
        DataError: when data sets that the run names by a glob are not there.
    """
    if "data" in saved.get("settings", {}):
        position = LeftOut.of(saved).position(saved["consumed_samples"])
        data = resumed(config.data, saved["settings"]["data"], position, saved.get("read"))
    else:
        data = config.data.model_copy(update={"order": config.data.sample_order, "begun": None})
    return config.model_copy(update={"data": data})


def with_epochs(config: RunConfig, samples: float) -> RunConfig:
    """The configuration with the steps of its epochs, where it counts in these; one epoch has so many `samples`.

    Raises:
        ConfigError: when other settings do not fit so many steps.
    """
    if config.train.epochs is None:
        return config
    steps = max(1, config.batch.steps(math.ceil(config.train.epochs * samples)))
    raw = config.model_dump(mode="json", by_alias=True)
    logger.info("%g epoch(s) of %d samples are %d steps", config.train.epochs, samples, steps)
    return RunConfig.parse(
        {**raw, "train": {**raw["train"], "steps": steps}}, source=f"train.epochs = {config.train.epochs:g}"
    )


def state_of(start: Place | Copy | None) -> Mapping[str, Any]:
    """What is saved beside the tensors; nothing of a run that begins."""
    if isinstance(start, Copy):
        return start.state
    return {} if start is None else Checkpoint.open(start).state


def newer_copy(config: RunConfig, checkpoint: Place | None, memory: Memory | None) -> Copy | Place | None:
    """What a run goes on from where copies in memory are of a later step than the checkpoint: as many ranks with the same
    settings from these, others from a checkpoint that is made of them.
    """
    found = None if memory is None else memory.newest()
    if (
        memory is None
        or found is None
        or found.step <= (-1 if checkpoint is None else Checkpoint.open(checkpoint).step)
    ):
        return None
    logger.info("going on from the copies in memory, of step %d on %d rank(s)", found.step, found.ranks)
    if found.ranks == memory.ranks and _as_saved(config, found.state):
        return memory.copy(found)
    assets = Path(config.output) / "assets"
    model = ModelConfig.parse(found.state["settings"]["model"])
    made = save(
        config.checkpoints, found.step, memory.shares(found), model=model, state=found.state,
        assets=assets if assets.exists() else None,
    )  # fmt: skip
    memory.clear()
    return made


def _as_saved(config: RunConfig, state: Mapping[str, Any]) -> bool:
    """Whether a run that goes on from that state has the settings it was saved with."""
    settings = continued(config, state).model_dump(mode="json", by_alias=True)
    if config.train.epochs is not None:  # which are made steps of when the data is open
        settings["train"]["steps"] = state["settings"]["train"]["steps"]
    return bool(settings == state["settings"])


def starting_point(config: RunConfig) -> Place | None:
    """The checkpoint to go on from: the one asked for, or the newest of this run, or none.

    Once a run that began from another's checkpoint has saved one of its own, that is the newest: the same command resumes.
    A run that is not to resume has none of its own (`run_folder`).

    Raises:
        CheckpointError: when one was asked for and is not there, or is one of this run's own and not the newest.
    """
    newest = latest(config.checkpoints)
    if config.checkpoint.load is not None:
        asked = place(config.checkpoint.load)
        found = latest(asked) or latest(asked / "checkpoints") if not (asked / "manifest.json").exists() else asked
        if found is None:
            raise CheckpointError(
                f"checkpoint.load = {config.checkpoint.load!r}: no complete checkpoint there",
                hint="give a folder such as runs/name/checkpoints/step-00000100, or leave checkpoint.load out",
            )
        if newest is None or Checkpoint.open(newest).step <= Checkpoint.open(found).step:
            return found
        if _absolute(found.parent) == _absolute(config.checkpoints):
            raise CheckpointError(
                f"{config.checkpoints} holds later checkpoints ({newest.name}) than the one to go on from, {found.name}",
                hint="set another output folder for the new branch",
            )
    if newest is not None:
        logger.info("going on from %s", newest)
    return newest


def _absolute(path: Place) -> Place:
    return path.resolve() if isinstance(path, Path) else path
