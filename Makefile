# The two commands to know: `make demo` and `make test`. Another Python: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv/bin

.NOTPARALLEL:
.PHONY: demo test test-sglang bench format clean demo-env dev-env sglang-env

demo: demo-env
	@$(VENV)/logitscope demo

test: dev-env
	$(VENV)/python -m ruff format --check .
	$(VENV)/python -m ruff check .
	$(VENV)/python -m mypy
	$(VENV)/lint-imports
	$(VENV)/python -m pytest -q --durations=15

test-sglang: sglang-env
	.venv-sglang/bin/python -m pytest -q --durations=10 -o filterwarnings=default -o timeout=900 tests_sglang

bench: dev-env
	$(VENV)/python benchmarks/embedded.py $(ARGS)

format: dev-env
	$(VENV)/python -m ruff format .
	$(VENV)/python -m ruff check --fix .

clean:
	rm -rf .venv .venv-sglang build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

demo-env dev-env sglang-env:
	@command -v "$(PYTHON)" >/dev/null || { echo "logitscope: no $(PYTHON) here. Install Python 3.11 or newer, or name one: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" tools/setup_env.py $(@:-env=)
