"""What is decided: rows in, frozen answers out. Nothing here prints, and nothing here imports a view."""
