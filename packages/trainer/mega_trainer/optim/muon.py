"""Muon: the update is the approximately nearest orthogonal matrix of the momentum matrix.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024), and "Muon is scalable for LLM training"
(arXiv:2502.16982) for the scale of the update. Muon is for hidden matrices, each canonical matrix separately: query, key,
value, gate and up projections are orthogonalised one by one although they are fused in memory.

The orthogonal matrix depends on all elements of the momentum, but a rank owns only a slice of it. So the momentum of each
bucket, or under ZeRO-3 of each parameter, is all-gathered over the data ranks (fp32). Each matrix is assigned to one of
them, which gathers the parts of its tensor ranks. The updates are returned by a sum in which exactly one rank contributes
each element, the others zeros. Per step each element is in one all-gather and one reduce-scatter over the data ranks
(ZeRO-0: one all-reduce), and one all-reduce over the tensor ranks. Adding zeros is exact, so the bits do not depend on the
ZeRO level.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.distributed.comm import CommGroup, all_gather_into, all_reduce, reduce_scatter_into
from mega_trainer.optim.optimizer_slots import OptimizerOffloadTransfers, OptimizerSlot
from mega_trainer.parallel.parameter_info import ParameterInfo, get_parameter_info, is_weight_matrix
from mega_trainer.parallel.parameter_shards import GatheredShardLayout

# f(x) = a x + b x^3 + c x^5 with the steepest slope at 0 that maps [0, 1.2] into itself. It does not converge to 1: five
# rounds leave singular values between about 0.7 and 1.2, which trains as well as exact ones.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrix: Tensor, *, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return approximately U V^T of matrices U S V^T [.., M, N], by Newton-Schulz iterations.
    Every singular value that is not tiny comes near 1.

    The iteration is X <- a X + b (X X^T) X + c (X X^T)^2 X, on the matrix divided by its Frobenius norm.

    Args:
        matrix: [.., M, N]; leading axes are a batch of matrices.
        steps: rounds; each multiplies small singular values by about 3.4.
        dtype: precision of the computation.

    Returns:
        [.., M, N] in `matrix`'s dtype; zeros for a matrix of zeros.
    """
    x: Tensor = matrix.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT  # makes X X^T a square of the shorter side
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


def muon_update_scale(rows: int, columns: int) -> float:
    """Return Muon's factor 0.2 sqrt(max(rows, columns)) on an orthogonal update.
    The factor gives the update the RMS of AdamW's updates, 0.2.

    Muon can then use AdamW's learning rate and weight decay (arXiv:2502.16982, equation 4).
    """
    return 0.2 * math.sqrt(max(rows, columns))


def is_hidden_matrix(parameter: nn.Parameter) -> bool:
    """Return whether Muon or SOAP, where one is the optimizer, updates a parameter rather than AdamW.
    It is True for matrices and stacks of matrices in layers; False for embeddings, tables, heads, convolutions, norms and
    biases.
    """
    names = [piece.name for piece in get_parameter_info(parameter).gathered_pieces]
    inside = all(
        name.startswith("model.layers.") and not re.search(r"\.(conv1d|relative_bias)\.", name) for name in names
    )
    return is_weight_matrix(parameter) and bool(names) and inside


