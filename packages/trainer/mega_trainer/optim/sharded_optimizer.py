"""ZeRO optimizer over this rank's weight shards: gradient norm, update, all-gather (arXiv:1910.02054).

In low precision every shard has fp32 main weights; otherwise the weights are updated in place. An `UpdateRule` updates
the shards: AdamW for all, or Muon for hidden matrices and AdamW for the rest, or an optimizer of an extension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mega_ckpt.tensor_pieces import ShardedTensor
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.optim.gradient_clipping import compute_grad_norm
from mega_trainer.optim.optimizer_slots import (
    OptimizerOffloadTransfers,
    OptimizerSlot,
    OtherStateRule,
    UpdateRule,
    collect_slot_tensors,
    collect_slot_tensors_to_save,
)
from mega_trainer.parallel.parameter_shards import ShardedStage


class ShardedOptimizer:
    """Optimizer of the weights of this rank's pipeline stages, with state sharded over data ranks (ZeRO).

    Args:
        stages: all stages of this rank.
        adamw: makes the update rule of ordinary slots, AdamW or an extension's.
        separate: makes the update rule of slots in `separate` buffers; None: all slots are ordinary.
        model_groups: the groups whose ranks hold different layers, for the norm.
        offload: keep main weights and the rules' state in host memory (arXiv:2101.06840).
        leaves: calls the fusible functions of the norm.
        ema: decay of a moving average of the main weights; None: no average.
    """

    def __init__(
        self,
        stages: Sequence[ShardedStage],
        *,
        adamw: Callable[[list[OptimizerSlot]], UpdateRule],
        separate: Callable[[list[OptimizerSlot]], UpdateRule] | None = None,
        model_groups: Sequence[CommGroup] = (),
        offload: bool = False,
        leaves: FusibleFunctionCompiler | None = None,
        ema: float | None = None,
    ) -> None:
        self._leaves = leaves or FusibleFunctionCompiler()
        self.stages, self.model_groups = list(stages), list(model_groups)
        self.buffers = [buffer for stage in stages for buffer in stage.buffers]
        self.slots = [
            OptimizerSlot.from_shard(buffer, shard, offload=offload)
            for buffer in self.buffers
            for shard in buffer.shards
            if shard.weights.numel() or buffer.kind.separate  # whose update is a collective call
        ]
        self._decay = ema
        self._averages = [] if ema is None else [slot.main.clone() for slot in self.slots]
        self._transfers = OptimizerOffloadTransfers(self.slots[0].shard.weights.device if offload else None)
        self._adamw = adamw([slot for slot in self.slots if separate is None or not slot.kind.separate])
        self._rules: list[UpdateRule] = [self._adamw]
        if separate is not None:
            self._rules.append(separate([slot for slot in self.slots if slot.kind.separate]))

    @property
    def _other_state_rules(self) -> list[OtherStateRule]:
        return [rule for rule in self._rules if isinstance(rule, OtherStateRule)]

    def compute_grad_norm(self) -> Tensor:
        """Return the L2 norm of the gradients over the whole model, not only this rank's shards; fp64 scalar."""
        return compute_grad_norm(self.buffers, self.model_groups, self._leaves)

    def apply_update(self, lr: float, scale: float, decoupled_lr: float | None = None) -> None:
        """Multiply the gradients by `scale` in place, update the weights, and start to all-gather them.
        `wait_for_params` waits for the weights.

        `decoupled_lr` is the rate of the input embedding and the output layer, if they have separate param groups.
        """
        self.wait_for_params()
        if scale != 1.0:
            torch._foreach_mul_([slot.shard.grads for slot in self.slots], scale)
        self._transfers.start_gradient_copies(slot for rule in self._rules for slot in rule.slots)
        for rule in self._rules:
            rule.update_slots(self._transfers, lr, decoupled_lr)
        if self._decay is not None:
            torch._foreach_lerp_(self._averages, [slot.main for slot in self.slots], 1 - self._decay)
        self._transfers.wait_for_weights()
        for stage in self.stages:
            stage.all_gather_params()

    def wait_for_params(self) -> None:
        """Wait until the last update's weights are gathered, before any access to them other than a forward."""
        for stage in self.stages:
            stage.wait_for_params()

    def persistent_tensors(self) -> Iterator[Tensor]:
        """Yield all flat tensors of the model and the optimizer that are kept between steps.
        They are weights, gradients, main weights, moving averages and optimizer state.
        """
        for slot in self.slots:
            yield from (slot.shard.weights.detach(), slot.shard.grads, slot.main, slot.grads)
        yield from self._averages
        for rule in self._rules:
            if isinstance(rule, OtherStateRule):
                yield from rule.other_tensors()
            else:
                yield from (tensor for pairs in rule.state_tensors().values() for _, tensor in pairs)

    def gradients_by_name(self) -> dict[str, ShardedTensor]:
        """Return views of the reduced gradients by canonical parameter name, scaled once `apply_update` has run."""
        return collect_slot_tensors((slot, slot.shard.grads) for slot in self.slots)

    @property
    def update_count(self) -> int:
        """Number of optimizer updates so far."""
        return self._adamw.update_count

    @update_count.setter
    def update_count(self, value: int) -> None:
        """Set the number of updates so far of every update rule."""
        for rule in self._rules:
            rule.update_count = value

    def checkpoint_tensors(self, *, to_save: bool = False) -> dict[str, ShardedTensor]:
        """Return the optimizer state by checkpoint name, to be saved, or to be loaded into.
        The tensors are views, except for moments in 8 bits; see `pack_loaded_state`. With `to_save`, only this rank's share of
        replicated tensors is included.

        Names are `optimizer/<kind>/<name>` for each kind of the rules' state, `optimizer/main/<name>` for main weights
        that are more precise than the model's, and `optimizer/ema/<name>` for averages.
        """
        boxes = collect_slot_tensors_to_save if to_save else collect_slot_tensors
        others = (rule.other_checkpoint_tensors(to_save=to_save) for rule in self._other_state_rules)
        return {
            f"optimizer/{kind}/{name}": tensor
            for kind, pairs in self.state_tensors()
            for name, tensor in boxes(pairs).items()
        } | {f"optimizer/{name}": tensor for tensors in others for name, tensor in tensors.items()}

    def state_tensors(self) -> list[tuple[str, list[tuple[OptimizerSlot, Tensor]]]]:
        """Return the flat tensors of the optimizer state by kind, `main` (main weights) last.
        Each kind has the tensor of each parameter shard (slot), at least as long as the shard.
        """
        kinds = [kind for rule in self._rules for kind in rule.state_tensors().items()]
        if self._averages:
            kinds.append(("ema", list(zip(self.slots, self._averages, strict=True))))
        return [*kinds, ("main", [(slot, slot.main) for slot in self.slots if slot.has_higher_precision])]

    def initialize_weight_ema(self) -> None:
        """Set the moving average of the weights (EMA) to the main weights, if the run has one."""
        for slot, average in zip(self.slots, self._averages, strict=bool(self._averages)):
            average.copy_(slot.main)

    def load_main_from_model(self) -> None:
        """Set the main weights to the model's weights, after loading a checkpoint without main weights."""
        for slot in self.slots:
            slot.load_main_from_model()

    def pack_loaded_state(self) -> None:
        """Take over state that was loaded into `checkpoint_tensors`, where these are copies: moments in 8 bits."""
        for rule in self._other_state_rules:
            rule.pack_loaded_state()

    def copy_main_to_model(self) -> None:
        """Copy main weights, loaded from a checkpoint, to the model; under ZeRO-3 they are the model's only weights."""
        for slot in self.slots:
            slot.copy_main_to_model()
