"""Names that SGLang imports."""

from sgl_kernel import __getattr__ as __getattr__


def is_arch_support_pdl() -> bool:
    """Whether kernels may start before the one before them has ended."""
    return False
