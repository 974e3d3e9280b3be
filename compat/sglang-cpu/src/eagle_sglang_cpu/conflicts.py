"""Finds installed distributions that own the import name `sgl_kernel`."""

from importlib.metadata import PackageNotFoundError, version

RIVALS = ("sglang-kernel", "sgl-kernel", "sglang-kernel-cpu", "sgl-kernel-cpu")


def conflict_message() -> str | None:
    """Return one sentence with the fix when a real owner of `sgl_kernel` is installed, else None."""
    for rival in RIVALS:
        try:
            found = version(rival)
        except PackageNotFoundError:
            continue
        return (
            f"eagle-plugin-sglang-cpu provides the import name 'sgl_kernel', but {rival} {found} is installed and owns "
            f"it: run `pip uninstall eagle-plugin-sglang-cpu` to keep {rival}, or `pip uninstall {rival} "
            f"eagle-plugin-sglang-cpu` and install eagle-plugin-sglang-cpu again to serve on a CPU without AMX."
        )
    return None


def refuse_conflicts() -> None:
    """Raise ImportError when a real owner of `sgl_kernel` is installed."""
    message = conflict_message()
    if message:
        raise ImportError(message)
