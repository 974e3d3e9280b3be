"""Verdicts of `eagle-plugin doctor` on many start commands of SGLang from one process.

As a script: prints the verdicts on the commands of a JSON file, a list of lists of flags.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from server_forks import OF_SERVERS, READ_LATE, run_forked

from eagle_plugin.runtime.verdict import Verdict, answer


def sglang_flags(target: Path, head: Path | None, algorithm: str | None = "EAGLE3", *more: str) -> list[str]:
    """Flags of a server on a CPU."""
    flags = ["--model-path", str(target), "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096"]
    flags += ["--speculative-algorithm", algorithm] if algorithm else []
    return [*flags, *(["--speculative-draft-model-path", str(head)] if head else []), *more]


def sglang_verdicts(commands: Sequence[Sequence[str]], **environment: str) -> list[Verdict]:
    """One verdict for each list of flags, with these variables set: by a fork where they are read late enough."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "commands.json"), Path(folder, "log")
        file.write_text(json.dumps(list(map(list, commands))))
        if environment.keys() <= READ_LATE:
            run_forked(Path(__file__), [str(file)], log, **environment)
        else:
            with log.open("wb") as output:
                subprocess.run(
                    [sys.executable, __file__, str(file)],
                    env=os.environ | OF_SERVERS | environment, stdout=output, stderr=output, timeout=300,
                )  # fmt: skip
        text = log.read_text()
    lines = [line for line in text.splitlines() if line.startswith('{"engine"')]
    assert len(lines) == len(commands), text[-3000:]
    return [Verdict.read(line) for line in lines]


def main() -> None:
    from eagle_plugin.sglang import doctor, version

    for command in json.loads(Path(sys.argv[1]).read_text()):
        sys.stdin = io.StringIO(json.dumps(command))
        answer("sglang", version.installed(), "eagle_plugin", doctor.judge)


if __name__ == "__main__":
    main()
