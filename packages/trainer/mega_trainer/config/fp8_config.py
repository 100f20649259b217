"""Configuration of `precision: fp8`: its section of run.yaml, and its requirements on the model and the layout. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeInt

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.strict_config import ConfigProblem, StrictConfig
from mega_trainer.config.parallel_layout import list_sharded_ffn_widths
from mega_trainer.config.sections import ParallelConfig

# Required divisor of GEMM sizes: of the kernels, or the side of a scaling block, so that no layout cuts one.
MULTIPLES = {"tensorwise": 16, "rowwise": 16, "blockwise": 128, "mxfp8": 32, "nvfp4": 32}
FOUR_BITS = "nvfp4"  # the recipe that no message suggests, since it is less exact
OTHER_RECIPE = "set fp8.recipe=tensorwise"


class Fp8Config(StrictConfig):
    """FP8 settings of linear layers under `precision: fp8`.
    Embedding, output head, norms, router and attention stay in bf16.
    """

    recipe: Literal["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4", "delayed"] = Field(
        "tensorwise",
        description="granularity of scales: tensors, rows, blocks of 1x128 and of weights 128x128 (Hopper), or 1x32 "
        "(Blackwell); nvfp4: four bits in blocks of 1x16 and of weights 16x16 (Blackwell, kernels.linear: te); delayed (scales "
        "from earlier steps, as in Transformer Engine) is not supported",
    )
    format: Literal["e4m3", "hybrid"] | None = Field(
        None,
        description="hybrid: gradients in e5m2, the rest in e4m3; default: hybrid for tensorwise scales, else e4m3",
    )
    keep_weights: bool = Field(
        True,
        description="quantise weights once a step, not for each micro-batch; costs two bytes a weight (not with zero 3)",
    )
    bf16_first: NonNegativeInt = Field(0, description="number of first layers that stay in bf16")
    bf16_last: NonNegativeInt = Field(0, description="number of last layers that stay in bf16")

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield a problem for the recipe `delayed`, which is not supported, and for a `format` with the recipe `nvfp4`."""
        if self.recipe not in MULTIPLES:
            rule = "is not supported: scales are computed from the current tensors, not from a history of earlier steps"
            yield ConfigProblem("recipe", rule, self.recipe, OTHER_RECIPE)
        if self.recipe == FOUR_BITS and self.format:
            rule = "is not supported with fp8.recipe = nvfp4, whose values are all e2m1"
            yield ConfigProblem("format", rule, self.format, "remove fp8.format")

    @property
    def uses_e5m2_gradients(self) -> bool:
        """True if gradients are quantised to the FP8 format e5m2 instead of e4m3."""
        return self.format == "hybrid" if self.format else self.recipe in ("tensorwise", "delayed")

    def fp8_layer_range(self, num_layers: int) -> range:
        """Return the indices of the layers that run in FP8: all but the first `bf16_first` and the last `bf16_last`."""
        return range(self.bf16_first, num_layers - self.bf16_last)


def find_fp8_problems(
    fp8: Fp8Config, model: ModelConfig, parallel: ParallelConfig, seq_length: int, *, linear: str
) -> Iterator[ConfigProblem]:
    """Yield settings that conflict with `precision: fp8`.
    `linear` is the configured library of linear layers (`te` or `torch`).
    """
    if not fp8.fp8_layer_range(model.num_layers):
        rule = f"must leave layers in FP8: with fp8.bf16_last = {fp8.bf16_last} it covers all {model.num_layers} layers"
        hint = "set fp8.bf16_first=0 and fp8.bf16_last=0, or set precision=bf16"
        yield ConfigProblem("fp8.bf16_first", rule, fp8.bf16_first, hint)
    if linear == "te" and model.moe is not None:
        rule = "is not supported for experts with precision = fp8"
        yield ConfigProblem("kernels.linear", rule, "te", "set kernels.linear=torch")
    if fp8.recipe == FOUR_BITS and model.moe is not None:
        yield ConfigProblem("fp8.recipe", "is not supported for experts", fp8.recipe, OTHER_RECIPE)
    if fp8.recipe not in MULTIPLES:
        return  # a problem of the section itself
    if linear == "te" and fp8.recipe == "rowwise":
        hint = f"{OTHER_RECIPE}, or set kernels.linear=torch"
        yield ConfigProblem("fp8.recipe", "is not supported with kernels.linear = te", "rowwise", hint)
    unit, widths = MULTIPLES[fp8.recipe], dict(_linear_widths(model, parallel))
    if odd := {name: width for name, width in widths.items() if width % unit}:
        found = ", ".join(f"{name} = {width}" for name, width in odd.items())
        fitting = [name for name, size in MULTIPLES.items() if all(width % size == 0 for width in widths.values())]
        left_out = {FOUR_BITS, "rowwise" if linear == "te" else FOUR_BITS}
        recipes = [f"set fp8.recipe={name}" for name in fitting[::-1] if name not in left_out]
        hint = ", or ".join([*recipes, "set precision=bf16", "reduce parallel.tp or parallel.expert_tp"])
        yield ConfigProblem(
            "fp8.recipe", f"requires widths that are multiples of {unit} on a rank, found {found}", fp8.recipe, hint
        )
    tokens = unit * (2 * parallel.cp if parallel.cp > 1 else 1)
    if seq_length % tokens:
        rule = f"must be a multiple of {tokens} for fp8.recipe = {fp8.recipe}" + " x 2 cp" * (parallel.cp > 1)
        hint = f"set data.seq_length={seq_length // tokens * tokens or tokens}, or set precision=bf16"
        yield ConfigProblem("data.seq_length", rule, seq_length, hint)


