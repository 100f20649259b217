"""Weights as other trainers leave them: by the frameworks themselves where they are here, else laid out as they lay them out."""

from __future__ import annotations

import contextlib
import enum
import json
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.source import WeightSource, open_weight_source
from mega_ckpt.weight_source import OptimizerNotConverted
from mega_common.errors import CheckpointError

SIZES = {
    "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def make_model(**more: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **more))


MOMENTS = {"exp_avg": 2, "exp_avg_sq": 3}  # in the tests, such multiples of the weights
STEPS = 5


def check_moments(source: WeightSource, state: Mapping[str, Tensor]) -> None:
    """Both moments of every weight are there, and the number of steps."""
    assert isinstance(source, HfSource)
    training = source.read_training_state(torch.bfloat16)
    assert training is not None
    assert training.step == training.state["optimizer_steps"] == STEPS
    assert training.tensors["main"] is source
    for name in list(source.tensor_names()):
        shape = source.tensor_shape(name)
        for kind, times in MOMENTS.items():
            assert torch.equal(
                training.tensors[kind].read_tensor_slice(name, (0,) * len(shape), shape), state[name] * times
            )


def check(source: WeightSource, model: nn.Module) -> None:
    """Every weight is there, bit for bit."""
    state = model.state_dict()
    for name in list(source.tensor_names()):
        assert torch.equal(source.read_tensor(name), state[name]), name
    assert source.model.num_layers == SIZES["num_hidden_layers"]


# Where torch.distributed.checkpoint saves what, by the name of a folder: below a key or not, in a folder of its own or not.
SHARDED = {
    "plain": ("", "."),
    "titan": ("model", "."),
    "fsdp": ("app", "pytorch_model_fsdp_0"),
    "nested": ("app.model", "."),
}


def save_sharded(folder: Path) -> None:
    """On each of two ranks: as FSDP2 shards, with the optimizer beside."""
    model = make_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    for parameter, held in optimizer.state.items():
        held |= {"step": torch.tensor(float(STEPS)), **{kind: parameter.detach() * n for kind, n in MOMENTS.items()}}
    state: dict[str, Any] = get_model_state_dict(model)
    moments = get_optimizer_state_dict(model, optimizer)
    for name, (prefix, inside) in SHARDED.items():
        saved = {prefix: state} if prefix else state
        beside = {"optimizer": moments, "train_state": {"step": torch.tensor(STEPS)}}
        if name == "nested":
            saved, beside = {"app": {"model": state, "optim": moments}}, {}
        elif name == "fsdp":  # as Accelerate, in a folder of its own
            dcp.save({"optimizer": moments}, checkpoint_id=folder / name / "optimizer_0")
            beside = {}
        dcp.save({**saved, **beside}, checkpoint_id=folder / name / inside)
    full = {name: tensor.full_tensor() for name, tensor in state.items()}
    if dist.get_rank() == 0:
        torch.save(full, folder / "expected.pt")


@pytest.mark.long
def test_shards_of_fsdp_as_torch_saves_them(tmp_path: Path) -> None:
    run_ranks(save_sharded, 2, tmp_path)
    expected = torch.load(tmp_path / "expected.pt")
    for name in SHARDED:
        make_model().config.save_pretrained(tmp_path / name)
        source = open_weight_source(tmp_path / name)
        assert all(torch.equal(source.read_tensor(key), expected[key]) for key in expected)
        check_moments(source, expected)


def test_what_accelerate_saves(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), make_model()
    with contextlib.suppress(ValueError):
        accelerator.prepare(model)
    accelerator.save_state(str(tmp_path))
    model.config.save_pretrained(tmp_path)
    check(open_weight_source(tmp_path), model)


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
    check(open_weight_source(tmp_path), model)


class Enumerated(enum.IntEnum):
    """DeepSpeed's stages, which its files hold as members of a class of its own."""

    ONE, TWO, THREE = 1, 2, 3


Enumerated.__module__ = "deepspeed"


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
    key, adam = "fp32_flat_groups", "optimizer_state_dict"
    if stage < 3:
        key, adam = "single_partition_of_fp32_groups", "base_optimizer_state"
    for rank in range(ranks):
        moments = {
            group: {"step": torch.tensor(float(STEPS)), **{kind: part * n for kind, n in MOMENTS.items()}}
            for group, part in enumerate(partitions[rank])
        }
        state = {
            "zero_stage": Enumerated(stage),
            "partition_count": ranks,
            key: partitions[rank],
            adam: {"state": moments},
        }
        with mock.patch.dict(sys.modules, {Enumerated.__module__: SimpleNamespace(Enumerated=Enumerated)}):
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
    source = open_weight_source(tmp_path)
    check(source, model)
    check_moments(source, model.state_dict())
    assert not {"latest", "zero_to_fp32.py"} & source.asset_files().keys()


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
    check(open_weight_source(tmp_path / "step"), model)
    for key, tensor in model.state_dict().items():
        place = tmp_path / "universal/zero" / key
        place.mkdir(parents=True)
        for kind, times in {"fp32": 1, **MOMENTS}.items():
            torch.save(tensor.flatten() * times, place / f"{kind}.pt")  # flat, as out of ZeRO-3
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()}]
    saved = {"module": {}, "param_shapes": shapes, "global_steps": STEPS + 1, "skipped_steps": 1, "global_samples": 40}
    torch.save(saved, tmp_path / "universal/mp_rank_00_model_states.pt")
    model.config.save_pretrained(tmp_path / "universal")
    source = open_weight_source(tmp_path / "universal")
    check(source, model)
    check_moments(source, model.state_dict())


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
    with mock.patch.dict(sys.modules, {Enumerated.__module__: SimpleNamespace(Enumerated=Enumerated)}):
        state = torch.load(path, weights_only=False)
        groups = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        groups[0] = groups[0][:10].clone()
        torch.save(state, path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_a_rank, "files of 1 ranks instead of 2"),
        (split_tensors, "sharded by tensor parallelism"),
        (run_programs, "requires '_?pickle.loads', which is not allowed"),
        (cut_short, "do not have DeepSpeed's format .*shorter"),
    ],
)
def test_what_is_wrong_with_a_folder_of_deepspeed(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    model = make_model()
    zero(tmp_path / "step", model, 2, 2)
    model.config.save_pretrained(tmp_path / "step")
    spoil(tmp_path / "step")
    with pytest.raises(CheckpointError, match=message):
        open_weight_source(tmp_path / "step")


def pythia() -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    sizes = {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"} | {"hidden_size": 32}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, tie_word_embeddings=False))


LIT = {
    r"model\.embed_tokens|gpt_neox\.embed_in": "transformer.wte",
    r"(model|gpt_neox)\.layers\.(\d+)": r"transformer.h.\2",
    r"input_layernorm": "norm_1",
    r"post_attention_layernorm": "norm_2",
    r"self_attn\.o_proj|attention\.dense": "attn.proj",
    r"(self_attn|attention)\.query_key_value": "attn.qkv",
    r"mlp\.gate_proj": "mlp.fc_1",
    r"mlp\.up_proj": "mlp.fc_2",
    r"mlp\.down_proj|mlp\.dense_4h_to_h": "mlp.proj",
    r"mlp\.dense_h_to_4h": "mlp.fc",
    r"model\.norm|gpt_neox\.final_layer_norm": "transformer.ln_f",
    r"embed_out": "lm_head",
}


def in_words_of(names: Mapping[str, str], name: str) -> str:
    for pattern, word in names.items():
        name = re.sub(pattern, word, name)
    return name


def litgpt(model: nn.Module) -> dict[str, Tensor]:
    """A model in LitGPT's names: queries, keys and values one after another."""
    out: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        layer = name.rpartition("self_attn.")[0]
        if "q_proj" in name:
            parts = [model.state_dict()[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"]
            out[in_words_of(LIT, f"{layer}attn.qkv.weight")] = torch.cat(parts)
        elif "query_key_value" in name:
            heads = tensor.unflatten(0, (SIZES["num_attention_heads"], 3, -1))  # by heads in HuggingFace's
            out[in_words_of(LIT, name)] = heads.transpose(0, 1).flatten(0, 2)
        elif not re.search("k_proj|v_proj|inv_freq|masked_bias|attention.bias", name):
            out[in_words_of(LIT, name)] = tensor
    return out


@pytest.mark.parametrize(("make", "key"), [(make_model, "model"), (pythia, "")])
def test_names_of_litgpt(tmp_path: Path, make: Callable[[], transformers.PreTrainedModel], key: str) -> None:
    model = make()
    torch.save({key: litgpt(model), "step_count": 7} if key else litgpt(model), tmp_path / "lit_model.pth")
    model.config.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "hub")
    source, expected = open_weight_source(tmp_path), open_weight_source(tmp_path / "hub")
    assert list(source.tensor_names()) == list(expected.tensor_names())
    assert all(
        torch.equal(source.read_tensor(name), expected.read_tensor(name)) for name in list(expected.tensor_names())
    )


TITAN = {
    r"model\.embed_tokens": "tok_embeddings", r"model\.layers": "layers", r"model\.norm": "norm",
    r"self_attn\.(.)_proj": r"attention.w\1", r"input_layernorm": "attention_norm", r"post_attention_layernorm": "ffn_norm",
    r"mlp\.gate_proj": "feed_forward.w1", r"mlp\.down_proj": "feed_forward.w2", r"mlp\.up_proj": "feed_forward.w3",
}  # fmt: skip


@pytest.mark.parametrize("new", [False, True])
def test_names_of_torchtitan_and_rotary_pairs_that_are_neighbors(tmp_path: Path, new: bool) -> None:
    model, out = make_model(), {}
    for name, tensor in model.state_dict().items():
        word = in_words_of(TITAN, name)
        if re.search(r"\.w[qk]\.", word):
            heads = SIZES["num_attention_heads" if ".wq." in word else "num_key_value_heads"]
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        word = (
            re.sub(r"attention\.w([qkv])", r"attention.qkv_linear.w\1", word)
            if new
            else word.replace("lm_head", "output")
        )
        out[word] = tensor
    moments = {
        name: {"step": torch.tensor(float(STEPS)), **{k: t * n for k, n in MOMENTS.items()}} for name, t in out.items()
    }
    dcp.save(
        {**out, "optimizer": {"state": moments}, "train_state": {"step": torch.tensor(STEPS)}}, checkpoint_id=tmp_path
    )
    model.config.save_pretrained(tmp_path)
    source = open_weight_source(tmp_path)
    check(source, model)
    check_moments(source, model.state_dict())


def test_shards_as_colossalai_saves_them(tmp_path: Path) -> None:
    model = make_model()
    state = dict(model.state_dict())
    names = {name: f"pytorch_model-{1 + (number > 9):05d}.bin" for number, name in enumerate(state)}
    for file in set(names.values()):
        torch.save({name: state[name] for name in state if names[name] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": names})
    )
    model.config.save_pretrained(tmp_path)
    check(open_weight_source(tmp_path), model)


def test_moments_that_are_not_whole_stay_behind(tmp_path: Path) -> None:
    model = make_model()
    zero(tmp_path / "step", model, 1, 1)
    model.config.save_pretrained(tmp_path / "step")
    path = tmp_path / "step/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {**load_loosely(path), "base_optimizer_state": {"state": {}}}}, path)
    source = open_weight_source(tmp_path / "step")
    assert isinstance(source, HfSource)
    with pytest.raises(OptimizerNotConverted, match="Adam moments"):
        source.read_training_state(torch.float32)


def load_loosely(path: Path) -> dict[str, Any]:
    with mock.patch.dict(sys.modules, {Enumerated.__module__: SimpleNamespace(Enumerated=Enumerated)}):
        state: dict[str, Any] = torch.load(path, weights_only=False)["optimizer_state_dict"]
        return {**state, "zero_stage": 1}


def test_a_file_of_litgpt_runs_nothing_and_wants_a_config(tmp_path: Path) -> None:
    torch.save({"model": Evil()}, tmp_path / "lit_model.pth")
    with pytest.raises(CheckpointError, match=r"config.json is missing") as error:
        open_weight_source(tmp_path)
    assert "the folder has weights (lit_model.pth): add the model's config.json" in str(error.value)
    make_model().config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"requires '_?pickle.loads', which is not allowed"):
        open_weight_source(tmp_path)
