"""The command line: one file per subcommand. Starts without torch."""
