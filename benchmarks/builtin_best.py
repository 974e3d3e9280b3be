"""Find the best tree shape of the engine's own worker; with `--mode plugin`, of the plugin's."""

from eagle_plugin.bench.sweep import main

raise SystemExit(main())
