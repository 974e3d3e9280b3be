"""The serving benchmark under load (`make bench`), or with `--trace` load that rises and falls; `--help` explains."""

import sys

from eagle_plugin.bench.serving import command, trace_command

arguments = sys.argv[1:]
if "--trace" in arguments:
    raise SystemExit(trace_command.main([argument for argument in arguments if argument != "--trace"]))
raise SystemExit(command.main(arguments))
