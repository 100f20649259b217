"""Labels of texts and tokens, and embeddings: the losses of transformers and sentence-transformers, in any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from first_steps import in_layouts, step
from masked_data import SPECIAL
from ranks import run_ranks
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional as F

from mega_ckpt.convert import convert_checkpoint
from mega_common.errors import ConfigError, DataError
from mega_data.chat.chat_preparation import ChatOptions
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run.training_run import run_training
from mega_trainer.verify.case_comparison import assemble_tensor

transformers = pytest.importorskip("transformers", reason="whose losses are the truth here")

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "home", "in", "rain", "so", "far"]
LENGTH = 64
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "Bert": {**NO_DROPOUT, "max_position_embeddings": 64, "pad_token_id": 0},
    "Roberta": {**NO_DROPOUT, "max_position_embeddings": 66, "pad_token_id": 0},
    "ModernBert": {"max_position_embeddings": 64, "classifier_pooling": "cls", "local_attention": 8, **IDS},
    "DistilBert": {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "Electra": {**NO_DROPOUT, "embedding_size": 8, "max_position_embeddings": 64, "pad_token_id": 0},
    "NomicBert": {"max_position_embeddings": 64, "pad_token_id": 0},
    "EuroBert": {"max_position_embeddings": 64, "classifier_pooling": "bos", **IDS},
    "Qwen3Moe": {"num_key_value_heads": 2, "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                 "router_aux_loss_coef": 0.0, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
    "Llama": {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
}  # fmt: skip


def draw_text(rng: np.random.Generator, low: int = 2, high: int = 9) -> str:
    return " ".join(rng.choice(WORDS, rng.integers(low, high)))


def draw_records(kind: str, count: int = 40) -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    made: list[dict[str, Any]] = []
    for number in range(count):
        text = draw_text(rng)
        made.append(
            {
                "classes": {"text": text, "text_pair": draw_text(rng), "label": number % 3},
                "numbers": {"text": text, "label": number / 7},
                "ranking": {"query": text, "passage": draw_text(rng), "label": number % 4 / 3},
                "tags": {"tokens": text.split(), "tags": rng.integers(0, 4, len(text.split())).tolist()},
                "groups": {"query": text, "positive": draw_text(rng), "negatives": [draw_text(rng) for _ in range(2)]},
            }[kind]
        )
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets, and models of transformers in fp64 with the classes of `CASES`."""
    made = tmp_path_factory.mktemp("tasks")
    backend = Backend(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *WORDS])}, unk_token=SPECIAL[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    cls, sep = (SPECIAL.index(token) for token in ("[CLS]", "[SEP]"))
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", cls), ("[SEP]", sep)]
    )
    (made / "tok").mkdir()
    backend.save(str(made / "tok" / "tokenizer.json"))
    names = {
        f"{name.strip('[]').lower()}_token": name
        for name in SPECIAL
        if name in ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
    }
    (made / "tok" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, **names})
    )
    for name, kind in (("classes", "labels"), ("numbers", "labels"), ("ranking", "labels"), ("tags", "token_labels"), ("groups", "groups")):  # fmt: skip
        path = made / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, draw_records(name))))
        options = ChatOptions(kind=kind, negatives=2 if kind == "groups" else 0, max_length=12)  # type: ignore[arg-type]
        preprocess_corpus([path], made / "tok", made / name, chat=options)
    for family, head, labels in {(case[0], case[1], case[2]) for case in CASES.values()}:
        torch.manual_seed(labels)
        config = getattr(transformers, f"{family}Config")(**SIZES, **CONFIGS[family], num_labels=labels)
        model = getattr(transformers, f"{family}{head}")(config).double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(made / f"{family}{head}{labels}")
    return made


# class of transformers and labels, data, sections of the run
CASES: dict[str, tuple[str, str, int, str, dict[str, Any]]] = {
    "bert": ("Bert", "ForSequenceClassification", 3, "classes", {}),
    "roberta": ("Roberta", "ForSequenceClassification", 3, "classes", {}),
    "modernbert": ("ModernBert", "ForSequenceClassification", 3, "classes", {}),
    "distilbert": ("DistilBert", "ForSequenceClassification", 3, "classes", {}),
    "electra": ("Electra", "ForSequenceClassification", 3, "classes", {}),
    "nomic": ("NomicBert", "ForSequenceClassification", 3, "classes", {}),
    "eurobert": ("EuroBert", "ForSequenceClassification", 3, "classes", {}),
    "llama": ("Llama", "ForSequenceClassification", 3, "classes", {}),
    "experts": ("Qwen3Moe", "ForSequenceClassification", 3, "classes", {}),
    "regression": ("Llama", "ForSequenceClassification", 1, "numbers", {"task_head": {"labels": 1}}),
    "reranker": ("Bert", "ForSequenceClassification", 1, "ranking", {"objective": {"loss": "bce"}}),
    "tags": ("ModernBert", "ForTokenClassification", 4, "tags", {}),
    "causal tags": ("Llama", "ForTokenClassification", 4, "tags", {}),
    "embeddings": ("Bert", "Model", 2, "groups", {"task_head": {"kind": "embedding"}}),
    "causal embeddings": (
        "Llama", "Model", 2, "groups",
        {"task_head": {"kind": "embedding"}, "objective": {"temperature": 0.2, "dimensions": [4, 16]}},
    ),
}  # fmt: skip


