"""SOAP (arXiv:2409.11321): Adam in the eigenbasis of Shampoo's preconditioners, for hidden matrices.

Of each canonical matrix with gradient G [M, N], one data rank keeps L, the moving average of G G^T, R, that of G^T G, their
eigenvectors U and V, and Adam's moments: m of G, and v of U^T G V. The update is U (m' / sqrt(v)) V^T with m' = U^T m V. Every
`frequency` updates U and V take a step of orthogonal iteration towards the eigenvectors of the present L and R. As in the
authors' code, the first step only starts the averages.

Gradients are gathered, and updates returned, as by Muon (`MatrixUpdateRule`). In checkpoints the state has the matrix's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox, TensorPiece, merge_sharded_tensors
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.optim.muon import MatrixUpdateRule, iterate_matrices
from mega_trainer.optim.optimizer_slots import OptimizerSlot
from mega_trainer.parallel.parameter_info import ParameterInfo


def separate_eigenvalues(gram: Tensor) -> Tensor:
    """Return symmetric matrices [.., N, N] with a falling diagonal added, of at most 1 % of the mean eigenvalue.

    L or R of a matrix that is not square lacks rank at first, and any basis of its kernel has eigenvectors. Which one is
    found would depend on rounding, and so on the layout.
    """
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None]
    ramp = torch.linspace(1, 0, gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return gram + torch.diag_embed(0.01 * mean * ramp)


class SoapMatrixState:
    """SOAP's state of one matrix or stack of matrices: moments, averaged gram matrices and their eigenvectors.

    Args:
        name: of the canonical tensor.
        shape: of the matrices on this rank, [.., M, N]: whole matrices.
        like: tensor with the dtype and device of the state.
        max_width: largest M or N of a side that is rotated; a larger side keeps its own basis.
    """

    def __init__(self, name: str, shape: Sequence[int], like: Tensor, max_width: int) -> None:
        self.name, (*stack, rows, columns) = name, shape
        self.exp_avg, self.exp_avg_sq = (like.new_zeros(*shape) for _ in range(2))
        self.left, self.left_basis = (like.new_zeros(*stack, rows, rows * (rows <= max_width)) for _ in range(2))
        self.right, self.right_basis = (
            like.new_zeros(*stack, columns, columns * (columns <= max_width)) for _ in range(2)
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state that have elements, by the names of their kinds in checkpoints."""
        names = ("exp_avg", "exp_avg_sq", "left", "left_basis", "right", "right_basis")
        return {f"soap_{name}": tensor for name in names if (tensor := getattr(self, name)).numel()}

    def compute_update(
        self, grad: Tensor, step: int, *, betas: tuple[float, float], eps: float, gram_beta: float, frequency: int
    ) -> Tensor:
        """Return the update of the matrices [.., M, N] from their gradient, zeros at `step` 1, and advance the state.

        Args:
            step: number of this update, from 1.
            betas, eps: as in Adam.
            gram_beta: decay of the averages L and R.
            frequency: updates between changes of the eigenvectors.
        """
        if step == 1:
            self._average_grams(grad, gram_beta)
            for gram, basis in ((self.left, self.left_basis), (self.right, self.right_basis)):
                if gram.numel():
                    basis.copy_(torch.linalg.eigh(separate_eigenvalues(gram)).eigenvectors.flip(-1))
            return torch.zeros_like(grad)
        count, (beta1, beta2) = step - 1, betas
        self.exp_avg.lerp_(grad, 1 - beta1)
        self.exp_avg_sq.lerp_(self._rotate(grad).square(), 1 - beta2)
        direction = self._rotate(self.exp_avg) / (self.exp_avg_sq.sqrt() + eps)
        update = self._rotate_back(direction) * (math.sqrt(1 - beta2**count) / (1 - beta1**count))
        self._average_grams(grad, gram_beta)
        if count % frequency == 0:
            self._refresh_bases()
        return update

    def _average_grams(self, grad: Tensor, beta: float) -> None:
        for gram, factor in ((self.left, grad), (self.right, grad.mT)):
            if gram.numel():
                gram.lerp_(factor @ factor.mT, 1 - beta)

    def _rotate(self, matrix: Tensor) -> Tensor:
        rows = self.left_basis.mT @ matrix if self.left.numel() else matrix
        return rows @ self.right_basis if self.right.numel() else rows

    def _rotate_back(self, matrix: Tensor) -> Tensor:
        rows = self.left_basis @ matrix if self.left.numel() else matrix
        return rows @ self.right_basis.mT if self.right.numel() else rows

    def _refresh_bases(self) -> None:
        """Take a step of orthogonal iteration; eigenvectors, and v with them, are put in order of their eigenvalues."""
        for gram, basis, axis in ((self.left, self.left_basis, -2), (self.right, self.right_basis, -1)):
            if not gram.numel():
                continue
            gram = separate_eigenvalues(gram)
            order = (basis * (gram @ basis)).sum(-2).argsort(-1, descending=True)
            columns = order.unsqueeze(-2).expand_as(basis)
            moved = order.unsqueeze(-1 if axis == -2 else -2).expand_as(self.exp_avg_sq)
            self.exp_avg_sq.copy_(self.exp_avg_sq.gather(axis, moved))
            basis.copy_(torch.linalg.qr(gram @ basis.gather(-1, columns)).Q)


