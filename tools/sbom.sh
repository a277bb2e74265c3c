#!/usr/bin/env bash
# Lists the Python packages of an environment, with licences and what needs what, as CycloneDX:
#   tools/sbom.sh [PYTHON [FILE]]    default: .venv/bin/python, sbom.cdx.json
# The tool that does it stays out of that environment, in .venv-sbom or what SBOM_VENV names.
set -euo pipefail
python=${1:-.venv/bin/python}
file=${2:-sbom.cdx.json}
venv=${SBOM_VENV:-.venv-sbom}
if [ ! -x "$venv/bin/cyclonedx-py" ]; then
    [ -x "$venv/bin/pip" ] || python3 -m venv "$venv"
    "$venv/bin/pip" install --disable-pip-version-check -qq cyclonedx-bom==7.5.0
fi
# The same packages give the same bytes. The tool's own output needs no check against its schema.
"$venv/bin/cyclonedx-py" environment --no-validate --output-reproducible \
    --pyproject pyproject.toml --mc-type application --output-file "$file" "$python"
