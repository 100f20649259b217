"""What the site makes as it is built, by mega's own commands: the command line's reference, run.yaml's, recipes, pictures."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from mega_cli.main import build_app
from mega_common.strict_config import json_schema
from mega_trainer.config.run_config import RunConfig

ROOT = Path(__file__).parent.parent
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
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that are made."""
    made = {
        "reference/cli.md": command_line(),
        "reference/run-yaml.md": settings(),
        "recipes.md": recipes(),
        **pictures(),
    }
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        files.append(File.generated(config, f"recipes/{path.name}", abs_src_path=str(path)))
    return files


def command_line() -> str:
    """Every command with its options, as `--help` tells them."""
    command = typer.main.get_command(build_app())
    _for_a_page(command)
    return get_docs_for_click(obj=command, ctx=typer.Context(command), name="mega", title="Commands")


def _for_a_page(command: Any) -> None:
    """Examples, which the terminal shows as paragraphs, as blocks of code; in lists of commands a whole sentence."""
    command.short_help = _sentence(command.help or "")
    if command.epilog:
        lines = [
            line.strip() for line in re.sub("Examples?:", "", command.epilog).replace(" | mega", "\nmega").splitlines()
        ]
        command.epilog = "\n".join(["```console", *filter(None, lines), "```"])
    for inner in getattr(command, "commands", {}).values():
        _for_a_page(inner)


def recipes() -> str:
    """The recipes' own page, whose links lead to the files beside it."""
    return (ROOT / "recipes/README.md").read_text(encoding="utf-8").replace("](", "](recipes/")


def pictures() -> dict[str, str]:
    """What `mega plan` draws and writes."""
    made = {}
    with tempfile.TemporaryDirectory() as name:
        run, out = Path(name, "run.yaml"), Path(name, "out")
        run.write_text(FOUR_RANKS)
        for picture, changes in SCHEDULES.items():
            mega("plan", str(run), "--ranks=4", *(f"--set={change}" for change in changes), f"--draw={out}")
            made[f"pictures/{picture}.svg"] = out.read_text()
        mega("plan", "recipes/llama3-70b-64.yaml", "--machine=h100", "--ranks=64", f"--html={out}")
        made["pictures/plan.html"] = out.read_text()
    return made


def mega(*words: str) -> None:
    """A command of ours, in this process, without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(ROOT):
        build_app()(words, standalone_mode=False)


# ------------------------------------------------------------------------------------------------------------- run.yaml


def settings() -> str:
    """A table for each section of run.yaml, from the schema that `mega train --schema` prints."""
    schema = json_schema(RunConfig)
    return "\n".join(["# run.yaml", "", "Every key of a run, with its default.", *_section("", schema, schema)])


def _section(path: str, node: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "| key | type | default | |", "|---|---|---|---|")
    inner = {}
    for key, value in node.get("properties", {}).items():
        found, name, default = _resolved(value, schema), f"`{key}`", value.get("default")
        if "properties" in found:
            inner[key], default, name = found, None, f"[`{key}`](#{path.replace('.', '')}{key})"
        shown = "" if default is None else f"`{json.dumps(default)}`"
        told = value.get("description") or (_sentence(found.get("description", "")) if key in inner else "")
        yield f"| {name} | {_type(value, schema)} | {shown} | {_cell(told)} |"
    for key, found in inner.items():
        full = f"{path}{key}"
        yield from ("", f"## `{full}`", "", _cell(found.get("description", "")))
        yield from _section(f"{full}.", found, schema)


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section that a key holds, if it is one."""
    for one in (node, *node.get("anyOf", ()), *node.get("allOf", ())):
        if "$ref" in one:
            found: Mapping[str, Any] = schema["$defs"][one["$ref"].rpartition("/")[2]]
            return found
    return node


def _type(node: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_type(one, schema) for one in node["anyOf"] if one.get("type") != "null"))
    found = _resolved(node, schema)
    if "enum" in found or "const" in found:
        return ", ".join(f"`{value}`" for value in found.get("enum", [found.get("const")]))
    if "properties" in found:
        return "section"
    if found.get("type") == "array":
        return f"list of {_type(found.get('items', {}), schema)}"
    return str(found.get("type", "any"))


def _sentence(text: str) -> str:
    """The first one."""
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
