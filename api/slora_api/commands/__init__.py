"""What the client subcommands do; each module is imported only when it is called."""