def settings(folder: Path, name: str, output: Path, **sections: Any) -> dict[str, Any]:
    family, head, labels, data, more = CASES[name]
    kinds = {"tags": "token_labels", "groups": "groups"}
    model = {"from": str(folder / f"{family}{head}{labels}")}
    objective = {"kind": "contrastive" if data == "groups" else "classify", **more.get("objective", {})}
    raw: dict[str, Any] = {
        "model": {**model, **({"task_head": more["task_head"]} if "task_head" in more else {})}, "precision": "fp64", "device": "cpu",
        "output": str(output), "batch": {"micro": 1, "global": 4}, "train": {"steps": 1}, "optimizer": {"clip_grad": 0.0},
        "data": {"train": str(folder / data), "kind": kinds.get(data, "labels"), "seq_length": LENGTH, "split": [1]},
        "init_from": model["from"], "checkpoint": {"async": False}, "log": {"tensorboard": False}, "objective": objective,
    }  # fmt: skip
    return {**raw, **sections}


def texts_of(batch: Any) -> list[dict[str, Tensor]]:
    """The inputs of transformers for each text of a batch alone, and its labels."""
    out = []
    for row in range(len(batch.tokens)):
        for number in range(batch.document_ids[row].max() + 1):
            own = batch.document_ids[row] == number
            if batch.targets is None and not batch.loss_weights[row][own].any():
                continue
            if not batch.tokens[row][own].any():  # padding
                continue
            weights = torch.tensor(batch.loss_weights[row][own])
            targets = None if batch.targets is None else torch.tensor(batch.targets[row][own])
            found = {"input_ids": batch.tokens[row][own], "token_type_ids": batch.token_types[row][own]}
            out.append({**{name: torch.tensor(value)[None] for name, value in found.items()}, "weights": weights, "targets": targets})  # fmt: skip
    return out


def outputs_of(model: Any, text: dict[str, Tensor]) -> Any:
    types = (
        {"token_type_ids": text["token_type_ids"]}
        if type(model).__name__.startswith(("Bert", "Roberta", "Electra", "Nomic"))
        else {}
    )
    return model(input_ids=text["input_ids"], attention_mask=torch.ones_like(text["input_ids"]), **types)


def published(name: str, model: Any, batch: Any) -> Tensor:
    """The loss by transformers' classes or sentence-transformers' loss, over all texts of a batch."""
    texts, (_, head, _, data, more) = texts_of(batch), CASES[name]
    if data == "groups":
        st_losses = pytest.importorskip("sentence_transformers.losses")
        states = [outputs_of(model, text).last_hidden_state[0] for text in texts]
        vectors = torch.stack([each[-1] if name.startswith("causal") else each.mean(0) for each in states]).view(
            -1, 4, 16
        )
        objective = more.get("objective", {})
        loss = st_losses.MultipleNegativesRankingLoss(None, scale=1 / objective.get("temperature", 0.05))
        sizes = objective.get("dimensions", [16])
        return sum(loss.compute_loss_from_embeddings([*vectors[..., :size].unbind(1)], None) for size in sizes)
    losses = []
    for text in texts:
        logits, targets = outputs_of(model, text).logits[0], text["targets"]
        if head == "ForTokenClassification":
            labels = torch.where(text["weights"] > 0, targets.long(), -100)
            losses.append(F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")[labels >= 0])
        elif more.get("objective", {}).get("loss") == "bce":
            losses.append(F.binary_cross_entropy_with_logits(logits, targets[:1].double()))
        elif len(logits) == 1:
            losses.append(F.mse_loss(logits, targets[:1].double()))
        else:
            losses.append(F.cross_entropy(logits[None], targets[:1].long()))
    return torch.cat([loss.reshape(-1) for loss in losses]).mean()


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_those_of_transformers(folder: Path, name: str, tmp_path: Path) -> None:
    family, head, labels, _, _ = CASES[name]
    result, told, gradients, batch = step(settings(folder, name, tmp_path))
    more = {"experts_implementation": "eager"} if name == "experts" else {}  # the others have no fp64
    model = getattr(transformers, f"{family}{head}").from_pretrained(
        folder / f"{family}{head}{labels}", dtype=torch.float64, **more
    )
    loss = published(name, model.eval(), batch)
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)  # norms of transformers are in fp32
    assert told["groups" if CASES[name][3] == "groups" else "labels"] > 4
    assert 0 <= told.get("accuracy", 0) <= 1
    named = {
        "model.embed_tokens.weight": model.get_input_embeddings().weight,
        "score.weight": next(
            (p for n, p in model.named_parameters() if n in ("score.weight", "classifier.weight")), None
        ),
    }
    for mine, theirs in named.items():
        if theirs is not None and mine in gradients:
            error = (assemble_tensor(gradients[mine]) - theirs.grad).abs().max() / theirs.grad.abs().max()
            assert error < 1e-5


