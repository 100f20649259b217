#!/usr/bin/env bash
# What to run in the first ten minutes with a GPU, most important first; each entry has a limit of its own, in seconds.
#
#   tests/gpu/ten_minutes.sh                  # on one GPU or more; the result is benchmarks/results/gpu.json
#   DEVICE=cpu tests/gpu/ten_minutes.sh       # a dry run in small sizes, which writes build/gpu.json
#
# An entry that fails or takes too long is recorded, and the next one runs. After ten minutes no entry begins.
set -u
cd "$(dirname "$0")/../.."
export DEVICE=${DEVICE:-cuda} PYTHON=${PYTHON:-python}
slower=1 # factor on all limits
if [ "$DEVICE" = cpu ]; then slower=${SLOWER:-4}; fi
total=$((600 * slower))
export OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
devices=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
if [ "$DEVICE" = cpu ]; then devices=2; fi

entry() { # NAME LIMIT COMMAND...: run it with a limit, and record its status and seconds
  local name=$1 limit=$(($2 * slower)) begin=$SECONDS status
  shift 2
  if ((SECONDS >= total)); then
    echo "$name skipped 0" >>"$OUT/entries"
    return
  fi
  echo "[$SECONDS s] $name, at most $limit s" >&2
  timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1
  status=$?
  echo "$name $status $((SECONDS - begin))" >>"$OUT/entries"
  ((status == 0)) || tail -n 3 "$OUT/$name.log" >&2
}

train() { # NAME LIMIT RANKS SETTING...: a short training run
  local name=$1 limit=$2 ranks=$3
  shift 3
  entry "$name" "$limit" "$PYTHON" tests/gpu/ten_minutes.py train "$name" "$ranks" "$@"
}

# Kernels against their references, speeds, memory and time against the plan, parity, checkpoints, and failing ranks.
entry doctor 150 "$PYTHON" -m mega_cli.main doctor --device "$DEVICE" --nproc "$devices" --minutes $((2 * slower)) --json "$OUT/doctor.json" \
  --fit "$OUT/machine.yaml"
# Nine runs of 40 steps: models, precisions and recomputation.
if [ "$DEVICE" = cuda ]; then
  entry smoke 90 "$PYTHON" -m pytest -q tests/gpu/test_smoke.py -k bf16
fi
# Eight layers as wide as 8B: tokens/s, MFU, bytes beside the plan, and a trace of one step.
train wide 50 1 size=wide
train wide-profile 40 1 size=wide train.steps=6 profile.steps=[5,5]
train wide-eager 40 1 size=wide compile=false
train fp8-tensorwise 40 1 size=wide precision=fp8 fp8.recipe=tensorwise
train fp8-rowwise 40 1 size=wide precision=fp8 fp8.recipe=rowwise
train fp8-blockwise 40 1 size=wide precision=fp8 fp8.recipe=blockwise
train varlen 30 1 kernels.attention=varlen data.kind=documents
train softcap-documents 40 1 model.attention_softcap=50.0 data.kind=documents
train deterministic-1 30 1 deterministic=true
train deterministic-2 30 1 deterministic=true
entry deterministic 10 "$PYTHON" tests/gpu/ten_minutes.py same deterministic-1 deterministic-2
if ((devices > 1)); then
  train zero3 40 "$devices" parallel.zero=3
  train tp2-sp 40 "$devices" parallel.tp=2 parallel.sp=true
  train cp2 40 "$devices" parallel.cp=2
  train ep2 40 "$devices" parallel.ep=2 size=experts
fi
"$PYTHON" tests/gpu/ten_minutes.py collect
