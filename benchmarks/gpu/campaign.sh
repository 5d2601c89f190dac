#!/usr/bin/env bash
# Measure the package on one NVIDIA GPU: correctness, times against limits, and a profile.
#
#   benchmarks/gpu/campaign.sh wheels             # on a machine with network: collect missing packages
#   benchmarks/gpu/campaign.sh setup STEP ...     # on the GPU machine, which may have none
#   DRY=1 benchmarks/gpu/campaign.sh all          # tiny shapes on the CPU, to test the campaign itself
#
# STEP: correctness, first_token, shared_prompt, transfer, profiling, report, or all. A step starts
# no measurement after MINUTES and continues where it stopped when it is run again. Results are
# $OUT/STEP.jsonl and $OUT/report.md.
#
#   OUT             folder of the results (benchmarks/results/gpu)
#   RESUME          folder of earlier results; what they have is not measured again
#   MINUTES         of each step (9)
#   PYTHON          interpreter that has torch with CUDA (python3)
#   PACKAGES        what `wheels` collects, in the versions of constraints.txt (transformers,
#                   pydantic and what they need)
#   PYTHON_VERSION  of the GPU machine (3.12)
#   PLATFORMS       of the GPU machine (manylinux on x86-64)
#   WHEELS          folder of the wheels (.cache/gpu/wheels); `setup` installs all that are there
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT=${OUT:-benchmarks/results/gpu}
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-.cache/gpu/wheels}
SITE=$PWD/.cache/gpu/site
MOST_MIB=64
STEPS=(correctness first_token shared_prompt transfer profiling)

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1
# Contexts of very different lengths follow one another, which fragments a fixed pool.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# The working tree comes first, so that its code is measured; then the wheels, where they exist.
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
  "$PYTHON" benchmarks/gpu/requirements.py || fail "add what is missing to PACKAGES, run \`wheels\`"
  if command -v nvidia-smi > /dev/null; then nvidia-smi; fi
}

step() {
  local options=(--out "$OUT" --minutes "${MINUTES:-9}")
  if [ -n "${RESUME:-}" ]; then options+=(--resume "$RESUME"); fi
  if [ -n "${DRY:-}" ]; then options+=(--dry); fi
  "$PYTHON" benchmarks/gpu "$1" "${options[@]}" || status=$?
}

[ $# -gt 0 ] || fail "expected wheels, setup, all, report or a step: ${STEPS[*]}"
for name in "$@"; do
  [[ " wheels setup all report ${STEPS[*]} " == *" $name "* ]] ||
    fail "unknown step '$name': expected wheels, setup, all, report or one of ${STEPS[*]}"
done
status=0
for name in "$@"; do
  case $name in
    wheels | setup) "$name" ;;
    all) for one in "${STEPS[@]}"; do step "$one"; done ;;
    *) step "$name" ;;
  esac
done
exit "$status"
