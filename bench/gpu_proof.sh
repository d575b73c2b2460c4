#!/bin/sh
# Measures torz on one GPU, in parts. Each part has a time limit. No network is needed.
#
#   sh bench/gpu_proof.sh [PART[:SECONDS] …]      # default: all parts with the limits below, about 40 minutes
#
# PART          default limit and what it does
# numerics      150  bf16 log-probs and gradients of packs, compared with those of transformers in fp32
# demo-grpo     120  the demo with GRPO and vLLM
# demo-ppo      120  the demo with PPO and vLLM
# step-SIZE     150  six GRPO steps of 256 responses of 512 tokens; SIZE is 0.5b (default) or 1.5b.
#                    step-SIZE-ENGINE: with this engine (default: auto)
# trl-SIZE      240  the same work in TRL 1.16 with vLLM in the same process; needs trl and datasets
# rollout-ENGINE 90  tokens a second of vllm (default) or torch inside torz, and of vllm alone; 512 responses of
#                    512 tokens. rollout-ENGINE-N: N responses
# lora-ENGINE   200  the same, four steps, with 7B's shape and adapters (preset gsm8k-7b-1gpu)
# train-HOW      40  seconds, MFU and memory of an update of 0.5B; HOW is how many layers it recomputes: none or 999
# 7b-HOW         60  the same for four layers of 7B
# resume        150  two runs of the demo on the PyTorch engine, one of them resumed; compares weights bit by bit
#
# Every part writes RESULTS/PART.log while it runs. Its JSON lines, or a run's metrics, are in RESULTS/PART.jsonl.
# A run's checkpoints are deleted after its part. WORK never holds more than 40 GB.
# Run nothing else on the GPU: vLLM does not start if another process frees device memory meanwhile.
#
# PYTHON     the interpreter that has torch (default python3)
# VLLM_SITE  a folder of unpacked packages with vllm, if the interpreter has no vllm of its own
# BASE       the demo's base model (default: tools.tiny trains it, one minute)
# WORK       scratch folder (default: a new temporary folder, removed at the end)
# DEVICE     where random weights are drawn (default cuda; cpu on a stub driver, see bench/nullgpu)
# RESULTS    folder of the results (default bench/results/DEVICE)
#
# The exit status is 0 only if all parts ended with status 0 within their limits.
set -u
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3}
if [ -n "${VLLM_SITE:-}" ]; then
    [ -d "$VLLM_SITE/vllm" ] || { echo "gpu_proof.sh: no vllm in VLLM_SITE=$VLLM_SITE; needed: the folder that has vllm/" >&2; exit 2; }
    export PYTHONPATH="$VLLM_SITE${PYTHONPATH:+:$PYTHONPATH}"
    export VLLM_USE_FLASHINFER_SAMPLER="${VLLM_USE_FLASHINFER_SAMPLER:-0}" # no flashinfer there
fi
if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
fi
mkdir -p "$WORK"
export TORZ_ANY_VLLM=1 # allows vLLM 0.26 too, which loses the memory tagged kv_cache while it sleeps
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$WORK/vllm}" TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$WORK/triton}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$WORK/inductor}"
model() { # SIZE: the folder of a model of this size with random weights
    [ -f "$WORK/$1/train.jsonl" ] || "$PYTHON" -m bench.shape "$WORK/$1" --size "$1" --device "${DEVICE:-cuda}" > /dev/null || exit 2
}

base() { # the demo's base model
    BASE=${BASE:-$WORK/base}
    [ -f "$BASE/train.jsonl" ] || "$PYTHON" -m tools.tiny "$BASE" > /dev/null || exit 2
}

demo() { # PRESET and flags: a run of the demo
    preset=$1
    shift
    "$PYTHON" train.py "$preset" --model "$BASE" --data "$BASE/train.jsonl" --eval_data "$BASE/heldout.jsonl" --engine_share 0.3 --go "$@"
}

resume() {
    set -- --engine torch --deterministic --steps 8 --save_every 4 --eval_every 0
    demo tiny-ppo "$@" --out "$WORK/whole" &&
        demo tiny-ppo "$@" --resume "$WORK/whole/ckpt/step_000004" --out "$WORK/resumed" || return
    same=true
    cmp "$WORK/whole/export/policy/model.safetensors" "$WORK/resumed/export/policy/model.safetensors" || same=false
    echo "{\"bench\": \"resume\", \"bit_identical\": $same}"
    $same
}

