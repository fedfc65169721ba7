"""The `headrace` command: one file a subcommand."""
