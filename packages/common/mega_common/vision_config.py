"""Configuration of a vision encoder and a projector before a decoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from mega_common.strict_config import ConfigProblem, LayerCount, StrictConfig

TOWER, PROJECTOR = "model.vision_tower.", "model.projector."  # what the names of their tensors begin with
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

Colours = tuple[float, float, float]
Resolution = tuple[PositiveInt, PositiveInt]


class NativeResolutionConfig(StrictConfig):
    """Images of any shape at native resolution, with sides rounded to whole features, as in Qwen2.5-VL
    (arXiv:2502.13923).

    Its tower has RMS norms, gated feed-forwards, and rotated queries and keys: half of a head by a patch's row, half by its
    column. In most layers patches see those of their window alone.
    """

    merge: PositiveInt = Field(2, description="a feature is made of a square of merge x merge patches")
    frames: PositiveInt = Field(2, description="of a video, that a patch is of; an image stands for as many of itself")
    window: PositiveInt = Field(112, description="pixels of a side of the squares within which patches see one another")
    full_layers: tuple[NonNegativeInt, ...] = Field(
        (7, 15, 23, 31), description="layers in which patches see the whole image"
    )
    min_pixels: PositiveInt = Field(3136, description="of an image, which is enlarged to as many")
    max_pixels: PositiveInt = Field(12_845_056, description="likewise, made smaller")


class VisionConfig(StrictConfig):
    """Vision transformer (arXiv:2010.11929) on square images, and the projector that turns its patches into tokens.

    A CLIP tower (arXiv:2103.00020) has a class token and a norm before the first layer, a SigLIP one (arXiv:2303.15343)
    neither, and a bias of its patches. The projector of two matrices is LLaVA 1.5's (arXiv:2310.03744), the one behind a
    norm Gemma 3's (arXiv:2503.19786). With `pinpoints` an image is several squares, as in LLaVA-NeXT; with `native` it keeps
    its shape, and the projector makes one feature of several patches, behind a norm.
    """

    num_layers: LayerCount
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    image_size: PositiveInt = Field(336, description="pixels of a side; beside native of what plans are made for")
    patch_size: PositiveInt = Field(14, description="likewise")
    activation: Literal["quick_gelu", "gelu", "gelu_tanh", "swiglu"] = "quick_gelu"
    norm_eps: float = Field(1e-5, gt=0)
    class_token: bool = True
    patch_bias: bool = False
    pre_norm: bool = Field(True, description="a norm before the first layer, as in CLIP")
    feature_layer: int = Field(
        -2, description="whose output is projected: 0 are the embedded patches, -1 the last layer"
    )
    feature_norm: bool = Field(False, description="the norm behind the last layer is before the projector")
    feature_class: bool = Field(False, description="the class token is a feature too")
    projector: Literal["mlp", "norm", "merger"] = Field(
        "mlp",
        description="mlp: two matrices; norm: an RMS norm that multiplies by 1 + weight, and one matrix; merger: an RMS norm, "
        "patches side by side, and two matrices",
    )
    pool: PositiveInt = Field(1, description="a feature is the mean of a square of pool x pool patches")
    projector_activation: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu"
    projector_bias: bool = True
    image_token: NonNegativeInt = Field(description="the placeholder, of which a text has one for each feature")
    begin_token: NonNegativeInt | None = Field(
        None, description="what is put before the placeholders of an image; a text of Gemma 3 has it alone for one"
    )
    end_token: NonNegativeInt | None = Field(None, description="what is put behind them")
    bidirectional: bool = Field(
        False, description="placeholders side by side see one another in the decoder, not only those before them"
    )
    pinpoints: Annotated[tuple[Resolution, ...], Field(min_length=1)] | None = Field(
        None,
        description="heights and widths in pixels, to the best of which an image is resized, to be cut in tiles of image_size; "
        "their lines of patches, each with a learned row behind it, follow those of the whole image",
    )
    native: NativeResolutionConfig | None = Field(
        None, description="images keep their shape; they are no squares of image_size"
    )
    resize: Literal["crop", "stretch"] = Field(
        "crop", description="crop: the shorter side to image_size, and the middle; stretch: both sides"
    )
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    mean: Annotated[Colours, Field(description="of red, green and blue, from 0 to 1")] = CLIP_MEAN
    std: Colours = CLIP_STD

    @property
    def num_used_layers(self) -> int:
        """Number of layers up to the one whose output is projected; later layers are not computed."""
        return self.feature_layer if self.feature_layer >= 0 else self.num_layers + 1 + self.feature_layer

    @property
    def patches_per_image(self) -> int:
        """Number of patches of a square image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens_per_image(self) -> int:
        """Number of placeholder tokens of an image in a text: with tiles, of the whole image, which comes first; at
        native resolution, of a square of image_size.
        """
        return self.patches_per_image // (self.native.merge if self.native else self.pool) ** 2 + self.feature_class

    @property
    def features_per_square(self) -> int:
        """Number of projector outputs for a square image: its features, and with tiles the end-of-row feature."""
        return self.tokens_per_image + (self.pinpoints is not None)

    def wrap_image_tokens(self, begin: str, image: str, end: str) -> str:
        """Return the text of an image from the texts of its tokens, as the processors of Gemma 3 and Qwen write it."""
        return f"{begin}{image}{end}" if self.native else f"\n\n{begin}{image}{end}\n\n"

    @property
    def has_variable_tokens(self) -> bool:
        """True if images have different numbers of placeholder tokens."""
        return self.pinpoints is not None or self.native is not None

    @property
    def native_size_limits(self) -> tuple[int, int, int] | None:
        """Side of a feature, minimum and maximum pixels of an image, in pixels; None without native resolution."""
        native = self.native
        return None if native is None else (self.patch_size * native.merge, native.min_pixels, native.max_pixels)

    @property
    def values_per_patch(self) -> int:
        """Number of values of a patch."""
        return 3 * self.patch_size**2 * (self.native.frames if self.native else 1)

    def count_features(self, height: int, width: int) -> int:
        """Return the number of projector outputs for an image or tile of `height` x `width` pixels."""
        if self.native is None:
            return self.features_per_square
        high, wide = self.get_feature_grid(height, width)
        return high * wide

    def count_total_features(self, shapes: Iterable[Sequence[int]]) -> int:
        """Return the number of projector outputs for several images or tiles of shapes [3, H, W]."""
        return sum(self.count_features(*shape[1:]) for shape in shapes)

    def get_feature_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of features in height and width of an image at native resolution."""
        side = self.patch_size * (self.native.merge if self.native else 1)
        return height // side, width // side

    @property
    def encoder_fields(self) -> dict[str, Any]:
        """Fields of a `ModelConfig` with the layers of the vision encoder."""
        fields = {
            "num_layers": self.num_layers, "hidden_size": self.hidden_size, "ffn_hidden_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_attention_heads, "vocab_size": 1, "norm": "layernorm",
            "norm_eps": self.norm_eps, "activation": self.activation, "position": "none", "qkv_bias": True,
            "attention_out_bias": True, "mlp_bias": True,
        }  # fmt: skip
        if self.native:  # what a layer with a window sees is said by the images at hand
            patches = (self.native.window // self.patch_size) ** 2
            fields |= {"norm": "rmsnorm", "position": "rope", "sliding_window": patches}
            fields |= {"full_attention_layers": list(self.native.full_layers)}
        return fields

    def uses_tensor(self, name: str) -> bool:
        """Return whether a tensor of a model with this vision encoder, by its canonical name, is used in the forward
        pass.
        """
        layer = name.removeprefix(f"{TOWER}layers.") if name.startswith(f"{TOWER}layers.") else None
        if layer is not None:
            return int(layer.partition(".")[0]) < self.num_used_layers
        return self.feature_norm or not name.startswith(f"{TOWER}norm.")

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield violated rules between sizes."""
        if self.image_size % self.patch_size:
            yield ConfigProblem("image_size", f"must be a multiple of patch_size = {self.patch_size}", self.image_size)
        if self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            yield ConfigProblem("hidden_size", f"must be a multiple of num_attention_heads = {heads}", self.hidden_size)
        if not 0 <= self.num_used_layers <= self.num_layers:
            yield ConfigProblem("feature_layer", f"is none of the tower's {self.num_layers}", self.feature_layer)
        if self.feature_class and not self.class_token:
            yield ConfigProblem("feature_class", "the tower has no class token", hint="feature_class: false")
        if self.image_size // self.patch_size % self.pool or (self.pool > 1 and self.feature_class):
            yield ConfigProblem("pool", "must divide the patches of a side, and leaves out the class token", self.pool)
        if self.pinpoints is not None:
            if self.projector != "mlp" or self.pool > 1 or self.feature_class or self.bidirectional:
                rule = "go with projector mlp, and neither with pool, feature_class nor bidirectional"
                yield ConfigProblem("pinpoints", rule, hint="leave these out")
            if any(side % self.image_size for one in self.pinpoints for side in one):
                yield ConfigProblem("pinpoints", f"must be multiples of image_size = {self.image_size}", self.pinpoints)
        if (self.native is not None) != (self.projector == "merger"):
            yield ConfigProblem("native", "goes with projector merger", hint="give both or neither")
        elif self.native is not None:
            yield from self._find_native_problems(self.native)
        if (self.begin_token is None) != (self.end_token is None):
            yield ConfigProblem("begin_token", "and end_token go together", hint="give both")
        if self.feature_norm and self.num_used_layers != self.num_layers:
            yield ConfigProblem("feature_norm", "is of the last layer's output", hint="feature_layer: -1")

    def _find_native_problems(self, native: NativeResolutionConfig) -> Iterator[ConfigProblem]:
        beside = {
            "activation": "swiglu", "class_token": False, "patch_bias": False, "pre_norm": False, "feature_layer": -1,
            "feature_norm": False, "pool": 1, "bidirectional": False, "pinpoints": None, "projector_bias": True,
        }  # fmt: skip
        for name, value in beside.items():
            if getattr(self, name) != value:
                yield ConfigProblem(name, f"must be {value} beside native", getattr(self, name))
        if native.window % (self.patch_size * native.merge):
            rule = f"must be a multiple of patch_size x merge = {self.patch_size * native.merge}"
            yield ConfigProblem("native.window", rule, native.window)
        if any(layer >= self.num_layers for layer in native.full_layers):
            yield ConfigProblem(
                "native.full_layers", f"names layers that {self.num_layers} layers do not have", native.full_layers
            )
        if native.min_pixels > native.max_pixels:
            yield ConfigProblem(
                "native.min_pixels", f"must be at most max_pixels = {native.max_pixels}", native.min_pixels
            )
        if self.hidden_size // self.num_attention_heads % 4:
            yield ConfigProblem(
                "hidden_size", "a head's size must be a multiple of 4, for rows and columns turn it", self.hidden_size
            )