def check_fp8_device(capability: tuple[int, int], recipe: str, *, experts: bool) -> None:
    """Raise `ConfigError` for a GPU, given by its compute capability, that has no GEMM of the FP8 recipe.

    Raises:
        ConfigError: with a recipe that it supports.
    """
    major, fits = capability[0], [name for name in MULTIPLES if _supports_recipe(name, capability, experts=experts)]
    if recipe not in fits:
        subject = f"fp8.recipe = {recipe}" + " with experts" * experts
        hint = ", or ".join([f"set fp8.recipe={name}" for name in fits if name != FOUR_BITS] + ["set precision=bf16"])
        raise ConfigError(f"{subject} is not supported on compute capability {major}.{capability[1]}", hint=hint)


def _supports_recipe(recipe: str, capability: tuple[int, int], *, experts: bool) -> bool:
    """Return whether a GPU supports the recipe: blockwise on Hopper only, MXFP8 and NVFP4 from Blackwell on, grouped rowwise
    on both.
    """
    if experts and (recipe in ("blockwise", "mxfp8", FOUR_BITS) or capability[0] not in (9, 10)):
        return False
    blackwell = capability[0] >= 10
    return {"blockwise": capability[0] == 9, "mxfp8": blackwell, FOUR_BITS: blackwell}.get(recipe, capability >= (8, 9))


def _linear_widths(model: ModelConfig, parallel: ParallelConfig) -> Iterator[tuple[str, int]]:
    """Yield the widths of a rank's linear layers, with the fields they come from."""
    tp, mla, moe = parallel.tp, model.mla, model.moe
    heads = model.num_attention_heads // tp
    yield "hidden_size", model.hidden_size
    if model.per_layer_input_size:
        yield "per_layer_input_size", model.per_layer_input_size
    if mla is None:
        yield f"query heads x head_dim / tp {tp}", heads * model.query_key_head_dim
        yield f"key/value heads x head_dim / tp {tp}", max(1, model.key_value_heads // tp) * model.query_key_head_dim
        if model.has_asymmetric_attention:
            values = model.attention_value_dim
            yield f"query heads x value_head_dim / tp {tp}", heads * values
            yield f"key/value heads x value_head_dim / tp {tp}", max(1, model.key_value_heads // tp) * values
        if model.softplus_gate == "head":
            yield f"query heads (softplus_gate) / tp {tp}", heads
        if full := model.full_attention:
            heads = (full.num_attention_heads or model.num_attention_heads) // tp
            yield f"query heads x full_attention.head_dim / tp {tp}", heads * full.head_dim
            keys = max(1, full.num_kv_heads // tp) * full.head_dim
            yield f"full_attention.num_kv_heads x head_dim / tp {tp}", keys
    else:
        yield "mla.kv_lora_rank", mla.kv_lora_rank
        yield "mla.q_lora_rank", mla.q_lora_rank or 0
        yield f"query heads x head_dim / tp {tp}", heads * model.query_key_head_dim
        yield f"mla.qk_nope_head_dim + v_head_dim, x heads / tp {tp}", heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield f"mla.v_head_dim x heads / tp {tp}", heads * mla.v_head_dim
    for width in list_sharded_ffn_widths(model):
        yield f"ffn_hidden_size {width} / tp {tp}", width // tp
    if moe is not None:
        yield f"moe.ffn_hidden_size / expert_tp {parallel.expert_tp}", moe.ffn_hidden_size // parallel.expert_tp
