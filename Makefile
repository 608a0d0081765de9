# Every target makes the environment that it needs; PYTHON=python3.12 makes it with another Python.
PYTHON ?= python3
VENV ?= .venv
SECONDS ?= 600
BIN = $(VENV)/bin
READY = $(VENV)/.installed
BERT = transformers.models.bert.modeling_bert --schedule bert --set ckpt_ratio=0.5

.PHONY: help demo example test test-long test-all test-release versions library fuzz lint check check-all docs generated bench

help:
	@echo 'make demo       rewrite BERT, show the diff, verify it in two processes'
	@echo 'make example    train a small GPT with DeepSpeed, in four processes'
	@echo 'make test       run the tests'
	@echo 'make test-all   run them, and the long ones: further models, world sizes and random pairs'
	@echo 'make test-release  run all there are: models compiled, fresh environments, benchmarks'
	@echo 'make versions   verify what ships on the oldest and newest torch and transformers, some 12 GB'
	@echo 'make library    run what transformers tests of a model, on originals and on rewritten files'
	@echo 'make fuzz       run random models and schedules against their originals, for SECONDS=600'
	@echo 'make check      before a commit: lint, types and tests; of a part by TESTS=tests/rules'
	@echo 'make check-all  before a release: lint, types and all tests'
	@echo 'make docs       build the documentation into site/; a broken link is an error'
	@echo 'make generated  make the outputs in generated/ again'
	@echo 'make bench      measure, and write benchmark/results/'

$(READY): pyproject.toml setup.py constraints.txt
	@echo '== making $(VENV), once; some minutes, most of them for torch'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	@echo '== the diff of a rewritten BERT: tensor parallel, half of its layers checkpointed'
	$(BIN)/slapo-rewrite $(BERT) --diff
	@echo '== written to demo/bert, and run against the original in two processes'
	$(BIN)/slapo-rewrite $(BERT) -o demo/bert --verify --world 2

example: $(READY)
	@echo '== a pipeline of a small GPT, written to examples/train_gpt/parallel'
	$(BIN)/slapo-rewrite examples/train_gpt/gpt.py --schedule examples/train_gpt/schedule.py \
		-o examples/train_gpt/parallel
	@echo '== the original, in one process'
	$(BIN)/python examples/train_gpt/train.py --single
	@echo '== two stages of two tensor-parallel ranks: the same losses'
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 4 examples/train_gpt/train.py --tensor 2

# One file after the other, in their order, goes to whichever of the processes is free. Threads of
# torch would only wait for those of another one. Three for two cores: of a test with ranks or files
# a third is waiting. Hundreds of processes import the package, and some environments keep no bytecode.
PYTEST = $(BIN)/python -m compileall -q slapo_rewrite rules tests benchmark && OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# TESTS="tests/rules tests/test_docs.py" runs these alone.
test: $(READY)
	$(PYTEST) -m 'not (long or release)' $(TESTS)

test-long: $(READY)
	$(PYTEST) -m 'long or release'

# In one run, which imports what takes long and makes what many tests look at once.
test-all: $(READY)
	$(PYTEST) -m 'not release' $(TESTS)

test-release: $(READY)
	$(PYTEST) $(TESTS)

versions: $(READY)
	$(BIN)/python -m tests.versions

library: $(READY)
	$(BIN)/python -m tests.library

fuzz: $(READY)
	$(BIN)/python -m tests.soundness.fuzz --seconds $(SECONDS)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/black --check --quiet slapo_rewrite/runtime
	$(BIN)/mypy

# That `generated/` is current is one of the tests.
check: lint test

check-all: lint test-release

# The variable leaves out what the theme says of a successor of MkDocs.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

generated: $(READY)
	$(BIN)/python -m tests.golden

bench: $(READY)
	$(BIN)/python -m benchmark.readability
	$(BIN)/python -m benchmark.rewrite_time
	$(BIN)/python -m benchmark.traffic
	$(BIN)/python -m benchmark.kernel_facts
	$(BIN)/python -m benchmark.pipeline_simulation
	$(BIN)/python -m benchmark.plan_memory
	$(BIN)/python -m benchmark.plan_time
	$(BIN)/python -m benchmark.checkpoint_budget
	$(BIN)/python -m benchmark.release_memory
	$(BIN)/python -m benchmark.tune_example
	$(BIN)/python -m benchmark.collectives
	$(BIN)/python -m benchmark.loading
	$(BIN)/python -m benchmark.tensor_parallel
	$(BIN)/python -m benchmark.auto_exhaustive
	$(BIN)/python -m benchmark.auto_against_tp_plan
