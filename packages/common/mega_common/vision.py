"""A vision tower and a projector before a decoder, as pure data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from mega_common.config import Config, Problem
from mega_common.counts import LayerCount

TOWER, PROJECTOR = "model.vision_tower.", "model.projector."  # what the names of their tensors begin with
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

Colours = tuple[float, float, float]
Resolution = tuple[PositiveInt, PositiveInt]


class NativeResolution(Config):
    """Images of any shape, each as large as it is to the next whole feature, as in Qwen2.5-VL (arXiv:2502.13923).

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


class VisionConfig(Config):
    """A vision transformer (arXiv:2010.11929) of square images, and the projector that makes tokens of its patches.

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
    native: NativeResolution | None = Field(
        None, description="images keep their shape; they are no squares of image_size"
    )
    resize: Literal["crop", "stretch"] = Field(
        "crop", description="crop: the shorter side to image_size, and the middle; stretch: both sides"
    )
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    mean: Annotated[Colours, Field(description="of red, green and blue, from 0 to 1")] = CLIP_MEAN
    std: Colours = CLIP_STD

    @property
    def used_layers(self) -> int:
        """Layers up to the one whose output is projected; those behind it compute nothing."""
        return self.feature_layer if self.feature_layer >= 0 else self.num_layers + 1 + self.feature_layer

    @property
    def patches(self) -> int:
        """Of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def tokens(self) -> int:
        """Placeholders of an image in a text; of one in tiles those of the whole, which come first; where images keep their
        shape those of a square of image_size.
        """
        return self.patches // (self.native.merge if self.native else self.pool) ** 2 + self.feature_class

    @property
    def rows(self) -> int:
        """What the projector makes of a square: its features, and where images have tiles the end of a line."""
        return self.tokens + (self.pinpoints is not None)

    def framed(self, begin: str, image: str, end: str) -> str:
        """What a text has for an image, of what its tokens are in a text: as Gemma 3's processor and Qwen's templates write it."""
        return f"{begin}{image}{end}" if self.native else f"\n\n{begin}{image}{end}\n\n"

    @property
    def varies(self) -> bool:
        """Whether images have different numbers of placeholders."""
        return self.pinpoints is not None or self.native is not None

    @property
    def sizes(self) -> tuple[int, int, int] | None:
        """Of images that keep their shape: the side of a feature, and the fewest and most of an image, in pixels."""
        native = self.native
        return None if native is None else (self.patch_size * native.merge, native.min_pixels, native.max_pixels)

    @property
    def patch_elements(self) -> int:
        """Numbers of a patch."""
        return 3 * self.patch_size**2 * (self.native.frames if self.native else 1)

    def features(self, height: int, width: int) -> int:
        """What the projector makes of an image, or of a tile, of so many pixels."""
        if self.native is None:
            return self.rows
        high, wide = self.grid(height, width)
        return high * wide

    def features_of_all(self, shapes: Iterable[Sequence[int]]) -> int:
        """Those of several images or tiles, by their shapes [3, H, W]."""
        return sum(self.features(*shape[1:]) for shape in shapes)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Those from top to bottom, and from left to right, where images keep their shape."""
        side = self.patch_size * (self.native.merge if self.native else 1)
        return height // side, width // side

    @property
    def encoder(self) -> dict[str, Any]:
        """The tower's layers as the fields of a `ModelConfig`."""
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

    def computes(self, name: str) -> bool:
        """Whether a tensor of a model with this tower, by its canonical name, is for anything."""
        layer = name.removeprefix(f"{TOWER}layers.") if name.startswith(f"{TOWER}layers.") else None
        if layer is not None:
            return int(layer.partition(".")[0]) < self.used_layers
        return self.feature_norm or not name.startswith(f"{TOWER}norm.")

    def problems(self) -> Iterator[Problem]:
        """Rules between sizes."""
        if self.image_size % self.patch_size:
            yield Problem("image_size", f"must be a multiple of patch_size = {self.patch_size}", self.image_size)
        if self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            yield Problem("hidden_size", f"must be a multiple of num_attention_heads = {heads}", self.hidden_size)
        if not 0 <= self.used_layers <= self.num_layers:
            yield Problem("feature_layer", f"is none of the tower's {self.num_layers}", self.feature_layer)
        if self.feature_class and not self.class_token:
            yield Problem("feature_class", "the tower has no class token", hint="feature_class: false")
        if self.image_size // self.patch_size % self.pool or (self.pool > 1 and self.feature_class):
            yield Problem("pool", "must divide the patches of a side, and leaves out the class token", self.pool)
        if self.pinpoints is not None:
            if self.projector != "mlp" or self.pool > 1 or self.feature_class or self.bidirectional:
                rule = "go with projector mlp, and neither with pool, feature_class nor bidirectional"
                yield Problem("pinpoints", rule, hint="leave these out")
            if any(side % self.image_size for one in self.pinpoints for side in one):
                yield Problem("pinpoints", f"must be multiples of image_size = {self.image_size}", self.pinpoints)
        if (self.native is not None) != (self.projector == "merger"):
            yield Problem("native", "goes with projector merger", hint="give both or neither")
        elif self.native is not None:
            yield from self._native_problems(self.native)
        if (self.begin_token is None) != (self.end_token is None):
            yield Problem("begin_token", "and end_token go together", hint="give both")
        if self.feature_norm and self.used_layers != self.num_layers:
            yield Problem("feature_norm", "is of the last layer's output", hint="feature_layer: -1")

    def _native_problems(self, native: NativeResolution) -> Iterator[Problem]:
        beside = {
            "activation": "swiglu", "class_token": False, "patch_bias": False, "pre_norm": False, "feature_layer": -1,
            "feature_norm": False, "pool": 1, "bidirectional": False, "pinpoints": None, "projector_bias": True,
        }  # fmt: skip
        for name, value in beside.items():
            if getattr(self, name) != value:
                yield Problem(name, f"must be {value} beside native", getattr(self, name))
        if native.window % (self.patch_size * native.merge):
            rule = f"must be a multiple of patch_size x merge = {self.patch_size * native.merge}"
            yield Problem("native.window", rule, native.window)
        if any(layer >= self.num_layers for layer in native.full_layers):
            yield Problem(
                "native.full_layers", f"names layers that {self.num_layers} layers do not have", native.full_layers
            )
        if native.min_pixels > native.max_pixels:
            yield Problem("native.min_pixels", f"must be at most max_pixels = {native.max_pixels}", native.min_pixels)
        if self.hidden_size // self.num_attention_heads % 4:
            yield Problem(
                "hidden_size", "a head's size must be a multiple of 4, for rows and columns turn it", self.hidden_size
            )
