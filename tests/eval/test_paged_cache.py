from __future__ import annotations

from typing import Any

import pytest
import torch

from mega_common.model_config import ModelConfig
from mega_eval import paged_cache
from mega_eval.paged_cache import (
    PAGE,
    PageAllocator,
    PagedCache,
    RequestTokenSpan,
    choose_page_size,
    hash_full_pages,
)


@pytest.mark.parametrize(
    ("layers", "head", "size"),
    [
        (None, 64, 256), (None, 512, PAGE), (["swa+mlp", "csa+mlp"], 64, 256), (["hca+mlp", "csa+mlp"], 64, PAGE),
        (["swa+mlp", "csa+mlp"], 512, PAGE), (["mamba", "mlp"], 64, PAGE),
    ],
)  # fmt: skip
def test_page_is_as_large_as_the_fused_kernel_requires_where_a_layer_can_use_it(
    layers: list[str] | None, head: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention to compressed entries needs a mask, and heads of 512 elements have no fused kernel."""
    monkeypatch.setattr(paged_cache, "get_flash_page_size", lambda device, dtype: 256)
    raw: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 256, "num_attention_heads": 4, "head_dim": head,
        "vocab_size": 100, "max_position": 64,
    }  # fmt: skip
    if layers is not None:
        compressed = {"q_lora_rank": 40, "window": 64, "output_groups": 4, "output_rank": 24, "hca_rate": 32,
                      "indexer": {"num_heads": 4, "head_dim": head, "top_k": 16, "interleaved": True}}  # fmt: skip
        raw |= {"layers": layers}
        raw |= (
            {"mamba": {"num_heads": 8, "head_dim": 64}} if "mamba" in layers
            else {"num_kv_heads": 1, "rope": {"interleaved": True}, "compressed": compressed}
        )  # fmt: skip
    assert choose_page_size(ModelConfig.parse(raw), torch.device("cuda"), torch.bfloat16) == size


def test_a_row_grows_in_one_piece_as_long_as_there_is_room():
    pages = PageAllocator(8)
    first, second = pages.allocate_pages(1, None), pages.allocate_pages(1, None)
    for row in (first, second):
        row += pages.allocate_pages(2, row[-1])
    assert [first, second] == [[row[0] + i for i in range(3)] for row in (first, second)]
    assert set(pages.allocate_pages(2, None)) | set(first) | set(second) == set(range(8))
    assert pages.num_free_pages == 0


def test_what_was_computed_is_found_until_its_page_is_needed():
    pages, names = PageAllocator(3), hash_full_pages(range(3 * PAGE))
    row = pages.allocate_pages(3, None)
    for page, name in zip(row, names, strict=True):
        pages.register_page(page, name)
    pages.release_pages(row)
    assert pages.num_free_pages == 3
    assert pages.share_cached_pages(names[:2]) == row[:2]
    pages.release_pages(row[:2])
    assert pages.allocate_pages(1, None) == row[2:]  # the longest unused
    assert pages.share_cached_pages(names) == row[:2]
    assert pages.num_free_pages == 0


def test_a_page_is_named_by_all_tokens_up_to_its_end():
    one, other = hash_full_pages(range(40)), hash_full_pages([9, *range(1, 40)])
    assert len(one) == 2
    assert not set(one) & set(other)
    assert hash_full_pages(range(60), one) == hash_full_pages(range(60))


def test_slots_of_a_row_and_what_a_window_sees_of_them():
    span = RequestTokenSpan(slice(5, 8), 2 * PAGE + 4, [4, 5, 1])
    assert span.contiguous_slot_runs == [(4 * PAGE, 6 * PAGE), (PAGE, PAGE + 4)]
    assert span.new_token_slots == [PAGE + 1, PAGE + 2, PAGE + 3]
    assert span.visible_slot_runs(4) == [(6 * PAGE - 2, 6 * PAGE), (PAGE, PAGE + 4)]
    assert span.visible_slot_runs(None) == span.visible_slot_runs(100) == span.contiguous_slot_runs


def test_a_latent_alone_is_kept_where_keys_are_values():
    cache, given = PagedCache(1, 2, 1), torch.randn(3, 1, 1, 6)
    cache.begin_forward_pass([RequestTokenSpan(slice(0, 3), 3, [1])], torch.device("cpu"))
    seen = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object) -> torch.Tensor:
        seen.append((k, v))
        return q

    attend.chunked = False  # type: ignore[attr-defined]
    cache.update_and_attend(0, given, given, None, None, attend)
    assert torch.equal(seen[0][0], given.transpose(0, 1))
    assert torch.equal(seen[0][1], given.transpose(0, 1))
