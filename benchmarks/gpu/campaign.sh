#!/usr/bin/env bash
# Measure the package on an NVIDIA GPU: correctness, times relative to limits, and a profile.
#
#   benchmarks/gpu/campaign.sh wheels             # on a machine with network: download packages
#   benchmarks/gpu/campaign.sh setup first        # on the GPU machine, which may be offline
#   benchmarks/gpu/campaign.sh setup second       # at any later time, on an identical machine
#   DRY=1 benchmarks/gpu/campaign.sh first second # tiny shapes on the CPU, to test the campaign
#
# `first` runs the steps correctness and first_token; `second` runs graphs, kernel_times, profiling,
# shared_prompt and transfer. Each takes at most six minutes with MINUTES=5. You can also run steps
# by name; `report` only writes the report. No measurement starts after MINUTES. To resume, run the
# same command again. Results are $OUT/STEP.jsonl and $OUT/report.md.
#
#   OUT             folder for the results (benchmarks/results/gpu)
#   RESUME          folder with earlier results, which are not measured again
#   MINUTES         time limit per command, without setup (5)
#   PYTHON          interpreter that has torch with CUDA (python3)
#   PACKAGES        packages to download, in the versions of constraints.txt (transformers, pydantic
#                   and their dependencies)
#   PYTHON_VERSION  Python version of the GPU machine (3.12)
#   PLATFORMS       platforms of the GPU machine (manylinux on x86-64)
#   WHEELS          folder for the wheels (.cache/gpu/wheels); `setup` installs all of them
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-benchmarks/results/gpu}
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-.cache/gpu/wheels}
SITE=$PWD/.cache/gpu/site
MOST_MIB=64

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1
# Consecutive contexts have very different lengths, which would fragment a fixed memory pool.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# Put the working tree first, so that its code is measured, then the installed wheels, if any.
export PYTHONPATH="$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}"

fail() {
  echo "campaign.sh: $1" >&2
  exit 2
}

wheels() {
  local platforms=() packages=() package pin platform mib
  for platform in ${PLATFORMS:-manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64}; do
    platforms+=(--platform "$platform")
  done
  local needed="transformers tokenizers pydantic pydantic_core annotated-types typing-inspection"
  for package in ${PACKAGES:-$needed}; do
    pin=$(grep -i "^$package==" constraints.txt) || fail "found no $package in constraints.txt"
    packages+=("$pin")
  done
  rm -rf "$WHEELS"
  mkdir -p "$WHEELS"
  "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --dest "$WHEELS" \
    --implementation cp --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" "${packages[@]}"
  mib=$(du -sm "$WHEELS" | cut -f1)
  [ "$mib" -le "$MOST_MIB" ] || fail "found $mib MiB in $WHEELS, expected at most $MOST_MIB"
  ls -l "$WHEELS"
}

setup() {
  if compgen -G "$WHEELS/*.whl" > /dev/null; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$SITE" \
      "$WHEELS"/*.whl
  fi
  "$PYTHON" benchmarks/gpu/requirements.py || fail "add the missing packages to PACKAGES and run \`wheels\`"
  if command -v nvidia-smi > /dev/null; then nvidia-smi; fi
}

steps() {
  local options=(--out "$OUT" --minutes "${MINUTES:-5}")
  if [ -n "${RESUME:-}" ]; then options+=(--resume "$RESUME"); fi
  if [ -n "${DRY:-}" ]; then options+=(--dry); fi
  "$PYTHON" benchmarks/gpu "$@" "${options[@]}" || status=$?
}

[ $# -gt 0 ] || fail "expected wheels, setup, first, second, report or a step"
status=0
for name in "$@"; do
  case $name in
    wheels | setup) "$name" ;;
    *) steps "$name" ;;
  esac
done
exit "$status"
