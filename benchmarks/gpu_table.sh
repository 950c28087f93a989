#!/usr/bin/env bash
# The 200-epoch table on one GPU, as much of it as fits into a limited time. Repeat it to go on.
#
#   benchmarks/gpu_table.sh OUT
#
# Runs configs/suites/cifar10_table.yaml, most wanted rows first, one after the other. Metrics,
# expert events and configs are copied to OUT every minute, with a report of what is there, so that
# a row cut short still counts. Checkpoints stay in RUNS: the next call goes on from them.
#
# Settings, by environment variables:
#   DATA     folder with CIFAR-10 (data_cache/cifar10)
#   RUNS     folder of the runs, to be kept for the next call (runs)
#   SECONDS_IN_ALL  time for this call (570); afterwards the run under way is stopped and saved
#   RECIPES  plain, strong, or both, in the order to run them (plain)
#   JOBS     rows at a time (1)
#   COMPILE  1 or 0: compiled blocks; auto: only if the correctness check finds them good
#   DEVICE   cuda, or cpu to rehearse
#   TINY     1 for a tiny network and epochs of three steps, to rehearse on a laptop
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=$(mkdir -p "$1" && cd "$1" && pwd)
DATA=${DATA:-data_cache/cifar10}
RUNS=$(mkdir -p "${RUNS:-runs}" && cd "${RUNS:-runs}" && pwd)
SECONDS_IN_ALL=${SECONDS_IN_ALL:-570}
RECIPES=${RECIPES:-plain}
JOBS=${JOBS:-1}
COMPILE=${COMPILE:-auto}
DEVICE=${DEVICE:-cuda}
TINY=${TINY:-0}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

CHECK=()
SIZES=()
FOR_CHECK=75 # seconds
FOR_REPORT=30
if ((TINY)); then
  CHECK=(--tiny)
  SIZES=(--model.network.dim 32 --model.network.depth 2 --model.network.heads 2
    --model.network.moe_blocks '[0, 1]' --data.batch_size 16 --data.eval_batch_size 64
    --trainer.limit_train_batches 3 --trainer.limit_val_batches 1 --trainer.log_every_n_steps 2)
  COMPILE=${COMPILE/auto/0} # the compiler takes minutes on a laptop
fi

[ "$DEVICE" = cuda ] && nvidia-smi > "$OUT/nvidia-smi.txt"

# Once: does this device compute what the CPU does? Its answer is kept for the next call.
if [ ! -f "$RUNS/correctness.json" ]; then
  echo "== correctness ($FOR_CHECK s at most)"
  timeout --kill-after=10 "$FOR_CHECK" python benchmarks/check_device.py --device "$DEVICE" \
    --json "$RUNS/correctness.json" "${CHECK[@]}" > "$OUT/correctness.log" 2>&1 ||
    tail -n 5 "$OUT/correctness.log"
fi
cp "$RUNS/correctness.json" "$OUT" 2> /dev/null
if [ "$COMPILE" = auto ]; then
  COMPILE=$(python - "$RUNS/correctness.json" <<'PYTHON'
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
checks = json.loads(path.read_text()) if path.is_file() else []
print(int(any(row["good"] for row in checks if row["check"] == "training, bfloat16, compiled")))
PYTHON
  )
fi
((COMPILE)) && HARDWARE=(--config configs/hardware/compile.yaml) || HARDWARE=()
echo "== compiled blocks: $COMPILE"

# keep: what there is, as small files; says nothing while no run has begun
keep() {
  local folders=("$RUNS"/cifar10_table*)
  [ -d "${folders[0]}" ] || return 0
  python -m app report "${folders[@]}" --copy "$OUT" --out "$OUT/report" \
    --epochs 10 50 100 150 200 > "$OUT/report.log" 2>&1
}

# table RECIPE: its rows, until they are done or time is up
table() {
  local left=$((SECONDS_IN_ALL - SECONDS - FOR_REPORT)) recipe=() status pid
  ((left < 20)) && return
  [ "$1" = strong ] && recipe=(--name cifar10_table_strong --config configs/recipes/strong.yaml)
  echo "== $1 recipe ($left s at most)"
  # The suite passes SIGTERM on: the runs finish their step and write a checkpoint.
  timeout --signal=TERM --kill-after="$FOR_REPORT" "$left" \
    python -m app suite configs/suites/cifar10_table.yaml --runs "$RUNS" --jobs "$JOBS" \
    "${recipe[@]}" --config configs/hardware/gpu.yaml "${HARDWARE[@]}" -- \
    --trainer.accelerator "$DEVICE" --trainer.devices 1 --trainer.check_val_every_n_epoch 2 \
    --data.root "$DATA" --data.download false "${SIZES[@]}" > "$OUT/suite_$1.log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2> /dev/null; do
    for ((i = 0; i < 60; i++)); do
      kill -0 "$pid" 2> /dev/null || break
      sleep 1
    done
    keep
  done
  wait "$pid"
  status=$?
  echo "$1,$SECONDS,$status" >> "$OUT/parts.csv"
  tail -n 15 "$OUT/suite_$1.log"
}

echo "recipe,seconds since start,status (0: done, 124: time is up)" > "$OUT/parts.csv"
for recipe in $RECIPES; do
  table "$recipe"
done
keep
cat "$OUT/parts.csv" "$OUT/report/report.md" 2> /dev/null | head -n 60
