"""Preparation of conversation records for preprocessing: rendering, encoding and loss masks."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_common.progress_logging import logger
from mega_data.chat.chat_records import Conversation, LossOn, parse_chat_record
from mega_data.chat.chat_template import read_chat_template
from mega_data.reading.documents import Document, LossSpan, RejectedItem, RenderedChat
from mega_data.token_files.dataset_info import UNPAIRED, ChatInfo, RecordKind
from mega_data.tokenizer import LEADS, Tokenizer

HUNDREDTHS = 100  # mask byte of weight 1 with --turn-weights
MERGED = "have an answer that merges with the end of its prompt; the prompt is encoded alone, as it is served"
INSEPARABLE = (
    "have an answer that merges with the end of its prompt, and this tokenizer cannot encode it separately; the token"
    " across the boundary does not count in the loss, and the prompt differs from the one that is served"
)
NO_ANSWER = 2  # tokens of the prompt that are kept for a missing answer

# Leads whose tokens rarely merge with the following text: a control character, which falls back to a byte, and others.
UNMERGED = ("\x01", "a", ".", "0")

Offsets = list[tuple[int, int]]


def masked_token_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return the structured numpy dtype of a token id with its loss mask byte.
    The numpy fields are `token`, the id stored as `dtype`, and `mask`.
    """
    return np.dtype([("token", dtype), ("mask", np.uint8)])


class EncodedText(NamedTuple):
    """Token ids of a rendered conversation, with the character offsets of each token.
    A note is included if an answer merges with the end of its prompt.
    """

    ids: list[int]
    offsets: Offsets
    note: str = ""


class EncodedChats(NamedTuple):
    """Token arrays of each chat's texts (none if no answer is left), number of truncated answers, and chats per note."""

    texts: list[list[npt.NDArray[Any]]]
    cut: int
    notes: Counter[str]


class ChatEncoder:
    """Encoder of rendered conversations to arrays of token ids and loss mask bytes (`masked_token_dtype`).

    A token counts in the loss if one of its characters does. The tokens before an answer are those of its prompt alone,
    as a server encodes it: if the tokenizer merges the end of a prompt with the beginning of an answer, both are
    encoded separately, and a note is recorded.

    Args:
        one: mask byte of weight 1.
        max_length: maximum number of tokens of a conversation; the rest is truncated.
    """

    def __init__(self, tokenizer: Tokenizer, one: int, max_length: int | None) -> None:
        self._tokenizer, self._one, self._max_length = tokenizer, one, max_length
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self._leads = (*LEADS, *UNMERGED, *(token.content for token in added if token.special))

    def encode_chats(self, chats: Sequence[tuple[RenderedChat, ...]], dtype: npt.DTypeLike) -> EncodedChats:
        """Encode each chat to token arrays with loss mask bytes, none if a text has no token left that counts in the loss.
        A chat is one text, or the chosen and rejected texts of a pair. Ids are stored as `dtype`.

        If one text of a chat has no token left that counts in the loss, the chat is empty.
        """
        encoded = iter(self._encode_texts([text for chat in chats for text in chat]))
        results, cut, notes = [], 0, Counter[str]()
        for chat in chats:
            texts, chat_notes = [], set()
            for rendered, text in zip(chat, encoded, strict=False):
                array = np.empty(len(text.ids), masked_token_dtype(dtype))
                array["token"] = text.ids
                array["mask"], truncated = self._build_mask(text, rendered.spans)
                cut += truncated
                chat_notes |= {text.note} - {""}
                texts.append(array[: self._max_length] if rendered.spans else array[:NO_ANSWER])
            notes.update(chat_notes)
            # The first token of a sequence is not a label.
            answers = [array for array, rendered in zip(texts, chat, strict=True) if rendered.spans]
            results.append(texts if all(array["mask"][1:].any() for array in answers) else [])
        return EncodedChats(results, cut, notes)

    def _encode_texts(self, texts: Sequence[RenderedChat]) -> Iterator[EncodedText]:
        """Encode texts so that the tokens of each prompt are a prefix of the tokens of the whole."""
        encodings = self._tokenizer.backend.encode_batch(
            [rendered.text for rendered in texts], add_special_tokens=False
        )
        merged = self._find_merged_answers([encoding.ids for encoding in encodings], texts)
        for number, (rendered, encoding) in enumerate(zip(texts, encodings, strict=True)):
            whole = EncodedText(encoding.ids, encoding.offsets)
            yield self._encode_in_parts(rendered.text, merged[number], whole) if number in merged else whole

    def _find_merged_answers(self, ids: Sequence[list[int]], texts: Sequence[RenderedChat]) -> Mapping[int, list[int]]:
        """Return the positions in each text of the answers whose prompt has other tokens when encoded alone."""
        begins = [(number, span.begin) for number, text in enumerate(texts) for span in text.spans if span.begin]
        prompts = self._tokenizer.backend.encode_batch_fast(
            [texts[number].text[:begin] for number, begin in begins], add_special_tokens=False
        )
        merged: defaultdict[int, list[int]] = defaultdict(list)
        for (number, begin), prompt in zip(begins, prompts, strict=True):
            if ids[number][: len(prompt.ids)] != prompt.ids:
                merged[number].append(begin)
        return dict(merged)

    def _encode_in_parts(self, text: str, cuts: Sequence[int], whole: EncodedText) -> EncodedText:
        """Encode a text in parts, cut at the positions `cuts`."""
        prompt = self._tokenizer.backend.encode(text[: cuts[0]], add_special_tokens=False)
        ids, offsets = list(prompt.ids), list(prompt.offsets)
        for begin, end in pairwise([*cuts, len(text)]):
            part = self._encode_continuation(ids, text, begin, end)
            if part is None:
                return whole._replace(note=INSEPARABLE)
            ids += part.ids
            offsets += part.offsets
        return EncodedText(ids, offsets, MERGED)

    def _encode_continuation(self, before: list[int], text: str, begin: int, end: int) -> EncodedText | None:
        """Encode `text[begin:end]` as the continuation of the tokens `before`, after a lead whose tokens are removed."""
        tokenizer = self._tokenizer
        expected = tokenizer.decode(tokenizer.encode(text[:end]))
        for lead in self._leads:
            count = len(first := tokenizer.encode(lead))
            encoding = tokenizer.backend.encode(lead + text[begin:end], add_special_tokens=False)
            ids = encoding.ids[count:]
            if ids and encoding.ids[:count] == first and tokenizer.decode(before + ids) == expected:
                shift = begin - len(lead)
                return EncodedText(ids, [(low + shift, high + shift) for low, high in encoding.offsets[count:]])
        return None

    def _build_mask(self, text: EncodedText, spans: Sequence[LossSpan]) -> tuple[npt.NDArray[np.uint8], int]:
        """Return the mask byte of each token, uint8 [n], and the number of spans truncated by the length limit."""
        begins, ends = np.array(text.offsets, np.int64).reshape(-1, 2).T
        mask, cut = np.zeros(begins.size, np.uint8), 0
        for span in spans:
            inside = (begins < span.end) & (ends > span.begin)
            if text.note == INSEPARABLE:
                inside &= begins >= span.begin
            mask[inside] = round(span.weight * self._one)
            cut += self._max_length is not None and bool(inside[self._max_length :].any())
        return mask, cut


