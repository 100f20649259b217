"""Served embeddings are those of `mega embed` and of sentence-transformers, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch
from masked_data import save_word_pieces
from serving import service_of, serving
from tiny_models import save_tiny, variant

from mega_ckpt.families import find_family_by_name
from mega_cli.serve import _make_embedder
from mega_common.errors import CheckpointError
from mega_data.tokenizer import Tokenizer
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import load_inference_model, load_tokenizer
from mega_eval.server.embeddings_api import make_served_embedder
from mega_eval.text_embedding import load_text_embedder
from mega_trainer.parallel.lora_layers import PerRowAdapterSelection

LONG = " ".join(f"w{number}" for number in range(40))
TEXTS = ["w1 w2 w3", "W9", LONG, "w3 w3"]
LIBRARY = "sentence_transformers"
Request = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_word_pieces(tmp_path_factory.mktemp("decoder"), around=True)
    tokenizer = Tokenizer(folder)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    config = variant("grouped").model_copy(update={"vocab_size": tokenizer.vocab_size, "max_position": 64})
    save_tiny(folder, find_family_by_name("llama"), config)
    return folder


def declare(decoder: Path, folder: Path, kinds: list[str], pooling: dict[str, Any], **settings: Any) -> Path:
    """Put the files of sentence-transformers beside those of a decoder."""
    for file in decoder.iterdir():
        (folder / file.name).symlink_to(file)
    names = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
    module = "sentence_transformers.models."
    listing = [
        {"idx": number, "name": str(number), "path": name, "type": module + kind}
        for number, (kind, name) in enumerate(zip(kinds, names, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listing))
    (folder / names[1]).mkdir()
    width = json.loads((decoder / "config.json").read_text())["hidden_size"]
    (folder / names[1] / "config.json").write_text(json.dumps({"word_embedding_dimension": width, **pooling}))
    for name in names[2:]:
        (folder / name).mkdir()
    text = {"max_seq_length": settings.pop("max_seq_length", 16), "do_lower_case": settings.pop("do_lower_case", False)}
    (folder / "sentence_bert_config.json").write_text(json.dumps(text))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def request_embeddings(decoder: Path) -> Iterator[Request]:
    """Answer one request for embeddings as by a server of the folder given, whose embedder the one server gets."""
    engine = InferenceEngine(load_inference_model(decoder), load_tokenizer(decoder), cache_tokens=256, batch_size=4)
    service = service_of(engine, decoder, max_length=64)
    with serving(service) as (url, _), httpx.Client(base_url=url, timeout=60) as client:

        def request(folder: Path, **body: Any) -> httpx.Response:
            model, tokenizer = load_inference_model(folder), load_tokenizer(folder)
            service.embedder = _make_embedder(str(folder), model, tokenizer, PerRowAdapterSelection([]))
            return client.post("/v1/embeddings", json=body)

        yield request


TRANSFORMER, PLAIN = ["Transformer", "Pooling", "Normalize"], ["Transformer", "Pooling"]
PROMPTS = {"prompts": {"query": "w20 w21 "}, "default_prompt_name": "query"}
FOLLOWED: list[tuple[str, list[str], dict[str, Any], dict[str, Any]]] = [
    ("last token, normalised", TRANSFORMER, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, {}),
    ("last token", PLAIN, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, {}),
    ("mean", PLAIN, {"pooling_mode_mean_tokens": True}, {}),
    ("mean, normalised", TRANSFORMER, {"pooling_mode_mean_tokens": True}, {}),
    ("max", TRANSFORMER, {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, {}),
    ("weighted", PLAIN, {"pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_tokens": False}, {}),
    ("two modes", TRANSFORMER, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, {}),
    ("prompt", TRANSFORMER, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, PROMPTS),
    ("prompt not pooled", PLAIN, {"pooling_mode_mean_tokens": True, "include_prompt": False}, PROMPTS),
    ("prompt that is not the default", PLAIN, {"pooling_mode_mean_tokens": True}, {"prompts": {"query": "w20 "}}),
    ("longer", PLAIN, {"pooling_mode_mean_tokens": True}, {"max_seq_length": 32}),
    ("lower case", PLAIN, {"pooling_mode_mean_tokens": True}, {"do_lower_case": True}),
]


@pytest.mark.parametrize(("kinds", "pooling", "settings"), [row[1:] for row in FOLLOWED], ids=[row[0] for row in FOLLOWED])  # fmt: skip
def test_vectors_are_those_of_the_command_and_the_library(
    decoder: Path,
    request_embeddings: Request,
    tmp_path: Path,
    kinds: list[str],
    pooling: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    library = pytest.importorskip(LIBRARY, reason="the judge of its own folders")
    folder = declare(decoder, tmp_path, kinds, pooling, **settings)
    answer = request_embeddings(folder, input=TEXTS).json()
    found = np.array([one["embedding"] for one in answer["data"]])
    command = load_text_embedder(str(folder), dtype=torch.float32, device="cpu")
    np.testing.assert_allclose(
        found, command.embed_texts(TEXTS, prompt=command.settings.select_prompt(None)), atol=1e-5
    )
    reference = library.SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose(found, reference.encode(TEXTS), atol=1e-5)
    most = settings.get("max_seq_length", 16)
    assert answer["usage"]["prompt_tokens"] <= most * len(TEXTS)


REFUSED: list[tuple[list[str], dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    (PLAIN, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, {}, {}, "cls requires an encoder"),
    (PLAIN, {"pooling_mode_newest_tokens": True}, {}, {}, "pooling_mode_newest_tokens"),
    (PLAIN, {"pooling_mode": "attention"}, {}, {}, "pooling 'attention' is not supported"),
    ([*PLAIN, "WordWeights"], {}, {}, {}, "WordWeights"),
    (["Transformer", "WeightedLayerPooling", "Pooling"], {}, {}, {}, "must begin with Transformer and Pooling"),
    ([*PLAIN, "Dense"], {}, {}, {}, "config.json is missing"),
    (PLAIN, {}, {"default_prompt_name": "query"}, {}, "has no prompts"),
    (PLAIN, {}, PROMPTS, {"input": [1, 2]}, "prompt 'w20 w21 ' is put first"),
    (PLAIN, {}, PROMPTS, {"input": [[1], [2]]}, "is put first"),
    (PLAIN, {}, {}, {"input": list(range(1, 18))}, "maximum context length is 16 tokens; a text of input has 17"),
    (TRANSFORMER, {}, {}, {"dimensions": 3}, "dimensions must be"),
]


@pytest.mark.parametrize(("kinds", "pooling", "settings", "body", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    decoder: Path, request_embeddings: Request, tmp_path: Path, kinds: list[str], pooling: dict[str, Any], settings: dict[str, Any],
    body: dict[str, Any], message: str,
) -> None:  # fmt: skip
    answer = request_embeddings(declare(decoder, tmp_path, kinds, pooling, **settings), **{"input": "w1", **body})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_folder_without_settings_refuses_long_texts(decoder: Path, request_embeddings: Request) -> None:
    embedder = make_served_embedder(
        str(decoder), load_inference_model(decoder), Tokenizer(decoder), PerRowAdapterSelection([])
    )
    assert not embedder.declared
    np.testing.assert_allclose(np.linalg.norm(embedder([[1, 2, 3]]), axis=1), 1, atol=1e-6)
    answer = request_embeddings(decoder, input=f"{LONG} {LONG}")
    assert "maximum context length is 64" in answer.json()["error"]["message"]


def nest(decoder: Path, folder: Path, path: str = "0_Transformer", **settings: Any) -> Path:
    """Declare a folder whose transformer lies in a folder of its own."""
    declare(decoder, folder, PLAIN, {"pooling_mode_mean_tokens": True}, **settings)
    inner = folder / "0_Transformer"
    inner.mkdir()
    for file in folder.iterdir():
        if file.is_file() and "sentence_transformers" not in file.name and file.name != "modules.json":
            file.rename(inner / file.name)
    listing = json.loads((folder / "modules.json").read_text())
    listing[0]["path"] = path
    (folder / "modules.json").write_text(json.dumps(listing))
    return folder


QUERIES = {"prompts": {"query": "w20 w21 ", "passage": "w22 "}}


@pytest.mark.parametrize("name", [None, "query", "passage"])
@pytest.mark.parametrize("settings", [QUERIES, {**QUERIES, "default_prompt_name": "query"}])
@pytest.mark.parametrize("nested", [True, False])
def test_a_named_prompt_is_put_in_front(
    decoder: Path, request_embeddings: Request, tmp_path: Path, nested: bool, settings: dict[str, Any], name: str | None
) -> None:
    flat = declare(decoder, tmp_path, PLAIN, {"pooling_mode_mean_tokens": True}, **settings) if not nested else None
    folder = flat or nest(decoder, tmp_path, **settings)
    answer = request_embeddings(folder, input=TEXTS, prompt_name=name).json()
    found = np.array([one["embedding"] for one in answer["data"]])
    command = load_text_embedder(str(folder), dtype=torch.float32, device="cpu")
    np.testing.assert_allclose(
        found, command.embed_texts(TEXTS, prompt=command.settings.select_prompt(name)), atol=1e-5
    )


@pytest.mark.parametrize("name", ["document", "", "Query", "query "])
@pytest.mark.parametrize("settings", [QUERIES, {}])
def test_a_prompt_that_is_not_there_is_refused_by_name(
    decoder: Path, request_embeddings: Request, tmp_path: Path, settings: dict[str, Any], name: str
) -> None:
    answer = request_embeddings(nest(decoder, tmp_path, **settings), input="w1", prompt_name=name)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_name"
    assert repr(name) in answer.json()["error"]["message"]
    assert ("'query', 'passage'" if settings else "none") in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "missing", "."])
def test_a_transformer_elsewhere_is_refused(decoder: Path, tmp_path: Path, path: str) -> None:
    with pytest.raises(CheckpointError, match=r"modules\.json: path"):
        load_inference_model(nest(decoder, tmp_path, path))
