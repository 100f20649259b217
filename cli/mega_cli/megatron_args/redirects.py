"""Redirections of a script: what its commands read, and what they write to files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mega_cli.megatron_args.conditions import Truth
from mega_cli.megatron_args.syntax import text_of, written

if TYPE_CHECKING:
    from tree_sitter import Node

    from mega_cli.megatron_args.script import Reader


def follow_redirected(reader: Reader, node: Node) -> Truth:
    """`command < file > file`, `command <<EOF`."""
    body, before = node.child_by_field_name("body"), reader.entered
    redirects = [child for child in node.named_children if child.type.endswith("_redirect")]
    heredocs = [child for child in redirects if child.type == "heredoc_redirect"]
    redirects += [inner for child in heredocs for inner in child.children_by_field_name("redirect")]
    further = [inner for child in heredocs for inner in child.named_children if inner.type == "pipeline"]
    after = [inner for child in heredocs for inner in child.children_by_field_name("right")]
    for redirect in redirects:
        enter(reader, redirect)
    writing = next(filter(None, map(written, redirects)), None)
    try:
        if body is None:
            return True
        if writing is None and not further:
            return reader.block([body, *after])
        text, status = reader.captured(lambda: reader.statement(body))
        if writing is not None and text is not None:
            name = reader.words.text(writing.named_children[-1])
            reader.script.write(name, text, append=writing.children[0].type == ">>")
        reader.entered = text
        return reader.block([*further, *after]) if further or after else status
    finally:
        reader.entered = before


def enter(reader: Reader, redirect: Node) -> None:
    """Take up what a command reads."""
    if redirect.type == "herestring_redirect":
        reader.entered = reader.words.text(redirect.named_children[-1]) + "\n"
    elif redirect.type == "heredoc_redirect":
        body = next((child for child in redirect.named_children if child.type == "heredoc_body"), None)
        start = next(text_of(child) for child in redirect.named_children if child.type == "heredoc_start")
        literal = re.search(r"[\"'\\]", start)
        text = "" if body is None else reader.words.heredoc(body, literal=literal is not None)
        reader.entered = re.sub(r"(?m)^\t+", "", text) if redirect.children[0].type == "<<-" else text
    elif redirect.children[0].type == "<":
        reader.entered = reader.script.file(reader.words.text(redirect.named_children[-1]))
