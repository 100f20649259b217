"""Command lines of vLLM and SGLang that serve a HuggingFace folder with the options of `mega serve`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NoReturn

from mega_common.errors import ConfigError, MissingPackageError
from mega_common.progress_logging import logger

OtherServerName = Literal["vllm", "sglang"]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class ServingOptions:
    """Options of `mega serve` that other servers have too.

    Attributes:
        model: HuggingFace folder.
        name: model name in the API.
        host, port: address.
        key: API key that clients must send, or None.
        precision: fp32, bf16 or fp16.
        max_length: maximum number of tokens of a prompt and its answer; None: the server's default.
        batch_size: maximum number of sequences per batch.
        tp: tensor-parallel ranks.
        adapters: folders of LoRA adapters by name.
        tokenizer, chat_template: files in place of the folder's, or None.
        origins: origins of web pages that may call the server.
    """

    model: str
    name: str
    host: str
    port: int
    key: str | None
    precision: str
    max_length: int | None
    batch_size: int
    tp: int
    adapters: Mapping[str, str]
    tokenizer: Path | None
    chat_template: Path | None
    origins: Sequence[str]

    def list_vllm_arguments(self) -> list[str]:
        """Return the command line of `vllm serve`, without the API key."""
        command = ["vllm", "serve", self.model, "--served-model-name", self.name, "--host", self.host]
        command += ["--port", str(self.port), "--dtype", DTYPES[self.precision], "--max-num-seqs", str(self.batch_size)]
        command += ["--tensor-parallel-size", str(self.tp)]
        command += [] if self.max_length is None else ["--max-model-len", str(self.max_length)]
        command += [] if self.tokenizer is None else ["--tokenizer", str(self.tokenizer)]
        command += [] if self.chat_template is None else ["--chat-template", str(self.chat_template)]
        if self.adapters:
            command += ["--enable-lora", "--lora-modules", *(f"{name}={path}" for name, path in self.adapters.items())]
        return [*command, *(["--allowed-origins", str(list(self.origins)).replace("'", '"')] if self.origins else [])]

    def list_sglang_arguments(self) -> list[str]:
        """Return the command line of SGLang's server.

        Raises:
            ConfigError: for options that it does not have.
        """
        if self.origins:
            raise ConfigError(
                "--allow-origin is not supported with --engine sglang", hint="leave it out, or use --engine vllm"
            )
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.model]
        command += ["--served-model-name", self.name, "--host", self.host, "--port", str(self.port)]
        command += [
            "--dtype",
            DTYPES[self.precision],
            "--max-running-requests",
            str(self.batch_size),
            "--tp-size",
            str(self.tp),
        ]
        command += [] if self.max_length is None else ["--context-length", str(self.max_length)]
        command += [] if self.tokenizer is None else ["--tokenizer-path", str(self.tokenizer)]
        command += [] if self.chat_template is None else ["--chat-template", str(self.chat_template)]
        command += [] if self.key is None else ["--api-key", self.key]
        return [
            *command,
            *(["--lora-paths", *(f"{name}={path}" for name, path in self.adapters.items())] if self.adapters else []),
        ]


def exec_vllm_or_sglang(server: OtherServerName, options: ServingOptions) -> NoReturn:
    """Replace this process by vLLM or SGLang, which serves the model with the same options.

    Raises:
        ConfigError: when the model is not in a HuggingFace folder, or an option is not supported.
        MissingPackageError: when the server is not installed.
    """
    if not (Path(options.model) / "config.json").is_file():
        raise ConfigError(
            f"--engine {server} requires a HuggingFace folder, and {options.model} has no config.json",
            hint=f"convert it: mega ckpt convert {options.model} OUT --to hf",
        )
    if options.precision not in DTYPES:
        raise ConfigError(
            f"--precision {options.precision} is not supported with --engine {server}", hint="use fp32, bf16 or fp16"
        )
    command = options.list_vllm_arguments() if server == "vllm" else options.list_sglang_arguments()
    if (shutil.which("vllm") if server == "vllm" else find_spec("sglang")) is None:
        raise MissingPackageError(
            f"--engine {server} requires {server}, which is not installed", hint=f"pip install {server}"
        )
    if server == "vllm" and options.key is not None:
        os.environ["VLLM_API_KEY"] = options.key  # not on the command line, which other users can read
    logger.info("starting %s", server)
    os.execvp(command[0], command)
