"""`mega serve` and `mega chat`: a model behind OpenAI's API, and in the terminal."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mega_cli import __version__
from mega_cli.eval import (
    Device,
    DraftOption,
    EvalPrecision,
    MinP,
    Model,
    PrecisionOption,
    Temperature,
    TokenizerOption,
    TopK,
    TopP,
)
from mega_common.bounded_parsing import read_utf8_text
from mega_common.errors import ConfigError, DataError, MegaError, MissingPackageError
from mega_common.progress_logging import logger

if TYPE_CHECKING:
    from mega_data.chat.chat_template import ChatTemplate
    from mega_data.tokenizer import Tokenizer
    from mega_eval.chat_session import ChatSession
    from mega_eval.inference_engine import InferenceEngine
    from mega_eval.multi_rank_inference import ReplicaLayout
    from mega_eval.server.embeddings_api import ServedEmbedder
    from mega_trainer.distributed.rank_info import RankInfo
    from mega_trainer.model.decoder import Decoder
    from mega_trainer.parallel.lora_layers import AdapterSelection

SERVE_EXAMPLES = """Examples:

    mega serve out/hf

    mega serve runs/llama3-8b --port 8080 --name llama3-8b --precision bf16

    mega serve out/hf --precision bf16 --tp 2

    mega serve out/hf --adapter polite=runs/polite --adapter sql=adapters/sql

    mega serve out/hf --draft smaller/hf

    mega serve out/hf --host 0.0.0.0 --api-key-file secrets/key --max-requests 64

    curl http://127.0.0.1:8000/v1/completions -H "content-type: application/json" -d '{"prompt": "Once upon a time"}'
"""
CHAT_EXAMPLES = """Examples:

    mega chat out/hf

    mega chat out/hf --system "Answer in one sentence." --temperature 0.7 --seed 1

    printf 'What is the capital of France?\\nAnd of Italy?\\n' | mega chat out/hf
