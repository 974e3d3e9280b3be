"""`eagle-plugin package`: a folder with a draft head that a stock engine serves with one command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle_plugin.common.command_line import Parser
from eagle_plugin.learning.deploy.package import write_package
from eagle_plugin.learning.deploy.package_files import ENGINES
from eagle_plugin.models import head_folder, target_folder

EPILOG = """\
examples:
  eagle-plugin package TARGET out/head/head --out out/package --engine vllm
  TARGET=/folder/of/the/target out/package/serve.sh

The package has the head, serve.sh, a Dockerfile, kubernetes.yaml, a README.md, package.json with the digests of target
and head, the versions, the lineage and what was measured, and digests.json. Of a head that a job trained, the results
are those of the job. The target is named, not copied; --copy-target copies it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the package and print its folder; returns 0, raises UserError for anything refused."""
    parser = Parser(
        prog="eagle-plugin package",
        description=__doc__,
        epilog=EPILOG,
    )
    parser.add_argument("target", metavar="TARGET", help="folder of the target, or a name of `models list`")
    parser.add_argument("head", metavar="HEAD", help="folder of the draft head, or its name in `models list`")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new folder; a package is replaced")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="sglang", help="that serves it (%(default)s)")
    parser.add_argument(
        "--measured", type=Path, metavar="DIR", help="folder with check.json, eval.json and benchmark/ (the head's job)"
    )
    parser.add_argument("--copy-target", action="store_true", help="copy the target into the package as well")
    options = parser.parse_args(argv)
    target, head = target_folder(options.target), head_folder(options.head)
    write_package(target, head, options.out, options.engine, measured=options.measured, copy_target=options.copy_target)
    print(options.out)
    return 0
