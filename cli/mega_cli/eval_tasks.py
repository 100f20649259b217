"""`mega eval --tasks`: downstream tasks, on one rank or several."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mega_common.errors import DataError, MissingPackageError

if TYPE_CHECKING:
    from mega_data.chat.template import ChatTemplate
    from mega_eval.replicas import Replicas, Sharing
    from mega_eval.tasks import TaskOptions

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # what the libraries of the hub look at
WAIT_SECONDS = 24 * 3600.0  # that ranks wait for the first, which may fetch data


@dataclass(frozen=True)
class Asked:
    """What the command was given about the model and where results go."""

    model: str
    tokenizer: Path | None
    precision: str
    device: str
    batch_size: int
    seq_length: int | None
    output: Path | None


def import_harness(*, offline: bool) -> None:
    """Import lm-evaluation-harness, which takes from the environment whether it may ask the hub.

    Raises:
        MissingPackageError: where it is not installed.
    """
    if offline:
        os.environ.update(OFFLINE)
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "--tasks needs lm-evaluation-harness, which is not installed",
            hint="in the root of the repository: pip install 'packages/eval[tasks]'",
        ) from None


def evaluate_tasks(names: list[str], asked: Asked, options: TaskOptions, sharing: Sharing, nproc: int | None) -> None:
    """Run tasks, in this process when it is a rank already or needs no others; else start `nproc` ranks."""
    from mega_cli.eval_ranks import ranks_for

    with ranks_for(sharing, nproc, asked.device, WAIT_SECONDS) as ranks:
        if ranks.rank == 0:
            _lead(names, asked, options, sharing, ranks.world_size)
        else:
            _load(asked, sharing, ranks.rank, ranks.world_size).follow()


def _lead(names: list[str], asked: Asked, options: TaskOptions, sharing: Sharing, world_size: int) -> None:
    from mega_eval.harness import HarnessModel
    from mega_eval.load import end_tokens
    from mega_eval.tasks import find_tasks, run_tasks, table, write_results

    manager = find_tasks(names, options.include_path)  # a mistake is told before the model is loaded
    replicas = _load(asked, sharing, 0, world_size)
    words = replicas.prompts.tokenizer
    length = asked.seq_length or replicas.model.config.max_position
    template = _template(asked) if options.apply_chat_template else None
    model = HarnessModel(replicas, end_tokens(asked.model, words), template, length)
    told = {"model_args": {"model": asked.model, "precision": asked.precision, "max_length": length}}
    results = run_tasks(model, names, options, told, manager)
    replicas.close()
    if asked.output is not None:
        write_results(asked.output, results)
    print(table(results))


def _template(asked: Asked) -> ChatTemplate:
    from mega_eval.chat import load_chat_template

    try:
        return load_chat_template(asked.model, asked.tokenizer)
    except DataError as error:
        hint = "put one beside the tokenizer, as chat_template.jinja, or leave out --apply-chat-template"
        raise DataError(error.message, hint=hint) from None


def _load(asked: Asked, sharing: Sharing, rank: int, world_size: int) -> Replicas:
    from mega_ckpt.source import model_at
    from mega_data.tokenizer import Tokenizer
    from mega_eval.load import PRECISIONS, device_named, load_model, load_tokenizer
    from mega_eval.replicas import Prompts, Replicas, connect

    words = Tokenizer(asked.tokenizer) if asked.tokenizer else load_tokenizer(asked.model)
    groups = connect(model_at(asked.model), rank, world_size, sharing)
    dtype, device = PRECISIONS[asked.precision], device_named(asked.device)
    model = load_model(asked.model, dtype=dtype, device=device, groups=groups, kinds=("decoder", "encoder-decoder"))
    return Replicas(model, Prompts(words), asked.batch_size, rank, world_size, sharing)
