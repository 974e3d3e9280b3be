"""From traffic to a better head in one command (`make loop`); `--help` explains."""

import sys

from eagle_plugin.learning.loop import command

raise SystemExit(command.main(sys.argv[1:]))
