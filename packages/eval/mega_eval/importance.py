"""What of a dense model does little, by its activations on some text (arXiv:2407.14679, section 2.2; layers by arXiv:2403.03853).

    neuron f    |h_f| before the down projection            head h    |y_h| before the output projection
    channel c   |x_c| behind the norms of all layers        layer     1 - cos(x before it, x behind it)

These are means over the tokens of a window; over windows neurons, heads and channels are added up by their squares, as the
paper found best.

Legend: W windows, S tokens, L layers, D model width, F feed-forward width, H heads, d head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mega_ckpt.shrink import Importance, check_shrinkable
from mega_common.log import ProgressBar
from mega_data.dataset import sequential
from mega_eval.perplexity import checked_info
from mega_trainer.model.block import Block
from mega_trainer.model.decoder import Decoder


def importance(model: Decoder, prefix: Path, seq_length: int, *, windows: int) -> Importance:
    """Of the parts of `model`, in eval mode, on the first windows of `seq_length` tokens of the data set `prefix`.

    Raises:
        ConfigError: when the model is no plain dense decoder.
        DataError: when the data set cannot be used or is of another vocabulary.
    """
    check_shrinkable(model.config)
    checked_info(prefix, model, seq_length, None)
    data = sequential(prefix, seq_length)
    count = min(windows, len(data))
    with ProgressBar("measuring", total=count, unit="sequences") as bar:

        def rows() -> Iterable[Tensor]:
            for number in range(count):
                yield torch.from_numpy(data[number].tokens).to(model.device)[None]
                bar.advance(1)

        return measure(model, rows())


@torch.inference_mode()
def measure(model: Decoder, windows: Iterable[Tensor]) -> Importance:
    """The same, of windows int64 [1, S]."""
    size = model.config.head_size
    found: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))

    def add(name: str, x: Tensor) -> None:
        found[name] = found[name] + x.double().cpu().mean((0, 1)).square()

    with ExitStack() as stack:
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, Block)
            assert layer.mixer is not None
            assert layer.feed is not None
            stack.enter_context(_told(layer.feed.work.down, partial(_absolute, add, f"neurons {index}")))  # type: ignore[arg-type]
            stack.enter_context(_told(layer.mixer.work.out, partial(_heads, add, f"heads {index}", size)))  # type: ignore[arg-type]
            for half in (layer.mixer, layer.feed):
                stack.enter_context(_told(half, partial(_absolute, add, "channels")))
        changed = torch.zeros(len(model.layers), dtype=torch.float64)
        for tokens in windows:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            context = model.context(positions)
            x = model.embed(tokens, positions)
            for index, layer in enumerate(model.layers):
                y = layer(x, context)
                changed[index] += 1 - torch.cosine_similarity(x.double(), y.double(), dim=-1).mean().item()
                x = y
    layers = range(len(model.layers))
    neurons, heads = (torch.stack([found[f"{name} {i}"] for i in layers]).sqrt() for name in ("neurons", "heads"))
    return Importance(changed, neurons, heads, found["channels"].sqrt())


def _absolute(add: Callable[[str, Tensor], None], name: str, x: Tensor) -> None:
    add(name, x.abs())


def _heads(add: Callable[[str, Tensor], None], name: str, size: int, x: Tensor) -> None:
    add(name, torch.linalg.vector_norm(torch.unflatten(x, -1, (-1, size)), dim=-1))


@contextmanager
def _told(module: nn.Module, hear: Callable[[Tensor], None]) -> Any:
    """Meanwhile `hear` is given what goes into `module`."""
    handle = module.register_forward_pre_hook(lambda _, inputs: hear(inputs[0]))
    try:
        yield
    finally:
        handle.remove()
