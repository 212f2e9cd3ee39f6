#!/bin/sh
# Builds the kernels with the compiler's sanitizers and runs their tests: sh tests/native/sanitize.sh [PYTHON]
# Addresses and undefined behaviour first, then threads. TensorFlow is not loaded: its own reports would hide others.
set -eu
cd "$(dirname "$0")/../.."
python=$("${1:-python}" -c 'import sys; print(sys.executable)')  # a script in its place would run under the sanitizer
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for kind in address,undefined thread; do
    first=${kind%%,*}
    case $first in address) library=libasan.so ;; *) library=libtsan.so ;; esac
    cc -std=gnu11 -O1 -g -fno-math-errno -fno-omit-frame-pointer -fsanitize="$kind" -fno-sanitize-recover=all -fPIC -shared \
        -o "$work/_kernels.so" tfdpfl/native/kernels.c tfdpfl/native/tensorflow.c -lpthread -ldl -lm
    # Python itself frees little at its end, so that leaks are not looked for.
    ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=halt_on_error=1 LD_PRELOAD="$(cc -print-file-name=$library)" \
        TFDPFL_LIBRARY="$work/_kernels.so" "$python" -m pytest -q -s -p no:cacheprovider -c /dev/null --rootdir . \
        --noconftest --deselect "tests/native/test_kernels.py::test_a_forked_process_computes_the_same" \
        tests/native/test_kernels.py
    echo "$kind: no report"
done
