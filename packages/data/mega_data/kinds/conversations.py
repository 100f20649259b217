"""Conversations: whole ones, packed as documents are, with the weights of their mask in the loss."""

from __future__ import annotations

from mega_data.kinds.base import Setting
from mega_data.kinds.packed import PackedSamples, documents
from mega_data.mask import LossWeights
from mega_data.parts import Part


def conversations(part: Part, setting: Setting, wanted: int) -> PackedSamples:
    """The kind `conversations`.

    Raises:
        ConfigError: in order `megatron`, which knows no packing.
        DataError: on the first sample, without a mask, or when that counts nothing or everything.
    """
    return documents(part, setting, wanted, weights=LossWeights(part.reader))
