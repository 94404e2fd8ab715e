#!/bin/sh
# All GPU measurements in order of value, within a time: bench/gpu/all.sh --seconds 480 --out DIR. See bench/gpu/all.py.
cd "$(dirname "$0")/../.." || exit
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/adapters:$PWD/api${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export SLORA_COMMIT="${SLORA_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
exec "${PYTHON:-python3}" -P -m bench.gpu.all "$@"
