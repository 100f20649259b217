"""A run of any kind is reduced to a tiny one that keeps its options and has legal layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parity.cases import MODELS, VARIANTS, case

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.config.run_config import RunConfig, load_run_config, resolve_run_config
from mega_trainer.verify.tiny_model import TinyModelRun, shrink_count, shrink_model_fields, shrink_shared_head_count
from mega_trainer.verify.verification import Verification, choose_covering_layout_cases, parse_layout

RECIPES = sorted(path for path in (Path(__file__).parents[3] / "recipes").glob("*-*.yaml"))
BASE = {"num_layers": 6, "hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 50_000}


def tiny_of(model: dict[str, Any], **sections: Any) -> TinyModelRun:
    raw = {"data": {"train": ["none"], "seq_length": 64}, **sections, "model": {**BASE, **model}}
    return TinyModelRun.from_run(RunConfig.parse(resolve_run_config(raw)))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_have_a_tiny_model_that_parses(path: Path) -> None:
    tiny = TinyModelRun.from_run(load_run_config(path))
    model = ModelConfig.parse(tiny.model_fields(4))
    assert model.hidden_size <= 64
    assert {*model.layer_kinds} == {*tiny.config.model.layer_kinds}
    assert any(change.startswith("hidden_size ") for change in tiny.describe_changes())


KINDS = [(name, number) for name in MODELS for number, _ in enumerate(VARIANTS.get(name, [{}]))]


@pytest.mark.parametrize(("name", "number"), KINDS)
def test_every_kind_of_model_keeps_its_options(name: str, number: int) -> None:
    config = case(name, 1, layers=4, variant=VARIANTS.get(name, [{}])[number]).config
    before, after = config.model, ModelConfig.parse(shrink_model_fields(config.model, 4))
    kept = {
        "norm", "norm_position", "activation", "position", "tie_embeddings", "qk_norm", "attention_gate", "parallel_residual",
        "residual_dropout", "attention_softcap", "logit_scale", "causal", "masked_lm", "pooler", "qkv_bias", "head_bias",
    }  # fmt: skip
    assert {key: getattr(before, key) for key in kept} == {key: getattr(after, key) for key in kept}
    sections = ("moe", "mla", "mamba", "delta", "vision", "encoder", "retro", "relative")
    assert [getattr(before, key) is None for key in sections] == [getattr(after, key) is None for key in sections]


def test_a_vision_encoder_keeps_its_kind_of_attention_and_its_deepstack() -> None:
    for name in ("qwen2.5-vl-7b", "qwen3-vl-4b", "qwen3-vl-30b-a3b"):
        whole = ModelConfig.parse(load_model_preset(name))
        tiny = ModelConfig.parse(shrink_model_fields(whole, 4))
        before, after = (model.vision.native for model in (whole, tiny) if model.vision and model.vision.native)
        assert (before.window is None, before.norm) == (after.window is None, after.norm)
        assert bool(before.deepstack) == bool(after.deepstack)
        assert bool(before.positions) == bool(after.positions)
        assert whole.rope.sections_interleaved == tiny.rope.sections_interleaved


def test_layers_of_each_kind_are_repeated_with_their_windows_and_rotations() -> None:
    tiny = tiny_of(
        {
            "num_layers": 12, "layers": ["mamba"] * 5 + ["attention+mlp"] + ["mamba+moe"] * 5 + ["attention+mlp"],
            "mamba": {"num_heads": 64, "head_dim": 64, "num_groups": 8}, "sliding_window": 1024,
            "full_attention_layers": [11], "no_rope_layers": [11], "moe": {"num_experts": 60, "top_k": 6, "ffn_hidden_size": 99},
        }
    )  # fmt: skip
    assert tiny.num_distinct_layers == 4
    model = ModelConfig.parse(tiny.model_fields(6))
    assert model.layers == ["mamba", "attention+mlp", "mamba+moe", "attention+mlp", "mamba", "attention+mlp"]
    assert (model.full_attention_layers, model.no_rope_layers) == ([3], [3])
    assert (model.moe and model.moe.num_experts, model.moe and model.moe.top_k) == (8, 3)
    assert (model.mamba and model.mamba.num_heads, model.mamba and model.mamba.num_groups) == (8, 2)


@pytest.mark.parametrize("experts", [[0, 2], [1, 4]])
def test_experts_whose_output_is_added_after_the_next_layer_stay_before_one_without(experts: list[int]) -> None:
    moe = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 40, "shared_ffn_hidden_size": 40, "shortcut": True}
    model = tiny_of({"num_layers": 6, "moe": {**moe, "layers": experts}}).model_fields(3)
    assert (model["num_layers"], model["moe"]["layers"]) == (4, [0, 2])
    ModelConfig.parse(model)


def test_features_of_several_vision_layers_become_those_of_the_first() -> None:
    config = case("vision", 1, variant=VARIANTS["vision"][5]).config.model
    assert config.vision is not None
    assert config.vision.native is not None
    native = config.vision.native.model_copy(update={"deepstack": (8, 16, 24)})
    vision = config.vision.model_copy(update={"native": native, "num_layers": 27})
    tiny = ModelConfig.parse(shrink_model_fields(config.model_copy(update={"vision": vision}), 2))
    assert tiny.vision is not None
    assert tiny.vision.deepstack_layers == (0,)
    assert tiny.vision.native is not None
    assert (tiny.vision.native.window, tiny.vision.native.positions) == (None, 9)


@pytest.mark.parametrize(("count", "tiny"), [(1, 1), (7, 7), (32, 8), (12, 8), (14, 8), (71, 7), (25, 5), (9, 3)])
def test_counts_stay_odd_or_even(count: int, tiny: int) -> None:
    assert shrink_count(count) == tiny


@pytest.mark.parametrize(
    ("heads", "shared", "tiny_heads", "tiny"),
    [(32, 32, 8, 8), (32, 1, 8, 1), (32, 8, 8, 2), (64, 4, 8, 2), (12, 4, 8, 2)],
)
def test_shared_heads_stay_all_one_or_some(heads: int, shared: int, tiny_heads: int, tiny: int) -> None:
    assert shrink_shared_head_count(heads, shared, tiny_heads) == tiny


def test_layouts_are_legal_start_with_the_runs_own_and_are_read_back_from_their_text() -> None:
    tiny = tiny_of({"num_kv_heads": 4}, parallel={"tp": 8, "sp": True, "pp": 4, "schedule": "zb-h1"})
    cases = choose_covering_layout_cases(tiny, 6, 4, seed=1)
    assert all(case.is_legal and case.ranks <= 4 for case in cases)
    own = cases[0].layout
    assert (own["tp"], own["sp"], own["pp"], own["schedule"]) == (2, True, 2, "zb-h1")
    for one in cases:
        again = parse_layout(tiny, one.layout_text)
        assert (again.layout_text, again.layout, again.ranks, again.model) == (
            one.layout_text,
            one.layout,
            one.ranks,
            one.model,
        )


def test_parts_that_are_not_verified_are_named_and_modules_of_transformers_refused() -> None:
    tiny = tiny_of({}, precision="fp8", train={"freeze": ["model.layers.3.*", "model.embed_tokens.*"]})
    assert any("fp8" in sentence for sentence in tiny.unverified)
    assert any("layer numbers" in sentence for sentence in tiny.unverified)
    assert tiny.case_fields()["freeze"] == ["model.embed_tokens.*"]
    config = tiny.config.model_copy(update={"model": tiny.config.model.model_copy(update={"transformers": object()})})
    with pytest.raises(ConfigError, match="implementation = transformers"):
        TinyModelRun.from_run(config)
    head = tiny_of(
        {"task_head": {"kind": "sequence", "labels": 3}}, objective={"kind": "classify"},
        data={"train": ["none"], "seq_length": 64, "kind": "labels"},
    )  # fmt: skip
    assert {sentence.split()[0] for sentence in head.unverified[:2]} == {"The"}
    assert "classify" in head.unverified[1]
    assert choose_covering_layout_cases(head, 1, 2, seed=0)[0].is_legal
    for text in ("tp=2,sp=true", "tp=two", "dp=2 batch=8.5"):
        with pytest.raises(ConfigError, match="must be a whole number"):
            parse_layout(tiny, text)
    with pytest.raises(ConfigError, match="tpp=2 is not a setting of a layout"):
        parse_layout(tiny, "tpp=2")
    with pytest.raises(ConfigError, match="at most 8 processes, found 16"):
        parse_layout(tiny, "tp=8 dp=2")


@pytest.mark.parametrize("seed", range(4))
def test_few_layouts_have_tensor_ranks_without_sequence_parallelism(seed: int) -> None:
    """Which hides a gradient sum that is missing."""
    layouts = [case.layout for case in choose_covering_layout_cases(tiny_of({}), 3, 2, seed=seed)]
    assert any(layout["tp"] == 2 and not layout["sp"] for layout in layouts)
    assert any(layout["cp"] == 2 for layout in layouts)


def test_checkpoints_are_restored_in_layouts_of_the_same_batch() -> None:
    """Odd data ranks have another batch, with which the steps after a restore differ."""
    tiny = tiny_of({})
    verification = Verification(tiny, only="dp=2")
    verification.cases = [parse_layout(tiny, text) for text in ("dp=2", "dp=3 batch=9", "tp=2", "tp=2 dp=3 batch=9")]
    pairs = verification._restore_pairs
    assert [(before.layout_text, after.layout_text) for before, after in pairs[1:]] == [
        (verification.cases[i].layout_text, verification.cases[i + 2].layout_text) for i in (0, 1)
    ]
    assert all(before.batch == after.batch for before, after in pairs)
