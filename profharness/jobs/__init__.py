"""Jobs that record runs with worker processes and ingest them."""
