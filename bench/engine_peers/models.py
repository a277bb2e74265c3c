"""The embedded model in the forms that peers read: a Hugging Face directory, CTranslate2's own."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from services.common.model_files import ModelFiles, resolve
from services.worker.engine.loading import open_source, read_model_config


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """The same weights, dequantized from the GGUF file where a peer cannot read that."""

    gguf: Path
    hf: Path
    ctranslate2: Mapping[str, Path]  # by precision


def prepare(directory: Path, ctranslate2: str) -> ModelPaths:
    """Exports and converts what is not there yet. `ctranslate2` is a Python that has it, or empty.

    Raises CalledProcessError if a conversion fails.
    """
    files, hf = resolve(""), directory / "hf"
    if not (hf / "config.json").exists():
        _export(files, hf)
    converted = {}
    for kind in ("float32", "int8") if ctranslate2 else ():
        converted[kind] = directory / f"ctranslate2-{kind}"
        if not converted[kind].exists():
            _convert(ctranslate2, hf, converted[kind], kind)
    return ModelPaths(files.path, hf, converted)


def _export(files: ModelFiles, directory: Path) -> None:
    """The weights as Shoal reads them; transformers writes no model that it read from GGUF."""
    from transformers import AutoConfig, AutoTokenizer

    given = {"pretrained_model_name_or_path": files.path.parent, "gguf_file": files.path.name}
    source = open_source(files, read_model_config(files))
    tensors = {
        name: source.read(name, 0, 0, source.shape(name)[0]).clone() for name in source.names()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(**given).save_pretrained(directory)
    config = AutoConfig.from_pretrained(**given, architectures=["LlamaForCausalLM"])
    config.save_pretrained(directory)


def _convert(python: str, source: Path, target: Path, kind: str) -> None:
    # CTranslate2's converter takes transformers and torch, which this environment has.
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    code = (
        "import sys; from ctranslate2.converters import TransformersConverter as C;"
        "C(sys.argv[1]).convert(sys.argv[2], quantization=sys.argv[3])"
    )
    arguments = [python, "-c", code, str(source), str(target), kind]
    subprocess.run(arguments, env=environment, check=True)