def log_chat_warnings(notes: Mapping[str, int]) -> None:
    """Log each note about conversations as a warning, with the number of conversations that it concerns."""
    for note, count in sorted(notes.items()):
        logger.warning("%d conversations %s", count, note)


@dataclass(frozen=True)
class ChatOptions:
    """Options for tokenizing conversations: kind of record, loss, length limit and chat template.

    Attributes:
        kind: a record is one conversation, a pair of a chosen and a rejected one, a labeled text, labeled words, or a group
            of texts (`mega_data.chat.labeled_records`).
        loss_on: turns that contribute to the loss: all answers, the last one, or everything.
        max_length: maximum number of tokens of a conversation; None for no limit.
        template: file with a chat template that replaces the tokenizer's.
        template_options: variables that are passed to the template.
        turn_weights: allow loss weights other than 0 and 1: multiples of 0.01 up to 2.55.
        columns: columns of the records by their role, such as {"messages": "dialog"}; empty for the usual names.
        labels: names of labels, in order, for labeled records.
        negatives: number of negatives of each group of texts.
    """

    kind: RecordKind = "conversations"
    loss_on: LossOn = "answers"
    max_length: int | None = None
    template: Path | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    turn_weights: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    labels: Sequence[str] = ()
    negatives: int = 0


class RecordConverter(Protocol):
    """Interface of the conversion of JSON records to token sequences with mask bytes.

    Attributes:
        info: entry of the data set's description.
    """

    info: ChatInfo

    def prepare_record(self, item: Document | RejectedItem) -> Document | RejectedItem:
        """Return a record as a document to encode, or as a `RejectedItem` if it has another form."""

    def encode_documents(self, documents: Sequence[Document], dtype: npt.DTypeLike) -> EncodedChats:
        """Return the token sequences of each document, with mask bytes (`masked_token_dtype`)."""


