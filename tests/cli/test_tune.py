"""The newcomer's path on a tiny model: `mega tune`, then `mega chat`; and the settings it chooses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from chat_templates import CONVERSATIONS, chat_tokenizer
from typer.testing import CliRunner

from mega_cli import tune as tune_module
from mega_cli import tune_recipe as recipe
from mega_cli.main import build_typer_app
from mega_cli.tune_recipe import TuningDataStatistics, TuningRequest, draft_tuning_run_yaml
from mega_cli.tune_report import read_held_out_prompts
from mega_common.errors import ConfigError, DataError, TrainingInterrupted
from mega_data.tokenizer import train_tokenizer
from mega_trainer.config.run_config import load_run_config

pytest.importorskip("transformers", reason="what renders templates")
CHATS = [CONVERSATIONS[name] for name in ("one", "turns", "system")] * 10
QUICK = ("--set", "checkpoint.async=false", "--set", "log.tensorboard=false", "--set", "device=cpu")


def mega(*args: object, text: str | None = None) -> str:
    done = CliRunner().invoke(
        build_typer_app(), [str(arg) for arg in args], catch_exceptions=False, input=text, env={"COLUMNS": "120"}
    )
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a chat template, as a HuggingFace folder."""
    import transformers

    folder = tmp_path_factory.mktemp("base")
    train_tokenizer(["the cat sat on the mat, 2 + 2 is 4\n"], 270, folder / "tok")
    chat_tokenizer(folder / "tok", folder / "model", "qwen", marks=True)
    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with chats.jsonl, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    return tmp_path


