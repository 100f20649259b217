"""Launch scripts that ask for endless work come to an end: followed, or refused with one sentence."""

from __future__ import annotations

import pytest

from mega_cli.megatron_args.brace_expansion import expand_shell_braces
from mega_cli.megatron_args.shell_patterns import apply_shell_parameter_expansion, search_extended_regex
from mega_cli.megatron_args.shell_words import CharacterBudget, WordPiece, make_unknown_placeholder, split_on_blanks
from mega_cli.megatron_args.training_command import find_training_command
from mega_common.errors import ConfigError

TRAIN = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --save out"
FOLLOWED = {
    "alternations under a star": "X=" + "a" * 40 + "!\n[[ $X =~ ^(a+)+$ ]] && Y=1\n" + TRAIN,
    "optional parts a thousand times": "X=" + "a" * 5000 + "!\n[[ $X =~ ^(a|aa)+(a?){1000}$ ]] && Y=1\n" + TRAIN,
    "repetitions of repetitions": "X=a\n[[ $X =~ ((a{1,1000}){1,1000}){1,1000}b ]] && Y=1\n" + TRAIN,
    "stars of a pattern": "X=" + "a" * 20000 + "\n[[ $X == *a*a*a*a*a*a*a*a*b ]] && Y=1\n" + TRAIN,
    "stars of a case": "X=" + "a" * 20000 + "\ncase $X in *a*a*a*a*a*a*a*b) Y=1;; esac\n" + TRAIN,
    "stars of a replacement": "X=" + "a" * 20000 + "\n" + TRAIN + " --x ${X//a*a*a*a*a*a*a*b/}",
    "stars of a suffix": "X=" + "a" * 20000 + "\n" + TRAIN + " --x ${X%%*a*a*a*a*b*}",
    "open braces": TRAIN + " --x " + "{" * 20000,
    "braces in braces": TRAIN + " --x " + "{a," * 100 + "b" + "}" * 100,
    "towers of powers": TRAIN + " --seed $(( 9**9**9**9 ))",
    "products": "X=9\n" + "X=$((X*X))\n" * 100 + TRAIN,
    "a width of printf": "X=$(printf %1000000000d 1)\n" + TRAIN,
    "rows of printf": "X=" + "a" * 1000 + '\nY=$(printf "$X%s" {1..5000})\n' + TRAIN,
    "a long seq": "X=$(seq 1 99999999999999999999999)\n" + TRAIN,
    "a long range of tr": "X=$(echo a | tr '\x02-\U0010ffff' b)\n" + TRAIN,
}
REFUSED = {
    "a loop without end": "while true; do X=x$X$X; done\n" + TRAIN,
    "braces thirty times": TRAIN + " --x " + "{a,b}" * 30,
    "a range of numbers": TRAIN + " --x {1..999999999999}{1..999999999999}",
    "a range of long words": "X=" + "x" * 10000 + "\n" + TRAIN + " --x {1..10000}$X$X$X",
    "a list twice as long each round": 'X=(a)\nfor i in {1..60}; do X+=("${X[@]}"); done\n' + TRAIN,
    "arguments twice as many each round": 'set -- a\nfor i in {1..60}; do set -- "$@" "$@"; done\n' + TRAIN,
    "a text many times": "X=" + "a" * 100000 + "\n" + TRAIN + " --x " + "$X" * 2000,
    "replacements by a long text": "X=" + "a" * 5000 + "\n" + TRAIN + " --x ${X//a/$X$X$X}",
    "files that grow": "X=" + "a" * 100000 + "\nfor i in {1..200}; do echo $X$X >> f; done\n" + TRAIN,
    "a function that calls itself thrice": "f() { f; f; f; }\nf\n" + TRAIN,
    "an eval of itself": 'X=\'X="$X;$X"; eval "$X"\'\neval "$X"\n' + TRAIN,
    "variables of variables": "\n".join(f"{a}={b}+{b}" for a, b in zip("ABCDEFGHIJKLMNOPQRSTUVWXY", "BCDEFGHIJKLMNOPQRSTUVWXYZ", strict=True))
    + "\nZ=1\n" + TRAIN + " --seed $((A))",
    "parentheses": "(" * 5000 + TRAIN + ")" * 5000,
    "a script of a megabyte": "X=1\n" * 250_000 + TRAIN,
    "marks of our own": "X=" + "\ue000" * 1000 + "\n" + TRAIN,
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_script_that_could_take_endless_time_is_followed(name: str) -> None:
    assert find_training_command(FOLLOWED[name]).program == "pretrain_gpt.py"


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_makes_endless_text_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="launch script"):
        find_training_command(REFUSED[name])


@pytest.mark.parametrize(
    ("word", "made"),
    [
        ("a{b,c}d", "abd acd"), ("{a,b}{1..3}", "a1 a2 a3 b1 b2 b3"), ("{a,{b,c}", "{a,b {a,c"), ("{x{a,b}}", "{xa} {xb}"),
        ("{01..03}", "01 02 03"), ("{3..1}", "3 2 1"), ("{a..e..2}", "a c e"), ("{a,b},{c,d}", "a,c a,d b,c b,d"), ("{}", "{}"),
        ("{a}", "{a}"), ("a}b{c,d}", "a}bc a}bd"), ("{a,}x", "ax x"), ("{1..x}", "{1..x}"), ("{{a,b},c}", "a b c"),
    ],
)  # fmt: skip
def test_braces_expand_as_in_bash(word: str, made: str) -> None:
    words = expand_shell_braces([WordPiece(word, "plain", 1)], CharacterBudget().spend_characters)
    assert " ".join("".join(piece.text for piece in pieces if piece) for pieces in words) == made


@pytest.mark.parametrize(
    ("text", "operator", "pattern", "kept"),
    [
        ("a/b/c.sh", "#", "*/", "b/c.sh"), ("a/b/c.sh", "##", "*/", "c.sh"), ("a/b/c.sh", "%", "/*", "a/b"), ("a/b/c.sh", "%%", "/*", "a"),
        ("a.b.c", "%", ".[bc]", "a.b"), ("a1b22", "%%", "[[:digit:]]*", "a"), ("abc", "#", "x*", "abc"), ("aXbXc", "##", "?*X", "c"),
        ("a-b-c", "//", "-/_", "a_b_c"), ("a-b-c", "/", "-/_", "a_b-c"), ("aab", "/#", "a/x", "xab"), ("abb", "/%", "b/x", "abx"),
        ("abcabc", "//", "b*c/", "a"), ("a b", "//", "[[:space:]]/", "ab"),
    ],
)  # fmt: skip
def test_patterns_cut_and_replace_as_in_bash(text: str, operator: str, pattern: str, kept: str) -> None:
    assert (
        apply_shell_parameter_expansion(
            text, operator, [WordPiece(pattern, "plain", 1)], CharacterBudget().spend_characters
        )
        == kept
    )


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("^[0-9]+$", "12", True),
        ("^[[:alpha:]]+$", "a1", False),
        ("a|b", "xb", True),
        ("(a)\\1", "aa", None),
        ("(", "a", None),
    ],
)
def test_conditions_match_posix_expressions(pattern: str, text: str, found: bool | None) -> None:
    assert search_extended_regex(pattern, text) is found


def test_blanks_in_a_mark_part_nothing() -> None:
    mark = make_unknown_placeholder("(date +%s)")
    assert split_on_blanks(f"a {mark}b  {mark}") == ["a", f"{mark}b", mark]
