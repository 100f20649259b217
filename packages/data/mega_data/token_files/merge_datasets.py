"""Merging of several token data sets into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from mega_common.atomic_files import compute_file_sha256
from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar
from mega_data.token_files.dataset_commit import commit_dataset, finish_interrupted_commit
from mega_data.token_files.dataset_info import (
    ChatInfo,
    DatasetInfo,
    SkippedCounts,
    TokenizerInfo,
    check_output_prefix,
    get_dtype_name,
    list_dataset_files,
    read_dataset_info,
    reject_input_as_output,
    write_dataset_info,
)
from mega_data.token_files.image_references import reject_images
from mega_data.token_files.indexed_reader import (
    IndexedReader,
    get_bin_path,
    get_idx_path,
    raise_open_files_limit,
    strip_data_suffix,
)
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.token_files.loss_mask import open_loss_mask


def merge_datasets(
    prefixes: Sequence[Path], output: Path, *, mixed: bool = False, overwrite: bool = False
) -> DatasetInfo:
    """Write the documents of several data sets, in that order, as one data set, and return its description.
    The data sets are `prefixes`, the result is `output`.

    Without `mixed`, all must have the same tokenizer and `append_eod`. Data sets without a `PREFIX.info` merge only
    with each other, and count as 0 text bytes.

    Raises:
        DataError: if a data set is damaged, two differ in these settings, or the output exists.
    """
    output = strip_data_suffix(Path(output))
    finish_interrupted_commit(output)
    check_output_prefix(output, overwrite)
    raise_open_files_limit(2 * len(prefixes))
    readers = [IndexedReader(Path(prefix)) for prefix in prefixes]
    reject_input_as_output(
        list_dataset_files(output), (path(reader.prefix) for reader in readers for path in (get_bin_path, get_idx_path))
    )
    reject_images(readers, "merged", "list them all in data.train instead")
    infos = [read_dataset_info(reader.prefix) for reader in readers]
    tokenizer, append_eod = _common_tokenizer(readers, infos, mixed)
    for reader in readers:
        if reader.dtype != readers[0].dtype:
            raise DataError(
                f"{reader.prefix}: has {reader.dtype} tokens, but {readers[0].prefix} has {readers[0].dtype} tokens",
                hint="tokenize both with the same tokenizer: the dtype follows from its vocabulary",
            )
    existing = [info for info in infos if info is not None]
    chat = _common_chat_info(readers, infos)
    with IndexedWriter(output, readers[0].dtype, masked=chat is not None) as writer:
        return append_datasets(
            writer, readers, sum(r.tokens.nbytes for r in readers), existing, tokenizer, append_eod, chat=chat
        )


def append_datasets(
    writer: IndexedWriter,
    readers: Iterable[IndexedReader],
    size: int,
    infos: Sequence[DatasetInfo],
    tokenizer: TokenizerInfo | None,
    append_eod: bool | None,
    made_from: str = "",
    obsolete: Iterable[Path] = (),
    *,
    chat: ChatInfo | None = None,
) -> DatasetInfo:
    """Append data sets to a writer, rename its files to their final names, and return the new description.

    The data sets of `readers` have `size` bytes of tokens. The description has the counts of `infos` added up.
    """
    documents = tokens = 0
    with ProgressBar("merging", total=size or None, unit="bytes") as bar:
        for reader in readers:
            writer.append_dataset(reader, bar, None if chat is None else open_loss_mask(reader).tokens)
            documents, tokens = documents + reader.document_index.size - 1, tokens + reader.num_tokens
    writer.finish_files()
    if chat is not None:
        cut = sum(info.chat.cut for info in infos if info.chat)
        notes: Counter[str] = Counter()
        for info in infos:
            notes.update(info.chat.notes if info.chat else {})
        chat = chat.model_copy(
            update={"cut": cut, "notes": dict(notes), "mask_sha256": compute_file_sha256(writer.folder / "mask.bin")}
        )
    info = write_dataset_info(
        writer.prefix,
        folder=writer.folder,
        tokenizer=tokenizer,
        append_eod=append_eod,
        dtype=get_dtype_name(writer.dtype),
        documents=documents,
        tokens=tokens,
        text_bytes=sum(info.text_bytes for info in infos),
        skipped=SkippedCounts(
            bad=sum(info.skipped.bad for info in infos),
            empty=sum(info.skipped.empty for info in infos),
            binary=sum(info.skipped.binary for info in infos),
        ),
        bin_sha256=compute_file_sha256(writer.folder / "bin"),
        chat=chat,
        made_from=made_from or None,
        license=infos[0].license if len({info.license for info in infos}) == 1 else None,
    )
    commit_dataset(writer, made_from, obsolete)
    return info


def _common_tokenizer(
    readers: Sequence[IndexedReader], infos: Sequence[DatasetInfo | None], mixed: bool
) -> tuple[TokenizerInfo | None, bool | None]:
    """Return the tokenizer and `append_eod` shared by all; with `mixed`, None for each that differs."""
    tokenizers = [info.tokenizer if info else None for info in infos]
    ends = [info.append_eod if info else None for info in infos]
    fingerprints = [tokenizer.fingerprint if tokenizer else "unknown" for tokenizer in tokenizers]
    hint = "pass --mixed to merge them nevertheless"
    for reader, fingerprint, end in zip(readers, fingerprints, ends, strict=True):
        if fingerprint != fingerprints[0] and not mixed:
            raise DataError(
                f"{reader.prefix}: has another tokenizer ({fingerprint[:12]}) than"
                f" {readers[0].prefix} ({fingerprints[0][:12]})",
                hint=hint,
            )
        if end != ends[0] and not mixed:
            with_end, without = (readers[0], reader) if ends[0] else (reader, readers[0])
            raise DataError(
                f"{with_end.prefix}: has an end token after each document (--append-eod), {without.prefix} does not",
                hint=hint,
            )
    return (
        tokenizers[0] if len(set(fingerprints)) == 1 else None,
        ends[0] if len(set(ends)) == 1 else None,
    )


def _common_chat_info(readers: Sequence[IndexedReader], infos: Sequence[DatasetInfo | None]) -> ChatInfo | None:
    """Return the chat description shared by all; None if none has one."""
    chats = [info.chat if info else None for info in infos]
    first = chats[0]
    for reader, chat in zip(readers, chats, strict=True):
        if (chat and chat.kind) != (first and first.kind):
            raise DataError(
                f"{reader.prefix}: has {chat.kind if chat else 'text'}, but {readers[0].prefix}"
                f" has {first.kind if first else 'text'}",
                hint="list both in data.train instead, each with its kind",
            )
        if chat and first and chat.one != first.one:
            raise DataError(
                f"{reader.prefix}: loss mask byte {chat.one} means weight 1, but in {readers[0].prefix} it is {first.one}",
                hint="preprocess both with --turn-weights, or both without",
            )
    return first