LORA = {"lora": {"rank": 2, "modules_to_save": ["score"]}}
LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("bert", {"tp": 2, "sp": True, "cp": 2}, {}),
    ("modernbert", {"pp": 2, "dp": 2}, {}),
    ("llama", {"zero": 3, "cp": 2, "cp_kind": "allgather"}, {}),
    ("reranker", {"tp": 2, "pp": 2}, LORA),
    ("tags", {"tp": 2, "cp": 2, "cp_kind": "allgather"}, {}),
    ("experts", {"ep": 2, "zero": 2, "cp": 2}, {}),
    ("regression", {"zero": 1, "dp": 4}, {}),
    ("embeddings", {"zero": 3, "cp": 2}, {}),
    ("causal tags", {"tp": 2, "sp": True, "pp": 2}, {}),
    ("embeddings", {"tp": 2, "sp": True, "dp": 2}, {}),
    ("causal embeddings", {"pp": 2, "cp": 2}, {}),
    ("causal embeddings", {"pp": 2, "schedule": "zb-h1", "tp": 2}, {}),
]


@pytest.mark.parametrize("part", [0, 1, 2])
def test_layouts_make_the_same_step_and_the_same_figures(folder: Path, tmp_path: Path, part: int) -> None:
    raws = [
        settings(folder, name, tmp_path / f"{number}", parallel=parallel, **sections)
        for number, (name, parallel, sections) in enumerate(LAYOUTS[4 * part : 4 * part + 4])
    ]
    assert run_ranks(in_layouts, 4, raws) == [[]] * 4


def train(raw: dict[str, Any]) -> list[dict[str, Any]]:
    run_training(RunConfig.parse(resolve_run_config(raw)), RankInfo())
    return [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]


LEARNING = {"optimizer": {"lr": 0.02}, "lr_schedule": {"name": "constant"}, "batch": {"micro": 2, "global": 4}}


@pytest.fixture
def learnable(folder: Path, tmp_path: Path) -> Path:
    """Texts whose label, and whose answer, depends on the first word; and a language model to begin with."""
    rng = np.random.default_rng(3)
    texts = [f"{WORDS[number % 3]} {draw_text(rng)}" for number in range(60)]
    (tmp_path / "labels.jsonl").write_text(
        "\n".join(
            json.dumps({"text": text, "label": ["no", "maybe", "yes"][number % 3]}) for number, text in enumerate(texts)
        )
    )
    (tmp_path / "groups.jsonl").write_text(
        "\n".join(
            json.dumps({"anchor": text, "positive": f"{WORDS[5 + n % 8]} {text.split()[0]}"})
            for n, text in enumerate(texts)
        )
    )
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, **CONFIGS["Bert"])  # vocabulary: also unused rows
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "base" / name).write_bytes((folder / "tok" / name).read_bytes())
    return tmp_path


