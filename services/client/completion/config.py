"""What `shoal completion` is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.common.config import option


@dataclass(frozen=True)
class CompletionConfig:
    """For which shell."""

    shell: Literal["bash", "zsh", "fish"] = option(
        "bash", "the shell; its name alone will do too", group="completion"
    )
