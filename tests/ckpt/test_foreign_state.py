"""Weights as other trainers leave them: by the frameworks themselves where they are here, else laid out as they lay them out."""

from __future__ import annotations

import contextlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from mega_ckpt.source import Source, open_source
from mega_common.errors import CheckpointError

SIZES = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def make_model(**more: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **more))


def check(source: Source, model: nn.Module) -> None:
    """Every weight is there, bit for bit."""
    state = model.state_dict()
    for name in list(source.keys()):
        assert torch.equal(source.read(name), state[name]), name
    assert source.model.num_layers == SIZES["num_hidden_layers"]


# Where torch.distributed.checkpoint saves what, by the name of a folder: below a key or not, in a folder of its own or not.
SHARDED = {"plain": ("", "."), "titan": ("model", "."), "fsdp": ("app", "pytorch_model_fsdp_0")}


def save_sharded(folder: Path) -> None:
    """On each of two ranks: as FSDP2 shards, with the optimizer beside."""
    model = make_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    state: dict[str, Any] = get_model_state_dict(model)
    others = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    for name, (prefix, inside) in SHARDED.items():
        dcp.save({prefix: state, **others} if prefix else state, checkpoint_id=folder / name / inside)
    full = {name: tensor.full_tensor() for name, tensor in state.items()}
    if dist.get_rank() == 0:
        torch.save(full, folder / "expected.pt")


def test_shards_of_fsdp_as_torch_saves_them(tmp_path: Path) -> None:
    run_ranks(save_sharded, 2, tmp_path)
    expected = torch.load(tmp_path / "expected.pt")
    for name in SHARDED:
        make_model().config.save_pretrained(tmp_path / name)
        source = open_source(tmp_path / name)
        assert {key: torch.equal(source.read(key), expected[key]) for key in list(source.keys())} == dict.fromkeys(
            expected, True
        )


def test_what_accelerate_saves(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), make_model()
    with contextlib.suppress(ValueError):
        accelerator.prepare(model)
    accelerator.save_state(str(tmp_path))
    model.config.save_pretrained(tmp_path)
    check(open_source(tmp_path), model)


class Module(nn.Module):
    """As a LightningModule holds its model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpoint_of_lightning(tmp_path: Path, compiled: bool) -> None:
    model = make_model()
    state = Module(model).state_dict()
    if compiled:
        state = OrderedDict((name.replace("model.", "model._orig_mod.", 1), tensor) for name, tensor in state.items())
    saved = {
        "epoch": 1,
        "global_step": 7,
        "pytorch-lightning_version": "2.5",
        "state_dict": state,
        "optimizer_states": [],
    }
    torch.save(saved, tmp_path / "epoch=1.ckpt")
    model.config.save_pretrained(tmp_path)
    check(open_source(tmp_path), model)


def zero(folder: Path, model: nn.Module, stage: int, ranks: int) -> None:
    """A step's folder of DeepSpeed's: two groups of parameters, partitions padded as it pads them."""
    folder.mkdir()
    named = [(f"module.{name}", parameter.detach()) for name, parameter in model.named_parameters()]
    groups = [OrderedDict(named[::2]), OrderedDict(named[1::2])]
    partitions: list[list[Tensor]] = [[] for _ in range(ranks)]
    for group in groups:
        if stage == 3:
            parts = [torch.cat([_part(one, rank, ranks) for one in group.values()]) for rank in range(ranks)]
        else:
            flat = torch.cat([one.flatten() for one in group.values()])
            padded = torch.cat([flat, torch.zeros(-flat.numel() % (2 * ranks))])
            parts = list(padded.chunk(ranks))
        for rank, part in enumerate(parts):
            partitions[rank].append(part.clone())
    shapes = [OrderedDict((name, one.shape) for name, one in group.items()) for group in groups]
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for rank in range(ranks):
        state = {"zero_stage": stage, "partition_count": ranks, key: partitions[rank], "base_optimizer_state": {}}
        torch.save(
            {"optimizer_state_dict": state, "ds_version": "0.17"},
            folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    half = {name: tensor.bfloat16() for name, tensor in named}
    saved = {"module": half, "param_shapes": shapes, "buffer_names": [], "shared_params": [], "ds_version": "0.17"}
    for rank in range(ranks if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(saved if rank == 0 else {**saved, "module": {}}, folder / f"{name}_model_states.pt")


def _part(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    size = -(-tensor.numel() // ranks)
    flat = torch.cat([tensor.flatten(), torch.zeros(size * ranks - tensor.numel())])
    return flat[rank * size : (rank + 1) * size]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 3, 11])
def test_partitions_of_deepspeed(tmp_path: Path, stage: int, ranks: int) -> None:
    model = make_model()
    zero(tmp_path / "global_step70", model, stage, ranks)
    (tmp_path / "latest").write_text("global_step70")
    model.config.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    check(source, model)
    assert not {"latest", "zero_to_fp32.py"} & source.assets().keys()


def test_tied_and_frozen_weights_and_a_universal_checkpoint_of_deepspeed(tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=True)
    zero(tmp_path / "step", model, 1, 2)
    path = tmp_path / "step/mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    name = "module.model.norm.weight"
    (group,) = [group for group in state["param_shapes"] if name in group]
    assert list(group)[-1] == name  # so that the partition is right without it
    state["frozen_param_shapes"] = {name: group.pop(name)}
    state["shared_params"] = [["module.lm_head.weight", "module.model.embed_tokens.weight"]]
    torch.save(state, path)
    model.config.save_pretrained(tmp_path / "step")
    check(open_source(tmp_path / "step"), model)
    for key, tensor in model.state_dict().items():
        place = tmp_path / "universal/zero" / key
        place.mkdir(parents=True)
        torch.save({"param": tensor}, place / "fp32.pt")
    model.config.save_pretrained(tmp_path / "universal")
    check(open_source(tmp_path / "universal"), model)


def remove_a_rank(folder: Path) -> None:
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def split_tensors(folder: Path) -> None:
    (folder / "mp_rank_00_model_states.pt").with_name("mp_rank_01_model_states.pt").write_bytes(
        (folder / "mp_rank_00_model_states.pt").read_bytes()
    )


def run_programs(folder: Path) -> None:
    torch.save({"module": Evil()}, folder / "mp_rank_00_model_states.pt")


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (pickle.loads, (b"",))


def cut_short(folder: Path) -> None:
    path = folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(path)
    groups = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:10].clone()
    torch.save(state, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_a_rank, "files of 1 ranks instead of 2"),
        (split_tensors, "split over tensor ranks"),
        (run_programs, "asks for '_?pickle.loads', which a checkpoint does not need"),
        (cut_short, "not laid out as DeepSpeed does .*shorter"),
    ],
)
def test_what_is_wrong_with_a_folder_of_deepspeed(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    model = make_model()
    zero(tmp_path / "step", model, 2, 2)
    model.config.save_pretrained(tmp_path / "step")
    spoil(tmp_path / "step")
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path / "step")
