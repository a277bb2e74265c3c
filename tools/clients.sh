#!/usr/bin/env bash
# Installs the client libraries that tests/clients runs against a fleet, apart from .venv:
#   .venv-clients  Python packages of tools/clients/requirements.txt
#   .clients-node  npm packages of tools/clients/package.json
# and what the page's tests need: services/gateway/web/node_modules, of its package-lock.json.
# Does nothing where they are up to date. What cannot be installed is said; its tests are skipped.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
say() { echo "==> $*"; }

# up_to_date DIRECTORY FILE: whether DIRECTORY was made from FILE as it is now.
up_to_date() { cmp --silent "$2" "$1/.made-from"; }

install_python() {
    local wanted=tools/clients/requirements.txt
    up_to_date .venv-clients $wanted && return
    say "installing Python client libraries in .venv-clients"
    "$python" -m venv .venv-clients &&
        .venv-clients/bin/python -m pip --disable-pip-version-check -qq install --no-compile -r $wanted &&
        cp $wanted .venv-clients/.made-from
}

install_node() {
    local wanted=tools/clients/package-lock.json
    up_to_date .clients-node $wanted && return
    command -v npm >/dev/null || { say "no npm: Node's clients are skipped"; return 0; }
    say "installing npm client libraries in .clients-node"
    mkdir -p .clients-node &&
        cp tools/clients/package.json $wanted .clients-node/ &&
        npm ci --prefix .clients-node --silent --no-audit --no-fund &&
        cp $wanted .clients-node/.made-from
}

install_web() {
    local web=services/gateway/web
    up_to_date $web/node_modules $web/package-lock.json && return
    command -v npm >/dev/null || return 0
    say "installing npm packages of the page in $web/node_modules"
    npm ci --prefix $web --silent --no-audit --no-fund &&
        cp $web/package-lock.json $web/node_modules/.made-from
}

install_python || say "could not install the Python client libraries; their tests are skipped"
install_node || say "could not install the npm client libraries; their tests are skipped"
install_web || say "could not install the page's npm packages; two of its tests are skipped"
