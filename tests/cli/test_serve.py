from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest
import typer
from chat_templates import chat_tokenizer
from commands import typed
from serving import until
from tiny_adapters import save_adapter
from tiny_models import save_tiny, variant
from typer.testing import Result

from mega_ckpt.families import find_family_by_name
from mega_cli.chat import EXAMPLES as CHAT_EXAMPLES
from mega_cli.chat import chat_command
from mega_cli.serve import EXAMPLES as SERVE_EXAMPLES
from mega_cli.serve import serve_command
from mega_common.errors import ConfigError, DataError, MegaError, MissingPackageError
from mega_common.lora_config import LoraConfig
from mega_data.chat.chat_records import Conversation
from mega_data.chat.chat_template import ChatTemplate
from mega_data.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("model")
    train_tokenizer(["the end of the story"] * 3, 270, base)
    tokenizer = Tokenizer(chat_tokenizer(base, folder, "qwen", marks=False))
    config = variant("grouped").model_copy(update={"vocab_size": tokenizer.vocab_size, "max_position": 256})
    save_tiny(folder, find_family_by_name("llama"), config)
    return folder


def mega(
    *args: object, stdin: str = "", fails: type[MegaError] | None = None, env: dict[str, str] | None = None
) -> Result:
    app = typer.Typer()
    app.command("serve", epilog=SERVE_EXAMPLES)(serve_command)
    app.command("chat", epilog=CHAT_EXAMPLES)(chat_command)
    return typed(app, *args, stdin=stdin, env=env, fails=fails)


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_help_has_examples(command: str) -> None:
    assert f"mega {command} out/hf" in mega(command, "--help").stdout


def test_heavy_serving_is_for_others() -> None:
    assert "vLLM or SGLang" in " ".join(mega("serve", "--help").stdout.split())


def test_importing_the_commands_imports_no_server() -> None:
    check = "import sys, mega_cli.main; sys.exit(bool({'torch', 'fastapi', 'uvicorn', 'starlette'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


def test_others_are_let_in_with_a_key_only(folder: Path, tmp_path: Path) -> None:
    mistake = mega("serve", folder, "--host", "0.0.0.0", fails=ConfigError)
    assert "MEGA_API_KEY" in str(mistake.exception)
    (tmp_path / "key").write_text("short\n")
    assert "key: the API key must be at least 8" in str(
        mega("serve", folder, "--api-key-file", tmp_path / "key", fails=ConfigError).exception
    )
    mega("serve", folder, "--api-key-file", tmp_path / "none", fails=ConfigError)


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        mistake = mega("serve", "no/such/model", "--port", taken.getsockname()[1], fails=ConfigError)
    assert "in use" in str(mistake.exception)
    assert "--port" in str(mistake.exception)


def test_what_is_missing_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "[serve]" in str(mega("serve", folder, fails=MissingPackageError).exception)


def test_a_smaller_model_guesses_for_one_rank(folder: Path) -> None:
    mistake = mega("serve", folder, "--port", 0, "--tp", 2, "--draft", folder, fails=ConfigError)
    assert "is not supported on several ranks" in str(mistake.exception)
    one, other = (mega("chat", folder, *more, stdin="the end\n").stdout for more in ([], ["--draft", folder]))
    assert one == other


def test_adapters_have_names_of_their_own(folder: Path) -> None:
    for given, message in (
        (["polite"], "must have the form NAME=FOLDER, found 'polite'"),
        (["=polite"], "must have the form NAME=FOLDER, found '=polite'"),
        (["one=a", "one=b"], "one=b: the name 'one' is used twice"),
        ([f"{folder}=a"], "is used twice"),
    ):
        options = [part for one in given for part in ("--adapter", one)]
        mistake = mega("serve", folder, "--port", 0, *options, fails=ConfigError)
        assert re.search(message, str(mistake.exception))


def test_serve_from_start_to_end(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mega_cli.main", "serve", str(folder), "--port", str(port), "--name", "tiny"]
    command += ["--draft", str(folder)]
    command += ["--adapter", f"other={save_adapter(tmp_path / 'adapter', folder, LoraConfig(rank=2))}"]
    with (
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "MEGA_API_KEY": "sk-secret"}
        ) as server,
        contextlib.ExitStack() as failed,
    ):
        failed.callback(server.kill)  # else the end of the block waits for it
        url, headers = f"http://127.0.0.1:{port}", {"authorization": "Bearer sk-secret"}

        def healthy() -> bool:
            assert server.poll() is None
            try:
                return httpx.get(f"{url}/health").status_code == 200
            except httpx.ConnectError:
                return False

        until(healthy)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "the end"}], "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] <= 3
        answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "model": "other"}, headers=headers, timeout=60)
        assert answer.json()["model"] == "other"
        server.send_signal(signal.SIGTERM)
        told = server.communicate(timeout=60)[1]
        failed.pop_all()
    assert server.returncode == 0, told
    assert f"serving 'tiny' at {url}" in told
    assert "Traceback" not in told


def test_chat_takes_a_turn_a_line(folder: Path) -> None:
    args = ["chat", folder, "--max-new-tokens", 5, "--seed", 1, "--temperature", 1.5]
    first, second = "the story", "of the end"
    one = mega(*args, stdin=f"{first}\n").stdout
    both = mega(*args, stdin=f"{first}\n\n{second}\n").stdout
    assert both.startswith(one)
    assert len(both) > len(one)
    assert mega(*args, stdin=f"{first}\n/reset\n{first}\n/quit\n{second}").stdout == 2 * one


