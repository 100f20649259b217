"""Output of small commands in command substitutions, compared with bash itself."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from tests.cli.megatron_args.test_shell_words import in_bash, needs_bash, words

from mega_cli.megatron_args.script_reader import interpret_shell_script
from mega_cli.megatron_args.shell_words import MARK

VARIABLES = "x=a.b; n=8; L='1,2,3'; P=/a/b/c.sh\n"
FOLLOWED = [
    '$(echo "a b  c" | tr -d \' \')', "$(echo $L | tr ',' ' ')", "$(echo $L | tr , '\\n')",
    '$(echo $L | tr \',\' "\\n" | wc -l)', '$(echo "a  b" | tr -s \' \')', '$(echo "a  b" | tr -s \' \' \',\')',
    '$(echo "a b" | tr \'[:lower:]\' \'[:upper:]\')', '$(echo "A b" | tr \'[:upper:]\' \'[:lower:]\')',
    '$(echo " 8 " | tr -d \'[:space:]\')', '$(echo "x8y" | tr -dc \'0-9\')', '$(echo "x8y" | tr -cd \'[:digit:]\')',
    '$(echo "1 2" | tr \' \' \'\\n\' | head -n 1)', '$(echo -n "a" | tr a-c A-C)', "$(seq -s, 0 7)",
    "$(seq -s , 0 7)", "$(seq -s ' ' 0 7)", '$(seq -s "," 0 $((n-1)))', "$(seq --separator=, 3)", "$(seq -w 8 11)",
    "$(seq 0 2 6)", "$(seq 5 -2 1)", "$(seq 3 1)", "$(seq 0 7 | paste -sd,)", "$(seq 0 7 | paste -sd, -)",
    "$(seq 0 7 | paste -s -d,)", "$(seq 0 3 | tr '\\n' ',')", "$(seq 0 3 | tr '\\n' ',' | sed 's/,$//')",
    '$(echo "4*8" | bc)', '$(echo "$n * 2" | bc)', '$(echo "10/3" | bc)', '$(echo "-7/2" | bc)',
    '$(echo "-7%2" | bc)', '$(echo "2^10" | bc)', '$(echo "scale=2; 10/3" | bc)', '$(echo "scale=0; 10/3" | bc)',
    '$(echo "scale=4; 1/3*3" | bc)', '$(echo "1.5*2" | bc)', '$(echo "0.5+0.25" | bc)', '$(echo "1/8" | bc -l)',
    '$(echo "$n/2" | bc -l)', '$(bc <<< "4*8")', '$(bc <<< "scale=1; 7/2")',
    '$(echo "a:b:c" | awk -F: \'{print $1}\')', '$(echo "a:b:c" | awk -F \':\' \'{print $2}\')',
    '$(echo "a b c" | awk \'{print $1}\')', '$(echo "a b c" | awk \'{ print $NF }\')',
    '$(echo "a b c" | awk \'{print $1, $3}\')', '$(echo "a b c" | awk \'{print $1 $3}\')',
    '$(echo "a b c" | awk \'{print NF}\')', '$(echo "a,b,c" | awk -F, \'{print NF}\')',
    '$(echo "a,b,c" | awk -F\',\' \'{print $NF}\')', '$(echo "a,b,c" | awk -F "," \'{print $1"-"$2}\')',
    '$(echo "a b" | awk \'{print $0}\')', "$(awk 'BEGIN{print 4*8}')", "$(awk 'BEGIN {print 10/4}')",
    '$(awk "BEGIN {print $n*2}")', '$(awk "BEGIN {print int($n/3)}")', '$(echo "a.b" | awk -F. \'{print $1}\')',
    '$(echo "axxb" | awk -Fxx \'{print $2}\')', '$(awk \'{print $2}\' <<< "a b c")', '$(echo "a b c" | wc -w)',
    '$(echo -n "abc" | wc -c)', '$(echo "a,b,c" | cut -d, -f1)', '$(echo "a,b,c" | cut -d \',\' -f 2)',
    '$(echo "a,b,c" | cut -d, -f2-)', '$(echo "a,b,c" | cut -d, -f-2)', '$(echo "a,b,c" | cut -d, -f1,3)',
    '$(echo "a,b,c" | cut -d\',\' -f1-2)', '$(echo "a,b,c" | cut -f1 -d=)', '$(echo "k=v" | cut -f2 -d=)',
    '$(echo "abcdef" | cut -c1-3)', '$(echo "abcdef" | cut -c 2)', '$(echo "abcdef" | cut -c3-)',
    '$(echo "a,b,c" | cut --delimiter=, --fields=2)', '$(echo "a b" | rev)',
    '$(echo "a/b/c" | rev | cut -d/ -f1 | rev)', "$(basename $P)", "$(basename $P .sh)", "$(basename -s .sh $P)",
    "$(basename -- $P)", "$(dirname -- $P)", "$(dirname $P)", "$(dirname $P/..)", '$(basename "$(dirname "$P")")',
    '$(printf "%s," a b c)', '$(printf "%s\\n" a b | head -1)', '$(printf "%s\\n" a b | tail -1)',
    '$(printf "%s\\n" a b c | tail -n 1)', '$(printf "%.2f" 1.5)', '$(printf "%5d" 7)',
    '$(echo "a,b" | sed \'s/,/ /g\')', '$(echo "a,b" | sed -e \'s/,/ /g\')', '$(echo "a-b" | sed "s/-/_/g")',
    '$(echo "a.b" | sed \'s/\\./_/g\')', '$(echo "a/b" | sed \'s|/|_|g\')', '$(echo "abc" | sed \'s/^a//\')',
    '$(echo "abc" | sed \'s/c$//\')', '$(echo "a b" | sed \'s/ //g\')', "$(expr $n / 3)", "$(expr $n - 1)",
    "$(echo $((n/2)))", "$(echo a | cat)", "$(echo {0..3} | tr ' ' ',')", "$(echo 0,1,2 | tr ',' '\\n' | wc -l)",
    '$(echo "0,1,2" | awk -F\',\' \'{print NF}\')', '$(echo "0,1,2" | tr -cd , | wc -c)',
    '$(echo "a b" | cut -d" " -f2)', '$(echo "a b" | cut -d\' \' -f2)', '$(echo "a b" | cut -d \' \' -f2)',
    '$(echo "a	b" | cut -f2)', '$(printf -- "%s" a)', '$(printf "%.1f" 2.25)', "$(echo -e 'a\\tb')",
    '"$(echo -E \'a\\tb\')"', '"$(echo -e -E \'a\\tb\')"', '$(echo "010 + 1" | bc)', "$(expr 010 + 1)",
    "$(expr 08 + 1)", "$(expr 5)", "$(expr 7 % -2)", "$(expr -7 / 2)", "$(expr 2 '*' 3 + 1)",
    "$(expr '(' 1 + 2 ')' '*' 3)", "$(expr 9223372036854775807 + 1)", '$(echo "9223372036854775807 + 1" | bc)',
    '$(echo "1.10 * 2.250" | bc)', '$(echo "scale=2; 1.115 * 2.2" | bc)', '$(echo "0.50" | bc)',
    '$(echo "-0.5" | bc)', '$(echo "scale=3; -1/3" | bc)', '$(echo "((3+4)*2)" | bc)', '$(echo "1.0/3.0" | bc)',
    '$(echo "0*5.00" | bc)', '$(echo "10 - 3.5" | bc)', '$(echo "scale=2;10*1.5/3" | bc -l)', '$(echo "1;2" | bc)',
    "$(seq -w 8 5 10)", "$(seq -s '' 3)", "$(seq -2 1)", "$(seq 1 1 1)", "$(seq -s, 3 1)",
    '$(echo "a-b_c" | tr \'-\' \'_\')', '$(echo "a-b_c" | tr -- \'-\' \'_\')', '$(echo "a_b" | tr _ -)',
    '$(echo "[a]" | tr -d \'[]\')', '$(echo "[1, 2]" | tr -d \'[] \')', '$(echo "a.b" | tr . _)',
    '$(echo "abc" | tr a-c x)', '$(echo "abc" | tr abc xy)', '$(echo "a1b22" | tr -c \'0-9\\n\' \' \')',
    '$(echo "aabb" | tr -s ab)', '$(echo "aabb" | tr -s \'a-z\' \'A-Z\')', "$(echo 'a\\b' | tr '\\\\' /)",
    "$(echo 'a b' | tr '[:blank:]' ',')", "$(echo 'a b' | tr '[:space:]' ',')", "$(echo 'a b' | tr [:space:] ,)",
    "$(echo 'ab' | tr [a-z] [A-Z])", "$(echo 'ab' | tr --delete a)", '$(echo "a,b,c" | cut -d, -f3,1)',
    '$(echo "a,b,c" | cut -d, -f5)', '$(echo "abc" | cut -d, -f2)', '$(echo "abc" | cut -s -d, -f2)',
    '$(echo "a::c" | cut -d: -f2-3)', '$(echo "a::c" | awk -F: \'{print $3}\')',
    '$(echo " a  b " | awk \'{print $2}\')', '$(echo " a  b " | awk -F\' \' \'{print $1}\')',
    '$(echo "a|b" | awk -F\'|\' \'{print $2}\')', '$(echo "a+b" | awk -F+ \'{print $2}\')',
    '$(echo "a*b" | awk -F\'*\' \'{print $2}\')', '$(echo "a^b" | awk -F\'^\' \'{print $1}\')',
    '$(echo "a b" | awk \'{print}\')', '$(echo "a b" | awk \'{print $1","$2}\')',
    '$(echo "a b" | awk \'{print "n=" NF}\')', '$(echo "a b" | awk \'{print $5}\')',
    '$(echo "" | awk \'{print NF}\')', '$(echo "" | awk -F, \'{print NF}\')', '$(echo "3 4" | awk \'{print $10}\')',
    "$(awk 'BEGIN{print 1/3}')", "$(awk 'BEGIN{print 100000*3.5}')", "$(awk 'BEGIN{print 1234567.5}')",
    "$(awk 'BEGIN{print 0.1+0.2}')", "$(awk 'BEGIN{print int(7/2)*2}')", "$(awk 'BEGIN{print int(-3.5)}')",
    "$(awk 'BEGIN{print 7%3}')", "$(awk 'BEGIN{print -7%3}')", "$(awk 'BEGIN{print 010}')",
    "$(awk 'BEGIN {print 8 * 1024}')", "$(printf 'a\\nb\\nc' | tail -n 2)", "$(printf 'a\\nb\\nc\\n' | head -2)",
    "$(printf '1\\n2\\n' | paste -sd+ | bc)", "$(printf 'a b\\n' | wc -l)", "$(printf 'a b' | wc -l)",
    "$(printf 'é' | wc -c)", "$(printf 'é' | wc -m)", '$(echo "a/b" | sed \'s/\\//_/g\')',
    '$(echo "a.b.c" | sed \'s/\\.c$//\')', '$(echo "aXb" | sed s/X/,/)', '$(echo "a,b" | sed \'s,a,b,\')',
    '$(echo "ab ab" | sed \'s/^ab/c/g\')', '$(echo "ab ab" | sed \'s/ab$/c/\')',
    '"$(printf \'a\\nb\' | sed \'s/a/x/\' | tr \'\\n\' ,)"', '$(echo "a/b/c" | sed \'s#/#.#g\')',
    '$(echo "a-b" | sed \'s/-b//\')', "$(basename /)", "$(basename a/b/)", "$(basename a.sh a.sh)", "$(dirname /)",
    "$(dirname a)", "$(dirname a//b)", "$(dirname /a)", "$(dirname //a)", "$(dirname '')", "$(dirname a/b/)",
    "$(dirname ./a)",
]  # fmt: skip
# Evaluating these would need more of the command than is followed, or the command refuses them.
UNKNOWN = [
    '$(seq -f "gpu%g" 2)', "$(seq -f %02g 2)", "$(seq 0 0.5 1)", '$(echo "3 > 2" | bc)',
    '$(awk \'BEGIN{printf "%d", 7/2}\')', "$(awk -v a=$n 'BEGIN{print a*2}')",
    '$(echo "8 2" | awk \'{print $1*$2}\')', '$(printf "%s\\n" b a | sort)', '$(printf "%s\\n" b a b | sort -u)',
    '$(printf "%s\\n" 10 9 | sort -n | head -n1)', '$(printf "%x" 255)', '$(echo "a1" | sed \'s/[0-9]//g\')',
    '$(echo "a.b" | sed \'s/./_/\')', '$(echo "abc" | sed -E \'s/(a)(b)/\\2\\1/\')', "$(expr length abc)",
    '$(echo "$n" | grep -o \'[0-9]\')', '$(printf "%d" 010)', '$(printf "%03d" 08)', '$(printf \'%s=\\"%s\\"\' a b)',
    '$(printf "%5s|" a)', '$(printf "%-5d|" 7)', '$(printf "%+d" 7)', '$(printf "%i" 7)', '$(printf "%d" 1_0)',
    '"$(printf \'%s %\')"', '$(echo -e "a\\x41")', "$(expr 1 / 0 || echo no)", '$(echo "2^3^2" | bc)',
    '$(echo "-2^2" | bc)', '$(echo "2^-1" | bc)', '$(echo "scale=2; 7 % 3" | bc)', '$(echo "1/0" | bc)',
    '$(echo "1e3" | bc)', '$(echo "A" | bc)', '$(echo "sqrt(16)" | bc)', '$(echo "x=3; x*2" | bc)',
    '$(echo "5 5" | bc)', '$(echo "1,000" | bc)', '$(echo "3 //2" | bc)', '$(echo "2**3" | bc)',
    '$(echo "(1+2" | bc)', '$(echo "+5" | bc)', "$(seq -w -1 1)", "$(seq -s '\\n' 3)", "$(seq 1 0 3 | head -1)",
    "$(seq 010)", "$(seq 1_0)", "$(seq 2>/dev/null)", '$(echo "a b" | tr ab)', '$(echo "aabb" | tr -ds a b)',
    '$(echo "aébc" | tr é e)', "$(echo 'a,b' | tr '\\054' ' ')", "$(echo 'cab' | tr z-a x)",
    "$(echo 'ab' | tr a '[:digit:]')", "$(echo 'ab' | tr a '')", '$(echo "a,b" | cut -d, -f0)',
    '$(echo "a,b" | cut -d, -f2-1)', '$(echo "a,b" | cut -d \',\' -f 1,2 --output-delimiter=\' \')',
    '$(echo "abc" | cut -b2)', '$(echo "a,b" | cut -d,, -f1)', '$(echo "atb" | awk -Ft \'{print $1}\')',
    '$(echo "a b" | awk -F\'[ ]\' \'{print $2}\')', '$(echo "a b" | awk \'{print $1; print $2}\')',
    '$(echo "a b" | awk \'{print $(NF-1)}\')', '$(echo "a b" | awk \'{print $NF-1}\')',
    '$(echo "a b" | awk \'NR==1{print $1}\')', '$(echo "a b" | awk \'/a/{print $2}\')',
    '$(echo "a b" | awk \'{printf "%s", $1}\')', '$(echo "3 4" | awk \'{print $1+$2}\')',
    '$(echo "3 4" | awk \'{print $1 -1}\')', "$(awk 'BEGIN{print 1e3}')", "$(awk 'BEGIN{print 2^10}')",
    "$(awk 'BEGIN{print 2147483648}')", "$(awk 'BEGIN{print 1 2}')", "$(awk 'BEGIN{print 1,2}')",
    "$(awk 'BEGIN{print 3 > 2}')", '$(awk \'BEGIN{print "x"}\')', "$(printf 'a\\nb\\nc' | head -n -1)",
    "$(printf 'a\\nb\\nc' | tail -n +2)", "$(printf 'a\\nb\\n' | head -c 1)",
    "$(printf 'a\\nb\\n' | paste -sd '\\n')", "$(printf 'a\\nb\\n' | paste -s -d '+' | bc)", "$(printf 'a' | wc)",
    '$(echo "a b" | sed \'s/a/&x/\')', "$(basename -a a/b c/d)", "$(basename a b c 2>/dev/null)",
    "$(dirname a/b c/d)", "$(dirname -z a/b)",
]  # fmt: skip
FILES = {
    "cat and head": ("printf 'b\\na\\n' > f", "$(head -n 1 f)"),
    "tail": ("printf 'b\\na\\n' > f", "$(tail -n1 f)"),
    "cut": ("echo a:b > f", "$(cut -d: -f2 f)"),
    "awk": ("echo 'host slots=8' > f", "$(awk '{print $1}' f)"),
    "awk of a separator": ("echo 'host slots=8' > f", "$(awk -F= '{print $2}' f)"),
    "sed": ("echo 'a b' > f", "$(sed 's/ /,/' f)"),
    "input": ("echo 'a b' > f", "$(wc -w < f)"),
    "pipe from a file": ("seq 3 > f", "$(cat f | paste -sd,)"),
    "loop": ("seq 3 > f", "$(for i in 1 2; do echo $i; done | tr '\\n' ' ')"),
    "here-string": ("true", "$(tr ',' ' ' <<< a,b)"),
}


def _installed(text: str) -> bool:
    return all(shutil.which(name) for name in re.findall(r"\b(?:awk|bc|rev)\b", text))


@needs_bash
@pytest.mark.parametrize("word", FOLLOWED)
def test_output_is_that_of_bash(word: str) -> None:
    if not _installed(word):
        pytest.skip("compares with a command that is not installed")
    script = f"{VARIABLES}run {word} end"
    assert words(script) == in_bash(script)


@needs_bash
@pytest.mark.parametrize("name", FILES)
def test_output_of_files_is_that_of_bash(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, word = FILES[name]
    if not _installed(word):
        pytest.skip("compares with a command that is not installed")
    script = f"{before}\nrun {word} end"
    assert words(script) == in_bash(script)


@pytest.mark.parametrize("word", UNKNOWN)
def test_output_that_is_not_followed_is_named(word: str) -> None:
    (command,) = [one for one in interpret_shell_script(f"{VARIABLES}run {word} end").commands if one[0].text == "run"]
    assert any(MARK.search(part.text) for part in command)


@pytest.mark.parametrize(
    "word",
    [
        "$(echo $NONE | tr , ' ')", "$(echo $NONE | awk '{print $1}')", "$(seq $NONE)", "$(echo $NONE | head -n 1)",
        "$(echo $NONE*2 | bc)", "$(hostname | cut -d. -f1)", "$(echo a$NONE | sed 's/a$//')", "$(dirname $(hostname /a/b))",
        "$(nvidia-smi -L | wc -l)", "$(basename $(hostname))", "$(echo $NONE | rev)", "$(echo $NONE | paste -sd,)",
    ],
)  # fmt: skip
def test_output_of_unknown_input_is_named(word: str) -> None:
    (command,) = [one for one in interpret_shell_script(f"run {word}").commands if one[0].text == "run"]
    assert any(MARK.search(part.text) for part in command)
