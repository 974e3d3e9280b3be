"""Finds installed distributions that own the import names `sgl_kernel` or `torchvision`."""

from importlib.metadata import PackageNotFoundError, version

# distribution -> the import name that it shares with this one
RIVALS = {
    "sglang-kernel": "sgl_kernel",
    "sgl-kernel": "sgl_kernel",
    "sglang-kernel-cpu": "sgl_kernel",
    "sgl-kernel-cpu": "sgl_kernel",
    "torchvision": "torchvision",
}


def conflict_message() -> str | None:
    """Return one sentence with the fix when a real owner of our import names is installed, else None."""
    for rival, name in RIVALS.items():
        try:
            found = version(rival)
        except PackageNotFoundError:
            continue
        return (
            f"eagle-plugin-sglang-cpu provides the import name '{name}', but {rival} {found} is installed and owns it: "
            f"run `pip uninstall eagle-plugin-sglang-cpu` to keep {rival}, or `pip uninstall {rival} "
            f"eagle-plugin-sglang-cpu` and install eagle-plugin-sglang-cpu again to serve on a CPU without AMX."
        )
    return None


def refuse_conflicts() -> None:
    """Raise ImportError when a real owner of our import names is installed."""
    message = conflict_message()
    if message:
        raise ImportError(message)