class SoapUpdateRule(MatrixUpdateRule):
    """SOAP update of the main weights of hidden matrices.

    Args:
        slots, tensor_group, weight_decay: as for `MatrixUpdateRule`.
        betas, eps, gram_beta, frequency: as for `SoapMatrixState.compute_update`.
        max_width: as for `SoapMatrixState`.
    """

    def __init__(
        self,
        slots: Sequence[OptimizerSlot],
        *,
        tensor_group: CommGroup,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        gram_beta: float,
        frequency: int,
        max_width: int,
    ) -> None:
        super().__init__(slots, tensor_group=tensor_group, lr_factor=1.0, weight_decay=weight_decay)
        self._settings = {"betas": betas, "eps": eps, "gram_beta": gram_beta, "frequency": frequency}
        self._owned: dict[tuple[int, int], tuple[SoapMatrixState, ParameterInfo, TensorPiece]] = {}
        for number, slot in enumerate(slots):
            gathered, like = slot.shard.gathered, slot.main.new_empty(0, device=slot.shard.weights.device)
            ranks = slot.kind.data.size if slot.sharded else 1
            whole = torch.empty(gathered.rank_elements * ranks, device="meta")
            for index, (info, piece, part, _) in enumerate(iterate_matrices(gathered, whole, whole)):
                if self._is_own_matrix(slot, (number, index)):
                    shape = (*part.shape[:-2], *piece.global_shape[-2:])
                    state = SoapMatrixState(piece.name, shape, like, max_width)
                    self._owned[number, index] = state, info, piece

    def _compute_matrix_update(self, matrix_index: tuple[int, int], matrix: Tensor, dtype: torch.dtype) -> Tensor:
        state, *_ = self._owned[matrix_index]
        return state.compute_update(matrix, self.update_count, **self._settings)  # type: ignore[arg-type]

    def other_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the state of this rank's matrices."""
        for state, *_ in self._owned.values():
            yield from state.tensors().values()

    def other_checkpoint_tensors(self, *, to_save: bool) -> dict[str, ShardedTensor]:
        """Return the state of this rank's matrices, by kind and canonical name, as views.
        All tensor ranks of a matrix have its state; with `to_save` only the first of them returns it.
        """
        found = []
        for state, info, piece in self._owned.values():
            holders = ((info.split or self.tensor_group), *info.replicas)
            if to_save and any(group.rank for group in holders):
                continue
            for kind, tensor in state.tensors().items():
                shape = (*piece.global_shape[:-2], *tensor.shape[-2:])
                box = TensorBox((*piece.global_offset[:-2], 0, 0), tensor)
                found.append({f"{kind}/{state.name}": ShardedTensor(shape, [box])})
        return merge_sharded_tensors(found)

    def pack_loaded_state(self) -> None:
        """Do nothing, as the state is loaded in place."""
