"""Initial weights and optimizer state of a run: fresh, another model's weights, a checkpoint or a memory copy."""

from __future__ import annotations

from mega_ckpt.canonical_tensors import SCORE
from mega_ckpt.checkpoint_folders import latest_checkpoint
from mega_ckpt.lora_adapter import check_adapter_start, fingerprint_base
from mega_ckpt.lora_tensors import adapted_modules
from mega_ckpt.source import (
    WeightSource,
    init_dora_magnitudes,
    load_adapter_weights,
    load_with_adapter,
    warn_of_unsupported_parts,
)
from mega_ckpt.store import Location
from mega_common.errors import ConfigError
from mega_common.lora_config import is_adapter_tensor
from mega_common.progress_logging import logger
from mega_data.tokenizer import Tokenizer
from mega_trainer.data.data_check import open_initial_weights
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.job.memory_checkpoint import MemoryCopy
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.run.train_state import TrainState, collect_weights, load_stage_weights


def initialize_state(
    state: TrainState, start: Location | MemoryCopy | None, world: CommGroup, tokenizer: Tokenizer | None
) -> None:
    """Load the weights and the optimizer state that a run starts from into `state`: from checkpoint or memory copy
    `start`, from `init_from`, or random ones.

    Args:
        start: the checkpoint or memory copy that the run resumes from; None for a new run, which begins with the
            weights of `init_from`, or with random ones.
    """
    config = state.config
    if start is None:
        for stage in state.stages.values():
            initialize_weights(stage, config.train.seed)
    if config.init_from is not None and (start is None or config.lora is not None):
        _load_initial_weights(state, config.init_from, world, tokenizer, fresh=start is None)
    if isinstance(start, MemoryCopy):
        state.restore_memory_copy(start)
    elif start is not None:
        for line in state.restore_checkpoint(start, world.process_group):
            logger.info("  changed since it was saved: %s", line)
    else:
        state.optimizer.load_main_from_model()
        state.optimizer.start_weight_average()


def has_steps_left(state: TrainState, start: Location | MemoryCopy | None) -> bool:
    """Return whether a run has steps to do after its state was initialised from `start`.

    Raises:
        ConfigError: for a new run from another run's checkpoint that has no steps left.
    """
    if not state.is_finished:
        return True
    if latest_checkpoint(state.config.checkpoint_root) is None:
        raise ConfigError(
            f"train.steps = {state.config.train.steps} must be larger than the step of {start}, which is {state.step}",
            hint="train.steps counts from the start of the run that is resumed",
        )
    logger.info("finished at step %d; nothing is changed; a larger train.steps continues the run", state.step)
    return False


def _load_initial_weights(
    state: TrainState, path: str, world: CommGroup, tokenizer: Tokenizer | None, *, fresh: bool
) -> None:
    """Load the weights of `init_from`: for a new run, or at every start for the frozen base of an adapter. A `fresh`
    run also loads its initial adapter.
    """
    original, source = open_initial_weights(state.config, path, tokenizer)
    if world.rank == 0:
        warn_of_unsupported_parts(source, training=True)
    missing_head = {SCORE} - {*source.tensor_names()}  # a language model has no classification head
    load_stage_weights(source, state.stages, lambda name: not is_adapter_tensor(name) and name not in missing_head)
    logger.info("starting from the weights of %s", path)
    if source is not original:
        logger.info("  rows of new tokens start as the mean of the other rows")
    lora = state.config.lora
    if lora is None:
        return
    state.adapter_base = fingerprint_base(path, source)
    if fresh:
        _load_initial_adapter(state, path, source)


def _load_initial_adapter(state: TrainState, base: str, source: WeightSource) -> None:
    """Load the adapter of `lora.init_from`; without one, initialise DoRA magnitudes from the base weights `source`."""
    lora, model = state.config.lora, state.config.model
    assert lora is not None
    modules, trained = adapted_modules(model, lora), collect_weights(state.stages, trainable_only=True)
    if lora.init_from is None:
        init_dora_magnitudes(source, modules, trained)
        return
    adapter = load_with_adapter(str(lora.init_from), base).adapter
    check_adapter_start(adapter, modules, state.config.is_trainable, str(lora.init_from))
    load_adapter_weights(adapter, trained)
    logger.info("starting from the adapter of %s", lora.init_from)
