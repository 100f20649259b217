from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from commands import typed
from tiny_adapters import save_adapter
from tiny_models import save_tiny, variant
from typer.testing import Result

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.families import find_family_by_name
from mega_cli.eval import EXAMPLES as EVAL_EXAMPLES
from mega_cli.eval import eval_command
from mega_cli.generate import EXAMPLES as GENERATE_EXAMPLES
from mega_cli.generate import generate_command
from mega_common.errors import ConfigError, DataError, MegaError
from mega_common.lora_config import LoraConfig
from mega_data.token_files.dataset_info import TokenizerInfo, write_dataset_info
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import train_tokenizer

TEXTS = ["the end of the story", "is the beginning of another one"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its tokenizer, and held-out data `held-out` that was made with it."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(TEXTS, 270, folder)
    save_tiny(
        folder, find_family_by_name("llama"), variant("grouped").model_copy(update={"vocab_size": tokenizer.vocab_size})
    )
    with IndexedWriter(folder / "held-out", np.uint16) as writer:
        for text in TEXTS:
            writer.add_document(np.array(tokenizer.encode(text)))
    write_dataset_info(
        folder / "held-out", tokenizer=TokenizerInfo.from_tokenizer(tokenizer), append_eod=False, dtype="uint16", documents=2,
        tokens=1, text_bytes=sum(map(len, TEXTS)), bin_sha256="",
    )  # fmt: skip
    return folder


def mega(*args: object, stdin: str = "", fails: type[MegaError] | None = None) -> Result:
    app = typer.Typer()
    app.command("eval", epilog=EVAL_EXAMPLES)(eval_command)
    app.command("generate", epilog=GENERATE_EXAMPLES)(generate_command)
    return typed(app, *args, stdin=stdin, fails=fails)


def test_importing_the_commands_imports_no_torch():
    check = "import sys, mega_cli.eval; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_help_has_examples(command: str):
    assert f"mega {command} out/hf" in mega(command, "--help").stdout


def test_eval_to_file_and_to_standard_output(tmp_path: Path, folder: Path):
    options = ["--data", folder / "held-out", "--seq-length", 16, "--device", "cpu"]
    shown = mega("eval", folder, *options, "--json", tmp_path / "eval.json", "--per-sample", tmp_path / "samples.jsonl")
    result = json.loads((tmp_path / "eval.json").read_text())
    assert result["tokens"] > 0
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"]))
    assert result["bits_per_byte"] > 0
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == result["windows"]
    assert f"{result['loss']:.4f}" in shown.stdout
    assert json.loads(mega("eval", folder, *options, "--json", "-").stdout) == result


def test_eval_takes_the_models_length_and_any_precision(folder: Path):
    out = mega("eval", folder, "--data", folder / "held-out", "--json", "-", "--precision", "bf16").stdout
    assert json.loads(out)["seq_length"] == variant("grouped").max_position


def test_eval_insists_on_the_tokenizer_unless_told(folder: Path, tmp_path: Path):
    train_tokenizer(["something else altogether"], 262, tmp_path)
    args = ["eval", folder, "--data", folder / "held-out", "--tokenizer", tmp_path]
    mega(*args, fails=DataError)
    assert "loss" in mega(*args, "--no-check-tokenizer").stdout


def test_generate_one_prompt(folder: Path):
    args = ["generate", folder, "--max-new-tokens", 8, "--temperature", 0.9, "--top-k", 50, "--seed", 3]
    shown = mega(*args, "--prompt", "the end").stdout
    (line,) = mega(*args, "--prompt", "the end", "--json").stdout.splitlines()
    assert json.loads(line)["text"] + "\n" == shown
    assert mega(*args, stdin="the end\n").stdout == shown


def test_generate_with_an_adapter_is_as_by_the_model_with_it(folder: Path, tmp_path: Path):
    adapter, args = save_adapter(tmp_path / "adapter", folder, LoraConfig(rank=2)), ["--prompt", "the end"]
    args += ["--max-new-tokens", "8", "--temperature", "0"]
    convert_checkpoint(folder, tmp_path / "merged", "hf", options=ConvertOptions(adapter=str(adapter)))
    given = mega("generate", folder, *args, "--adapter", adapter).stdout
    assert given == mega("generate", tmp_path / "merged", *args).stdout
    assert given != mega("generate", folder, *args).stdout


def test_generate_several_prompts(folder: Path, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "is the"}\n{"prompt": "of another"}\n')
    args = ["generate", folder, "--prompt", "the end", "--prompt-file", file, "--max-new-tokens", 5]
    lines = [json.loads(line) for line in mega(*args, "--json").stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["the end", "is the", "of another"]
    assert {"text", "tokens", "finish"} <= lines[0].keys()
    assert "--- is the\n" + lines[1]["text"] in mega(*args).stdout


def test_generate_draws_as_the_folder_says_unless_told(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    wanted = {
        "do_sample": True,
        "temperature": 3.0,
        "top_k": 40,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "eos_token_id": 5,
    }
    (own / "generation_config.json").write_text(json.dumps(wanted))
    args = ["--prompt", "the end", "--max-new-tokens", 12, "--seed", 4]
    options = ["--temperature", 3, "--top-k", 40, "--min-p", 0.01, "--repetition-penalty", 1.2]
    caplog.set_level("INFO", "mega")
    drawn = mega("generate", own, *args).stdout
    assert (
        "from its generation_config.json: repetition_penalty 1.2, temperature 3.0, top_k 40, min_p 0.01" in caplog.text
    )
    assert drawn == mega("generate", folder, *args, *options).stdout
    greedy = mega("generate", own, *args, "--temperature", 0, "--repetition-penalty", 1).stdout
    assert greedy == mega("generate", folder, *args).stdout != drawn


def test_generate_with_guesses_grammar_and_probabilities(folder: Path, tmp_path: Path):
    args = ["generate", folder, "--prompt", "the end of the", "--max-new-tokens", 12, "--json"]
    plain = mega(*args).stdout
    assert plain == mega(*args, "--draft", "ngrams").stdout == mega(*args, "--draft", folder).stdout
    told = json.loads(mega(*args, "--logprobs", 2).stdout)
    assert told["tokens"] == [one["top"][0][0] for one in told["logprobs"]] == json.loads(plain)["tokens"]
    mega(*args[:-1], "--logprobs", 2, fails=ConfigError)
    pytest.importorskip("llguidance", reason="what reads grammars")
    (tmp_path / "rule.lark").write_text('start: "yes" | "no"')
    assert json.loads(mega(*args, "--grammar", tmp_path / "rule.lark").stdout)["text"] in ("yes", "no")
    (tmp_path / "rule.lark").write_text("start: unknown")
    assert "grammar" in str(mega(*args, "--grammar", tmp_path / "rule.lark", fails=DataError).exception)


@pytest.mark.parametrize("content", ["no json\n", '{"text": "x"}\n', "3\n"])
def test_prompts_that_cannot_be_read(folder: Path, tmp_path: Path, content: str):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    error = mega("generate", folder, "--prompt-file", file, fails=DataError).exception
    assert "prompts.jsonl: line 1" in str(error)


def test_generate_with_a_share_that_cannot_be(folder: Path):
    error = mega("generate", folder, "--prompt", "a", "--top-p", 0, fails=ConfigError).exception
    assert "top_p" in str(error) or "top-p" in str(error)
