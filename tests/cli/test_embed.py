"""`mega embed`, and `mega eval` of encoders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from commands import typed
from masked_data import save_word_pieces, sentences
from safetensors.numpy import load_file
from tiny_models import save_tiny, variant
from typer.testing import Result

from mega_ckpt.families import find_family_expressing_model
from mega_cli.embed import EXAMPLES, embed_command
from mega_cli.eval import eval_command
from mega_cli.generate import generate_command
from mega_common.errors import ConfigError, DataError, MegaError


def mega(*args: object, fails: type[MegaError] | None = None) -> Result:
    app = typer.Typer()
    app.command("embed", epilog=EXAMPLES)(embed_command)
    app.command("eval")(eval_command)
    app.command("generate")(generate_command)
    return typed(app, *args, fails=fails)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_word_pieces(tmp_path_factory.mktemp("bert"), around=True)
    config = variant("bert").model_copy(update={"vocab_size": 207})
    save_tiny(folder, find_family_expressing_model(config), config)
    sentences(folder / "held-out", 1, documents=2, most=3)
    lines = [{"id": "a", "passage": "w1 w2 w3"}, {"id": "b", "passage": "w9"}, {"passage": "w1 w2 w3"}]
    (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_vectors_lie_beside_what_names_them(folder: Path, tmp_path: Path) -> None:
    mega("embed", folder, folder / "texts.jsonl", "--text-key", "passage", "--output", tmp_path / "v.npy")
    vectors = np.load(tmp_path / "v.npy")
    assert (vectors.shape, vectors.dtype) == ((3, 24), np.float32)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-6)
    assert [json.loads(line) for line in (tmp_path / "v.ids.jsonl").read_text().splitlines()] == ["a", "b", 3]
    (tmp_path / "table.csv").write_text("id,text\nx,w1 w2\n")
    mega("embed", folder, tmp_path / "table.csv", "--output", tmp_path / "t.npy")
    assert (tmp_path / "t.ids.jsonl").read_text() == '"x"\n'
    (tmp_path / "plain.txt").write_text("w1 w2 w3\nw9\n")
    options = ("--pooling", "cls", "--normalize", "--output", tmp_path / "v.safetensors")
    mega("embed", folder, tmp_path / "plain.txt", *options)
    assert load_file(tmp_path / "v.safetensors")["embeddings"].shape == (2, 24)


def test_mistakes_are_told_with_file_and_line(folder: Path, tmp_path: Path) -> None:
    out = ("--output", tmp_path / "v.npy")
    bad = tmp_path / "bad.jsonl"
    for content, told in (
        ('{"text": "w1"}\n{"words": 1}\n', "bad.jsonl:2: "), ("{", "bad.jsonl:1: "), ("", "has no text"),
        ('{"text": " "}\n', "bad.jsonl:1: the text is empty"),
    ):  # fmt: skip
        bad.write_text(content)
        assert told in str(mega("embed", folder, bad, *out, fails=DataError).exception)
    assert "must end in .npy" in str(mega("embed", folder, bad, "--output", "v.txt", fails=ConfigError).exception)
    assert not (tmp_path / "v.npy").exists()


def test_an_encoder_is_scored_and_continues_nothing(folder: Path) -> None:
    found = json.loads(mega("eval", folder, "--data", folder / "held-out", "--mask-share", 0.5, "--json", "-").stdout)
    assert found["loss"] > 0
    assert found["tokens"] == np.fromfile(folder / "held-out.bin", np.uint16).size
    assert "an encoder, which" in str(mega("generate", folder, "--prompt", "w1", fails=ConfigError).exception)
