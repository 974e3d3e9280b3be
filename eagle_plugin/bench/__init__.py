"""Start a server, load it over HTTP, write the report; this package knows no engine's Python code."""
