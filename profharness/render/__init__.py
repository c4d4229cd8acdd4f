"""Documents of tables and notes, and the renderers that turn them into text."""
