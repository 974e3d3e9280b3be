"""The adapter to stock SGLang (see ``compat.TESTED_VERSIONS``)."""
