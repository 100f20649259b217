"""`mega data retrieve`: nearest neighbors of a data set's chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega_cli.embed import PoolingOption, parse_pooling_modes
from mega_cli.model_options import Device, EvalPrecision, Overwrite, PrecisionOption, TokenizerPath
from mega_common.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mega_data.retrieval.retrieve_neighbors import ChunkEncoder
    from mega_eval.text_embedding import TextEmbedder

EXAMPLES = """Examples:

    mega data retrieve data/wiki --encoder out/bert

    mega data retrieve data/held-out --database data/wiki --encoder out/bert --precision bf16

    mega data retrieve data/wiki --encoder out/bert -k 4 --index IVF4096,PQ64 --output data/wiki-4
"""


def retrieve_command(
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="Data set that the training will read.")],
    encoder: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="Encoder that embeds the chunks: a model with its tokenizer, as for mega embed."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for neighbors.npy and info.json.", show_default="PREFIX.neighbors"),
    ] = None,
    database: Annotated[
        Path | None,
        typer.Option(metavar="PREFIX", help="Data set to search for neighbors.", show_default="the data set itself"),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="data.split of the run; only the train part of the database is searched.",
            show_default="969,30,1 as in run.yaml; with --database: everything",
        ),
    ] = None,
    neighbors: Annotated[int, typer.Option("--neighbors", "-k", min=1, help="Neighbors per chunk.")] = 2,
    chunk_length: Annotated[int, typer.Option(min=1, help="Tokens per chunk.")] = 64,
    index: Annotated[
        str | None,
        typer.Option(
            help="faiss index factory string, e.g. IVF4096,PQ64.",
            show_default="by size: Flat, IVF...,Flat, IVF...,PQ...",
        ),
    ] = None,
    probes: Annotated[
        int, typer.Option(min=1, help="Inverted lists to search per chunk (nprobe of an IVF index).")
    ] = 32,
    pooling: Annotated[
        PoolingOption | None,
        typer.Option(
            help="Pooling of hidden states into one vector; default: as set in a sentence-transformers folder, else mean."
        ),
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per batch of the encoder.")] = 8192,
    precision: PrecisionOption = EvalPrecision.FP32,
    device: Device = "auto",
    tokenizer: TokenizerPath = None,
    overwrite: Overwrite = False,
) -> None:
    """Find, for each chunk of a data set, the nearest chunks of other documents, for a run with data.kind: retro.

    Documents are cut into chunks from their start. The encoder embeds the text of each chunk, and faiss finds the nearest
    chunks by Euclidean distance. The chunk's own document, copies of it and texts that contain its continuation are
    excluded. After an interruption, the same command resumes. --tokenizer is the tokenizer of the data set; it is only
    needed if the path in PREFIX.info no longer exists.
    """
    from mega_data.data_config import DataConfig
    from mega_data.reports.inspect_dataset import load_original_tokenizer
    from mega_data.retrieval.neighbor_files import get_neighbors_path
    from mega_data.retrieval.retrieve_neighbors import RetrievalSettings
    from mega_data.retrieval.retrieve_neighbors import retrieve_neighbors as run
    from mega_data.token_files.dataset_info import read_dataset_info
    from mega_data.token_files.verify_dataset import check_dataset_tokenizer
    from mega_data.tokenizer import Tokenizer

    shares = split or ("1" if database else "969,30,1")
    config = DataConfig.parse({"train": [prefix], "split": shares}, source="--split")
    info, named = read_dataset_info(prefix), Tokenizer(tokenizer) if tokenizer else None
    if named is not None and info is not None:
        check_dataset_tokenizer(prefix, info, named)
    words = named or load_original_tokenizer(info)
    if words is None:
        raise DataError(
            f"{prefix}: the data set cannot be decoded, because {prefix}.info is missing or names a tokenizer that is not there",
            hint="--tokenizer FOLDER gives the tokenizer that made the data set",
        )
    found = run(
        prefix,
        database,
        output or get_neighbors_path(prefix),
        words,
        _lazy_encoder(encoder, pooling, batch_tokens, precision, device),
        RetrievalSettings(chunk_length, neighbors, index, probes, tuple(config.split)),
        overwrite=overwrite,
    )
    typer.echo(
        f"{output or get_neighbors_path(prefix)}: {neighbors} neighbors of {found.data.last:,} chunks in {found.database.last:,}"
    )


def _lazy_encoder(
    folder: str, pooling: PoolingOption | None, batch_tokens: int, precision: EvalPrecision, device: str
) -> ChunkEncoder:
    """Return a function that embeds texts; it loads the model at its first call, so not if all embeddings are cached."""
    from functools import cache

    from mega_data.retrieval.retrieve_neighbors import ChunkEncoder

    @cache
    def load_encoder() -> TextEmbedder:
        from mega_eval.model_loading import PRECISIONS, select_device
        from mega_eval.text_embedding import load_text_embedder

        return load_text_embedder(
            folder, dtype=PRECISIONS[precision], device=select_device(device), modes=parse_pooling_modes(pooling)
        )

    def embed_texts(texts: list[str], advance: Callable[[int], None]) -> npt.NDArray[np.float32]:
        return load_encoder().embed_texts(texts, batch_tokens=batch_tokens, advance=advance)

    local = Path(folder)
    paths = sorted(path for path in ([local] if local.is_file() else local.rglob("*")) if path.is_file())
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return ChunkEncoder(folder, repr((folder, stamps, pooling and pooling.value, precision.value)), embed_texts)
