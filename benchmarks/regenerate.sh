#!/usr/bin/env bash
# Repeat all measurements that the README and the docs show. Results go to benchmarks/results, plots
# to docs/figures. This takes about half an hour on two cores; run nothing else meanwhile.
#
#   bash benchmarks/regenerate.sh [NAME ...]      # names as below; default: all
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
mkdir -p benchmarks/results docs/figures

measure() { # NAME, then a command that prints JSON
  local name=$1
  shift
  if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
  echo "== $name"
  "$@" | python -m json.tool --indent 1 > "benchmarks/results/$name.json"
}
bench() { # NAME, then the arguments of benchmarks/efficiency.py
  local name=$1
  shift
  measure "$name" python benchmarks/efficiency.py "$@"
}

wanted=("$@")
bench ttft-float32 ttft --lengths 512,1024,2048,4096,8192 --repeats 3
bench ttft-long ttft --lengths 1024,4096,8192,16384,32768 --repeats 1
bench ttft-bfloat16 ttft --dtype bfloat16 --lengths 4096,8192 --repeats 1
bench decode decode --lengths 2048,8192 --block-tokens 128,512 --repeats 2
bench shared shared --batch-sizes 32 --lengths 2048 --repeats 1
bench memory memory --lengths 2048,8192
bench memory-256 memory --block-tokens 256 --lengths 2048,8192
bench ingest ingest --lengths 64,128,512 --repeats 3
bench recompute recompute --lengths 1000,2000,4000,8000 --layers 4 --repeats 3
bench passages-latent passages --kind latent --lengths 4096 --layers 2 --repeats 3
bench passages-hybrid passages --kind hybrid --lengths 4096 --layers 4 --repeats 3
bench decode-latent decode --kind latent --lengths 4096 --block-tokens 512 --layers 1 --repeats 1
bench windows windows --lengths 4096 --layers 6 --repeats 3
bench batch batch --batch-sizes 1,2,4 --lengths 4096 --repeats 1
if [ ${#wanted[@]} -eq 0 ] || [[ " ${wanted[*]} " == *" packing "* ]]; then
  python benchmarks/packing.py > benchmarks/results/packing.json
fi
if [ ${#wanted[@]} -eq 0 ] || [[ " ${wanted[*]} " == *" main-thread "* ]]; then
  OMP_NUM_THREADS=$(nproc) python benchmarks/main_thread.py > benchmarks/results/main-thread.json
fi
if [ ${#wanted[@]} -eq 0 ] || [[ " ${wanted[*]} " == *" use-cases "* ]]; then
  # To include the frameworks' models: pip install langchain-huggingface llama-index-llms-huggingface
  python benchmarks/use_cases --output benchmarks/results/use-cases.json
fi
python benchmarks/tables.py
python benchmarks/recovered_gain.py
python benchmarks/plot.py benchmarks/results/ttft-long.json docs/figures/ttft-long.svg
python benchmarks/draw_gain.py
python benchmarks/draw_card.py
python benchmarks/capture_demo.py
python benchmarks/kill_ingestion.py --kills 20 > benchmarks/results/kill-ingestion.json
python benchmarks/many_servers.py > benchmarks/results/many-servers.json
