"""Images for vision encoders that run as modules of transformers, prepared by the model's own processor.

A processor of transformers makes the encoder's inputs of an image, and the text that stands for the image in a prompt: the
placeholders of its features, with tokens for rows or tiles among them.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from mega_common.errors import DataError, MissingPackageError
from mega_common.transformers_config import VisionModuleConfig
from mega_data.images.image_inputs import ImageInputs, ImageText

_TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"})
_STANDARD = frozenset({"bos_token", "cls_token", "eos_token", "mask_token", "pad_token", "sep_token", "unk_token"})


class ModuleImageProcessor:
    """Processor of transformers for the images of a vision module.

    Raises:
        DataError: from the constructor, if the model's folder had no image processor, or transformers cannot load it.
        MissingPackageError: from the constructor, if it requires a package that is not installed.
    """

    def __init__(self, module: VisionModuleConfig) -> None:
        self.kind = module.model_type
        if not module.image_processor:
            raise DataError(
                f"model_type {self.kind}: the model's folder has no image processor (preprocessor_config.json or "
                "processor_config.json)",
                hint="add the file of the published model to the folder, and convert it again",
            )
        load = _PixtralProcessor if self.kind == "mistral3" else _load_processor
        try:
            self._processor: Any = load(module, _load_image_processor(module.image_processor))
        except Exception as error:
            line = " ".join(str(error).split())[:400]
            if isinstance(error, ImportError) or "optional dependencies" in line:
                raise MissingPackageError(
                    f"model_type {self.kind}: its processor in transformers requires a package that is missing ({line})",
                    hint="install the package that transformers names, such as torchvision",
                ) from None
            raise DataError(
                f"model_type {self.kind}: transformers cannot load its processor ({line})",
                hint="add processor_config.json and tokenizer_config.json of the published model to its folder",
            ) from error

    def prepare(self, image: Image.Image) -> tuple[ImageInputs, ImageText]:
        """Return the encoder's inputs of an RGB image, and its text in a prompt.

        Raises:
            DataError: when transformers cannot process the image.
        """
        processor = self._processor
        try:
            found = processor(
                images=image, text=[processor.image_token], return_text_replacement_offsets=True,
                return_tensors="pt" if self.kind == "llama4" else "np",  # bf16, which numpy lacks
            )  # fmt: skip
            ((replaced,),) = found.pop("text_replacement_offsets")
        except Exception as error:
            raise DataError(f"model_type {self.kind}: transformers cannot process the image ({error})") from error
        text, token = str(replaced["replacement"]), processor.tokenizer.convert_ids_to_tokens(processor.image_token_id)
        token = (
            processor.img_patch_token if self.kind == "llama4" else token
        )  # its image_token is one token of the text
        arrays = {name: _to_array(value) for name, value in found.items() if name not in _TEXT_INPUTS}
        shape = (1, 1, text.count(token))
        if "image_grid_thw" in arrays:
            high, wide = (int(side) // processor.image_processor.merge_size for side in arrays["image_grid_thw"][0, 1:])
            shape = (1, high, wide)
        return ImageInputs(arrays, shape), ImageText(processor.image_token, text, shape[1] * shape[2])


def _to_array(value: Any) -> np.ndarray:
    """Return an input of the encoder as an array, also if it is a tensor of bf16."""
    return np.asarray(value.float() if str(getattr(value, "dtype", "")) == "torch.bfloat16" else value)


class _PixtralProcessor:
    """Processor of Pixtral's images: rows of placeholders, each with a token at its end.

    The class of transformers has the same result; its module cannot be imported without torchvision.
    """

    def __init__(self, module: VisionModuleConfig, image_processor: Any) -> None:
        given, self._image_processor = module.processor, image_processor
        self._side = int(given.get("patch_size", 16)) * int(given.get("spatial_merge_size", 1))
        self.image_token, self._break, self._end = (
            str(given.get(f"image{name}_token", f"[IMG{name.upper()}]")) for name in ("", "_break", "_end")
        )
        self.tokenizer, self.image_token_id = _make_tokenizer(module, [self.image_token]), 0
        self.image_token_id = self.tokenizer.convert_tokens_to_ids(self.image_token)

    def __call__(self, images: Any, **_: Any) -> dict[str, Any]:
        """Return the inputs of one image, and the text that replaces its placeholder."""
        found = self._image_processor(images, patch_size=self._side, return_tensors="np")
        high, wide = (int(length) // self._side for length in found["image_sizes"][0])
        text = self._break.join([self.image_token * wide] * high) + self._end
        return {**found, "text_replacement_offsets": [[{"replacement": text}]]}


def _load_image_processor(settings: Mapping[str, Any]) -> Any:
    from transformers import AutoImageProcessor

    with tempfile.TemporaryDirectory() as folder:  # the class that has the settings is found by transformers
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings))
        return AutoImageProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]


def _load_processor(module: VisionModuleConfig, image_processor: Any) -> Any:
    """Return the processor with a tokenizer of special tokens alone: it replaces placeholders, and encodes no text."""
    import transformers
    from transformers.models.auto import processing_auto

    classes, own = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"], module.processor.get("processor_class")
    found = getattr(transformers, str(own if own in classes.values() else classes[module.model_type]))

    class ImagesOnly(found):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> type:
            return type(argument)  # a processor of videos may be missing, as it requires torchvision

    accepted = inspect.signature(found.__init__).parameters
    settings = {key: value for key, value in module.processor.items() if key in accepted}
    settings |= {name: None for name in ("video_processor", "feature_extractor") if name in accepted}  # images alone
    tokens = list(module.tokens.values())
    first = ImagesOnly(image_processor=image_processor, tokenizer=_make_tokenizer(module, tokens), **settings)
    own = [value for key, value in vars(first).items() if key.endswith("_token") and isinstance(value, str)]
    return ImagesOnly(image_processor=image_processor, tokenizer=_make_tokenizer(module, tokens + own), **settings)


def _make_tokenizer(module: VisionModuleConfig, tokens: list[str]) -> Any:
    """Return a tokenizer of transformers that knows only special tokens, under the names that the model gives them."""
    from transformers import PreTrainedTokenizerFast

    backend = Backend(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.add_special_tokens(sorted(set(tokens)))
    named = {key: value for key, value in module.tokens.items() if key not in _STANDARD}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<unk>",
        extra_special_tokens=named,
        bos_token=module.tokens.get("bos_token", "<unk>"),
    )