class ChatRecordConverter:
    """Conversion of JSON records to conversations rendered by the chat template.

    Attributes:
        info: entry of the data set's description.
        encoder: encoder of the rendered conversations.

    Args:
        inserted: text that takes the place of images; special tokens in it are not reported.

    Raises:
        DataError: if there is no chat template, or options conflict.
        MissingPackageError: if transformers is not installed.
    """

    def __init__(self, options: ChatOptions, tokenizer: Tokenizer, inserted: str = "") -> None:
        if options.kind == "pairs" and options.loss_on == "all":
            raise DataError("--loss-on all conflicts with --kind pairs", hint="use --loss-on answers or last")
        self._options = options
        self._template = read_chat_template(tokenizer.path, options.template, options.template_options)
        one = HUNDREDTHS if options.turn_weights else 1
        self.info = ChatInfo(
            kind=options.kind, loss_on=options.loss_on, one=one, template=self._template.fingerprint,
            marked=self._template.marks, max_length=options.max_length,
        )  # fmt: skip
        self.encoder = ChatEncoder(tokenizer, one, options.max_length)
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self._specials = tuple(token.content for token in added if token.special)
        spelled = sorted((token for token in self._specials if token not in inserted), key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, spelled)) or "(?!)")
        self._has_warned_of_end = options.loss_on == "all"
        self._log_template_warnings()

    def _log_template_warnings(self) -> None:
        if not self._template.marks and self._options.loss_on != "all":
            logger.info(
                "the chat template does not mark answers; they are found by rendering the first messages of each chat"
            )
        for name in self._template.find_unused_options(self._options.template_options):
            logger.warning("--template-option %s has no effect: the chat template does not use this variable", name)
        if self._template.depends_on_date:
            logger.warning(
                "the chat template writes the current date, so tokens differ from day to day; set a date by"
                " --template-option if the template accepts one"
            )

    def prepare_record(self, item: Document | RejectedItem) -> Document | RejectedItem:
        """Return a record as a document with rendered conversations in `chats`, or a `RejectedItem` if it is not valid."""
        if isinstance(item, RejectedItem):
            return item
        options = self._options
        try:
            parsed = parse_chat_record(
                item.text, pairs=options.kind == "pairs", loss_on=options.loss_on, columns=options.columns
            )
            chats = tuple(
                RenderedChat(self._template.render_prompt(conversation), ())
                if conversation.missing
                else self._template.render_chat(conversation, options.loss_on)
                for conversation in parsed
            )
            for chat in chats:
                self._check_chat(chat, item.location)
        except DataError as error:
            return RejectedItem(str(error), item.text, item.file, item.line)
        size = sum(len(chat.text.encode("utf-8", "replace")) for chat in chats)
        notes = tuple(
            {note for chat in chats for note in chat.notes}
            | {UNPAIRED for conversation in parsed if conversation.missing}
            | {note for conversation in parsed for note in self._find_spelled_tokens(conversation)}
        )
        return Document("", size, item.file, item.line, chats=chats, notes=notes)

    def encode_documents(self, documents: Sequence[Document], dtype: npt.DTypeLike) -> EncodedChats:
        """Return the token sequences of each conversation or pair, with mask bytes (`masked_token_dtype`)."""
        encoded = self.encoder.encode_chats([document.chats for document in documents], dtype)
        encoded.notes.update(note for document in documents for note in document.notes)
        return encoded

    def _find_spelled_tokens(self, conversation: Conversation) -> set[str]:
        """Return notes about special tokens that messages or tools spell, which are encoded as these tokens as in
        transformers.
        """
        written = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False, default=str)
        return {
            f"spell the special token {token!r} in a message or in 'tools', which is encoded as that token"
            for token in set(self._spelling.findall(written))
        }

    def _check_chat(self, chat: RenderedChat, where: str) -> None:
        """Reject weights that a mask byte cannot represent; warn once if an answer ends without a special token."""
        for span in chat.spans:
            byte = span.weight * self.info.one
            if abs(byte - round(byte)) > 1e-6 or not 1 <= round(byte) <= 255:
                if self.info.one > 1:
                    raise DataError(f"the weight of an answer must be a multiple of 0.01 up to 2.55, not {span.weight}")
                raise DataError(
                    f"the weight of an answer must be 0 or 1, not {span.weight}", hint="pass --turn-weights for others"
                )
            if not self._has_warned_of_end and not chat.text[span.begin : span.end].rstrip().endswith(self._specials):
                self._has_warned_of_end = True
                logger.warning(
                    "%s: an answer does not end with a special token that counts in the loss; the model may not learn to stop",
                    where,
                )
