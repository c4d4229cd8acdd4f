"""The commands. Each module declares one command, its output and its gates."""
