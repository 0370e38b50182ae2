#!/usr/bin/env bash
# What only several GPUs of one host show: splits of all dimensions learn alike, large presets are
# fast, data parallelism scales. Each section ends within ten minutes on eight H200s:
#
#   benchmarks/multi_gpu.sh splits v1_splits speed_2.8B speed_6.8B scaling failures
#
# GPUS=4 takes other numbers of GPUs (2, 4 or 8). DEVICE=cpu runs small models on as many gloo
# processes, to try the script. Results go to $OUT (runs/multi_gpu).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
GPUS=${GPUS:-8} DEVICE=${DEVICE:-cuda} OUT=${OUT:-runs/multi_gpu} PYTHON=${PYTHON:-python3}
STEPS=${STEPS:-50}
export PYTHONPATH=.
source launch/environment.sh
mkdir -p "$OUT"

if [ "$DEVICE" = cpu ]; then
  SIZE=(--hidden-size 32 --num-attention-heads 8 --seq-length 32 --device cpu)
  LONG=(--seq-length 64) QUICK=(--quick)
else
  SIZE=(--hidden-size 1024 --num-attention-heads 16 --seq-length 2048)
  LONG=(--seq-length 65536) QUICK=()
fi
TEXT=(--data-path "$OUT/text_text_document" --split "100,0,0" --tokenizer-type ByteTokenizer
  --log-interval 1 --eval-iters 0 --bf16)
SIZE+=(--num-layers 16 --make-vocab-size-divisible-by 32 --lr 1e-3 --lr-warmup-iters 5
  --train-iters "$STEPS")
TP=--tensor-model-parallel-size PP=--pipeline-model-parallel-size CP=--context-parallel-size
VIRTUAL=--num-virtual-stages-per-pipeline-rank SHARDED=--use-distributed-optimizer

# The repository's own text, byte by byte.
data() {
  [ -e "$OUT/text_text_document.idx" ] && return
  "$PYTHON" - "$OUT/text.jsonl" <<'PY'
import json, pathlib, sys
files = sorted(p for f in ("docs", "megadiff", "tools", "tests") for p in pathlib.Path(f).rglob("*.*"))
with open(sys.argv[1], "w", encoding="utf-8") as out:
    for path in files:
        if path.suffix in (".py", ".md"):
            print(json.dumps({"text": path.read_text(encoding="utf-8")}), file=out)
PY
  "$PYTHON" tools/preprocess_data.py --input "$OUT/text.jsonl" --output-prefix "$OUT/text" \
    --tokenizer-type ByteTokenizer --append-eod --workers 4
}

# run NAME PROCESSES FLAGS: pretrain on the text; metrics go to $OUT/NAME.
run() {
  local name=$1 processes=$2
  shift 2
  rm -rf "${OUT:?}/$name"
  mkdir -p "$OUT/$name"
  "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$processes" \
    pretrain_diff.py "${TEXT[@]}" "$@" --log-dir "$OUT/$name" > "$OUT/$name.out" 2>&1 || { tail -30 "$OUT/$name.out"; return 1; }
}

# splits MIXER: every split against one GPU; what one GPU's own micro-batches differ by is the bar.
splits() {
  local mixer=$1 names=() m=("${SIZE[@]}" --token-mixer "$1" --global-batch-size 16)
  data
  for micro in 4 2 1; do
    run "$mixer/one_$micro" 1 "${m[@]}" --micro-batch-size $micro
  done
  m+=(--micro-batch-size 1)
  split() { # NAME FLAGS
    local name=$1
    shift
    names+=("$name")
    run "$mixer/$name" "$GPUS" "${m[@]}" "$@"
  }
  split "tp$GPUS" $TP "$GPUS" --sequence-parallel
  split "dp$GPUS" $SHARDED
  split "pp${GPUS}_interleaved" $PP "$GPUS" $VIRTUAL $((16 / GPUS))
  if [ "$GPUS" -ge 4 ]; then
    split "tp$((GPUS / 2))_pp2" $TP $((GPUS / 2)) $PP 2 --sequence-parallel
  fi
  if [ "$GPUS" -ge 8 ]; then
    split tp2_pp2_dp2 $TP 2 $PP 2 --sequence-parallel $SHARDED
  fi
  local half=$((STEPS / 2)) saved="$OUT/$mixer/checkpoints"
  rm -rf "$saved"
  split resumed $PP "$GPUS" --save "$saved" --save-interval $half --exit-interval $half
  mv "$OUT/$mixer/resumed/metrics.jsonl" "$OUT/$mixer/first_half.jsonl"
  run "$mixer/resumed" "$GPUS" "${m[@]}" $TP 2 --sequence-parallel $SHARDED --load "$saved"
  cat "$OUT/$mixer/first_half.jsonl" >> "$OUT/$mixer/resumed/metrics.jsonl"
  "$PYTHON" benchmarks/compare_losses.py "$OUT/$mixer" one_4 --spread one_2 one_1 \
    --of "${names[@]}"
  m+=("${LONG[@]}" --global-batch-size 2 --recompute-activations)
  run "$mixer/long_one" 1 "${m[@]}"
  run "$mixer/long_cp$GPUS" "$GPUS" "${m[@]}" $CP "$GPUS"
  "$PYTHON" benchmarks/compare_losses.py "$OUT/$mixer" long_one --of "long_cp$GPUS"
}

