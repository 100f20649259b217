"""What the token files of a run say of themselves: their tokenizer, and whether it fits the model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from mega_common.errors import ConfigError, DataError
from mega_common.log import logger
from mega_common.parsing import parse_json
from mega_data.config import DataConfig
from mega_data.files.fetch import local_prefix
from mega_data.files.info import DataInfo, info_path, read_info
from mega_data.order.parts import matching
from mega_data.tokenizer import Tokenizer
from mega_trainer.config import RunConfig

if TYPE_CHECKING:
    from mega_ckpt.source import Source  # which needs torch, as looking at data does not

# What makes a tokenizer, and how a chat is put to it: the files that travel with a model.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def run_tokenizer(data: DataConfig, vocab_size: int) -> Tokenizer | None:
    """The run's tokenizer: the one it names, else the one its data sets were made with, where that still exists.

    Raises:
        DataError: when data sets were made by different tokenizers, by another than the one named, or have tokens
            that the model's vocabulary of `vocab_size` does not.
    """
    made = _makers(data)
    named = Tokenizer(data.tokenizer) if data.tokenizer is not None else None
    fingerprint, size = (named.fingerprint, named.vocab_size) if named else (None, 0)
    for prefix, info in made.items():
        maker = info.tokenizer
        assert maker is not None
        fingerprint = fingerprint or maker.fingerprint
        if maker.fingerprint != fingerprint:
            other = "data.tokenizer" if named else str(next(iter(made)))
            raise DataError(
                f"{info_path(prefix)}: made with another tokenizer ({maker.path}) than {other}",
                hint="preprocess all data sets of a run with one tokenizer",
            )
        size = max(size, maker.vocab_size)
    if size > vocab_size:
        raise DataError(
            f"the tokenizer has {size} tokens, but model.vocab_size is {vocab_size}",
            hint=f"set model.vocab_size={size}",
        )
    return named or _still_there(made)


def with_vocabulary(config: RunConfig, source: Source, tokenizer: Tokenizer | None = None) -> Source:
    """The weights that a run starts from, with rows for the tokens that it has beyond theirs: those of its data's tokenizer,
    and as many as `model.vocab_size` asks for.

    Args:
        source: the weights as they are.
        tokenizer: as `run_tokenizer` gives it; its files take the place of those that came with the weights, where it has more.

    Raises:
        DataError: when both tokenizers give tokens other numbers: what the weights know would be lost.
        ConfigError: when an adapter would be beside weights that are not those of `init_from`.
    """
    first = _first_new(config, source, tokenizer)
    if first is None and config.model.vocab_size <= source.model.vocab_size:
        return source
    if config.lora is not None:
        raise ConfigError(
            f"lora: the weights of {config.init_from} have no rows for new tokens, which an adapter would leave as they begin",
            hint="make such weights first: mega ckpt convert, with --add-tokens or --vocab-size",
        )
    from mega_ckpt.vocabulary import ExtendedSource  # here: it needs torch

    files = {} if first is None or tokenizer is None else {p.name: p.read_bytes() for p in tokenizer_files(tokenizer)}
    size = max(source.model.vocab_size, config.model.vocab_size)
    return ExtendedSource(source, size, first=first, files=files)


def _first_new(config: RunConfig, source: Source, tokenizer: Tokenizer | None) -> int | None:
    """The first token that the data's tokenizer has beyond the numbers of the one that came with the weights, as far as both
    are known."""
    came = source.assets().get("tokenizer.json")
    made = {info.tokenizer.fingerprint: path for path, info in _makers(config.data).items() if info.tokenizer}
    if tokenizer is not None:
        made = {tokenizer.fingerprint: tokenizer.path}
    if came is None or not made or config.data.allow_other_tokenizer:
        return None
    content = came.read_bytes() if isinstance(came, Path) else came
    ((fingerprint, path),) = made.items()
    if hashlib.sha256(content).hexdigest() == fingerprint:
        return None
    if tokenizer is not None:
        old, new = token_numbers(content), token_numbers(tokenizer.path.read_bytes())
        more = new.keys() - old.keys()
        first = max(old.values(), default=-1) + 1
        if new | old == new and all(new[token] >= first for token in more):
            return first if more else None
    raise DataError(
        f"init_from = {config.init_from}: came with another tokenizer than that of the data, {path}",
        hint="tokenize the text with the model's own, or with one that only adds tokens to it: mega data preprocess --tokenizer "
        "with that folder; or, to train the weights on these tokens and let the data's tokenizer go with the model, set "
        "data.allow_other_tokenizer=true",
    )


def token_numbers(content: bytes) -> dict[str, int]:
    """Return the number of each token of a `tokenizer.json`."""
    raw = parse_json(content)
    vocab = raw["model"].get("vocab") or {}
    pieces = vocab if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}
    return pieces | {token["content"]: token["id"] for token in raw.get("added_tokens", [])}


def _makers(data: DataConfig) -> dict[Path, DataInfo]:
    """The descriptions of all data sets that tell their tokenizer."""
    found = {}
    for source in (*data.train, *(data.valid or []), *(data.test or [])):
        for path in matching(source):
            info = read_info(local_prefix(path, data.cache))
            if info is not None and info.tokenizer is not None:
                found[path] = info
    return found


def _still_there(made: dict[Path, DataInfo]) -> Tokenizer | None:
    for info in made.values():
        assert info.tokenizer is not None
        path = Path(info.tokenizer.path)
        if path.exists():
            tokenizer = Tokenizer(path)
            if tokenizer.fingerprint == info.tokenizer.fingerprint:
                return tokenizer
        logger.warning("the tokenizer %s is not there any more; set data.tokenizer, or none goes with the model", path)
    return None


def tokenizer_files(tokenizer: Tokenizer) -> list[Path]:
    """The files beside `tokenizer.json` that travel with a model."""
    return [path for name in TOKENIZER_FILES if (path := tokenizer.path.parent / name).is_file()]
