"""`precision: fp8` as configuration: the section of run.yaml, and what a model and a layout must be for it. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeInt

from mega_common.config import Config, Problem
from mega_common.errors import ConfigError
from mega_trainer.layout import split_widths

if TYPE_CHECKING:
    from mega_common.model_config import ModelConfig
    from mega_trainer.config import RunConfig
    from mega_trainer.sections import ParallelConfig

# Of the sizes of a product: what the kernels ask for, or the side of a block, so that no layout cuts one.
MULTIPLES = {"tensorwise": 16, "rowwise": 16, "blockwise": 128, "mxfp8": 32}


class Fp8Config(Config):
    """How linear layers multiply under `precision: fp8`; embedding, head, norms, router and attention stay in bf16."""

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
    def wide_gradients(self) -> bool:
        """Whether gradients are in e5m2."""
        return self.format == "hybrid" if self.format else self.recipe in ("tensorwise", "delayed")

    def layers(self, num_layers: int) -> range:
        """The layers that multiply in fp8."""
        return range(self.bf16_first, num_layers - self.bf16_last)


def layers_kept(config: RunConfig) -> range:
    """The layers whose weights in eight bits are kept from one micro-batch of a step to the next."""
    keeps = config.precision == "fp8" and config.fp8.keep_weights
    return config.fp8.layers(config.model.num_layers) if keeps else range(0)


def fp8_problems(config: RunConfig) -> Iterator[Problem]:
    """What does not fit fp8, where that is asked for."""
    if config.precision != "fp8":
        return
    fp8, model, parallel = config.fp8, config.model, config.parallel
    if not fp8.layers(model.num_layers):
        rule = f"with bf16_last = {fp8.bf16_last} leaves none of the {model.num_layers} layers"
        yield Problem("fp8.bf16_first", rule, fp8.bf16_first, "fewer, or precision: bf16")
    if fp8.recipe not in MULTIPLES:
        rule = "keeps a history of scales, which torch's own kernels have not"
        yield Problem("fp8.recipe", rule, fp8.recipe, "tensorwise, which takes them from the numbers themselves")
        return
    unit, widths = MULTIPLES[fp8.recipe], dict(_widths(model, parallel))
    if odd := {name: width for name, width in widths.items() if width % unit}:
        told = ", ".join(f"{name} = {width}" for name, width in odd.items())
        fitting = [name for name, size in MULTIPLES.items() if all(width % size == 0 for width in widths.values())]
        hint = " or ".join([*fitting[::-1], "a smaller tp or expert_tp", "precision: bf16"])
        yield Problem(
            "fp8.recipe", f"multiplies widths of a multiple of {unit} on a rank, not {told}", fp8.recipe, hint
        )
    tokens, length = unit * (2 * parallel.cp if parallel.cp > 1 else 1), config.data.seq_length
    if length % tokens:
        rule = f"must be a multiple of {tokens} for fp8.recipe = {fp8.recipe}" + " x 2 cp" * (parallel.cp > 1)
        yield Problem("data.seq_length", rule, length, f"{length // tokens * tokens or tokens}, or precision: bf16")


def check_device(capability: tuple[int, int], recipe: str, *, experts: bool) -> None:
    """Refuse a GPU whose products torch has not for the recipe, by its compute capability.

    Raises:
        ConfigError: with a recipe that it has.
    """
    major, fits = capability[0], [name for name in MULTIPLES if _multiplies(name, capability, experts=experts)]
    if recipe not in fits:
        what = f"fp8.recipe = {recipe}" + " with experts" * experts
        hint = f"fp8.recipe={' or '.join(fits)}; precision=bf16" if fits else "precision=bf16"
        raise ConfigError(
            f"{what}: torch has no such products for compute capability {major}.{capability[1]}", hint=hint
        )


def _multiplies(recipe: str, capability: tuple[int, int], *, experts: bool) -> bool:
    """Whether torch does: by blocks on Hopper alone, MXFP8 from Blackwell on, by groups whole rows on both."""
    if experts and (recipe in ("blockwise", "mxfp8") or capability[0] not in (9, 10)):
        return False
    return {"blockwise": capability[0] == 9, "mxfp8": capability[0] >= 10}.get(recipe, capability >= (8, 9))


def _widths(model: ModelConfig, parallel: ParallelConfig) -> Iterator[tuple[str, int]]:
    """The widths between which a rank's linear layers multiply, by the fields they come from."""
    tp, mla, moe = parallel.tp, model.mla, model.moe
    heads = model.num_attention_heads // tp
    yield "hidden_size", model.hidden_size
    if mla is None:
        yield f"query heads x head_dim / tp {tp}", heads * model.head_size
        yield f"key/value heads x head_dim / tp {tp}", max(1, model.kv_heads // tp) * model.head_size
    else:
        yield "mla.kv_lora_rank", mla.kv_lora_rank
        yield "mla.q_lora_rank", mla.q_lora_rank or 0
        yield f"query heads x head_dim / tp {tp}", heads * model.head_size
        yield f"mla.qk_nope_head_dim + v_head_dim, x heads / tp {tp}", heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        yield f"mla.v_head_dim x heads / tp {tp}", heads * mla.v_head_dim
    for width in split_widths(model):
        yield f"ffn_hidden_size {width} / tp {tp}", width // tp
    if moe is not None:
        yield f"moe.ffn_hidden_size / expert_tp {parallel.expert_tp}", moe.ffn_hidden_size // parallel.expert_tp
