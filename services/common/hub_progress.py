"""Download progress of the model hub, told to a callback instead of drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm.asyncio import tqdm_asyncio  # type: ignore[import-untyped]


def progress_bar_class(progress: Callable[[str, int, int], None] | None) -> type[Any]:
    """A tqdm class that draws nothing and reports bytes to `progress`, if given.

    The hub makes one bar for all bytes of a download, and one that counts files.
    """

    class CallbackBar(tqdm_asyncio):  # type: ignore[misc]
        def display(self, *args: Any, **kwargs: Any) -> None:
            if progress is not None and self.unit == "B":
                progress("downloading", int(self.n), int(self.total or 0))

    return CallbackBar
