#!/usr/bin/env bash
# The CPU figures of docs/benchmarks/. Each part takes up to three minutes; let nothing else run.
#
#   benchmarks/cpu.sh [PART ...]       moe moe_bf16 step step_micro memory data; all by default
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
OUT=docs/benchmarks

run() { # NAME ARGUMENTS...
  local name=$1
  shift
  python -m app benchmark "$@" --device cpu --json "$OUT/cpu_$name.json"
}

for part in "${@:-moe moe_bf16 step step_micro memory data}"; do
  for name in $part; do
    case $name in
      moe) OMP_NUM_THREADS=2 run moe moe --repeats 10 ;;
      moe_bf16) OMP_NUM_THREADS=2 run moe_bf16 moe --dtype bf16 --repeats 6 ;;
      # Processor time of one thread: Lightning's and the callbacks' share is a few milliseconds,
      # less than what two threads on a machine with other guests differ by.
      step) OMP_NUM_THREADS=1 run step step --batch_size 8 --repeats 10 --clock cpu ;;
      step_micro) OMP_NUM_THREADS=1 run step_micro step --recipe cifar10_micro --batch_size 128 \
        --repeats 20 --clock cpu ;;
      memory) OMP_NUM_THREADS=2 run memory step --batch_size 16 --repeats 1 --memory --against \
        --methods dynmoe topk2 ;;
      data) OMP_NUM_THREADS=1 run data data ;;
      *) echo "no part $name" >&2 && exit 2 ;;
    esac
  done
done
