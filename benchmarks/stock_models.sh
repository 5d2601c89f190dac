#!/usr/bin/env bash
# Measure the repairs of a stock model (SmolLM2) on Natural Questions: the tables of
# docs/guides/stock_models.md. What is fitted is fitted to the tune file, and measured on the other.
#
#   bash benchmarks/stock_models.sh TUNE.jsonl.gz DATA.jsonl.gz FOLDER [STEP ...]
#
# Steps, in order, each of which goes on where it was stopped: correction, trained, merge, reader,
# readers, fine-tuned, diagnosis, knobs, measure, main, more-passages, other-text, order, costs,
# tables. On a processor they take many hours; OMP_NUM_THREADS=1 and two steps at a time keep two
# cores busiest.
# The longest fits are kept in benchmarks/fits: copy its folders into FOLDER to measure without them.
set -euo pipefail
benchmarks="$(cd "$(dirname "$0")" && pwd)"
PATH="$benchmarks/../.venv/bin:$PATH"
tune="$(realpath "$1")" data="$(realpath "$2")" folder="$3"
shift 3
steps=("$@")
mkdir -p "$folder" && cd "$folder"

sink=sink=head:4
corrected=$sink+correction=kv/correction.safetensors
trained=$sink+correction=kv-trained/correction.safetensors
read=$trained+reader=reader-trained
five=(--min-passages 5 --max-passages 5)
fit=(adapt --model smollm2 --questions "$tune" "${five[@]}" --held-out 0.07 --answers answers)
questions=(--num-passages 5 --data "$data")

