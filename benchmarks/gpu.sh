#!/usr/bin/env bash
# One command for one GPU, inside ten minutes: correctness, benchmarks, short trainings. Whole
# trainings: gpu_table.sh.
#
#   benchmarks/gpu.sh OUT              writes everything worth keeping into the folder OUT
#
# Settings, by environment variables:
#   DATA     folder with CIFAR-10 (data_cache/cifar10)
#   SECONDS_IN_ALL  time for everything (570); a part begins only if time is left
#   DEVICE   cuda, or cpu to rehearse
#   TINY     1 for sizes that a laptop rehearses in two minutes
#
# Every part has a limit of its own, and a part that fails does not stop the others. OUT/parts.csv
# says what ran, for how long and with which exit status; OUT/summary.md has the figures.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=$(mkdir -p "$1" && cd "$1" && pwd)
DATA=${DATA:-data_cache/cifar10}
SECONDS_IN_ALL=${SECONDS_IN_ALL:-570}
DEVICE=${DEVICE:-cuda}
TINY=${TINY:-0}
RUNS=$(mktemp -d)
trap 'rm -rf "$RUNS"' EXIT
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# part NAME LIMIT COMMAND...: runs a command for LIMIT seconds at most, its output in OUT/NAME.log
echo "part,seconds,status" > "$OUT/parts.csv"
part() {
  local name=$1 limit=$2 begin=$SECONDS left=$((SECONDS_IN_ALL - SECONDS)) status
  shift 2
  ((left < limit)) && limit=$left
  if ((limit < 10)); then
    echo "$name,0,no time left" >> "$OUT/parts.csv"
    return
  fi
  echo "== $name ($limit s at most)"
  timeout --kill-after=10 "$limit" "$@" > "$OUT/$name.log" 2>&1
  status=$?
  echo "$name,$((SECONDS - begin)),$status" >> "$OUT/parts.csv"
  ((status)) && tail -n 5 "$OUT/$name.log"
  python benchmarks/summary.py "$OUT"
}

# train NAME LIMIT MORE...: a real training for LIMIT seconds, its tables in OUT/NAME
train() {
  local name=$1 limit=$2
  shift 2
  mkdir -p "$OUT/$name"
  # Written at every evaluation, so that a run cut short still counts.
  part "$name" "$limit" python benchmarks/train.py "$OUT/$name" "$RUNS" "$@" \
    --name "$name" --data.root "$DATA" --data.download false \
    --trainer.accelerator "$DEVICE" --trainer.enable_progress_bar false \
    --trainer.max_time "$(printf '00:00:%02d:%02d' $(((limit - 15) / 60)) $(((limit - 15) % 60)))"
}

PRECISION=bf16
MOE=(--tokens 65536 --repeats 20)
STEP=(--recipe cifar10_vit_s --batch_size 512 --steps 10 --repeats 10)
FIT=(--config configs/vision/cifar10_dynmoe_weighted_average.yaml)
GPU=(--config configs/hardware/gpu.yaml)
COMPILED=(--config configs/hardware/compile.yaml)
CHECK=()
IMAGES=2048
BACKEND=inductor
if ((TINY)); then
  MOE=(--tokens 256 --dim 32 --hidden 64 --repeats 2)
  STEP=(--recipe digits --batch_size 8 --steps 2 --repeats 2)
  FIT=(--config configs/vision/cifar10_micro_dynmoe_weighted_average.yaml --trainer.limit_train_batches 3 --trainer.limit_val_batches 1)
  COMPILED=()
  GPU=(--data.batch_size 16 --data.eval_batch_size 16 --trainer.max_epochs 2)
  CHECK=(--tiny)
  IMAGES=64
  BACKEND=eager # dynamo alone: on a laptop the compiler takes minutes
fi

[ "$DEVICE" = cuda ] && nvidia-smi > "$OUT/nvidia-smi.txt"
part correctness 75 python benchmarks/check_device.py --device "$DEVICE" --json "$OUT/correctness.json" "${CHECK[@]}"
part moe_bf16 75 python -m app benchmark moe --device "$DEVICE" --dtype "$PRECISION" "${MOE[@]}" --json "$OUT/moe_bf16.json"
train training_compiled 90 "${FIT[@]}" "${GPU[@]}" "${COMPILED[@]}"
part step_compiled 90 python -m app benchmark step --device "$DEVICE" --dtype "$PRECISION" "${STEP[@]}" --methods dynmoe --compile "$BACKEND" --json "$OUT/step_compiled.json"
part step_eager 60 python -m app benchmark step --device "$DEVICE" --dtype "$PRECISION" "${STEP[@]}" --methods dynmoe topk2 --json "$OUT/step_eager.json"
train training_eager 60 "${FIT[@]}" "${GPU[@]}"
train training_topk2 60 --config "configs/vision/cifar10_$( ((TINY)) && echo micro_)topk2.yaml" "${FIT[@]:2}" "${GPU[@]}"
part memory 60 python -m app benchmark step --device "$DEVICE" --dtype "$PRECISION" "${STEP[@]}" --repeats 2 --methods dynmoe --against --memory --json "$OUT/memory.json"
part data 30 python -m app benchmark data --device "$DEVICE" --batch_size 512 --images "$IMAGES" --repeats 3 --json "$OUT/data.json"

cat "$OUT/summary.md"
