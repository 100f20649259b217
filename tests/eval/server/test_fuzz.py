"""Bodies drawn from the server's own description of itself, right ones and wrong ones: no 5xx, no wrong one accepted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from serving import Scripted, service_of, serving

from mega_data.tokenizer import train_tokenizer

KEY = "sk-tiny-key"
CHECKS = [
    not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance,
    negative_data_rejection,
]  # fmt: skip
BODIES = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["some text"], 260, folder)
    (folder / "chat_template.jinja").write_text("{% for one in messages %}{{ one.role + one.content }}{% endfor %}")
    engine = Scripted()
    engine.go.set()
    with serving(service_of(engine, folder, max_length=64), key=KEY, max_body=10**7) as (url, _):
        yield schemathesis.openapi.from_url(f"{url}/openapi.json", headers={"authorization": f"Bearer {KEY}"})


@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.long)])
def test_bodies_of_all_kinds(api: Any, examples: int) -> None:
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) == 17
    for operation in operations:
        for mode in GenerationMode:
            with contextlib.suppress(Unsatisfiable):  # what takes nothing can be given nothing wrong
                _try(operation, mode, examples)


def _try(operation: Any, mode: GenerationMode, examples: int) -> None:
    @settings(BODIES, max_examples=examples)
    @given(operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        case.call_and_validate(headers={"authorization": f"Bearer {KEY}"}, checks=CHECKS, timeout=60)

    run()
