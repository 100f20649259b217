"""`mega serve`: serve a model with OpenAI's API."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast, get_args

import typer

from mega_cli import __version__
from mega_cli.model_options import (
    ChatTemplateOption,
    Device,
    DraftOption,
    EvalPrecision,
    ExtensionOption,
    MaxLength,
    Model,
    PrecisionOption,
    TokenizerOption,
)
from mega_cli.other_servers import OtherServerName, ServingOptions, exec_vllm_or_sglang
from mega_common.bounded_parsing import read_utf8_text
from mega_common.errors import ConfigError, DataError, MegaError, MissingPackageError
from mega_common.progress_logging import logger

if TYPE_CHECKING:
    from mega_common.extension_entries import Sampler
    from mega_common.vision_config import VisionConfig
    from mega_data.chat.chat_template import ChatTemplate
    from mega_data.tokenizer import Tokenizer
    from mega_eval.inference_engine import InferenceEngine
    from mega_eval.multi_rank_inference import ReplicaLayout
    from mega_eval.server.embeddings_api import ServedEmbedder
    from mega_trainer.distributed.process_groups import RankInfo
    from mega_trainer.model.decoder import Decoder
    from mega_trainer.parallel.lora_layers import PerRowAdapterSelection

EXAMPLES = """Examples:

    mega serve out/hf

    mega serve runs/llama3-8b --port 8080 --name llama3-8b --precision bf16

    mega serve out/hf --precision bf16 --tp 2 --replicas 4

    mega serve out/hf --adapter polite=runs/polite --adapter sql=adapters/sql

    mega serve out/hf --draft smaller/hf --add-model small=smaller/hf

    mega serve out/hf --host 0.0.0.0 --api-key-file secrets/key --max-requests 64

    curl http://127.0.0.1:8000/v1/completions -H "content-type: application/json" -d '{"prompt": "Once upon a time"}'
"""
LONGEST_DEFAULT = 8192  # tokens
FOREVER = 3600.0 * 24 * 365 * 10  # seconds: timeout of ranks that wait for a request
KEY_VARIABLE = "MEGA_API_KEY"
OWN_OPTIONS = (
    "adapter_folder", "add_model", "cache_tokens", "max_requests", "max_body", "timeout", "drain", "ep", "pp", "draft", "device",
    "extension",
)  # fmt: skip
"""Options that only mega's own server has."""


