"""From host arrays to a device and back, without the host ever waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on a device; on a CPU the tensor shares the array's memory.

    To CUDA it goes through pinned memory of torch's caching host allocator, which gives a
    block out again only when the copies queued from it are done; so the copy may lag behind
    the host by any number of steps.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def pack(
    arrays: Sequence[npt.NDArray[np.int32]], device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Several int32 arrays as (pinned host tensors, device tensors), in one copy."""
    whole = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    sizes = [array.size for array in arrays]
    if device.type == "cpu":
        host = whole
        copy = whole
    else:
        host = whole.pin_memory()
        copy = host.to(device, non_blocking=True)
    shapes = [array.shape for array in arrays]
    return (
        [part.view(shape) for part, shape in zip(torch.split(host, sizes), shapes, strict=True)],
        [part.view(shape) for part, shape in zip(torch.split(copy, sizes), shapes, strict=True)],
    )


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host; from CUDA it is whole only when the current stream has come so far.

    The source must be kept until then.
    """
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Fence:
    """Marks how far a stream has come, for a host that must not overtake it by too much.

    On a CPU, where what is queued is done, it has no effect.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """Marks what is queued on the current stream by now."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Blocks until what was last marked is done."""
        if self._event is not None:
            self._event.synchronize()