step() { # NAME, then the command
  local name=$1
  shift
  if [ ${#steps[@]} -eq 0 ] || [[ " ${steps[*]} " == *" $name "* ]]; then
    echo "== $name: $*"
    "$@"
  fi
}
fitted() { # FOLDER, then more of the command; what is there is not fitted again
  local output=$1
  shift
  [ -d "$output" ] || blockattn-rag "${fit[@]}" --resume --output "$output" "$@"
}
bench() { python "$benchmarks/stock_models.py" "$@"; }

step correction fitted kv --fit correction --sink head:4 --samples 60 --held-out 0.2
step trained fitted kv-trained --fit correction --sink head:4 --correction kv/correction.safetensors \
  --samples 240 --held-out 0.1 --epochs 2
step merge fitted merge --fit merge --sink head:4 --samples 80 --epochs 2
step reader fitted reader-trained --fit reader --sink head:4 \
  --correction kv-trained/correction.safetensors --samples 480 --epochs 2 --eval-steps 60
step readers fitted reader-none --fit reader --samples 200 --eval-steps 50
step readers fitted reader-sink --fit reader --samples 200 --eval-steps 50 --sink head:4

# The upper bound: block fine-tuning of all weights, in block mode alone, on full mode's own answers.
fine_tuned() { # FOLDER, then more of the command
  local output=$1
  shift
  [ ! -d "$output" ] || return 0
  if [ -d "$output.work" ]; then
    set -- "$@" --resume # with the same samples
  else
    bench answers --data "$tune" --num-passages 5 --limit 300 --output "$output.jsonl"
  fi
  blockattn-rag train --model smollm2 --data "$output.jsonl" --output "$output" "$@"
}
step fine-tuned fine_tuned fine-tuned --modes block --learning-rate 2e-5 --batch-size 8 \
  --warmup-steps 8 --save-steps 15

for after in none head:4; do
  step diagnosis blockattn-rag eval --diagnosis --model smollm2 "${questions[@]}" --limit 60 \
    --sink $after --max-new-tokens 24 --output "diagnosis-${after/:/-}.jsonl"
done

# The knobs are chosen on the tune file: the best of each family stands in the lists below.
knobs=(block $sink sink=head:8 sink=head:16 sink=head:32)
for knob in bias:-0.25 bias:-0.5 bias:-1 scale:0.9 scale:0.9:0.9 ape:0.9:0.9 ape:0.8:0.9; do
  knobs+=("$sink+merge=$knob")
done

free=(
  block block-composite closed-book sink=bos $sink sink=head:16 sink=first-block
  $sink+merge=bias:-0.5 $sink+merge=ape:0.9:0.9 $sink+merge=merge/merge.safetensors
  $corrected $trained model=fine-tuned
)
paid=(
  promote=1 promote=2 $sink+promote=attention:1 $corrected+promote=attention:1
  $trained+promote=attention:1 reader=reader-none $sink+reader=reader-sink $read
  $read+promote=attention:1
)
main=block,closed-book,$sink,$trained,$read
joined() { local IFS=,; echo "$*"; }
all=$(joined "${free[@]}" "${paid[@]}")
step knobs bench measure --num-passages 5 --data "$tune" --limit 60 --output knobs.csv \
  --modes "$(joined "${knobs[@]}")"
step knobs bench table knobs.csv
step measure bench measure "${questions[@]}" --limit 500 --output all.csv \
  --modes "$all,recompute=16" --answered "$main,model=fine-tuned"
step main bench measure "${questions[@]}" --start 500 --limit 500 --output main.csv \
  --modes "$main" --answered "$main"
step more-passages bench measure --data "$data" --num-passages 10 --limit 100 \
  --output ten-passages.csv --modes "$main" --answered "$main"
step other-text python "$benchmarks/docstring_questions.py" docstrings.jsonl --samples 200
step other-text bench measure --data docstrings.jsonl --num-passages 5 --limit 200 \
  --output docstrings.csv --modes "$main" --answered "$main"

# The bundled model before block fine-tuning, on questions of the order of two passages. Its base is
# BUNDLED_BASE, or trained now: 90 minutes of a core, and 20 more for the fine-tuning, not used here.
order() {
  local repository="$benchmarks/.." rows=$1 asking here
  mkdir -p order && cd order
  here=$PWD
  cd "$repository"
  if [ ! -d "$here/base" ] && [ -z "${BUNDLED_BASE:-}" ]; then
    python -m recipes.bundled_model.train --threads 1 --out "$here/bundled"
    BUNDLED_BASE=$here/bundled-base
  fi
  asking=(python -m recipes.bundled_model.questions --passages 2)
  "${asking[@]}" "$here/tune.jsonl" --split train --samples 600 --seed 2
  "${asking[@]}" "$here/data.jsonl" --samples 1000
  cd "$here"
  [ -d base ] || cp -r "$BUNDLED_BASE" base
  fit=(adapt --model base --questions tune.jsonl --min-passages 2 --max-passages 2)
  fit+=(--held-out 0.07 --answers answers)
  # The closed form says that it does not help here, and is where training starts all the same.
  fitted kv --fit correction --sink head:4 --samples 60 --held-out 0.2 || [ -d kv ]
  fitted kv-trained --fit correction --sink head:4 --correction kv/correction.safetensors \
    --samples 558 --epochs 3 --eval-steps 35
  reader=(--fit reader --samples 558 --epochs 2 --eval-steps 70)
  fitted reader-none "${reader[@]}"
  fitted reader-sink "${reader[@]}" --sink head:4
  fitted reader-trained "${reader[@]}" --sink head:4 --correction kv-trained/correction.safetensors
  measured=(--model base --data data.jsonl --num-passages 2)
  bench measure "${measured[@]}" --limit 1000 --output order.csv --modes "$rows" --answered "$rows"
  bench costs "${measured[@]}" --limit 20 --output costs.csv --modes "full,$rows"
  bench table order.csv --costs costs.csv --modes "$rows"
}
order_rows=block,block-composite,closed-book,sink=bos,$sink,$trained,promote=1,reader=reader-none
(step order order "$order_rows,$sink+reader=reader-sink,$read")

step costs bench costs "${questions[@]}" --modes "full,$all" --limit 8 --output costs.csv
step tables bench table all.csv main.csv --costs costs.csv
for name in ten-passages docstrings; do step tables bench table $name.csv; done
