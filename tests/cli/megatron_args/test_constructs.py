"""Every construct of the shell that launch scripts were seen to use, compared with bash itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.cli.megatron_args.test_shell_words import BASH, in_bash, needs_bash, words

from mega_cli.megatron_args.script_reader import interpret_shell_script
from mega_cli.megatron_args.shell_words import format_unknown_placeholders

PARAMETERS = [
    "${x//_}", "${x//a/b}", "${x/a/b}", "${x//[ab]/-}", "${x/#a/b}", "${x/%b/a}", "${x//\\//_}", "${x//./}", "${x%b}", "${x%.*}",
    "${x%%.*}", "${x##*/}", "${x#*.}", "${x##*=}", "${x#a}", '${x%"$y"}', "${x%$y*}", "${x:0:2}", "${x:1}", "${x: -2}", "${x:1:-1}",
    "${x:$n}", "${x:$n:2}", "${x:n+1}", "${#x}", "${x^^}", "${x,,}", "${x^}", "${!r}", "${!r:-d}", "${x:-$y}", '"${x:+--f "$x"}"',
    "${none:=d} $none", "${none-e}", '${none:-"a  b"}', "${none:-a  b}", "${L[1]}", "${L[-1]}", "${L[n]}", "${L[@]:1}", "${#L[@]}",
    "${L[@]/a/x}", "${L[@]%b}", '"${L[*]}"', "${!L[@]}", "${M[k]}", "${M[$x]:-none}", '"${M[two words]}"', "${#M[@]}", "${L}",
    "$((x1 + n))", "$((n * -2 + 1))", "$[n + 1]", "$((-n + 5))", "$((!n + 1))", "$((n > 1 ? 7 : 8))", "$((2 ** 3 ** 2))",
    "$((10 / 3 * 3))", "$((${#L[@]} * n))", "$((0x1f + 010 + 2#11))", "{1..4}", "a{b,c{d,e}}f", "{01..10..3}", "x{c..a}y", "{a}", "{}",
    '-{"b c",$x}-', "$'a\\tb'", "~+x", "a\\ b", '"a\\$b"', "a=b", "--lr=1e-4", "'$x'", '"$x"\'$x\'$x', "$@", '"$@"', "$#", "$2",
    "${2:-d}", "${3:-d}", '"${@:2}"', "$(echo a  b)", '"$(echo "a  b")"', "`echo $x`", "$(echo $(echo $x)/y)", "$(basename a/b.sh .sh)",
    "$(dirname $(dirname a/b/c))/d", "$(basename $x)", "$(expr 3 + 4)", "$(expr 3 \\* $n)", "$(seq 1 3)",     "$(printf '%s-%d' a 3)", "$(printf '%03d' $n)", "$(echo $x | tr a-z A-Z)", "$(echo a:b:c | cut -d: -f2)",
    "$(echo $x | cut -d '.' -f 1)", "$(echo a_b | sed 's/_/-/')", "$(echo 'a b c' | wc -w)", "$(f a 'b c')", "$(cat file)",
    '"$(cat <<< "$x")"', "$(echo -n a; echo b)", "$(echo -e 'a\\nb')", "${x}_${y}", "$x$y", "$x-$n", "$x/$y", "pre${x}post", "$y.$x",
    '"${x//a/b}"', '"${x/a/b}"', '"${x/#a/b}"', '"${x/%b/a}"', '"${x//[ab]/-}"', '"${x//\\//_}"', '"${x//./}"', '"${x//_}"',
    '"${x%.*}"', '"${x%%.*}"', '"${x##*/}"', '"${x#*.}"', '"${x%$y*}"', '"${x//$y/c d}"', '"${x//a/$y}"', '"${x^^}"', '"${L[@]/a/x}"',
    '"${L[@]%b}"', '"-${x//a/b}-$y"', "\"${x%'b'}\"", '"${x//"a"/b}"', '"${x:0:2}"', '"${x:-a  b}"',
]  # fmt: skip


@needs_bash
@pytest.mark.parametrize("word", PARAMETERS)
def test_words(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for value in ("a.b", "a_b/a.b=c", "/x/aab.txt", "ab"):
        script = (
            f"set -- p 'q r'\nx={value}; y=b; n=2; x1=5; r=x\nL=(ab 'a b' cb)\ndeclare -A M=([k]=v [{value}]=w ['two words']=z)\n"
            f'f() {{ echo "$2-$1"; }}\necho in file > file\nrun {word} end'
        )
        assert words(script) == in_bash(script)


SCRIPTS = {
    "assigning arithmetic": "T=3; ((T+=4)); ((T++)); ((T=T*2)); let T-=1; let 'U = T + 1'; ((A=B=3)); run $T $U $A $B",
    "arithmetic of text": "A=2+3; B=A*2; run $((B)) $((A*2)) $(($A*2))",
    "arithmetic in a test": "N=3; if (( N > 2 && N % 2 )); then run yes; else run no; fi",
    "loop over words": 'S=; for x in a "b c" {1..2} $(seq 3 4); do S="$S,$x"; done; run "$S" $x',
    "loop over an array": 'L=(a "b c"); for x in "${L[@]}"; do N=$((${N:-0} + 1)); done; run $N "$x"',
    "loop that counts": "for ((i = 0; i < 4; i++)); do T=$((${T:-0} + i)); done; run $T $i",
    "loop while": "N=1; while [ $N -lt 20 ]; do N=$((N * 3)); done; until (( N < 5 )); do ((N -= 7)); done; run $N",
    "loop left": "S=; for i in 1 2 3 4; do [ $i = 2 ] && continue; [ $i = 4 ] && break; S=$S$i; done; run $S",
    "loop without end": "while true; do run a; break; done",
    "parsing of arguments": 'set -- --tp 4 --pp 2 x\nwhile [[ $# -gt 0 ]]; do case "$1" in\n --tp) TP=$2; shift 2;;\n'
    ' --pp) PP="$2"; shift; shift;;\n *) REST+=("$1"); shift;; esac; done; run $TP $PP "${REST[@]}" $#',
    "function": 'f() { local A=2 B; B=$1; run "$@" $# $A $B; }\nA=1; f x "y z"; C=$A',
    "function keyword": "function g { A=$1; return; A=3; }\ng 5\nrun $A",
    "local variables come back": "A=1; f() { local A=2; g; }; g() { B=$A; A=3; }; f; run $A $B",
    "arguments of a caller": 'f() { g "$2"; run $1; }; g() { X=$1; }; set -- q; f a b; run2 $X $1',
    "array added to": 'A=(--a 1); A+=(--b "2 3"); A[7]=z; A[0]=y; A[5]=x; run "${A[@]}" ${#A[@]}',
    "text added to": "A=x; A+=y; A+=' z'; run $A \"$A\"",
    "array of lines": "A=(\n  --a 1 # one\n  # --b 2\n  --c\n)\nrun ${A[@]}",
    "dictionary": 'declare -A M; M[a]=1; M["b c"]=2; M+=([d]=3); k=a; run ${M[$k]} "${M[b c]}" ${M[d]} ${M[none]:-0}',
    "dictionary of models": 'declare -A L=(["7b"]="32 4096" [13b]="40 5120"); read -r N H <<< "${L[7b]}"; run $N $H',
    "several assignments": "A=1 B=2\nrun $A $B\nif [ $A = 1 ]; then C=3 D=4\nelse C=5 D=6\nfi\nrun2 $C $D",
    "environment before a command": "A=1\nA=2 true\nA=3 run $A",
    "eval": "A='--x \"a b\" $B'; B=c; CMD='run $A --y'; eval $CMD; eval \"run2 '$B'\"",
    "eval of quotes": 'CMD="run --x \\"a b\\" --y \'c d\'"; eval $CMD',
    "bash -c": 'A=x; export B="y z"; bash -c "run $A \\"$B\\""',
    "bash -c in single quotes": "export CMD='--a 1'; bash -c 'run $CMD $1' name arg",
    "launcher before bash -c": "export A=1; env bash -c 'run $A'",
    "here-document": "A=x\nbash <<EOF\nB=y\nrun $A \\$B '$A'\nEOF\nrun2",
    "here-document, quoted": "export A=x\nbash -s <<'EOF'\nB=y\nrun $A $B\nEOF",
    "here-document, indented": "A=x\nbash <<-EOF\n\trun $A\n\tEOF\nrun2",
    "here-document in a pipe": "cat <<EOF | bash\nrun a\nEOF\nrun2 b",
    "file written and run": 'A=1; cat > t.sh <<EOF\n#!/bin/bash\nrun "\\$1" $A b\nEOF\nchmod +x t.sh; bash t.sh "q r"',
    "file written, then run": "cat > t.sh <<EOF && bash t.sh\nrun a\nEOF\nrun2 b",
    "file written by echo": "echo 'run a' > t.sh; echo 'run2 $B' >> t.sh; export B=b; sh t.sh",
    "file written and sourced": "cat <<'EOF' > t.sh\nA=1\nEOF\nsource ./t.sh\n. ./t.sh\nrun $A",
    "here-document that disturbs nothing": "cat <<EOT > c.json\n{ \"a\": $N, \"b\": {'c': `echo 1`} }\nEOT\nrun a",
    "printf into a variable": "printf -v A '%s-%s' a b; run $A",
    "read": "IFS=, read -r A B <<< 'a,b'; IFS=' ' read -ra L <<< 'x y z'; run $A $B ${#L[@]} ${L[2]}",
    "read lines": "S=; while read -r n v; do S+=$n=$v,; done <<< $'a 1\\nb 2'; run $S",
    "mapfile": "mapfile -t L <<< $'a b\\nc'; run \"${L[@]}\"",
    "joined in a subshell": 'A=(0 1 1); printf -v F "[%s]" "$(IFS=", "; echo "${A[*]}")"; run $F "${A[*]}"',
    "joined by a comma": 'A=(a b); IFS=,; B="${A[*]}"; run "$B" "${A[*]}-${A[*]}"',
    "joined without quotes": "A=(a b); IFS=,; B=${A[*]}; C=x${A[*]}; unset IFS; run $B $C",
    "joined in brackets": 'A=(0 1); run "[$(IFS=,; echo "${A[*]}")]"',
    "joined by a function": 'f() { local IFS="$1"; shift; echo "$*"; }; run $(f , a b c) $(f / a b) "$(f "" a b)"',
    "joined by braces": 'f() { local IFS=:; echo "${*}"; }; run $(f a b c)',
    "joined by nothing": 'A=(1 2); IFS=; B="${A[*]}"; unset IFS; run $B',
    "joined by a blank when IFS is unset": 'A=(1 2); IFS=,; unset IFS; run "${A[*]}"',
    "joined by a newline": "A=(1 2); IFS=$'\\n'; B=\"${A[*]}\"; unset IFS; run \"$B\"",
    "at is joined by blanks": 'A=(a b); IFS=,; B="${A[@]}"; C="$(echo "${A[@]}")"; unset IFS; run "$B" "$C"',
    "arguments are joined": 'set -- x y z; IFS=-; A="$*"; B=$*; unset IFS; run $A $B',
    "joined slices": 'A=(a b c d); B="$(IFS=+; echo "${A[*]:1:2}")"; run $B',
    "joined keys": 'A=(a b c); B="$(IFS=,; echo "${!A[*]}")"; run $B',
    "joined and changed": 'A=(a b c); B="$(IFS=,; echo "${A[*]/#a/x}")"; run $B',
    "joined, and the blanks come back": 'A=(a b); B=$(IFS=,; echo "${A[*]}"); C="x y"; run $B $C',
    "joined by a prefix of a command": 'A=(a b); IFS=, true; run "${A[*]}"',
    "blanks of one's own": "IFS=','; A=a,b,c; L=($A); unset IFS; run ${L[@]} $A",
    "case": 'for m in 7b llama-13b x "a b"; do case $m in 7b|8b) A+=1;; llama*13b) A+=2;; "a b") A+=3;; *) A+=4;; esac; done; run $A',
    "case that falls through": "C=0; case a in a) A=1;& b) B=2;; c) C=3;; esac; run $A $B $C",
    "patterns of a test": 'x=llama-7b; if [[ $x == *7b && $x != "*7b" && ! $x =~ ^g ]]; then A=1; fi; [[ $x =~ ([0-9]+)b$ ]] && B=2; run $A $B',
    "tests joined": 'a=1; [ "$a" = 1 -o "$b" = 2 ] && X=1; [[ ( $a == 2 || $a == 1 ) && -n $a ]] && Y=1; run $X $Y',
    "brackets of a test": 'a=1; b=3; if [ \\( "$a" = 1 -o "$b" = 2 \\) -a "$b" = 3 ]; then X=1; fi; run $X after',
    "numbers in tests": "N=08; [[ 10 -gt 9 ]] && A=1; [ 2 -eq 02 ] && B=1; run $A $B",
    "or": "A=; [ -n \"$A\" ] || A=d; false || B=1; true && C=1 || C=2; run $A $B $C",
    "negation": "if ! false; then A=1; fi; ! true || B=1; run $A $B",
    "subshell": "A=1; (A=2; run $A); run2 $A",
    "pipeline": "A=1; echo x | while read -r A; do run $A; done; run2 $A",
    "group": "{ A=1; run $A; } > /dev/null 2>&1 < /dev/null",
    "exit": "run a; exit 0; run2 b",
    "unset": 'A=1; L=(1 2); unset A L; run "${A:-d}" ${#L[@]} ${L[@]}',
    "export of an expression": "k=A; export $k=1 B=2; export C; declare -i N=2*3; readonly R=r; run $A $B $N $R",
    "indirect names": 'for n in A B; do export "$n=v$n"; done; n=B; run $A ${!n}',
    "continued lines": "run --a \\\n  --b \\\n # c\nrun2 a\\\nb",
    "quoted newlines": 'A="\n  --a 1 \\\n  --b 2\n"\nrun $A',
    "words that touch": "A=1; run --x=\"$A\"'b'$A\\\n --y",
    "placeholders of sed": "A=7; run $(echo 'x BS y' | sed \"s/BS/$A/\" | tr ' ' '_')",
    "background": "run a & wait; run2 b",
    "a command by its path": "A=run; $A x; \"$A\" y",
    "comments": "# run x 'y\nrun a # b\nrun2 'a # b'",
    "dollar signs": 'A=1; run $ "$" a$ "a$" $A$ "$A/$A"',
    "set and shift": 'set -- a b c; shift; run $1 $#; shift 2; run2 $# "$@"',
    "default of a default": "run ${A:-${B:-${C:-d}}} ${A:-$(echo e)} ${A:+x}y",
    "arithmetic of defaults": "run $((${A:-2} * ${B:-3})) $(( ${N:=4} / 2 )) $N",
    "bc": "run $(echo '3 * 4' | bc) $(echo '7 / 2' | bc)",
    "elements unset": 'x=(a b c d); unset "x[1]"; run "${x[@]}" ${#x[@]} ${!x[@]}; n=2; unset x[n] "x[-1]"; run2 "${x[@]}"; A=1; unset "A"; run2 "$A"',
    "elements of a table unset": 'declare -A M=([k]=v [l]=w); unset "M[k]"; run "${M[@]}" ${#M[@]}',
    "elements by their index": 'a=([2]=x [0]=y z); a+=(q); run "${a[@]}" ${!a[@]}; b=([5]=x y); run2 ${!b[@]}',
    "arithmetic that is not reached": 'x=10; ((x>5 ? (y=1) : (y=2))); ((x > 5 || (z=1))); ((x < 5 && (w=1))); run $y ${z:-no} ${w:-no} $((1 ? 2 : x/0)) $((0 && x/0)) $((1 || nothing/0))',
    "arithmetic that is reached": 'x=1; ((x < 5 ? (y=1) : (y=2))); ((x > 5 || (z=1))); ((x < 5 && (w=1))); ((x ? 0 : 1 ? (v=1) : (v=2))); run $y $z $w ${v:-no}',
    "nothing replaced": "x=7b; L=(a 'b c' ''); run ${x/#/--} ${x/%/-hf} ${x/} ${x//} ${x//#/-} \"${L[@]/#/--}\" \"${L[@]/%/.json}\"",
    "nothing replaced at an anchor of quotes": 'x=7b; n=; run ${x/#"$n"/--} ${x/%$n/-hf} ${x/"$n"/y}',
    "commas with nothing between": 'IFS=,; A="a,,b"; B=",a,"; L=($A) M=($B) N=(,); unset IFS; run ${#L[@]} "${L[@]}" ${#M[@]} "${M[@]}" "${N[@]}"',
    "commas and blanks": 'IFS=", "; A="a , b,,c "; L=($A); unset IFS; run ${#L[@]} "${L[@]}"',
    "colons in a loop": 'N=; IFS=:; A="a::b:"; for w in $A; do N="$N[$w]"; done; unset IFS; run "$N"',
    "commas read": 'IFS=, read -ra L <<< "a,,b,"; IFS=, read a b c <<< "1,,3"; run ${#L[@]} "${L[@]}" "$a" "$b" "$c"',
    "commas in words that touch": 'IFS=,; A="a,"; B=",b"; C=,; D=,,; run $A$B x$C"y" x$D"y" $C b $D',
    "colons at ends": 'IFS=:; A=x:; B=y; run $A$B $A"$B" $B$A',
    "nothing between": 'A=""; run $A "$A" x$A ""',
}  # fmt: skip


def run_in_bash(script: str, folder: Path) -> list[list[str]]:
    """The commands `run` and `run2` of a script, with their arguments, in their order."""
    log, stubs = folder / "log", folder / "stubs"
    stubs.mkdir()
    for name in ("run", "run2"):
        (stubs / name).write_text(
            f'#!/bin/sh\nfor w in {name} "$@"; do printf "%s\\0" "$w"; done >> {log}\nprintf "\\n\\0" >> {log}\n'
        )
        (stubs / name).chmod(0o755)
    assert BASH
    environment = {"PATH": f"{stubs}:/usr/bin:/bin"}
    subprocess.run(
        [BASH, "-c", script], cwd=folder, env=environment, capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    records = log.read_text().split("\0\n\0")[:-1] if log.exists() else []
    return [record.split("\0") for record in records]


@needs_bash
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, tmp_path: Path):
    found = [
        [format_unknown_placeholders(word.text) for word in command]
        for command in interpret_shell_script(SCRIPTS[name]).commands
    ]
    ours = [
        command[command.index("run2" if "run2" in command else "run") :]
        for command in found
        if {"run", "run2"} & set(command)
    ]
    assert ours == run_in_bash(SCRIPTS[name], tmp_path)