class MatrixUpdateRule:
    """Base of optimizers that compute the update of each hidden matrix as a whole, on one of the data ranks.
    Subclasses define the input of an update, such as the momentum, and the update.

    Args:
        slots: slots to update: slices of buckets of hidden matrices, or rows of these. Every data rank has the same number,
            some perhaps without elements.
        tensor_group: ranks that split a matrix, unless its `ParameterInfo` has its own `split` group.
        lr_factor: learning rate as a multiple of the one passed to `update_slots`.
        weight_decay: decoupled weight decay, as in AdamW.
    """

    def __init__(
        self, slots: Sequence[OptimizerSlot], *, tensor_group: CommGroup, lr_factor: float, weight_decay: float
    ) -> None:
        self.slots, self.tensor_group, self.update_count = list(slots), tensor_group, 0
        self.lr_factor, self.weight_decay = lr_factor, weight_decay

    def update_slots(self, transfers: OptimizerOffloadTransfers, lr: float, decoupled_lr: float | None = None) -> None:
        """Update the main weights of all parameter shards (slots) at learning rate `lr`.
        Hidden matrices have no decoupled learning rate.
        """
        self.update_count += 1
        for number, slot in enumerate(self.slots):
            with transfers.overlap_copies_with_update([slot]):
                self._update_slot(number, slot, lr * self.lr_factor * slot.kind.lr_factor)

    def _update_slot(self, number: int, slot: OptimizerSlot, lr: float) -> None:
        direction = self._update_input(number, slot)
        own = direction[: slot.shard.weights.numel()].to(slot.shard.weights.device)
        update = self._gather_and_update(number, slot, own).to(slot.main.device)
        slot.main.mul_(1 - lr * self.weight_decay).add_(_pad_to_length(update, len(slot.main)), alpha=-lr)

    def _update_input(self, number: int, slot: OptimizerSlot) -> Tensor:
        """Return the tensor of slot `number` from which the updates of its matrices are computed: the gradient."""
        return slot.grads

    def _compute_matrix_update(self, matrix_index: tuple[int, int], matrix: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the update of a whole matrix [.., M, N] from the same matrix of `_update_input`.
        `matrix_index` is the number of the slot and the index of the matrix in it, `dtype` that of the model.
        """
        raise NotImplementedError

    def state_tensors(self) -> dict[str, list[tuple[OptimizerSlot, Tensor]]]:
        """Return no tensors: the base rule has no state with one tensor for each parameter shard (slot)."""
        return {}

    def _is_own_matrix(self, slot: OptimizerSlot, matrix_index: tuple[int, int]) -> bool:
        """Return whether this data rank computes the update of a matrix, the first of them another one in each slot."""
        return sum(matrix_index) % slot.kind.data.size == slot.kind.data.rank

    def _gather_and_update(self, number: int, slot: OptimizerSlot, direction: Tensor) -> Tensor:
        """Return the update of the shard of slot `number`, from the shards of all n data ranks; each computes every
        n-th matrix.
        """
        data, sharded, gathered = slot.kind.data, slot.sharded, slot.shard.gathered
        own = _pad_to_length(direction, gathered.rank_elements)
        whole = own.new_empty(own.numel() * data.size) if sharded else own
        if sharded:
            all_gather_into(whole, own, data)
        result = torch.zeros_like(whole)
        low = torch.bfloat16 if slot.kind.dtype == torch.float16 else slot.kind.dtype
        for index, (info, piece, source, target) in enumerate(iterate_matrices(gathered, whole, result)):
            if self._is_own_matrix(slot, (number, index)):
                target.copy_(self._update_own_part((number, index), info, piece, source, low))
        if not sharded:
            all_reduce(result, data)
            return result
        update = torch.empty_like(own)
        reduce_scatter_into(update, result, data)
        return update[: len(direction)]

    def _update_own_part(
        self, matrix_index: tuple[int, int], info: ParameterInfo, piece: TensorPiece, part: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return this rank's part of the update of a canonical matrix, from its part of the input."""
        rows, columns = piece.global_shape[-2:]
        (top, left), (height, width) = piece.global_offset[-2:], piece.shape[-2:]
        matrix = part
        if (height, width) != (rows, columns):
            matrix = part.new_zeros(*part.shape[:-2], rows, columns)
            if all(group.rank == 0 for group in info.replicas):
                matrix[..., top : top + height, left : left + width] = part
            all_reduce(matrix, info.split or self.tensor_group)
        update = self._compute_matrix_update(matrix_index, matrix, dtype)
        return update[..., top : top + height, left : left + width]


class MuonUpdateRule(MatrixUpdateRule):
    """Muon update of main weights, which are held in one slot per parameter shard.

    Args:
        slots, tensor_group, lr_factor, weight_decay: as for `MatrixUpdateRule`.
        momentum, nesterov: momentum of the gradient, as in torch's SGD.
        rounds: rounds of the Newton-Schulz iteration, computed in the model's precision (bf16 for fp16).
    """

    def __init__(
        self,
        slots: Sequence[OptimizerSlot],
        *,
        tensor_group: CommGroup,
        momentum: float,
        nesterov: bool,
        lr_factor: float,
        weight_decay: float,
        rounds: int,
    ) -> None:
        super().__init__(slots, tensor_group=tensor_group, lr_factor=lr_factor, weight_decay=weight_decay)
        self.momentum, self.nesterov, self.rounds = momentum, nesterov, rounds
        self.momenta = [torch.zeros_like(slot.main) for slot in slots]

    def _update_input(self, number: int, slot: OptimizerSlot) -> Tensor:
        momentum = self.momenta[number].mul_(self.momentum).add_(slot.grads)
        return slot.grads.add(momentum, alpha=self.momentum) if self.nesterov else momentum

    def _compute_matrix_update(self, matrix_index: tuple[int, int], matrix: Tensor, dtype: torch.dtype) -> Tensor:
        return orthogonalize(matrix, steps=self.rounds, dtype=dtype) * muon_update_scale(*matrix.shape[-2:])

    def state_tensors(self) -> dict[str, list[tuple[OptimizerSlot, Tensor]]]:
        """Return Muon's momentum, {name: one tensor for each parameter shard (slot)}."""
        return {"muon_momentum": list(zip(self.slots, self.momenta, strict=True))}


def _pad_to_length(tensor: Tensor, length: int) -> Tensor:
    """Return a vector with zeros appended up to `length` elements; the vector itself if it has as many (`pad` copies)."""
    return tensor if len(tensor) == length else pad(tensor, (0, length - len(tensor)))


def iterate_matrices(
    gathered: GatheredShardLayout, source: Tensor, target: Tensor
) -> Iterator[tuple[ParameterInfo, TensorPiece, Tensor, Tensor]]:
    """Yield each canonical matrix of gathered shards, with views of this rank's part of it in two flat tensors.
    `source` and `target` have the length of all shards together; the result is (info, piece, view of `source`, view of
    `target`).
    """
    for parameter, span in gathered.param_slices.items():
        info = get_parameter_info(parameter)
        for piece in info.gathered_pieces:
            part, out = (piece.local_view(tensor[span].view(parameter.shape)) for tensor in (source, target))
            yield info, piece, part, out
