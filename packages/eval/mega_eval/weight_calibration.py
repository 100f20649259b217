"""Calibration data of a quantization: inputs of a model's linear layers on some text."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mega_common.errors import ConfigError, DataError
from mega_common.object_store import Location
from mega_common.progress_logging import ProgressBar
from mega_data.blended_dataset import SequentialDataset, open_sequential_dataset
from mega_eval.model_loading import load_inference_model
from mega_eval.perplexity_comparison import encode_text_file
from mega_eval.pruning_importance import capture_module_inputs
from mega_trainer.parallel.parameter_info import get_parameter_info
from mega_trainer.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear

WINDOW, WINDOWS = 512, 64  # tokens of a sequence, and sequences, at most


@dataclass(frozen=True)
class TextCalibration:
    """Calibration text of a quantization, which gives the second moments of the inputs of linear layers.

    Attributes:
        model: folder, file or URL of the model, whose weights are not quantized.
        sequences: token ids int64 [S] of the calibration data.
        name: name of the data.
    """

    model: str | Location
    sequences: tuple[Tensor, ...]
    name: str

    @classmethod
    def open_calibration_data(cls, model: str | Location, data: Path) -> TextCalibration:
        """Read the first `WINDOWS` sequences of a text file, encoded by the model's tokenizer, or of a token data set.

        Raises:
            DataError: when the data cannot be used.
        """
        if data.is_file():
            windows = SequentialDataset(encode_text_file(model, data, "calibration"), WINDOW)
        else:
            windows = open_sequential_dataset(data, WINDOW)
        sequences = [torch.from_numpy(windows[number].tokens) for number in range(min(WINDOWS, len(windows)))]
        sequences[-1] = sequences[-1][: windows.num_labels - WINDOW * (len(sequences) - 1)]  # without padding
        return cls(model, tuple(sequences), data.name)

    @property
    def description(self) -> str:
        """Size and name of the calibration data, for logs and model cards."""
        return f"{sum(map(len, self.sequences)):,} tokens of {self.name}"

    def __str__(self) -> str:
        """Return text that differs for other calibration data; a resumed conversion has to use the same."""
        return f"{self.description}, {zlib.crc32(torch.cat(self.sequences).numpy().tobytes()):08x}"

    def iterate_moments(self) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Yield (canonical names of weights, X X^T [I, I] in fp32) of weights with the same inputs X [I, tokens].

        The model runs in fp32, one layer after the other on all sequences. Experts are left out.

        Raises:
            CheckpointError: when the model cannot be loaded.
            ConfigError: when it is not a decoder, or layers of it depend on others than the one before.
            DataError: when a token is outside the vocabulary.
        """
        model = load_inference_model(self.model)
        if model.config.per_layer_input_size or model.config.shared_kv_layers:
            raise ConfigError(
                f"{self.name}: calibration is not supported with inputs of each layer or shared keys and values, as it runs "
                "one layer at a time",
                hint="quantise without calibration",
            )
        largest = max(int(tokens.max()) for tokens in self.sequences)
        if largest >= model.config.vocab_size:
            raise DataError(f"{self.name}: token {largest} is outside the model's vocabulary")
        with ProgressBar("calibrating", total=len(model.layers), unit="layers") as bar, torch.inference_mode():
            positions = [torch.arange(len(tokens))[None] for tokens in self.sequences]
            hidden = [
                model.embed_inputs(tokens[None], at) for tokens, at in zip(self.sequences, positions, strict=True)
            ]
            contexts = [
                model.make_forward_context(at, tokens=tokens[None])
                for tokens, at in zip(self.sequences, positions, strict=True)
            ]
            for layer in model.layers:
                weights = _find_linear_weights(layer)
                moments: dict[nn.Module, Tensor] = {}
                with ExitStack() as stack:
                    for module in weights:
                        stack.enter_context(capture_module_inputs(module, partial(_add_moments, moments, module)))
                    hidden = [layer(x, context) for x, context in zip(hidden, contexts, strict=True)]
                yield from ((weights[module], moments.pop(module)) for module in list(moments))
                bar.advance(1)


def _find_linear_weights(layer: nn.Module) -> dict[nn.Module, list[str]]:
    """Return the linear layers in a transformer layer, with the canonical names of their weights."""
    columns = {each: [*each.weights] for each in layer.modules() if isinstance(each, ColumnParallelLinear)}
    rows = {each: [each.weight] for each in layer.modules() if isinstance(each, RowParallelLinear)}
    return {
        module: [piece.name for weight in weights for piece in get_parameter_info(weight).pieces]
        for module, weights in (columns | rows).items()
    }


def _add_moments(moments: dict[nn.Module, Tensor], module: nn.Module, x: Tensor) -> None:
    rows = x.flatten(0, -2)
    moments[module] = moments.get(module, 0) + rows.T @ rows
