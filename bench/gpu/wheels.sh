#!/bin/sh
# The packages that `slora serve` needs and a bare GPU machine may lack, as wheels for Python 3.12 on Linux x86-64.
# bench/gpu/wheels.sh DIR downloads them. On the machine:
#   python3 -m pip install --no-index --no-deps --no-compile --target SITE DIR/*.whl && export PYTHONPATH=SITE
set -eu
mkdir -p "$1"
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --dest "$1" \
    --implementation cp --python-version 3.12 \
    --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
    fastapi==0.165.0 starlette==1.10.0 opentelemetry-api==1.45.2 uvicorn==0.54.0 python-multipart==0.0.34 \
    pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 annotated-doc==0.0.7 typing-inspection==0.4.5 \
    typing-extensions==4.16.0 sqlalchemy==2.1.9 alembic==1.20.1 mako==1.4.3 structlog==26.1.0 llguidance==1.9.1 \
    blake3==1.0.11 transformers==5.24.0
du -sk "$1"
