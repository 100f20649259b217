"""AdamW with moments in 8 bits (arXiv:2110.02861), by the kernels of bitsandbytes on CPU and GPU.

A moment is a code of 8 bits for each element and an fp32 scale for each block of 256, so a weight has 2.03 bytes of moments
in place of 8. Blocks are cut from the slots of this rank, so their rounding depends on the layout. Checkpoints hold the
moments in fp32 under the names of AdamW: they resume in any layout, in the same one bit by bit, and as AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mega_ckpt.tensor_pieces import ShardedTensor
from mega_common.errors import ConfigError
from mega_trainer.distributed.device import to_host
from mega_trainer.optim.adamw import MOMENTS
from mega_trainer.optim.optimizer_slots import OptimizerOffloadTransfers, OptimizerSlot

BLOCK = 256  # elements with one scale, of the library's kernels


class EightBitMoment:
    """Moment of one slot in 8 bits: codes uint8 [n] and scales fp32 [n / 256], all zero at first.

    Args:
        library: the module `bitsandbytes.functional`.
        main: main weights [n] of the slot.
        signed: values are of either sign.
    """

    def __init__(self, library: Any, main: Tensor, *, signed: bool) -> None:
        self._library, self.values_by_code = library, library.create_dynamic_map(signed=signed).to(main.device)
        if signed:  # -0.99 in the library; with -1, values that were unpacked have the scale that they came from
            self.values_by_code[0] = -1.0
        zero = int(self.values_by_code.abs().argmin())
        self.codes = torch.full(main.shape, zero, dtype=torch.uint8, device=main.device)
        self.scales = torch.zeros(-(-len(main) // BLOCK), device=main.device)

    def unpack_values(self) -> Tensor:
        """Return the moment's values, fp32 [n] in host memory."""
        values: Tensor = self._library.dequantize_blockwise(
            self.codes, absmax=self.scales, code=self.values_by_code, blocksize=BLOCK
        )
        return to_host(values)

    def pack_values(self, values: Tensor) -> None:
        """Quantise values fp32 [n] in host memory to 8-bit codes and scales, exactly if they are from `unpack_values`.

        The library quantises by a table on a CPU, which does not round each value to the nearest one.
        """
        blocks = pad(values, (0, len(self.scales) * BLOCK - len(values))).view(-1, BLOCK)
        scales, by_code = blocks.abs().amax(1), to_host(self.values_by_code)
        shares = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).flatten()[: len(values)]
        self.codes.copy_(torch.bucketize(shares, (by_code[1:] + by_code[:-1]) / 2))
        self.scales.copy_(scales)


class AdamW8bitUpdateRule:
    """AdamW update, with moments in 8 bits, of main weights, which are held in one slot per parameter shard.

    Args:
        slots: slots to update, with fp32 main weights.
        betas, eps, weight_decay: as for `AdamWUpdateRule`.

    Raises:
        ConfigError: when bitsandbytes cannot be imported.
    """

    def __init__(
        self, slots: Sequence[OptimizerSlot], *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        try:
            library: Any = import_module("bitsandbytes.functional")
        except ImportError as error:
            raise ConfigError(
                f"optimizer.name = adamw8bit requires bitsandbytes, which cannot be imported ({error})",
                hint="pip install 'packages/trainer[adamw8bit]', or set optimizer.name=adamw",
            ) from error
        self.slots, self.update_count = list(slots), 0
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._moments = [
            tuple(EightBitMoment(library, slot.main, signed=moment == MOMENTS[0]) for moment in MOMENTS)
            for slot in slots
        ]
        self._unpacked: list[tuple[Tensor, ...]] = []

    @torch.no_grad()
    def update_slots(self, transfers: OptimizerOffloadTransfers, lr: float, decoupled_lr: float | None = None) -> None:
        """Update the main weights and moments of all shards (slots) at rate `lr`, or `decoupled_lr` if decoupled.
        Decoupled param groups are the embedding and the output layer.
        """
        self.update_count += 1
        for slot, (first, second) in zip(self.slots, self._moments, strict=True):
            rate = decoupled_lr if slot.kind.decoupled and decoupled_lr is not None else lr
            with transfers.overlap_copies_with_update([slot]):
                torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
                    "adam", slot.grads, slot.main, first.codes, second.codes, *self._betas, 0.0, 0.0, self._eps,
                    self.update_count, rate * slot.kind.lr_factor, first.values_by_code, second.values_by_code,
                    first.scales, second.scales, self._weight_decay if slot.kind.decay else 0.0, 1.0,
                )  # fmt: skip

    def state_tensors(self) -> dict[str, list[tuple[OptimizerSlot, Tensor]]]:
        """Return the two moments in fp32, in host memory, {name: one tensor for each parameter shard (slot)}.
        `pack_loaded_state` takes over values that are written into them.
        """
        self._unpacked = [tuple(moment.unpack_values() for moment in moments) for moments in self._moments]
        by_moment = zip(*self._unpacked, strict=True) if self.slots else ((), ())
        return {
            name: list(zip(self.slots, values, strict=True)) for name, values in zip(MOMENTS, by_moment, strict=True)
        }

    def other_tensors(self) -> Iterator[Tensor]:
        """Yield the codes and scales of all moments."""
        for moments in self._moments:
            for moment in moments:
                yield from (moment.codes, moment.scales)

    def other_checkpoint_tensors(self, *, to_save: bool) -> dict[str, ShardedTensor]:
        """Return no tensors, as `state_tensors` has all state."""
        return {}

    def pack_loaded_state(self) -> None:
        """Quantise the values that were loaded into the tensors of the last `state_tensors`."""
        for moments, values in zip(self._moments, self._unpacked, strict=bool(self._unpacked)):
            for moment, loaded in zip(moments, values, strict=True):
                moment.pack_values(loaded)
        self._unpacked = []
