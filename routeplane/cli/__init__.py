"""The command line: thin calls of the library, one file a group of commands. Loads nothing until a command runs."""
