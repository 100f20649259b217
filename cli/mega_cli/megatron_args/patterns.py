"""Which layers are of a kind, as Megatron's flags say it: every n-th, or a list such as `[0]*3+[1]*58`."""

from __future__ import annotations

from collections.abc import Callable

from mega_cli.megatron_args.arithmetic import layer_pattern
from mega_cli.megatron_args.draft import Draft
from mega_cli.megatron_args.shell import MARK, why_unknown


def layers_of_kind(
    draft: Draft, key: str, dest: str, every: Callable[[int, int], bool], further: int = 0
) -> list[bool] | None:
    """For each layer whether it is of the kind of `dest`, where `every(layer, n)` tells what a number n means.

    The `further` layers behind the last are counted too. None where that cannot be told: a wrong pattern is refused, and
    without a number of layers `key` is to be filled in.
    """
    if not draft[dest] or MARK.search(draft[dest]):
        draft.put(key, None, dest, ask=why_unknown(draft[dest] or "a pattern of layers"))
        return None
    layers, pattern = draft.run["model"]["num_layers"], layer_pattern(draft[dest])
    layers = layers and layers + further
    if isinstance(pattern, int) and pattern > 0:
        if pattern > 1 and not layers:
            draft.put(key, None, dest, ask="follows from the number of layers")
            return None
        return [every(layer, pattern) for layer in range(layers or 0)]
    if isinstance(pattern, list) and len(pattern) == (layers or len(pattern)):
        return [bool(kind) for kind in pattern]
    draft.refuse(dest, f"must be a number, or a list of {layers} zeros and ones such as [0]*1+[1]*3")
    return None
