"""Decisions: rows in, frozen records out. Nothing here prints or imports a view."""
