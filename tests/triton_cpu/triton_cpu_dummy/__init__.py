"""A Triton backend named "cpu" that compiles nothing; see ``pyproject.toml`` beside it."""
