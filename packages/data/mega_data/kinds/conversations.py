"""Conversations: whole ones, packed as documents are, with the weights of their mask in the loss, and perhaps images."""

from __future__ import annotations

from mega_data.files.mask import LossWeights
from mega_data.images.references import has_images
from mega_data.images.samples import SeeingSamples
from mega_data.kinds.base import Setting
from mega_data.kinds.packed import PackedSamples, check_order, documents
from mega_data.order.parts import Part


def conversations(part: Part, setting: Setting, wanted: int) -> PackedSamples:
    """The kind `conversations`.

    Raises:
        ConfigError: in order `megatron`, which knows no packing.
        DataError: on the first sample, without a mask, or when that counts nothing or everything; for images that the model
            does not see.
    """
    if has_images(part.reader.prefix):
        check_order(part, setting)
        return SeeingSamples(part, setting, weights=LossWeights(part.reader))
    return documents(part, setting, wanted, weights=LossWeights(part.reader))
