#!/usr/bin/env bash
# Generates the Python code of protos/*.proto:
#   tools/protos.sh [DIRECTORY]   into protos/ under the directory; default: this checkout
#   tools/protos.sh --check       nothing is written; fails if the committed code is out of date
set -euo pipefail
cd "$(dirname "$0")/.."

bin=.venv/bin
generate() {
    "$bin/python" -m grpc_tools.protoc -I. \
        --python_out="$1" --grpc_python_out="$1" --mypy_out="quiet:$1" --mypy_grpc_out="quiet:$1" \
        --plugin=protoc-gen-mypy="$bin/protoc-gen-mypy" \
        --plugin=protoc-gen-mypy_grpc="$bin/protoc-gen-mypy_grpc" \
        protos/*.proto
}

if [ "${1:-}" != --check ]; then
    generate "${1:-.}"
    exit 0
fi
fresh=$(mktemp -d)
trap 'rm -r "$fresh"' EXIT
generate "$fresh"
for file in "$fresh"/protos/*; do
    if ! cmp --silent "$file" "protos/${file##*/}"; then
        echo "shoal: protos/${file##*/} is out of date; run: make protos" >&2
        exit 1
    fi
done
echo "generated code is up to date"
