"""Model card and data card of a training run, as markdown, from its checkpoint and the files next to it.

The model card has the header of the HuggingFace hub (https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mega_ckpt.store import Checkpoint
from mega_common.bounded_parsing import parse_json_text
from mega_common.model_config import ModelConfig
from mega_common.progress_logging import format_with_decimal_unit

MODEL_CARD, OTHER_NAME, DATA_CARD = "README.md", "MODEL_CARD.md", "DATA_CARD.md"
LINES = 1 << 20  # bytes at the end of metrics.jsonl that are searched for the checkpoint's step
_METRICS = "metrics.jsonl"
_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "vocab_size",
    "max_position",
)


def build_model_cards(
    checkpoint: Checkpoint, num_parameters: int, existing_files: Mapping[str, object]
) -> dict[str, bytes]:
    """Return {file name: Markdown} of the model card and data card of an exported checkpoint; empty without run settings.

    Args:
        checkpoint: the checkpoint that is exported.
        num_parameters: number of parameters of the model.
        existing_files: other files of the export, which are never replaced; with a README.md the model card is named
            MODEL_CARD.md.
    """
    settings = checkpoint.trainer_state.get("settings")
    if not isinstance(settings, dict) or not settings:
        return {}
    free = next((name for name in (MODEL_CARD, OTHER_NAME) if name not in existing_files), None)
    found = {} if free is None else {free: _model_card(checkpoint, settings, num_parameters)}
    if DATA_CARD not in existing_files:
        found[DATA_CARD] = _data_card(checkpoint, settings)
    return {name: text.encode() for name, text in found.items()}


def add_quantization_to_readme(existing_files: Mapping[str, Path | bytes], quantization: str) -> bytes:
    """Return the README.md of an export, or a new one, with a section on the quantization of its weights."""
    card = existing_files.get(MODEL_CARD, b"# Model\n")
    text = card.read_bytes() if isinstance(card, Path) else card
    section = f"\n## Quantization\n\nThe weights are quantized: {quantization}. Converted with mega.\n"
    return text.rstrip() + b"\n" + section.encode()


def _model_card(checkpoint: Checkpoint, settings: Mapping[str, Any], parameters: int) -> str:
    header = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["mega"]}
    name = Path(str(settings.get("output", "model"))).name
    length = settings.get("data", {}).get("seq_length", 0)
    samples = checkpoint.trainer_state.get("consumed_samples", 0)
    initial = settings.get("init_from")
    facts = [
        ("parameters", f"{parameters:,}"),
        *_architecture(checkpoint.model),
        (
            "trained",
            f"{checkpoint.step:,} steps, {samples:,} samples of {length:,} tokens: {format_with_decimal_unit(samples * length)} tokens",
        ),
        ("started from", str(initial) if initial else "random weights"),
        *_losses(checkpoint),
    ]
    return "\n".join(
        [
            f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n# {name}\n",
            f"A language model trained with mega. Training data: [{DATA_CARD}]({DATA_CARD}).\n",
            *_format_table(("", ""), facts),
            "\n## Settings\n",
            *_format_table(("setting", "value"), list(_settings(settings))),
            "\n## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n",
            'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")',
            'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")\n```\n',
            "## Limits\n\nIntended use, risks and license of this model are not documented yet: describe them here.\n",
        ]
    )


def _architecture(model: ModelConfig) -> Iterator[tuple[str, str]]:
    shape = [f"{key} {value}" for key in _SHAPE if (value := getattr(model, key)) is not None]
    yield "architecture", ", ".join(shape)
    if model.moe is not None:
        yield "experts", f"{model.moe.num_experts}, {model.moe.top_k} per token"


def _settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings that determine the training result; parallel layout is left out."""
    for section in ("batch", "train", "optimizer", "lr_schedule"):
        for key, value in settings.get(section, {}).items():
            if value is not None and not isinstance(value, dict):
                yield f"{section}.{key}", json.dumps(value)
    yield "precision", str(settings.get("precision"))


def _losses(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the last losses up to the checkpoint's step, from the run's metrics.jsonl if it still exists."""
    found: dict[str, tuple[int, float]] = {}
    path = checkpoint.folder.parent.parent / _METRICS
    if isinstance(path, Path) and path.is_file():
        with open(path, "rb") as stream:
            stream.seek(max(0, path.stat().st_size - LINES))
            for text in stream:
                with contextlib.suppress(ValueError, KeyError, TypeError):  # the first or last line may be truncated
                    line = parse_json_text(text)
                    losses = {key: line[key] for key in ("loss", "valid_loss") if isinstance(line.get(key), float)}
                    found |= {
                        key: (line["step"], value) for key, value in losses.items() if line["step"] <= checkpoint.step
                    }
    for key, name in (("loss", "training loss"), ("valid_loss", "validation loss")):
        if key in found:
            step, loss = found[key]
            yield name, f"{loss:.4f} per token (perplexity {math.exp(min(loss, 700)):.4g}), step {step:,}"


def _data_card(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> str:
    data, read = settings.get("data", {}), checkpoint.trainer_state.get("read") or {}
    length, whole = data.get("seq_length", 0), sum(read.values()) or 1
    rows = [
        (
            path, f"{samples:,}", format_with_decimal_unit(samples * length), f"{100 * samples / whole:.1f} %",
            *(_format_count(info, key) for key in ("documents", "tokens")), str(info.get("license") or "unknown"),
        )
        for path, samples in read.items()
        for info in [_read_dataset_info(path)]
    ]  # fmt: skip
    tokenizers = {
        str(info["tokenizer"]["path"]) for path in read if (info := _read_dataset_info(path)).get("tokenizer")
    }
    return "\n".join(
        [
            "# Data\n",
            f"Training data up to step {checkpoint.step:,}, in samples of {length:,} tokens.\n",
            *_format_table(
                ("data set", "samples", "tokens", "share", "documents in total", "tokens in total", "license"), rows
            ),
            "",
            f"Order: {data.get('order')}, seed {settings.get('train', {}).get('seed')}; split (train, valid, test): "
            f"{data.get('split')}; tokenizer: {', '.join(sorted(tokenizers)) or data.get('tokenizer') or 'unknown'}.\n",
        ]
    )


def _format_count(info: Mapping[str, Any], key: str) -> str:
    return f"{info[key]:,}" if isinstance(info.get(key), int) else "unknown"


def _read_dataset_info(prefix: str) -> dict[str, Any]:
    """Return the description next to a data set; empty if it is missing."""
    try:
        found = parse_json_text(Path(f"{prefix}.info").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in row)} |"