"""
LONGEST_DEFAULT = 8192  # tokens
FOREVER = 3600.0 * 24 * 365 * 10  # seconds that ranks wait for a request
KEY_VARIABLE = "MEGA_API_KEY"

ChatTemplateOption = Annotated[
    Path | None, typer.Option(help="A chat template, in Jinja; default: the one beside the tokenizer.")
]
MaxLength = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens of a prompt and its answer together; default: all the model can, up to 8192."),
]


def serve_command(
    model: Model,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any but this machine's own wants an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; default: MODEL as given.")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="An adapter of low rank, a run's or a folder of PEFT's: clients choose it by NAME as their model. Repeatable.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=KEY_VARIABLE, help="Clients have to bring it. Others on this machine can read options."),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the API key.")] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin of web pages that may call the server (CORS), such as https://chat.example; * is any. Repeatable.",
        ),
    ] = None,
    max_length: MaxLength = None,
    cache_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of all requests that are kept in memory; default: twice --max-length."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts continued at the same time.")] = 32,
    max_requests: Annotated[
        int,
        typer.Option(min=1, help="Requests, and texts of all requests, that run or wait; more are refused with 429."),
    ] = 256,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = 2**20,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one request.")] = 600,
    drain: Annotated[float, typer.Option(min=0, help="Seconds to finish what runs after SIGTERM or Ctrl-C.")] = 30,
    tp: Annotated[int, typer.Option(min=1, help="Ranks to start here that share each weight.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that share the experts.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Ranks that share the layers.")] = 1,
    draft: DraftOption = None,
    precision: PrecisionOption = EvalPrecision.FP32,
    device: Device = "auto",
    tokenizer: TokenizerOption = None,
    chat_template: ChatTemplateOption = None,
) -> None:
    """Serve a model by OpenAI's API, with a page to try it at /.

    For evaluation, for trying and for light use: one copy of the model. For heavy serving give the folder
    that `mega ckpt convert MODEL OUT --to hf` writes to vLLM or SGLang, which load it as it is.

    Routes: /v1/completions, /v1/chat/completions, /v1/responses, /v1/embeddings, /v1/models, /tokenize, /detokenize,
    /tokenizer_info, /health, /version, /metrics.
    """
    key = _read_api_key(api_key, api_key_file)
    adapters = _parse_adapters(adapter or [], name or model)
    _need_server()
    from mega_cli.eval_ranks import join_model_ranks
    from mega_eval.multi_rank_inference import BroadcastingEngine, ReplicaLayout, follow_engine_calls
    from mega_eval.server.engine_driver import EngineDriver
    from mega_eval.server.inference_server import InferenceServer, bind_server_socket
    from mega_eval.server.model_service import ModelService
    from mega_eval.server.request_gate import ServerLimits
    from mega_eval.server.server_metrics import ServerMetrics

    sharing = ReplicaLayout(tp, ep, pp)
    if sharing.ranks_per_copy > 1 and draft not in (None, "ngrams", "none"):
        raise ConfigError(
            f"--draft {draft}: guesses on one rank alone", hint="--draft ngrams, or no --tp, --ep and --pp"
        )
    with join_model_ranks(sharing, sharing.ranks_per_copy, device, FOREVER) as ranks:
        listener = bind_server_socket(host, port, key) if ranks.rank == 0 else None
        found = _load(
            model, precision, device, tokenizer, max_length, cache_tokens, batch_size, sharing, ranks, adapters, draft
        )
        if listener is None:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # the first rank ends, when what runs is finished
            follow_engine_calls(found.engine)
            return
        service = ModelService(
            name=name or model,
            version=__version__,
            driver=EngineDriver(found.engine, max_requests=max_requests),
            tokenizer=found.tokenizer,
            template=_find_template(model, tokenizer, chat_template),
            ends=found.ends,
            default_sampling=_default_sampling(model),
            max_length=found.max_length,
            vocab_size=found.vocab_size,
            seconds=timeout,
            metrics=ServerMetrics(found.engine),
            adapters=adapters,
            embedder=found.embedder,
        )
        hosts = None if key else (host.lower(), "127.0.0.1", "localhost", "::1")
        bounds = ServerLimits(
            key, hosts, requests=max_requests, seconds=timeout, body=max_body, origins=allow_origin or ()
        )
        server = InferenceServer(service, bounds, drain=drain)
        server.run(sockets=[listener])
        if isinstance(found.engine, BroadcastingEngine) and server.engine_ended:
            found.engine.stop_followers()
    if server.force_exit:
        raise KeyboardInterrupt


def chat_command(
    model: Model,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 1024,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens of the conversation become less likely.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws; the same seed gives the same answers.")] = 0,
    max_length: MaxLength = None,
    draft: DraftOption = None,
    precision: PrecisionOption = EvalPrecision.FP32,
    device: Device = "auto",
    tokenizer: TokenizerOption = None,
    chat_template: ChatTemplateOption = None,
) -> None:
    """Chat with a model. /reset clears the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer.

    Piped standard input is one turn a line; nothing but the answers goes to standard output. How tokens are drawn is
    what the model's generation_config.json says, as far as no option says otherwise.
    """
    from mega_eval.chat_session import ChatSession, load_chat_template
    from mega_eval.sampling import Sampling

    given = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    settings = {name: value for name, value in given.items() if value is not None}
    Sampling.parse(settings, source="options")
    sampling = Sampling.parse({**_default_sampling(model), **settings}, source="options and generation_config.json")
    template = load_chat_template(model, tokenizer, chat_template)
    found = _load(model, precision, device, tokenizer, max_length, None, 1, draft=draft)
    sampling = sampling.model_copy(update={"min_length_ends": sorted(found.ends)})
    chat = ChatSession(
        found.engine, found.tokenizer, template, sampling, found.ends, max_new_tokens, found.max_length, system=system
    )
    _talk(chat)


@dataclass(frozen=True)
class _LoadedModel:
    """Model with its tokenizer and chat template."""

    engine: InferenceEngine
    tokenizer: Tokenizer
    ends: frozenset[int]
    max_length: int
    vocab_size: int
    embedder: ServedEmbedder | str | None


def _load(
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
) -> _LoadedModel:
    from mega_ckpt.source import read_model_config
    from mega_eval.drafters import make_drafter
    from mega_eval.inference_engine import InferenceEngine
    from mega_eval.language_model import LanguageModel
    from mega_eval.multi_rank_inference import BroadcastingEngine, build_replica_groups
    from mega_trainer.parallel.lora_layers import AdapterSelection

    groups, leads = None, False
    if sharing is not None and ranks is not None and ranks.world_size > 1:
        groups, leads = (
            build_replica_groups(read_model_config(model), ranks.rank, ranks.world_size, sharing),
            ranks.rank == 0,
        )
    loaded = LanguageModel.load(
        model, precision=precision, device=device, tokenizer=tokenizer, draft=draft, groups=groups, adapters=adapters
    )
    config, words = loaded.model.config, loaded.tokenizer
    longest = max_length or min(config.max_position, LONGEST_DEFAULT)
    room = cache_tokens or 2 * longest
    engine = (BroadcastingEngine if leads else InferenceEngine)(
        loaded.model, words, cache_tokens=room, batch_size=batch_size,
        drafter=make_drafter(loaded.draft, loaded.model, words, room, batch_size), adapters=loaded.adapters,
    )  # fmt: skip
    embeds = sharing is not None and groups is None and config.encoder is None
    embedder = _embedder(model, loaded.model, words, loaded.adapters or AdapterSelection([])) if embeds else None
    return _LoadedModel(engine, words, loaded.ends, longest, config.vocab_size, embedder)


def _embedder(folder: str, model: Decoder, tokenizer: Tokenizer, adapters: AdapterSelection) -> ServedEmbedder | str:
    """Return the embedder of a model, or why its folder's embeddings are not supported."""
    from mega_eval.server.embeddings_api import make_served_embedder

    try:
        return make_served_embedder(folder, model, tokenizer, adapters)
    except MegaError as error:
        logger.warning("/v1/embeddings is refused: %s", error.message)
        return f"embeddings of this model are not supported: {error.message}"


