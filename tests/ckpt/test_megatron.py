"""Checkpoints of Megatron without Megatron: what is written comes back, from any layout, and what is wrong is named."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_pickles import BOMBS
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_distributed

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.families.model_equivalence import canonicalize_model_config
from mega_ckpt.formats import dcp
from mega_ckpt.formats.megatron_args import read_megatron_args, write_megatron_args
from mega_ckpt.formats.megatron_source import MegatronSource, is_megatron_folder
from mega_ckpt.source import WeightSource, open_weight_source
from mega_ckpt.store import save_sharded_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_common.errors import CheckpointError
from mega_common.layer_kinds import HybridLayerPattern
from mega_common.model_config import ModelConfig

BASE: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_kv_heads": 2,
    "vocab_size": 50, "max_position": 32,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 12}

LATENT: dict[str, Any] = {
    "mla": {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "norm_eps": 1e-5}, "num_kv_heads": None,
    "head_dim": None, "qkv_bias": False, "position": "rope", "rope": {"interleaved": True},
}  # fmt: skip


def mega(folder: Path, fields: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 5) -> Path:
    """A checkpoint of random weights."""
    model, generator = ModelConfig.parse(BASE | fields), torch.Generator().manual_seed(seed)
    held = {
        f"weights/{name}": ShardedTensor(
            shape, [TensorBox((0,) * len(shape), torch.randn(shape, generator=generator).to(dtype))]
        )
        for name, shape in canonical_tensors(model).items()
    }
    return save_sharded_checkpoint(folder, 0, held, model=model, state={})


def weights(source: WeightSource) -> dict[str, Tensor]:
    return {name: source.read_tensor(name).clone() for name in source.tensor_names()}


def equal_checkpoints(one: Path, other: Path) -> bool:
    a, b = weights(open_weight_source(one)), weights(open_weight_source(other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    kv, bias = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    fields: dict[str, Any] = {
        "num_kv_heads": kv, "head_dim": draw(st.sampled_from([None, 6])), "vocab_size": draw(st.integers(3, 300)),
        "tie_embeddings": draw(st.booleans()), "norm": draw(st.sampled_from(["rmsnorm", "layernorm"])),
        "activation": draw(st.sampled_from(["swiglu", "gelu", "gelu_tanh", "relu2"])),
        "position": draw(st.sampled_from(["rope", "learned", "none"])), "mlp_bias": bias, "attention_out_bias": bias,
        "qkv_bias": bias or draw(st.booleans()), "zero_centered_norm": draw(st.booleans()),
        "attention_sinks": draw(st.booleans()),
        "sliding_window": draw(st.sampled_from([None, 5])),
        "full_attention_layers": draw(st.sampled_from([None, [1, 3], [0]])),
    }  # fmt: skip
    if fields["position"] != "learned":
        fields |= {"mtp_layers": draw(st.integers(0, 2)), "mtp_loss": 0.2}
    if fields["position"] == "rope":
        fields["rope"] = {"interleaved": draw(st.booleans())}
    if fields["activation"] == "swiglu":
        fields["activation_limit"] = draw(st.sampled_from([None, 7.0]))
    if not bias and draw(st.integers(0, 3)) == 0:
        fields |= LATENT | {"mla": LATENT["mla"] | {"q_lora_rank": draw(st.sampled_from([None, 12]))}}
        fields |= {"zero_centered_norm": False, "attention_sinks": False}
    fields["qk_norm"] = "mla" not in fields and fields["norm"] == "rmsnorm" and draw(st.booleans())
    if draw(st.booleans()):
        fields["moe"] = EXPERTS | {
            "router_bias": bias, "shared_ffn_hidden_size": 0 if bias else draw(st.sampled_from([0, 8])), "selection_bias": draw(st.booleans()),
            "layers": draw(st.sampled_from([None, [1, 3, *range(4, 4 + fields.get("mtp_layers", 0))], [0, 1, 2]])), "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        }  # fmt: skip
    return fields


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    fields=models(), tp=st.sampled_from([1, 2]), pp=st.sampled_from([1, 2, 4]), kind=st.sampled_from(["torch", "torch_dist"]),
    implementation=st.sampled_from(["local", "transformer_engine"]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_there_and_back(
    fields: dict[str, Any], tp: int, pp: int, kind: str, implementation: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tp = 1 if fields["num_kv_heads"] == 1 and "mla" not in fields and kind == "torch" else tp
    for name in ("mega", "megatron", "back"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    source = mega(tmp_path / "mega", fields, dtype)
    options = ConvertOptions(megatron_format=kind, tp=tp, pp=pp, implementation=implementation)
    convert_checkpoint(source, tmp_path / "megatron", "megatron", options=options, verify=True)
    convert_checkpoint(tmp_path / "megatron", tmp_path / "back", "mega", verify=True)
    assert equal_checkpoints(source, tmp_path / "back")
    one, other = open_weight_source(source).model, open_weight_source(tmp_path / "back").model
    assert write_megatron_args(one) == write_megatron_args(other)
    assert canonicalize_model_config(one) == canonicalize_model_config(other)


MAMBA = {"num_heads": 8, "head_dim": 4, "state_size": 5, "num_groups": 2, "norm_eps": 1e-5}
HYBRID: dict[str, Any] = {
    "num_layers": 6, "layers": "M*-ME*", "mamba": MAMBA, "position": "none", "norm_eps": 1e-6,
    "moe": {**EXPERTS, "latent_size": 6, "score": "sigmoid", "selection_bias": True, "shared_ffn_hidden_size": 20},
}  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{}, {"layers": "MM", "num_layers": 2, "moe": None, "norm": "layernorm", "zero_centered_norm": True}]
)
@pytest.mark.parametrize(
    ("kind", "tp", "pp"), [("torch_dist", 1, 1), ("torch", 1, 2), ("torch", 2, 1), ("torch", 2, 2)]
)
def test_hybrids_there_and_back(changes: dict[str, Any], kind: str, tp: int, pp: int, tmp_path: Path) -> None:
    source = mega(tmp_path / "mega", HYBRID | changes)
    for implementation in ("transformer_engine", "local"):
        options = ConvertOptions(megatron_format=kind, tp=tp, pp=pp, implementation=implementation)
        convert_checkpoint(source, tmp_path / implementation, "megatron", options=options, verify=True)
        assert equal_checkpoints(source, tmp_path / implementation)
        assert canonicalize_model_config(
            open_weight_source(tmp_path / implementation).model
        ) == canonicalize_model_config(open_weight_source(source).model)


ENCODERS: dict[str, dict[str, Any]] = {
    "t5": {"encoder": {"num_layers": 1, "start_token": 3}, "num_kv_heads": None, "position": "relative", "relative": {"buckets": 8}},
    "tied t5": {
        "encoder": {"num_layers": 3, "head_bias": True}, "num_kv_heads": None, "tie_embeddings": True, "position": "learned",
    },
    "bert": {
        "causal": False, "token_types": 2, "masked_lm": {}, "pooler": True, "sentence_pairs": True, "position": "learned",
        "norm": "layernorm", "activation": "gelu", "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(("kind", "tp", "pp"), [("torch_dist", 1, 1), ("torch", 2, 1), ("torch", 2, 2)])
def test_encoders_there_and_back(name: str, kind: str, tp: int, pp: int, tmp_path: Path) -> None:
    source, pp = mega(tmp_path / "mega", ENCODERS[name]), pp if name == "bert" else 1
    for implementation in ("transformer_engine", "local"):
        options = ConvertOptions(megatron_format=kind, tp=tp, pp=pp, implementation=implementation)
        convert_checkpoint(source, tmp_path / implementation, "megatron", options=options, verify=True)
        assert equal_checkpoints(source, tmp_path / implementation)
        assert canonicalize_model_config(
            open_weight_source(tmp_path / implementation).model
        ) == canonicalize_model_config(open_weight_source(source).model)


def test_no_t5_in_stages(tmp_path: Path) -> None:
    source = mega(tmp_path / "mega", ENCODERS["t5"])
    with pytest.raises(CheckpointError, match="pp = 2 is not supported with a T5"):
        convert_checkpoint(source, tmp_path / "out", "megatron", options=ConvertOptions(megatron_format="torch", pp=2))
    convert_checkpoint(source, tmp_path / "out", "megatron", options=ConvertOptions(megatron_format="torch"))
    (tmp_path / "out/release/mp_rank_00").rename(tmp_path / "out/release/mp_rank_00_000")
    shutil.copytree(tmp_path / "out/release/mp_rank_00_000", tmp_path / "out/release/mp_rank_00_001")
    with pytest.raises(CheckpointError, match="a T5 with pipeline parallelism is not supported"):
        open_weight_source(tmp_path / "out")


def test_files_of_ranks_join_the_parts_of_a_mamba_layer(tmp_path: Path) -> None:
    """Rows of each part, rank by rank; a convolution has an axis more, and its name an underscore in newer versions."""
    source = mega(tmp_path / "mega", HYBRID)
    convert_checkpoint(source, tmp_path / "out", "megatron", options=ConvertOptions(megatron_format="torch", tp=2))
    states, held = ranks(tmp_path / "out"), weights(open_weight_source(source))
    model = states["mp_rank_01"]["model"]
    parts = [held[f"model.layers.0.mamba.in_proj.{part}.weight"].chunk(2)[1] for part in ("z", "x", "B", "C", "dt")]
    assert torch.equal(model["decoder.layers.0.mixer.in_proj.weight"], torch.cat(parts))
    taps = [held[f"model.layers.0.mamba.conv1d.{part}.weight"].chunk(2)[1] for part in "xBC"]
    assert torch.equal(model["decoder.layers.0.mixer.conv1d.weight"], torch.cat(taps)[:, None])
    assert torch.equal(model["decoder.final_norm.weight"], held["model.norm.weight"])
    for state in states.values():
        state["model"] = {
            name.replace("mixer.conv1d.", "mixer.conv1d_"): tensor for name, tensor in state["model"].items()
        }
    assert equal_checkpoints(source, write_states(tmp_path / "iter_0000003", states))


def test_layers_of_mamba_split_by_groups_alone(tmp_path: Path) -> None:
    source = mega(tmp_path / "mega", HYBRID | {"mamba": {**MAMBA, "num_groups": 1}})
    with pytest.raises(CheckpointError, match="tp = 2 must divide the 8 heads in 1 groups"):
        convert_checkpoint(source, tmp_path / "out", "megatron", options=ConvertOptions(megatron_format="torch", tp=2))


@pytest.mark.parametrize(
    ("args", "layers"),
    [
        ({"hybrid_layer_pattern": "M*|-M"}, ["mamba", "attention", "mlp", "mamba"]),
        ({"hybrid_override_pattern": "M-", "num_layers": 2, "mamba_num_heads": 8}, ["mamba", "mlp"]),
        (
            {"is_hybrid_model": True, "num_layers": 5, "hybrid_attention_ratio": 0.2, "hybrid_mlp_ratio": 0.4},
            ["mamba", "mlp", "attention", "mamba", "mlp"],
        ),
    ],
)
def test_patterns_of_hybrids(args: dict[str, Any], layers: list[str]) -> None:
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "vocab_size": 50,
        "ffn_hidden_size": 8,
    }
    model = read_megatron_args({**sizes, "position_embedding_type": "none", "mamba_head_dim": 8, **args}, "here")
    assert model.layers == layers
    assert model.mamba is not None
    assert (model.mamba.num_heads, model.mamba.head_dim, model.mamba.state_size, model.mamba.num_groups) == (
        8,
        8,
        128,
        8,
    )


def test_further_tokens_of_a_pattern() -> None:
    assert HybridLayerPattern.parse("M-|M/*-/*-").layer_kind_names == [
        "mamba",
        "mlp",
        "mamba",
        "attention+mlp",
        "attention+mlp",
    ]
    assert HybridLayerPattern.parse("M-|M/*").stages == (2, 1)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        *((pattern, "") for pattern in ("M?", "|", "M/MM", "M+D")),
        ("M/*-", "MTP layers .* are not supported by Megatron-Core 0.16"),
        ("MG", "G is not supported by the MambaModel of Megatron-Core 0.16"),
    ],
)
def test_patterns_that_are_not_supported(pattern: str, problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"hybrid_layer_pattern.*{problem}"):
        read_megatron_args({"hybrid_layer_pattern": pattern, "hidden_size": 16, "num_attention_heads": 4}, "here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = mega(tmp_path / "mega", {})
    convert_checkpoint(source, tmp_path / "dist", "megatron")
    convert_checkpoint(
        source, tmp_path / "torch", "megatron", options=ConvertOptions(megatron_format="torch", tp=2, pp=2)
    )
    return tmp_path


FILE = "model_optim_rng.pt"


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def ranks(root: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: torch.load(path, weights_only=False) for path in sorted(root.glob(f"release/*/{FILE}"))}


def write_states(root: Path, states: dict[str, dict[str, Any]]) -> Path:
    for name, state in states.items():
        (root / name).mkdir(parents=True)
        torch.save(state, root / name / FILE)
    return root


def test_an_interleaved_pipeline(tmp_path: Path) -> None:
    """Four stages' files as the chunks of two ranks: layers 0 and 2, layers 1 and 3."""
    source = mega(tmp_path / "mega", {})
    convert_checkpoint(source, tmp_path / "four", "megatron", options=ConvertOptions(megatron_format="torch", pp=4))
    found = ranks(tmp_path / "four")
    states = {
        f"mp_rank_00_{stage:03d}": {
            "args": found["mp_rank_00_000"]["args"],
            "model0": found[f"mp_rank_00_{stage:03d}"]["model"],
            "model1": found[f"mp_rank_00_{stage + 2:03d}"]["model"],
        }
        for stage in (0, 1)
    }
    assert equal_checkpoints(source, write_states(tmp_path / "iter_0000003", states))