def test_ctrl_c_ends_a_template_that_does_not_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(template: ChatTemplate, conversation: Conversation) -> str:
        if "endless" not in conversation.messages[-1]["content"]:
            return "the end"
        signal.raise_signal(signal.SIGINT)
        while True:
            pass

    monkeypatch.setattr(ChatTemplate, "render_prompt", endless)
    args = ["chat", folder, "--max-new-tokens", 5, "--temperature", 0]
    found = mega(*args, stdin="endless\nthe story\n")
    assert "the turn is cancelled" in found.stderr
    assert found.stdout == mega(*args, stdin="the story\n").stdout


def test_chat_without_template(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    assert f"{tmp_path}: the tokenizer has no chat template" in str(mega("chat", tmp_path, fails=DataError).exception)
    (tmp_path / "own.jinja").write_text("{{ messages[-1].content }}")
    mega("chat", tmp_path, "--chat-template", tmp_path / "own.jinja", "--max-new-tokens", 1, stdin="the\n")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["vllm", "serve", "{folder}", "--served-model-name", "{folder}", "--host", "127.0.0.1", "--port", "8000", "--dtype", "float32", "--max-num-seqs", "32", "--tensor-parallel-size", "1"]),
        (["--name", "a", "--port", "81", "--tp", "2", "--precision", "bf16", "--max-length", "99", "--adapter", "x=y", "--allow-origin", "https://a.example"],
         ["vllm", "serve", "{folder}", "--served-model-name", "a", "--host", "127.0.0.1", "--port", "81", "--dtype", "bfloat16", "--max-num-seqs", "32", "--tensor-parallel-size", "2", "--max-model-len", "99", "--enable-lora", "--lora-modules", "x=y", "--allowed-origins", '["https://a.example"]']),
    ],
)  # fmt: skip
def test_vllm_serves_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], expected: list[str]
) -> None:
    """A script in place of vLLM writes its command line and key."""
    script = tmp_path / "vllm"
    script.write_text(
        f'#!{sys.executable}\nimport os, sys\nprint(["vllm", *sys.argv[1:]], os.environ["VLLM_API_KEY"])\n'
    )
    script.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MEGA_API_KEY": "sk-secret"}
    command = [sys.executable, "-m", "mega_cli.main", "serve", str(folder), "--engine", "vllm", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[part.format(folder=folder) for part in expected]} sk-secret"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "other"], "--engine must be mega, vllm or sglang, found 'other'"),
        (["--engine", "vllm", "--pp", "2"], "--pp is not supported with --engine vllm"),
        (["--engine", "vllm", "--add-model", "a=b"], "--add-model is not supported with --engine vllm"),
        (["--engine", "vllm", "--precision", "fp64"], "--precision fp64 is not supported with --engine vllm"),
        (["--engine", "sglang", "--allow-origin", "*"], "--allow-origin is not supported with --engine sglang"),
        (["--engine", "sglang"], "requires sglang, which is not installed"),
    ],
)  # fmt: skip
def test_other_servers_that_cannot_be(folder: Path, options: list[str], message: str) -> None:
    kind = MissingPackageError if "not installed" in message else ConfigError
    assert message in str(mega("serve", folder, *options, fails=kind).exception)


def test_other_servers_need_a_huggingface_folder(tmp_path: Path) -> None:
    assert "has no config.json" in str(mega("serve", tmp_path, "--engine", "vllm", fails=ConfigError).exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--add-model", "x"], "--add-model must have the form NAME=FOLDER"),
        (["--add-model", "a=b", "--adapter", "a=c"], "the name 'a' is used twice"),
        (["--add-model", "a=b", "--tp", "2"], "--add-model is not supported on several ranks"),
        (["--adapter-folder", "no/such/folder"], "no such folder"),
    ],
)
def test_models_and_adapters_that_cannot_be(folder: Path, options: list[str], message: str) -> None:
    assert message in str(mega("serve", folder, "--port", 0, *options, fails=ConfigError).exception)


def test_two_models_from_start_to_end(folder: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapters" / "mine", folder, LoraConfig(rank=2))
    command = [sys.executable, "-m", "mega_cli.main", "serve", str(folder), "--port", "0", "--name", "one"]
    command += ["--add-model", f"two={folder}", "--adapter-folder", str(tmp_path / "adapters")]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
        contextlib.ExitStack() as failed,
    ):
        failed.callback(server.kill)
        assert server.stderr is not None
        line = next(line for line in server.stderr if "serving 'one', 'two' at" in line)
        url = re.search(r"http://\S+", line)[0]  # type: ignore[index]
        loaded = httpx.post(
            f"{url}/v1/load_lora_adapter",
            json={"lora_name": "m", "lora_path": "mine", "base_model_name": "two"},
            timeout=60,
        )
        assert loaded.status_code == 200, loaded.text
        assert [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]] == ["one", "two", "m"]
        for name in ("one", "two", "m"):
            body = {"model": name, "prompt": "the", "max_tokens": 2}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["model"] == name
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
        failed.pop_all()
    assert server.returncode == 0
