"""The command line: one small file a command; the only place that prints or exits."""
