"""Records of labeled texts, labeled tokens and groups of texts, encoded as transformers encodes them.

    {"text": "Good.", "label": 1}                                                labels: of a text; or a name of `labels`
    {"text": "A cat", "text_pair": "An animal", "label": 0.7}                    or `query` with `passage`
    {"tokens": ["Ada", "ran"], "tags": [3, 0]}                                   token_labels; or `ner_tags`, `labels`
    {"query": "Who?", "positive": "Ada.", "negatives": ["Bo.", "Cy."]}           groups; or `anchor`

A document of the token files is a sequence of the text's tokens, with the special tokens of the tokenizer's template, and
one of its labels: the halves of the fp32 bits of a text's label, or for each token its label + 1, 0 for none. The first
token of a word has the word's label. A group has a sequence per text: query, positive, negatives. The mask byte of a token
is 1 plus its segment, of a label 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend

from mega_common.errors import DataError
from mega_data.chat.chat_preparation import ChatOptions, EncodedChats, masked_token_dtype
from mega_data.chat.chat_records import QUERIES, TAGS, parse_json_record
from mega_data.reading.documents import Document, RejectedItem
from mega_data.token_files.dataset_info import ChatInfo
from mega_data.tokenizer import Tokenizer

MAX_LABEL = 65_534  # label + 1 is stored as a token, of 16 bits for small vocabularies
_MAP = "--map label=COLUMN names the column of the labels; for texts without labels, leave out --kind"
TextInput = str | tuple[str, str] | list[str]  # a text, a pair of texts, or the words of a text


class LabeledRecord(NamedTuple):
    """Texts of a record and their labels: one of the text, one per word, or none for a group."""

    texts: list[TextInput]
    labels: list[float]


def parse_labeled_record(text: str, options: ChatOptions) -> LabeledRecord:
    """Return the texts and labels of a JSON record of kind `options.kind`: labels, token_labels or groups.

    Raises:
        DataError: if the record has another form.
    """
    record = parse_json_record(text, options.columns)
    if options.kind == "groups":
        return _parse_group(record, options.negatives)
    if options.kind == "token_labels":
        return _parse_tagged_words(record, options.labels)
    if "text" in record:
        texts = [_require_text(record, key) for key in ("text", "text_pair") if key in record]
    else:
        texts = [_require_text(record, key) for key in (_find_key(record, QUERIES), "passage")]
    if "label" not in record:
        raise DataError(f"no 'label'; the keys are {', '.join(record)}", hint=_MAP)
    return LabeledRecord(
        [(texts[0], texts[1]) if len(texts) > 1 else texts[0]], [_parse_label(record["label"], options.labels)]
    )


def _parse_group(record: Mapping[str, Any], count: int) -> LabeledRecord:
    found = record.get("negatives", record.get("negative", []))
    negatives = [found] if isinstance(found, str) else found
    if not isinstance(negatives, list) or not all(isinstance(each, str) and each for each in negatives):
        raise DataError("'negatives' is not a text or a list of texts")
    if len(negatives) < count:
        raise DataError(f"has {len(negatives)} negatives, fewer than the {count} that are asked for")
    texts = [_require_text(record, _find_key(record, QUERIES)), _require_text(record, "positive"), *negatives[:count]]
    return LabeledRecord([*texts], [])


def _parse_tagged_words(record: Mapping[str, Any], names: Sequence[str]) -> LabeledRecord:
    words, tags = record.get("tokens"), record.get(_find_key(record, TAGS))
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise DataError("'tokens' is not a list of words")
    if not isinstance(tags, list) or len(tags) != len(words):
        raise DataError(f"requires a list of {len(words)} labels, one per word")
    labels = [-1.0 if tag == -100 else _parse_label(tag, names) for tag in tags]
    if any(label != int(label) or not -1 <= label <= MAX_LABEL for label in labels):
        raise DataError(f"a label of a word must be a whole number from 0 to {MAX_LABEL}, or -100 for none")
    return LabeledRecord([list(words)], labels)


def _parse_label(label: object, names: Sequence[str]) -> float:
    """Return a label as a number: its position in `names`, if it is a name."""
    if isinstance(label, str) and label in names:
        return float(names.index(label))
    if isinstance(label, str):
        known = f"one of {', '.join(names)}" if names else "a number, as no names are set"
        raise DataError(
            f"'label' must be {known}, not {label!r}", hint="name all labels in data.raw.labels or --labels"
        )
    if not isinstance(label, bool | int | float) or not math.isfinite(label):
        raise DataError(f"'label' must be a finite number or a name, not {label!r}")
    return float(label)


def _find_key(record: Mapping[str, Any], names: Sequence[str]) -> str:
    return next((name for name in names if name in record), names[0])


def _require_text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        if key not in record:
            hint = f"--map {key}=COLUMN names its column" if key != "text" else ""
            raise DataError(f"no {key!r}; the keys are {', '.join(record)}", hint=hint)
        raise DataError(f"{key!r} is not a text")
    return value


class LabeledRecordConverter:
    """Conversion of JSON records to token sequences of texts and labels.

    Attributes:
        info: entry of the data set's description.
    """

    def __init__(self, options: ChatOptions, tokenizer: Tokenizer) -> None:
        self._options = options
        self.info = ChatInfo(
            kind=options.kind, loss_on="answers", one=1, template="", marked=False, max_length=options.max_length,
            labels=list(options.labels), negatives=options.negatives,
        )  # fmt: skip
        self._backend = Backend.from_str(tokenizer.backend.to_str())
        if options.max_length is not None:
            self._backend.enable_truncation(options.max_length)

    def prepare_record(self, item: Document | RejectedItem) -> Document | RejectedItem:
        """Return a record as a document with its texts and labels in `record`, or a `RejectedItem` if it is not valid."""
        if isinstance(item, RejectedItem):
            return item
        try:
            texts, labels = parse_labeled_record(item.text, self._options)
        except DataError as error:
            return RejectedItem(error.message, item.text, item.file, item.line, hint=error.hint or "")
        return Document("", item.size, item.file, item.line, record={"texts": texts, "labels": labels})

    def encode_documents(self, documents: Sequence[Document], dtype: npt.DTypeLike) -> EncodedChats:
        """Return the sequences of tokens and labels of each document, with mask bytes (`masked_token_dtype`)."""
        records = [document.record or {} for document in documents]
        words = self._options.kind == "token_labels"
        encoded = iter(
            self._backend.encode_batch([text for record in records for text in record["texts"]], is_pretokenized=words)
        )
        results: list[list[npt.NDArray[Any]]] = []
        for record in records:
            encodings = [next(encoded) for _ in record["texts"]]
            sequences = [_to_sequence(each.ids, [1 + kind for kind in each.type_ids], dtype) for each in encodings]
            if words:
                sequences.append(_to_sequence(_align_labels(encodings[0].word_ids, record["labels"]), 0, dtype))
            elif record["labels"]:
                bits = int(np.array(record["labels"], np.float32).view(np.uint32)[0])
                sequences.append(_to_sequence([bits >> 16, bits & 0xFFFF], 0, dtype))
            results.append(sequences)
        return EncodedChats(results, 0, Counter())


def _to_sequence(ids: Sequence[int], mask: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    array = np.empty(len(ids), masked_token_dtype(dtype))
    array["token"], array["mask"] = ids, mask
    return array


def _align_labels(word_ids: Sequence[int | None], labels: Sequence[float]) -> list[int]:
    """Return the label + 1 of each token that is the first of its word, 0 for other tokens."""
    return [
        0 if word is None or word == before else int(labels[word]) + 1
        for word, before in zip(word_ids, [None, *word_ids], strict=False)
    ]


def read_text_label(sequence: npt.NDArray[np.integer[Any]]) -> float:
    """Return the label of a text, an fp32 number whose high and low 16 bits are the two tokens of `sequence`."""
    high, low = (int(token) for token in sequence)
    return float(np.array([(high & 0xFFFF) << 16 | low & 0xFFFF], np.uint32).view(np.float32)[0])
