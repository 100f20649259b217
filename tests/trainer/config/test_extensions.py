"""Loading of extensions, and what is reported if one cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from extension_cases import EXAMPLES, SIZES

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.config.extensions import load_extensions, load_model_extensions
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.extend import compute_logits

MIXER = str(EXAMPLES / "differential_attention.py")
HEAD = "from mega_trainer.extend import Block, BlockTraits, Extension, Objective, NoOptions, Schedule\n"
MINE = "EXTENSION = Extension(name='x', version='1', api=1, "
MEAN = (
    "import torch\nfrom torch import nn\nclass Mean(nn.Module):\n    def __init__(self, build, layer, options):\n"
    "        super().__init__()\n        {}\n    def forward(self, x, context):\n        return {}\n"
    f"{MINE}mixers={{{{'mean': Block(Mean)}}}})"
)
OWN = MEAN.format("self.w = build.build_replicated(f'model.layers.{layer}.mean', (2,))", "x")


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(HEAD + text)
    return str(folder / name)


def parse(**raw: Any) -> RunConfig:
    return RunConfig.parse(resolve_run_config({"model": {**SIZES, "num_layers": 2}, "data": {"train": "none"}, **raw}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "loading it raised ZeroDivisionError: division by zero (mine.py, line 2)"),
        ("import json; json.loads('{')", "line 1 column 2 (char 1) (mine.py, line 2)"),
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "loading it raised SystemExit: 3 (mine.py, line 2)"),
        ("EXTENSIONS = 1", "must have a constant EXTENSION"),
        ("EXTENSION = Extension(name='x', version='1', api=99)", "was written for version 99"),
        ("EXTENSION = Extension(name='x', version='1', api=0)", "update the extension"),
        (MINE + "objectives={'dpo': Objective(print)})", "the name 'dpo' in objectives is already used by mega"),
        (
            MINE + "mixers={'x': Block(lambda build, layer: 0)})",
            "mixers['x'].build must be a function with the arguments (build, layer, options), found <lambda>(build, layer)",
        ),
        (
            "def declare(model): pass\n" + MINE + "mixers={'x': Block(print, declares=declare)})",
            "found declare(model)\n  write def declare(model, options)",
        ),
        (
            MINE + "mixers={'x': Block(print, dict)})",
            "mixers['x'].options must be a subclass of StrictConfig, found <cl",
        ),
        (
            MINE + "schedules={'x': Schedule(lambda done: 1)})",
            "schedules['x'].share must be a function with the arguments",
        ),
        (
            MINE + "mixers={'y': Block(print)}, feed_forwards={'y': Block(print)})",
            "'y' in feed_forwards is already used by x in",
        ),
        (MINE + "schedules={'x': Schedule(1)})", "(done, *, options), found 1"),
    ],
)
def test_an_extension_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_extensions([write(tmp_path, text)])
    assert words in str(error.value)


def test_an_extension_for_the_version_before_runs_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path, "EXTENSION = Extension(name='x', version='1', api=1)")
    monkeypatch.setattr("mega_common.extension_loader.EXTENSION_API", 2)
    assert load_extensions([file]).versions == {"x": "1"}
    assert "was written for version 1 of mega's interfaces; the next version will refuse it" in caplog.text


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("./nowhere.py", "no such file"),
        ("no_such_module", "neither installed nor a module"),
        ("tests/", "no such file"),
    ],
)
def test_a_missing_extension(reference: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        load_extensions([reference])


def test_two_extensions_with_one_name(tmp_path: Path) -> None:
    text = "EXTENSION = Extension(name={!r}, version='1', api=1, schedules={{'flat': Schedule(print)}})"
    files = [write(tmp_path, text.format(name), f"{name}.py") for name in "ab"]
    with pytest.raises(ConfigError, match="'flat' in schedules is already used by a"):
        load_extensions(files)
    assert parse(extensions=files[0]).registry.versions == {"a": "1"}  # one needs no list
    assert load_extensions([files[0], files[0]]).versions == {"a": "1"}


def test_a_package_with_modules_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "def share(done, *, options): return 0.5", "pack/parts.py")
    write(
        tmp_path,
        "from .parts import share\n"
        "EXTENSION = Extension(name='p', version='2', api=1, schedules={'half': Schedule(share)})",
        "pack/__init__.py",
    )
    config = parse(extensions=[str(tmp_path / "pack")], lr_schedule={"name": "half", "warmup_steps": 1})
    curve = config.build_lr_curve()
    assert [curve(0), curve(8), curve(16)] == [0, config.optimizer.lr / 2, config.optimizer.lr / 2]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"objective": {"kind": "cross_entrpy"}}, "set objective.kind=cross_entropy"),
        ({"optimizer": {"name": "adam2"}}, "must be adamw, "),
        ({"optimizer": {"options": {"a": 1}}}, "optimizer.options: has no effect with optimizer.name = adamw"),
        ({"lr_schedule": {"name": "flat"}}, "lr_schedule.name = 'flat'"),
        ({"data": {"train": "none", "kind": "mine"}}, "data.kind = 'mine'"),
        ({"callbacks": {"mine": {}}}, "callbacks.mine: must be one that an extension adds"),
        ({"model": {**SIZES, "num_layers": 1, "mixers": {"differential": {}}}}, "requires an extension with a "),
        (
            {"extensions": [str(EXAMPLES / "z_loss.py")], "objective": {"kind": "z_loss", "options": {"weigth": 1}}},
            "objective.options.weigth: unknown key -> did you mean 'weight'?",
        ),
        (
            {"extensions": [MIXER], "model": {**SIZES, "mixers": {"differential": {"lambda": 1}}, "layers": ["mlp"]}},
            "model.mixers.differential.lambda: unknown key",
        ),
        (
            {"extensions": [MIXER], "model": {**SIZES, "mixers": {"differential": 8}, "layers": ["differential"]}},
            "model.mixers.differential = 8 must be a section",
        ),
        ({"extensions": [MIXER], "model": {**SIZES, "layers": [{"times": 2, "of": 3}, 4]}}, "model.layers"),
        ({"extensions": [MIXER], "model": {**SIZES, "mixers": {3: {}}, "layers": ["mlp"]}}, "3"),
        ({"model": {**SIZES, "mixers": "mine"}}, "model.mixers = 'mine' must be a section\n  mixers: {NAME: {...}}"),
        (
            {"extensions": [MIXER], "model": {**SIZES, "mixers": {"diferential": {}}, "layers": ["differential"]}},
            "model.mixers: the extensions of this run have no 'diferential' there\n  did you mean 'differential' of model.mixers?",
        ),
        (
            {"extensions": [MIXER], "model": {**SIZES, "feed_forwards": {"differential": {}}, "layers": ["mlp"]}},
            "have no 'differential' there\n  did you mean 'differential' of model.mixers?",
        ),
        (
            {"extensions": [MIXER], "model": {**SIZES, "layers": [{"times": 2, "of": ["diferential+mlp"]}]}},
            "model.layers: the extensions of this run have no 'diferential' there\n  did you mean 'differential' of model.mixers?",
        ),
    ],
)
def test_settings_that_no_extension_accepts(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**raw)
    assert words in str(error.value)


def differential(**more: Any) -> RunConfig:
    model = {**SIZES, "mixers": {"differential": {}}, "layers": ["differential+mlp", "attention+mlp"]}
    return parse(extensions=[MIXER], model=model, **more)


def test_a_declared_mixer_is_data_that_needs_no_code() -> None:
    config = differential()
    saved = ModelConfig.parse(config.model.model_dump(mode="json"))
    assert saved.heads_by_mixer == {"attention": (8, 8), "differential": (4, 4)}
    assert RunConfig.parse(config.model_dump(mode="json", by_alias=True)) == config
    again = resolve_run_config(config.model_dump(mode="json", by_alias=True))  # of a run folder's run.yaml
    assert RunConfig.parse(again) == config


def test_degrees_that_do_not_split_its_heads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="and 4 differential heads"):
        differential(parallel={"tp": 8})
    model = {**SIZES, "mixers": {"mean": {}}, "layers": ["mean+mlp"]}
    with pytest.raises(ConfigError, match=r"requires blocks that compute their part .* mean declares that it does not"):
        parse(extensions=[write(tmp_path, OWN)], model=model, parallel={"cp": 2})
    for traits, parallel, words in (
        ("", {"cp": 2}, "mean declares that it does not"),
        ("heads=3, context_parallel=True", {"tp": 2, "cp": 2}, "parallel.tp = 2"),
    ):
        declared = f"Block(Mean, declares=lambda model, options: BlockTraits({traits}))"
        of_feed = OWN.replace("mixers={'mean': Block(Mean)}", f"feed_forwards={{'mean': {declared}}}")
        feed = {**SIZES, "feed_forwards": {"mean": {}}, "layers": ["attention+mean"]}
        file = write(tmp_path, of_feed, f"feed{len(traits)}.py")
        with pytest.raises(ConfigError, match=words):
            parse(extensions=[file], model=feed, parallel=parallel)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("self.w = nn.Parameter(torch.zeros(2))", "was not made by the builder"),
        ("self.w = build.build_replicated('mean', (2,))", "must be named model.layers.N.NAME"),
        ("self.w = build.config.nothing", r"mean in model.mixers raised AttributeError: .* \(mine.py, line 7\)"),
        ("self.w = nn.Linear(2, 'x')", r"mean in model.mixers raised TypeError: [\s\S]* \(mine.py, line 7\)"),
        (
            "self.a, self.b = (build.build_replicated(f'model.layers.{layer}.a', (2,)) for _ in range(2))",
            "two parameters are named model.layers.N.a",
        ),
        ("self.w = build.build_replicated('model.layers.0.mean', (2,))", "with the number of its layer, here 1"),
        ("self.register_buffer('w', torch.ones(2))", "mean in model.mixers: the buffer w would not be saved"),
        ("self.forward = lambda x: x", r"its method forward must be a function with the arguments \(x, context\)"),
        (
            "self.w = build.build_row_linear(f'model.layers.{layer}.mlp.up_proj', 8, bias=False)",
            "two tensors are named model",
        ),
    ],
)
def test_a_block_that_does_not_follow_the_rules(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(extensions=[write(tmp_path, MEAN.format(body, "x"))], model={**SIZES, "layers": ["mlp", "mean+mlp"]})


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("None", "found NoneType"),
        ("(x, x)", "found tuple"),
        ("x[..., :2]", r"its input, \[1, 4, 32\] torch.float64, found \[1, 4, 2\] torch.float64"),
        ("x.float()", r"found \[1, 4, 32\] torch.float32"),
    ],
)
def test_a_block_that_returns_another_shape(tmp_path: Path, result: str, words: str) -> None:
    run = {"extensions": [write(tmp_path, MEAN.format("pass", result))], "model": {**SIZES, "layers": ["mean"]}}
    with pytest.raises(ConfigError, match=rf"extension x: mean in model.mixers must return .*{words}"):
        compute_logits(run, torch.arange(4)[None])


@pytest.mark.parametrize(
    ("traits", "words"),
    [
        ("None", "mean in model.mixers: declares returned None"),
        ("BlockTraits(heads=8, shared_heads=3)", "mean in model.mixers: shared_heads = 3 must divide heads = 8"),
    ],
)
def test_a_declaration_that_cannot_be(tmp_path: Path, traits: str, words: str) -> None:
    text = OWN.replace("Block(Mean)", f"Block(Mean, declares=lambda model, options: {traits})")
    with pytest.raises(ConfigError, match=words):
        parse(extensions=[write(tmp_path, text)], model={**SIZES, "mixers": {"mean": {}}, "layers": ["mean+mlp"]})


def test_a_run_of_another_folder_finds_its_files(tmp_path: Path) -> None:
    write(tmp_path, "EXTENSION = Extension(name='x', version='1', api=1, schedules={'flat': Schedule(print)})")
    raw = {"model": {**SIZES, "num_layers": 1}, "data": {"train": "none"}, "extensions": ["./mine.py"]}
    config = RunConfig.parse(resolve_run_config({**raw, "lr_schedule": {"name": "flat"}}, base=tmp_path))
    assert config.registry.versions == {"x": "1"}


def test_a_saved_model_never_loads_code_by_a_name_it_gives(tmp_path: Path) -> None:
    model = differential().model
    with pytest.raises(ConfigError, match="requires the extension 'differential-attention'"):
        load_model_extensions(model, [], "runs/a")
    assert set(load_model_extensions(model, [MIXER], "runs/a").make_block_factories(model)) == {"differential"}


def test_installed_extensions_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    from mega_common import extension_loader

    found = load_extensions([MIXER]).extensions[0]
    point = importlib.metadata.EntryPoint(found.name, "nowhere", "mega.extensions")
    monkeypatch.setattr(extension_loader, "entry_points", lambda group: [point] if group == "mega.extensions" else [])
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: found)
    assert load_extensions([found.name]).versions == {found.name: "1.0"}
    assert load_model_extensions(differential().model, [], "runs/a").versions == {found.name: "1.0"}