def serve_command(
    ctx: typer.Context,
    model: Model,
    host: Annotated[
        str, typer.Option(help="Address to bind to. Addresses other than this machine's own require an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free port.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Model name in the API, e.g. llama3-8b; default: MODEL as given.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="LoRA adapter, from a run or a PEFT folder; clients select it with NAME as the model. Repeatable.",
        ),
    ] = None,
    adapter_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder from which clients may load LoRA adapters at run time (/v1/load_lora_adapter); default: none."
        ),
    ] = None,
    add_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL",
            help="Another model for the same server, with an engine of its own; clients select it by NAME. Repeatable.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            help="API key that clients must send. Other users of this machine can read command lines: prefer --api-key-file.",
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the API key.")] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            "--cors-origin",
            metavar="ORIGIN",
            help="Origin of web pages that may call the server (CORS), e.g. https://chat.example; * allows all. Repeatable.",
        ),
    ] = None,
    max_length: MaxLength = None,
    cache_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="KV cache size in tokens, for all requests together; default: 2 * --max-length."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Maximum number of sequences per batch.")] = 32,
    max_requests: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum number of running and waiting requests, and of their sequences; more are rejected with 429.",
        ),
    ] = 256,
    max_body: Annotated[int, typer.Option(min=1, help="Maximum size of a request in bytes.")] = 2**20,
    timeout: Annotated[float, typer.Option(min=0.1, help="Timeout of a request in seconds.")] = 600,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds to finish running requests after SIGTERM or Ctrl-C.")
    ] = 30,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks to start on this machine.")] = 1,
    replicas: Annotated[
        int,
        typer.Option(
            min=1, help="Copies of the server behind one address, balanced by HAProxy; on GPUs each has its own."
        ),
    ] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel ranks.")] = 1,
    engine: Annotated[
        str,
        typer.Option(
            help="mega, or a server that is installed beside it, vllm or sglang, which serves the HuggingFace folder MODEL "
            "with the same options."
        ),
    ] = "mega",
    draft: DraftOption = None,
    precision: PrecisionOption = EvalPrecision.FP32,
    device: Device = "auto",
    tokenizer: TokenizerOption = None,
    extension: ExtensionOption = None,
    chat_template: ChatTemplateOption = None,
) -> None:
    """Serve a model with OpenAI's API, and a web page for chats at /.

    It runs one copy of the model, or several (--replicas), for evaluation and light use. For heavy load, convert the model with
    `mega ckpt convert MODEL OUT --to hf` and serve the folder OUT with vLLM or SGLang, which load it unchanged
    (--engine vllm or --engine sglang).

    Routes: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens,
    /v1/embeddings, /v1/rerank, /v1/models, /v1/load_lora_adapter, /v1/unload_lora_adapter, /tokenize, /detokenize,
    /tokenizer_info, /health, /version, /metrics.
    """
    key = _read_api_key(api_key, api_key_file)
    adapters = _parse_named_folders(adapter or [], "--adapter", {name or model})
    others = _parse_named_folders(add_model or [], "--add-model", {name or model, *adapters})
    if replicas > 1:
        raise typer.Exit(_serve_replicas(replicas, host, port, key, tp, ep, pp, device, adapter_folder, timeout, drain))
    if engine != "mega":
        _run_other_server(ctx, engine, ServingOptions(
            model, name or model, host, port, key, precision, max_length, batch_size, tp, adapters, tokenizer, chat_template,
            allow_origin or (),
        ))  # fmt: skip
    _check_server_packages()
    from mega_cli.eval_ranks import join_replica_process_group
    from mega_eval.multi_rank_inference import BroadcastingEngine, ReplicaLayout, repeat_rank_zero_engine_calls
    from mega_eval.server.engine_driver import EngineDriver
    from mega_eval.server.inference_server import InferenceServer, bind_server_socket
    from mega_eval.server.model_service import ModelService
    from mega_eval.server.request_gate import ServerLimits
    from mega_eval.server.served_models import ServedModels
    from mega_eval.server.server_metrics import ServerMetrics

    sharing = ReplicaLayout(tp, ep, pp)
    _check_options(sharing.ranks_per_copy, draft, others, adapter_folder)
    sources = {name or model: model, **others}
    with join_replica_process_group(sharing, sharing.ranks_per_copy, device, FOREVER) as ranks:
        listener = bind_server_socket(host, port, key) if ranks.rank == 0 else None
        found = [
            load_served_model(
                source, precision, device, None if number else tokenizer, max_length, cache_tokens, batch_size,
                sharing, ranks, None if number else adapters, None if number else draft, extension or [],
            )
            for number, source in enumerate(sources.values())
        ]  # fmt: skip
        main = found[0].engine
        if listener is None:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # rank 0 stops the others after the running requests
            repeat_rank_zero_engine_calls(main)
            return
        metrics = ServerMetrics(*(one.engine for one in found))
        services = [
            ModelService(
                title, __version__, EngineDriver(one.engine, max_requests=max_requests), one.tokenizer,
                _find_template(source, extension or [], *((tokenizer, chat_template) if one is found[0] else ())), one.ends, load_default_sampling(source, extension or []), one.max_length, one.vocab_size, timeout, metrics,
                adapters=adapters if one is found[0] else {}, embedder=one.embedder, source=source, vision=one.vision, samplers=one.samplers,
            )
            for (title, source), one in zip(sources.items(), found, strict=True)
        ]  # fmt: skip
        hosts = None if key else (host.lower(), "127.0.0.1", "localhost", "::1")
        bounds = ServerLimits(key, hosts, max_requests, timeout, max_body, origins=allow_origin or ())
        server = InferenceServer(ServedModels(services, adapter_folder), bounds, drain=drain)
        server.run(sockets=[listener])
        if isinstance(main, BroadcastingEngine) and server.engine_ended:
            main.stop_followers()
    if server.force_exit:
        raise KeyboardInterrupt


