"""The kinds of training data: what `data.kind`, or the `kind` of one data set, chooses from."""

from __future__ import annotations

from mega_data.kinds.base import Kind
from mega_data.kinds.bert import bert
from mega_data.kinds.conversations import conversations
from mega_data.kinds.fim import fim
from mega_data.kinds.masked import masked
from mega_data.kinds.packed import documents
from mega_data.kinds.pairs import pairs
from mega_data.kinds.retro import retro
from mega_data.kinds.t5 import t5
from mega_data.kinds.text import text


def kinds() -> dict[str, Kind]:
    """Each kind by its name, as `mega_data.config.KindName` lists them."""
    return {
        "text": text,
        "documents": documents,
        "conversations": conversations,
        "pairs": pairs,
        "fim": fim,
        "bert": bert,
        "masked": masked,
        "t5": t5,
        "retro": retro,
    }
