"""Importance of the parts of a dense model, from activations on some text (arXiv:2407.14679, section 2.2; layers by
arXiv:2403.03853).

    neuron f    |h_f| before the down projection            head h    |y_h| before the output projection
    channel c   |x_c| after the norms of all layers         layer     1 - cos(its input, its output)

These are means over the tokens of a window; for neurons, heads and channels, windows are combined by the L2 norm, which the
paper found best.

Legend: W windows, S tokens, L layers, D model width, F feed-forward width, H heads, d head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mega_ckpt.shrink_model import PartImportance, check_shrinkable
from mega_common.progress_logging import ProgressBar
from mega_data.blended_dataset import open_sequential_dataset
from mega_eval.dataset_scores import check_token_ids_in_vocabulary
from mega_eval.model_loading import check_sequence_length
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.transformer_layer import TransformerLayer


def measure_importance(model: Decoder, prefix: Path, seq_length: int, *, windows: int) -> PartImportance:
    """Measure the importance of the layers, heads, MLP neurons and channels of a model, for pruning.
    The model in eval mode reads the first `windows` windows of `seq_length` tokens of the data set `prefix`.

    Raises:
        ConfigError: when the model is not a plain dense decoder.
        DataError: when the data set cannot be used or has tokens outside the vocabulary.
    """
    check_shrinkable(model.config)
    check_token_ids_in_vocabulary(prefix, model.config.vocab_size)
    check_sequence_length(model.config, seq_length, f"windows of {seq_length} tokens")
    data = open_sequential_dataset(prefix, seq_length)
    count = min(windows, len(data))
    with ProgressBar("measuring", total=count, unit="sequences") as bar:

        def iterate_windows() -> Iterable[Tensor]:
            for number in range(count):
                yield torch.from_numpy(data[number].tokens).to(model.device)[None]
                bar.advance(1)

        return accumulate_importance(model, iterate_windows())


@torch.inference_mode()
def accumulate_importance(model: Decoder, windows: Iterable[Tensor]) -> PartImportance:
    """Return the importance of a model's layers, heads, MLP neurons and channels over token windows int64 [1, S]."""
    size = model.config.query_key_head_dim
    found: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))

    def add_activations(name: str, x: Tensor) -> None:
        found[name] = found[name] + x.double().cpu().mean((0, 1)).square()

    with ExitStack() as stack:
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, TransformerLayer)
            assert layer.mixer is not None
            assert layer.feed is not None
            down, out = layer.feed.work.down, layer.mixer.work.out
            assert isinstance(down, nn.Module)
            assert isinstance(out, nn.Module)
            stack.enter_context(
                capture_module_inputs(down, partial(_add_absolute, add_activations, f"neurons {index}"))
            )
            stack.enter_context(
                capture_module_inputs(out, partial(_add_head_norms, add_activations, f"heads {index}", size))
            )
            for half in (layer.mixer, layer.feed):
                stack.enter_context(capture_module_inputs(half, partial(_add_absolute, add_activations, "channels")))
        changed = torch.zeros(len(model.layers), dtype=torch.float64)
        for tokens in windows:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            context = model.make_forward_context(positions, tokens=tokens)
            x = model.embed_inputs(tokens, positions)
            for index, layer in enumerate(model.layers):
                y = layer(x, context)
                changed[index] += 1 - torch.cosine_similarity(x.double(), y.double(), dim=-1).mean().item()
                x = y
    layers = range(len(model.layers))
    neurons, heads = (torch.stack([found[f"{name} {i}"] for i in layers]).sqrt() for name in ("neurons", "heads"))
    return PartImportance(changed, neurons, heads, found["channels"].sqrt())


def _add_absolute(add: Callable[[str, Tensor], None], name: str, x: Tensor) -> None:
    """Add the absolute values of activations."""
    add(name, x.abs())


def _add_head_norms(add: Callable[[str, Tensor], None], name: str, size: int, x: Tensor) -> None:
    """Add the norms of the output of each attention head."""
    add(name, torch.linalg.vector_norm(torch.unflatten(x, -1, (-1, size)), dim=-1))


@contextmanager
def capture_module_inputs(module: nn.Module, callback: Callable[[Tensor], None]) -> Iterator[None]:
    """Context manager that calls `callback` with the first input of `module` on every forward."""
    handle = module.register_forward_pre_hook(lambda _, inputs: callback(inputs[0]))
    try:
        yield
    finally:
        handle.remove()