@pytest.mark.parametrize("kind", ["grouped by name", "grouped in one", "split over ranks"])
def test_experts_as_others_store_them(kind: str, tmp_path: Path) -> None:
    source = mega(tmp_path / "mega", {"moe": EXPERTS})
    convert_checkpoint(source, tmp_path / "out", "megatron", options=ConvertOptions(megatron_format="torch", tp=2))
    states = ranks(tmp_path / "out")
    out = {}
    for name, state in states.items():
        model, prefix = state["model"], "mlp.experts."
        others = {key: value for key, value in model.items() if prefix not in key}
        for ep in range(2 if kind == "split over ranks" else 1):
            own = dict(others)
            for layer in range(4):
                head = f"decoder.layers.{layer}.{prefix}"
                for number, one in enumerate(("linear_fc1", "linear_fc2"), start=1):
                    tensors = [model[f"{head}local_experts.{expert}.{one}.weight"] for expert in range(4)]
                    if kind == "grouped by name":
                        own |= {f"{head}{one}.weight{expert}": tensor for expert, tensor in enumerate(tensors)}
                    elif kind == "grouped in one":
                        stacked = torch.stack(tensors).transpose(1, 2).contiguous()  # [E, in, out]
                        wide = (16, -1) if number == 1 else (-1, 16)
                        own[f"{head}weight{number}"] = stacked.view(wide)
                    else:
                        mine = tensors[2 * ep : 2 * ep + 2]
                        own |= {f"{head}local_experts.{i}.{one}.weight": tensor for i, tensor in enumerate(mine)}
            if kind == "split over ranks":
                args = Namespace(**{**vars(state["args"]), "expert_model_parallel_size": 2})
                out[f"{name}_{ep:03d}"] = state | {"args": args, "model": own}
            else:
                out[name] = state | {"model": own}
    assert equal_checkpoints(source, write_states(tmp_path / "iter_0000003", out))


