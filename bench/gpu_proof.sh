#!/bin/sh
# Tests on a GPU what a CPU can't test: that vLLM sleeps, wakes and takes new weights beside a trainer.
# The model has the shape of Qwen2.5-0.5B and random weights. No network is needed.
#
#   sh bench/gpu_proof.sh [smoke] [rollout] [train] [recompute] [resume]     # default: all, some minutes each
#
# recompute   measures seconds, MFU and memory of an update three times: with nothing recomputed, with all
#             but products and attention recomputed, and with all layers recomputed
# resume      makes two runs of four steps with the PyTorch engine; one is resumed after two steps. Compares
#             their weights bit by bit.
#
# PYTHON     the interpreter that has torch (default python3)
# VLLM_SITE  a folder of unpacked packages with vllm, if the interpreter has no vllm of its own
# SMOKE      a script that tests sleep and wake of vllm alone. It runs first, without and with --compile.
#            The last line of its output must be JSON.
# WORK       scratch for the model and the run, 25 GB (default: a new temporary folder, removed at the end)
# RESULTS    the folder of the JSON lines (default bench/results/DEVICE)
#
# The exit status is 0 only if all that ran was as it must be.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
if [ -n "${VLLM_SITE:-}" ]; then
    [ -d "$VLLM_SITE/vllm" ] || { echo "gpu_proof.sh: no vllm in VLLM_SITE=$VLLM_SITE; needed: the folder that has vllm/" >&2; exit 2; }
    export PYTHONPATH="$VLLM_SITE${PYTHONPATH:+:$PYTHONPATH}"
    export VLLM_USE_FLASHINFER_SAMPLER="${VLLM_USE_FLASHINFER_SAMPLER:-0}" # no flashinfer there
fi
export TORZ_ANY_VLLM=1 # allows vLLM 0.26 too, which loses the memory tagged kv_cache while it sleeps
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
parts=${*:-smoke rollout train recompute resume}
device=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))') || {
    echo "gpu_proof.sh: no GPU that torch can use; needed: one, and a CUDA build of torch" >&2; exit 2; }
results=${RESULTS:-bench/results/$device}
mkdir -p "$results"
if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
fi
[ -f "$WORK/model/train.jsonl" ] || "$PYTHON" -m bench.shape "$WORK/model" --size 0.5b
failed=
for part in $parts; do
    echo "--- $part" >&2
    case $part in
    smoke)
        : > "$results/smoke.jsonl"
        if [ -n "${SMOKE:-}" ]; then
            for how in "" --compile; do
                # shellcheck disable=SC2086
                "$PYTHON" "$SMOKE" $how > "$WORK/smoke.out" || failed="$failed smoke$how"
                tail -n 1 "$WORK/smoke.out" | tee -a "$results/smoke.jsonl"
            done
        fi
        [ -f "$WORK/tiny/train.jsonl" ] || "$PYTHON" -m bench.shape "$WORK/tiny" --size tiny
        "$PYTHON" -m bench.rollout --model "$WORK/tiny" --engine vllm --tokens 64 --rounds 3 > "$WORK/tiny.out" || failed="$failed smoke"
        tee -a "$results/smoke.jsonl" < "$WORK/tiny.out"
        ;;
    rollout)
        "$PYTHON" -m bench.rollout --model "$WORK/model" --engine vllm --prompts 64 --samples 8 --tokens 512 > "$WORK/rollout.out" ||
            failed="$failed rollout"
        tee "$results/rollout.jsonl" < "$WORK/rollout.out"
        ;;
    train)
        rm -rf "$WORK/run"
        "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 1 train.py orz-0.5b-1gpu --model "$WORK/model" \
            --data "$WORK/model/train.jsonl" --steps 20 --prompts_per_step 16 --samples_per_prompt 8 --max_prompt_len 1024 \
            --max_response_len 512 --max_model_len 0 --save_every 0 --go --out "$WORK/run" > "$WORK/train.out" 2>&1 ||
            failed="$failed train"
        tail -n 40 "$WORK/train.out"
        if [ -f "$WORK/run/metrics.jsonl" ]; then
            cp "$WORK/run/metrics.jsonl" "$results/train.jsonl"
            grep 'self-check' "$WORK/train.out" > "$results/train-selfcheck.txt" || true
        fi
        "$PYTHON" -m bench.verdict "$results/train.jsonl" --steps 20 > "$WORK/verdict.out" || failed="$failed verdict"
        tee "$results/verdict.jsonl" < "$WORK/verdict.out"
        ;;
    recompute)
        : > "$results/recompute.jsonl"
        for how in none 0 999; do
            "$PYTHON" -m bench.train --size 0.5b --pack 16384 --segment 1024 --recompute "$how" > "$WORK/recompute.out" ||
                failed="$failed recompute-$how"
            tee -a "$results/recompute.jsonl" < "$WORK/recompute.out"
        done
        ;;
    resume)
        rm -rf "$WORK/whole" "$WORK/resumed"
        four_steps() {
            "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 1 train.py orz-0.5b-1gpu --model "$WORK/model" \
                --data "$WORK/model/train.jsonl" --steps 4 --prompts_per_step 8 --samples_per_prompt 4 --max_prompt_len 1024 \
                --max_response_len 64 --max_model_len 0 --engine torch --save_every 2 --keep 3 --go --deterministic "$@" >> "$WORK/resume.out" 2>&1
        }
        : > "$WORK/resume.out"
        four_steps --out "$WORK/whole" && four_steps --resume "$WORK/whole/ckpt/step_000002" --out "$WORK/resumed" ||
            { failed="$failed resume"; tail -n 20 "$WORK/resume.out"; }
        same=true
        cmp "$WORK/whole/export/policy/model.safetensors" "$WORK/resumed/export/policy/model.safetensors" ||
            { same=false; failed="$failed resume-differs"; }
        echo "{\"bench\": \"resume\", \"bit_identical\": $same}" | tee "$results/resume.jsonl"
        ;;
    *)
        echo "gpu_proof.sh: no part $part; needed: smoke, rollout, train, recompute, resume, or nothing for all" >&2
        exit 2
        ;;
    esac
done
[ -z "$failed" ] || { echo "gpu_proof.sh: failed:$failed" >&2; exit 1; }
