"""Ranks that share a model for evaluation or serving, and `mega eval --tasks`: downstream tasks on such ranks."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mega_common.errors import ConfigError, DataError, MissingPackageError

if TYPE_CHECKING:
    from mega_data.chat.chat_template import ChatTemplate
    from mega_eval.harness_tasks import HarnessTaskOptions
    from mega_eval.multi_rank_inference import ModelReplicas, ReplicaLayout
    from mega_trainer.distributed.process_groups import RankInfo


@contextmanager
def join_replica_process_group(
    sharing: ReplicaLayout, nproc: int | None, device: str, wait_seconds: float
) -> Iterator[RankInfo]:
    """Join the process group of a model's ranks and yield this process's rank, or start the ranks and exit.
    The ranks are started if this process is not one of them and several are needed: each runs this command, and the
    process exits with their status. They share copies of the model as `sharing` says.

    The other ranks wait up to `wait_seconds` for rank 0.

    Raises:
        ConfigError: if their number does not divide into whole copies of the model.
    """
    from mega_common.progress_logging import configure_logging
    from mega_trainer.distributed.process_groups import RankInfo
    from mega_trainer.launch.local_ranks import join_process_group, rank_from_environment

    ranks = rank_from_environment(os.environ)
    count = ranks.world_size if ranks else nproc or sharing.ranks_per_copy
    if count % sharing.ranks_per_copy or sharing.ranks_per_stage % min(sharing.tp, sharing.ep):
        raise ConfigError(
            f"{count} ranks do not fit the layout tp {sharing.tp}, ep {sharing.ep}, pp {sharing.pp}",
            hint="pp * max(tp, ep) must divide the number of ranks, and min(tp, ep) must divide max(tp, ep)",
        )
    if ranks is None and count > 1:
        raise typer.Exit(_start_ranks(count))
    ranks = ranks or RankInfo()
    if ranks.world_size > 1:
        configure_logging(rank=ranks.rank, world_size=ranks.world_size)
    with join_process_group(ranks, device, wait_seconds):
        yield ranks


def _start_ranks(count: int) -> int:
    """Start this command on several ranks; their logs are kept if one fails."""
    from mega_trainer.launch.local_ranks import run_local_ranks

    folder = Path(tempfile.mkdtemp(prefix="mega-eval-"))
    status = run_local_ranks([sys.executable, "-m", "mega_cli.main", *sys.argv[1:]], count, folder)
    if status == 0:
        shutil.rmtree(folder)
    return status


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}  # environment variables of the hub libraries
WAIT_SECONDS = 24 * 3600.0  # timeout of ranks that wait for rank 0, which may download data


@dataclass(frozen=True)
class TaskEvalOptions:
    """Options of `mega eval --tasks` on the model, how it runs, and the result files."""

    model: str
    tokenizer: Path | None
    precision: str
    device: str
    batch_size: int
    seq_length: int | None
    output: Path | None
    csv_file: Path | None = None
    picture: Path | None = None
    extensions: Sequence[str] = ()


def import_lm_eval(*, offline: bool) -> None:
    """Import lm-evaluation-harness; with `offline`, first set variables that forbid its libraries the network.

    Raises:
        MissingPackageError: if it is not installed.
    """
    if offline:
        os.environ.update(OFFLINE)
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "--tasks requires lm-evaluation-harness, which is not installed",
            hint="in the root of the repository: pip install 'packages/eval[tasks]'",
        ) from None


def evaluate_tasks(
    names: list[str],
    model_settings: TaskEvalOptions,
    options: HarnessTaskOptions,
    sharing: ReplicaLayout,
    nproc: int | None,
) -> None:
    """Run lm-evaluation-harness tasks on a model, print the scores and write the result files.
    They run in this process if it is a rank or the only one, else on `nproc` ranks started here.
    """

    with join_replica_process_group(sharing, nproc, model_settings.device, WAIT_SECONDS) as ranks:
        if ranks.rank == 0:
            _lead(names, model_settings, options, sharing, ranks.world_size)
        else:
            _load(model_settings, sharing, ranks.rank, ranks.world_size).repeat_rank_zero_calls()


def _lead(
    names: list[str],
    model_settings: TaskEvalOptions,
    options: HarnessTaskOptions,
    sharing: ReplicaLayout,
    world_size: int,
) -> None:
    from mega_eval.harness_tasks import (
        HarnessModel,
        format_results_table,
        load_harness_task_manager,
        run_harness_tasks,
        write_task_results,
    )
    from mega_eval.model_loading import find_end_tokens
    from mega_eval.result_reports import plot_task_results, write_results_csv
    from mega_trainer.config.extensions import load_extensions

    manager = load_harness_task_manager(names, options.include_path)  # reports unknown names before the model is loaded
    replicas = _load(model_settings, sharing, 0, world_size)
    tokenizer = replicas.prompts.tokenizer
    length = model_settings.seq_length or replicas.model.config.max_position
    template = _template(model_settings) if options.apply_chat_template else None
    samplers = load_extensions(model_settings.extensions).entries("samplers")
    ends = find_end_tokens(model_settings.model, tokenizer, model_settings.extensions)
    model = HarnessModel(replicas, ends, template, length, samplers)
    run_info = {
        "model_args": {"model": model_settings.model, "precision": model_settings.precision, "max_length": length}
    }
    results = run_harness_tasks(model, names, options, run_info, manager)
    replicas.stop_followers()
    if model_settings.output is not None:
        write_task_results(model_settings.output, results)
    if model_settings.csv_file is not None:
        write_results_csv(model_settings.csv_file, results)
    if model_settings.picture is not None:
        plot_task_results(model_settings.picture, results, model_settings.model)
    print(format_results_table(results))


def _template(model_settings: TaskEvalOptions) -> ChatTemplate:
    from mega_eval.chat_session import load_chat_template

    try:
        return load_chat_template(model_settings.model, model_settings.tokenizer, extensions=model_settings.extensions)
    except DataError as error:
        hint = "put chat_template.jinja into the tokenizer's folder, or leave out --apply-chat-template"
        raise DataError(error.message, hint=hint) from None


def _load(model_settings: TaskEvalOptions, sharing: ReplicaLayout, rank: int, world_size: int) -> ModelReplicas:
    from mega_ckpt.source import read_model_config
    from mega_data.tokenizer import Tokenizer
    from mega_eval.model_loading import PRECISIONS, load_inference_model, load_tokenizer, select_device
    from mega_eval.multi_rank_inference import ModelReplicas, PromptTokenizer, build_replica_groups
    from mega_trainer.config.extensions import load_extensions

    tokenizer = (
        Tokenizer(model_settings.tokenizer)
        if model_settings.tokenizer
        else load_tokenizer(model_settings.model, extensions=model_settings.extensions)
    )
    families = load_extensions(model_settings.extensions).families
    config = read_model_config(model_settings.model, families=families)
    groups = build_replica_groups(config, rank, world_size, sharing)
    dtype, device = PRECISIONS[model_settings.precision], select_device(model_settings.device)
    model = load_inference_model(
        model_settings.model,
        dtype=dtype,
        device=device,
        groups=groups,
        kinds=("decoder", "encoder-decoder"),
        extensions=model_settings.extensions,
    )
    return ModelReplicas(model, PromptTokenizer(tokenizer), model_settings.batch_size, rank, world_size, sharing)
