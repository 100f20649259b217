"""Any flip, pair of flips or swap changes a hash; the layout in memory and the size of chunks do not matter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mega_trainer.job import bit_hash
from mega_trainer.job.bit_hash import hash_tensor_bits

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(words: Tensor, place: int, bit: int) -> None:
    width = words.element_size() * 8
    mask = 1 << bit
    words[place] ^= mask - (1 << width) if bit == width - 1 and words.dtype != torch.uint8 else mask


def flips(*changes: tuple[float, float]) -> Callable[[Tensor], None]:
    """Flip a bit in each place; both as shares of the last place and of the highest bit."""

    def change(words: Tensor) -> None:
        for place, bit in changes:
            flip(words, round(place * (len(words) - 1)), round(bit * (words.element_size() * 8 - 1)))

    return change


def swap(one: int, other: int) -> Callable[[Tensor], None]:
    def change(words: Tensor) -> None:
        words[[one, other]] = words[[other, one]]

    return change


def rolled(words: Tensor) -> None:
    words.copy_(words.roll(1))


CHANGES: dict[str, Callable[[Tensor], None]] = {
    "sign of the first": flips((0, 1)), "lowest bit of the first": flips((0, 0)), "sign of the last": flips((1, 1)),
    "lowest bit of the last": flips((1, 0)), "a bit in the middle": flips((0.5, 0.4)),
    "the same bit of the first and the last": flips((0, 0.5), (1, 0.5)),
    "the signs of two neighbors": flips((0, 1), (0.02, 1)), "the signs of the first and the last": flips((0, 1), (1, 1)),
    "the lowest bit of two": flips((0.3, 0), (0.8, 0)),
    "one bit of the corners of a rectangle": flips((0, 0.5), (0.1, 0.5), (0.5, 0.5), (0.6, 0.5)),
    "two neighbors swapped": swap(0, 1), "the first and the last swapped": swap(0, -1),
    "elements a chunk apart swapped": swap(3, 3 + 16), "all elements one place on": rolled,
}  # fmt: skip


@pytest.mark.parametrize("chunk", [16, bit_hash.CHUNK])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_bits_changes_the_hash(
    change: Callable[[Tensor], None], dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bit_hash, "CHUNK", chunk)
    values = (torch.arange(1, 51, dtype=torch.float64) * 1.7).to(dtype)
    before = hash_tensor_bits([values])
    change(values.view(INTEGERS[values.element_size()]))
    assert hash_tensor_bits([values]) != before


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), float("inf")])
def test_padding_zeros_and_values_that_are_no_numbers_are_bits_too(value: float) -> None:
    values = torch.full((70,), value)
    before = hash_tensor_bits([values])
    flip(values.view(torch.int32), 69, 31)
    assert hash_tensor_bits([values]) != before


def test_one_flip_of_any_bit_in_any_place_changes_the_hash() -> None:
    values = torch.randn(7, dtype=torch.float64)
    before, words = hash_tensor_bits([values]), values.view(torch.int64)
    for place in range(7):
        for bit in range(64):
            flip(words, place, bit)
            assert hash_tensor_bits([values]) != before, (place, bit)
            flip(words, place, bit)
    assert hash_tensor_bits([values]) == before


def test_the_layout_in_memory_and_other_tensors_do_not_matter() -> None:
    matrix = torch.randn(6, 9)
    shapes = [torch.tensor(2.0), matrix, matrix.t().contiguous().t(), matrix.view(-1), torch.randn(3).bfloat16()[1:]]
    single, matrix_hash, transposed, flat, odd = hash_tensor_bits(shapes)
    assert matrix_hash == transposed == flat == hash_tensor_bits([matrix])
    assert single == hash_tensor_bits([shapes[0]])
    assert odd == hash_tensor_bits([shapes[-1].clone()])
    assert hash_tensor_bits([matrix.t()]) != matrix_hash


def reference(words: list[int]) -> int:
    """The same hash of up to a chunk of words, in Python's integers."""
    total, ones = 0, (1 << 64) - 1
    for place, word in enumerate(words, 1):
        mixed = place * 0x9E3779B97F4A7C15 & ones
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & ones
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & ones
        total += word * ((mixed ^ mixed >> 31) | 1)
    return total & ones


@pytest.mark.parametrize("words", [[0], [1, 2, 3], [-1, 5, -(2**31)], [2**31 - 1] * 40])
def test_the_hash_is_that_of_the_formula(words: list[int]) -> None:
    assert hash_tensor_bits([torch.tensor(words, dtype=torch.int32)]).item() % 2**64 == reference(words)
