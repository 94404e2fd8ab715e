#!/bin/sh
# All GPU measurements in order of value, within a time: bench/gpu/all.sh --seconds 480 --out DIR. See bench/gpu/all.py.
cd "$(dirname "$0")/../.." || exit
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/adapters:$PWD/api${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -P -m bench.gpu.all "$@"