def test_further_tokens_as_newer_versions_store_them(tmp_path: Path) -> None:
    """The plain layer inside has another name there; its experts too are found."""
    source = mega(tmp_path / "mega", {"moe": EXPERTS, "mtp_layers": 2})
    convert_checkpoint(source, tmp_path / "out", "megatron", options=ConvertOptions(megatron_format="torch", pp=2))
    states = ranks(tmp_path / "out")
    for state in states.values():
        names = {name: name.replace(".transformer_layer.", ".mtp_model_layer.") for name in state["model"]}
        state["model"] = {names[name]: tensor for name, tensor in state["model"].items()}
    assert any(".mtp_model_layer.mlp.experts." in name for name in states["mp_rank_00_001"]["model"])
    assert equal_checkpoints(source, write_states(tmp_path / "iter_0000003", states))


def test_further_tokens_that_the_settings_do_not_tell_of(tmp_path: Path) -> None:
    convert_checkpoint(mega(tmp_path / "mega", {"mtp_layers": 1}), tmp_path / "out", "megatron")
    path = tmp_path / "out" / "release" / "common.pt"
    rewrite(path, lambda state: setattr(state["args"], "mtp_num_layers", None))
    with pytest.raises(
        CheckpointError, match=r"the tensor mtp\.layers\.0\..* is not part of a model with its settings"
    ):
        open_weight_source(tmp_path / "out")
    assert open_weight_source(tmp_path / "out", settings={"mtp_layers": 1}).model.mtp_layers == 1


def test_folders(folder: Path) -> None:
    """The root, the folder of an iteration, a tracker that names either."""
    assert equal_checkpoints(folder / "dist", folder / "dist" / "release")
    assert equal_checkpoints(folder / "dist", folder / "torch" / "release")
    (folder / "torch" / "release").rename(folder / "dist" / "iter_0000012")
    (folder / "dist" / "latest_checkpointed_iteration.txt").write_text("12\n")
    assert MegatronSource(folder / "dist").contents.kind == "torch"
    (folder / "dist" / "latest_checkpointed_iteration.txt").write_text("release")
    assert MegatronSource(folder / "dist").contents.kind == "torch_dist"
    assert not is_megatron_folder(folder / "mega")


TRACKERS = {
    "": "must be an iteration or 'release', not ''",
    "soon": "must be an iteration or 'release', not 'soon'",
    "99": "99 requires the folder iter_0000099, which is missing",
    "-1": "not '-1'",
}


@pytest.mark.parametrize("text", TRACKERS)
def test_trackers_that_name_nothing(text: str, folder: Path) -> None:
    (folder / "dist" / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointError, match=TRACKERS[text]):
        open_weight_source(folder / "dist")


def test_no_tracker(folder: Path) -> None:
    (folder / "dist" / "latest_checkpointed_iteration.txt").unlink()
    (folder / "dist" / "release").rename(folder / "dist" / "iter_0000012")
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration\.txt is missing") as error:
        open_weight_source(folder / "dist")
    assert "iter_0000012" in str(error.value)


