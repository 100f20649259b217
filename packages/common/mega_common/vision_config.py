"""Configuration of a vision encoder and a projector before a decoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import isqrt
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from mega_common.layer_kinds import find_largest_divisor
from mega_common.strict_config import ConfigProblem, LayerCount, StrictConfig, format_setting_value
from mega_common.transformers_config import VisionModuleConfig

TOWER, PROJECTOR = "model.vision_tower.", "model.projector."  # prefixes of tensor names
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

Colours = tuple[float, float, float]
Resolution = tuple[PositiveInt, PositiveInt]


class NativeResolutionConfig(StrictConfig):
    """Settings for images at native resolution instead of squares, as in Qwen2.5-VL and Qwen3-VL.
    Sides are rounded to multiples of a feature's side (arXiv:2502.13923, arXiv:2511.21631).

    The vision encoder has 2D RoPE: half of a head is rotated by a patch's row, half by its column. In Qwen2.5-VL most
    layers have attention within windows. In Qwen3-VL all have full attention, a learned table of positions is
    interpolated to the patches of an image, and the outputs of some layers are merged to features as well, which are
    added to the outputs of the first decoder layers (DeepStack, arXiv:2406.04334).
    """

    merge: PositiveInt = Field(2, description="merge x merge patches form one feature")
    frames: PositiveInt = Field(2, description="video frames per patch; an image is repeated")
    norm: Literal["rmsnorm", "layernorm"] = Field(
        "rmsnorm", description="norms of the vision encoder and the projector"
    )
    window: PositiveInt | None = Field(
        112, description="side of the square attention windows, in pixels; null: full attention in all layers"
    )
    full_layers: tuple[NonNegativeInt, ...] = Field(
        (7, 15, 23, 31), description="layers with full attention; not used if window is null"
    )
    positions: NonNegativeInt = Field(
        0, description="learned positions of a square table, interpolated to the patches of an image; 0: none"
    )
    deepstack: tuple[NonNegativeInt, ...] = Field(
        (), description="encoder layers whose features are added to the outputs of the first decoder layers, in order"
    )
    min_pixels: PositiveInt = Field(3136, description="smaller images are enlarged to this size")
    max_pixels: PositiveInt = Field(12_845_056, description="larger images are reduced to this size")


class VisionConfig(StrictConfig):
    """Configuration of a vision transformer (arXiv:2010.11929) and its projector.
    The transformer usually works on square images. The projector turns its patches into tokens.

    A CLIP encoder (arXiv:2103.00020) has a class token and a norm before the first layer; a SigLIP encoder
    (arXiv:2303.15343) has neither, and a bias of its patches. The projector `mlp` is LLaVA 1.5's (arXiv:2310.03744),
    `norm` Gemma 3's (arXiv:2503.19786). With `pinpoints` an image is several squares, as in LLaVA-NeXT; with `native`
    it keeps its shape, and the projector merges several patches to one feature, after a norm. With `module` the encoder
    and the projector are modules of transformers; of the other settings only `image_token` has an effect, and the sizes
    of the encoder are used by `mega plan`.
    """

    num_layers: LayerCount
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    image_size: PositiveInt = Field(336, description="side of an image in pixels; with native only used by mega plan")
    patch_size: PositiveInt = Field(14, description="side of a patch in pixels")
    activation: Literal["quick_gelu", "gelu", "gelu_tanh", "swiglu"] = "quick_gelu"
    norm_eps: float = Field(1e-5, gt=0)
    class_token: bool = True
    patch_bias: bool = False
    pre_norm: bool = Field(True, description="a norm before the first layer, as in CLIP")
    feature_layer: int = Field(
        -2, description="layer whose output is projected: 0 are the embedded patches, -1 the last layer"
    )
    feature_norm: bool = Field(False, description="apply the norm after the last layer before the projector")
    feature_class: bool = Field(False, description="the class token is a feature as well")
    projector: Literal["mlp", "norm", "merger"] = Field(
        "mlp",
        description="mlp: two matrices; norm: an RMS norm that multiplies by 1 + weight, and one matrix; merger: a norm, "
        "concatenated patches, and two matrices",
    )
    pool: PositiveInt = Field(1, description="a feature is the mean of a square of pool x pool patches")
    projector_activation: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu"
    projector_bias: bool = True
    image_token: NonNegativeInt = Field(description="placeholder token, one for each feature in a text")
    layer_input_token: NonNegativeInt | None = Field(
        None, description="token by which placeholders get the inputs of each layer; default: image_token"
    )
    begin_token: NonNegativeInt | None = Field(
        None, description="token before the placeholders of an image; texts for Gemma 3 have only this token"
    )
    end_token: NonNegativeInt | None = Field(None, description="token after the placeholders of an image")
    bidirectional: bool = Field(
        False, description="bidirectional attention among the placeholders of an image in the decoder"
    )
    bidirectional_windows: bool = Field(
        False, description="bidirectional only in decoder layers with a sliding window, as in Gemma 4"
    )
    bidirectional_prompt: bool = Field(
        False,
        description="bidirectional among all tokens of a text with images up to the first one whose next token counts in "
        "the loss, as in PaliGemma",
    )
    pinpoints: Annotated[tuple[Resolution, ...], Field(min_length=1)] | None = Field(
        None,
        description="heights and widths in pixels; an image is resized to the best one and cut into tiles of image_size, "
        "whose features, with a learned feature after each row, follow those of the whole image",
    )
    native: NativeResolutionConfig | None = Field(
        None, description="images keep their shape instead of being squares of image_size"
    )
    module: VisionModuleConfig | None = Field(
        None, description="vision encoder and projector that run as modules of the transformers library"
    )
    resize: Literal["crop", "stretch"] = Field(
        "crop", description="crop: scale the shorter side to image_size and keep the center; stretch: scale both sides"
    )
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    mean: Annotated[Colours, Field(description="mean of red, green and blue, from 0 to 1")] = CLIP_MEAN
    std: Colours = CLIP_STD

    @property
    def num_used_layers(self) -> int:
        """Number of vision encoder layers up to the one whose output is projected; later layers are not computed."""
        return self.feature_layer if self.feature_layer >= 0 else self.num_layers + 1 + self.feature_layer

    @property
    def patches_per_image(self) -> int:
        """Number of patches of a square image of side `image_size`."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens_per_image(self) -> int:
        """Number of placeholder tokens in a text for one square image of side `image_size`.

        With tiles, of the whole image, which comes first; at native resolution, of a square of image_size.
        """
        return self.patches_per_image // (self.native.merge if self.native else self.pool) ** 2 + self.feature_class

    @property
    def features_per_tile(self) -> int:
        """Number of projector output rows for one square image or tile.
        They are its features, and with tiles one more, the end-of-row feature.
        """
        return self.tokens_per_image + (self.pinpoints is not None)

    def wrap_image_tokens(self, begin: str, image: str, end: str) -> str:
        """Return `image` between `begin` and `end`, with two newlines before and after unless images have native resolution."""
        return f"{begin}{image}{end}" if self.native else f"\n\n{begin}{image}{end}\n\n"

    @property
    def has_variable_tokens(self) -> bool:
        """True if images differ in their number of placeholder tokens: tiles, native resolution or a module."""
        return self.pinpoints is not None or self.native is not None or self.module is not None

    @property
    def uses_mrope_grid_positions(self) -> bool:
        """True if the rotary positions of an image are those of the rows and columns of its features (M-RoPE)."""
        return self.native is not None or (self.module is not None and self.module.grid_positions)

    @property
    def native_size_limits(self) -> tuple[int, int, int] | None:
        """(side in pixels of one feature's square, minimum and maximum pixels of an image); None without native resolution."""
        native = self.native
        return None if native is None else (self.patch_size * native.merge, native.min_pixels, native.max_pixels)

    @property
    def values_per_patch(self) -> int:
        """Number of input values of a patch: 3 colors x `patch_size` squared, times the frames at native resolution."""
        return 3 * self.patch_size**2 * (self.native.frames if self.native else 1)

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Vision encoder layers whose features are added to the outputs of the first decoder layers, one for each."""
        return self.native.deepstack if self.native else ()

    def count_image_features(self, height: int, width: int) -> int:
        """Return the number of projector outputs for an image or tile of `height` x `width` pixels (features with a module)."""
        if self.native is None and self.module is None:
            return self.features_per_tile
        high, wide = self.get_feature_grid(height, width)
        return high * wide

    def count_features_of_images(self, shapes: Iterable[Sequence[int]]) -> int:
        """Return the number of projector outputs for several images or tiles together.
        They are given by their pixel array shapes [3, height, width].
        """
        return sum(self.count_image_features(*shape[1:]) for shape in shapes)

    def get_feature_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return (rows, columns) of an image's feature grid from its size in pixels (native resolution) or features (module)."""
        if self.module is not None:
            return height, width
        side = self.patch_size * (self.native.merge if self.native else 1)
        return height // side, width // side

    @property
    def encoder_fields(self) -> dict[str, Any]:
        """Fields of a `ModelConfig` that describes the vision encoder's transformer layers."""
        fields = {
            "num_layers": self.num_layers, "hidden_size": self.hidden_size, "ffn_hidden_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_attention_heads, "vocab_size": 1, "norm": "layernorm",
            "norm_eps": self.norm_eps, "activation": self.activation, "position": "none", "qkv_bias": True,
            "attention_out_bias": True, "mlp_bias": True,
        }  # fmt: skip
        if self.native:  # the attention windows of a layer follow from the image
            fields |= {"norm": self.native.norm, "position": "rope"}
            if self.native.window is not None:
                fields["sliding_window"] = (self.native.window // self.patch_size) ** 2
                fields["full_attention_layers"] = list(self.native.full_layers)
        return fields

    def uses_tensor(self, name: str) -> bool:
        """Return whether the forward pass of a model with this vision encoder uses a tensor, by its canonical name."""
        if self.module is not None:  # a pooling head of SigLIP, which no feature passes
            return ".head." not in name or not name.startswith(TOWER)
        layer = name.removeprefix(f"{TOWER}layers.") if name.startswith(f"{TOWER}layers.") else None
        if layer is not None:
            return int(layer.partition(".")[0]) < self.num_used_layers
        return self.feature_norm or not name.startswith(f"{TOWER}norm.")

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violated rules between the vision settings: sizes, tiles, native resolution and special tokens."""
        if self.image_size % self.patch_size:
            hint = f"image_size: {max(1, self.image_size // self.patch_size) * self.patch_size}"
            rule = f"must be a multiple of patch_size = {self.patch_size}"
            yield ConfigProblem("image_size", rule, self.image_size, hint)
        if self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            hint = f"num_attention_heads: {find_largest_divisor(self.hidden_size, heads)}"
            rule = f"must be a multiple of num_attention_heads = {heads}"
            yield ConfigProblem("hidden_size", rule, self.hidden_size, hint)
        if not 0 <= self.num_used_layers <= self.num_layers:
            rule = f"must be from {-self.num_layers - 1} to {self.num_layers}"
            yield ConfigProblem("feature_layer", rule, self.feature_layer, "feature_layer: -1")
        if self.feature_class and not self.class_token:
            yield ConfigProblem("feature_class", "requires class_token", True, "feature_class: false")
        for name in ("bidirectional_windows", "bidirectional_prompt"):
            if getattr(self, name) and not self.bidirectional:
                yield ConfigProblem(name, "requires bidirectional", True, f"bidirectional: true, or {name}: false")
        if self.image_size // self.patch_size % self.pool:
            side = self.image_size // self.patch_size
            hint = f"pool: {find_largest_divisor(side, self.pool)}"
            yield ConfigProblem("pool", f"must divide the {side} patches of a side", self.pool, hint)
        elif self.pool > 1 and self.feature_class:
            yield ConfigProblem("pool", "is not supported with feature_class", self.pool, "feature_class: false")
        if self.pinpoints is not None:
            if self.projector != "mlp" or self.pool > 1 or self.feature_class or self.bidirectional:
                rule = "requires projector: mlp, without pool, feature_class and bidirectional"
                yield ConfigProblem("pinpoints", rule, hint="leave out pinpoints")
            if any(side % self.image_size for resolution in self.pinpoints for side in resolution):
                rule, hint = f"must be multiples of image_size = {self.image_size}", "change pinpoints or image_size"
                yield ConfigProblem("pinpoints", rule, self.pinpoints, hint)
        if (self.native is not None) != (self.projector == "merger"):
            hint = "leave out native" if self.native else "projector: mlp"
            yield ConfigProblem("native", "requires projector: merger, and projector: merger requires it", hint=hint)
        elif self.native is not None:
            yield from self._find_native_problems(self.native)
        if (self.begin_token is None) != (self.end_token is None):
            one, other = ("begin_token", "end_token") if self.end_token is None else ("end_token", "begin_token")
            yield ConfigProblem(one, f"requires {other}", getattr(self, one), f"leave out {one}, or set {other}")
        if self.feature_norm and self.num_used_layers != self.num_layers:
            rule = "requires the output of the last layer (feature_layer: -1)"
            yield ConfigProblem("feature_norm", rule, True, "feature_layer: -1")

    def _find_native_problems(self, native: NativeResolutionConfig) -> Iterator[ConfigProblem]:
        required = {
            "class_token": False, "pre_norm": False, "feature_layer": -1, "feature_norm": False, "pool": 1, "bidirectional": False, "pinpoints": None, "projector_bias": True,
        }  # fmt: skip
        for name, value in required.items():
            if getattr(self, name) != value:
                shown = format_setting_value(value)
                yield ConfigProblem(name, f"must be {shown} with native", getattr(self, name), f"{name}: {shown}")
        if native.window is not None and native.window % (self.patch_size * native.merge):
            rule = f"must be a multiple of patch_size x merge = {self.patch_size * native.merge}"
            side = self.patch_size * native.merge
            hint = f"native.window: {max(1, native.window // side) * side}"
            yield ConfigProblem("native.window", rule, native.window, hint)
        if native.window is not None and any(layer >= self.num_layers for layer in native.full_layers):
            yield ConfigProblem(
                "native.full_layers",
                f"must be layer numbers up to {self.num_layers - 1}",
                native.full_layers,
                f"use numbers from 0 to {self.num_layers - 1}",
            )
        if isqrt(native.positions) ** 2 != native.positions:
            yield ConfigProblem(
                "native.positions",
                "must be a square number, the size of a square table",
                native.positions,
                f"native.positions: {isqrt(native.positions) ** 2}",
            )
        if any(a >= b for a, b in pairwise((*native.deepstack, self.num_layers))):
            rule = f"must be increasing layer numbers up to {self.num_layers - 1}"
            yield ConfigProblem("native.deepstack", rule, native.deepstack, "native.deepstack: []")
        if native.min_pixels > native.max_pixels:
            yield ConfigProblem(
                "native.min_pixels",
                f"must be at most native.max_pixels = {native.max_pixels}",
                native.min_pixels,
                f"native.min_pixels: {native.max_pixels}",
            )
        if self.hidden_size // self.num_attention_heads % 4:
            yield ConfigProblem(
                "hidden_size",
                "must give a head size that is a multiple of 4 (2D RoPE)",
                self.hidden_size,
                f"hidden_size: {-(-self.hidden_size // self.num_attention_heads // 4) * 4 * self.num_attention_heads}",
            )
