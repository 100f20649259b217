"""Attention of one new query per row to a paged KV cache (arXiv:2309.06180), for all rows in one call.

There are three implementations. `flash` is torch's flash attention kernel, which reads the pages through a block table, on
a GPU. `gathered` copies the keys and values of all rows into one padded batch for one scaled_dot_product_attention call;
it supports every device and score transform. `rows` is the caller's own: one attention call per row, which reads
contiguous pages in place.

Legend: N rows, P pages of a row, T keys of the longest row, H query heads, K key/value heads, d size of queries and keys,
e of values.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from mega_trainer.kernels.attention_masks import PagedAttentionName, VisiblePagedKeys
from mega_trainer.kernels.blockwise_attention import apply_attention_sinks, attend_unfused_with_mask
from mega_trainer.kernels.flash_attention import supports_fused_attention_on_gpu
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform, RelativePositionBias

FLASH_PAGE = 256  # tokens; flash-attn 2's kernels require a multiple of it
OLDEST_FLASH_GPU = (8, 0)  # compute capability
# Most bytes of keys and values per row that a CPU gathers in less time than one more attention call takes.
CPU_GATHER_BYTES = 1 << 16
GPU_GATHER_BYTES = 1 << 30  # of all rows; more would not fit beside the weights
GPU_PADDING = 4  # most times the padded batch may be larger than the keys in it


def get_flash_page_size(device: torch.device, dtype: torch.dtype) -> int | None:
    """Return the page size in tokens that the `flash` implementation requires, or None where it cannot be used."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return FLASH_PAGE if torch.cuda.get_device_capability(device) >= OLDEST_FLASH_GPU else None


def supports_paged_attention(
    name: PagedAttentionName,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: VisiblePagedKeys,
    how: AttentionScoreTransform,
) -> bool:
    """Return whether the implementation `name` supports a call with the arguments of `Kernels.paged_attention`."""
    if name == "gathered":
        return how.bias is None or (how.softcap is None and how.sinks is None)
    if name == "flash":
        plain = how.softcap is None and how.bias is None and not rows.chunked and keys.shape[-1] == values.shape[-1]
        return plain and rows.page % FLASH_PAGE == 0 and supports_fused_attention_on_gpu(q, values)
    return True


def choose_paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, rows: VisiblePagedKeys, how: AttentionScoreTransform
) -> PagedAttentionName:
    """Return the name of the implementation (flash, gathered or rows) that is likely fastest for a paged-attention call.

    `gathered` copies keys and values, padded to the longest row. It is not chosen where the copies cost more than one
    attention call per row, or too much memory.
    """
    if supports_paged_attention("flash", q, keys, values, rows, how):
        return "flash"
    if len(q) == 1 or not supports_paged_attention("gathered", q, keys, values, rows, how):
        return "rows"
    width = keys[0].numel() + (0 if values is keys else values[0].numel())
    padded = len(q) * rows.longest * width * keys.element_size()
    if q.device.type == "cpu":
        return "gathered" if padded <= len(q) * CPU_GATHER_BYTES else "rows"
    small = padded <= GPU_GATHER_BYTES and rows.longest * len(q) <= GPU_PADDING * rows.total
    return "gathered" if small else "rows"


def attend_paged_flash(
    q: Tensor, keys: Tensor, values: Tensor, rows: VisiblePagedKeys, how: AttentionScoreTransform
) -> Tensor:
    """Compute attention of one query per row by torch's flash kernel, which reads KV cache pages in place.
    Arguments and result are as in `Kernels.paged_attention`.
    """
    pages = [held.view(-1, rows.page, *held.shape[1:]) for held in (keys, values)]
    y: Tensor
    y, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, *pages, rows.query_starts, rows.query_starts, 1, rows.block_table.shape[1] * rows.page, 0.0, False, False,
        scale=how.scale, window_size_left=rows.left, window_size_right=None if rows.left is None else 0,
        seqused_k=rows.lengths, block_table=rows.block_table,
    )  # fmt: skip
    if how.sinks is not None:
        y, _ = apply_attention_sinks(y, lse.t(), how.sinks)
    return y.to(q.dtype)


def attend_gathered_pages(
    q: Tensor, keys: Tensor, values: Tensor, rows: VisiblePagedKeys, how: AttentionScoreTransform
) -> Tensor:
    """Compute attention of one query per row to cached keys, which are gathered into one padded batch.
    Arguments and result are as in `Kernels.paged_attention`.
    """
    k = keys.index_select(0, rows.slots).view(len(q), rows.longest, *keys.shape[1:])
    v = k if values is keys else values.index_select(0, rows.slots).view(len(q), rows.longest, *values.shape[1:])
    if how.softcap is not None or how.sinks is not None:
        y, lse = attend_unfused_with_mask(q.unsqueeze(1), k, v, rows.mask, replace(how, bias=None))
        if how.sinks is not None:
            y, _ = apply_attention_sinks(y, lse, how.sinks)
        return y.squeeze(1).to(q.dtype)
    mask = rows.mask
    if how.bias is not None:
        bias = _gather_bias(how.bias, rows).view(len(q), k.shape[2], -1, rows.longest).to(q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    # heads that share a key are queries of it, so that it is read once
    grouped = q.view(len(q), k.shape[2], -1, q.shape[-1])
    y = F.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=how.scale)
    return y.flatten(1, 2)


def _gather_bias(bias: RelativePositionBias, rows: VisiblePagedKeys) -> Tensor:
    """Return the relative position bias of each row's visible keys, [N, H, T]; `bias` is for one query and T keys."""
    indices = (rows.offsets + (bias.zero + 1) + (rows.first - rows.stop)[:, None]).clamp_(max=bias.zero)
    return bias.values[:, indices].transpose(0, 1)
