"""`mega data retrieve`: nearest neighbours of a data set's chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega_cli.data_options import Overwrite, TokenizerPath
from mega_cli.embed import PoolingOption, parse_pooling_modes
from mega_cli.eval import Device, EvalPrecision, PrecisionOption
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
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="The data set that a run is to read.")],
    encoder: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="What embeds chunks: a model as mega embed takes it, with its tokenizer."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Gets neighbors.npy and info.json.", show_default="PREFIX.neighbors"),
    ] = None,
    database: Annotated[
        Path | None,
        typer.Option(metavar="PREFIX", help="Where neighbours are found.", show_default="the data set itself"),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            help="data.split of the run: in the database only what train has of it is found.",
            show_default="969,30,1, as a run's; with --database all",
        ),
    ] = None,
    neighbors: Annotated[int, typer.Option("--neighbors", "-k", min=1, help="Neighbours of a chunk.")] = 2,
    chunk_length: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 64,
    index: Annotated[
        str | None,
        typer.Option(
            help="What faiss's index factory is to build.", show_default="by size: Flat, IVF...,Flat, IVF...,PQ..."
        ),
    ] = None,
    probes: Annotated[int, typer.Option(min=1, help="Lists of an IVF index that are looked at for each chunk.")] = 32,
    pooling: Annotated[
        PoolingOption | None,
        typer.Option(
            help="How hidden states become one vector; default: as a sentence-transformers folder says, or mean."
        ),
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are computed together.")] = 8192,
    precision: PrecisionOption = EvalPrecision.FP32,
    device: Device = "auto",
    tokenizer: TokenizerPath = None,
    overwrite: Overwrite = False,
) -> None:
    """Find, for each chunk of a data set, the nearest chunks of other documents, for a run with data.kind: retro.

    Chunks begin with their document. Their text is embedded by the encoder, and faiss finds the nearest by Euclidean distance.
    Of a chunk's own document, of copies of it and of what holds its continuation none is taken. A run that was ended goes on
    where it was when it is started again. TOKENIZER is that of the data set, where it is no longer where its .info says.
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
            f"{prefix}: its tokenizer is not known, so its text is not", hint="--tokenizer names its folder"
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
        f"{output or get_neighbors_path(prefix)}: {neighbors} neighbours of {found.data.last:,} chunks in {found.database.last:,}"
    )


def _lazy_encoder(
    folder: str, pooling: PoolingOption | None, batch_tokens: int, precision: EvalPrecision, device: str
) -> ChunkEncoder:
    """Return a function that embeds texts. It loads the model at the first call, and not at all if every chunk was
    embedded before.
    """
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
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return ChunkEncoder(folder, repr((folder, states, pooling and pooling.value, precision.value)), embed_texts)
