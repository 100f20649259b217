"""Check of tensor- and pipeline-parallel sizes: Megatron refuses to build some models with some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mega_ckpt.formats.megatron_names import Part
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig


def check_sizes(model: ModelConfig, parts: Sequence[Part], tp: int, pp: int, *, ranks: bool, local: bool) -> None:
    """Refuse sizes with which Megatron cannot load a model.

    Args:
        model: the model to write.
        parts: Megatron's tensors of it.
        tp, pp: the sizes.
        ranks: whether there is a file for each rank (`torch`), which older versions of Megatron have to load too.
        local: whether the layers are those of `--transformer-impl local`.

    Raises:
        CheckpointError: naming the size, what it has to divide, and sizes that fit.
    """
    if model.encoder and pp > 1:
        raise CheckpointError(f"pp = {pp}: Megatron has no T5 in stages of a pipeline", hint="--pp 1")
    layers = model.num_layers
    if layers % pp:
        fits = [n for n in range(1, layers + 1) if layers % n == 0]
        raise CheckpointError(f"pp = {pp} does not divide the {layers} layers", hint=f"one of {fits}")
    if problem := next(_problems(model, parts, tp, ranks=ranks, local=local), None):
        fits = [n for n in range(1, tp) if not any(_problems(model, parts, n, ranks=ranks, local=local))]
        raise CheckpointError(f"tp = {tp} does not divide {problem}", hint=f"--tp of {fits}")


def _problems(model: ModelConfig, parts: Sequence[Part], tp: int, *, ranks: bool, local: bool) -> Iterator[str]:
    """Describe all that `tp` does not divide."""
    groups, heads = model.kv_heads, model.num_attention_heads
    if groups % tp and (ranks or tp % groups):
        yield f"the {groups} key/value heads" + ("" if ranks else ", and is no multiple of them")
    if heads % tp:
        yield f"the {heads} attention heads"
    if (mamba := model.mamba) and (mamba.num_groups % tp or mamba.num_heads % tp):
        yield f"the {mamba.num_heads} heads in {mamba.num_groups} groups of the Mamba-2 layers"
    for part in parts:
        whole = not local and "_down_proj." in part.name  # each rank has all of it
        if part.axis is not None and not whole and part.shape[part.axis] % (part.halves * tp):
            yield f"{part.name} {list(part.shape)}"