def test_two_commands_from_chats_to_an_answer(base: Path, here: Path) -> None:
    """Interrupted, the same command resumes; done, it reports again; a HuggingFace folder and an adapter are written."""
    command = ("tune", base, "chats.jsonl", "--epochs", 1, *QUICK)
    with pytest.raises(TrainingInterrupted):
        mega(*command, "--set", "train.exit_interval=2")
    stopped = [json.loads(line)["step"] for line in Path("tuned/run/metrics.jsonl").read_text().splitlines()]
    assert stopped[-1] == 2
    assert not Path("tuned/model").exists()
    kept = yaml.safe_load(Path("tuned/run.yaml").read_text())
    del kept["train"]["exit_interval"]
    Path("tuned/run.yaml").write_text(yaml.safe_dump(kept))
    request = json.loads(Path("tuned/tune.json").read_text())
    request["set"] = [each for each in request["set"] if "exit_interval" not in each]
    Path("tuned/tune.json").write_text(json.dumps(request))
    shown = mega(*command)
    lines = [json.loads(line) for line in Path("tuned/run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[0]["initial_valid_loss"] > 0
    found = json.loads(Path("tuned/comparison.json").read_text())
    assert found["loss_before"] == lines[0]["initial_valid_loss"]
    assert found["loss_after"] == min(line["valid_loss"] for line in lines if "valid_loss" in line)
    assert [len(row) for row in found["answers"]] == [4] * 3
    assert "held-out loss" in shown
    assert {"model", "adapter", "run", "run.yaml"} <= {path.name for path in Path("tuned").iterdir()}
    assert mega(*command).endswith(shown[shown.index("held-out prompts") :])
    mega("chat", "tuned/model", "--max-new-tokens", 4, "--temperature", 0, text="Hi\n")


def test_a_template_from_a_file_is_part_of_the_tuned_model(base: Path, here: Path) -> None:
    """A base without a chat template is tuned in a few steps, and the exported model answers chats."""
    bare = Path(shutil.copytree(base, here / "bare"))
    config = json.loads((bare / "tokenizer_config.json").read_text())
    template = config.pop("chat_template", None) or (bare / "chat_template.jinja").read_text()
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    Path("chat.jinja").write_text(template)
    Path("few.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS[:10]))
    mega("tune", bare, "few.jsonl", "--full", "--epochs", 1, "--set", "data.raw.chat_template=chat.jinja", *QUICK)
    assert Path("tuned/model/chat_template.jinja").read_text() == template
    mega("chat", "tuned/model", "--max-new-tokens", 4, text="Hi\n")


def test_check_prints_the_file_alone(base: Path, here: Path) -> None:
    shown = mega("tune", base, "chats.jsonl", "--check", "--full", "--set", "optimizer.lr=1e-3", "--output", "out/x")
    assert not Path("out").exists()
    Path("run.yaml").write_text(shown)
    config = load_run_config(Path("run.yaml"))
    assert config.lora is None
    assert config.optimizer.lr == 1e-3
    assert config.data.kind == "conversations"
    assert config.checkpoint.best
    assert config.data.split[:2] == [90, 10]


@pytest.mark.parametrize("records", [15, 16, 25, 44])
def test_prompts_are_of_the_held_out_records_alone(records: int, base: Path, here: Path) -> None:
    """As many as the run's validation has: the boundary is rounded, not cut off."""
    text = "".join(json.dumps({"prompt": f"number {n}", "completion": "yes"}) + "\n" for n in range(records))
    Path("pairs.jsonl").write_text(text)
    Path("run.yaml").write_text(mega("tune", base, "pairs.jsonl", "--check", "--full"))
    prompts = [prompt.question for prompt in read_held_out_prompts(load_run_config(Path("run.yaml")).data)]
    assert prompts == [f"number {n}" for n in range(round(0.9 * records), records)]


FORMS: list[tuple[dict[str, Any], list[str], dict[str, Any]]] = [
    ({"messages": CHATS[0]["messages"]}, [], {"kind": "conversations"}),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, [], {"kind": "conversations"}),
    ({"instruction": "Add", "output": "4"}, [], {"kind": "conversations"}),
    ({"prompt": "Hi", "chosen": "Hello", "rejected": "No"}, [], {"kind": "pairs", "objective": "dpo"}),
    ({"prompt": "Hi", "completion": "Hello", "label": True}, [], {"kind": "pairs", "objective": "kto"}),
    ({"text": "the cat sat on the mat"}, [], {"kind": "text"}),
    ({"q": "Hi", "a": "Hello"}, ["--map", "prompt=q", "--map", "completion=a"], {"kind": "conversations"}),
]  # fmt: skip


@pytest.mark.parametrize(("record", "options", "expected"), FORMS)
def test_the_kind_follows_from_the_records(
    record: dict[str, Any], options: list[str], expected: dict[str, Any], base: Path, here: Path
) -> None:
    Path("data.jsonl").write_text((json.dumps(record) + "\n") * 20)
    run = yaml.safe_load(mega("tune", base, "data.jsonl", "--check", *options))
    assert run["data"]["kind"] == expected["kind"]
    assert (run.get("objective") or {}).get("kind") == expected.get("objective")


def make_data(**facts: Any) -> TuningDataStatistics:
    return TuningDataStatistics(
        **{"kind": "conversations", "rated": False, "documents": 200, "tokens": 12_000, "longest": 150, **facts}
    )


@pytest.mark.parametrize(
    ("facts", "method", "expected"),
    [
        ({}, "lora", {"data.seq_length": 256, "train.epochs": 3, "optimizer.lr": 5.3e-4, "batch.global": 2}),
        ({}, "full", {"optimizer.lr": 5.3e-5, "optimizer.weight_decay": 0.1}),
        ({"longest": 300}, "lora", {"data.seq_length": 320}),
        ({"longest": 10_000}, "lora", {"data.seq_length": 2048}),
        ({"documents": 10**5, "tokens": 10**8}, "lora", {"train.epochs": 1, "batch.global": 64}),
        ({"kind": "pairs"}, "lora", {"objective.kind": "dpo", "optimizer.lr": 5.3e-5}),
        ({"kind": "pairs", "rated": True}, "lora", {"objective.kind": "kto"}),
        ({"kind": "text"}, "lora", {"data.seq_length": 1024}),
        ({"tokens": 500, "documents": 10}, "lora", {"batch.global": 1, "train.eval_every": 2}),
    ],
)
def test_settings_follow_from_the_data(facts: dict[str, Any], method: recipe.Method, expected: dict[str, Any]) -> None:
    request = TuningRequest("base", [{"path": "a.jsonl"}], None, Path("out"))
    model = SimpleNamespace(hidden_size=576, max_position=2048)
    run = draft_tuning_run_yaml(request, make_data(**facts), method, model, "bf16")
    assert {key: run[key.split(".")[0]][key.split(".")[1]] for key in expected} == expected


def test_settings_follow_from_the_memory(base: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller micro-batches, then recomputation, then the base in four bits, unless a method is given."""
    Path("many.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS * 30))
    sizes: list[tuple[str, int, str]] = []

    def too_large(config: Any) -> int:
        lora = "full" if config.lora is None else config.lora.quantize or "lora"
        sizes.append((lora, config.batch.micro, config.recompute.kind))
        return 2 - (len(sizes) == 100)

    monkeypatch.setattr(tune_module, "predict_peak_memory_bytes", too_large)
    monkeypatch.setattr(tune_module, "measure_usable_memory", lambda _: 1)
    assert "quantize: nf4" in mega("tune", base, "many.jsonl", "--check")
    assert sizes[0][0] == "lora"
    assert [each[1] for each in sizes if each[0] == "lora"] == sorted(
        (each[1] for each in sizes if each[0] == "lora"), reverse=True
    )
    assert sizes[-1] == ("nf4", 1, "full")
    sizes.clear()
    assert "quantize" not in mega("tune", base, "many.jsonl", "--check", "--lora")
    assert {each[0] for each in sizes} == {"lora"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--lora", "--full"], ConfigError, "--lora conflicts with --full"),
        (["--map", "body=a"], ConfigError, "--map body=a: 'body' is not a key of records"),
        (["--set", "lora.rnk=4"], ConfigError, r"lora\.rnk: unknown key"),
        (["--set", "data.seq_lenth=4"], ConfigError, r"seq_lenth: unknown key"),
    ],
)
def test_wrong_options_are_named(
    options: list[str], error: type[Exception], message: str, base: Path, here: Path
) -> None:
    with pytest.raises(error, match=message):
        mega("tune", base, "chats.jsonl", "--check", *options)


def test_unusable_inputs_are_named(base: Path, here: Path) -> None:
    Path("labels.jsonl").write_text('{"text": "good", "label": "positive"}\n')
    with pytest.raises(
        DataError, match=r"no objective for records of the form text and label \(classification\)\n.*--map"
    ):
        mega("tune", base, "labels.jsonl", "--check")
    with pytest.raises(ConfigError, match="MODEL = none must be an existing model"):
        mega("tune", "none", "chats.jsonl", "--check")
    with pytest.raises(DataError, match=r"missing\.jsonl: no such file"):
        mega("tune", base, "missing.jsonl", "--check")
    Path("tuned").mkdir()
    Path("tuned/tune.json").write_text(json.dumps({"model": "other"}))
    with pytest.raises(ConfigError, match="--output tuned has a tuning with another model: other"):
        mega("tune", base, "chats.jsonl")
