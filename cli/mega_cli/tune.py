"""`mega tune`: from a model and a file of records to a tuned, exported model, with one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mega_cli.tune_recipe import (
    TUNED_KINDS,
    Method,
    TuningDataStatistics,
    TuningRequest,
    choose_precision,
    draft_tuning_run_yaml,
    iterate_memory_saving_settings,
    measure_usable_memory,
    predict_peak_memory_bytes,
)
from mega_common.errors import CheckpointError, ConfigError, DataError, MegaError

if TYPE_CHECKING:
    from mega_data.data_config import DataConfig
    from mega_data.preprocessing.token_cache import RawRecord
    from mega_trainer.config.run_config import RunConfig

EXAMPLES = """Examples:

  mega tune models/SmolLM2-135M-Instruct chats.jsonl

  mega tune HuggingFaceTB/SmolLM2-135M-Instruct chats.jsonl --output tuned && mega chat tuned/model

  mega tune models/Qwen3-8B alpaca.parquet --qlora --epochs 2 --set optimizer.lr=1e-4

  mega tune models/Qwen3-8B faq.csv --map prompt=question --map completion=answer --check

  mega tune models/Qwen3-8B hf:HuggingFaceH4/ultrafeedback_binarized@train_prefs --full --nproc 8
"""
HEADER = """\
# Written by `mega tune`. Edit it and run the same command again, or: mega train {path}
# {documents:,} documents of the form {form}, {tokens:,} tokens; {memory} of memory predicted ({method}).
"""


def tune_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="HuggingFace folder, checkpoint, GGUF file, or ORG/NAME of the HuggingFace Hub."
        ),
    ],
    data: Annotated[
        list[str],
        typer.Argument(metavar="DATA...", help="Records: JSON lines, Parquet, CSV, text files, folders or hf:NAME."),
    ],
    lora: Annotated[bool, typer.Option("--lora", help="Train a low-rank adapter (the default).")] = False,
    qlora: Annotated[bool, typer.Option("--qlora", help="Train an adapter on a base in 4 bits.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Train all weights.")] = False,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for run.yaml, run/, model/ and adapter/.")
    ] = Path("tuned"),
    epochs: Annotated[
        float | None, typer.Option(help="Passes over the data, e.g. 2.", show_default="3, fewer for much data")
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="KEY=COLUMN", help="Column that is read as this key, e.g. prompt=question. Repeatable."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a setting of run.yaml, e.g. lora.rank=64. Repeatable."
        ),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start on this machine.", show_default="one per GPU")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Print run.yaml and exit.")] = False,
) -> None:
    """Tune a model on conversations, instructions, preference pairs or texts, and export it.

    Settings follow from the model, the data and the memory of this machine; a tenth of the data is held out. run.yaml is
    printed, then trained; the checkpoint with the lowest held-out loss becomes FOLDER/model (HuggingFace), and its
    adapter FOLDER/adapter (PEFT). At the end you see the held-out loss and answers before and after.

    Re-running the command resumes. An edited FOLDER/run.yaml is used as edited.
    """
    from mega_cli.train import train_or_start_ranks
    from mega_cli.tune_report import report_tuning
    from mega_trainer.config.run_config import load_run_config

    method = _choose_method(lora=lora, qlora=qlora, full=full)
    request: dict[str, Any] = {
        "model": model, "data": data, "method": method, "epochs": epochs, "map": map_ or [], "set": set_ or [],
    }  # fmt: skip
    run = output / "run.yaml"
    resumes = _has_equal_request(output, request)
    if not resumes or check:
        text = prepare_tuning_run_yaml(request, output)
        print(text, end="", flush=True)
        if check:
            return
        _keep_request(output, run, text, request)
    else:
        print(run.read_text(), end="", flush=True)
    config = load_run_config(run)
    if status := train_or_start_ranks(config, run, nproc):
        raise typer.Exit(status)
    _export(config, output)
    report_tuning(config, output)


def _choose_method(*, lora: bool, qlora: bool, full: bool) -> Method | None:
    given: list[Method] = [name for name, wanted in (("lora", lora), ("qlora", qlora), ("full", full)) if wanted]  # type: ignore[misc]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} conflicts with --{given[1]}", hint="give one of --lora, --qlora and --full")
    return given[0] if given else None


def _has_equal_request(output: Path, request: dict[str, Any]) -> bool:
    """Return whether `output` has a tuning by the same command; raises ConfigError if it has another."""
    from mega_common.bounded_parsing import read_json_file

    path = output / "tune.json"
    if not path.exists():
        if (output / "run").exists():
            raise ConfigError(
                f"--output {output} has a run that mega tune did not start", hint="choose another --output"
            )
        return False
    before = read_json_file(path, ConfigError)
    if changed := [key for key in request if before.get(key) != request[key]]:
        key = changed[0]
        raise ConfigError(
            f"--output {output} has a tuning with another {key}: {before.get(key)}, found {request[key]}",
            hint="choose another --output, or remove the folder to start over",
        )
    return True


def _keep_request(output: Path, run: Path, text: str, request: dict[str, Any]) -> None:
    """Write run.yaml, then the command that it belongs to."""
    from mega_common.atomic_files import open_atomic_file, write_json_atomically

    output.mkdir(parents=True, exist_ok=True)
    with open_atomic_file(run, text=True) as stream:
        stream.write(text)
    write_json_atomically(output / "tune.json", request)


def prepare_tuning_run_yaml(request: dict[str, Any], output: Path) -> str:
    """Return the run.yaml of a tuning; the base model is converted and the data tokenized for it, if needed.

    Raises:
        ConfigError, DataError: for a model or data that cannot be tuned, and invalid overrides.
    """
    import yaml

    from mega_ckpt.source import read_model_config
    from mega_data.preprocessing.token_cache import tokenize_raw_source

    base = _prepare_base(request["model"], output)
    inputs = _list_inputs(request)
    first = _read_record(request)
    kind = _choose_kind(request, first)
    raw_data = {"train": inputs, "kind": kind, "tokenizer": base}
    probe = _parse_data(raw_data, request["set"])
    found = TuningDataStatistics.read([tokenize_raw_source(source, probe) for source in probe.train], kind)
    wanted = TuningRequest(base, inputs, request["method"], output, request["epochs"])
    run, config, size, method = _fit_memory(wanted, found, read_model_config(base), request["set"])
    header = HEADER.format(
        path=output / "run.yaml", documents=found.documents, tokens=found.tokens, form=first.form,
        memory=f"{size / 2**30:.1f} GiB", method=f"{method}, {config.precision}",
    )  # fmt: skip
    return header + yaml.safe_dump(run, sort_keys=False, default_flow_style=None, width=110)


def _prepare_base(model: str, output: Path) -> str:
    """Return a HuggingFace folder with tokenizer of the model: itself, or a conversion or download in `output`/base."""
    import torch

    from mega_ckpt.convert import ConvertOptions, convert_checkpoint
    from mega_ckpt.hub import pull_from_hub

    path, base = Path(model), output / "base"
    if (path / "config.json").is_file() and (path / "tokenizer.json").is_file():
        return model
    if base.exists():
        return str(base)
    if not path.exists() and "://" not in model:
        if model.count("/") != 1 or path.suffix == ".gguf" or model.startswith((".", "/")):
            raise ConfigError(
                f"MODEL = {model} must be an existing model", hint="give its folder, or ORG/NAME of the HuggingFace Hub"
            )
        try:
            pull_from_hub(model, base)
        except MegaError as error:
            hint = "give the path of an existing folder, or ORG/NAME of the HuggingFace Hub with a connection to it"
            raise CheckpointError(
                f"MODEL = {model}: no such folder, and not downloaded: {error.message}", hint=hint
            ) from None
    else:
        convert_checkpoint(model, base, "hf", options=ConvertOptions(dtype=torch.bfloat16))
    if not (base / "tokenizer.json").is_file():
        raise ConfigError(f"MODEL = {model} has no tokenizer", hint="add tokenizer.json to its folder")
    return str(base)


def _list_inputs(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of data.train."""
    from mega_cli.data_preprocess import parse_column_mapping

    columns = parse_column_mapping(request["map"])
    return [{"path": name} | ({"map": columns} if columns else {}) for name in request["data"]]


