"""What preprocessing makes of records of conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mega_common.errors import DataError
from mega_common.log import logger
from mega_data.chat.encode import HUNDREDTHS, ChatEncoder
from mega_data.chat.records import LossOn, parse_record
from mega_data.chat.template import Rendered, load_template
from mega_data.files.info import UNPAIRED, ChatInfo
from mega_data.reading.documents import Document, Rejected
from mega_data.tokenizer import Tokenizer


def log_notes(notes: Mapping[str, int]) -> None:
    """Warn of what was noted of conversations, with their number."""
    for note, count in sorted(notes.items()):
        logger.warning("%d conversations %s", count, note)


@dataclass(frozen=True)
class ChatOptions:
    """How conversations become tokens.

    Attributes:
        kind: a record is one conversation, or a pair of a chosen and a rejected one.
        loss_on: what counts: all answers, the last one, or everything.
        max_length: tokens to keep of each, from its begin; None for all.
        template: a file with another chat template than the tokenizer's; `template_options` are given to either.
        turn_weights: answers may have other weights than 0 and 1: multiples of 0.01 up to 2.55.
    """

    kind: Literal["conversations", "pairs"] = "conversations"
    loss_on: LossOn = "answers"
    max_length: int | None = None
    template: Path | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    turn_weights: bool = False


class Chats:
    """Turns records into rendered conversations.

    Attributes:
        info: what the data set's description says of it.
        encoder: what encodes them.

    Raises:
        DataError: when there is no chat template, or the options contradict.
        MissingPackageError: without transformers.
    """

    def __init__(self, options: ChatOptions, tokenizer: Tokenizer) -> None:
        if options.kind == "pairs" and options.loss_on == "all":
            raise DataError("--loss-on all: what two answers of a pair share cannot be told better or worse")
        self._options = options
        self._template = load_template(tokenizer.path, options.template, options.template_options)
        one = HUNDREDTHS if options.turn_weights else 1
        self.info = ChatInfo(
            kind=options.kind, loss_on=options.loss_on, one=one, template=self._template.fingerprint,
            marked=self._template.marks, max_length=options.max_length,
        )  # fmt: skip
        self.encoder = ChatEncoder(tokenizer, one, options.max_length)
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self._specials = tuple(token.content for token in added if token.special)
        self._told_of_end = options.loss_on == "all"
        self._tell()

    def _tell(self) -> None:
        if not self._template.marks and self._options.loss_on != "all":
            logger.info(
                "the chat template marks no answers: they are what each answer adds to the text of what comes before it"
            )
        for name in self._template.find_unused(self._options.template_options):
            logger.warning(
                "--template-option %s has no effect: the chat template does not use a variable of that name", name
            )
        if self._template.dated:
            logger.warning(
                "the chat template writes today's date, so that tomorrow's tokens differ; --template-option, where the"
                " template takes a date, fixes it"
            )

    def prepare(self, item: Document | Rejected) -> Document | Rejected:
        """The conversations of a record, for `batches`."""
        if isinstance(item, Rejected):
            return item
        options = self._options
        try:
            found = parse_record(item.text, pairs=options.kind == "pairs", loss_on=options.loss_on)
            chats = tuple(
                Rendered(self._template.prompt(one), ()) if one.missing else self._template.render(one, options.loss_on)
                for one in found
            )
            for chat in chats:
                self._check(chat, item.where)
        except DataError as error:
            return Rejected(str(error), item.text, item.file, item.line)
        size = sum(len(chat.text.encode("utf-8", "replace")) for chat in chats)
        notes = tuple({note for chat in chats for note in chat.notes} | {UNPAIRED for one in found if one.missing})
        return Document("", size, item.file, item.line, chats=chats, notes=notes)

    def _check(self, chat: Rendered, where: str) -> None:
        """Refuse weights that the mask cannot hold; tell once of answers that end with no special token."""
        for span in chat.spans:
            byte = span.weight * self.info.one
            if abs(byte - round(byte)) > 1e-6 or not 1 <= round(byte) <= 255:
                hint = "a multiple of 0.01 up to 2.55" if self.info.one > 1 else "0 or 1; --turn-weights allows others"
                raise DataError(f"a weight of {span.weight}, which must be {hint}")
            if not self._told_of_end and not chat.text[span.begin : span.end].rstrip().endswith(self._specials):
                self._told_of_end = True
                logger.warning(
                    "%s: an answer ends with no special token that counts in the loss, so that a model may not learn to stop",
                    where,
                )
