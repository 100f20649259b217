"""Upcycling of a dense model to a mixture of experts for further training (arXiv:2212.05055, arXiv:2410.07524).

The experts of each layer are copies of its feed-forward block; the router is new. Experts may also be slices of the
block, G slices of 1 / G of its width: the G slices of a copy have equal router rows, so that a token selects whole copies,
and expert weights sum to G. In both cases the initial output is that of the dense model.

Legend: E experts, K experts per token, G slices of a block, D model width, F width of an expert.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.derive_checkpoint import create_new_checkpoint_folder
from mega_ckpt.source import open_weight_source, resolve_run_to_checkpoint
from mega_ckpt.stream_checkpoint import write_weights_as_checkpoint
from mega_ckpt.tensor_pieces import TensorShape, crop_tensor
from mega_ckpt.weight_source import DerivedWeightSource, WeightSource
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig, MoeConfig
from mega_common.object_store import Location

EXPERT = re.compile(r"(model\.layers\.\d+\.mlp)\.experts\.(gate|up|down)_proj\.(weight|bias)")
ROUTER = re.compile(r"(model\.layers\.\d+\.mlp)\.gate\.weight")


def upcycle_to_moe(
    source: str | Location,
    destination: str | Location,
    *,
    experts: int,
    top_k: int,
    expert_ffn: int | None = None,
    aux_loss: float = 0.01,
    seed: int = 1234,
) -> None:
    """Write to `destination` a mixture of experts (MoE) whose experts start from the MLPs of the dense model at `source`.
    The result is a mega checkpoint of step 0.

    Args:
        source: a mega checkpoint, a run folder (its latest checkpoint) or a HuggingFace folder.
        destination: the folder to create.
        experts: E, in every layer.
        top_k: K.
        expert_ffn: F, which must divide the dense width; E and K must be multiples of the quotient. Default: the dense
            width.
        aux_loss: weight of the load balancing loss in further training.
        seed: random seed of the router's weights.

    Raises:
        ConfigError: when a size does not divide or exceeds another.
        CheckpointError: when the source cannot be used, or `destination` exists. No files are left then.
    """
    dense = open_weight_source(source)
    model = upcycled_config(dense.model, experts=experts, top_k=top_k, expert_ffn=expert_ffn, aux_loss=aux_loss)
    note = {"source": str(resolve_run_to_checkpoint(source)), "experts": experts, "top_k": top_k, "seed": seed}
    with create_new_checkpoint_folder(destination) as folder:
        write_weights_as_checkpoint(
            UpcycledSource(dense, model, seed), folder, "upcycling", provenance={"upcycled": note}
        )


def upcycled_config(
    dense: ModelConfig, *, experts: int, top_k: int, expert_ffn: int | None = None, aux_loss: float = 0.01
) -> ModelConfig:
    """Return the configuration of the mixture of experts that `upcycle_to_moe` converts the model `dense` to.

    Raises:
        ConfigError: when a size does not divide or exceeds another.
    """
    if dense.moe is not None:
        raise ConfigError("the model must be dense, but has experts", hint="upcycle a dense model")
    width = expert_ffn or dense.ffn_hidden_size
    if dense.ffn_hidden_size % width:
        fits = [n for n in range(1, dense.ffn_hidden_size + 1) if dense.ffn_hidden_size % n == 0]
        raise ConfigError(
            f"--expert-ffn {width} must divide the dense width {dense.ffn_hidden_size}", hint=f"use one of {fits[-8:]}"
        )
    slices = dense.ffn_hidden_size // width
    for name, number in (("--experts", experts), ("--top-k", top_k)):
        if number % slices:
            raise ConfigError(
                f"{name} {number} must be a multiple of the {slices} slices of a block",
                hint=f"{name} {-(-number // slices) * slices}",
            )
    moe = {
        "num_experts": experts, "top_k": top_k, "ffn_hidden_size": width, "scaling": float(slices), "aux_loss": aux_loss
    }  # fmt: skip
    MoeConfig.parse(moe, source="--experts, --top-k, --expert-ffn")
    return ModelConfig.parse(
        {**dense.model_dump(exclude_unset=True), "moe": moe}, source="--experts, --top-k, --expert-ffn"
    )


class UpcycledSource(DerivedWeightSource):
    """Reader of the weights of a mixture of experts that are computed from a dense model's tensors."""

    def __init__(self, dense: WeightSource, model: ModelConfig, seed: int) -> None:
        assert model.moe is not None
        super().__init__(dense, model)
        self._moe, self._seed = model.moe, seed
        self._shapes = canonical_tensors(model)
        self._slices = model.ffn_hidden_size // model.moe.ffn_hidden_size

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical tensor names of the mixture of experts, in the order of the forward pass."""
        return list(self._shapes)

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global shape of a tensor of the mixture of experts."""
        return self._shapes[name]

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of the dense model's tensor that a tensor is made from.
        A router has the dtype of the layer's MLP weights.
        """
        if found := ROUTER.fullmatch(name):
            return self.base.tensor_dtype(f"{found[1]}.up_proj.weight")
        return self.base.tensor_dtype(_dense_name(name))

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of the mixture of experts' tensor `name`."""
        if ROUTER.fullmatch(name):
            return crop_tensor(self._make_router(name), offset, shape).to(self.tensor_dtype(name))
        if EXPERT.fullmatch(name):
            experts = range(offset[0], offset[0] + shape[0])
            return torch.stack([self._read_expert_slice(name, expert, offset[1:], shape[1:]) for expert in experts])
        return self.base.read_tensor_slice(name, offset, shape)

    def _read_expert_slice(self, name: str, expert: int, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Return a rectangle of one expert: expert e is slice e mod G of its block."""
        down, bias, start = ".down_proj." in name, name.endswith(".bias"), list(offset)
        if not (down and bias):
            start[1 if down else 0] += expert % self._slices * self._moe.ffn_hidden_size
        part = self.base.read_tensor_slice(_dense_name(name), tuple(start), shape)
        # the weights of the slices sum to G, and so would their biases
        return part / self._slices if down and bias else part

    def _make_router(self, name: str) -> Tensor:
        """Return the router [E, D], in fp32: a function of (seed, name), equal for the slices of a copy."""
        experts, width = self.tensor_shape(name)
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        copies = torch.empty(experts // self._slices, width).normal_(0.0, self.model.init_std, generator=generator)
        return copies.repeat_interleave(self._slices, 0)


def _dense_name(name: str) -> str:
    return name.replace(".mlp.experts.", ".mlp.")
