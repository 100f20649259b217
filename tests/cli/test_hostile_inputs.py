"""Hostile or broken files are refused by the command that reads them: exit status 2 and one sentence that names the file."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet
from tiny_models import save_tiny, variant

from mega_ckpt.families import find_family_by_name
from mega_cli.main import main
from mega_data.token_files.dataset_info import TokenizerInfo, write_dataset_info
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import train_tokenizer

TEXTS = ["the end of the story", "is the beginning of another one"]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
CHAT = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
Spoil = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a HuggingFace model `model`, the data set `held-out`, and inputs of `data preprocess`."""
    folder = tmp_path_factory.mktemp("sound")
    model = folder / "model"
    tokenizer = train_tokenizer(TEXTS, 270, model)
    save_tiny(
        model, find_family_by_name("llama"), variant("grouped").model_copy(update={"vocab_size": tokenizer.vocab_size})
    )
    with IndexedWriter(folder / "held-out", np.uint16) as writer:
        for text in TEXTS:
            writer.add_document(np.array(tokenizer.encode(text)))
    write_dataset_info(
        folder / "held-out",
        tokenizer=TokenizerInfo.from_tokenizer(tokenizer),
        append_eod=False,
        dtype="uint16",
        documents=2,
        tokens=1,
        text_bytes=sum(map(len, TEXTS)),
        bin_sha256="",
    )
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "chat.jsonl").write_bytes(CHAT)
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "prompts.jsonl").write_text('{"prompt": "the end"}\n')
    (folder / "grammar.json").write_text('{"type": "object"}')
    (folder / "settings.yaml").write_text("{}\n")
    return folder


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A command that waits for ever fails its test."""

    def fail(_number: int, _frame: FrameType | None) -> None:
        pytest.fail("the command does not end")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def bytes_of(content: bytes) -> Spoil:
    return lambda path: void(path.write_bytes(content))


def void(_: object) -> None:
    """Turn any value into None."""


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("nowhere")


def device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def lying_header(path: Path) -> None:
    """A safetensors file whose header claims a tensor of exabytes."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def lying_length(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])


def doubled_tensor(path: Path) -> None:
    one = '"a": {"dtype": "F32", "shape": [1], "data_offsets": [%d, %d]}'
    header = ("{" + one % (0, 4) + ", " + one % (4, 8) + "}").encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


def index_counts(sequences: int, documents: int) -> Spoil:
    def spoil(path: Path) -> None:
        raw = path.read_bytes()
        path.write_bytes(raw[:18] + struct.pack("<QQ", sequences, documents) + raw[34:])

    return spoil


def index_list(path: Path) -> None:
    """An index that is a list, of weights in several files."""
    path.with_name("model.safetensors").unlink()
    path.write_bytes(b"[]")


def zipped(content: bytes = b'{"text": "a"}\n', name: str = "a.jsonl") -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(name, content)
    return packed.getvalue()


def arrow_file(path: Path) -> None:
    feather.write_feather(pa.table({"text": TEXTS}), str(path), compression="uncompressed")


def npz_file(path: Path) -> None:
    with open(path, "wb") as stream:
        np.savez(stream, text=np.arange(4))


def cut_parquet(path: Path) -> None:
    parquet.write_table(pa.table({"text": TEXTS}), path)
    cut(path)


def lying_parquet(path: Path) -> None:
    parquet.write_table(pa.table({"text": TEXTS}), path)
    raw = path.read_bytes()
    path.write_bytes(raw[:-8] + struct.pack("<I", 1 << 30) + b"PAR1")


def gguf(tensors: int, keys: int, rest: bytes = b"") -> Spoil:
    return bytes_of(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest)


