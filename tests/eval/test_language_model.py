from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import BASE, save_tiny, variant

from mega_ckpt.families import find_family_by_name
from mega_ckpt.store import save_sharded_checkpoint
from mega_common.errors import ConfigError, DataError
from mega_common.model_config import ModelConfig
from mega_data.tokenizer import train_tokenizer
from mega_eval.drafters import NgramDrafter, choose_default_drafter
from mega_eval.language_model import LanguageModel
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.run.train_state import collect_stage_weights

EXAMPLE = Path(__file__).parents[2] / "examples/python/ask.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    words = train_tokenizer(["the end of the story"] * 3, 270, folder)
    config = variant("grouped").model_copy(update={"vocab_size": words.vocab_size})
    save_tiny(folder, find_family_by_name("llama"), config, dtype=torch.float64)
    (folder / "generation_config.json").write_text(
        '{"repetition_penalty": 1.5, "temperature": 7.0, "do_sample": false}'
    )
    return folder


def test_it_loads_generates_streams_and_scores(folder: Path):
    model = LanguageModel.load(folder, precision="fp64", device="cpu")
    assert model.settings == {"repetition_penalty": 1.5}
    one, two = model.generate(["the end", "of"], max_new_tokens=9, logprobs=0)
    assert "".join(model.stream("the end", max_new_tokens=9)) == one.text
    assert model.generate([model.tokenizer.encode("of")], max_new_tokens=9)[0].tokens == two.tokens
    (free,) = model.generate(["the end"], max_new_tokens=9, logprobs=0, repetition_penalty=1.0)
    (scored,) = model.score([model.tokenizer.decode(free.tokens)], contexts=["the end"])
    if model.tokenizer.encode(model.tokenizer.decode(free.tokens)) == free.tokens:
        assert scored.greedy
        assert scored.logprobs == pytest.approx([token.logprob for token in free.scored], abs=1e-9)
    assert [len(one.logprobs) for one in model.score(["the end of"])] == [len(model.tokenizer.encode("the end of")) - 1]


def test_a_chat_is_its_templates_text(folder: Path):
    pytest.importorskip("transformers", reason="renders templates")
    with pytest.raises(DataError):
        LanguageModel.load(folder).chat([{"role": "user", "content": "the end"}])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message.content }} of{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    model = LanguageModel.load(folder, draft="ngrams")
    answer = model.chat([{"role": "user", "content": "the end"}], max_new_tokens=5)
    assert answer == model.generate([model.tokenizer.encode("the end of")], max_new_tokens=5)[0]


def test_layers_for_further_tokens_guess_where_they_are_asked_to(tmp_path: Path):
    words = train_tokenizer(["the end of the story"] * 3, 270, tmp_path / "tok")
    config = ModelConfig.parse({**BASE, "vocab_size": words.vocab_size, "mtp_layers": 1})
    whole = Decoder(LayerBuilder(config)).eval()
    initialize_weights(whole, 1)
    save_sharded_checkpoint(
        tmp_path / "model", 0, collect_stage_weights({0: whole}, prefix="weights/"), model=config, state={}
    )
    found = {
        draft: LanguageModel.load(tmp_path / "model", tokenizer=tmp_path / "tok", precision="fp64", draft=draft)
        for draft in ("mtp", "none")
    }
    assert len(found["mtp"].model.predictors) == 1
    one, other = (model.generate(["the end", "of"], max_new_tokens=20) for model in found.values())
    assert one == other
    with pytest.raises(ConfigError, match="draft = mtp is not supported with LoRA adapters"):
        LanguageModel.load(tmp_path / "model", tokenizer=tmp_path / "tok", draft="mtp", adapters={"a": "b"})


def test_guesses_are_usual_where_rounding_does_not_show(folder: Path):
    found = {
        name: choose_default_drafter(LanguageModel.load(folder, precision=name).model) for name in ("fp32", "bf16")
    }
    assert isinstance(found["fp32"], NgramDrafter)
    assert found["bf16"] is None


def test_the_example_asks_in_every_way(folder: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers", reason="renders templates")
    runpy.run_path(str(EXAMPLE))["main"](str(folder))
    lines = capsys.readouterr().out.splitlines()
    ranked = [float(line.split()[0]) for line in lines[:3]]
    assert ranked == sorted(ranked, reverse=True)
    assert all(len(line.split("  ")) == 3 for line in lines[3:8])
    assert sum(line.startswith(("length: ", "stop: ", "end: ")) for line in lines) == 2


def test_settings_that_cannot_be(folder: Path):
    model = LanguageModel.load(folder)
    with pytest.raises(ConfigError, match="temprature"):
        model.generate(["the"], temprature=1.0)
    with pytest.raises(ConfigError, match="fp31"):
        LanguageModel.load(folder, precision="fp31")


@pytest.mark.parametrize(
    "settings", [{"min_new_tokens": 1}, {"min_new_tokens": 4}, {"min_new_tokens": 6}, {"min_length": 5}]
)
def test_minimum_lengths_hold_for_every_token_that_ends_a_text(folder: Path, settings: dict[str, int]) -> None:
    model = LanguageModel.load(folder, precision="fp64", device="cpu")
    first = model.generate(["the"], max_new_tokens=9)[0].tokens[0]
    ending = replace(model, ends=frozenset({first}))
    assert ending.generate(["the"], max_new_tokens=9)[0].tokens == [first]
    found = ending.generate(["the"], max_new_tokens=9, **settings)[0].tokens
    least = settings.get("min_new_tokens") or settings["min_length"] - len(model.tokenizer.encode("the"))
    assert first not in found[:least]