def test_settings_from_a_file(folder: Path) -> None:
    """What the checkpoint lacks is named, and can be given."""
    path = folder / "dist" / "release" / "common.pt"
    rewrite(path, lambda state: [delattr(state["args"], name) for name in ("num_layers", "num_attention_heads")])
    with pytest.raises(CheckpointError, match=r"num_layers is missing; num_attention_heads is missing") as error:
        open_weight_source(folder / "dist")
    assert "--config" in str(error.value)
    given = {"num_layers": 4, "num_attention_heads": 4}
    assert open_weight_source(folder / "dist", settings=given).model.num_layers == 4
    rewrite(path, lambda state: state.pop("args"))
    with pytest.raises(CheckpointError, match="hidden_size: is required"):
        open_weight_source(folder / "dist", settings=given)
    convert_checkpoint(folder / "dist", folder / "back", "mega", options=ConvertOptions(settings=BASE))
    assert equal_checkpoints(folder / "mega" / "step-00000000", folder / "back")


def test_settings_that_mega_has_not(folder: Path) -> None:
    path = folder / "dist" / "release" / "common.pt"
    rewrite(path, lambda state: state["args"].__dict__.update(qk_l2_norm=True, swiglu=False, quick_geglu=True))
    with pytest.raises(CheckpointError, match=r"quick_geglu requires.*qk_l2_norm"):
        open_weight_source(folder / "dist")


def test_common_state_as_an_object(folder: Path) -> None:
    """Newer versions have no common.pt."""
    root = folder / "dist" / "release"
    common = torch.load(root / "common.pt", weights_only=False)
    metadata = pickle.loads((root / ".metadata").read_bytes())
    file = root / "__1_0.distcp"
    torch.save([common], file)
    index = type(next(iter(metadata.storage_data)))("common_state/shard_0_1")
    info = type(next(iter(metadata.storage_data.values())))
    metadata.storage_data[index] = info(file.name, 0, file.stat().st_size)
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    (root / "common.pt").unlink()
    assert equal_checkpoints(folder / "dist", folder / "torch")


