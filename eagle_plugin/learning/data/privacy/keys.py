"""Keys and tokens of providers, private keys, and credentials in URLs."""

from __future__ import annotations

import re

from eagle_plugin.learning.data.privacy.patterns import pattern

_STAND_IN = re.compile(
    r"your|example|change.?me|placeholder|dummy|sample|redacted|insert|xxx|\*\*\*|\.\.\.|\$|<|%\(", re.I
)


def _has_digit(match: re.Match[str]) -> bool:
    return any(c.isdigit() for c in match[0])


def _is_real_password(match: re.Match[str]) -> bool:
    """Whether user:password is a real one, and not a stand-in from a manual."""
    password = match["value"].partition(":")[2]
    words = ("password", "pass", "passwd", "pwd", "secret")
    return not _STAND_IN.search(match["value"]) and password.lower() not in words and not password.startswith("{")


_EDGE, _STOP = r"(?<![A-Za-z0-9_])", r"(?![A-Za-z0-9_])"
KEYS = (
    pattern("AWS_KEY", "akia asia", rf"{_EDGE}(?:AKIA|ASIA)[A-Z0-9]{{16}}{_STOP}"),
    pattern("GOOGLE_KEY", "aiza ya29. gocspx-", rf"{_EDGE}(?:AIza[\w-]{{35}}|ya29\.[\w-]{{20,}}|GOCSPX-[\w-]{{20,}})"),
    pattern(
        "AZURE_KEY",
        "accountkey accesskey",
        r"(?:AccountKey=|SharedAccessKey=)(?P<value>[A-Za-z0-9+/%]{40,}={0,2})",
    ),
    pattern(
        "GITHUB_TOKEN", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", rf"{_EDGE}(?:gh[pousr]_\w{{36,}}|github_pat_\w{{50,}})"
    ),
    pattern("GITLAB_TOKEN", "glpat-", rf"{_EDGE}glpat-[\w-]{{20,}}"),
    pattern(
        "SLACK_TOKEN",
        "xox hooks.slack.com",
        rf"{_EDGE}xox[abeoprs]-[A-Za-z0-9-]{{10,}}|hooks\.slack\.com/services/[\w/]{{20,}}",
    ),
    pattern("ANTHROPIC_KEY", "sk-ant-", rf"{_EDGE}sk-ant-[\w-]{{20,}}"),
    pattern("OPENAI_KEY", "sk-", rf"{_EDGE}sk-(?!ant-)(?:proj-|svcacct-|admin-)?[\w-]{{20,}}", _has_digit),
    pattern("HF_TOKEN", "hf_", rf"{_EDGE}hf_[A-Za-z0-9]{{30,}}{_STOP}"),
    pattern("STRIPE_KEY", "_live_ _test_", rf"{_EDGE}[rs]k_(?:live|test)_[A-Za-z0-9]{{16,}}"),
    pattern("PYPI_TOKEN", "pypi-ageichlwas", rf"{_EDGE}pypi-AgEIcHlwaS[\w-]{{50,}}"),
    pattern("NPM_TOKEN", "npm_", rf"{_EDGE}npm_[A-Za-z0-9]{{36}}{_STOP}"),
    pattern("SENDGRID_KEY", "sg.", rf"{_EDGE}SG\.[\w-]{{22}}\.[\w-]{{43}}"),
    # Not after any of its own characters: then each of them is read once, however many begin with eyJ.
    pattern("JWT", "eyj", r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,2000}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]{8,}"),
    pattern(
        "PRIVATE_KEY",
        "private key-----",
        # A key that was cut off has no end line; then the value is its base64 part.
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----"
        r"(?:[^-]*-----END [A-Z0-9 ]*PRIVATE KEY-----|(?:(?:\s|\\n)*[A-Za-z0-9+/=]{16,})*)",
    ),
    pattern(
        "PRIVATE_KEY",
        "putty-user-key-file",
        # The lines of the file: a name with a value, or base64; the last one is the check of the private part.
        r"PuTTY-User-Key-File-\d:[^\n]{0,80}\n(?:(?!Private-MAC|Private-Hash)"
        r"(?:[A-Za-z0-9-]{4,22}:[^\n]{0,200}|[A-Za-z0-9+/=]{4,80})\r?\n)*(?:Private-(?:MAC|Hash):[ \t]*[0-9a-fA-F]{8,}|"
        r"[A-Za-z0-9+/=]{4,80})?",
    ),
    pattern(
        "URL_SIGNATURE",
        "x-amz- x-goog- signature sig=",
        r"""(?:X-(?:Amz|Goog)-(?:Signature|Security-Token)["']?[ \t]*[:=][ \t]*["']?|[?&](?:sig|signature)=|"""
        r"""\bSignature=)(?P<value>[A-Za-z0-9%+/=_.~-]{24,})""",
        _has_digit,
        re.IGNORECASE,
    ),
    pattern(
        "URL_CREDENTIALS",
        "://",
        r"""(?<=://)(?P<value>[^\s/:@"'<>\[\]{}$]{0,64}:[^\s/@"'<>]{1,128})(?=@)""",
        _is_real_password,
    ),
)
