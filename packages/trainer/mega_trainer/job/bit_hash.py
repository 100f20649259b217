"""Position-dependent hashes of the bits of tensors, in integer arithmetic.

The hash of words x_0, x_1, ... is the sum of x_i times an odd pseudorandom multiplier of position i, modulo 2^64. One
flipped bit always changes it, whatever the position. Several changes (equal flips in two elements, two elements that are
swapped) cancel with a probability of about 2^-32, where an XOR of all elements does not see them at all.

A sum of integers has the same bits in any order, so the hash of a tensor is the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 20  # words hashed at once; the scratch memory is 8 bytes for each
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def hash_tensor_bits(tensors: Sequence[Tensor]) -> Tensor:
    """Return a hash of the bits of each tensor, int64 [number of tensors], on the device of the first tensor; the host
    does not wait for the device.
    """
    words = [_words(tensor) for tensor in tensors]
    scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for device in {each.device for each in words}:
        length = min(CHUNK, max(len(each) for each in words if each.device == device))
        multipliers = _multipliers(length, device)
        scratch[device] = multipliers, torch.empty_like(multipliers)
    hashes = [_hash(each, *scratch[each.device]).to(words[0].device) for each in words]
    return torch.stack(hashes)


def _words(tensor: Tensor) -> Tensor:
    """View a tensor as a vector of integers of at most four bytes, so that no multiplier loses a flip of the sign."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(WORDS[min(flat.element_size(), 4)])


def _hash(words: Tensor, multipliers: Tensor, products: Tensor) -> Tensor:
    """Hash a vector of words with the multipliers of a chunk; `products` is scratch memory of the same length."""
    sums = [
        torch.mul(chunk, multipliers[: len(chunk)], out=products[: len(chunk)]).sum()
        for chunk in torch.split(words, CHUNK)
    ]
    if len(sums) == 1:
        return sums[0]
    return (torch.stack(sums) * _multipliers(len(sums), words.device)).sum()


def _multipliers(count: int, device: torch.device) -> Tensor:
    """Return an odd pseudorandom int64 for each position: the finalizer of SplitMix64 (doi:10.1145/2660193.2660195)."""
    mixed = torch.arange(1, count + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift int64 values to the right as unsigned numbers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number."""
    return value - (1 << 64) if value >> 63 else value
