# Every routine of the project. Each target makes the environment first, once, and again when its pins change.
#
#   make demo    train a small GPT under plain AdamW and ZeRO-1, 2, 3, and compare       ARGS="--steps 100 --dtype bf16"
#   make test    run the tests                                                           ARGS="-k layout"
#   make lint    check style and types
#   make bench   run the microbenchmarks                                                 ARGS="bench/test_update.py"
#   make clean   remove the environment and everything that was built

SHELL := /bin/sh
.ONESHELL:
.SHELLFLAGS := -euc
.PHONY: help demo test lint bench clean

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
TORCH := $(shell grep '^torch==' constraints.txt)
FREE_GIB := 3
ARGS :=

help:
	@sed -n 's/^#   //p' Makefile

demo: $(READY)
	@$(RUN) -m zerokern.examples.train $(ARGS)

test: $(READY)
	@$(RUN) -m pytest $(ARGS)

lint: $(READY)
	@$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(READY)
	@$(RUN) -m pytest bench $(ARGS)

clean:
	@rm -rf $(VENV) build dist zerokern.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	echo "Removed $(VENV), build/ and the caches."

# torch comes first and alone, so that pip takes a wheel of it that is at hand (PIP_FIND_LINKS, PIP_INDEX_URL) before
# anything else can ask for another one.
$(READY): pyproject.toml setup.py constraints.txt
	@fail() { echo "zerokern: $$1" >&2; exit 1; }
	install() { $(RUN) -m pip install --disable-pip-version-check -c constraints.txt "$$@" || fail \
	  "pip could not install $$*; its reason is above (without a network nothing can be fetched). Run make again once it is gone."; }
	if ! $(RUN) -c 'import pip' 2>/dev/null; then
	  python=
	  for name in $${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
	    if $$name -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then python=$$name; break; fi
	  done
	  [ -n "$$python" ] || fail "no Python 3.10 or newer was found; install one (Debian: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3"
	  $$python -c 'import venv, ensurepip' 2>/dev/null || fail "$$python has no venv module; install it (Debian: apt-get install python3-venv)"
	  free=$$(df -Pk . | awk 'NR == 2 { print int($$4 / 1048576) }')
	  [ "$$free" -ge $(FREE_GIB) ] || fail "only $$free GiB of disk are free here and the environment needs $(FREE_GIB) GiB (more where torch brings CUDA); make room first"
	  echo "zerokern: creating $(VENV) with $$($$python --version)"
	  rm -rf $(VENV)
	  $$python -m venv $(VENV) || fail "$$python could not create $(VENV); its reason is above"
	fi
	echo "zerokern: installing $(TORCH) (the longest part)"
	install "$(TORCH)"
	echo "zerokern: installing zerokern and its tools"
	install --quiet --no-build-isolation --editable ".[demo,bench,dev]"
	touch $@
