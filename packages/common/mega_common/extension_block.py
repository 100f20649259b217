"""Sections `model.mixers` and `model.feed_forwards`: token mixers and feed-forward blocks that extensions add.

The section has the extension's own settings, and what the block declares: its tensors, heads and FLOPs. The declaration is
data, so a checkpoint can be read, resharded, converted and planned without the extension's code.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from mega_common.errors import ConfigError
from mega_common.strict_config import StrictConfig


class BlockDeclaration(StrictConfig):
    """Facts about an extension's block that parallelism, checkpoints and predictions need."""

    extension: str = Field(description="name of the extension with the code of the block")
    tensors: dict[str, tuple[NonNegativeInt, ...]] = Field(
        description="shape of each tensor, by its name after model.layers.N."
    )
    heads: PositiveInt = Field(1, description="heads, which tensor ranks split; a feed-forward block has none")
    shared_heads: PositiveInt = Field(
        1, description="heads that several others share, such as key/value heads, which several ranks may hold"
    )
    recurrent: bool = Field(False, description="the block carries a state from token to token")
    context_parallel: bool = Field(False, description="the block exchanges tokens or states between context ranks")
    flops_per_token: NonNegativeFloat = Field(0.0, description="forward FLOPs per token that are not of its matrices")
    flops_per_key: NonNegativeFloat = Field(0.0, description="forward FLOPs for each pair of query and visible key")
    keys: PositiveInt | None = Field(None, description="most keys that a query sees, such as a chunk; default: all")


class FunctionDeclaration(StrictConfig):
    """Facts about an extension's norm, activation, position encoding or score modification that others depend on."""

    extension: str = Field(description="name of the extension with the code of the function")
    gated: bool = Field(False, description="the activation has a gate, and so the feed-forward block a gate projection")


class ExtensionSection(StrictConfig):
    """Base of a section of run.yaml with an extension's own settings."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """Settings of the extension in this section, as they were given."""
        return dict(self.model_extra or {})


class ExtensionFunction(ExtensionSection):
    """Section of one function of an extension in the model: the extension's own settings, and its declaration.

    The declaration is written when the extension is loaded; a declaration in run.yaml is replaced.
    """

    declares: FunctionDeclaration | None = None


class ExtensionBlock(ExtensionSection):
    """Section of one block of an extension: the extension's own settings, and the block's declaration.

    The declaration is written when the extension is loaded; a declaration in run.yaml is replaced.
    """

    declares: BlockDeclaration | None = None

    @property
    def declaration(self) -> BlockDeclaration:
        """Declaration of the block; a `ConfigError` if its extension was not loaded.

        Raises:
            ConfigError: if its extension was not loaded.
        """
        if self.declares is None:
            raise ConfigError(
                "a layer requires an extension that is not loaded", hint="name it in `extensions` of run.yaml"
            )
        return self.declares


ExtensionBlocks = dict[str, ExtensionBlock]
NormKind = Literal["rmsnorm", "layernorm"]
ActivationKind = Literal[
    "swiglu",
    "clamped_swiglu",
    "geglu",
    "geglu_erf",
    "reglu2",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "relu",
    "relu2",
    "xielu",
]
PositionKind = Literal["rope", "learned", "relative", "alibi", "none"]
# Names of mega's own functions, by the field of `ModelConfig` that names one.
FUNCTION_NAMES: dict[str, tuple[str, ...]] = {
    "norm": get_args(NormKind), "activation": get_args(ActivationKind), "position": get_args(PositionKind),
    "attention_scores": (),
}  # fmt: skip
# Kinds of functions of an extension in the model, and the field of `ModelConfig` that names one.
FUNCTION_FIELDS = {
    "norms": "norm", "activations": "activation", "positions": "position", "attention_scores": "attention_scores",
}  # fmt: skip
