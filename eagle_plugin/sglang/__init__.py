"""The adapter to stock SGLang (see ``plugin.TESTED_VERSIONS``)."""