steps() { # PART SIZE STEPS PRESET and flags: a run with random weights and its checks
    out=$WORK/$1 size=$2 count=$3 preset=$4
    shift 4
    "$PYTHON" train.py "$preset" --model "$WORK/$size" --data "$WORK/$size/train.jsonl" --eval_data --template plain --system_prompt "" --prompts_per_step 32 \
        --samples_per_prompt 8 --max_prompt_len 64 --max_response_len 512 --max_model_len 0 --policy_updates 1 --eval_every 0 \
        --save_every 0 --stop --steps "$count" --reward bench/trl_side.py:digits --go --out "$out" "$@" &&
        "$PYTHON" -m bench.verdict "$out/metrics.jsonl" --steps "$count"
}

run_part() { # PART, without a limit
    name=${1%%-*} how=${1#*-}
    [ "$how" != "$1" ] || how=
    second=${how#*-} how=${how%%-*}
    [ "$second" != "$how" ] || second=
    case $name in
    numerics) "$PYTHON" -m bench.numerics ;;
    demo) demo "tiny-$how" --out "$WORK/$1" ;;
    step) steps "$1" "${how:-0.5b}" 6 orz-7b-grpo --pack_len 16384 --engine_share 0.4 --max_num_seqs 256 --engine "${second:-auto}" ;;
    lora) steps "$1" 7b 4 gsm8k-7b-1gpu --engine "${how:-auto}" ;;
    trl) "$PYTHON" bench/trl_side.py "$WORK/${how:-0.5b}" --steps 4 ;;
    rollout) "$PYTHON" -m bench.rollout --model "$WORK/0.5b" --engine "${how:-vllm}" \
        --prompts $((${second:-512} / 8)) --tokens 512 --rounds 2 ;;
    train) "$PYTHON" -m bench.train --size 0.5b --pack 16384 --segment 1024 --rounds 3 --recompute "${how:-none}" ;;
    7b) "$PYTHON" -m bench.train --size 7b --layers 4 --pack 16384 --segment 4096 --rounds 3 --recompute "${how:-none}" ;;
    resume) resume ;;
    esac
}

if [ "${1:-}" = --one ]; then # below, this script calls itself, so that `timeout` can stop a part
    run_part "$2"
    exit
fi
device=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))') || {
    echo "gpu_proof.sh: no GPU that torch can use; needed: one, and a CUDA build of torch" >&2; exit 2; }
results=${RESULTS:-bench/results/$device}
mkdir -p "$results"
[ $# -gt 0 ] || set -- step step-0.5b-vllm trl train-none train-999 lora numerics demo-grpo demo-ppo resume 7b-none 7b-999 rollout rollout-torch rollout-vllm-64 rollout-torch-64 step-1.5b trl-1.5b
failed=
for word in "$@"; do
    part=${word%%:*}
    case $part in
    numerics) limit=150 ;;
    demo-grpo | demo-ppo) limit=120; base ;;
    resume) limit=150; base ;;
    step | step-0.5b*) limit=150; model 0.5b ;;
    step-1.5b*) limit=150; model 1.5b ;;
    trl | trl-0.5b) limit=240; model 0.5b ;;
    trl-1.5b) limit=240; model 1.5b ;;
    lora | lora-*) limit=200; model 7b ;;
    rollout | rollout-vllm* | rollout-torch*) limit=90; model 0.5b ;;
    train | train-*) limit=40 ;;
    7b | 7b-*) limit=60 ;;
    *) echo "gpu_proof.sh: no part $part; needed: a part of the list at the top of this file" >&2; exit 2 ;;
    esac
    [ "$word" = "$part" ] || limit=${word#*:}
    begin=$(date +%s)
    WORK="$WORK" BASE="${BASE:-}" timeout -s ABRT -k 5 "$limit" sh bench/gpu_proof.sh --one "$part" > "$results/$part.log" 2>&1
    status=$?
    echo "$part: status $status in $(($(date +%s) - begin)) s"
    [ $status = 0 ] || failed="$failed $part"
    grep '^{' "$results/$part.log" > "$results/$part.jsonl"
    [ ! -f "$WORK/$part/metrics.jsonl" ] || cat "$WORK/$part/metrics.jsonl" >> "$results/$part.jsonl"
    grep -E '^\{|^step ' "$results/$part.log" | tail -n 8 | cut -c 1-300
    rm -rf "$WORK/$part/ckpt" "$WORK/$part/export" "$WORK/whole" "$WORK/resumed"
done
[ -z "$failed" ] || { echo "gpu_proof.sh: failed:$failed" >&2; exit 1; }