def _read_record(request: dict[str, Any]) -> RawRecord:
    from mega_data.preprocessing.token_cache import read_first_record
    from mega_data.reading.corpus_sources import find_corpus_sources

    return read_first_record(find_corpus_sources(request["data"][:1], ""))


def _choose_kind(request: dict[str, Any], first: RawRecord) -> str:
    """Return the dataset kind of the records, by their form or the columns of --map."""
    roles = {each.partition("=")[0] for each in request["map"]}
    if roles:
        return "pairs" if roles & {"chosen", "rejected", "label"} else "conversations"
    if first.kind not in TUNED_KINDS:
        other = f"; mega train trains them with data.kind: {first.kind}" if first.kind else ""
        raise DataError(
            f"{request['data'][0]}: mega tune has no objective for records of the form {first.form}",
            hint=f"name their columns, such as --map prompt=question --map completion=answer{other}",
        )
    return first.kind


def _parse_data(raw: dict[str, Any], overrides: list[str]) -> DataConfig:
    """Return the data section with the overrides of `data.`."""
    from mega_common.strict_config import apply_config_overrides
    from mega_data.data_config import DataConfig

    whole = apply_config_overrides({"data": raw}, [each for each in overrides if each.startswith("data.")])
    return DataConfig.parse(whole["data"], source="data")


