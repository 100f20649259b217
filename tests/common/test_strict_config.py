from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, PositiveInt

from mega_common.errors import ConfigError
from mega_common.strict_config import (
    ConfigProblem,
    StrictConfig,
    apply_config_overrides,
    build_json_schema,
    load_yaml_mapping,
)


class Rope(StrictConfig):
    theta: float = 1e4
    fraction: float = 1.0

    def problems(self) -> Iterator[ConfigProblem]:
        if self.fraction > 1:
            yield ConfigProblem("fraction", "must be at most 1", self.fraction, "use 1")


class Model(StrictConfig):
    layers: PositiveInt
    width: PositiveInt = 64
    heads: PositiveInt = 4
    norm: Literal["rms", "layer"] = "rms"
    rope: Rope = Rope()

    def problems(self) -> Iterator[ConfigProblem]:
        if self.width % self.heads:
            yield ConfigProblem("width", f"must be a multiple of heads = {self.heads}", self.width)


class Source(StrictConfig):
    path: str
    weight: float = Field(1.0, gt=0)


class Run(StrictConfig):
    model: Model
    data: list[Source] = []
    extra: list[Source] | None = None
    global_: int = Field(8, alias="global")
    scale: int | bool | list[int] = 1

    def problems(self) -> Iterator[ConfigProblem]:
        if self.global_ % 2:
            yield ConfigProblem("global", "must be even", self.global_)


def find_messages(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Run.parse(raw, source="run.yaml")
    first, *lines = str(caught.value).splitlines()
    assert first == f"run.yaml: {len(lines)} problem{'s' * (len(lines) != 1)}"
    return [line.strip() for line in lines]


def test_a_valid_configuration_is_built_and_frozen() -> None:
    run = Run.parse({"model": {"layers": 2}, "data": [{"path": "a"}], "global": 4})
    assert (run.model.layers, run.data[0].weight, run.global_) == (2, 1.0, 4)
    with pytest.raises(ValueError, match="frozen"):
        run.global_ = 3


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"modle": 1}, "modle: unknown key -> did you mean 'model'?"),
        ({"globa": 1}, "globa: unknown key -> did you mean 'global'?"),
        ({"model": {"layers": 1, "widht": 8}}, "model.widht: unknown key -> did you mean 'width'?"),
        ({"model": {"layers": 1, "rope": {"tehta": 1}}}, "model.rope.tehta: unknown key -> did you mean 'theta'?"),
        ({"data": [{"path": "a", "wieght": 1}]}, "data.0.wieght: unknown key -> did you mean 'weight'?"),
        ({"extra": [{"path": "a", "wieght": 1}]}, "extra.0.wieght: unknown key -> did you mean 'weight'?"),
        ({"zzz": 1}, "zzz: unknown key -> known keys: data, extra, global, model, scale"),
        ({"layers": 1}, "layers: unknown key -> did you mean model.layers?"),
    ],
)
def test_an_unknown_key_names_the_nearest(raw: dict[str, Any], line: str) -> None:
    assert line in find_messages({"model": {"layers": 1}, **raw})


def test_values_and_rules_are_told_with_what_stands_there() -> None:
    lines = find_messages({"model": {"width": "wide", "norm": "max"}, "data": [{"path": "a", "weight": -1}]})
    assert lines == [
        "model.layers: is required",
        "model.width = 'wide': must be a whole number",
        "model.norm = 'max': must be 'rms' or 'layer'",
        "data.0.weight = -1: must be greater than 0",
    ]


def test_a_value_that_fits_no_member_of_a_union_is_told_once() -> None:
    (line,) = find_messages({"model": {"layers": 1}, "scale": "x"})
    assert line.startswith("scale = 'x': must be a whole number")
    assert line.endswith("or must be a list")


def test_rules_of_all_sections_are_told_beside_unknown_keys() -> None:
    lines = find_messages({"model": {"layers": 1, "width": 10, "rope": {"fraction": 2}}, "global": 3, "junk": 1})
    assert lines == [
        "junk: unknown key -> known keys: data, extra, global, model, scale",
        "global = 3: must be even",
        "model.width = 10: must be a multiple of heads = 4",
        "model.rope.fraction = 2.0: must be at most 1 -> use 1",
    ]


def test_rules_of_valid_sections_are_told_beside_bad_values_anywhere() -> None:
    lines = find_messages({"model": {"layers": 0, "rope": {"fraction": 2}}})
    assert lines == [
        "model.layers = 0: must be greater than 0",
        "model.rope.fraction = 2.0: must be at most 1 -> use 1",
    ]


@given(st.dictionaries(st.sampled_from(["model", "data", "global", "scale", "x"]), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["layers", "rope", "path", "weight", "fraction", "y"]), inner, max_size=3),
    max_leaves=8,
)))  # fmt: skip
def test_any_document_is_built_or_refused_readably(raw: dict[str, Any]) -> None:
    # Anything but a ConfigError fails the test.
    with contextlib.suppress(ConfigError):
        assert isinstance(Run.parse(raw), Run)


