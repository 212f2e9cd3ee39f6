# Two stacks, one package: see requirements/. Everything is installed under .venv by the first command that needs it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ARGS ?=
# Where environments stand if the path of this folder has a space.
ENVIRONMENTS ?= $(HOME)/.cache/tfdpfl
UV := .venv/boot/bin/uv
KERAS3 := .venv/keras3/bin/python
TFF := .venv/tff/bin/python
# One process more than there are cores: some tests wait for servers that they start.
WORKERS ?= $(shell "$(PYTHON)" -c "import os; print(len(os.sched_getaffinity(0)) + 1 if hasattr(os, 'sched_getaffinity') else os.cpu_count())")
PYTEST = -q -n $(WORKERS) --dist worksteal
export TF_CPP_MIN_LOG_LEVEL ?= 3
# Where this is set, each of the tests' processes compiles TensorFlow's Python anew: 12 s of CPU time instead of 4.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast lint measure docs bench hospitals lock clean

demo: .venv/keras3.installed
	$(KERAS3) -m tfdpfl demo $(ARGS)

test: .venv/keras3.installed .venv/tff.installed
	$(KERAS3) -m pytest $(PYTEST) $(ARGS)
	$(TFF) -m pytest $(PYTEST) $(ARGS)

# Without what is slow; on the second stack what only it has, and where Keras 2 differs most.
SECOND := $(patsubst %,tests/federated/test_federated_%.py,data personalization processes runtime training) \
	tests/optimizers/test_legacy_keras.py tests/optimizers/test_optimizers.py
test-fast: .venv/keras3.installed .venv/tff.installed
	$(KERAS3) -m pytest $(PYTEST) -m "not slow" $(ARGS)
	$(TFF) -m pytest $(PYTEST) -m "not slow" $(SECOND) $(ARGS)

lint: .venv/keras3.installed
	.venv/keras3/bin/ruff check .
	.venv/keras3/bin/ruff format --check .
	.venv/keras3/bin/mypy

# Size and complexity of the package, and in how many files one fact stands.
measure: .venv/keras3.installed
	$(KERAS3) benchmarks/measure.py

# The pages and the API reference, under docs/_build/html.
docs: .venv/docs.installed
	.venv/docs/bin/python -m sphinx -q -W -b html docs docs/_build/html

# A SuperLink and three SuperNodes on this machine, with TLS and keys, train one model; nothing is left behind.
hospitals: .venv/keras3.installed
	$(KERAS3) examples/flower_hospitals/cluster.py $(ARGS)

# The peers have environments of their own (PyTorch's wheel is large). A subset: ARGS="--models mlp --batches 256".
bench: .venv/keras3.installed .venv/tff.installed .venv/opacus.installed .venv/jax.installed
	$(KERAS3) benchmarks/step.py $(ARGS)

.venv/opacus.installed .venv/jax.installed: .venv/%.installed: requirements/%.txt | $(UV)
	$(UV) venv -q --clear --python "$(PYTHON)" .venv/$*
	$(UV) pip install -q --python .venv/$*/bin/python --no-deps -r requirements/$*.txt
	touch $@

# Plain pip installs the same files: pip install --no-deps -r requirements/keras3.txt
.venv/%.installed: requirements/%.txt setup.cfg | $(UV)
	$(UV) venv -q --clear --python "$(PYTHON)" .venv/$*
	$(UV) pip install -q --python .venv/$*/bin/python --no-deps -r requirements/$*.txt
	$(UV) pip install -q --python .venv/$*/bin/python --no-deps -e .
	touch $@

$(UV): | .venv
	"$(PYTHON)" -m venv .venv/boot
	.venv/boot/bin/pip install -q --disable-pip-version-check uv

# Flower splits the path of its database's migrations at spaces, so it must not be installed below a folder with one.
.venv:
	case "$(CURDIR)" in \
	*" "*) place="$(ENVIRONMENTS)/$$(printf %s "$(CURDIR)" | cksum | cut -d " " -f 1)"; \
		mkdir -p "$$place" && ln -s "$$place" .venv ;; \
	*) mkdir .venv ;; \
	esac

lock: | $(UV)
	$(UV) pip compile -q --custom-compile-command "make lock" --python-version 3.11 --override requirements/tff-overrides.txt requirements/tff.in requirements/dev.in -o requirements/tff.txt
	$(UV) pip compile -q --custom-compile-command "make lock" --python-version 3.11 requirements/keras3.in requirements/dev.in -o requirements/keras3.txt
	$(UV) pip compile -q --custom-compile-command "make lock" --python-version 3.11 -c requirements/keras3.txt requirements/docs.in -o requirements/docs.txt
	for peer in opacus jax; do \
		$(UV) pip compile -q --custom-compile-command "make lock" --python-version 3.11 requirements/$$peer.in -o requirements/$$peer.txt; \
	done

clean:
	[ ! -L .venv ] || rm -rf "$$(readlink .venv)"
	rm -rf .venv build docs/_build *.egg-info