def _fit_memory(
    request: TuningRequest, data: TuningDataStatistics, model: Any, overrides: list[str]
) -> tuple[dict[str, Any], RunConfig, int, Method]:
    """Return the settings, configuration, predicted bytes and method that fit the memory of this machine; if none
    does, the smallest.
    """
    from mega_common.progress_logging import logger
    from mega_common.strict_config import apply_config_overrides
    from mega_trainer.config.run_config import RunConfig, resolve_run_config

    limit = measure_usable_memory("auto")
    methods: list[Method] = [request.method] if request.method else ["lora", "qlora"]
    found = None
    for method in methods:
        draft = draft_tuning_run_yaml(request, data, method, model, choose_precision())
        for settings in iterate_memory_saving_settings(draft["batch"]["global"]):
            run = apply_config_overrides(draft | settings, overrides)
            config = RunConfig.parse(resolve_run_config(run), source="mega tune")
            found = run, config, predict_peak_memory_bytes(config), method
            if limit is None or found[2] <= limit:
                return found
    assert found is not None, "there is a method"
    assert limit is not None, "without a limit the first settings fit"
    logger.warning(
        "%.1f GiB of memory are predicted, and %.1f GiB can be used; several GPUs (--nproc) or --qlora need less each",
        found[2] / 2**30, (limit or 0) / 2**30,
    )  # fmt: skip
    return found


def _export(config: RunConfig, output: Path) -> None:
    """Export the best checkpoint of the run as a HuggingFace folder, and an adapter as a PEFT folder, unless this is done."""
    import torch

    from mega_ckpt.convert import ConvertOptions, convert_checkpoint
    from mega_ckpt.families import detect_model_family
    from mega_common.atomic_files import write_json_atomically
    from mega_common.bounded_parsing import read_json_file
    from mega_common.progress_logging import logger

    best, done = str(find_best_checkpoint(config)), output / "export.json"
    if done.exists() and read_json_file(done, ConfigError) == best:
        return
    (output / "comparison.json").unlink(missing_ok=True)
    convert_checkpoint(best, output / "model", "hf", options=ConvertOptions(dtype=torch.bfloat16), overwrite=True)
    family = detect_model_family(
        read_json_file(output / "model" / "config.json", ConfigError), added=config.registry.families
    )
    if config.lora is not None and family.supports_peft:
        convert_checkpoint(best, output / "adapter", "peft", overwrite=True)
    elif config.lora is not None:
        logger.warning("PEFT has no adapters of model type %s: only the merged model is exported", family.name)
    write_json_atomically(done, best)


def find_best_checkpoint(config: RunConfig) -> Path:
    """Return the checkpoint of a finished run with the lowest validation loss, else its last one.
    The last one is returned if no best one is recorded or it was deleted.

    Raises:
        CheckpointError: if there is none.
    """
    from mega_ckpt.checkpoint import Checkpoint
    from mega_ckpt.checkpoint_folders import get_checkpoint_step_folder, latest_checkpoint

    root = Path(str(config.checkpoint_root))
    last = latest_checkpoint(root)
    if last is None:
        raise CheckpointError(f"{root}: has no checkpoint to export", hint="set checkpoint.save to true")
    best = Checkpoint.open_folder(last).trainer_state.get("best") or {}
    folder = get_checkpoint_step_folder(root, int(best.get("step") or 0))
    return folder if best.get("loss") is not None and folder.is_dir() else Path(str(last))
