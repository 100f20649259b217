"""Dataset kinds, selected by `data.kind` or by the `kind` of one data set."""

from __future__ import annotations

from mega_data.kinds.bert_samples import build_bert_samples
from mega_data.kinds.chat_samples import build_conversation_samples, build_preference_pairs
from mega_data.kinds.dataset_kind import DatasetFactory
from mega_data.kinds.fill_in_middle import build_fim_samples
from mega_data.kinds.labeled_samples import build_labeled_samples
from mega_data.kinds.masked_lm_samples import build_masked_lm_samples
from mega_data.kinds.packed_documents import build_packed_samples
from mega_data.kinds.retro_samples import build_retro_samples
from mega_data.kinds.running_text import build_text_samples
from mega_data.kinds.t5_samples import build_t5_samples
from mega_data.raw_data_config import LABELED_KINDS


def get_dataset_builders() -> dict[str, DatasetFactory]:
    """Return {dataset kind: function that builds its samples}, by the names of `mega_data.data_config.KindName`."""
    return {
        "text": build_text_samples,
        "documents": build_packed_samples,
        "conversations": build_conversation_samples,
        "pairs": build_preference_pairs,
        **dict.fromkeys(LABELED_KINDS, build_labeled_samples),
        "fim": build_fim_samples,
        "bert": build_bert_samples,
        "masked": build_masked_lm_samples,
        "t5": build_t5_samples,
        "retro": build_retro_samples,
    }
