"""Fill build/docs, the source of the documentation site: the pages under docs/ and the pages that are generated from the code.

`make docs` runs this script, then builds the site from build/docs by mkdocs.yml.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from mega_cli.main import build_typer_app
from mega_common.strict_config import build_json_schema
from mega_trainer.config.run_config import RunConfig

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "build" / "docs"
FOUR_RANKS = """
model: {preset: llama3-8b}
data: {train: data/wiki, seq_length: 4096}
parallel: {pp: 4}
batch: {micro: 1, global: 8}
precision: bf16
"""
SCHEDULES = {
    "1f1b": [],
    "interleaved": ["parallel.virtual_stages=2"],
    "zb-h1": ["parallel.schedule=zb-h1"],
    "zbv": ["parallel.schedule=zbv", "parallel.virtual_stages=2"],
    "dualpipev": ["parallel.schedule=dualpipev", "parallel.virtual_stages=2"],
}


def main() -> None:
    """Replace build/docs."""
    shutil.rmtree(TARGET, ignore_errors=True)
    shutil.copytree(ROOT / "docs", TARGET)
    pages = {
        "reference/cli.md": commands_page(),
        "reference/run-yaml.md": run_yaml_page(),
        "recipes.md": recipes_page(),
        **pictures(),
    }
    for path, content in pages.items():
        (TARGET / path).parent.mkdir(parents=True, exist_ok=True)
        (TARGET / path).write_text(content, encoding="utf-8")
    (TARGET / "recipes").mkdir()
    for recipe in sorted((ROOT / "recipes").glob("*.yaml")):
        shutil.copy(recipe, TARGET / "recipes")


def commands_page() -> str:
    """Return the page of all commands, with the text of their `--help`."""
    command = typer.main.get_command(build_typer_app())
    _format_help(command)
    return get_docs_for_click(obj=command, ctx=typer.Context(command), name="mega", title="Commands")


def _format_help(command: Any) -> None:
    """Turn the examples of a command and its subcommands into code blocks, and their short help into a full sentence."""
    command.short_help = _first_sentence(command.help or "")
    if command.epilog:
        examples = re.sub("Examples?:", "", command.epilog).replace(" | mega", "\nmega")
        lines = [line.strip() for line in examples.splitlines()]
        command.epilog = "\n".join(["```console", *filter(None, lines), "```"])
    for subcommand in getattr(command, "commands", {}).values():
        _format_help(subcommand)


def recipes_page() -> str:
    """Return recipes/README.md with its links adjusted to the site."""
    return (
        (ROOT / "recipes/README.md")
        .read_text(encoding="utf-8")
        .replace("](", "](recipes/")
        .replace("recipes/../docs/", "")
    )


def pictures() -> dict[str, str]:
    """Return the SVG files and the HTML page that `mega plan` writes, by path."""
    files = {}
    with tempfile.TemporaryDirectory() as name:
        run, out = Path(name, "run.yaml"), Path(name, "out")
        run.write_text(FOUR_RANKS)
        for schedule, settings in SCHEDULES.items():
            run_mega("plan", str(run), "--ranks=4", *(f"--set={setting}" for setting in settings), f"--draw={out}")
            files[f"pictures/{schedule}.svg"] = out.read_text()
        run_mega("plan", "recipes/llama3-70b-64.yaml", "--machine=h100", "--ranks=64", f"--html={out}")
        files["pictures/plan.html"] = out.read_text()
    return files


def run_mega(*words: str) -> None:
    """Run a mega command in this process, at the root of the repository, without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(ROOT):
        build_typer_app()(words, standalone_mode=False)


# ------------------------------------------------------------------------------------------------------------- run.yaml


def run_yaml_page() -> str:
    """Return the page of all keys of run.yaml, from the JSON schema of the configuration: one table for each section."""
    schema = build_json_schema(RunConfig)
    return "\n".join(["# run.yaml", "", "Every key of a run, with its default.", *_section("", schema, schema)])


def _section(path: str, node: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "| key | type | default | meaning |", "|---|---|---|---|")
    sections = {}
    for key, value in node.get("properties", {}).items():
        target, name, default = _resolve(value, schema), f"`{key}`", value.get("default")
        if "properties" in target:
            sections[key], default, name = target, None, f"[`{key}`](#{path.replace('.', '')}{key})"
        shown = "" if default is None else f"`{json.dumps(default)}`"
        meaning = value.get("description") or (
            _first_sentence(target.get("description", "")) if key in sections else ""
        )
        yield f"| {name} | {_type(value, schema)} | {shown} | {_cell(meaning)} |"
    for key, target in sections.items():
        full = f"{path}{key}"
        yield from ("", f"## `{full}`", "", _cell(target.get("description", "")))
        yield from _section(f"{full}.", target, schema)


def _resolve(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the definition that a property refers to, or the property itself."""
    for option in (node, *node.get("anyOf", ()), *node.get("allOf", ())):
        if "$ref" in option:
            definition: Mapping[str, Any] = schema["$defs"][option["$ref"].rpartition("/")[2]]
            return definition
    return node


def _type(node: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_type(one, schema) for one in node["anyOf"] if one.get("type") != "null"))
    target = _resolve(node, schema)
    if "enum" in target or "const" in target:
        return ", ".join(f"`{value}`" for value in target.get("enum", [target.get("const")]))
    if "properties" in target:
        return "section"
    if target.get("type") == "array":
        return f"list of {_type(target.get('items', {}), schema)}"
    return str(target.get("type", "any"))


def _first_sentence(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
