"""The commands of profharness. Each module declares one command, its output and its gates."""
