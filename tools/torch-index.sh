#!/usr/bin/env bash
# Prints the package index to take torch from, or nothing if pip should look where it always does:
# with an NVIDIA driver PyPI's own build, for CUDA, is the right one, and a wheel in a directory
# that pip is configured to search is taken as it is. Elsewhere PyPI's build would bring gigabytes
# of CUDA for nothing, so that is PyTorch's CPU index.
set -euo pipefail

python=${1:-python3}
if [ -e /proc/driver/nvidia/version ]; then
    exit 0
fi
directories=$("$python" -m pip config list 2>/dev/null | sed -n "s/^[^=]*find-links='\(.*\)'$/\1/p" | sed 's/\\n/ /g')
for directory in $directories; do
    if compgen -G "${directory#file://}/torch-2.13.0*cpu*.whl" >/dev/null; then
        exit 0
    fi
done
echo https://download.pytorch.org/whl/cpu
