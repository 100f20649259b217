"""`mega embed`: text embeddings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mega_cli.model_options import Device, EvalPrecision, Model, PrecisionOption, TokenizerOption
from mega_common.errors import ConfigError, DataError
from mega_common.progress_logging import logger

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mega_eval.sentence_transformers_folder import PoolingMode

EXAMPLES = """Examples:

    mega embed out/modernbert texts.jsonl --output vectors.npy

    mega embed runs/bert texts.txt --output vectors.safetensors --pooling cls --normalize --precision bf16

    mega embed out/bert passages.jsonl --text-key passage --id-key number --output passages.npy

    mega embed e5-small queries.txt --output queries.npy --prompt-name query
"""


class PoolingOption(StrEnum):
    """Ways to pool a text's hidden states into one vector, with the names that sentence-transformers uses."""

    MEAN = "mean"
    CLS = "cls"
    MAX = "max"
    LAST = "lasttoken"
    WEIGHTED = "weightedmean"
    MEAN_SQRT = "mean_sqrt_len_tokens"


def parse_pooling_modes(pooling: PoolingOption | None) -> list[PoolingMode] | None:
    """Return the pooling modes that `--pooling` selects; None if it is not given, so that the model's folder decides."""
    return None if pooling is None else [pooling.value]


def embed_command(
    model: Model,
    texts: Annotated[
        Path,
        typer.Argument(
            help="Input file: plain text with one text per line; or JSON lines, JSON, CSV or Parquet with one text per record."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(help="Output file: .npy, or .safetensors with the tensor `embeddings`; fp32 [texts, width]."),
    ],
    pooling: Annotated[
        PoolingOption | None,
        typer.Option(
            help="Pooling of hidden states into one vector; default: as set in a sentence-transformers folder, else mean."
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize", help="Scale vectors to length 1; default: as set in the folder, else not."
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Prefix for each text, e.g. 'query: '.")] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(
            help="Name of a prompt in the folder's config_sentence_transformers.json, e.g. query; default: the default set there."
        ),
    ] = None,
    text_key: Annotated[str, typer.Option(help="Key of the text in a record.")] = "text",
    id_key: Annotated[
        str, typer.Option(help="Key of the id in a record; records without it get their line number.")
    ] = "id",
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Truncate texts to this many tokens; default: the model's maximum.")
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per batch; texts of similar length share a batch.")
    ] = 8192,
    precision: PrecisionOption = EvalPrecision.FP32,
    device: Device = "auto",
    tokenizer: TokenizerOption = None,
) -> None:
    """Compute embeddings of texts, for search and comparison, from the last hidden states of an encoder or decoder.

    The settings of a sentence-transformers folder apply: pooling, projection, normalisation, prompts and maximum length.
    The file NAME.ids.jsonl next to OUTPUT has the ids of the texts in the order of the vectors.
    """
    if output.suffix not in (".npy", ".safetensors"):
        raise ConfigError(
            f"--output must end in .npy or .safetensors, found {output}", hint=f"--output {output.with_suffix('.npy')}"
        )
    ids, read = _read_texts(texts, text_key, id_key)
    from mega_eval.model_loading import PRECISIONS, select_device
    from mega_eval.text_embedding import load_text_embedder

    embedder = load_text_embedder(
        model,
        dtype=PRECISIONS[precision],
        device=select_device(device),
        tokenizer=tokenizer,
        modes=parse_pooling_modes(pooling),
        normalize=normalize,
    )
    if max_length is not None:
        embedder = replace(embedder, settings=replace(embedder.settings, max_length=max_length))
    prefix = embedder.settings.select_prompt(prompt_name) if prompt is None else prompt
    vectors = embedder.embed_texts(read, prompt=prefix, batch_tokens=batch_tokens)
    _write_vectors(output, vectors, ids)
    logger.info("%s: %d vectors of width %d; their ids are in %s", output, *vectors.shape, _ids_file(output).name)


def _read_texts(file: Path, text_key: str, id_key: str) -> tuple[list[Any], list[str]]:
    """Return an id for each text, and the texts: lines of plain text, or records of any format that a corpus may have."""
    from mega_data.reading.corpus_sources import find_corpus_sources
    from mega_data.reading.documents import RejectedItem
    from mega_data.reading.source_readers import read_documents

    ids: list[Any] = []
    texts: list[str] = []
    kinds: list[str] = []
    for source in find_corpus_sources([file], text_key):
        for item in read_documents(source, text_key, on_kind=kinds.append, whole=True):
            if isinstance(item, RejectedItem):
                hint = item.hint and f"--text-key KEY sets the key of the text, found no {text_key!r}"
                raise DataError(f"{item.file}:{item.line}: {item.reason}", hint=hint or "remove or correct this line")
            own = item.text.splitlines() if kinds[-1] == "text" else [item.text]
            for number, text in enumerate(own, item.line):
                if not text.strip():
                    raise DataError(f"{item.file}:{number}: the text is empty", hint="remove empty lines and records")
                ids.append((item.record or {}).get(id_key, number))
                texts.append(text)
    if not texts:
        raise DataError(f"{file}: the file has no texts", hint="give a file with one text or record per line")
    return ids, texts


def _ids_file(output: Path) -> Path:
    return output.with_suffix(".ids.jsonl")


def _write_vectors(output: Path, vectors: npt.NDArray[np.float32], ids: Sequence[Any]) -> None:
    """Write the vectors and the ids of their texts; each file appears when it is complete."""
    import numpy as np
    from safetensors.numpy import save

    from mega_common.atomic_files import open_atomic_file

    with open_atomic_file(_ids_file(output), text=True) as stream:
        stream.writelines(json.dumps(name) + "\n" for name in ids)
    with open_atomic_file(output) as stream:
        if output.suffix == ".npy":
            np.save(stream, vectors)
        else:
            stream.write(save({"embeddings": vectors}, metadata={"format": "pt"}))
