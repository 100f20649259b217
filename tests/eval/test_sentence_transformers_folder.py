"""Folders of sentence-transformers give the vectors that its own library computes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from masked_data import save_word_pieces
from tiny_models import save_tiny, variant

from mega_ckpt.families import find_family_expressing_model
from mega_common.errors import CheckpointError, ConfigError
from mega_eval.sentence_transformers_folder import MODES, read_sentence_transformers_folder
from mega_eval.text_embedding import TextEmbedder, load_text_embedder

TEXTS = ["w1 w2 w3", "w9", "w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14", "w3 w3"]


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_word_pieces(tmp_path_factory.mktemp("bert"), around=True)
    config = variant("bert-without-a-head").model_copy(update={"vocab_size": 207})
    save_tiny(folder, find_family_expressing_model(config), config)
    return folder


def build(transformer: Path, folder: Path, after: Sequence[Any] = (), pooling: Any = "mean", **options: Any) -> Any:
    """Save a folder by sentence-transformers itself, and return its model of it."""
    library = pytest.importorskip("sentence_transformers", reason="the judge of its own folders")
    from sentence_transformers.base.modules.transformer import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    include = options.pop("include_prompt", True)
    first = Transformer(str(transformer), max_seq_length=options.pop("max_seq_length", 20))
    width = first.get_embedding_dimension()
    modules = [first, Pooling(width, pooling, include_prompt=include), *after]
    model = library.SentenceTransformer(modules=modules, device="cpu", **options)
    model.save(str(folder))
    return library.SentenceTransformer(str(folder), device="cpu")


def opened(folder: Path, **options: Any) -> TextEmbedder:
    return load_text_embedder(str(folder), dtype=torch.float32, device="cpu", **options)


def assert_same(reference: Any, folder: Path, prompt_name: str | None = None) -> None:
    embedder = opened(folder)
    found = embedder.embed_texts(TEXTS, prompt=embedder.settings.select_prompt(prompt_name))
    np.testing.assert_allclose(found, reference.encode(TEXTS, prompt_name=prompt_name), atol=5e-6)


@pytest.mark.parametrize("pooling", [*MODES, ("cls", "mean"), ("max", "weightedmean", "lasttoken")])
def test_pooling(transformer: Path, tmp_path: Path, pooling: Any) -> None:
    assert_same(build(transformer, tmp_path, pooling=pooling), tmp_path)


@pytest.mark.parametrize("activation", [None, torch.nn.Tanh(), torch.nn.GELU(), torch.nn.ReLU()])
@pytest.mark.parametrize("residual", [False, True])
def test_modules_behind_the_pooling(transformer: Path, tmp_path: Path, activation: Any, residual: bool) -> None:
    pytest.importorskip("sentence_transformers", reason="the judge of its own folders")
    from sentence_transformers.base.modules.dense import Dense
    from sentence_transformers.base.modules.normalize import Normalize
    from sentence_transformers.sentence_transformer.modules import LayerNorm

    after = [Dense(24, 8, activation_function=activation, use_residual=residual), LayerNorm(8), Normalize()]
    assert_same(build(transformer, tmp_path, after), tmp_path)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls", "weightedmean"])
def test_prompts(transformer: Path, tmp_path: Path, include: bool, pooling: str) -> None:
    prompts = {"query": "w20 w21 ", "passage": "w22 "}
    reference = build(
        transformer, tmp_path, pooling=pooling, include_prompt=include, prompts=prompts, default_prompt_name="passage"
    )
    for name in (None, "query", "document"):
        assert_same(reference, tmp_path, name)
    with pytest.raises(ConfigError, match=r"--prompt-name 'other': .* has no prompt of this name"):
        opened(tmp_path).settings.select_prompt("other")


@pytest.mark.parametrize("after", [[], ["Normalize"], ["Dense", "Normalize"], ["Normalize", "Dense"]], ids=str)
@pytest.mark.parametrize("size", [1, 5, 100])
def test_truncated_vectors(transformer: Path, tmp_path: Path, after: list[str], size: int) -> None:
    pytest.importorskip("sentence_transformers", reason="the judge of its own folders")
    from sentence_transformers.base.modules.dense import Dense
    from sentence_transformers.base.modules.normalize import Normalize

    modules = [Dense(24, 16) if name == "Dense" else Normalize() for name in after]
    build(transformer, tmp_path, modules, truncate_dim=size)
    settings = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({**settings, "truncate_dim": size}))
    import sentence_transformers

    reference = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu", truncate_dim=size)
    assert_same(reference, tmp_path)
    lengths = np.linalg.norm(opened(tmp_path, normalize=True).embed_texts(TEXTS), axis=1)
    np.testing.assert_allclose(lengths, 1, atol=1e-6)


def test_long_texts_keep_the_last_special_token(transformer: Path, tmp_path: Path) -> None:
    assert_same(build(transformer, tmp_path, pooling="lasttoken", max_seq_length=6), tmp_path)


def test_older_folders(transformer: Path, tmp_path: Path) -> None:
    """The transformer in a folder of its own, one switch a pooling mode, the length in sentence_bert_config.json."""
    reference = build(transformer, tmp_path / "new", pooling=("cls", "max"), max_seq_length=7)
    old = tmp_path / "old"
    (old / "1_Pooling").mkdir(parents=True)
    (old / "0_Transformer").symlink_to(transformer)
    (tmp_path / "settings").mkdir()
    modules = [("0_Transformer", "Transformer"), ("1_Pooling", "Pooling")]
    (old / "modules.json").write_text(
        json.dumps(
            [
                {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for at, (path, kind) in enumerate(modules)
            ]
        )
    )
    switches = {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (old / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24, **switches}))
    (old / "0_Transformer").unlink()
    (old / "0_Transformer").mkdir()
    for file in transformer.iterdir():
        if file.is_file():
            (old / "0_Transformer" / file.name).write_bytes(file.read_bytes())
    (old / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 7, "do_lower_case": false}')
    np.testing.assert_allclose(opened(old).embed_texts(TEXTS), reference.encode(TEXTS), atol=5e-6)


def test_options_take_the_place_of_the_folder(transformer: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="the judge of its own folders")
    from sentence_transformers.base.modules.normalize import Normalize

    build(transformer, tmp_path, [Normalize()])
    for normalize, whole in ((None, True), (True, True), (False, False)):
        lengths = np.linalg.norm(opened(tmp_path, normalize=normalize).embed_texts(TEXTS), axis=1)
        assert np.allclose(lengths, 1, atol=1e-6) == whole
    assert opened(tmp_path, modes=["cls"]).settings.modes == ("cls",)


MODULES = '[{"idx": 0, "path": "", "type": "Transformer"}, {"idx": 1, "path": "p", "type": "Pooling"}%s]'


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules.json": "{"}, "modules.json: cannot be read"),
        ({"modules.json": "{}"}, "must hold a JSON list"),
        ({"modules.json": "[1]"}, "must hold a JSON list of objects"),
        ({"modules.json": '[{"type": "a.CLIPModel"}]'}, "must begin with Transformer and Pooling, found CLIPModel"),
        ({"modules.json": MODULES % ', {"path": "w", "type": "WordWeights"}'}, "module WordWeights is not supported"),
        ({"modules.json": MODULES % ', {"path": "../x", "type": "Dense"}'}, "must be inside the folder"),
        ({"modules.json": MODULES % ""}, "config.json is missing"),
        ({"modules.json": MODULES % "", "p/config.json": '{"pooling_mode": "median"}'}, "pooling 'median' is not sup"),
        (
            {"modules.json": MODULES % "", "p/config.json": '{"pooling_mode_x": true}'},
            "pooling 'pooling_mode_x' is not",
        ),
        (
            {"modules.json": MODULES % ', {"path": "d", "type": "Dense"}', "d/config.json": "{}"},
            "safetensors is missing",
        ),
        (
            {
                "modules.json": MODULES % ', {"path": "d", "type": "Dense"}',
                "d/config.json": '{"activation_function": "a.B"}',
            },
            "activation_function B is not supported",
        ),
        (
            {
                "modules.json": MODULES % "",
                "p/config.json": "{}",
                "sentence_bert_config.json": '{"transformer_task": "x"}',
            },
            "transformer_task 'x' is not supported",
        ),
        *(
            (
                {"modules.json": MODULES % "", "p/config.json": "{}", file: json.dumps({key: value})},
                f"{file}: .*must be .*, found",
            )
            for file, key, values in (
                ("config_sentence_transformers.json", "prompts", (True, 3, "abc", ["a"], {"query": 3})),
                ("sentence_bert_config.json", "max_seq_length", ("abc", [1], {"a": 1})),
                ("tokenizer_config.json", "model_max_length", ("abc", [1])),
            )
            for value in values
        ),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read_sentence_transformers_folder(tmp_path)


def test_other_folders_have_no_settings(transformer: Path) -> None:
    assert read_sentence_transformers_folder(transformer) is None
