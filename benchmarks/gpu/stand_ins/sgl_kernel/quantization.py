"""Names that SGLang imports; none is called for a Llama."""

from sgl_kernel import __getattr__ as __getattr__
