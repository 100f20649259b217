"""`mega data retrieve`: the neighbours of a data set's chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega_cli.data_options import Overwrite, TokenizerPath
from mega_cli.embed import Pooling, modes_of
from mega_cli.eval import Device, Precision, PrecisionOption
from mega_common.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mega_data.retrieval.retrieve import Encoder
    from mega_eval.embed import TextEmbedder

EXAMPLES = """Examples:

    mega data retrieve data/wiki --encoder out/bert

    mega data retrieve data/held-out --database data/wiki --encoder out/bert --precision bf16

    mega data retrieve data/wiki --encoder out/bert -k 4 --index IVF4096,PQ64 --output data/wiki-4
"""


def retrieve(
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
        Pooling | None,
        typer.Option(
            help="How hidden states become one vector; default: as a sentence-transformers folder says, or mean."
        ),
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are computed together.")] = 8192,
    precision: PrecisionOption = Precision.FP32,
    device: Device = "auto",
    tokenizer: TokenizerPath = None,
    overwrite: Overwrite = False,
) -> None:
    """Find, for each chunk of a data set, the chunks of other documents that are nearest, for a run with data.kind: retro.

    Chunks begin with their document. Their text is embedded by the encoder, and faiss finds the nearest by Euclidean distance.
    Of a chunk's own document, of copies of it and of what holds its continuation none is taken. A run that was ended goes on
    where it was when it is started again. TOKENIZER is that of the data set, where it is no longer where its .info says.
    """
    from mega_data.config import DataConfig
    from mega_data.files.info import read_info
    from mega_data.files.verify import check_tokenizer
    from mega_data.reports.inspect import tokenizer_of
    from mega_data.retrieval.neighbors import neighbors_path
    from mega_data.retrieval.retrieve import Search
    from mega_data.retrieval.retrieve import retrieve as run
    from mega_data.tokenizer import Tokenizer

    shares = split or ("1" if database else "969,30,1")
    config = DataConfig.parse({"train": [prefix], "split": shares}, source="--split")
    info, named = read_info(prefix), Tokenizer(tokenizer) if tokenizer else None
    if named is not None and info is not None:
        check_tokenizer(prefix, info, named)
    words = named or tokenizer_of(info)
    if words is None:
        raise DataError(
            f"{prefix}: its tokenizer is not known, so its text is not", hint="--tokenizer names its folder"
        )
    found = run(
        prefix,
        database,
        output or neighbors_path(prefix),
        words,
        _encoder(encoder, pooling, batch_tokens, precision, device),
        Search(chunk_length, neighbors, index, probes, tuple(config.split)),
        overwrite=overwrite,
    )
    typer.echo(
        f"{output or neighbors_path(prefix)}: {neighbors} neighbours of {found.data.last:,} chunks in {found.database.last:,}"
    )


def _encoder(folder: str, pooling: Pooling | None, batch_tokens: int, precision: Precision, device: str) -> Encoder:
    """What embeds texts. The model is loaded when the first are; nothing of it where all were embedded before."""
    from functools import cache

    from mega_data.retrieval.retrieve import Encoder

    @cache
    def loaded() -> TextEmbedder:
        from mega_eval.embed import load_text_embedder
        from mega_eval.load import PRECISIONS, device_named

        return load_text_embedder(
            folder, dtype=PRECISIONS[precision], device=device_named(device), modes=modes_of(pooling)
        )

    def embed_texts(texts: list[str], advance: Callable[[int], None]) -> npt.NDArray[np.float32]:
        return loaded().embed(texts, batch_tokens=batch_tokens, advance=advance)

    local = Path(folder)
    paths = sorted(path for path in ([local] if local.is_file() else local.rglob("*")) if path.is_file())
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return Encoder(folder, repr((folder, states, pooling and pooling.value, precision.value)), embed_texts)