def learn(
    learnable: Path, folder: Path, data: str, steps: int, raw_labels: Any = (), **sections: Any
) -> list[dict[str, Any]]:
    source = {"train": str(learnable / f"{data}.jsonl"), "kind": data, "seq_length": 32, "split": [3, 1], "cache": str(learnable / "cache"),
              "tokenizer": str(folder / "tok"), "raw": {"labels": [*raw_labels]}}  # fmt: skip
    raw = {
        **settings(folder, "bert", learnable / "run"), **LEARNING, "data": source, "init_from": str(learnable / "base"), "precision": "fp32",
        "train": {"steps": steps, "eval_every": steps // 2, "eval_steps": 2}, **sections,
    }  # fmt: skip
    return train(raw)


def test_a_classifier_learns_resumes_and_is_what_transformers_loads(folder: Path, learnable: Path) -> None:
    """From a language model without the head, on raw records with names of labels."""
    head = {"labels": 3, "names": ["no", "maybe", "yes"]}
    how = {"model": {"from": str(learnable / "base"), "task_head": head}, "objective": {"kind": "classify"}}
    told = learn(learnable, folder, "labels", 30, **how, raw_labels=head["names"])
    assert told[-1]["accuracy"] == 1
    assert told[-1]["valid_accuracy"] == 1
    halves = {**how, "output": str(learnable / "halves"), "raw_labels": head["names"]}
    learn(learnable, folder, "labels", 30, **halves, train={"steps": 15})
    again = learn(learnable, folder, "labels", 30, **halves, train={"steps": 30})
    assert [each["loss"] for each in again] == [each["loss"] for each in told]
    convert_checkpoint(learnable / "run", learnable / "hf", "hf")
    convert_checkpoint(learnable / "hf", learnable / "again", "mega", verify=True)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(learnable / "hf")
    assert theirs.config.id2label == {0: "no", 1: "maybe", 2: "yes"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(learnable / "hf")
    for word, label in zip(WORDS[:3], head["names"], strict=True):
        logits = theirs(**tokenizer(f"{word} dogs run far", return_tensors="pt")).logits
        assert theirs.config.id2label[logits.argmax().item()] == label


def test_embeddings_are_what_sentence_transformers_loads(folder: Path, learnable: Path) -> None:
    st = pytest.importorskip("sentence_transformers")
    how = {
        "model": {"from": str(learnable / "base"), "task_head": {"kind": "embedding"}},
        "objective": {"kind": "contrastive", "temperature": 0.1, "dimensions": [8, 16]},
    }
    told = learn(learnable, folder, "groups", 40, **how)
    assert told[-1]["loss"] < 0.7 * told[0]["loss"]
    assert told[-1].keys() >= {"accuracy", "groups", "valid_loss", "valid_accuracy"}
    convert_checkpoint(learnable / "run", learnable / "hf", "hf")
    model = st.SentenceTransformer(str(learnable / "hf"), device="cpu")
    one, same, other = model.encode(["the dogs", "the rain", "sat far"])
    assert np.linalg.norm(one) == pytest.approx(1, rel=1e-5)
    assert one @ same > one @ other


def test_rerankers_are_what_sentence_transformers_loads(folder: Path) -> None:
    st = pytest.importorskip("sentence_transformers")
    convert_checkpoint(folder / "BertForSequenceClassification1", folder / "mega", "mega")
    convert_checkpoint(folder / "mega", folder / "reranker", "hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "reranker" / name).write_bytes((folder / "tok" / name).read_bytes())
    model = st.CrossEncoder(str(folder / "reranker"), device="cpu")
    assert model.predict([("the cat", "a mat"), ("the cat", "two dogs")]).shape == (2,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"objective": {"kind": "cross_entropy"}}, r"objective\.kind = 'cross_entropy': must be classify"),
        ({"data": {"train": "x"}}, r"data\.kind = 'text': must be labels"),
        ({"model": {}}, r"objective\.kind = 'classify': requires model\.task_head"),
        ({"objective": {}, "model": {}}, r"data\.kind = 'labels': requires objective\.kind = classify or contrastive"),
        ({"objective": {"kind": "classify", "loss": "mse"}}, r"objective\.loss = 'mse': requires model\.task_head\.labels = 1"),
        ({"objective": {"kind": "classify", "dimensions": [4]}}, r"objective\.dimensions = \[4\]: has no effect"),
        ({"model": {"task_head": {"names": ["a"]}}}, r"model\.task_head\.names = \['a'\]: must have one name per label"),
        ({"model": {"task_head": {"pooling": "mean"}}}, r"pooling = 'mean': requires kind: embedding"),
        ({"eval": {"tasks": ["x"], "every": 1}}, r"eval\.tasks = .*: is not supported with model\.task_head"),
    ],
)  # fmt: skip
def test_conflicting_settings_are_named(changed: dict[str, Any], message: str) -> None:
    model = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 11}
    head = {"task_head": {"labels": 3}}
    raw: dict[str, Any] = {"data": {"train": "x", "kind": "labels"}, "objective": {"kind": "classify"}, **changed}
    with pytest.raises(ConfigError, match=message):
        RunConfig.parse({**raw, "model": {**model, **changed.get("model", head)}})


def test_a_label_that_the_head_lacks_is_named(folder: Path, tmp_path: Path) -> None:
    raw = settings(folder, "bert", tmp_path)
    raw["model"]["task_head"] = {"labels": 2}
    raw["init_from"] = None
    with pytest.raises(DataError, match=r"requires labels from 0 to 1, found 2"):
        step(raw)
