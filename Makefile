# Two stacks, one package: see requirements/. Everything is installed under $(VENV) by the first command that needs it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ARGS ?=
# Flower and Ray do not run from an environment whose path has a space. It then stands below ENVIRONMENTS, whose path
# must have none, in a folder that is named after a checksum of this one's path.
ENVIRONMENTS ?= $(HOME)/.cache/tfdpfl
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
CHECKSUM = $(shell printf %s "$(CURDIR)" | cksum | cut -d " " -f 1)
VENV := $(if $(findstring $(SPACE),$(CURDIR)),$(ENVIRONMENTS)/$(CHECKSUM),.venv)
UV := $(VENV)/boot/bin/uv
KERAS3 := $(VENV)/keras3/bin/python
TFF := $(VENV)/tff/bin/python
# One process more than there are cores: some tests wait for servers that they start.
WORKERS ?= $(shell "$(PYTHON)" -c "import os; print(len(os.sched_getaffinity(0)) + 1 if hasattr(os, 'sched_getaffinity') else os.cpu_count())")
PYTEST = -q -n $(WORKERS) --dist worksteal
export TF_CPP_MIN_LOG_LEVEL ?= 3
# Where this is set, each of the tests' processes compiles TensorFlow's Python anew: 12 s of CPU time instead of 4.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast lint kernels measure docs bench hospitals lock clean

demo: $(VENV)/keras3.installed
	$(KERAS3) -m tfdpfl demo $(ARGS)

# The threads of a BLAS wait for each other most of the time where matrices are small, and tests have processes enough.
test test-fast: export OPENBLAS_NUM_THREADS ?= 1

test: $(VENV)/keras3.installed $(VENV)/tff.installed
	$(KERAS3) -m pytest $(PYTEST) $(ARGS)
	$(TFF) -m pytest $(PYTEST) $(ARGS)

# Without what is slow; on the second stack what only it has, and where Keras 2 differs most.
SECOND := $(patsubst %,tests/federated/test_%.py,aggregators example_level models personalization \
	processes runtime training) \
	tests/optimizers/test_legacy_keras.py tests/optimizers/test_optimizers.py
test-fast: $(VENV)/keras3.installed $(VENV)/tff.installed
	$(KERAS3) -m pytest $(PYTEST) -m "not slow" $(ARGS)
	$(TFF) -m pytest $(PYTEST) -m "not slow" $(SECOND) $(ARGS)

lint: $(VENV)/keras3.installed
	$(VENV)/keras3/bin/ruff check .
	$(VENV)/keras3/bin/ruff format --check .
	$(VENV)/keras3/bin/mypy

# The kernels in C anew, after their sources changed; `make test` runs the tests of the kernels only where they are built.
kernels: $(VENV)/keras3.installed
	$(KERAS3) setup.py -q build_ext --inplace
	sh tests/native/sanitize.sh $(KERAS3)

# Size and complexity of the package, and in how many files one fact stands.
measure: $(VENV)/keras3.installed
	$(KERAS3) benchmarks/measure.py

# The pages and the API reference, under docs/_build/html.
docs: $(VENV)/docs.installed
	$(VENV)/docs/bin/python -m sphinx -q -W -b html docs docs/_build/html

# A SuperLink and three SuperNodes on this machine, with TLS and keys, train one model; nothing is left behind.
hospitals: $(VENV)/keras3.installed
	$(KERAS3) examples/flower_hospitals/cluster.py $(ARGS)

# The peers have environments of their own (PyTorch's wheel is large). A subset: ARGS="--models mlp --batches 256".
bench: $(VENV)/keras3.installed $(VENV)/tff.installed $(VENV)/opacus.installed $(VENV)/jax.installed
	$(KERAS3) benchmarks/step.py $(ARGS)

$(VENV)/opacus.installed $(VENV)/jax.installed: $(VENV)/%.installed: requirements/%.txt | $(UV)
	$(UV) venv -q --clear --python "$(PYTHON)" $(VENV)/$*
	$(UV) pip install -q --python $(VENV)/$*/bin/python --no-deps -r requirements/$*.txt
	touch $@

# Plain pip installs the same files: pip install --no-deps -r requirements/keras3.txt
$(VENV)/%.installed: requirements/%.txt setup.cfg | $(UV)
	$(UV) venv -q --clear --python "$(PYTHON)" $(VENV)/$*
	$(UV) pip install -q --python $(VENV)/$*/bin/python --no-deps -r requirements/$*.txt
	$(UV) pip install -q --python $(VENV)/$*/bin/python --no-deps -e .
	touch $@

$(UV): | $(VENV)
	"$(PYTHON)" -m venv $(VENV)/boot
	$(VENV)/boot/bin/pip install -q --disable-pip-version-check uv

# So that .venv is where the pages and the benchmarks look for it.
$(VENV):
	mkdir -p $@
	[ $@ = .venv ] || ln -sfn $@ .venv

lock: | $(UV)
	$(UV) pip compile -q --custom-compile-command "make lock" --python-version 3.11 --override requirements/tff-overrides.txt requirements/tff.in requirements/dev.in -o requirements/tff.txt
	$(UV) pip compile -q --custom-compile-command "make lock" --python-version 3.11 requirements/keras3.in requirements/dev.in -o requirements/keras3.txt
	$(UV) pip compile -q --custom-compile-command "make lock" --python-version 3.11 -c requirements/keras3.txt requirements/docs.in -o requirements/docs.txt
	for peer in opacus jax; do \
		$(UV) pip compile -q --custom-compile-command "make lock" --python-version 3.11 requirements/$$peer.in -o requirements/$$peer.txt; \
	done

clean:
	rm -rf $(VENV) .venv build docs/_build docs/_pages *.egg-info