def _serve_replicas(
    count: int, host: str, port: int, key: str | None, tp: int, ep: int, pp: int, device: str, adapter_folder: Path | None,
    timeout: float, drain: float,
) -> int:  # fmt: skip
    """Run this command as several replicas; return the exit status."""
    _check_server_packages()
    from mega_cli.serve_replicas import (
        assign_devices_to_replicas,
        find_haproxy,
        list_visible_devices,
        run_server_replicas,
    )
    from mega_eval.multi_rank_inference import ReplicaLayout
    from mega_eval.server.inference_server import bind_server_socket

    if adapter_folder is not None:
        raise ConfigError(
            "--adapter-folder is not supported with --replicas, as an adapter would be loaded into one replica only",
            hint="use --adapter NAME=FOLDER",
        )
    find_haproxy()
    environments = assign_devices_to_replicas(
        count, ReplicaLayout(tp, ep, pp).ranks_per_copy, list_visible_devices(device)
    )
    with bind_server_socket(host, port, key) as listener:
        return run_server_replicas(listener, environments, timeout, drain)


def _run_other_server(ctx: typer.Context, engine: str, options: ServingOptions) -> NoReturn:
    """Replace this process by another server, unless --engine is unknown or an option is mega's own."""
    if engine not in get_args(OtherServerName):
        raise ConfigError(f"--engine must be mega, vllm or sglang, found {engine!r}", hint="use --engine mega")
    for name in OWN_OPTIONS:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is not supported with --engine {engine}", hint=f"leave out --{option}")
    exec_vllm_or_sglang(cast("OtherServerName", engine), options)


def _check_options(ranks: int, draft: str | None, others: Mapping[str, str], adapter_folder: Path | None) -> None:
    """Check options of models that are not supported together."""
    if ranks > 1 and draft not in (None, "ngrams", "none"):
        raise ConfigError(
            f"--draft {draft} is not supported on several ranks (--tp, --ep, --pp)",
            hint="use --draft ngrams, or leave out --tp, --ep and --pp",
        )
    if ranks > 1 and others:
        raise ConfigError(
            "--add-model is not supported on several ranks (--tp, --ep, --pp)", hint="start a server for each model"
        )
    if adapter_folder is not None and not adapter_folder.is_dir():
        raise ConfigError(f"--adapter-folder {adapter_folder}: no such folder", hint="give a folder with adapters")


@dataclass(frozen=True)
class ServedModel:
    """Loaded model with what generation requests need: engine, tokenizer, end tokens, limits and embedder.
    It has its inference engine, tokenizer, end tokens and limits, its text embedder or the reason for having none, the
    settings of its vision encoder if it takes images, and the samplers of extensions.
    """

    engine: InferenceEngine
    tokenizer: Tokenizer
    ends: frozenset[int]
    max_length: int
    vocab_size: int
    embedder: ServedEmbedder | str | None
    vision: VisionConfig | None = None
    samplers: Mapping[str, Sampler] = field(default_factory=dict)


def load_served_model(
    model: str,
    precision: EvalPrecision,
    device: str,
    tokenizer: Path | None,
    max_length: int | None,
    cache_tokens: int | None,
    batch_size: int,
    sharing: ReplicaLayout | None = None,
    ranks: RankInfo | None = None,
    adapters: Mapping[str, str] | None = None,
    draft: str | None = None,
    extensions: Sequence[str] = (),
) -> ServedModel:
    """Load a model and tokenizer for generation, with an inference engine and, on a single rank, an embedder.

    Args:
        sharing, ranks: layout of the model and this process's rank; None for one process.
        adapters: folders of LoRA adapters by name.
        extensions: extensions with the code of the model's own layers.
    """
    from mega_ckpt.source import read_model_config
    from mega_eval.drafters import make_drafter
    from mega_eval.inference_engine import InferenceEngine
    from mega_eval.language_model import LanguageModel
    from mega_eval.model_loading import check_sequence_length
    from mega_eval.multi_rank_inference import BroadcastingEngine, build_replica_groups
    from mega_trainer.config.extensions import load_extensions
    from mega_trainer.parallel.lora_layers import PerRowAdapterSelection

    groups = None
    if sharing is not None and ranks is not None and ranks.world_size > 1:
        described = read_model_config(model, families=load_extensions(extensions).families)
        groups = build_replica_groups(described, ranks.rank, ranks.world_size, sharing)
    broadcasts = groups is not None and ranks is not None and ranks.rank == 0
    loaded = LanguageModel.load(
        model, precision=precision, device=device, tokenizer=tokenizer, draft=draft, groups=groups, adapters=adapters,
        extensions=extensions,
    )  # fmt: skip
    config, vocabulary = loaded.model.config, loaded.tokenizer
    longest = max_length or min(config.max_position, LONGEST_DEFAULT)
    check_sequence_length(config, longest, f"--max-length {longest} tokens")
    cached = cache_tokens or 2 * longest
    selection = loaded.adapters or PerRowAdapterSelection([])  # one for the engine and the embedder: both run the model
    engine = (BroadcastingEngine if broadcasts else InferenceEngine)(
        loaded.model, vocabulary, cache_tokens=cached, batch_size=batch_size,
        drafter=make_drafter(loaded.draft, loaded.model, vocabulary, cached, batch_size), adapters=selection,
    )  # fmt: skip
    embedder = None
    if sharing is not None and groups is None and config.encoder is None:
        embedder = _make_embedder(model, loaded.model, vocabulary, selection)
    vision = config.vision if groups is None else None  # ranks would each need the images
    return ServedModel(engine, vocabulary, loaded.ends, longest, config.vocab_size, embedder, vision, loaded.samplers)


