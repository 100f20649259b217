"""Models made smaller: what does nothing is what goes, what stays is what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import BASE, MOE, save_tiny
from torch import Tensor, nn

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.families import find_family_by_name
from mega_ckpt.shrink_model import PartImportance, ShrinkSizes, shrink_model, shrunk_config
from mega_ckpt.source import WeightSource, open_weight_source
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_eval.model_loading import load_inference_model
from mega_eval.pruning_importance import accumulate_importance
from mega_trainer.model.decoder import Decoder
from mega_trainer.parallel.parameter_info import get_parameter_info

# grouped and several windows; biases, a fused projection and learned positions; norms over all heads; one key/value head
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8}),
    "gpt2": ("gpt2", {
        "num_layers": 3, "norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "tie_embeddings": True,
        "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
    }),
    "olmo2": ("olmo2", {"num_layers": 3, "norm_position": "post", "qk_norm": True, "qk_norm_span": "all"}),
    "gemma3": ("gemma3_text", {
        "num_layers": 3, "num_kv_heads": 1, "head_dim": 8, "norm_position": "both", "zero_centered_norm": True,
        "scale_embeddings": True, "activation": "geglu", "qk_norm": True, "tie_embeddings": True,
        "sliding_window": 7, "full_attention_layers": [1], "attention_scale": 0.25,
        "rope": {"theta": 10000.0}, "local_rope": {"theta": 100.0},
    }),
}  # fmt: skip
WINDOWS = torch.randint(61, (3, 1, 16), generator=torch.Generator().manual_seed(0))


def saved(folder: Path, name: str) -> WeightSource:
    family, fields = MODELS[name]
    save_tiny(folder, find_family_by_name(family), ModelConfig.parse({**BASE, **fields}))
    return open_weight_source(folder)


def kill(model: Decoder, tensor: str, rows: slice | int, axis: int = 0) -> None:
    """Put zeros into some rows or columns of a canonical tensor."""
    for parameter in model.parameters():
        for piece in get_parameter_info(parameter).pieces:
            if piece.name == tensor:
                piece.local_view(parameter.data).transpose(0, axis)[rows] = 0


@pytest.mark.parametrize("name", MODELS)
def test_all_that_stays_keeps_its_bits(name: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "whole", name)
    kept = shrink_model(
        source,
        tmp_path / "same",
        accumulate_importance(load_inference_model(tmp_path / "whole"), WINDOWS),
        ShrinkSizes(),
    )
    same = open_weight_source(tmp_path / "same")
    assert same.model == source.model
    assert all(torch.equal(same.read_tensor(key), source.read_tensor(key)) for key in source.tensor_names())
    assert kept.layers.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", MODELS)
def test_what_does_nothing_is_what_goes(name: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "whole", name)
    model = load_inference_model(tmp_path / "whole")
    group = source.model.num_attention_heads // source.model.key_value_heads if source.model.key_value_heads > 1 else 1
    size, heads = source.model.query_key_head_dim, source.model.num_attention_heads
    for layer, (neuron, head) in enumerate([(7, 0), (31, heads // group - 1), (0, 1)]):
        start = f"model.layers.{layer}."
        for part in ("weight", "bias"):
            kill(model, f"{start}mlp.up_proj.{part}", neuron)
        dead = range(head * group, (head + 1) * group)
        if source.model.key_value_heads > 1:  # a head without values
            for part in ("weight", "bias"):
                kill(model, f"{start}self_attn.v_proj.{part}", slice(head * size, (head + 1) * size))
        found = accumulate_importance(model, WINDOWS)
        assert int(found.neurons[layer].argmin()) == neuron
        if source.model.key_value_heads > 1:
            assert sorted(found.heads[layer].argsort()[:group].tolist()) == list(dead)
    for layer in range(3) if name == "llama" else ():
        for norm in ("input", "post_attention"):
            kill(model, f"model.layers.{layer}.{norm}_layernorm.weight", 9)
    assert name != "llama" or accumulate_importance(model, WINDOWS).channels.argsort()[:1].tolist() == [9]
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        for what in ("weight", "bias"):
            kill(model, f"model.layers.1.{part}.{what}", slice(None))
    assert int(accumulate_importance(model, WINDOWS).layers.argmin()) == 1


def transformed(folder: Path) -> nn.Module:
    made: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return made.eval()


@torch.no_grad()
def mega_importance(path: Path) -> Tensor:
    model, positions = load_inference_model(path), torch.arange(16)[None]
    return model.compute_logits(model(model.embed_inputs(WINDOWS[0], positions), model.make_forward_context(positions)))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", ShrinkSizes(2, 30, 2, 16)),
        ("gpt2", ShrinkSizes(layers=1, ffn=20, heads=3, hidden=18)),
        ("olmo2", ShrinkSizes(2, 24, None, 18)),
        ("gemma3", ShrinkSizes(2, 11, 3, 18)),
    ],
)
def test_a_smaller_model_is_one_of_its_family(name: str, sizes: ShrinkSizes, tmp_path: Path) -> None:
    """Its tensors are parts of the whole one's; transformers computes what we do."""
    source = saved(tmp_path / "whole", name)
    kept = shrink_model(
        source, tmp_path / "mega", accumulate_importance(load_inference_model(tmp_path / "whole"), WINDOWS), sizes
    )
    small = open_weight_source(tmp_path / "mega")
    layer = int(kept.layers[-1])
    ffn, rows = "mlp.down_proj.weight", kept.neurons[-1]
    expected = source.read_tensor(f"model.layers.{layer}.{ffn}")[kept.channels][:, rows]
    assert torch.equal(small.read_tensor(f"model.layers.{len(kept.layers) - 1}.{ffn}"), expected)
    part = small.read_tensor_slice(f"model.layers.0.{ffn}", (3, 2), (5, 7))
    assert torch.equal(part, small.read_tensor(f"model.layers.0.{ffn}")[3:8, 2:9])
    convert_checkpoint(tmp_path / "mega", tmp_path / "hf", "hf")
    with torch.no_grad():
        theirs = transformed(tmp_path / "hf")(WINDOWS[0]).logits
    torch.testing.assert_close(theirs, mega_importance(tmp_path / "mega"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [ShrinkSizes(heads=heads, ffn=ffn) for heads in (1, 2, 3) for ffn in (None, 24)])
def test_heads_under_a_norm_over_all_of_them_are_not_cut(sizes: ShrinkSizes) -> None:
    fields = {"qk_norm": True, "qk_norm_span": "all"}
    with pytest.raises(ConfigError, match=r"--heads \d is not supported .*qk_norm_span = all"):
        shrunk_config(ModelConfig.parse({**BASE, **fields}), sizes)
    for others in ({"qk_norm_span": "head"}, {"qk_norm": False, "qk_norm_span": "head"}):
        shrunk_config(ModelConfig.parse({**BASE, **fields, **others}), sizes)


def test_layers_without_function_leave_the_model_as_it_was(tmp_path: Path) -> None:
    """With a neuron and heads that nothing comes of, too."""
    save_tiny(tmp_path / "tiny", find_family_by_name("llama"), ModelConfig.parse({**BASE, **MODELS["llama"][1]}))
    hf = transformed(tmp_path / "tiny")
    with torch.no_grad():
        layers = hf.model.layers
        layers[1].self_attn.o_proj.weight.zero_()
        layers[1].mlp.down_proj.weight.zero_()
        for layer in layers:
            layer.mlp.up_proj.weight[5] = 0
            layer.self_attn.v_proj.weight[:8] = 0
    hf.save_pretrained(tmp_path / "whole")
    found = accumulate_importance(load_inference_model(tmp_path / "whole"), WINDOWS)
    shrink_model(
        open_weight_source(tmp_path / "whole"), tmp_path / "small", found, ShrinkSizes(layers=2, ffn=39, heads=2)
    )
    torch.testing.assert_close(
        mega_importance(tmp_path / "small"), mega_importance(tmp_path / "whole"), rtol=1e-5, atol=1e-5
    )


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    source = saved(tmp_path / "whole", "llama")
    ones = PartImportance(torch.ones(3), torch.ones(3, 40), torch.ones(3, 4), torch.ones(24))
    for sizes, message in (
        (ShrinkSizes(layers=4), "--layers 4 must be at most 3"),
        (ShrinkSizes(heads=3), "--heads 3 must be a multiple of 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            shrink_model(source, tmp_path / "out", ones, sizes)
    save_tiny(tmp_path / "moe", find_family_by_name("mixtral"), ModelConfig.parse({**BASE, "moe": MOE}))
    with pytest.raises(ConfigError, match="with experts"):
        shrink_model(open_weight_source(tmp_path / "moe"), tmp_path / "out", ones, ShrinkSizes(layers=1))
    assert not (tmp_path / "out").exists()