def config_with(**changes: object) -> Spoil:
    def spoil(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


LINE = b'{"text": "the end of the story"}\n'
DEEP = b'{"text": ' + b"[" * 200_000
HUGE = b'{"text": "a", "n": ' + b"9" * 5000 + b"}\n"
PREPROCESS = ["data", "preprocess", "--output", "{out}", "--tokenizer"]
TEXT = [*PREPROCESS, "{sound}/model", "--input", "{file}"]
CHATS = [
    *PREPROCESS,
    "{sound}/model",
    "--kind",
    "conversations",
    "--chat-template",
    "{sound}/template.jinja",
    "--input",
    "{file}",
]
TEMPLATES = [
    *PREPROCESS,
    "{sound}/model",
    "--kind",
    "conversations",
    "--chat-template",
    "{file}",
    "--input",
    "{sound}/chat.jsonl",
]
TOKENIZER = [*PREPROCESS, "{file}", "--input", "{sound}/text.jsonl"]
CONVERT = ["ckpt", "convert", "{sound}/model", "{out}", "--to", "mega"]
CONVERT_FILE = ["ckpt", "convert", "{file}", "{out}", "--to", "hf"]
SETTINGS = [*CONVERT, "--config", "{file}"]
TOKENS = [*CONVERT, "--add-tokens", "{file}"]
EVAL = ["eval", "{sound}/model", "--data", "{sound}/held-out", "--device", "cpu", "--seq-length", "16"]
GENERATE = ["generate", "{sound}/model", "--device", "cpu", "--max-new-tokens", "2"]
PROMPTS = [*GENERATE, "--prompt-file", "{file}"]
GRAMMAR = [*GENERATE, "--prompt", "the", "--grammar", "{file}"]

# what it is: (arguments, the file in the sound folder that is spoilt, how)
CASES: dict[str, tuple[list[str], str, Spoil]] = {
    "text: NUL bytes": (TEXT, "text.jsonl", bytes_of(b"\0" * 64)),
    "text: truncated JSON": (TEXT, "text.jsonl", bytes_of(LINE[:20])),
    "text: folder without files": (TEXT, "text.jsonl", folder),
    "text: dangling link": (TEXT, "text.jsonl", dangling),
    "text: link to itself": (TEXT, "text.jsonl", loop),
    "text: device": (TEXT, "text.jsonl", device),
    "text: Latin-1": (TEXT, "text.jsonl", bytes_of('{"text": "café"}\n'.encode("latin-1"))),
    "text: UTF-16": (TEXT, "text.jsonl", bytes_of('{"text": "a"}\n'.encode("utf-16"))),
    "text: deep nesting": (TEXT, "text.jsonl", bytes_of(DEEP)),
    "text: huge integer": (TEXT, "text.jsonl", bytes_of(HUGE)),
    "text: not a mapping": (TEXT, "text.jsonl", bytes_of(b"7\n")),
    "text: list": (TEXT, "text.jsonl", bytes_of(b"[1, 2]\n")),
    "text: another key": (TEXT, "text.jsonl", bytes_of(b'{"txt": "a"}\n')),
    "text: key twice": (TEXT, "text.jsonl", bytes_of(b'{"text": "a", "text": "b"}\n')),
    "text: lone surrogate": (TEXT, "text.jsonl", bytes_of(b'{"text": "\\ud800"}\n')),
    "text: truncated gzip": (TEXT, "text.jsonl", bytes_of(gzip.compress(LINE * 1000)[:-12])),
    "text: gzip of a wrong size": (TEXT, "text.jsonl", bytes_of(gzip.compress(LINE)[:-4] + b"\xff" * 4)),
    "text: gzip with rubbish behind it": (TEXT, "text.jsonl", bytes_of(gzip.compress(LINE) + b"rubbish")),
    "text: gzip header alone": (TEXT, "text.jsonl", bytes_of(b"\x1f\x8b\x08")),
    "text: truncated bzip2": (TEXT, "text.jsonl", bytes_of(bz2.compress(LINE * 1000)[:-12])),
    "text: truncated xz": (TEXT, "text.jsonl", bytes_of(lzma.compress(LINE * 1000)[:-12])),
    "text: damaged zstd": (TEXT, "text.jsonl", bytes_of(b"\x28\xb5\x2f\xfd" + b"\xff" * 40)),
    "text: zip": (TEXT, "text.jsonl", bytes_of(zipped())),
    "text: zip without a name": (TEXT, "corpus", bytes_of(zipped())),
    "text: tar": (TEXT, "corpus.tar", bytes_of(b"a.txt" + b"\0" * 2043)),
    "text: PDF": (TEXT, "corpus.pdf", bytes_of(b"%PDF-1.7\n\xe2\xe3\xcf\xd3\n")),
    "text: JSON nested": (TEXT, "corpus.json", bytes_of(b"[" + DEEP)),
    "text: JSON truncated": (TEXT, "corpus.json", bytes_of(b'[{"text": "a"}, {"text": ')),
    "text: CSV without the column": (TEXT, "corpus.csv", bytes_of(b"a,b\n1,2\n")),
    "text: CSV of UTF-16": (TEXT, "corpus.csv", bytes_of("text\na\n".encode("utf-16"))),
    "text: CSV with a short row": (TEXT, "corpus.csv", bytes_of(b"a,text\n1\n")),
    "text: Parquet cut": (TEXT, "corpus.parquet", cut_parquet),
    "text: Parquet lying": (TEXT, "corpus.parquet", lying_parquet),
    "text: Parquet empty": (TEXT, "corpus.parquet", bytes_of(b"")),
    "text: Parquet folder": (TEXT, "corpus.parquet", folder),
    "text: Arrow": (TEXT, "corpus.arrow", arrow_file),
    "text: npz": (TEXT, "corpus.npz", npz_file),
    "text: pickle": (TEXT, "corpus.pkl", bytes_of(b"\x80\x04\x95\x02\x00")),
    "chat: truncated": (CHATS, "chat.jsonl", bytes_of(CHAT[:30])),
    "chat: text": (CHATS, "chat.jsonl", bytes_of(b'{"messages": "hello"}\n')),
    "chat: list of lists": (CHATS, "chat.jsonl", bytes_of(b'{"messages": [[1]]}\n')),
    "chat: null": (CHATS, "chat.jsonl", bytes_of(b'{"messages": null}\n')),
    "template: folder": (TEMPLATES, "template.jinja", folder),
    "template: dangling": (TEMPLATES, "template.jinja", dangling),
    "template: FIFO": (TEMPLATES, "template.jinja", fifo),
    "template: binary": (TEMPLATES, "template.jinja", bytes_of(b"\xff\xfe\0\1")),
    "template: syntax": (TEMPLATES, "template.jinja", bytes_of(b"{% for message in %}")),
    "template: nested": (TEMPLATES, "template.jinja", bytes_of(b"{{" + b"(" * 5000 + b"1" + b")" * 5000 + b"}}")),
    "template: empty": (TEMPLATES, "template.jinja", bytes_of(b"")),
    "tokenizer: empty": (TOKENIZER, "model/tokenizer.json", bytes_of(b"")),
    "tokenizer: cut": (TOKENIZER, "model/tokenizer.json", cut),
    "tokenizer: list": (TOKENIZER, "model/tokenizer.json", bytes_of(b"[]")),
    "tokenizer: config of another kind": (TOKENIZER, "model/tokenizer.json", bytes_of(b'{"model_type": "llama"}')),
    "tokenizer: vocab.json": (TOKENIZER, "model/tokenizer.json", bytes_of(b'{"a": 0, "b": 1}')),
    "tokenizer: folder": (TOKENIZER, "model/tokenizer.json", folder),
    "tokenizer: FIFO": (TOKENIZER, "model/tokenizer.json", fifo),
    "tokenizer: dangling": (TOKENIZER, "model/tokenizer.json", dangling),
    "tokenizer: deep": (TOKENIZER, "model/tokenizer.json", bytes_of(b"[" * 200_000)),
    "tokenizer: binary": (TOKENIZER, "model/tokenizer.json", bytes_of(b"\x0a\x0e\x0a\x05<unk>\x15\0\0\0\0\x18\2")),
    "convert: config empty": (CONVERT, "model/config.json", bytes_of(b"")),
    "convert: config list": (CONVERT, "model/config.json", bytes_of(b"[]")),
    "convert: config deep": (CONVERT, "model/config.json", bytes_of(b"[" * 200_000)),
    "convert: config folder": (CONVERT, "model/config.json", folder),
    "convert: config FIFO": (CONVERT, "model/config.json", fifo),
    "convert: config dangling": (CONVERT, "model/config.json", dangling),
    "convert: config UTF-16": (CONVERT, "model/config.json", bytes_of('{"model_type": "llama"}'.encode("utf-16"))),
    "convert: config key twice": (
        CONVERT,
        "model/config.json",
        lambda path: void(path.write_text('{"hidden_size": 8, ' + path.read_text()[1:])),
    ),
    "convert: config of text": (CONVERT, "model/config.json", config_with(hidden_size="many")),
    "convert: config of negative sizes": (CONVERT, "model/config.json", config_with(num_hidden_layers=-2)),
    "convert: config of huge sizes": (CONVERT, "model/config.json", config_with(num_hidden_layers=10**15)),
    "convert: config of huge width": (CONVERT, "model/config.json", config_with(intermediate_size=10**30)),
    "convert: config of another type": (CONVERT, "model/config.json", config_with(model_type=["llama"])),
    "convert: config rope": (
        CONVERT,
        "model/config.json",
        config_with(rope_parameters="linear", rope_scaling="linear"),
    ),
    "convert: weights empty": (CONVERT, "model/model.safetensors", bytes_of(b"")),
    "convert: weights cut": (CONVERT, "model/model.safetensors", cut),
    "convert: weights folder": (CONVERT, "model/model.safetensors", folder),
    "convert: weights FIFO": (CONVERT, "model/model.safetensors", fifo),
    "convert: weights dangling": (CONVERT, "model/model.safetensors", dangling),
    "convert: weights of exabytes": (CONVERT, "model/model.safetensors", lying_header),
    "convert: header of exabytes": (CONVERT, "model/model.safetensors", lying_length),
    "convert: tensor twice": (CONVERT, "model/model.safetensors", doubled_tensor),
    "convert: git-lfs pointer": (
        CONVERT,
        "model/model.safetensors",
        bytes_of(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    ),
    "convert: HTML page": (CONVERT, "model/model.safetensors", bytes_of(b"<!doctype html><html></html>")),
    "convert: index list": (CONVERT, "model/model.safetensors.index.json", index_list),
    "convert: GGUF empty": (CONVERT_FILE, "a.gguf", bytes_of(b"")),
    "convert: GGUF of billions of tensors": (CONVERT_FILE, "a.gguf", gguf(1 << 40, 0)),
    "convert: GGUF of billions of keys": (CONVERT_FILE, "a.gguf", gguf(0, 1 << 40)),
    "convert: GGUF key of exabytes": (CONVERT_FILE, "a.gguf", gguf(0, 1, struct.pack("<Q", 1 << 62) + b"a")),
    "convert: GGUF array of exabytes": (
        CONVERT_FILE,
        "a.gguf",
        gguf(0, 1, struct.pack("<Q1sIIQ", 1, b"a", 9, 0, 1 << 50)),
    ),
    "convert: GGUF array in arrays": (
        CONVERT_FILE,
        "a.gguf",
        gguf(0, 1, struct.pack("<Q1sI", 1, b"a", 9) + struct.pack("<IQ", 9, 1) * 5000),
    ),
    "convert: GGUF folder": (CONVERT_FILE, "a.gguf", folder),
    "convert: text file": (CONVERT_FILE, "a.txt", bytes_of(b"hello")),
    "convert: settings folder": (SETTINGS, "settings.yaml", folder),
    "convert: settings list": (SETTINGS, "settings.yaml", bytes_of(b"- 1\n")),
    "convert: settings binary": (SETTINGS, "settings.yaml", bytes_of(b"\0\xff")),
    "convert: settings key twice": (SETTINGS, "settings.yaml", bytes_of(b"a: 1\na: 2\n")),
    "convert: tokens binary": (TOKENS, "tokens.txt", bytes_of(b"\xff\xfe")),
    "convert: tokens empty": (TOKENS, "tokens.txt", bytes_of(b"")),
    "eval: index empty": (EVAL, "held-out.idx", bytes_of(b"")),
    "eval: index of exabytes": (EVAL, "held-out.idx", index_counts(1 << 60, 3)),
    "eval: index of documents": (EVAL, "held-out.idx", index_counts(2, 1 << 62)),
    "eval: index of nothing": (EVAL, "held-out.idx", index_counts(0, 0)),
    "eval: index folder": (EVAL, "held-out.idx", folder),
    "eval: index FIFO": (EVAL, "held-out.idx", fifo),
    "eval: tokens cut": (EVAL, "held-out.bin", cut),
    "eval: tokens empty": (EVAL, "held-out.bin", bytes_of(b"")),
    "eval: tokens of another vocabulary": (
        EVAL,
        "held-out.bin",
        lambda path: void(path.write_bytes(b"\xff" * path.stat().st_size)),
    ),
    "eval: tokens dangling": (EVAL, "held-out.bin", dangling),
    "eval: info list": (EVAL, "held-out.info", bytes_of(b"[]")),
    "eval: info cut": (EVAL, "held-out.info", cut),
    "eval: info folder": (EVAL, "held-out.info", folder),
    "eval: tokenizer cut": (EVAL, "model/tokenizer.json", cut),
    "eval: tokenizer config": (EVAL, "model/config.json", config_with(vocab_size="x")),
    "generate: prompts empty": (PROMPTS, "prompts.jsonl", bytes_of(b"")),
    "generate: prompts folder": (PROMPTS, "prompts.jsonl", folder),
    "generate: prompts FIFO": (PROMPTS, "prompts.jsonl", fifo),
    "generate: prompts dangling": (PROMPTS, "prompts.jsonl", dangling),
    "generate: prompts deep": (PROMPTS, "prompts.jsonl", bytes_of(DEEP)),
    "generate: prompts huge integer": (PROMPTS, "prompts.jsonl", bytes_of(HUGE.replace(b"text", b"prompt"))),
    "generate: prompts UTF-16": (PROMPTS, "prompts.jsonl", bytes_of('{"prompt": "a"}'.encode("utf-16"))),
    "generate: prompts list": (PROMPTS, "prompts.jsonl", bytes_of(b"[1]\n")),
    "generate: prompts surrogate": (PROMPTS, "prompts.jsonl", bytes_of(b'{"prompt": "\\ud800"}\n')),
    "generate: grammar folder": (GRAMMAR, "grammar.json", folder),
    "generate: grammar FIFO": (GRAMMAR, "grammar.json", fifo),
    "generate: grammar binary": (GRAMMAR, "grammar.json", bytes_of(b"\xff\xfe")),
    "generate: grammar cut": (GRAMMAR, "grammar.json", bytes_of(b'{"type": ')),
    "generate: tokenizer list": (PROMPTS, "model/tokenizer.json", bytes_of(b"[]")),
    "generate: tokenizer FIFO": (PROMPTS, "model/tokenizer.json", fifo),
    "generate: generation_config list": (PROMPTS, "model/generation_config.json", bytes_of(b"[]")),
    "generate: generation_config cut": (PROMPTS, "model/generation_config.json", bytes_of(b'{"a": ')),
    "generate: generation_config deep": (PROMPTS, "model/generation_config.json", bytes_of(b"[" * 200_000)),
    "generate: generation_config folder": (PROMPTS, "model/generation_config.json", folder),
    "generate: generation_config temperature": (
        PROMPTS,
        "model/generation_config.json",
        bytes_of(b'{"do_sample": true, "temperature": "hot"}'),
    ),
    "generate: generation_config FIFO": (PROMPTS, "model/generation_config.json", fifo),
}


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_file_is_refused_in_a_sentence(
    case: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, name, spoil = CASES[case]
    spoilt = shutil.copytree(sound, tmp_path / "inputs")
    file = spoilt / name
    spoil(file)
    with pytest.raises(SystemExit) as ended:
        main([word.format(file=file, sound=spoilt, out=tmp_path / "out" / "made") for word in words])
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert file.name in said or str(file.with_suffix("")) in said
    for word in ("Traceback", "internal error", "Errno", "Error:", "error: error"):
        assert word not in said