def metadata_says(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        metadata = pickle.loads((root / "dist/release/.metadata").read_bytes())
        change(metadata)
        (root / "dist/release/.metadata").write_bytes(pickle.dumps(metadata))

    return damage


def entry(metadata: Any, key: str = "output_layer.weight") -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def set_(what: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(what, name, value)


def shape(key: str, *sizes: int) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata[key], "size", torch.Size(sizes))


def rename(old: str, new: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
        for index in [index for index in metadata.storage_data if index.fqn == old]:
            info = metadata.storage_data.pop(index)
            metadata.storage_data[type(index)(new, index.offset)] = info

    return change


QKV = "decoder.layers.self_attention.linear_qkv.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another folder's file": (
        metadata_says(lambda m: set_(entry(m), relative_path="../../x.distcp")), "must be the plain name of a file"
    ),
    "an absolute file": (metadata_says(lambda m: set_(entry(m), relative_path="/etc/passwd")), "must be the plain name"),
    "a file that is not there": (metadata_says(lambda m: set_(entry(m), relative_path="__9_9.distcp")), "cannot be read"),
    "past the end": (metadata_says(lambda m: set_(entry(m), offset=1 << 40)), "bytes instead of"),
    "before the start": (metadata_says(lambda m: set_(entry(m), offset=-5)), "must be sizes"),
    "another tensor": (
        metadata_says(lambda m: set_(entry(m), offset=entry(m, QKV).offset, length=entry(m, QKV).length)),
        "conflicts with .metadata",
    ),
    "a terabyte": (metadata_says(shape("output_layer.weight", 1 << 36, 16)), "overlap or are incomplete"),
    "a million layers": (metadata_says(shape(QKV, 1 << 20, 32, 16)), "layers, not"),
    "five layers": (metadata_says(shape(QKV, 5, 32, 16)), "are incomplete: it has 5 layers"),
    "other sizes": (metadata_says(shape(QKV, 4, 48, 16)), "linear_qkv.weight has shape"),
    "overlapping": (
        metadata_says(lambda m: m.state_dict_metadata[QKV].chunks.append(m.state_dict_metadata[QKV].chunks[0])),
        "overlap or are incomplete",
    ),
    "a part left out": (metadata_says(lambda m: m.state_dict_metadata[QKV].chunks.pop()), "are incomplete"),
    "no tensor": (metadata_says(lambda m: m.state_dict_metadata.pop(QKV)), "tensor .*linear_qkv.weight.* is missing"),
    "another model's tensor": (metadata_says(rename("output_layer.weight", "x.weight")), "tensor output_layer.weight.* is missing"),
    "metadata of nothing": (metadata_says(lambda m: m.__dict__.clear()), "not the metadata of a checkpoint"),
    "half the metadata": (
        lambda root: (root / "dist/release/.metadata").write_bytes(b"\x80\x04}"), "damaged, or not a pickle"
    ),
    "a bomb for metadata": (
        lambda root: (root / "dist/release/.metadata").write_bytes(BOMBS["a program"][0]), "requires 'subprocess.Popen'"
    ),
    "half the tensors": (
        lambda root: (root / "dist/release/__0_0.distcp").write_bytes(bytes(100)), "bytes instead of"
    ),
    "zeros for tensors": (
        lambda root: (root / "dist/release/__0_0.distcp").write_bytes(
            bytes((root / "dist/release/__0_0.distcp").stat().st_size)
        ),
        "damaged",
    ),
    "neither format": (lambda root: (root / "dist/release/.metadata").unlink(), "must be a torch_dist checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_torch_dist(what: str, folder: Path) -> None:
    damage, said = DAMAGE[what]
    damage(folder)
    with pytest.raises(CheckpointError, match=said) as error:
        weights(open_weight_source(folder / "dist"))
    assert "\n" not in error.value.message


def rank_says(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda root: rewrite(root / "torch/release/mp_rank_01_001" / FILE, change)


FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
LEGACY_DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a rank left out": (
        lambda root: shutil.rmtree(root / "torch/release/mp_rank_01_000"), "tp rank 1, pp rank 0, ep rank 0 is missing"
    ),
    "no file": (lambda root: (root / "torch/release/mp_rank_01_000" / FILE).unlink(), "model_optim_rng.pt is missing"),
    "an empty file": (lambda root: (root / "torch/release/mp_rank_01_000" / FILE).write_bytes(b""), "damaged"),
    "no tensor": (rank_says(lambda state: state["model"].pop(FC1)), "linear_fc1.weight overlap or are incomplete"),
    "another tensor": (
        rank_says(lambda state: state["model"].update({"decoder.x": torch.ones(2)})), "the tensor decoder.x is not part"
    ),
    "other sizes": (
        rank_says(lambda state: state["model"].update({FC1: torch.ones(8, 16)})), "overlap or are incomplete"
    ),
    "no model": (rank_says(lambda state: state.pop("model")), "overlap or are incomplete"),
    "an older model": (rank_says(lambda state: state.update(model={"language_model": {}})), "from before Megatron-Core"),
    "a list": (
        lambda root: torch.save([1], root / "torch/release/mp_rank_01_001" / FILE), "not a rank file"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LEGACY_DAMAGE)
def test_damaged_torch(what: str, folder: Path) -> None:
    damage, said = LEGACY_DAMAGE[what]
    damage(folder)
    with pytest.raises(CheckpointError, match=said) as error:
        weights(open_weight_source(folder / "torch"))
    assert "\n" not in error.value.message


NOT_MEGATRON: dict[str, dict[str, Any]] = {
    "norm_position = 'post'": {"norm_position": "post"},
    "parallel_residual = true": {"parallel_residual": True},
    "mlp_bias = true|qkv_bias = false": {"mlp_bias": True},
    "activation = 'geglu'": {"activation": "geglu"},
    "rope.theta = 10000.5": {"rope": {"theta": 10000.5}},
    "logit_softcap = 30.0": {"logit_softcap": 30.0},
    r"moe\.group_score = 'top2'": {"moe": EXPERTS | {"groups": 2, "top_groups": 2, "group_score": "top2"}},
    r"mla\.norm_eps = 1e-06": {**LATENT, "mla": {**LATENT["mla"], "norm_eps": 1e-6}},
    "layernorm": {"qk_norm": True, "norm": "layernorm"},
    "requires moe_router_pre_softmax": {"moe": EXPERTS | {"groups": 2, "group_score": "top2"}},
    "apply_layernorm_1p": {**LATENT, "zero_centered_norm": True},
    "rope.fraction = 0.5": {"rope": {"scaling": "yarn", "factor": 2.0, "original_max_position": 16, "fraction": 0.5}},
    r"moe\.layers = \[1, 3, 4\] must include the MTP layers .* layer 3": {
        "moe": EXPERTS | {"layers": [1, 3, 4]},
        "mtp_layers": 2,
    },
    r"moe\.layers = \[0, 4\] must include the MTP layers": {"moe": EXPERTS | {"layers": [0, 4]}, "mtp_layers": 1},
    "num_kv_heads must be 4": {"encoder": {"num_layers": 1, "head_bias": True}, "tie_embeddings": True},
    "head_bias must equal tie_embeddings = true": {
        "encoder": {"num_layers": 1},
        "num_kv_heads": 4,
        "tie_embeddings": True,
    },
    "every_layer": {
        "encoder": {"num_layers": 1},
        "num_kv_heads": 4,
        "position": "relative",
        "relative": {"every_layer": True},
    },
    "moe.score must be softmax or sigmoid, not sqrtsoftplus": {"moe": EXPERTS | {"score": "sqrtsoftplus"}},
    "residual_multiplier = 0.5": {"residual_multiplier": 0.5},
    "embedding_multiplier = 4.0, logit_scale = 0.25": {"embedding_multiplier": 4.0, "logit_scale": 0.25},
    r"no_rope_layers = \[1\]": {"no_rope_layers": [1]},
    "norm_bias = false": {"norm": "layernorm", "norm_bias": False},
    "local_rope": {"sliding_window": 7, "full_attention_layers": [1], "local_rope": {"theta": 5e5}},
}


@pytest.mark.parametrize("said", NOT_MEGATRON)
def test_models_that_megatron_has_not(said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"Megatron cannot express this model: .*({said})"):
        convert_checkpoint(mega(tmp_path / "mega", NOT_MEGATRON[said]), tmp_path / "out", "megatron")
    assert not (tmp_path / "out").exists()


EIGHT = {"num_attention_heads": 8, "num_kv_heads": 8, "hidden_size": 48}
DIVISIONS: list[tuple[str, dict[str, Any], dict[str, int], str | None]] = [
    ("torch", {}, {"pp": 3}, "pp = 3 must divide the 4 layers"),
    ("torch_dist", {}, {"pp": 3}, "pp = 3 must divide the 4 layers"),
    ("torch_dist", {}, {"pp": 8}, "pp = 8 must divide the 4 layers"),
    ("torch", {}, {"tp": 4}, "tp = 4 must divide the 2 key/value heads"),
    ("torch_dist", {}, {"tp": 3}, "tp = 3 must divide the 2 key/value heads or be a multiple of them"),
    ("torch_dist", {}, {"tp": 4}, None),  # a multiple of them
    ("torch_dist", {"num_kv_heads": 1}, {"tp": 2}, None),
    ("torch", {"num_kv_heads": 1}, {"tp": 2}, "tp = 2 must divide the 1 key/value heads"),
    ("torch_dist", {"num_kv_heads": 1}, {"tp": 3}, "tp = 3 must divide the 4 attention heads"),
    ("torch_dist", {}, {"tp": 6}, "tp = 6 must divide the 4 attention heads"),
    ("torch_dist", {**EIGHT, "ffn_hidden_size": 12}, {"tp": 8}, "tp = 8 must divide decoder.layers.0.mlp.linear_fc2"),
    ("torch_dist", {"moe": EXPERTS | {"ffn_hidden_size": 7}}, {"tp": 2}, "tp = 2 must divide .*experts.*linear_fc2"),
    (
        "torch_dist", {"moe": EXPERTS | {"shared_ffn_hidden_size": 7}}, {"tp": 2},
        "tp = 2 must divide .*shared_experts.*linear_fc2",
    ),
    ("torch_dist", LATENT, {"tp": 3}, "tp = 3 must divide the 4 (key/value|attention) heads"),
    ("torch_dist", HYBRID, {"tp": 4}, "tp = 4 must divide the 8 heads in 2 groups of the Mamba-2 layers"),
    ("torch_dist", {"vocab_size": 101}, {"tp": 2}, None),  # padded to 256
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "sizes", "said"), DIVISIONS)
def test_sizes_that_megatron_cannot_load(
    kind: str, fields: dict[str, Any], sizes: dict[str, int], said: str | None, tmp_path: Path
) -> None:
    source, options = mega(tmp_path / "mega", fields), ConvertOptions(megatron_format=kind, **sizes)
    if said is None:
        convert_checkpoint(source, tmp_path / "out", "megatron", options=options, verify=True)
        return
    with pytest.raises(CheckpointError, match=said):
        convert_checkpoint(source, tmp_path / "out", "megatron", options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["mega"]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama3": {"rope": {"scaling": "llama3", "factor": 8.0, "original_max_position": 8192, "theta": 5e5}},
    "linear": {"rope": {"scaling": "linear", "factor": 4.0, "fraction": 0.5}},
    "yarn": {"rope": {"scaling": "yarn", "factor": 40.0, "original_max_position": 4096, "mscale": 0.7, "mscale_all_dim": 0.9}},
    "window": {"sliding_window": 7},
    "latent": {**LATENT, "rope": {"interleaved": True, "scaling": "yarn", "factor": 40.0, "original_max_position": 4096}},
    "latent ramp": {
        **LATENT, "rope": {
            "interleaved": True, "scaling": "yarn", "factor": 40.0, "original_max_position": 512, "beta_fast": 16.0, "beta_slow": 2.0,
        },
    },
    "gpt-oss": {
        "activation_limit": 7.0, "attention_sinks": True, "sliding_window": 7, "full_attention_layers": [1, 3],
        "rope": {"scaling": "yarn", "factor": 32.0, "original_max_position": 4096, "truncate": False},
    },
    "centred norms": {"zero_centered_norm": True, "norm": "layernorm", "rope": {"interleaved": True, "fraction": 0.5}},
    "further": {
        "mtp_layers": 2, "mtp_loss": 0.5, "sliding_window": 7, "full_attention_layers": [1, 4],
        "moe": EXPERTS | {"layers": [0, 3, 4, 5]},
    },
    "experts": {
        "moe": EXPERTS | {
            "score": "sigmoid", "groups": 2, "top_groups": 1, "group_score": "top2", "selection_bias": True, "bias_rate": 0.01,
            "scaling": 2.5, "aux_loss": 0.1, "aux_loss_scope": "batch", "layers": [1, 2, 3], "shared_ffn_hidden_size": 8,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_there_and_back(name: str) -> None:
    model = ModelConfig.parse(BASE | SETTINGS[name])
    found = read_megatron_args(write_megatron_args(model), "x")
    different = {field for field in SETTINGS[name] if getattr(found, field) != getattr(model, field)}
    assert not different
    assert json.loads(json.dumps(write_megatron_args(model)))["padded_vocab_size"] == 128


PLAIN = write_megatron_args(ModelConfig.parse(BASE))
SPARSE = {"num_experts": 4, "moe_router_topk": 2}
FLAT = {
    "multi_latent_attention": True, "qk_layernorm": True, "position_embedding_type": "rope", "group_query_attention": False,
    "kv_lora_rank": 8, "qk_pos_emb_head_dim": 4,
}  # fmt: skip
ZERO = "layernorm_zero_centered_gamma"
MEANT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"apply_layernorm_1p": True, ZERO: None}, {"zero_centered_norm": True}),
    ({"apply_layernorm_1p": True}, {"zero_centered_norm": False}),  # of an older run; the newer name counts
    ({ZERO: True}, {"zero_centered_norm": True}),
    ({"softmax_type": "learnable"}, {"attention_sinks": True}),
    ({"window_size": (7, 0), "window_attn_skip_freq": 3}, {"sliding_window": 8, "full_attention_layers": [2]}),
    ({"window_size": [7, 0], "window_attn_skip_freq": [1, 0, 0, 1]}, {"full_attention_layers": [1, 2]}),
    ({"window_size": "7,0", "window_attn_skip_freq": [1] * 4}, {"full_attention_layers": None}),
    ({"window_size": (-1, -1), "window_attn_skip_freq": 0}, {"sliding_window": None}),
    ({"swiglu": False, "squared_relu": True, "quick_geglu": True}, {"activation": "relu2"}),
    ({"swiglu": False, "activation_func_clamp_value": 7.0}, {"activation": "gelu", "activation_limit": None}),
    ({"position_embedding_type": "yarn", "rotary_percent": 0.5}, {"rope.fraction": 1.0, "rope.truncate": True}),
    ({"position_embedding_type": "yarn", "rotary_interleaved": True}, {"rope.interleaved": False}),
    (
        {**FLAT, "rope_type": None},
        {"rope.scaling": "yarn", "rope.original_max_position": 4096, "rope.interleaved": True},
    ),
    ({**FLAT, "yarn_beta_fast": 4.0, "beta_fast": 8.0}, {"rope.beta_fast": 8.0}),
    ({**FLAT, "rope_type": "rope", "use_rope_scaling": True}, {"rope.scaling": "none"}),
    ({**FLAT, "add_bias_linear": True}, {"qkv_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ({"mtp_num_layers": 2}, {"mtp_layers": 2, "mtp_loss": 0.1}),
    ({"mtp_num_layers": 0, "mtp_loss_scaling_factor": 0.7}, {"mtp_layers": 0, "mtp_loss": 0.3}),
    ({"mtp_num_layers": None, "mtp_use_repeated_layer": True}, {"mtp_layers": 0}),
    ({**SPARSE, "mtp_num_layers": 2, "moe_layer_freq": [0, 1, 0, 1]}, {"moe.layers": [1, 3, 4, 5]}),
    ({**SPARSE, "mtp_num_layers": 2, "moe_layer_freq": 2}, {"moe.layers": [0, 2]}),
    ({"mtp_num_layers": 2, "window_size": (7, 0), "window_attn_skip_freq": 3}, {"full_attention_layers": [2, 5]}),
    ({**SPARSE, "moe_router_num_groups": 2}, {"moe.groups": 1}),
    ({**SPARSE, "moe_router_num_groups": 2, "moe_router_group_topk": 2}, {"moe.groups": 2, "moe.group_score": "max"}),
    ({**SPARSE, "moe_expert_capacity_factor": -1.0}, {"moe.capacity_factor": None}),
    ({**SPARSE, "moe_shared_expert_gate": True}, {"moe.shared_gate": False}),
    (
        {**SPARSE, "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]},
        {"moe.aux_loss": 0.1, "moe.aux_loss_scope": "sequence"},
    ),
]


@pytest.mark.parametrize("change", [{"attention_gate": True}, {"position": "none"}])
def test_latent_attention_that_megatron_does_not_have(change: dict[str, Any]) -> None:
    mla = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10, "norm_eps": 1e-5}
    alone = {"num_kv_heads": None, "head_dim": None, "qk_norm": False}
    with pytest.raises(CheckpointError, match="mla requires attention_gate = false and position = rope"):
        write_megatron_args(ModelConfig.parse({**BASE, **alone, "mla": mla, **change}))
    with pytest.raises(CheckpointError, match="multi_latent_attention is not supported with attention_output_gate"):
        read_megatron_args({**PLAIN, **FLAT, "attention_output_gate": True}, "x")


@pytest.mark.parametrize(("given", "expected"), MEANT)
def test_what_settings_mean(given: dict[str, Any], expected: dict[str, Any]) -> None:
    args = {name: value for name, value in {**PLAIN, **given}.items() if value is not None or name == "rope_type"}
    model = read_megatron_args(args, "x")
    assert {name: attrgetter(name)(model) for name in expected} == expected


NOT_MEGA: dict[str, dict[str, Any]] = {
    "softmax_type = 'off-by-one' is not supported": {"softmax_type": "off-by-one"},
    "swiglu is not supported with activation_func_clamp_value": {"activation_func_clamp_value": 7.0},
    "swiglu is not supported with .* or glu_linear_offset": {"glu_linear_offset": 1.0},
    "quick_geglu requires": {"swiglu": False, "quick_geglu": True, "activation_func_clamp_value": 7.0},
    "window_attn_skip_freq = 0 conflicts with 4 layers": {"window_size": (7, 0), "window_attn_skip_freq": 0},
    r"moe_layer_freq = \[1, 0\] conflicts with": {**SPARSE, "moe_layer_freq": [1, 0]},
    "moe_layer_freq = 2 conflicts with": {**SPARSE, "moe_layer_freq": 2, "num_layers": 1 << 40},
    "tokens after the query must be 0": {"window_size": (7, 1)},
    "mscale = 0.7 is not supported with mscale_all_dim = 0.0": {"position_embedding_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.0},
    "is not supported with apply_layernorm_1p": {**FLAT, ZERO: True},
    "with learned positions": {**FLAT, "position_embedding_type": "learned_absolute"},
    "requires moe_router_pre_softmax": {**SPARSE, "moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "moe_router_score_function must be softmax or sigmoid": {**SPARSE, "moe_router_score_function": "sqrtsoftplus"},
    "use_mup = true": {"use_mup": True},
    "mtp_use_repeated_layer = true is not supported": {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
    "mtp_num_layers = 1099511627776 must be from 0": {**SPARSE, "mtp_num_layers": 1 << 40},
    r"window_attn_skip_freq = \[1, 0, 1, 0\] conflicts with 5 layers": {
        "window_size": (7, 0), "window_attn_skip_freq": [1, 0, 1, 0], "mtp_num_layers": 1,
    },
    "problem\n  mtp_layers = 1: is not supported with position: learned": {"mtp_num_layers": 1, "position_embedding_type": "learned_absolute"},
}  # fmt: skip


@pytest.mark.parametrize("said", NOT_MEGA)
def test_settings_that_mean_something_else(said: str) -> None:
    with pytest.raises(CheckpointError, match=f"x: its settings .*{said}"):
        read_megatron_args({**PLAIN, **NOT_MEGA[said]}, "x")


def test_reading_a_part_reads_the_bytes_of_that_part(folder: Path) -> None:
    source = open_weight_source(folder / "dist")
    for name in source.tensor_names():
        whole = source.read_tensor(name)
        offset = tuple(n // 3 for n in whole.shape)
        extent = tuple(max(1, n // 2) for n in whole.shape)
        window = tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))
        assert torch.equal(source.read_tensor_slice(name, offset, extent), whole[window])
        assert math.prod(whole.shape) == whole.numel()


PROVIDER: dict[str, Any] = {
    "_target_": "megatron.bridge.models.llama.llama_provider.Llama3ModelProvider", "num_layers": 4, "hidden_size": 16,
    "ffn_hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 4, "vocab_size": 50,
    "seq_length": 32, "normalization": "RMSNorm", "layernorm_epsilon": 1e-5, "gated_linear_unit": True,
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False}, "add_bias_linear": False,
    "position_embedding_type": "rope", "rotary_base": 10000, "share_embeddings_and_output_weights": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def in_module(metadata: Any) -> None:
    for key in list(metadata.state_dict_metadata):
        rename(key, f"module.{key}")(metadata)


@pytest.mark.parametrize("nemo", [False, True])
def test_settings_that_nemo_and_megatron_bridge_keep_beside_the_weights(folder: Path, nemo: bool) -> None:
    root = folder / "dist" / "release"
    rewrite(root / "common.pt", lambda state: state.pop("args"))
    if nemo:  # whose names begin with what wraps the model
        metadata_says(in_module)(folder)
        (folder / "nemo/context").mkdir(parents=True)
        (folder / "nemo/context/model.yaml").write_text(json.dumps({"_target_": "LlamaModel", "config": PROVIDER}))
        root.rename(folder / "nemo/weights")
    else:
        (root / "run_config.yaml").write_text(json.dumps({"train": {"train_iters": 5}, "model": PROVIDER}))
    source = open_weight_source(folder / ("nemo" if nemo else "dist"))
    expected = weights(open_weight_source(folder / "torch"))
    assert source.model == open_weight_source(folder / "torch").model
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(source).items())


def test_archives_and_zarr_folders_of_nemo_are_told_apart(folder: Path) -> None:
    """An unpacked archive of NeMo 1 is read by the settings that it is given."""
    root = folder / "dist" / "release"
    args = open_weight_source(folder / "dist").model
    rewrite(root / "common.pt", lambda state: state.pop("args"))
    (folder / "nemo").mkdir()
    (folder / "nemo/model_config.yaml").write_text("hidden_size: 16")
    root.rename(folder / "nemo/model_weights")
    settings = args.model_dump(mode="json", by_alias=True)
    found, expected = (
        open_weight_source(folder / "nemo", settings=settings),
        weights(open_weight_source(folder / "torch")),
    )
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(found).items())
    (folder / "nemo/model_weights/.metadata").unlink()  # zarr has a folder for each tensor
    with pytest.raises(CheckpointError, match="model_weights: must be a torch_dist checkpoint") as told:
        open_weight_source(folder / "nemo", settings=settings)
    assert "in NeMo with dist_ckpt_format: torch_dist" in (told.value.hint or "")
    (folder / "model.nemo").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model.nemo: a NeMo archive must be unpacked") as told:
        open_weight_source(folder / "model.nemo")
    assert "tar xf model.nemo -C FOLDER" in (told.value.hint or "")


def test_an_activation_that_megatron_cannot_say_is_refused(folder: Path) -> None:
    root = folder / "dist" / "release"
    rewrite(root / "common.pt", lambda state: state.pop("args"))
    odd = {**PROVIDER, "activation_func": "torch.nn.functional.gelu"}
    (root / "run_config.yaml").write_text(json.dumps({"model": odd}))
    with pytest.raises(
        CheckpointError, match=r"run_config.yaml: activation_func = gelu with gated_linear_unit is not supported"
    ):
        open_weight_source(folder / "dist")


def _singletons(
    source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None
) -> Path:
    """The same release as Megatron saves it with `singleton_local_shards`: halves and experts are tensors of their own."""
    (folder / "release").mkdir(parents=True)
    state: dict[str, torch.Tensor] = {}
    for key, one in dcp.read_dcp_folder(source / "release").tensors.items():
        stacked = key.startswith("decoder.layers.") and not key.split(".")[2].isdigit()
        for layer, tensor in enumerate(one.read()) if stacked else [(None, one.read())]:
            name = key if layer is None else key.replace("layers.", f"layers.{layer}.", 1)
            each = list(enumerate(tensor)) if ".experts.experts." in name else [(None, tensor)]
            for expert, held in each:
                inner = name if expert is None else name.replace("experts.experts.", f"experts.experts.{expert}.")
                halves = held.chunk(2) if "linear_fc1.weight" in inner else [held]
                names = [f"{inner}_w", f"{inner}_v"] if len(halves) == 2 else [inner]
                state |= {n: half.clone() for n, half in zip(names, halves, strict=True)}
    change(state)
    save_distributed(state, storage_writer=FileSystemWriter(folder / "release"), no_dist=True)
    for name in ("common.pt", "metadata.json"):
        shutil.copy(source / "release" / name, folder / "release")
    shutil.copy(source / "latest_checkpointed_iteration.txt", folder)
    return folder


@pytest.mark.parametrize(
    "fields", [{}, {"moe": EXPERTS}, {"moe": EXPERTS | {"layers": [1, 3], "shared_ffn_hidden_size": 8}}, LATENT]
)
def test_singleton_local_shards_come_in(fields: dict[str, Any], tmp_path: Path) -> None:
    source = mega(tmp_path / "mega", fields)
    convert_checkpoint(source, tmp_path / "usual", "megatron")
    folder = _singletons(tmp_path / "usual", tmp_path / "singletons")
    convert_checkpoint(folder, tmp_path / "back", "mega", verify=True)
    assert equal_checkpoints(source, tmp_path / "back")


SINGLETONS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "a half": (lambda state: state.pop("decoder.layers.0.mlp.shared_experts.linear_fc1.weight_v"), "its other half"),
    "an expert": (lambda state: state.pop("decoder.layers.1.mlp.experts.experts.2.linear_fc2.weight"), "an expert is missing"),
    "the last expert": (
        lambda state: state.pop("decoder.layers.1.mlp.experts.experts.3.linear_fc2.weight"), "has shape .3, 16, 12., but",
    ),
    "another shape": (
        lambda state: state.update({"decoder.layers.1.mlp.experts.experts.0.linear_fc2.weight": torch.ones(3, 3)}),
        "another shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SINGLETONS)
def test_singleton_local_shards_that_are_not_whole(case: str, tmp_path: Path) -> None:
    change, said = SINGLETONS[case]
    convert_checkpoint(
        mega(tmp_path / "mega", {"moe": EXPERTS | {"shared_ffn_hidden_size": 8}}), tmp_path / "usual", "megatron"
    )
    with pytest.raises(CheckpointError, match=said):
        open_weight_source(_singletons(tmp_path / "usual", tmp_path / "singletons", change))


RAW = {**LATENT, "mla": {**LATENT["mla"], "latent_norm": False}}
TORCH_LOCAL = {"megatron_format": "torch", "implementation": "local"}
RAW_LATENTS: dict[str, dict[str, Any]] = {
    "keys and values": RAW,
    "queries too": {**RAW, "mla": {**RAW["mla"], "q_lora_rank": 12}},
    "centred norms": {**RAW, "zero_centered_norm": True},
    "MTP": {**RAW, "mla": {**RAW["mla"], "norm_eps": 1e-2}, "mtp_layers": 1},
    "experts": {**RAW, "moe": EXPERTS | {"layers": [1, 3]}},
}


@pytest.mark.parametrize("case", RAW_LATENTS)
@pytest.mark.parametrize("options", [{}, {"megatron_format": "torch", "tp": 2}, TORCH_LOCAL], ids=str)
def test_latents_without_norms_there_and_back(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = mega(tmp_path / "mega", RAW_LATENTS[case])
    convert_checkpoint(model, tmp_path / "one", "megatron", options=ConvertOptions(**options))
    convert_checkpoint(tmp_path / "one", tmp_path / "back", "mega")
    convert_checkpoint(tmp_path / "back", tmp_path / "two", "megatron", options=ConvertOptions(**options))
    assert equal_checkpoints(model, tmp_path / "back")
    found = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.suffix in (".distcp", ".pt")}
        for folder in (tmp_path / "one", tmp_path / "two")
    ]
    assert found[0] == found[1] != {}
    assert not any(
        "layernorm" in name and "self_attn" in name for name in weights(open_weight_source(tmp_path / "one"))
    )


@pytest.mark.parametrize(
    ("fields", "settings", "said"),
    [
        (LATENT, {"mla": RAW["mla"]}, "kv_layernorm|kv_a_layernorm"),  # norms in the file that the settings deny
        (RAW, {"mla": LATENT["mla"]}, "kv_layernorm|kv_a_layernorm"),
    ],
)
def test_norms_of_latents_that_the_settings_contradict(
    fields: dict[str, Any], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    convert_checkpoint(mega(tmp_path / "mega", fields), tmp_path / "megatron", "megatron")
    with pytest.raises(CheckpointError, match=said):
        weights(open_weight_source(tmp_path / "megatron", settings=settings))


def test_latents_without_norms_have_no_family_of_huggingface(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"mla\.latent_norm = false is not supported"):
        convert_checkpoint(mega(tmp_path / "mega", RAW), tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()