def _make_embedder(
    folder: str, model: Decoder, tokenizer: Tokenizer, adapters: PerRowAdapterSelection
) -> ServedEmbedder | str:
    """Return the embedder of a model, or the reason why embeddings of its folder are not supported."""
    from mega_eval.server.embeddings_api import make_served_embedder

    try:
        return make_served_embedder(folder, model, tokenizer, adapters)
    except MegaError as error:
        logger.warning("/v1/embeddings is not available: %s", error.message)
        return f"embeddings of this model are not supported: {error.message}"


def _parse_named_folders(options: Sequence[str], flag: str, taken: Collection[str]) -> dict[str, str]:
    """Return the folders of the options NAME=FOLDER of a flag, by names that are not `taken`."""
    found: dict[str, str] = {}
    for option in options:
        name, _, folder = option.partition("=")
        if not name or not folder:
            raise ConfigError(
                f"{flag} must have the form NAME=FOLDER, found {option!r}", hint=f"{flag} mine={folder or option}"
            )
        if name in found or name in taken:
            raise ConfigError(f"{flag} {option}: the name {name!r} is used twice", hint="choose another NAME")
        found[name] = folder
    return found


def load_default_sampling(model: str, extensions: Sequence[str] = ()) -> dict[str, Any]:
    """Return the sampling settings of the model's generation_config.json, empty without any, and log them.
    `extensions` may have the family of the folder.
    """
    from mega_eval.model_loading import load_sampling_settings
    from mega_eval.sampling import Sampling

    own = load_sampling_settings(model, extensions)
    if own:
        Sampling.parse(own, source=f"{model}: generation_config.json")
        settings = ", ".join(f"{name} {value}" for name, value in own.items())
        logger.info("%s: default sampling of its generation_config.json: %s", model, settings)
    return own


def _read_api_key(given: str | None, file: Path | None) -> str | None:
    """Return the key of the option, the environment or the file."""
    if file is not None:
        given = read_utf8_text(file, ConfigError).strip()
    if given is not None and not re.fullmatch(r"[\x21-\x7e]{8,}", given):
        where = str(file) if file else f"--api-key or {KEY_VARIABLE}"
        hint = "openssl rand -hex 32 prints a good key"
        raise ConfigError(
            f"{where}: the API key must be at least 8 printable ASCII characters without spaces", hint=hint
        )
    return given


def _check_server_packages() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"mega serve requires {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            hint="in the root of the repository: pip install 'packages/eval[serve]'",
        )


def _find_template(
    model: str, extensions: Sequence[str], tokenizer: Path | None = None, file: Path | None = None
) -> ChatTemplate | None:
    """Return the chat template, or None for a model without one; a given file must be valid."""
    from mega_eval.chat_session import load_chat_template

    try:
        return load_chat_template(model, tokenizer, file, extensions)
    except (DataError, MissingPackageError) as error:
        if file is not None:
            raise
        logger.warning("%s; /v1/chat/completions is not available", error.message)
        return None
