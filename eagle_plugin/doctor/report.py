"""The block that an issue asks for: what `eagle-plugin doctor` finds without a command, and nothing private."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from eagle_plugin.common.url_credentials import without_credentials
from eagle_plugin.doctor.environment import look

HOME = "~"


def report_block() -> str:
    """One Markdown code block; the home folder is ~, and URLs have no credentials."""
    findings, is_active = look()
    rows = [("system", f"{platform.system()} {platform.release()}, {platform.machine()}")]
    rows += [(found.name, found.text) for found in findings]
    rows.append(("plugin", "active" if is_active else "not active in any engine here"))
    width = max(len(name) for name, _ in rows)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
    return f"```\n{_without_home(without_credentials(text))}\n```"


def _without_home(text: str) -> str:
    home = str(Path.home())
    return text.replace(home + os.sep, HOME + os.sep) if len(home) > 1 else text