def _parse_adapters(given: Sequence[str], model: str) -> dict[str, str]:
    """Return folders of adapters by their names."""
    found: dict[str, str] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not name or not folder:
            raise ConfigError(f"--adapter {one}: is no NAME=FOLDER", hint=f"such as --adapter mine={folder or one}")
        if name in found or name == model:
            raise ConfigError(f"--adapter {one}: there is a model {name!r} already", hint="give it another NAME")
        found[name] = folder
    return found


def _default_sampling(model: str) -> dict[str, Any]:
    """Return the sampling settings of the model's generation_config.json, reported in one line."""
    from mega_eval.model_loading import load_sampling_settings
    from mega_eval.sampling import Sampling

    own = load_sampling_settings(model)
    if own:
        Sampling.parse(own, source=f"{model}: generation_config.json")
        told = ", ".join(f"{name} {value}" for name, value in own.items())
        logger.info("%s: unless told otherwise, by its generation_config.json: %s", model, told)
    return own


def _read_api_key(given: str | None, file: Path | None) -> str | None:
    """Return the key of the option, the environment or the file."""
    if file is not None:
        given = read_utf8_text(file, ConfigError).strip()
    if given is not None and not re.fullmatch(r"[\x21-\x7e]{8,}", given):
        where = str(file) if file else f"--api-key or {KEY_VARIABLE}"
        hint = "openssl rand -hex 32 makes a good one"
        raise ConfigError(f"{where}: an API key is at least 8 printable characters of ASCII without spaces", hint=hint)
    return given


def _need_server() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"mega serve needs {' and '.join(missing)}, which are not installed",
            hint="in the root of the repository: pip install 'packages/eval[serve]'",
        )


def _find_template(model: str, tokenizer: Path | None, file: Path | None) -> ChatTemplate | None:
    """Return the chat template, or None for a base model unless a file was named."""
    from mega_eval.chat_session import load_chat_template

    try:
        return load_chat_template(model, tokenizer, file)
    except (DataError, MissingPackageError) as error:
        if file is not None:
            raise
        logger.warning("%s; /v1/chat/completions is refused", error.message)
        return None


def _talk(chat: ChatSession) -> None:
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 - its import gives input() a line that can be edited

        _note("/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer")
    for turn in _read_turns(terminal):
        if turn == "/quit":
            return
        if turn == "/reset":
            chat.messages.clear()
            _note("the conversation is forgotten")
            continue
        if turn.startswith("/") and terminal and " " not in turn:
            _note(f"{turn}: no such command; there are /reset and /quit")
            continue
        _answer(chat, turn)


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _read_turns(terminal: bool) -> Iterator[str]:
    """Yield what a person types, line by line, until the end of the input, without empty lines."""
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            if terminal:
                print()
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            _note("\n/quit or Ctrl-D ends")
            continue
        if line.strip():
            yield line.strip()


def _answer(chat: ChatSession, turn: str) -> None:
    remembered = len(chat.messages)
    try:
        with _catch_interrupt(chat) as stopped:
            for text in chat.stream_answer(turn, stopped):
                print(text, end="", flush=True)
            print()
    except MegaError as error:
        _note(f"error: {error}")
        return
    if len(chat.messages) < remembered + 2:
        _note(f"the conversation is longer than the model's {chat.max_length} tokens: its begin is forgotten")


@contextlib.contextmanager
def _catch_interrupt(chat: ChatSession) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed; pressed again, it ends the program as usual.

    Before the engine has the turn, such as in a chat template that does not end, Ctrl-C raises an error instead.
    """
    pressed = False

    def note(_: int, __: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)
        if not chat.engine.num_waiting and not chat.engine.num_running:
            raise DataError("the turn is given up: Ctrl-C was pressed before the answer began")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
