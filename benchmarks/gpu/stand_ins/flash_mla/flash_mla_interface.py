"""The class that SGLang imports."""


class FlashMLASchedMeta:
    """FlashMLA's plan."""