WORDS = "abnoyest:#-{}[]'\" \n~ü%&*!|>@`,?\\\t"


class TestYaml:
    def load(self, tmp_path: Path, text: str | bytes) -> dict[str, Any]:
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_yaml_mapping(path)

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("3e-4", 3e-4),
            ("1.5E+3", 1500.0),
            (".5", 0.5),
            ("-.inf", float("-inf")),
            ("1_000_000", 1_000_000),
            ("0x1f", 31),
            ("012", 12),
            ("true", True),
            ("~", None),
            ("", None),
            ("no", "no"),
            ("12:30:00", "12:30:00"),
            ("2026-01-31", "2026-01-31"),
            ("1.2.3", "1.2.3"),
        ],
    )
    def test_plain_words(self, tmp_path: Path, text: str, value: object) -> None:
        assert self.load(tmp_path, f"key: {text}") == {"key": value}

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' is given twice"),
            ("s:\n  a: 1\n  a: 1\n", "line 3: the key 'a' is given twice"),
            ("a: [1", "is not valid YAML"),
            ("? [a]\n: b", "is not valid YAML"),
            ("a: 1\nb:2\nc: 3", "line 2 has no KEY: VALUE; write a space after the colon"),
            ("a: {b: 1 c: 2}", "line 1, column 4: the { has no comma before column 11, or is not closed"),
            ("a: [1, 2\nb: 3", "line 1, column 4: the [ is not closed before line 2, or a comma is missing there"),
            ("a: 'b\nc: 1", "line 1: the quotation mark is not closed"),
            ("[a]\nb = 1\n", "line 2: a second value begins, as in JSON lines or TOML"),
            ("- 1", "must have settings as KEY: VALUE, found a list"),
            ("", "found no content"),
            ("a: !!python/object/apply:os.getcwd []", "is not valid YAML"),
            (b"\xff\xfe\xfa", "cannot be read"),
        ],
    )
    def test_refused(self, tmp_path: Path, text: str | bytes, said: str) -> None:
        with pytest.raises(ConfigError, match=r"run\.yaml") as caught:
            self.load(tmp_path, text)
        assert said in str(caught.value)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
            load_yaml_mapping(tmp_path / "none.yaml")

    @given(st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(WORDS),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(WORDS), inner, max_size=3),
        max_leaves=6,
    ))  # fmt: skip
    def test_what_yaml_writes_is_read_back(self, tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
        path = tmp_path_factory.mktemp("yaml") / "a.yaml"
        path.write_text(yaml.safe_dump({"key": value}), encoding="utf-8")
        assert load_yaml_mapping(path) == {"key": value}


class TestOverrides:
    RAW = {"batch": {"micro": 1}, "data": {"train": [{"path": "a", "weight": 1}]}, "seed": 1}

    @pytest.mark.parametrize(
        ("override", "path", "value"),
        [
            ("batch.micro=2", ("batch", "micro"), 2),
            ("optimizer.lr=3e-4", ("optimizer", "lr"), 3e-4),
            ("data.train.0.weight=0.5", ("data", "train", 0, "weight"), 0.5),
            ("data.train.0=b", ("data", "train", 0), "b"),
            ("data.split=[1, 2]", ("data", "split"), [1, 2]),
            ("seed=null", ("seed",), None),
            ("output=a=b", ("output",), "a=b"),
            ("output={", ("output",), "{"),
        ],
    )
    def test_a_value_is_set_in_a_copy(self, override: str, path: tuple[Any, ...], value: object) -> None:
        before = repr(self.RAW)
        node: Any = apply_config_overrides(self.RAW, [override])
        for part in path:
            node = node[part]
        assert node == value
        assert repr(self.RAW) == before

    def test_later_ones_win(self) -> None:
        assert apply_config_overrides(self.RAW, ["seed=2", "seed=3"])["seed"] == 3

    @pytest.mark.parametrize(
        "override", ["seed", "=1", "seed.x=1", "data.train.1.weight=1", "data.train.x=1", "data.train.0.path.y=1"]
    )
    def test_a_path_that_leads_nowhere_is_refused(self, override: str) -> None:
        with pytest.raises(ConfigError, match="--set"):
            apply_config_overrides(self.RAW, [override])


def test_json_schema_speaks_the_users_names() -> None:
    schema = build_json_schema(Run)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert "global" in schema["properties"]
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["model"]


def test_null_restores_the_default_of_a_list() -> None:
    class Lists(StrictConfig):
        labels: list[str] = ["a"]
        name: str = "x"

    assert Lists.parse({"labels": None}) == Lists()
    with pytest.raises(ConfigError, match="name: must be a text"):
        Lists.parse({"name": None})
