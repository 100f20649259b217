"""Reading scripts, compared with bash where there is one."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_cli.megatron_args.arithmetic import evaluate_bash_arithmetic
from mega_cli.megatron_args.script_reader import interpret_shell_script
from mega_cli.megatron_args.shell_words import format_unknown_placeholders
from mega_common.errors import ConfigError

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="compares with bash, which is not installed")

# No character that bash would look for files with.
TEXTS = st.text(st.sampled_from("ab0-_.,:/=+@%#\"'\\$`(){}<>|&; \t\n!"), max_size=8)
NAMES = st.sampled_from(["A", "B_2", "long_name"])


def words(script: str) -> list[str]:
    """The arguments of the command `run` in a script."""
    found = [command for command in interpret_shell_script(script).commands if command[0].text == "run"]
    return [format_unknown_placeholders(word.text) for word in found[0][1:]] if found else []


def in_bash(script: str) -> list[str]:
    assert BASH
    define = 'run() { for word in "$@"; do printf \'%s\\0\' "$word"; done; }\n'
    out = subprocess.run([BASH, "-c", define + script], capture_output=True, check=True).stdout.decode()
    return out.split("\0")[:-1]


@given(st.lists(TEXTS, max_size=5))
def test_quoted_words_come_back(texts: list[str]):
    assert words("run " + shlex.join(texts)) == texts


@given(st.dictionaries(NAMES, TEXTS), st.lists(TEXTS, max_size=4))
def test_variables_and_arrays_come_back(values: dict[str, str], items: list[str]):
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    lines += [f"LIST=(\n  {shlex.join(items)} # a comment\n)", 'LIST+=("last one")']
    lines += ['run "${LIST[@]}" ' + " ".join(f'"${name}" "x${{{name}}}y"' for name in values)]
    expected = [*items, "last one", *(text for value in values.values() for text in (value, f"x{value}y"))]
    assert words("\n".join(lines)) == expected


PIECES = st.one_of(
    st.text("-=:", min_size=1, max_size=3),  # no letters, which would belong to the name of a variable before them
    st.text("ab -$x\n", max_size=4).map(lambda text: f"'{text}'"),
    st.sampled_from(
        ['"$A"', "$A", "${A}", '"${L[@]}"', "${L[@]}", '"${L[*]}"', "${L[0]}", "${A:-d}", "${E:-d e}", '"${E:-d e}"',
         "${E-d}", "${A:+yes no}", "${E:+yes}", "${A:=z}", "$((2 * N + 1))", "${#L[@]}", '"a b"', "a\\ ", '"\\"$N\\""',
         "\\\n", "'$A'", "${E}", '""', "$E$A", "${A^^}", "${A,,}"]
    ),
)  # fmt: skip


@needs_bash
@settings(max_examples=80, deadline=None)
@given(
    st.text("ab \t\n-", max_size=6), st.lists(st.text("ab ", max_size=3), min_size=1, max_size=3),
    st.lists(st.lists(PIECES, min_size=1, max_size=3), max_size=4),
)  # fmt: skip
def test_expansion_is_that_of_bash(value: str, items: list[str], command: list[list[str]]):
    lines = [f"A={shlex.quote(value)}", "E=''", "N=7", f"L=({shlex.join(items)})"]
    script = "\n".join([*lines, "run " + " ".join("".join(pieces) for pieces in command)])
    assert words(script) == in_bash(script)


EXPRESSIONS = st.recursive(
    st.integers(0, 30).map(str) | st.sampled_from(["N", "$N", "${N}"]),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/%"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
    max_leaves=6,
)


@needs_bash
@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS, st.integers(-9, 9))
def test_arithmetic_is_that_of_bash(expression: str, number: int):
    script = f"N={number}\nrun $(({expression}))"
    found = words(script)
    if not found[0].startswith("$"):  # a division by zero stays unknown
        assert found == in_bash(script)


@pytest.mark.parametrize("expression", ["1 +", "2 ** -1", "a", "1 2", "(1", "1 ? 2", "1.5", "f(1)", "1 / 0", "'x'"])
def test_arithmetic_of_anything_else_is_unknown(expression: str):
    assert evaluate_bash_arithmetic(expression) is None


CONDITIONS = [
    '[ "$A" = x ]', '[ "$A" == "x" ]', '[[ $A == x* ]]', '[[ "$A" != x ]]', '[ -z "$A" ]', '[ -n "$A" ]', "[ $N -eq 2 ]",
    "[ $N -gt 1 -a $N -lt 3 ]", "[[ $N -ge 3 || $A == y ]]", "[[ $N -le 2 && -n $A ]]", "! [ $N -ne 2 ]", "[ ! $N -ne 2 ]",
    "[ $N = 2 ] && [ -n '' ]", "[ $N = 3 ] || [ $A = x ]", "true", "false", "test $A = x", "[ $A ]",
]  # fmt: skip


@needs_bash
@pytest.mark.parametrize("condition", CONDITIONS)
def test_conditions_are_those_of_bash(condition: str):
    for text in ("x", "y", "xy"):
        script = f"A={text}; N=2\nif {condition}; then R=yes; elif [ $N = 2 ]; then R=no\nelse R=never; fi\nrun $R"
        assert words(script) == in_bash(script)
        chain = f"A={text}; N=2; R=no\n{condition} && R=yes\nrun $R"
        assert words(chain) == in_bash(chain)


@needs_bash
@pytest.mark.parametrize(
    "script",
    [
        "S=7b\ncase $S in\n 1b|2b) L=1 ;;\n 7*) L=2;;\n *) L=3\nesac\nrun $L",
        'S=x\ncase "$S" in (a) L=1 ;; *) L=3 ;; esac\nrun $L after',
        "if [ 1 = 1 ]; then\n if [ a = b ]; then X=1; else X=2; fi\nelse X=3; fi; run $X",
        "A=1 B=2; run $A$B > /dev/stdout 2>&1",
        "cat <<EOF > /dev/null\nrun hidden 'quote\nEOF\nrun seen",
        "export A=1 B='2 3'; run $A \"$B\" # comment",
        "declare -a L=(1 2)\nL+=(3)\nrun ${L[@]} ${#L[@]} ${L[1]}",
        "A='x'\nA+=' y'\nrun $A \"$A\"",
        "run a | cat",
        "run a\\\n  b \\\n  c",
        "{ run a; }",
        "( X=1; run $X )",
        "run a#b '#c' #d",
        "if ! [ a = a ]; then X=1; else X=2; fi; run $X",
        'f() {\n  run "in f"\n}\nf',
        "run --opt='a b' --x=\"$(printf y)\" | sed 's/y$/$(printf y)/'",
    ],
)
def test_scripts_are_read_as_bash_runs_them(script: str):
    assert words(script) == in_bash(script)


def test_what_only_a_running_shell_knows_is_named():
    script = 'OUT=$1\nDIR=$(dirname "$0")\nrun $OUT/x ${HOME}/y $DIR `date` ${A##*/} "$@"'
    assert words(script) == ["$OUT/x", "$HOME/y", '$(dirname "$0")', "$(date)", "${A##*/}"]


def test_what_is_not_set_counts_as_not_set_where_that_is_asked():
    assert words('if [ -z "$X" ]; then A=1; fi\nrun $A ${X:-2} ${1:-3}') == ["1", "2", "3"]


def test_a_variable_that_is_not_set_is_empty_in_a_comparison_and_that_is_told():
    script = interpret_shell_script('A=1\nif [ "x$X" = xa ]; then A=2; else A=3; fi\nrun $A')
    assert [word.text for word in script.commands[-1]] == ["run", "3"]
    assert [line for line, text in script.remarks if "--define X=" in text] == [2]


def test_where_it_is_not_known_which_way_a_script_goes_what_differs_is_open():
    script = interpret_shell_script(
        'A=1; B=2; C="--x 1"; L=(--y)\n'
        'if [ "$1" = a ]; then A=2; C="$C --z 3"; L+=(--w); elif [ -d /y ]; then mkdir y; B=2; fi\nrun $A $B $C ${L[@]}'
    )
    assert [format_unknown_placeholders(word.text) for word in script.commands[-1]] == (
        ["run", "${A}", "2", "--x", "1", "${C}", "--y", "${L}"]
    )  # fmt: skip
    assert [line for line, _ in script.remarks] == [2]


def test_commands_of_every_way_are_found():
    script = interpret_shell_script(
        "if [ -d /y ]; then run 1; else run 2; fi; [ -f /z ] && run 3; case $1 in a) run 4;; esac"
    )
    assert [words[1].text for words in script.commands] == ["1", "2", "3", "4"]


def test_loops_that_nobody_knows_the_end_of_leave_open_what_they_set():
    script = interpret_shell_script(
        "for i in $(ls); do\n A=$i\ndone\nB=1\nwhile [ -f x ]; do\n B=2; done\nrun $A $B $i"
    )
    assert [format_unknown_placeholders(word.text) for word in script.commands[-1]] == ["run", "${A}", "${B}", "${i}"]
    assert [line for line, _ in script.remarks] == [1, 5]


def test_words_know_their_lines():
    script = interpret_shell_script('L=(\n --a 1\n\n --b 2\n)\nrun \\\n  "${L[@]}" \\\n  --c')
    assert [(word.text, word.line) for word in script.commands[0][1:]] == [
        ("--a", 2), ("1", 2), ("--b", 4), ("2", 4), ("--c", 8),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["A=1\nrun 'x", '\n\nrun "x', "run ${A", "L=(1 2", "if [ a = a ]; then A=1", "if [ a = a ]", "run )"]
)
def test_what_the_shell_would_not_understand_is_told(text: str):
    assert any("is not valid shell syntax" in sentence for _, sentence in interpret_shell_script(text).remarks)


TOKENS = [
    *"aA=$ \n\"'`\\(){}[]<>|&;#!*\ue000\ue001",
    "if", "then", "else", "fi", "case", "in", "esac", "do", "done", "for", "while", "[[", "]]", ";;", "$((", "))", "${",
]  # fmt: skip


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(TOKENS) | st.sampled_from(TOKENS).map(lambda token: f"{token} "), max_size=20).map("".join)
)
def test_any_text_is_read_or_refused(text: str):
    try:
        script = interpret_shell_script(text)
    except ConfigError:
        return
    lines = [line for line, _ in script.remarks] + [word.line for command in script.commands for word in command]
    assert all(1 <= line <= text.count("\n") + 1 for line in lines)
