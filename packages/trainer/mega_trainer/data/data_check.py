"""Tokenizer and token checks of a run's data before it starts."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mega_common.bounded_parsing import parse_json_text
from mega_common.errors import ConfigError, DataError
from mega_common.progress_logging import logger
from mega_data.blended_dataset import DatasetUsage, plan_dataset_usage
from mega_data.data_config import DataConfig
from mega_data.extension_tokenizer import RECORD_FILE
from mega_data.preprocessing.token_cache import resolve_source_prefix
from mega_data.sampling.dataset_parts import find_matching_prefixes
from mega_data.token_files.dataset_info import DatasetInfo, count_unpaired_answers, read_dataset_info
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.tokenizer import Tokenizer
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.prompt_dataset import PromptDataset

if TYPE_CHECKING:
    from mega_ckpt.source import WeightSource  # imports torch, which checking data does not need

# Globs of the files of a tokenizer and its chat templates, which travel with a model.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "generation_config.json", RECORD_FILE,
)  # fmt: skip


def find_run_tokenizer(data: DataConfig, vocab_size: int) -> Tokenizer | None:
    """Return the tokenizer of a run: the configured one, else that of its data sets if its files exist, else None.

    Raises:
        DataError: when data sets were made with different tokenizers, with another than `data.tokenizer`, or have more
            tokens than the model's `vocab_size`.
    """
    made = _datasets_with_tokenizer(data)
    named = Tokenizer(data.tokenizer) if data.tokenizer is not None else None
    fingerprint, size = (named.fingerprint, named.vocab_size) if named else (None, 0)
    for prefix, info in made.items():
        maker = info.tokenizer
        assert maker is not None
        fingerprint = fingerprint or maker.fingerprint
        if maker.fingerprint != fingerprint:
            other = "data.tokenizer" if named else str(next(iter(made)))
            raise DataError(
                f"{prefix} was made with another tokenizer ({maker.path}) than {other}",
                hint="preprocess all data sets of a run with one tokenizer",
            )
        size = max(size, maker.vocab_size)
    if size > vocab_size:
        raise DataError(
            f"model.vocab_size = {vocab_size} must be at least {size}, the number of tokens of the tokenizer",
            hint=f"set model.vocab_size={size}",
        )
    return named or _existing_tokenizer(made)


def open_initial_weights(
    config: RunConfig, path: str, tokenizer: Tokenizer | None = None
) -> tuple[WeightSource, WeightSource]:
    """Open the weights at `path` that a run starts from; return them as stored, and with rows for new tokens.

    The second source is of `extend_vocabulary`; for a module of transformers both are the stored weights.
    """
    from mega_ckpt.source import open_weight_source  # imports torch

    if config.model.transformers is not None:
        source = open_weight_source(path, implementation="transformers")
        return source, source
    source = open_weight_source(path, families=config.registry.families)
    return source, extend_vocabulary(config, source, tokenizer)


def extend_vocabulary(config: RunConfig, source: WeightSource, tokenizer: Tokenizer | None = None) -> WeightSource:
    """Return initial weights with embedding and output rows for additional tokens; `source` itself if there are none.

    `source` gets rows for tokens that only the data's tokenizer has, and for padding up to `model.vocab_size`.

    Args:
        source: weights of `init_from`.
        tokenizer: of the run; its files replace those that came with the weights, if it has more tokens.

    Raises:
        DataError: when the two tokenizers assign different ids to a token.
        ConfigError: when the run trains an adapter, whose base weights must not change.
    """
    first = _first_new_token(config, source, tokenizer)
    if first is None and config.model.vocab_size <= source.model.vocab_size:
        return source
    if config.lora is not None:
        raise ConfigError(
            f"lora requires base weights with rows for all tokens, found none for new tokens in {config.init_from}",
            hint="add rows first with mega ckpt convert --add-tokens or --vocab-size",
        )
    from mega_ckpt.extend_vocabulary import ExtendedVocabularySource  # imports torch

    files = (
        {}
        if first is None or tokenizer is None
        else {
            name: file if isinstance(file, bytes) else file.read_bytes()
            for name, file in find_tokenizer_files(tokenizer).items()
        }
    )
    size = max(source.model.vocab_size, config.model.vocab_size)
    return ExtendedVocabularySource(source, size, first=first, files=files)


def _first_new_token(config: RunConfig, source: WeightSource, tokenizer: Tokenizer | None) -> int | None:
    """Return the first token of the data's tokenizer that the tokenizer of the weights lacks, as far as both are known;
    None if there is none.
    """
    assets = source.asset_files()
    original = assets.get("tokenizer.json") or assets.get(RECORD_FILE)
    made = {
        info.tokenizer.fingerprint: path
        for path, info in _datasets_with_tokenizer(config.data).items()
        if info.tokenizer
    }
    if tokenizer is not None:
        made = {tokenizer.fingerprint: tokenizer.path}
    if original is None or not made or config.data.allow_other_tokenizer:
        return None
    content = original.read_bytes() if isinstance(original, Path) else original
    ((fingerprint, path),) = made.items()
    extended = "tokenizer.json" not in assets  # by the tokenizer of an extension
    if fingerprint == (parse_json_text(content)["fingerprint"] if extended else hashlib.sha256(content).hexdigest()):
        return None
    if tokenizer is not None and tokenizer.extension is None and not extended:
        old, new = parse_tokenizer_vocab(content), parse_tokenizer_vocab(tokenizer.path.read_bytes())
        more = new.keys() - old.keys()
        first = max(old.values(), default=-1) + 1
        if new | old == new and all(new[token] >= first for token in more):
            return first if more else None
    raise DataError(
        f"init_from = {config.init_from} requires data of its own tokenizer, found that of {path}",
        hint="run mega data preprocess with the model's tokenizer, or with one that only adds tokens to it; or set "
        "data.allow_other_tokenizer=true to keep the data's tokenizer",
    )


def parse_tokenizer_vocab(content: bytes) -> dict[str, int]:
    """Return the id of each token, {token: id}, from the content of a HuggingFace `tokenizer.json`."""
    raw = parse_json_text(content)
    vocab = raw["model"].get("vocab") or {}
    pieces = vocab if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}
    return pieces | {token["content"]: token["id"] for token in raw.get("added_tokens", [])}


def _datasets_with_tokenizer(data: DataConfig) -> dict[Path, DatasetInfo]:
    """Return the descriptions of all data sets that record their tokenizer."""
    found = {}
    for source in (each for each in data.all_sources if (each.kind or data.kind) != "prompts"):
        for path in find_matching_prefixes(source):
            info = read_dataset_info(resolve_source_prefix(source, path, data))
            if info is not None and info.tokenizer is not None:
                found[path] = info
    return found


def _existing_tokenizer(made: dict[Path, DatasetInfo]) -> Tokenizer | None:
    for info in made.values():
        assert info.tokenizer is not None
        path = Path(info.tokenizer.path)
        if info.tokenizer.extension is not None:
            message = (
                "the data's tokenizer is of the extension %s; set data.tokenizer=%s, else checkpoints have no tokenizer"
            )
            logger.warning(message, info.tokenizer.extension, path)
            continue
        if path.exists():
            tokenizer = Tokenizer(path)
            if tokenizer.fingerprint == info.tokenizer.fingerprint:
                return tokenizer
        logger.warning("the tokenizer %s does not exist; set data.tokenizer, else checkpoints have no tokenizer", path)
    return None


def find_tokenizer_files(tokenizer: Tokenizer) -> dict[str, Path | bytes]:
    """Return {path in its folder: file or content} of the tokenizer files that are copied with a model."""
    if tokenizer.extension is not None:
        return {RECORD_FILE: tokenizer.extension.make_record(tokenizer.path.name.rpartition(":")[2])}
    folder = tokenizer.path.parent
    paths = [path for glob in TOKENIZER_FILES for path in sorted(folder.glob(glob)) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in paths}


BLOCKS, BLOCK = 64, 4096  # number and tokens of the checked blocks


def check_datasets(config: RunConfig) -> list[DatasetUsage]:
    """Check every data set of the run, raising an error for an unusable one, and return the planned usage of each.

    Raises:
        ConfigError, DataError: when a data set is missing or damaged, was made with another tokenizer or a larger
            vocabulary than the model's, or lacks end-of-document tokens that the configuration requires.
    """
    tokenizer = find_run_tokenizer(config.data, config.model.vocab_size)
    if config.objective.kind == "grpo":
        assert tokenizer is not None  # the rules of the configuration require data.tokenizer
        open_prompt_dataset(config, tokenizer)
        return []
    uses = plan_dataset_usage(config.data, config.samples_per_split, None if tokenizer is None else tokenizer.eos_id)
    for prefix in {use.prefix: None for use in uses}:
        _check_pairs(config, prefix)
        if config.data.dataset_kinds & {"labels", "token_labels"}:  # labels are no tokens; batches are checked
            continue
        largest = estimate_largest_token_id(IndexedReader(prefix))
        if largest >= config.model.vocab_size:
            raise DataError(
                f"{prefix} must have tokens below model.vocab_size = {config.model.vocab_size}, found {largest}",
                hint="make the data set with the model's tokenizer",
            )
    return uses


def open_prompt_dataset(config: RunConfig, tokenizer: Tokenizer) -> PromptDataset:
    """Open the prompts of a reinforcement-learning run (`objective.kind: grpo`).

    Raises:
        DataError: for a file without usable prompts.
    """
    objective, length = config.objective, config.data.seq_length
    longest = (
        length + (objective.reward_model is None) - objective.max_new_tokens
    )  # a reward model reads the last token
    return PromptDataset(
        config.data.train[0].path, tokenizer, seed=config.train.seed, group_size=objective.group_size,
        seq_length=length, longest=longest,
    )  # fmt: skip


def _check_pairs(config: RunConfig, prefix: Path) -> None:
    """Reject answers rated without a pair for an objective that compares the two answers of a pair.

    Raises:
        DataError: naming the data set.
    """
    unpaired, kind = count_unpaired_answers(prefix), config.objective.kind
    if unpaired and config.objective.uses_preference_pairs and kind != "kto":
        raise DataError(
            f"objective.kind = {kind} requires pairs of answers, found {unpaired} single answers in {prefix}",
            hint="set objective.kind=kto, or use records with chosen and rejected",
        )


def estimate_largest_token_id(reader: IndexedReader) -> int:
    """Return the largest token id found in sample blocks spread over a data set, which is not read whole."""
    starts = np.linspace(0, max(reader.num_tokens - BLOCK, 0), BLOCKS).astype(np.int64)
    return max((int(reader.tokens[start : start + BLOCK].max(initial=0)) for start in starts), default=0)


def format_usage(use: DatasetUsage) -> str:
    """Return one line of text about the planned usage of a data set: documents, tokens, samples and epochs."""
    if math.isnan(use.epochs):
        return f"{use.split} {use.prefix}: first block of streamed data; {round(use.samples):,} samples"
    return (
        f"{use.split} {use.prefix}: {use.documents:,} documents, {use.tokens:,} tokens; "
        f"{round(use.samples):,} samples, {use.epochs:.2f} epochs"
    )
