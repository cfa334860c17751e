"""Engines: prompts in, a stream of row blocks out. `registry` opens them by name."""
