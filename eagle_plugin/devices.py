"""The device that a user names with --device."""

from __future__ import annotations

from eagle_plugin.errors import UserError


class DeviceError(UserError):
    """A device that is not there."""


def check_device(name: str) -> str:
    """The name itself, if torch can put a tensor there: cpu, cuda, cuda:N.

    Raises:
        DeviceError: torch does not know the device, or this machine does not have it.
    """
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        count = torch.cuda.device_count()
        there = f"one of cuda:0 to cuda:{count - 1}, or cpu" if count else "cpu: this torch finds no GPU here"
        raise DeviceError(f"--device {name} cannot be used ({reason}); give {there}") from error
    return name