# speed PRESET: DIFF V1, V2 and the baseline; of one GPU (where it fits) and of all.
speed() {
  local preset=$1 rows=()
  for seq in 4096 8192; do
    for mixer in diff_v2 diff_v1 standard; do
      local config="configs/$preset/$mixer.yaml" micro=$((16384 / seq))
      [ "$preset" = 6.8B ] && micro=$((8192 / seq))
      local flags="--seq-length $seq --micro-batch-size $micro $SHARDED --global-batch-size"
      if [ "$preset" = 6.8B ]; then
        rows+=(--row "${mixer}_${seq}_tp2" "$GPUS" "$config"
          "$flags $((4 * micro * GPUS / 2)) $TP 2 --sequence-parallel")
      else
        rows+=(--row "${mixer}_${seq}_one" 1 "$config" "$flags $((4 * micro))")
      fi
      rows+=(--row "${mixer}_${seq}_dp$GPUS" "$GPUS" "$config" "$flags $((4 * micro * GPUS))")
    done
  done
  "$PYTHON" benchmarks/parallel.py "${QUICK[@]}" --profile --output "$OUT/speed_$preset.json" "${rows[@]}"
}

# Data parallelism with the same batch on every GPU; what an asynchronous save of 6.8B costs.
scaling() {
  local rows=() n
  for ((n = 1; n <= GPUS; n *= 2)); do
    rows+=(--row "dp$n" "$n" configs/1.4B/diff_v2.yaml
      "--seq-length 4096 --micro-batch-size 4 --global-batch-size $((16 * n)) $SHARDED")
  done
  "$PYTHON" benchmarks/parallel.py "${QUICK[@]}" --profile --output "$OUT/scaling.json" "${rows[@]}"
  data
  local large=(--config configs/6.8B/diff_v2.yaml --seq-length 4096 --micro-batch-size 2)
  [ "$DEVICE" = cpu ] && large=("${SIZE[@]}" --micro-batch-size 1)
  rm -rf "$OUT/saved"
  run async_save "$GPUS" "${large[@]}" $SHARDED --train-iters 12 \
    --global-batch-size $((2 * GPUS)) --save "$OUT/saved" --save-interval 4 --async-save \
    --keep-last-n-checkpoints 1
  grep -E "training waited|elapsed time" "$OUT/async_save.out" | cut -c1-150
  rm -rf "$OUT/saved"
}

# Two ranks, of which one raises or hangs: who says what, and how soon all have ended.
failures() {
  local how begin
  for how in raise block hang; do
    begin=$SECONDS
    "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 2 \
      tests/parallel/failing_run.py $how "$DEVICE" > "$OUT/failing_$how.out" 2>&1 || true
    echo "$how: ended $(date +%s.%N), after $((SECONDS - begin)) s"
    grep -E "failing at|injected|ends because|Timed out|Watchdog caught" "$OUT/failing_$how.out" |
      cut -c1-200 | head -5
  done
}

[ $# -gt 0 ] || { sed -n '2,8p' "$0"; exit 2; }
for section in "$@"; do
  echo "== $section: $GPUS x $DEVICE, $(date -u +%F)"
  case $section in
    splits) splits diff_v2 ;;
    v1_splits) splits diff_v1 ;;
    speed_*) speed "${section#speed_}" ;;
    scaling) scaling ;;
    failures) failures ;;
    *) echo "unknown section $section" >&2; exit 2 ;;
  esac
done
