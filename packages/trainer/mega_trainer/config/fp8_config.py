"""Configuration of `precision: fp8`: its section of run.yaml, and its requirements on the model and the layout. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeInt

from mega_common.errors import ConfigError
from mega_common.strict_config import ConfigProblem, StrictConfig
from mega_trainer.config.parallel_layout import tensor_split_widths

if TYPE_CHECKING:
    from mega_common.model_config import ModelConfig
    from mega_trainer.config.run_config import RunConfig
    from mega_trainer.config.sections import ParallelConfig

# Of the sizes of a product: what the kernels ask for, or the side of a block, so that no layout cuts one.
MULTIPLES = {"tensorwise": 16, "rowwise": 16, "blockwise": 128, "mxfp8": 32}


class Fp8Config(StrictConfig):
    """FP8 settings of linear layers under `precision: fp8`; embedding, head, norms, router and attention stay in bf16."""

    recipe: Literal["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"] = Field(
        "tensorwise",
        description="what has a scale of its own: tensors, rows, blocks of 1x128 and of weights 128x128 (Hopper), or 1x32 "
        "(Blackwell); delayed: tensors, by the largest numbers of the steps before",
    )
    format: Literal["e4m3", "hybrid"] | None = Field(
        None, description="hybrid: gradients in e5m2, all else in e4m3; default: hybrid where tensors are scaled whole"
    )
    keep_weights: bool = Field(
        True,
        description="weights are quantised once a step, not for each micro-batch: two bytes each (not with zero 3)",
    )
    bf16_first: NonNegativeInt = Field(0, description="so many of the first layers are left in bf16")
    bf16_last: NonNegativeInt = Field(0, description="so many of the last layers are left in bf16")

    @property
    def uses_e5m2_gradients(self) -> bool:
        """True if gradients are in e5m2."""
        return self.format == "hybrid" if self.format else self.recipe in ("tensorwise", "delayed")

    def fp8_layer_range(self, num_layers: int) -> range:
        """Return the layers whose linear layers run in FP8."""
        return range(self.bf16_first, num_layers - self.bf16_last)


def cached_weight_layers(config: RunConfig) -> range:
    """Return the layers whose FP8 weights are kept from one micro-batch of a step to the next."""
    keeps = config.precision == "fp8" and config.fp8.keep_weights
    return config.fp8.fp8_layer_range(config.model.num_layers) if keeps else range(0)


def find_fp8_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield settings that conflict with `precision: fp8`."""
    if config.precision != "fp8":
        return
    fp8, model, parallel = config.fp8, config.model, config.parallel
    if not fp8.fp8_layer_range(model.num_layers):
        rule = f"with bf16_last = {fp8.bf16_last} leaves none of the {model.num_layers} layers"
        yield ConfigProblem("fp8.bf16_first", rule, fp8.bf16_first, "fewer, or precision: bf16")
    if fp8.recipe not in MULTIPLES:
        rule = "keeps a history of scales, which torch's own kernels have not"
        yield ConfigProblem("fp8.recipe", rule, fp8.recipe, "tensorwise, which takes them from the numbers themselves")
        return
    unit, widths = MULTIPLES[fp8.recipe], dict(_linear_widths(model, parallel))
    if odd := {name: width for name, width in widths.items() if width % unit}:
        told = ", ".join(f"{name} = {width}" for name, width in odd.items())
        fitting = [name for name, size in MULTIPLES.items() if all(width % size == 0 for width in widths.values())]
        hint = " or ".join([*fitting[::-1], "a smaller tp or expert_tp", "precision: bf16"])
        yield ConfigProblem(
            "fp8.recipe", f"multiplies widths of a multiple of {unit} on a rank, not {told}", fp8.recipe, hint
        )
    tokens, length = unit * (2 * parallel.cp if parallel.cp > 1 else 1), config.data.seq_length
    if length % tokens:
        rule = f"must be a multiple of {tokens} for fp8.recipe = {fp8.recipe}" + " x 2 cp" * (parallel.cp > 1)
        yield ConfigProblem(
            "data.seq_length", rule, length, f"{length // tokens * tokens or tokens}, or precision: bf16"
        )


def check_fp8_device(capability: tuple[int, int], recipe: str, *, experts: bool) -> None:
    """Reject a GPU for which torch has no GEMM of the FP8 recipe, by its compute capability.

    Raises:
        ConfigError: with a recipe that it has.
    """
    major, fits = capability[0], [name for name in MULTIPLES if _supports_recipe(name, capability, experts=experts)]
    if recipe not in fits:
        what = f"fp8.recipe = {recipe}" + " with experts" * experts
        hint = f"fp8.recipe={' or '.join(fits)}; precision=bf16" if fits else "precision=bf16"
        raise ConfigError(
            f"{what}: torch has no such products for compute capability {major}.{capability[1]}", hint=hint
        )


def _supports_recipe(recipe: str, capability: tuple[int, int], *, experts: bool) -> bool:
    """Return whether torch supports the recipe: blockwise on Hopper only, MXFP8 from Blackwell on, grouped rowwise on
    both.
    """
    if experts and (recipe in ("blockwise", "mxfp8") or capability[0] not in (9, 10)):
        return False
    return {"blockwise": capability[0] == 9, "mxfp8": capability[0] >= 10}.get(recipe, capability >= (8, 9))


def _linear_widths(model: ModelConfig, parallel: ParallelConfig) -> Iterator[tuple[str, int]]:
    """Yield the widths of a rank's linear layers, with the fields they come from."""
    tp, mla, moe = parallel.tp, model.mla, model.moe
    heads = model.num_attention_heads // tp
    yield "hidden_size", model.hidden_size
    if mla is None:
        yield f"query heads x head_dim / tp {tp}", heads * model.query_key_head_dim
        yield f"key/value heads x head_dim / tp {tp}", max(1, model.key_value_heads // tp) * model.query_key_head_dim
    else:
        yield "mla.kv_lora_rank", mla.kv_lora_rank
        yield "mla.q_lora_rank", mla.q_lora_rank or 0
        yield f"query heads x head_dim / tp {tp}", heads * model.query_key_head_dim
        yield f"mla.qk_nope_head_dim + v_head_dim, x heads / tp {tp}", heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield f"mla.v_head_dim x heads / tp {tp}", heads * mla.v_head_dim
    for width in tensor_split_widths(model):
        yield f"ffn_hidden_size {width} / tp {tp}", width // tp
    if moe is not None:
        yield f"moe.ffn_hidden_size / expert_tp {parallel.expert_tp}", moe.ffn_hidden_size // parallel.expert_tp
