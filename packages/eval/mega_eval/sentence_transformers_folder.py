"""Folders of sentence-transformers: declared pooling, projection, normalisation, prompts and maximum length.

`modules.json` lists the modules in order, each with a folder of its own: `Transformer`, `Pooling`, then `Dense`,
`LayerNorm` and `Normalize`. Prompts and the width of truncated vectors are in `config_sentence_transformers.json`, the
length in `sentence_bert_config.json` or in `tokenizer_config.json` (https://sbert.net/docs/sentence_transformer/usage/custom_models.html).

Legend: B texts, D model width, P width of a pooled vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mega_common.bounded_parsing import explain_read_error, read_json_file
from mega_common.errors import CheckpointError, ConfigError
from mega_common.progress_logging import logger

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
# Older names, in the order in which vectors of several modes are joined.
LEGACY_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": nn.functional.gelu,
    "SiLU": nn.functional.silu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class SentenceTransformersSettings:
    """Settings that a model folder in the format of sentence-transformers declares.
    They are pooling, prompts, modules and maximum length.

    Attributes:
        model: folder of the transformer.
        modes: pooling modes, whose vectors are joined in this order.
        include_prompt: False excludes the prompt's tokens from pooling.
        layers: functions of pooled vectors, fp32 [B, P] to fp32 [B, P'], in order.
        normalized: scale vectors to length 1 at the end.
        prompts: prompts by name, each a text put in front of a text.
        default_prompt: name of the prompt that is used by default.
        max_length: maximum number of tokens of a text, special tokens included; None: the positions of the model.
        lower_case: convert texts to lower case first.
    """

    model: Path
    modes: tuple[PoolingMode, ...] = ("mean",)
    include_prompt: bool = True
    layers: tuple[Callable[[Tensor], Tensor], ...] = ()
    normalized: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    lower_case: bool = False

    def select_prompt(self, name: str | None) -> str:
        """Return the prompt text called `name`, or if None the default one ("" without); a ConfigError for an unknown name.

        Raises:
            ConfigError: for a name that the folder does not have.
        """
        name = name if name is not None else self.default_prompt
        if name is None:
            return ""
        if name not in self.prompts:
            raise ConfigError(
                f"--prompt-name {name!r}: {self.model} has "
                + ("no prompt of this name" if self.prompts else "no prompts"),
                hint=f"use {' or '.join(self.prompts)}" if self.prompts else "give the text itself with --prompt TEXT",
            )
        return self.prompts[name]


def read_sentence_transformers_folder(folder: Path) -> SentenceTransformersSettings | None:
    """Return the settings of a model folder in the format of sentence-transformers, or None for any other folder.

    Raises:
        CheckpointError: when a file is damaged, or a module or setting is not supported.
    """
    listing = folder / "modules.json"
    if not listing.is_file():
        return None
    modules = _read_json(listing, list)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    paths = [_resolve_inside(folder, str(module.get("path", ""))) for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise CheckpointError(f"{listing}: modules must begin with Transformer and Pooling, found {', '.join(kinds)}")
    layers: list[Callable[[Tensor], Tensor]] = []
    for kind, path in zip(kinds[2:], paths[2:], strict=True):
        if kind == "Dense":
            layers.append(_read_dense(path))
        elif kind == "LayerNorm":
            layers.append(_read_layer_norm(path))
        elif kind == "Normalize":
            layers.append(normalize_vectors)
        elif kind != "Dropout":
            raise CheckpointError(f"{listing}: module {kind} is not supported")
    settings = folder / "config_sentence_transformers.json"
    config = _read_json(settings, dict, missing={})
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise CheckpointError(f"{settings}: prompts must be an object of texts, found {prompts!r:.60}")
    if (size := config.get("truncate_dim")) is not None:
        layers.append(_truncate_vectors(size, folder))
    ends_normalized = bool(layers) and layers[-1] is normalize_vectors
    if ends_normalized:
        layers.pop()  # `SentenceTransformersSettings.normalized` stands for it
    modes, include_prompt = _read_pooling(paths[1] / "config.json")
    max_length, lower_case = _read_text_settings(paths[0])
    return SentenceTransformersSettings(
        paths[0], modes, include_prompt, tuple(layers), ends_normalized,
        {name: text or "" for name, text in prompts.items()},
        config.get("default_prompt_name"), max_length, lower_case,
    )  # fmt: skip


def pool_hidden_states(
    hidden: Tensor, attention_mask: Tensor, modes: Sequence[PoolingMode], skipped: int = 0
) -> Tensor:
    """Return one vector per text, fp32 [B, P], by pooling of hidden states.
    The hidden states are fp32 [B, S, D], padded on the right; the vectors of several pooling modes are concatenated.

    Args:
        hidden: last hidden states.
        attention_mask: bool [B, S], False at padding.
        modes: pooling modes, named as in sentence-transformers.
        skipped: number of tokens at the start of each text that are left out, such as those of a prompt.
    """
    counted = attention_mask.clone()
    counted[:, :skipped] = False
    mask, rows = counted.unsqueeze(-1), torch.arange(hidden.shape[0], device=hidden.device)
    total = (hidden * mask).sum(1)
    count = mask.sum(1).clamp(min=1e-9)
    weights = mask * torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype).view(1, -1, 1)
    ways: dict[PoolingMode, Callable[[], Tensor]] = {
        "cls": lambda: hidden[rows, counted.int().argmax(1)],
        "max": lambda: hidden.masked_fill(~mask, float("-inf")).amax(1),
        "mean": lambda: total / count,
        "mean_sqrt_len_tokens": lambda: total / count.sqrt(),
        "weightedmean": lambda: (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9),
        "lasttoken": lambda: hidden[rows, attention_mask.sum(1) - 1],
    }
    return torch.cat([ways[mode]() for mode in modes], -1)


def _read_pooling(file: Path) -> tuple[tuple[PoolingMode, ...], bool]:
    """Return the pooling modes, and whether the prompt is pooled."""
    config = _read_json(file, dict)
    unknown = [
        key for key, value in config.items() if value and key.startswith("pooling_mode_") and key not in LEGACY_MODES
    ]
    mode = config.get("pooling_mode") or [name for key, name in LEGACY_MODES.items() if config.get(key)] or "mean"
    modes = (mode,) if isinstance(mode, str) else tuple(mode)
    unknown += [name for name in modes if name not in MODES]
    if unknown:
        raise CheckpointError(f"{file}: pooling {unknown[0]!r} is not supported; supported are {', '.join(MODES)}")
    return modes, bool(config.get("include_prompt", True))


def _read_text_settings(folder: Path) -> tuple[int | None, bool]:
    """Return the maximum number of tokens of a text, and whether texts are lower-cased."""
    file = folder / "sentence_bert_config.json"
    config = _read_json(file, dict, missing={})
    if (task := config.get("transformer_task", "feature-extraction")) != "feature-extraction":
        raise CheckpointError(f"{file}: transformer_task {task!r} is not supported")
    if (output := config.get("module_output_name", "token_embeddings")) != "token_embeddings":
        raise CheckpointError(f"{file}: module_output_name {output!r} is not supported")
    longest = config.get("max_seq_length")
    if longest is None:
        file = folder / "tokenizer_config.json"
        longest = _read_json(file, dict, missing={}).get("model_max_length")
    if not isinstance(longest, int | float | None):
        raise CheckpointError(f"{file}: the maximum number of tokens must be a number, found {longest!r:.60}")
    return (int(longest) if longest is not None and longest < 1 << 31 else None), bool(config.get("do_lower_case"))


def _read_dense(folder: Path) -> Callable[[Tensor], Tensor]:
    """Return a Dense module as a function of vectors."""
    config = _read_json(folder / "config.json", dict)
    name = str(config.get("activation_function") or "Identity").rpartition(".")[2]
    others = {
        config.get(key, "sentence_embedding") or "sentence_embedding"
        for key in ("module_input_name", "module_output_name")
    }
    if name not in ACTIVATIONS or others != {"sentence_embedding"}:
        wrong = f"activation_function {name}" if name not in ACTIVATIONS else f"input or output {sorted(others)}"
        raise CheckpointError(f"{folder / 'config.json'}: {wrong} is not supported")
    tensors = _read_tensors(folder, ("linear.weight",), ("linear.bias", "residual.weight"))
    weight, bias, residual = (tensors.get(key) for key in ("linear.weight", "linear.bias", "residual.weight"))

    def apply_dense_layer(vectors: Tensor) -> Tensor:
        assert weight is not None
        projected = ACTIVATIONS[name](nn.functional.linear(vectors, weight, bias))
        if not config.get("use_residual"):
            return projected
        return projected + (vectors if residual is None else nn.functional.linear(vectors, residual))

    return apply_dense_layer


def _read_layer_norm(folder: Path) -> Callable[[Tensor], Tensor]:
    """Return a LayerNorm module as a function of vectors."""
    tensors = _read_tensors(folder, ("norm.weight", "norm.bias"), ())
    weight, bias = tensors["norm.weight"], tensors["norm.bias"]
    return lambda vectors: nn.functional.layer_norm(vectors, weight.shape, weight, bias)


def _truncate_vectors(size: Any, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return a function that keeps the first `size` elements of vectors."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise CheckpointError(
            f"{folder / 'config_sentence_transformers.json'}: truncate_dim must be a positive integer, found {size!r}"
        )
    return lambda vectors: vectors[..., :size]


def normalize_vectors(vectors: Tensor) -> Tensor:
    """Return vectors [B, P], each scaled to Euclidean length 1."""
    return nn.functional.normalize(vectors, dim=-1)


def _read_tensors(folder: Path, needed: Sequence[str], optional: Sequence[str]) -> dict[str, Tensor]:
    """Return a module's weights as fp32."""
    file = folder / "model.safetensors"
    if not file.is_file():
        hint = "save the folder again with sentence-transformers, which writes safetensors"
        raise CheckpointError(f"{file} is missing", hint=hint if (folder / "pytorch_model.bin").exists() else None)
    try:
        tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise CheckpointError(f"{file} cannot be read ({explain_read_error(error)})") from None
    if wrong := sorted(set(needed) - tensors.keys() | tensors.keys() - {*needed, *optional}):
        raise CheckpointError(f"{file}: tensor {wrong[0]} is missing or not supported")
    return tensors


def _resolve_inside(folder: Path, name: str) -> Path:
    """Return the path of a module, which must be inside the folder."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise CheckpointError(f"{folder / 'modules.json'}: path {name!r} must be inside the folder")
    return folder / name if name else folder


def _read_json(file: Path, kind: type, missing: Any = None) -> Any:
    """Return the content of a JSON file, which must be of this type."""
    if not file.exists():
        if missing is not None:
            return missing
        raise CheckpointError(f"{file} is missing")
    content = read_json_file(file, CheckpointError)
    entries = content if isinstance(content, list) else [content]
    if not isinstance(content, kind) or not all(isinstance(each, dict) for each in entries):
        raise CheckpointError(f"{file} must hold a JSON {'list of objects' if kind is list else 'object'}")
    return content


def log_sentence_transformers_settings(found: SentenceTransformersSettings) -> None:
    """Log the settings that are taken from a sentence-transformers folder."""
    parts = [f"pooling {' + '.join(found.modes)}"]
    parts += [f"{len(found.layers)} further modules"] if found.layers else []
    parts += [f"at most {found.max_length} tokens"] if found.max_length else []
    parts += [f"prompt {found.default_prompt!r}"] if found.default_prompt else []
    logger.info("%s: sentence-transformers folder, %s", found.model, ", ".join(parts))
